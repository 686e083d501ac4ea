"""Random masks, lengths, layouts and batches in a loop, with real processes: right each time, and no memory is kept."""

import ctypes
import random
import time

import pytest
import torch
import torch.distributed as dist

import ringattn as ra
from ringattn.handshake import exchange
from ringattn.testing import assert_matches, naive_attention
from tests import processes

WORLD_SIZE = 2
PAGE_MIB = 4096 / 2**20
LONG_S, SETTLING_S, GROWTH_MIB_PER_MINUTE = 20 * 60.0, 2 * 60.0, 0.1
# what one short run can tell: a leak of one message or plan per call shows, the growth of caches and arenas is over
SHORT_CALLS, SETTLING_CALLS, SHORT_GROWTH_MIB = 300, 150, 2.0
CHECK_EVERY, SAMPLE_EVERY, DIFFERENT_CALLS = 10, 50, 1000


def resident_mib():
    """What the process holds once the allocator has given back what is free."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE_MIB


def random_mask(draw, n):
    cuts = sorted(draw.sample(range(1, n), min(n - 1, draw.randrange(4))))
    return draw.choice(
        [
            ra.Full(),
            ra.Causal(),
            ra.Window(draw.randrange(n)),
            ra.Documents((0, *cuts, n)),
            ra.Chunked(draw.randrange(1, n)),
        ]
    )


def soak(rank, world_size, seconds, calls):
    """(time, RSS) after every `SAMPLE_EVERY` calls, for `seconds` or for `calls`; every tenth result is compared with the oracle's."""
    draw, group, trace = random.Random(0), dist.group.WORLD, []
    began, done = time.monotonic(), 0
    while True:
        if (
            done % DIFFERENT_CALLS == 0
        ):  # the same again, so that what caches hold is the same too and only a leak grows
            draw.seed(0)
        n, layout = draw.randrange(2, 400), draw.choice(["contiguous", "zigzag", "striped"])
        mask, heads = random_mask(draw, n), draw.choice([1, 2, 4])
        torch.manual_seed(done)
        whole = [torch.randn(1, n, h, 16) for h in (4, heads, heads)]
        q, k, v = (ra.shard(x, layout, group).requires_grad_() for x in whole)
        out = ra.ring_attention(q, k, v, mask=mask, layout=layout, group=group, seqlen=n, timeout=60)
        grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        if done % CHECK_EVERY == 0:
            leaves = [x.double().requires_grad_() for x in whole]
            want = naive_attention(*leaves, mask)
            wanted = torch.autograd.grad(want, leaves, torch.ones_like(want))
            for found, exact in zip((out.detach(), *grads), (want.detach(), *wanted), strict=True):
                assert_matches(found, ra.shard(exact, layout, group), rtol=1e-4)
        done += 1
        if done % SAMPLE_EVERY == 0:  # and not more often, since what is written down counts too
            trace.append((time.monotonic() - began, resident_mib()))
            going = done < calls if calls else trace[-1][0] < seconds
            # rank 0's clock ends it for all; no collective, of which torch's flight recorder keeps the last 2000
            if exchange({"going": str(going)}, group.group_name, 60)[0]["going"] == "False":
                return trace


def test_a_short_soak_keeps_no_memory():
    for trace in processes.run_fresh(WORLD_SIZE, soak, 0.0, SHORT_CALLS, timeout=120):
        assert trace[-1][1] - trace[SETTLING_CALLS // SAMPLE_EVERY][1] < SHORT_GROWTH_MIB


@pytest.mark.slow
def test_twenty_minutes_of_soak_keep_no_memory():
    for trace in processes.run_fresh(WORLD_SIZE, soak, LONG_S, 0, timeout=LONG_S + 120):
        settled = torch.tensor([point for point in trace if point[0] > SETTLING_S], dtype=torch.float64)
        minutes, mib = settled[:, 0] / 60, settled[:, 1]
        slope = ((minutes - minutes.mean()) * (mib - mib.mean())).sum() / (minutes - minutes.mean()).square().sum()
        assert slope < GROWTH_MIB_PER_MINUTE
