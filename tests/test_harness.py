"""The harness objects to what is wrong, times what is right in turn, and both benches run to their end."""

import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend

from bench import cpu_kernels, kernels, plot
from bench import harness as h
from bench.contenders import autograd, block_kernel, predicate, ring_of_one, sdpa, virtual_ring
from ringattn.kernels import backends
from ringattn.kernels.triton.tiles import choose
from ringattn.masks import Causal, Chunked, Documents, Full, Window
from ringattn.testing import naive_attention, visible

CPU = torch.device("cpu")
LONG = h.SMALL_TOKENS + 44  # only a sample of rows is checked


def case(mask=None, direction="forward", seqlen=48, dtype=torch.float32, **sizes):
    return h.Case("mask", mask or Causal(), seqlen, 8, 6, dtype, direction, **{"heads": 4, "kv_heads": 2} | sizes)


def naive(alter=lambda x: x, mask=None, is_peer=True, name="naive", **arguments):
    """The dense softmax as a contender, wrong where `alter` changes out, or with another mask, scale or softcap."""

    def make(case):
        def attend(qs, ks, vs):
            seen = case.mask if mask is None else mask(case.seqlen)
            out, lse = naive_attention(*qs, *ks, *vs, seen, return_lse=True, **arguments)
            return [alter(out)], lse

        return attend

    return autograd(name, make, is_peer=is_peer)


def refusing(message):
    def prepare(inputs):
        raise NotImplementedError(message)

    return h.Contender("refusing", prepare)


class FakeClock:
    """Calls return the seconds that they are said to take; a call that returns none takes 0.5."""

    name, device = "fake", CPU

    def time(self, call):
        seconds = call()
        return lambda: seconds if isinstance(seconds, float) else 0.5


def returning(*seconds):
    pending = iter(seconds)
    return lambda: next(pending)


# ---- cases


