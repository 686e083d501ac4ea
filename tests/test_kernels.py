"""The contract of the block kernels, kept by every backend, and the choice between backends."""

import pytest
import torch

from ringattn import kernels
from ringattn.kernels import Options, reference
from ringattn.testing import assert_matches, naive_attention
from tests.contract import BACKENDS, CASES, case, causal_bounds, compare, oracle, random_bounds, run, seen_by, tensors

pytestmark = pytest.mark.parametrize("backend", BACKENDS)

# exp(score - lse) and dP - delta have no like in the dense softmax, which divides. Scores and lse up to 8 in magnitude round
# by 8 * 2^-24 each, which is the relative error of P; as much again where dP - delta cancels.
FP32 = 16 * 2**-23


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """So small that every case crosses several; tests/test_reference.py has those in use."""
    monkeypatch.setitem(reference._TILE, "cpu", (8, 12))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cuts", [(), (31,)], ids=["one call", "a chain"])
def test_error_is_at_most_twice_an_honest_twins(name, dtype, cuts, backend):
    inputs, lo, hi, options, sinks = case(**CASES[name], dtype=dtype)
    seen = seen_by(lo, hi, 70)
    want, twin = (oracle(inputs, seen, options, sinks, d) for d in (torch.float64, dtype))
    got = run(backend, inputs, lo, hi, options, sinks, cuts)
    assert got[0].dtype == dtype
    assert {x.dtype for x in got[1:]} == {torch.float32}
    if dtype == torch.float32:
        compare(got, want, rtol=FP32)
    else:
        compare(got, want, twin)


@pytest.mark.parametrize("cuts", [(1,), (0, 20, 20, 70)])
@pytest.mark.parametrize("name", ["plain", "all"])
def test_a_chain_of_key_chunks_is_one_call(name, cuts, backend):
    inputs, lo, hi, options, sinks = case(**CASES[name], dtype=torch.float32)
    want = oracle(inputs, seen_by(lo, hi, 70), options, sinks)
    compare(run(backend, inputs, lo, hi, options, sinks, cuts), want, rtol=FP32)


@pytest.mark.parametrize("is_full", [True, False])
@pytest.mark.parametrize(("rows", "keys"), [(20, 30), (1, 1), (3, 130)])
def test_full_block(is_full, rows, keys, backend):
    inputs = tensors(2, rows, keys, 4, 2, 8, 8, torch.float32)
    lo, hi = torch.zeros(rows, dtype=torch.int32), torch.full((rows,), keys, dtype=torch.int32)
    want = oracle(inputs, torch.ones(rows, keys, dtype=torch.bool), Options(0.3))
    compare(run(backend, inputs, lo, hi, Options(0.3), is_full=is_full), want, rtol=FP32)


@pytest.mark.parametrize("window", [None, 37])
def test_causal_and_windows_across_several_tiles(window, backend):
    n = 300
    inputs = tensors(1, n, n, 2, 1, 16, 16, torch.float32)
    lo, hi = causal_bounds(n)
    lo = lo if window is None else (hi - window).clamp(min=0)
    want = oracle(inputs, seen_by(lo, hi, n), Options(0.3))
    compare(run(backend, inputs, lo, hi, Options(0.3), cuts=(170,)), want, rtol=FP32)


@pytest.mark.parametrize(("width", "v_width"), [(1, 3), (7, 5), (24, 24), (80, 96), (192, 128), (256, 256)])
def test_head_dims(width, v_width, backend):
    inputs = tensors(1, 33, 40, 2, 1, width, v_width, torch.float32)
    lo, hi = random_bounds(33, 40)
    options = Options(width**-0.5)
    compare(run(backend, inputs, lo, hi, options), oracle(inputs, seen_by(lo, hi, 40), options), rtol=FP32)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_rows_that_see_no_key(with_sinks, backend):
    inputs = tensors(2, 20, 30, 4, 2, 8, 8, torch.float32)
    lo, hi = torch.full((20,), 30, dtype=torch.int32), torch.zeros(20, dtype=torch.int32)
    sinks = torch.randn(4) if with_sinks else None
    out, lse, *grads = run(backend, inputs, lo, hi, Options(0.3), sinks, cuts=(10,))
    lse_wanted = sinks[None, :, None].expand(2, 4, 20) if with_sinks else torch.full_like(lse, -torch.inf)
    assert_matches(lse, lse_wanted, rtol=2**-22, name="lse")
    for name, x in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
        assert_matches(x, torch.zeros_like(x), name=name)


@pytest.mark.parametrize(("batch", "rows", "keys"), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (0, 0, 0)])
@pytest.mark.parametrize("is_full", [False, True])
def test_zero_sizes(batch, rows, keys, is_full, backend):
    inputs = tensors(batch, rows, keys, 4, 2, 8, 6, torch.float32)
    seen_any = is_full and keys > 0
    lo = torch.full((rows,), 0 if is_full else keys, dtype=torch.int32)
    hi = torch.full((rows,), keys if is_full else 0, dtype=torch.int32)
    out, lse, *grads = run(backend, inputs, lo, hi, Options(0.3), is_full=seen_any)
    if not seen_any:
        assert_matches(out, torch.zeros(batch, rows, 4, 6), name="out")
        assert_matches(lse, torch.full((batch, 4, rows), -torch.inf), name="lse")
    for x, shape in zip(grads, (inputs[0].shape, inputs[1].shape, inputs[2].shape), strict=True):
        assert_matches(x, torch.zeros(shape))


