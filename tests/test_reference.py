"""The reference backend, driven through its contract, against a dense softmax in fp64."""

import itertools

import pytest
import torch

from ringattn.kernels import Bounds, Grads, Options, Request, State, reference, state_dtype
from ringattn.testing import assert_matches, naive_attention

BACKEND = reference.Reference()
NAMES = ("out", "lse", "dq", "dk", "dv")


@pytest.fixture(params=[(16, 24), (128, 512)], ids=["small tiles", "tiles"])
def tile(request, monkeypatch):
    """Tiles so small that every case crosses several, and those in use."""
    monkeypatch.setitem(reference._TILE, "cpu", request.param)


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setitem(reference._TILE, "cpu", (8, 12))


def tensors(batch, rows, keys, heads, kv_heads, width, v_width, dtype=torch.float64):
    """q, k, v, dout, dlse; the strides are not the contiguous ones."""
    shapes = (heads, rows, width), (kv_heads, keys, width), (kv_heads, keys, v_width), (heads, rows, v_width)
    q, k, v, dout = (torch.randn(batch, *shape).transpose(1, 2).to(dtype) for shape in shapes)
    return q, k, v, dout, torch.randn(batch, heads, rows, dtype=state_dtype(dtype))


def random_bounds(rows, keys, *batch, empty=0.2):
    """lo and hi `[*batch, rows]` that never decrease, over the rows that see something."""
    lo = torch.randint(0, max(keys, 1), (*batch, rows)).sort(-1).values
    hi = torch.minimum(
        lo.new_tensor(keys), torch.maximum(lo + 1, torch.randint(0, keys + 1, (*batch, rows)).sort(-1).values)
    )
    hidden = (torch.rand(*batch, rows) < empty) | (lo >= hi)
    return lo.masked_fill(hidden, keys).int(), hi.masked_fill(hidden, 0).int()


def causal_bounds(n):
    return torch.zeros(n, dtype=torch.int32), torch.arange(1, n + 1, dtype=torch.int32)


def seen_by(lo, hi, keys):
    index = torch.arange(keys)
    return (index >= lo[..., None]) & (index < hi[..., None])


def chunk(lo, hi, start, stop):
    """The bounds of the keys `start:stop`, as a plan writes them."""
    lo, hi = (x.clamp(start, stop) - start for x in (lo, hi))
    hidden = lo >= hi
    return lo.masked_fill(hidden, stop - start), hi.masked_fill(hidden, 0)


def blocks(q, k, lo, hi, cuts, is_full=False):
    edges = [0, *cuts, k.shape[1]]
    for start, stop in itertools.pairwise(edges):
        q_pos, k_pos = torch.arange(q.shape[1], dtype=torch.int32), torch.arange(start, stop, dtype=torch.int32)
        yield slice(start, stop), Bounds(*chunk(lo, hi, start, stop), q_pos, k_pos, is_full)


def run(inputs, lo, hi, options, sinks=None, cuts=(), is_full=False):
    """out, lse, dq, dk, dv by the backend, the keys folded in the chunks that `cuts` makes of them."""
    q, k, v, dout, dlse = inputs
    before = [x.clone() for x in inputs]
    wide = state_dtype(q.dtype)
    batch, rows, heads, _ = q.shape
    nan = torch.nan
    state = State(
        torch.full((batch, rows, heads, v.shape[3]), nan, dtype=wide),
        *(torch.full((batch, heads, rows), nan, dtype=wide) for _ in range(2)),
        torch.full((batch, rows, heads, v.shape[3]), nan, dtype=q.dtype),
        torch.full((batch, heads, rows), nan, dtype=wide),
    )
    steps = list(blocks(q, k, lo, hi, cuts, is_full))
    for i, (at, bounds) in enumerate(steps):
        ends = {"start": i == 0, "finish": i == len(steps) - 1}
        BACKEND.forward(state, q, k[:, at], v[:, at], bounds, options, sinks=sinks, **ends)
    delta = BACKEND.delta(dout, state.out, dlse)
    # What stands in the gradients is added to, not overwritten.
    dq, dk, dv = (torch.ones(x.shape, dtype=wide) for x in (q, k, v))
    for at, bounds in steps:
        BACKEND.backward(
            Grads(dq, dk[:, at], dv[:, at]), q, k[:, at], v[:, at], dout, state.lse, delta, bounds, options
        )
    for x, y in zip(inputs, before, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
    return state.out, state.lse, dq - 1, dk - 1, dv - 1


def oracle(inputs, seen, options, sinks=None, dtype=torch.float64):
    """The same by autograd through a dense softmax in `dtype`."""
    q, k, v, dout, dlse = (x.to(dtype) for x in inputs)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    arguments = {"softmax_scale": options.softmax_scale, "softcap": options.softcap, "sinks": sinks}
    dropout = {"dropout_p": options.dropout_p, "seed": options.seed, "head_offset": options.head_offset}
    out, lse = naive_attention(q, k, v, seen, **arguments, **dropout, return_lse=True)
    dlse = dlse.masked_fill(lse.detach() == -torch.inf, 0.0)
    return out, lse, *torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))


