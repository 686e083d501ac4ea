"""The command line: its numbers are the plan's, and an error is one line and exit code 2."""

import pytest
import torch

import ringattn
from ringattn import Causal, Chunked, Documents, Full, PrefixLM, Window, build_plan
from ringattn.cli import main, parse_mask

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


def test_env_names_versions_and_backends(capsys):
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert torch.__version__ in out
    assert ringattn.__version__ in out
    for name in ringattn.backends():
        for dtype in ("fp32", "bf16"):
            assert any(line.split()[1:4] == [name, "cpu", dtype] for line in out.splitlines())
