"""The timeline: what is written down on each clock, what is exposed, and the trace that viewers open."""

import collections
import itertools
import json
import threading

import pytest
import torch
import torch.distributed as dist

import ringattn as ra
from ringattn import Network, Span, Timeline
from ringattn.testing import Sizes, assert_matches, simulate, virtual
from ringattn.timeline import now
from tests import processes

NETWORK = Network(flops_per_s=1e6, bandwidth_bytes_per_s=1e5, latency_s=1e-3)
SIZES = Sizes(heads=4, kv_heads=2, head_dim=8, dtype=torch.float32)


def step(ring, seqlen=64, head_dim=8):
    """Forward and backward through a virtual ring."""
    q = torch.randn(1, seqlen, 4, head_dim, requires_grad=True)
    k = torch.randn(1, seqlen, 2, head_dim, requires_grad=True)
    outs = ring.attention(ring.shard(q), ring.shard(k), ring.shard(k))
    sum(out.sum() for out in outs).backward()
    return ring.unshard(outs)


def trace_of_a_call(rank, world_size):
    x = torch.randn(1, 8, 2, 4, requires_grad=True)
    before = ra.ring_attention(x, x, x, group=dist.group.WORLD)
    with ra.trace() as timeline:
        ra.ring_attention(x, x, x, group=dist.group.WORLD).sum().backward()
    before.sum().backward()
    return timeline.order, timeline.spans


def test_a_trace_of_processes_is_that_of_the_virtual_ring_on_the_clock_of_the_host():
    ring = virtual(3)
    x = torch.randn(1, 24, 2, 4, requires_grad=True)
    sum(out.sum() for out in ring.attention(*[ring.shard(x)] * 3)).backward()
    work = {(s.rank, s.what, s.offset): s.flops for s in ring.timeline if s.what == "compute"}
    for rank, (order, spans) in enumerate(processes.run(3, trace_of_a_call)):
        assert order == [entry for entry in ring.timeline.order if entry[0] == rank]
        assert all(a.end <= b.start for a, b in itertools.pairwise(spans))
        assert all(span.start < span.end for span in spans)
        assert {k: v for k, v in work.items() if k[0] == rank} == {
            (s.rank, s.what, s.offset): s.flops for s in spans if s.what == "compute"
        }


def test_only_what_is_inside_is_traced_and_by_the_innermost():
    x = torch.randn(1, 8, 2, 4)
    with ra.trace() as outer:
        with ra.trace() as inner:
            ra.ring_attention(x, x, x)
        ra.ring_attention(x, x, x, mask=ra.Full())
    ra.ring_attention(x, x, x)
    assert [span.flops for span in inner] == [2 * 2 * 8 * 36]
    assert [span.flops for span in outer] == [2 * 2 * 8 * 64]


def test_other_threads_are_traced_too():
    # on CUDA autograd runs backward on a thread of its own
    x = torch.randn(1, 8, 2, 4)
    with ra.trace() as timeline:
        thread = threading.Thread(target=ra.ring_attention, args=(x, x, x))
        thread.start()
        thread.join()
    assert timeline.order == [(0, "compute", 0)]


def test_a_span_that_fails_is_over():
    timeline = Timeline()
    ticks = iter([1.0, 3.0])
    with pytest.raises(KeyError), timeline.span(0, "compute", 2, lambda: next(ticks), 5):
        raise KeyError
    assert timeline.spans == [Span(0, "compute", 2, 1.0, 3.0, 5)]
    timeline.clear()
    assert (timeline.spans, timeline.seconds) == ([], 0.0)


def test_a_network_changes_the_clock_and_not_the_result():
    torch.manual_seed(1)
    want = step(virtual(4))
    runs = []
    for _ in range(2):
        torch.manual_seed(1)
        ring = virtual(4, network=NETWORK)
        assert_matches(step(ring), want)
        runs.append(ring.timeline.spans)
    assert runs[0] == runs[1]