def compare(got, want, twin=None, rtol=None):
    for name, *three in zip(NAMES, got, want, twin or [None] * len(want), strict=False):
        assert_matches(*three, rtol=rtol, name=name)


CASES = {
    "plain": {},
    "gqa": {"kv_heads": 2},
    "mqa, value width": {"kv_heads": 1, "v_width": 5},
    "wide values": {"v_width": 24},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True, "kv_heads": 2},
    "dropout": {"dropout_p": 0.3, "kv_heads": 2},
    "batch bounds": {"batch_bounds": True, "kv_heads": 2},
    "all": {"kv_heads": 2, "v_width": 5, "softcap": 2.0, "sinks": True, "dropout_p": 0.4, "batch_bounds": True},
}


def case(
    kv_heads=4,
    v_width=16,
    softcap=None,
    sinks=False,
    dropout_p=0.0,
    batch_bounds=False,
    dtype=torch.float64,
    rows=45,
    keys=70,
):
    inputs = tensors(2, rows, keys, 4, kv_heads, 16, v_width, dtype)
    lo, hi = random_bounds(rows, keys, *([2] if batch_bounds else []))
    options = Options(0.3, softcap, dropout_p, seed=-(2**40) + 77 if dropout_p else 0, head_offset=3)
    return inputs, lo, hi, options, torch.randn(4, dtype=state_dtype(dtype)) if sinks else None


@pytest.mark.parametrize("name", CASES)
def test_fp64_is_the_dense_softmax(name, tile):
    inputs, lo, hi, options, sinks = case(**CASES[name])
    compare(run(inputs, lo, hi, options, sinks), oracle(inputs, seen_by(lo, hi, 70), options, sinks), rtol=1e-12)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cuts", [(1,), (33, 34), (0, 20, 20, 70)])
def test_a_chain_of_key_chunks_is_one_call(name, cuts, small_tiles):
    inputs, lo, hi, options, sinks = case(**CASES[name])
    compare(run(inputs, lo, hi, options, sinks, cuts), oracle(inputs, seen_by(lo, hi, 70), options, sinks), rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_error_is_at_most_twice_an_honest_twins(name, dtype, tile):
    inputs, lo, hi, options, sinks = case(**CASES[name], dtype=dtype)
    seen = seen_by(lo, hi, 70)
    want, twin = (oracle(inputs, seen, options, sinks, d) for d in (torch.float64, dtype))
    got = run(inputs, lo, hi, options, sinks, cuts=(31,))
    assert got[0].dtype == dtype
    assert {x.dtype for x in got[1:]} == {torch.float32}
    if dtype != torch.float32:
        compare(got, want, twin)
        return
    compare(got[:2], want[:2], twin[:2])
    # exp(score - lse) and dP - delta have no like in the twin, whose softmax divides. Scores and lse up to 8 in
    # magnitude round by 8 * 2^-24 each, which is the relative error of P; as much again where dP - delta cancels.
    compare(got, want, rtol=16 * 2**-23)


@pytest.mark.parametrize("is_full", [True, False])
def test_full_block(is_full, small_tiles):
    inputs = tensors(2, 20, 30, 4, 2, 8, 8)
    lo, hi = torch.zeros(20, dtype=torch.int32), torch.full((20,), 30, dtype=torch.int32)
    seen = torch.ones(20, 30, dtype=torch.bool)
    compare(run(inputs, lo, hi, Options(0.3), is_full=is_full), oracle(inputs, seen, Options(0.3)), rtol=1e-12)


def test_causal_across_the_tiles_in_use():
    inputs = tensors(1, 700, 700, 2, 1, 8, 8)
    lo, hi = causal_bounds(700)
    compare(
        run(inputs, lo, hi, Options(0.3), cuts=(600,)), oracle(inputs, seen_by(lo, hi, 700), Options(0.3)), rtol=1e-12
    )


def test_tiles_cover_what_is_seen_and_skip_what_no_row_sees(small_tiles):
    lo, hi = causal_bounds(48)
    position = torch.arange(48, dtype=torch.int32)
    tiles = reference._tiles(Bounds((lo := (hi - 6).clamp(min=0)), hi, position, position, False), 48, 48)
    assert len(tiles) == 6
    for tile in tiles:
        rows = range(tile.rows.start, tile.rows.stop)
        keys = [(key, is_full) for at, is_full in tile.parts for key in range(at.start, at.stop)]
        assert [key for key, _ in keys] == list(range(int(lo[rows[0]]), int(hi[rows[-1]])))
        assert [key for key, is_full in keys if is_full] == [
            key for key, _ in keys if all(lo[row] <= key < hi[row] for row in rows)
        ]


@pytest.mark.parametrize("with_sinks", [False, True])
def test_rows_that_see_no_key(with_sinks, small_tiles):
    inputs = tensors(2, 20, 30, 4, 2, 8, 8)
    lo, hi = torch.full((20,), 30, dtype=torch.int32), torch.zeros(20, dtype=torch.int32)
    sinks = torch.randn(4, dtype=torch.float64) if with_sinks else None
    out, lse, *grads = run(inputs, lo, hi, Options(0.3), sinks, cuts=(10,))
    lse_wanted = sinks[None, :, None].expand(2, 4, 20) if with_sinks else torch.full_like(lse, -torch.inf)
    assert_matches(lse, lse_wanted, rtol=1e-15, name="lse")
    for name, x in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
        assert_matches(x, torch.zeros_like(x), name=name)


@pytest.mark.parametrize(("batch", "rows", "keys"), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (0, 0, 0)])
@pytest.mark.parametrize("is_full", [False, True])
def test_zero_sizes(batch, rows, keys, is_full):
    inputs = tensors(batch, rows, keys, 4, 2, 8, 6)
    lo, hi = (
        torch.full((rows,), 0 if is_full else keys, dtype=torch.int32),
        torch.full((rows,), keys if is_full else 0).int(),
    )
    out, lse, *grads = run(inputs, lo, hi, Options(0.3), is_full=is_full and keys > 0)
    seen_any = is_full and keys > 0
    if not seen_any:
        assert_matches(out, torch.zeros(batch, rows, 4, 6, dtype=torch.float64), name="out")
        assert_matches(lse, torch.full((batch, 4, rows), -torch.inf, dtype=torch.float64), name="lse")
    for x, shape in zip(grads, (inputs[0].shape, inputs[1].shape, inputs[2].shape), strict=True):
        assert_matches(x, torch.zeros(shape, dtype=torch.float64))