MASKS = {
    "full": Full(),
    "causal": Causal(),
    "window": Window(9),
    "documents": Documents((0, 5, 19, 48)),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_flops_count_visible_pairs(mask):
    pairs = int(visible(mask, 48).sum())
    assert case(mask, batch=3).flops == 2 * 3 * 4 * pairs * (8 + 6)
    assert case(mask, "backward", batch=3).flops == 2 * 3 * 4 * pairs * (3 * 8 + 2 * 6)


def test_bytes_are_those_of_inputs_and_results():
    one = h.Inputs.random(case(batch=2, dtype=torch.bfloat16), CPU)
    tensors = sum(x.nbytes for x in (one.q, one.k, one.v, one.dout))
    lse = 2 * 4 * 48 * 4
    assert one.case.bytes == tensors + lse
    assert dataclasses.replace(one.case, direction="backward").bytes == 2 * tensors + lse


@pytest.mark.parametrize(
    ("mask", "small"),
    [
        (Full(), Full()),
        (Causal(), Causal()),
        (Window(64), Window(16)),
        (Window(3), Window(1)),
        (Documents((0, 2, 3, 512, 1024)), Documents((0, 128, 256))),
    ],
)
def test_a_mask_shrinks_with_its_sequence(mask, small):
    assert dataclasses.replace(case(mask), seqlen=1024).small() == dataclasses.replace(case(small), seqlen=256)


def test_a_mask_that_does_not_shrink_is_refused():
    with pytest.raises(
        ValueError, match=r"shrink: mask is Chunked\(size=4.*full, causal, a causal window or documents"
    ):
        h.shrink(Chunked(4), 64, 32)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_dense_masks_and_predicates_are_the_mask(mask):
    want = visible(mask, 48)
    torch.testing.assert_close(h.dense_mask(case(mask), CPU), want)
    rows = torch.tensor([0, 7, 47])
    torch.testing.assert_close(h.dense_mask(case(mask), CPU, rows), want[rows])
    if not isinstance(mask, Full):
        q, k = torch.arange(48)[:, None], torch.arange(48)
        torch.testing.assert_close(predicate(mask, 48, CPU)(0, 0, q, k), want)


# ---- checks

RIGHT = {
    "ring of one": ring_of_one("x", "reference"),
    "block kernel": block_kernel("x", backends()["reference"]),
    "virtual ring": virtual_ring("x", "reference", 3),
    "sdpa": sdpa("x", SDPBackend.MATH),
}


def lower(diagonal):
    return lambda n: torch.ones(n, n, dtype=torch.bool).tril(diagonal)


WRONG = {
    "one key too many": naive(mask=lower(1)),
    "one key too few": naive(mask=lambda n: lower(0)(n).index_fill(1, torch.tensor(0), False)),
    "scale": naive(softmax_scale=0.36),
    "softcap": naive(softcap=20.0),
    "last row": naive(lambda out: torch.cat([out[:, :-1], out[:, -1:] * 1.001], 1)),
}


@pytest.mark.parametrize("seqlen", [48, LONG])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("contender", RIGHT.values(), ids=RIGHT)
def test_a_right_contender_passes(contender, direction, seqlen):
    for mask in (Causal(), Window(9)):
        errors = h.Oracle(case(mask, direction, seqlen), CPU).check(contender)
        assert set(errors) >= ({"out"} if direction == "forward" else {"dq", "dk", "dv"})


@pytest.mark.parametrize("seqlen", [48, LONG])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("contender", WRONG.values(), ids=WRONG)
def test_a_wrong_contender_is_not_right(contender, direction, seqlen):
    with pytest.raises(AssertionError, match=r"max error .* the bound is"):
        h.Oracle(case(direction=direction, seqlen=seqlen), CPU).check(contender)


def test_the_lse_is_checked():
    def make(case):
        return lambda qs, ks, vs: ([naive_attention(*qs, *ks, *vs, case.mask)], torch.zeros(1, 4, 48))

    with pytest.raises(AssertionError, match="lse: max error"):
        h.Oracle(case(), CPU).check(autograd("no lse", make))


def test_the_rows_checked_hold_both_ends():
    assert h.sampled_rows(48).tolist() == list(range(48))
    rows = h.sampled_rows(5000).tolist()
    assert rows == sorted(set(rows))
    assert (rows[0], rows[-1], len(rows)) == (0, 4999, h.SAMPLED_ROWS)


def test_who_cannot_run_or_is_wrong_is_a_row_with_the_reason():
    right_at_small_sizes = naive(mask=lambda n: lower(0 if n <= h.SMALL_TOKENS else 1)(n))
    contenders = [naive(softcap=5.0), refusing("no such thing\nhere"), right_at_small_sizes, naive()]
    rows = h.measure([(case(seqlen=LONG), contender) for contender in contenders], FakeClock(), 3)
    assert [row.reason.partition(" at ")[0].rsplit(" ", 1)[0] for row in rows[::2]] == ["wrong: out: max error"] * 2
    assert rows[1].reason == "NotImplementedError: no such thing"
    assert [row.median_ms for row in rows] == [None, None, None, 500.0]
    assert rows[3].error_out is not None


def test_nobody_can_run():
    assert [row.reason for row in h.measure([(case(), refusing("never"))], FakeClock())] == [
        "NotImplementedError: never"
    ]


def test_who_takes_too_long_is_a_row_with_the_reason():
    slow = h.Contender("slow", lambda inputs: h.Run(lambda: 31.0, lambda _: {}))
    (row,) = h.measure([(case(), slow)], FakeClock(), 3)
    assert (row.reason, row.median_ms) == ("TimeoutError: one call took 31 s; at most 30 s are timed", None)


# ---- timing


def test_calls_take_turns_and_each_round_starts_one_further_on():
    order = []

    def call(name, seconds):
        return lambda: order.append(name) or seconds

    seconds = h.interleave([call("a", 1.0), call("b", 2.0), call("c", 3.0)], FakeClock(), rounds=4)
    assert "".join(order) == "abcbcacababc"
    assert seconds == [[1.0] * 4, [2.0] * 4, [3.0] * 4]


def test_no_round_starts_beyond_the_budget_but_for_the_first():
    assert h.interleave([lambda: 1.0], FakeClock(), rounds=9, budget_s=0.0) == [[1.0] * h.MIN_ROUNDS]


def test_a_cpu_clock_measures_its_own_call():
    clock = h.CpuClock()
    long, short = clock.time(lambda: sum(range(3_000_000))), clock.time(lambda: None)
    assert clock.name == "cpu time"
    assert 0.0 <= short() < 0.01 < long()


def test_figures_of_a_row():
    one, other = case(), case(Full())
    rows = [
        h.blank_row(case, naive(is_peer=is_peer), h.conditions(FakeClock()))
        for case, is_peer in [(one, False), (one, True), (one, True), (other, False), (one, True)]
    ]
    rows[2] = dataclasses.replace(rows[2], reason="NotImplementedError: no")
    calls = [returning(1.0, 4.0, 2.0, 3.0, 5.0), returning(4.0, 6.0, 5.0, 9.0, 5.0), lambda: 2.5, lambda: 50.0]
    cases = [one, one, one, other, one]
    own, peer, refused, alone, slow = h.timed(rows, cases, calls, FakeClock(), 5, 100.0)
    assert (own.rounds, own.median_ms, own.p20_ms, own.p80_ms) == (5, 3000.0, pytest.approx(1800), pytest.approx(4200))
    assert refused == rows[2]
    # 4/1, 6/4, 5/2, 9/3, 5/5: paired by round, not the ratio of medians
    assert (own.ratio, own.best_peer, peer.ratio) == (2.5, "naive", 1.0)
    assert slow.ratio == pytest.approx(0.1)
    assert (alone.ratio, alone.best_peer) == (None, "")
    assert own.gflop == one.flops / 1e9
    assert own.tflops == pytest.approx(one.flops / 3e12)
    assert own.matmul_tflops == pytest.approx(2 * 1024**3 / 0.5e12)  # the product takes the fake half second too
    assert own.arithmetic_floor_ms == pytest.approx(500 * one.flops / (2 * 1024**3))
    assert own.bytes_floor_ms == pytest.approx(500 * one.bytes / (2 << 26))
    assert alone.gflop == other.flops / 1e9


# ---- CSV, tables, pictures


def rows_of_every_kind():
    contenders = [naive(), naive(name="capped", softcap=5.0), refusing('a, "b"')]
    return h.measure([(case(), contender) for contender in contenders], FakeClock(), 3)


def test_rows_come_back_from_csv(tmp_path):
    path, rows = tmp_path / "new" / "rows.csv", rows_of_every_kind()
    h.append(path, rows[:1])
    h.append(path, rows[1:])
    for row, again in zip(rows, h.read(path), strict=True):
        for field, value in dataclasses.asdict(row).items():
            near = pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
            assert (field, getattr(again, field)) == (field, near)
    assert path.read_text().count("contender") == 1


def test_a_table_has_every_figure_and_every_reason():
    rows = rows_of_every_kind()
    text = plot.table(rows)
    assert f"\n| {rows[0].tflops * 1e3:.3g} (1.00x) | - | - |" in text
    assert '\n* refusing, 1 cases: NotImplementedError: a, "b"' in text
    assert "\n* capped, 1 cases: wrong: out: max error" in text


# ---- the benches


def test_the_kernel_bench_runs_to_its_end(tmp_path, capsys):
    out = tmp_path / "kernels.csv"
    assert kernels.main(["--smoke", "--rounds", "1", "--out", str(out)]) == 0
    rows = h.read(out)
    seen = {(row.contender, row.mask, row.direction, row.kv_heads) for row in rows}
    assert {mask for _, mask, _, _ in seen} == {"causal", "full", "window 16", "documents"}
    for mask, direction, kv_heads in {key[1:] for key in seen}:
        assert {"ringattn", "ringattn kernels", "cpu kernels", "sdpa math"} <= {
            key[0] for key in seen if key[1:] == (mask, direction, kv_heads)
        }
    assert sum(name == "ringattn, ring of 8" for name, *_ in seen) == 4  # causal; two directions, with and without GQA
    assert not [row for row in rows if row.reason and row.contender != "cpu kernels"]
    assert f"{len(rows)} rows in {out}" in capsys.readouterr().out


def test_tuning_runs_to_its_end(tmp_path, capsys):
    table = dict(kernels.TILES)
    assert kernels.main(["--smoke", "--tune", "--rounds", "1", "--out", str(tmp_path / "tune.csv")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[-4:-1]] == [
        "forward (forward) D 24/16",
        "dkv (backward) D 24/16",
        "dq (backward) D 24/16",
    ]
    assert table == kernels.TILES


def test_tuning_puts_the_candidate_into_the_table():
    seen, key, tile = [], ("sm_90", 16, 128, 128), kernels.Tile(64, 32, 4, 3)

    def look(*_):
        seen.append(choose("dkv", "sm_90", 128, 128, torch.bfloat16))
        return {}

    before = choose("dkv", "sm_90", 128, 128, torch.bfloat16)
    looking = h.Contender("looking", lambda inputs: look() or h.Run(look, look))
    kernels.with_tile(looking, key, "dkv", tile, is_peer=False).prepare(None).call()
    assert seen == [tile, tile]
    assert choose("dkv", "sm_90", 128, 128, torch.bfloat16) == before != tile


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_the_kernel_bench_says_so(capsys):
    with pytest.raises(SystemExit) as exit:
        kernels.main([])
    assert exit.value.code == 1
    said = capsys.readouterr().err
    assert said == "bench.kernels: there is no GPU and this bench needs one; --smoke exercises it on the CPU.\n"


def test_the_cpu_bench_runs_to_its_end(tmp_path, capsys):
    out = tmp_path / "cpu.csv"
    assert cpu_kernels.main(["--smoke", "--rounds", "1", "--out", str(out)]) == 0
    rows = h.read(out)
    masks = [("full", "fp32"), ("full", "bf16"), ("causal", "fp32"), ("causal", "bf16")]
    masks += [("window 16", "fp32"), ("documents", "fp32")]
    assert {(row.mask, row.dtype, row.direction) for row in rows} == {
        (*mask, direction) for mask in masks for direction in ("forward", "backward")
    }
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    plot.main([str(out), "--where", "mask=full"])
    assert "| cpu" in capsys.readouterr().out
