"""What each rank did when: spans of posting, computing, waiting and adding, on whatever clock the transport has.

A transport writes them down where somebody asked: `trace` for the rings of this process, `virtual` for its own. The clock is
`time.perf_counter` on CPU, events of the current stream on CUDA, and the simulated one of a virtual ring with a network.
"""

import collections
import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator
from os import PathLike
from pathlib import Path

import torch

__all__ = ["Span", "Timeline", "active", "now", "trace"]

Stamp = float | torch.cuda.Event


@dataclasses.dataclass(frozen=True)
class Span:
    """One thing that one rank did.

    Attributes:
        rank: who.
        what: "post" (starting an exchange), "compute", "wait" (for an exchange), "add" (gradients that came home); in a simulated
            network also "transfer", a message under way from this rank.
        offset: of the hop; below 0 for gradients on their way home.
        start, end: seconds.
        flops: of the compute, over visible pairs. bytes: of the transfer.
    """

    rank: int
    what: str
    offset: int
    start: float
    end: float
    flops: int = 0
    bytes: int = 0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclasses.dataclass
class _Entry:
    """A span whose times may still be events of a device, or to come."""

    rank: int
    what: str
    offset: int
    flops: int
    start: Stamp
    end: Stamp | None = None


def now(device: torch.device) -> Stamp:
    """The time: of the host, or on CUDA an event that the current stream will reach."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Timeline:
    """Spans in the order in which they began.

    Those of several processes on one host go together as `Timeline([*mine, *theirs])`: a span is a plain value.

    Example:
        >>> timeline = Timeline([Span(0, "compute", 0, 0.0, 2.0), Span(0, "wait", 1, 2.0, 2.5)])
        >>> timeline.exposed()
        {(0, 1): 0.5}
    """

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._entries: list[Span | _Entry] = list(spans)
        self._origin: tuple[float, torch.cuda.Event] | None = None

    @contextlib.contextmanager
    def span(self, rank: int, what: str, offset: int, clock: Callable[[], Stamp], flops: int = 0) -> Iterator[None]:
        """Write down what happens inside the `with`."""
        entry = _Entry(rank, what, offset, flops, clock())
        if self._origin is None and isinstance(entry.start, torch.cuda.Event):
            self._origin = (time.perf_counter(), entry.start)
        self._entries.append(entry)
        try:
            yield
        finally:
            entry.end = clock()

    def add(self, span: Span) -> None:
        """Write down a span that is over."""
        self._entries.append(span)

    def clear(self) -> None:
        """Start anew."""
        self._entries.clear()
        self._origin = None

    @property
    def spans(self) -> list[Span]:
        """All that are over, in the order in which they began. Waits for the device where the clock is one."""
        return [
            e
            if isinstance(e, Span)
            else Span(e.rank, e.what, e.offset, self._seconds(e.start), self._seconds(e.end), e.flops)
            for e in self._entries
            if isinstance(e, Span) or e.end is not None
        ]

    def __iter__(self) -> Iterator[Span]:
        return iter(self.spans)

    @property
    def order(self) -> list[tuple[int, str, int]]:
        """`(rank, what, offset)` of each span, in the order in which they began."""
        return [(entry.rank, entry.what, entry.offset) for entry in self._entries]

    @property
    def seconds(self) -> float:
        """From the first beginning to the last end; 0 of nothing."""
        spans = self.spans
        return max(s.end for s in spans) - min(s.start for s in spans) if spans else 0.0

    def exposed(self) -> dict[tuple[int, int], float]:
        """Exposed communication: for each `(rank, offset)` the seconds in which that rank waited for that exchange."""
        waits: dict[tuple[int, int], float] = collections.defaultdict(float)
        for span in self.spans:
            if span.what == "wait":
                waits[span.rank, span.offset] += span.seconds
        return dict(waits)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the Chrome trace format (JSON), which chrome://tracing and ui.perfetto.dev open: a row per rank."""
        spans = self.spans
        first = min((span.start for span in spans), default=0.0)
        events: list[dict[str, object]] = []
        for rank in sorted({span.rank for span in spans}):
            for lane, name in enumerate(("", " sends")):
                row = {"pid": 0, "tid": 2 * rank + lane}
                events.append({"ph": "M", "name": "thread_name", **row, "args": {"name": f"rank {rank}{name}"}})
                events.append({"ph": "M", "name": "thread_sort_index", **row, "args": {"sort_index": 2 * rank + lane}})
        for span in spans:
            is_transfer = span.what == "transfer"
            events.append(
                {
                    "ph": "X",
                    "name": f"{span.what} {hop_name(span.offset)}",
                    "cat": span.what,
                    "pid": 0,
                    "tid": 2 * span.rank + is_transfer,
                    "ts": (span.start - first) * 1e6,
                    "dur": span.seconds * 1e6,
                    "args": {"offset": span.offset, "flops": span.flops, "bytes": span.bytes},
                }
            )
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def _seconds(self, stamp: Stamp | None) -> float:
        assert stamp is not None
        if isinstance(stamp, float):
            return stamp
        assert self._origin is not None
        began, first = self._origin
        stamp.synchronize()
        return began + first.elapsed_time(stamp) * 1e-3


def hop_name(offset: int) -> str:
    """What a hop is called in pictures."""
    return "own keys" if offset == 0 else f"hop {offset}" if offset > 0 else f"gradients of hop {-offset}"


_active: list[Timeline] = []  # of the process and not of a thread: autograd runs backward on threads of its own


@contextlib.contextmanager
def trace() -> Iterator[Timeline]:
    """Record the timeline of every attention call of this process inside the `with`, forward and backward.

    On CUDA it costs two events a span and no synchronisation until the spans are read; read them after the `with`.
    Of nested ones the innermost records. Virtual rings keep their own, `ring.timeline`.

    Example:
        >>> import ringattn
        >>> x = torch.randn(1, 16, 2, 8)
        >>> with ringattn.trace() as timeline:
        ...     out = ringattn.ring_attention(x, x, x)
        >>> timeline.order
        [(0, 'compute', 0)]
    """
    timeline = Timeline()
    _active.append(timeline)
    try:
        yield timeline
    finally:
        _active.remove(timeline)


def active() -> Timeline | None:
    """What `trace` records into now, if anything."""
    return _active[-1] if _active else None
