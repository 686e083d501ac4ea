"""Drives one backend through its contract, and the dense softmax that it is held against."""

import itertools

import pytest
import torch

from ringattn.kernels import Bounds, Grads, Options, State, backends, state_dtype
from ringattn.testing import assert_matches, naive_attention

NAMES = ("out", "lse", "dq", "dk", "dv")
# Triton kernels run on a GPU, or in its interpreter, for which TRITON_INTERPRET=1 must be set from the start.
MARKS = {"triton": (pytest.mark.interpreter, pytest.mark.gpu)}
BACKENDS = [pytest.param(name, marks=MARKS.get(name, ())) for name in backends()]


def device_of(backend):
    return torch.device("cuda" if backend == "triton" and torch.cuda.is_available() else "cpu")


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
    """The key chunks that `cuts` makes, each with its bounds, on the device of `q`."""
    edges = [0, *cuts, k.shape[1]]
    for start, stop in itertools.pairwise(edges):
        q_pos, k_pos = torch.arange(q.shape[1], dtype=torch.int32), torch.arange(start, stop, dtype=torch.int32)
        vectors = (x.to(q.device) for x in (*chunk(lo, hi, start, stop), q_pos, k_pos))
        yield slice(start, stop), Bounds(*vectors, is_full)


def run(backend, inputs, lo, hi, options, sinks=None, cuts=(), is_full=False):
    """out, lse, dq, dk, dv by the backend called so, the keys folded in the chunks that `cuts` makes of them."""
    device, kernels = device_of(backend), backends()[backend]
    inputs = [x.to(device) for x in inputs]
    sinks = None if sinks is None else sinks.to(device)
    q, k, v, dout, dlse = inputs
    before = [x.clone() for x in inputs]
    wide = state_dtype(q.dtype)
    batch, rows, heads, _ = q.shape
    nan = torch.nan
    state = State(
        torch.full((batch, rows, heads, v.shape[3]), nan, dtype=wide, device=device),
        *(torch.full((batch, heads, rows), nan, dtype=wide, device=device) for _ in range(2)),
        torch.full((batch, rows, heads, v.shape[3]), nan, dtype=q.dtype, device=device),
        torch.full((batch, heads, rows), nan, dtype=wide, device=device),
    )
    steps = list(blocks(q, k, lo, hi, cuts, is_full))
    for i, (at, bounds) in enumerate(steps):
        ends = {"start": i == 0, "finish": i == len(steps) - 1}
        kernels.forward(state, q, k[:, at], v[:, at], bounds, options, sinks=sinks, **ends)
    delta = kernels.delta(dout, state.out, dlse)
    # What stands in the gradients is added to, not overwritten.
    dq, dk, dv = (torch.ones(x.shape, dtype=wide, device=device) for x in (q, k, v))
    for at, bounds in steps:
        kernels.backward(
            Grads(dq, dk[:, at], dv[:, at]), q, k[:, at], v[:, at], dout, state.lse, delta, bounds, options
        )
    for x, y in zip(inputs, before, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
    return tuple(x.cpu() for x in (state.out, state.lse, dq - 1, dk - 1, dv - 1))


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
