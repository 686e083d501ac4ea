"""What a rank holds beside its inputs and outputs, counted at the allocator of a real process, against the formula of docs/design.md."""

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import ringattn as ra
from ringattn.plan import build_plan
from tests import processes

B, H, HKV, D, DV = 1, 4, 2, 32, 16


def peak_bytes(call):
    """The most bytes that torch's CPU allocator had given out during `call` beyond those before it, and what the call left."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = call()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak, kept


def peaks(rank, world_size, seqlen, mask, layout, dtype):
    """Peak of forward and of backward, of a call whose plan and bounds are at hand."""
    group = dist.group.WORLD if world_size > 1 else None
    rows = len(build_plan(mask, layout, seqlen, world_size, rank).positions)
    q, k, v = (torch.randn(B, rows, h, d, dtype=dtype, requires_grad=True) for h, d in ((H, D), (HKV, D), (HKV, DV)))
    dout = torch.randn(B, rows, H, DV, dtype=dtype)

    def forward():
        return ra.ring_attention(q, k, v, mask=mask, layout=layout, group=group, seqlen=seqlen, validate=False)

    torch.autograd.grad(forward(), (q, k, v), dout)
    first, out = peak_bytes(forward)
    second, _ = peak_bytes(lambda: torch.autograd.grad(out, (q, k, v), dout))
    return first, second


def formula(plan, dtype):
    """Bytes at the peak of forward and of backward, with the outputs that each leaves."""
    rows, sent, received = len(plan.positions), max(h.send_rows for h in plan.hops), max(h.recv_rows for h in plan.hops)
    pair = HKV * (D + DV)  # elements of a row of K and V, or of dK and dV
    buffers = (sent + 2 * received) * pair
    per_row = rows * H * 4  # lse, m, l, delta, or the upstream gradient of lse
    state, outputs = rows * H * DV * 4 + 2 * per_row, rows * H * DV * dtype.itemsize + per_row
    grads = rows * (H * D + pair)
    casts = grads * dtype.itemsize if dtype.itemsize < 4 else 0
    return B * (state + outputs + buffers * dtype.itemsize), B * (
        grads * 4 + per_row + max(per_row + buffers * (dtype.itemsize + 4), casts)
    )


CASES = {
    "causal": (4, 1024, ra.Causal(), "zigzag", torch.float32),
    "16 bits": (2, 1024, ra.Full(), "contiguous", torch.bfloat16),
    "window": (4, 1024, ra.Window(20), "contiguous", torch.float32),
    "no hops": (2, 1024, ra.Documents((0, 512, 1024)), "contiguous", torch.bfloat16),
    "one rank": (1, 1024, ra.Causal(), "contiguous", torch.float32),
}


@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_that_of_the_formula(name):
    world_size, seqlen, mask, layout, dtype = CASES[name]
    found = processes.run(world_size, peaks, *CASES[name][1:])
    assert found == [formula(build_plan(mask, layout, seqlen, world_size, rank), dtype) for rank in range(world_size)]


def test_the_peak_halves_where_ranks_double():
    two, four = (processes.run(w, peaks, 1024, ra.Full(), "contiguous", torch.float32) for w in (2, 4))
    assert two == [(2 * forward, 2 * backward) for forward, backward in four[:2]]
    assert len(set(two)) == len(set(four)) == 1
