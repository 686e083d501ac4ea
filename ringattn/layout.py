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
    "Balanced",
    "Layout",
    "PerDocument",
    "Value",
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


class Value:
    """A layout given as a value: frozen, and the same in every process if its `code` is.

    Attributes:
        code: int64 `[n]` on the CPU, the complete description, which begins with the kind of value.
        title: what pictures and messages call it.
    """

    code: Tensor
    title: str

    def __call__(self, seqlen: int, world_size: int, rank: int) -> Ranges:
        raise NotImplementedError

    @functools.cached_property
    def _bytes(self) -> bytes:
        return self.code.numpy().tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and self._bytes == other._bytes

    def __hash__(self) -> int:
        return hash(self._bytes)


@dataclasses.dataclass(frozen=True, eq=False)
class PerDocument(Value):
    """Each packed document laid out as a zigzag of its own; made by `per_document`."""

    cu_seqlens: tuple[int, ...]
    code: Tensor = dataclasses.field(init=False, repr=False)
    title = "per document"

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


@dataclasses.dataclass(frozen=True, eq=False)
class Balanced(Value):
    """Chunks of `chunk` tokens, the i-th on rank `owners[i]`; made by `ringattn.balanced` for one length and world size.

    Raises:
        ValueError: when used, the sequence has another length or the ring another size.
    """

    seqlen: int
    world_size: int
    chunk: int
    owners: tuple[int, ...] = dataclasses.field(repr=False)
    code: Tensor = dataclasses.field(init=False, repr=False)
    title = "balanced"
    KIND = -1  # no mask's, which a code of documents begins with

    def __post_init__(self) -> None:
        numbers = [self.KIND, self.seqlen, self.world_size, self.chunk, *self.owners]
        with torch.inference_mode(False):  # it is remembered, and training may use it next
            object.__setattr__(self, "code", torch.tensor(numbers, dtype=torch.int64, device="cpu"))

    def __call__(self, seqlen: int, world_size: int, rank: int) -> Ranges:
        if (seqlen, world_size) != (self.seqlen, self.world_size):
            raise ValueError(
                f"balanced: it was made for {self.seqlen} tokens on {self.world_size} ranks and is used for {seqlen} on {world_size}; "
                "they must agree. Make one with ringattn.balanced(mask, seqlen, world_size)."
            )
        starts = np.flatnonzero(np.array(self.owners, dtype=np.int64) == rank) * self.chunk
        return _joined(range(int(start), min(int(start) + self.chunk, seqlen)) for start in starts)


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


Layout = str | Value

_LAYOUTS: dict[str, LayoutFunction] = {f.__name__: f for f in (contiguous, zigzag, striped)}


def layouts() -> dict[str, LayoutFunction]:
    """The named layouts."""
    return dict(_LAYOUTS)


def resolve(layout: Layout) -> LayoutFunction:
    """The function of a layout given by name or as a value.

    Raises:
        ValueError: there is no layout of that name.
    """
    if layout == "auto":
        raise ValueError(
            "layout is 'auto'; it must be one layout before tensors are cut. Take ringattn.choose_layout(mask, seqlen, world_size) "
            "and pass what it returns everywhere."
        )
    if isinstance(layout, str):
        if layout not in _LAYOUTS:
            raise ValueError(
                f"layout is {layout!r}; it must be one of {', '.join(map(repr, _LAYOUTS))}, or a value such as per_document(...)."
            )
        return _LAYOUTS[layout]
    if not isinstance(layout, Value):
        raise ValueError(
            f"layout is {layout!r}; it must be a name ({', '.join(map(repr, _LAYOUTS))}) or a value such as per_document(...)."
        )
    return layout


def decode(name: str, code: Tensor | None) -> Layout:
    """The layout that entered an operator as its name, or (with an empty name) as the `code` of a value."""
    if name or code is None:
        return name
    return _decode(code.numpy().tobytes())


@functools.lru_cache(64)
def _decode(code: bytes) -> Value:
    kind, *numbers = np.frombuffer(code, dtype=np.int64).tolist()
    if kind == Balanced.KIND:
        return Balanced(numbers[0], numbers[1], numbers[2], tuple(numbers[3:]))
    return PerDocument(tuple(numbers[2:]))


def fingerprint(layout: Layout) -> str:
    """What ranks compare: the name, or sixteen hex digits that stand for the value."""
    return layout if isinstance(layout, str) else hashlib.blake2b(layout._bytes, digest_size=8).hexdigest()


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