def test_simulated_spans_take_what_the_plan_says():
    ring = virtual(4, network=NETWORK)
    step(ring)
    plans = [ra.build_plan(ra.Causal(), "zigzag", 64, 4, rank) for rank in range(4)]
    flops, sent = collections.Counter(), collections.Counter()
    for span in ring.timeline:
        flops[span.rank] += span.flops
        sent[span.rank] += span.bytes
        if span.what == "compute":
            assert span.seconds == pytest.approx(span.flops / NETWORK.flops_per_s)
        elif span.what == "transfer":
            assert span.seconds == pytest.approx(span.bytes / NETWORK.bandwidth_bytes_per_s + NETWORK.latency_s)
        elif span.what != "wait":
            assert span.seconds == 0
    for plan in plans:
        work, moved = {"batch": 1, "heads": 4, "head_dim": 8}, {"batch": 1, "kv_heads": 2, "head_dim": 8}
        assert flops[plan.rank] == plan.flops(**work) + plan.flops(**work, backward=True)
        bytes_sent = (plan.bytes(**moved, dtype=torch.float32, backward=is_backward) for is_backward in (False, True))
        assert sent[plan.rank] == sum(bytes_sent)


@pytest.mark.parametrize("mask", [ra.Causal(), ra.Window(5), ra.Documents((0, 30, 64))], ids=repr)
def test_a_simulation_without_computing_is_the_ring_to_the_second(mask):
    ring = virtual(4, network=NETWORK)
    q, k = torch.randn(1, 64, 4, 8, requires_grad=True), torch.randn(1, 64, 2, 8)
    outs = ring.attention(ring.shard(q), ring.shard(k), ring.shard(k), mask=mask)
    sum(out.sum() for out in outs).backward()
    got = simulate(mask, "zigzag", 64, 4, network=NETWORK, sizes=SIZES)
    assert got.spans == ring.timeline.spans
    with pytest.raises(ValueError, match="passes has 'sideways'; each must be 'forward' or 'backward'"):
        simulate(mask, "zigzag", 64, 4, network=NETWORK, sizes=SIZES, passes=["sideways"])


def test_exposed_is_what_a_rank_waits_for_each_exchange():
    waits = [Span(0, "wait", 1, 0.0, 0.25), Span(0, "compute", 1, 0.25, 1.0), Span(0, "wait", 1, 1.0, 1.5)]
    timeline = Timeline([*waits, Span(1, "wait", -1, 0.0, 2.0)])
    assert timeline.exposed() == {(0, 1): 0.75, (1, -1): 2.0}
    assert timeline.seconds == 2.0


def test_exposed_communication_is_all_that_keeps_a_rank_from_computing():
    timeline = simulate(ra.Causal(), "zigzag", 64, 4, network=NETWORK, sizes=SIZES, passes=["forward"])
    for rank in range(4):
        exposed = sum(seconds for (r, _), seconds in timeline.exposed().items() if r == rank)
        work = sum(span.seconds for span in timeline if (span.rank, span.what) == (rank, "compute"))
        last = max(span.end for span in timeline if span.rank == rank and span.what != "transfer")
        assert exposed + work == pytest.approx(last)
        assert exposed > 0


def test_a_trace_file_has_a_row_per_rank_in_microseconds(tmp_path):
    timeline = Timeline([Span(1, "compute", 0, 5.0, 5.5, 7), Span(1, "transfer", -2, 5.25, 6.0, bytes=9)])
    timeline.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {2: "rank 1", 3: "rank 1 sends"}
    compute, transfer = (event for event in events if event["ph"] == "X")
    assert compute == {
        "ph": "X",
        "name": "compute own keys",
        "cat": "compute",
        "pid": 0,
        "tid": 2,
        "ts": 0.0,
        "dur": 500_000.0,
        "args": {"offset": 0, "flops": 7, "bytes": 0},
    }
    assert (transfer["name"], transfer["tid"], transfer["ts"], transfer["dur"]) == (
        "transfer gradients of hop 2",
        3,
        250_000.0,
        750_000.0,
    )


class FakeEvent:
    """A CUDA event on a device whose clock counts 2 ms for each one recorded."""

    recorded = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        FakeEvent.recorded += 1
        self.at, self.is_over = 2.0 * FakeEvent.recorded, False

    def synchronize(self):
        self.is_over = True

    def elapsed_time(self, other):
        assert other.is_over, "read before it was over"
        return other.at - self.at


def test_on_cuda_spans_are_between_events_of_the_stream(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    timeline, clock = Timeline(), lambda: now(torch.device("cuda"))
    for offset in (0, 1):
        with timeline.span(0, "compute", offset, clock):
            pass
    first, second = timeline.spans
    assert [first.seconds, second.start - first.start, second.seconds] == pytest.approx([2e-3, 4e-3, 2e-3])
    assert timeline.seconds == pytest.approx(6e-3)