def row_by_row(inputs, seen, options, sinks=None):
    """The oracle where numbers are not finite: each row meets the keys it sees and nothing else."""
    q, k, v, dout, dlse = inputs
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
def test_what_is_not_finite_reaches_the_rows_that_see_it_and_no_other(value, where, softcap, cuts, small_tiles):
    inputs = tensors(2, 20, 26, 4, 2, 8, 6)
    x = inputs[where]
    at = (1, 3, 9) if where == 4 else (1, 9, 1, 2)
    x[at] = value
    lo, hi = random_bounds(20, 26)
    lo[9], hi[9] = lo[8:11].min(), hi[8:11].max().clamp(min=int(lo[8:11].min()) + 1)
    options = Options(0.3, softcap)
    want = row_by_row(inputs, seen_by(lo, hi, 26), options)
    got = run(inputs, lo, hi, options, cuts=cuts)
    assert not all(x.isfinite().all() for x in want[2:]), "the case must matter"
    # Whether a sum with an infinity comes out infinite or NaN depends on its order.
    compare(*(without_infinities(results) for results in (got, want)), rtol=1e-12)


def test_nan_under_dropout_reaches_dropped_pairs_too(small_tiles):
    inputs = tensors(1, 20, 20, 2, 1, 8, 6)
    inputs[2][0, 7] = torch.nan
    lo, hi = causal_bounds(20)
    out, *_ = run(inputs, lo, hi, Options(0.3, dropout_p=0.5, seed=3))
    assert out.isnan().all(-1).all(-1).all(0).tolist() == [row >= 7 for row in range(20)]
    assert out.isnan().any(-1).any(-1).any(0).tolist() == [row >= 7 for row in range(20)]


def test_overflowing_scores_stay_stable(small_tiles):
    inputs = tensors(1, 20, 20, 2, 2, 8, 6)
    inputs[0].mul_(300.0)
    lo, hi = causal_bounds(20)
    compare(run(inputs, lo, hi, Options(1.0), cuts=(9,)), oracle(inputs, seen_by(lo, hi, 20), Options(1.0)), rtol=1e-10)


def test_autocast_does_not_round(small_tiles):
    inputs = tensors(1, 20, 20, 2, 1, 8, 6, torch.float32)
    lo, hi = causal_bounds(20)
    want = run(inputs, lo, hi, Options(0.3))
    with torch.autocast("cpu", torch.bfloat16):
        compare(run(inputs, lo, hi, Options(0.3)), want)


@pytest.mark.parametrize(
    ("dtype", "reason"), [(torch.bfloat16, None), (torch.int32, "dtype is torch.int32; a floating dtype")]
)
def test_supports(dtype, reason):
    request = Request(torch.device("cpu"), dtype, 4, 2, 8, 8, softcap=True, sinks=True, dropout=True)
    got = BACKEND.supports(request)
    assert got is None if reason is None else got.startswith(reason)