def row_by_row(inputs, seen, options, sinks=None):
    """The oracle where numbers are not finite: each row meets the keys it sees and nothing else."""
    q, k, v, dout, dlse = (x.double() for x in inputs)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    arguments = {"softmax_scale": options.softmax_scale, "softcap": options.softcap, "sinks": sinks}
    rows = []
    for i in range(q.shape[1]):
        keys = seen[i].nonzero().flatten()
        every = torch.ones(1, len(keys), dtype=torch.bool)
        rows.append(naive_attention(q[:, i : i + 1], k[:, keys], v[:, keys], every, **arguments, return_lse=True))
    out, lse = torch.cat([out for out, _ in rows], 1), torch.cat([lse for _, lse in rows], 2)
    upstream = dout.masked_fill(~seen.any(-1)[:, None, None], 0.0), dlse.masked_fill(~seen.any(-1), 0.0)
    return out, lse, *torch.autograd.grad((out, lse), (q, k, v), upstream)


def without_infinities(results):
    """NaN for every infinity, but for the -inf that lse has by right."""
    out, lse, *grads = results
    out, *grads = (x.masked_fill(~x.isfinite(), torch.nan) for x in (out, *grads))
    return out, lse.masked_fill(lse.isposinf(), torch.nan), *grads


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", range(5), ids=["q", "k", "v", "dout", "dlse"])
@pytest.mark.parametrize(("softcap", "cuts"), [(None, (9, 17)), (2.0, ())])
def test_what_is_not_finite_reaches_the_rows_that_see_it(value, where, softcap, cuts, backend):
    """And, but for v and dout, which rows of a key tile share, no other (docs/design.md, section 6)."""
    inputs = tensors(2, 20, 26, 4, 2, 8, 6, torch.float32)
    inputs[where][(1, 3, 9) if where == 4 else (1, 9, 1, 2)] = value
    lo, hi = random_bounds(20, 26)
    lo[9], hi[9] = lo[8:11].min(), hi[8:11].max().clamp(min=int(lo[8:11].min()) + 1)
    options = Options(0.3, softcap)
    want = without_infinities(row_by_row(inputs, seen_by(lo, hi, 26), options))
    got = without_infinities(run(backend, inputs, lo, hi, options, cuts=cuts))
    assert not all(x.isfinite().all() for x in want[2:]), "the case must matter"
    # Whether a sum with an infinity comes out infinite or NaN depends on its order.
    if backend == "reference":
        compare(got, want, rtol=FP32)
        return
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        # over the rows that share a tile
        may_spread = where in (2, 3) or (backend == "triton" and name in ("dq", "dk", "dv"))
        may_vanish = where in (0, 1) and name in ("dq", "dk")  # an infinity times a weight of 0
        assert may_spread or not (x.isnan() & ~y.isnan()).any(), f"{name}: more is NaN than should be"
        assert may_vanish or not (y.isnan() & ~x.isnan()).any(), f"{name}: less is NaN than should be"
        either = x.isnan() | y.isnan()
        assert_matches(x.masked_fill(either, 0.0), y.masked_fill(either, 0.0), rtol=FP32, name=name)
    assert got[0][0].isfinite().all(), "another batch row must not be touched"


def test_overflowing_scores_stay_stable(backend):
    inputs = tensors(1, 20, 20, 2, 2, 8, 6, torch.float32)
    inputs[0].mul_(300.0)
    lo, hi = causal_bounds(20)
    seen = seen_by(lo, hi, 20)
    want, twin = (oracle(inputs, seen, Options(1.0), dtype=dtype) for dtype in (torch.float64, torch.float32))
    got = run(backend, inputs, lo, hi, Options(1.0), cuts=(9,))
    # Scores of some thousands round by 2^-24 of that, and P by as much again.
    compare(got, want, rtol=float(want[1].detach().abs().max()) * 2**-23)
    compare(got[:2], want[:2], twin[:2])


def test_autocast_does_not_round(backend):
    inputs = tensors(1, 20, 20, 2, 1, 8, 6, torch.float32)
    lo, hi = causal_bounds(20)
    want = run(backend, inputs, lo, hi, Options(0.3))
    with torch.autocast("cpu", torch.bfloat16):
        compare(run(backend, inputs, lo, hi, Options(0.3)), want)


def test_two_runs_give_the_same_bits(backend):
    inputs, lo, hi, options, sinks = case(**CASES["all"], dtype=torch.bfloat16)
    compare(*(run(backend, inputs, lo, hi, options, sinks, cuts=(31,)) for _ in range(2)))


def test_the_registry_knows_it(backend):
    assert kernels.backends()[backend].name == backend
