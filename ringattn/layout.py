"""Layouts: which global positions each rank holds.

A layout is `layout(seqlen, world_size, rank) -> tuple[range, ...]`: disjoint, non-empty, increasing ranges, so that a rank's local
order is the global order. Together the ranks hold every position once. Any length and any world size are legal, and so is a rank
that holds nothing.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from ringattn.masks import Documents

__all__ = [
    "Layout",
    "PerDocument",
    "contiguous",
    "decode",
    "fingerprint",
    "layouts",
    "per_document",
    "positions",
    "resolve",
    "striped",
    "zigzag",
]

Ranges = tuple[range, ...]
LayoutFunction = Callable[[int, int, int], Ranges]


def _joined(ranges: Iterable[range]) -> Ranges:
    """The ranges without empty ones, and those that touch made one."""
    out: list[range] = []
    for r in ranges:
        if len(r) == 0:
            continue
        if out and out[-1].step == r.step == 1 and out[-1].stop == r.start:
            out[-1] = range(out[-1].start, r.stop)
        else:
            out.append(r)
    return tuple(out)


def _chunk(start: int, length: int, pieces: int, i: int) -> range:
    """Piece `i` of `length` tokens cut in `pieces` as evenly as it goes."""
    return range(start + i * length // pieces, start + (i + 1) * length // pieces)


def contiguous(seqlen: int, world_size: int, rank: int) -> Ranges:
    """Rank r holds the r-th of W equal pieces.

    Example:
        >>> contiguous(10, 4, 1)
        (range(2, 5),)
    """
    return _joined([_chunk(0, seqlen, world_size, rank)])


def zigzag(seqlen: int, world_size: int, rank: int) -> Ranges:
    """Rank r holds pieces r and 2W-1-r of 2W: an early and a late one, so that causal work is even on every hop.

    Example:
        >>> zigzag(16, 2, 0)
        (range(0, 4), range(12, 16))
    """
    pieces = 2 * world_size
    return _joined([_chunk(0, seqlen, pieces, rank), _chunk(0, seqlen, pieces, pieces - 1 - rank)])


def striped(seqlen: int, world_size: int, rank: int) -> Ranges:
    """Rank r holds tokens r, r + W, r + 2W, ... (Brandon et al. 2023, Striped Attention).

    Example:
        >>> striped(10, 4, 1)
        (range(1, 10, 4),)
    """
    return _joined([range(rank, seqlen, world_size)])


@dataclasses.dataclass(frozen=True)
class PerDocument:
    """Each packed document laid out as a zigzag of its own; made by `per_document`."""

    cu_seqlens: tuple[int, ...]
    code: Tensor = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        documents = Documents(self.cu_seqlens)  # the same vector, with the same checks
        object.__setattr__(self, "cu_seqlens", documents.cu_seqlens)
        object.__setattr__(self, "code", documents.code)

    def __call__(self, seqlen: int, world_size: int, rank: int) -> Ranges:
        if seqlen != self.cu_seqlens[-1]:
            raise ValueError(
                f"per_document: its documents have {self.cu_seqlens[-1]} tokens and the sequence {seqlen}; they must agree."
            )
        pieces = 2 * world_size
        return _joined(
            _chunk(start, stop - start, pieces, i)
            for start, stop in zip(self.cu_seqlens, self.cu_seqlens[1:], strict=False)
            for i in (rank, pieces - 1 - rank)
        )


def per_document(cu_seqlens: Iterable[int] | Tensor) -> PerDocument:
    """The layout that spreads every packed document over all ranks, each as a zigzag.

    `cu_seqlens`: where documents begin, and the total length, as for `Documents`.

    Raises:
        ValueError: `cu_seqlens` does not start at 0 or decreases; when used, the sequence has another length.

    Example:
        >>> per_document((0, 4, 8))(8, 2, 0)
        (range(0, 1), range(3, 5), range(7, 8))
    """
    return PerDocument(cu_seqlens)  # type: ignore[arg-type]


Layout = str | PerDocument

_LAYOUTS: dict[str, LayoutFunction] = {f.__name__: f for f in (contiguous, zigzag, striped)}


def layouts() -> dict[str, LayoutFunction]:
    """The named layouts."""
    return dict(_LAYOUTS)


def resolve(layout: Layout) -> LayoutFunction:
    """The function of a layout given by name or as a value.

    Raises:
        ValueError: there is no layout of that name.
    """
    if isinstance(layout, str):
        if layout not in _LAYOUTS:
            raise ValueError(
                f"layout is {layout!r}; it must be one of {', '.join(map(repr, _LAYOUTS))}, or a value such as per_document(...)."
            )
        return _LAYOUTS[layout]
    if not isinstance(layout, PerDocument):
        raise ValueError(
            f"layout is {layout!r}; it must be a name ({', '.join(map(repr, _LAYOUTS))}) or a value such as per_document(...)."
        )
    return layout


def decode(name: str, code: Tensor | None) -> Layout:
    """The layout that entered an operator as its name, or (with an empty name) as the `code` of a value."""
    if name or code is None:
        return name
    return _per_document(code.numpy().tobytes())


@functools.lru_cache(64)
def _per_document(code: bytes) -> PerDocument:
    return PerDocument(tuple(np.frombuffer(code, dtype=np.int64)[3:].tolist()))


def fingerprint(layout: Layout) -> str:
    """What ranks compare: the name, or sixteen hex digits that stand for the value."""
    return (
        layout if isinstance(layout, str) else hashlib.blake2b(layout.code.numpy().tobytes(), digest_size=8).hexdigest()
    )


@functools.lru_cache(1024)
def ranges(layout: Layout, seqlen: int, world_size: int, rank: int) -> Ranges:
    """`layout(seqlen, world_size, rank)`, remembered."""
    return resolve(layout)(seqlen, world_size, rank)


@functools.lru_cache(256)
def positions(layout: Layout, seqlen: int, world_size: int, rank: int) -> Tensor:
    """The global positions of a rank's rows, in local order: int64 `[S]` on the CPU, increasing. Do not write to it.

    Example:
        >>> positions("zigzag", 8, 2, 1)
        tensor([2, 3, 4, 5])
    """
    parts = [np.arange(r.start, r.stop, r.step, dtype=np.int64) for r in ranges(layout, seqlen, world_size, rank)]
    with torch.inference_mode(False):  # it is remembered, and training may use it next
        return torch.from_numpy(np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64))
