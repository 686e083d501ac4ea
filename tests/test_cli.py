"""The command line: its numbers are the plan's, and an error is one line and exit code 2."""

import json

import pytest
import torch

import ringattn
from ringattn import Causal, Chunked, Documents, Full, Network, PrefixLM, Sizes, Window, build_plan
from ringattn.cli import main, parse_mask, parse_network
from ringattn.testing import simulate

PLAN = ["plan", "--seqlen", "1000", "--world-size", "3"]


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("causal", Causal()),
        ("full", Full()),
        ("window:8", Window(8)),
        ("window:8,3", Window(8, 3)),
        ("documents:0,5,9", Documents((0, 5, 9))),
        ("chunked:64", Chunked(64)),
        ("prefix:7", PrefixLM(7)),
    ],
)
def test_masks_by_name(text, mask):
    assert parse_mask(text) == mask


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mask", "triangle"], "--mask is 'triangle'; it must be one of causal, full, window:LEFT[,RIGHT], "),
        (["--mask", "causal:3"], "--mask is 'causal:3'; it must be written causal."),
        (["--mask", "window"], "--mask is 'window'; it must be written window:LEFT[,RIGHT]."),
        (["--mask", "window:a"], "--mask is 'window:a'; it must be written window:LEFT[,RIGHT]."),
        (["--mask", "window:1,2,3"], "--mask is 'window:1,2,3'; it must be written window:LEFT[,RIGHT]."),
        (["--mask", "documents:0,5,3"], "cu_seqlens falls from 5 to 3"),
        (["--mask", "documents:0,5,9"], "is for 9 tokens and the sequence has 1000"),
        (["--layout", "spiral"], "layout is 'spiral'; it must be one of 'contiguous'"),
        (["--world-size", "0"], "--world-size is 0; it must be at least 1."),
        (["--heads", "6", "--kv-heads", "4"], "--heads is 6 and --kv-heads 4; heads must be a multiple"),
        (["--png", "/no/such/folder/plan.png"], "No such file or directory"),
    ],
)
def test_an_error_is_one_line(arguments, message, capsys):
    assert main([*PLAN, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_plan_prints_the_numbers_of_the_plans(capsys):
    assert main([*PLAN, "--mask", "window:100", "--kv-heads", "2", "--head-dim", "16", "--dtype", "fp32"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.replace(",", "").splitlines()]
    plans = [build_plan(Window(100), "zigzag", 1000, 3, rank) for rank in range(3)]
    table = [line for line in lines[1:] if len(line) >= 6 and line[-1].isdigit()]
    expected = [
        (sum(block.area for block in hop.blocks), hop.send_rows, hop.send_rows * 2 * 2 * 16 * 4)
        for plan in plans
        for hop in plan.hops
    ]
    assert [(int(line[-5]), int(line[-2]), int(line[-1])) for line in table] == expected
    forward = sum(plan.bytes(batch=1, kv_heads=2, head_dim=16, dtype=torch.float32) for plan in plans)
    assert sum(bytes_sent for *_, bytes_sent in expected) == forward
    assert ["sent", "all", "ranks", str(forward)] in [line[:4] for line in lines]
    assert ["pairs", "seen", str(sum(plan.area for plan in plans))] in [line[:3] for line in lines]


def test_plan_draws(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    assert main([*PLAN, "--png", str(tmp_path / "plan.png")]) == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert f"wrote {tmp_path / 'plan.png'}" in capsys.readouterr().out


TRACE = ["trace", "--mask", "window:400", "--seqlen", "4096", "--world-size", "4", "--network", "50,5,2,10,20"]


def test_trace_prints_and_writes_the_simulated_step(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    assert main([*TRACE, "--tflops", "100", "--kv-heads", "4", "--out", str(tmp_path / "step")]) == 0
    network, sizes = Network(100e12, 50e9, 5e-6, 2, 10e9, 20e-6), Sizes(32, 4, 128)
    got = simulate(Window(400), "zigzag", 4096, 4, network=network, sizes=sizes)
    lines = [line.split() for line in capsys.readouterr().out.replace(",", "").splitlines()]
    for name in ("forward", "backward"):
        alone = simulate(Window(400), "zigzag", 4096, 4, network=network, sizes=sizes, passes=[name])
        assert [f"{alone.seconds * 1e3:.3f}"] == [line[1] for line in lines if line[:1] == [name]]
    offsets = next([int(x) for x in line[1:]] for line in lines if line[:1] == ["rank"])
    table = {
        (int(r), o): float(x)
        for r, *row in filter(None, lines)
        if r.isdigit()
        for o, x in zip(offsets, row, strict=True)
    }
    exposed = {key: seconds * 1e6 for key, seconds in got.exposed().items()}
    assert table == pytest.approx(exposed | {key: 0 for key in table if key not in exposed}, abs=0.051)
    assert max(table.values()) > 0
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert len([event for event in events if event["ph"] == "X"]) == len(got.spans)
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--network", "50"], "--network is '50', --tflops 400; --network must be GBPS,MICROSECONDS[,NODE_SIZE,"),
        (
            ["--network", "50,5,8"],
            "--network is '50,5,8', --tflops 400; --network must be GBPS,MICROSECONDS[,NODE_SIZE,",
        ),
        (["--network", "0,5"], "(Network: bandwidth_bytes_per_s is 0.0; it must be positive.)"),
        (["--tflops", "-1"], "(Network: flops_per_s is -1000000000000.0; it must be positive.)"),
        (["--batch", "0"], "--batch is 0; it must be at least 1."),
        (["--layout", "spiral"], "layout is 'spiral'; it must be one of 'contiguous'"),
    ],
)
def test_an_error_of_trace_is_one_line(arguments, message, capsys):
    assert main([*TRACE, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_network_by_its_numbers():
    assert parse_network("450,2", 989) == Network(989e12, 450e9, 2e-6)
    assert parse_network("450,2,8,50,5", 400) == Network(400e12, 450e9, 2e-6, 8, 50e9, 5e-6)


def test_env_names_versions_and_backends(capsys):
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert torch.__version__ in out
    assert ringattn.__version__ in out
    for name in ringattn.backends():
        for dtype in ("fp32", "bf16"):
            assert any(line.split()[1:4] == [name, "cpu", dtype] for line in out.splitlines())
