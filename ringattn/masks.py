"""Masks: for each query row, the keys it may see, as disjoint intervals of global positions.

A mask is data. Its `intervals` say what a row sees; its `code`, an int64 vector, says which mask it is: equality, hashing, the
fingerprint that ranks compare and the form in which it enters a graph of `torch.compile` all come from that one vector.
"""

import dataclasses
import functools
import hashlib
import operator
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "Bounds",
    "Causal",
    "Chunked",
    "Documents",
    "Full",
    "Mask",
    "PrefixLM",
    "Rows",
    "Spans",
    "Window",
    "decode",
    "kinds",
]

Intervals = tuple[tuple[Tensor, Tensor], ...]

NO_END = 2**31 - 1  # a `hi` that every sequence clips

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

_KINDS: dict[int, type["Mask"]] = {}


def kinds() -> tuple[type["Mask"], ...]:
    """Every kind of mask there is, `And` and `Or` included."""
    return tuple(_KINDS.values())


class Mask:
    """Base of all masks: frozen, hashable, composable with `&` and `|`.

    A kind of mask is one subclass: a frozen dataclass with a `KIND` number of its own, `intervals`, `_ints` (what `code` holds
    after the kind) and `_parse` (the way back).

    Attributes:
        code: int64 `[n]` on the CPU, the complete description.
        seqlen: the only number of global tokens that the mask is for, or None for any.
        batch: the only batch size that the mask is for, or None for any.
    """

    KIND: ClassVar[int]
    code: Tensor
    seqlen: int | None = None
    batch: int | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        holder = _KINDS.get(cls.KIND, cls)
        if holder.__qualname__ != cls.__qualname__:  # the same class may be defined again, as in a notebook
            raise ValueError(f"{cls.__name__}: kind {cls.KIND} is {holder.__name__}'s; choose a free number.")
        _KINDS[cls.KIND] = cls

    def intervals(self, q_pos: Tensor) -> Intervals:
        """What the rows at global positions `q_pos` (int64 `[S]`, increasing) see.

        Returns pairs `(lo, hi)`, int64 `[S]` or `[batch, S]`: row q sees key k iff `lo[q] <= k < hi[q]` in one of them. The
        intervals of a row are disjoint; one with `lo >= hi` is empty; `hi` may lie beyond the sequence.
        """
        raise NotImplementedError

    @classmethod
    def _parse(cls, ints: "_Reader") -> "Mask":
        raise NotImplementedError

    def _seal(self, ints: Sequence[int], *parts: Tensor) -> None:
        """Build `code`; the last line of every `__post_init__`."""
        code = torch.tensor([self.KIND, *ints], dtype=torch.int64, device="cpu")
        if parts:
            code = torch.cat([code, *parts])
        if (
            not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
        ):  # autograd keeps it when the mask is used in training
            with torch.inference_mode(False):
                code = code.clone()
        object.__setattr__(self, "code", code)

    @functools.cached_property
    def _bytes(self) -> bytes:
        return self.code.numpy().tobytes()

    @functools.cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits, the same in every process, that stand for the mask when ranks compare theirs."""
        return hashlib.blake2b(self._bytes, digest_size=8).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and self._bytes == other._bytes

    def __hash__(self) -> int:
        return hash(self._bytes)

    def __and__(self, other: "Mask") -> "Mask":
        return And(self, other)

    def __or__(self, other: "Mask") -> "Mask":
        return Or(self, other)


class _Reader:
    """Walks a `code` from front to back."""

    def __init__(self, code: np.ndarray) -> None:
        self.code, self.at = code, 0

    def number(self) -> int:
        self.at += 1
        return int(self.code[self.at - 1])

    def vector(self, n: int) -> np.ndarray:
        self.at += n
        return self.code[self.at - n : self.at]

    def mask(self) -> Mask:
        return _KINDS[self.number()]._parse(self)


@functools.lru_cache(256)
def _decode(code: bytes) -> Mask:
    return _Reader(np.frombuffer(code, dtype=np.int64)).mask()


def decode(code: Tensor) -> Mask:
    """The mask whose `code` this is (int64 `[n]` on the CPU).

    Example:
        >>> decode(Window(3).code)
        Window(left=3, right=0)
    """
    return _decode(code.numpy().tobytes())


@typing.dataclass_transform(eq_default=False, frozen_default=True)
def _kind(cls: type) -> type:
    """A frozen dataclass that keeps `Mask`'s equality and hash."""
    return dataclasses.dataclass(frozen=True, eq=False)(cls)


def _count(owner: str, name: str, value: object, least: int = 0) -> int:
    number = value if isinstance(value, int) else _index(value)
    if number is None or isinstance(number, bool) or not least <= number < 2**62:
        raise ValueError(f"{owner}: {name} is {value!r}; it must be an integer of at least {least}.")
    return number


def _index(value: Any) -> int | None:
    """An integer of numpy or torch as Python's; None where it is none."""
    try:
        return operator.index(value)
    except TypeError:
        return None


@_kind
class Full(Mask):
    """Every row sees every key.

    Example:
        >>> [(lo.tolist(), hi.tolist()) for lo, hi in (Full() & Causal()).intervals(torch.arange(3))]
        [([0, 0, 0], [1, 2, 3])]
    """

    KIND = 1

    def __post_init__(self) -> None:
        self._seal(())

    def intervals(self, q_pos: Tensor) -> Intervals:
        return ((torch.zeros_like(q_pos), torch.full_like(q_pos, NO_END)),)

    @classmethod
    def _parse(cls, ints: _Reader) -> Mask:
        return cls()


@_kind
class Causal(Mask):
    """A row sees itself and every key before it."""

    KIND = 2

    def __post_init__(self) -> None:
        self._seal(())

    def intervals(self, q_pos: Tensor) -> Intervals:
        return ((torch.zeros_like(q_pos), q_pos + 1),)

    @classmethod
    def _parse(cls, ints: _Reader) -> Mask:
        return cls()


@_kind
class Window(Mask):
    """A row sees itself, `left` keys before it and `right` keys after it; None is unbounded.

    The numbers count the *other* tokens. Hugging Face's `sliding_window=w` counts the row itself, so it is `Window(w - 1)` where
    causal and `Window(w, w)` in bidirectional models.

    Raises:
        ValueError: a number is negative or not an integer.

    Example:
        >>> [(lo.tolist(), hi.tolist()) for lo, hi in Window(1).intervals(torch.arange(4))]
        [([0, 0, 1, 2], [1, 2, 3, 4])]
    """

    left: int | None
    right: int | None = 0
    KIND = 3

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _count("Window", name, getattr(self, name)))
        self._seal([-1 if n is None else n for n in (self.left, self.right)])

    def intervals(self, q_pos: Tensor) -> Intervals:
        lo = torch.zeros_like(q_pos) if self.left is None else (q_pos - self.left).clamp(min=0)
        hi = torch.full_like(q_pos, NO_END) if self.right is None else q_pos + min(self.right, NO_END) + 1
        return ((lo, hi),)

    @classmethod
    def _parse(cls, ints: _Reader) -> Mask:
        left, right = ints.number(), ints.number()
        return cls(None if left < 0 else left, None if right < 0 else right)


@_kind
class Documents(Mask):
    """Packed documents: a row sees only its own document, and there (with `causal`) nothing after itself.

    `cu_seqlens`: where documents begin, and the total length: `(0, 5, 9)` is a document of 5 tokens and one of 4. A sequence of
    integers or a tensor; a CUDA tensor is read once, here. Empty documents are legal.

    Raises:
        ValueError: `cu_seqlens` does not start at 0, decreases, or has fewer than two entries.
    """

    cu_seqlens: tuple[int, ...]
    causal: bool = True
    KIND = 4

    def __post_init__(self) -> None:
        cu = _ints("Documents", "cu_seqlens", self.cu_seqlens)
        object.__setattr__(self, "cu_seqlens", cu)
        if len(cu) < 2 or cu[0] != 0:
            raise ValueError(
                f"Documents: cu_seqlens is {_short(cu)}; it must start at 0 and end at the number of tokens."
            )
        falls = [i for i in range(1, len(cu)) if cu[i] < cu[i - 1]]
        if falls:
            raise ValueError(
                f"Documents: cu_seqlens falls from {cu[falls[0] - 1]} to {cu[falls[0]]}; it must not decrease."
            )
        object.__setattr__(self, "seqlen", cu[-1])
        self._seal([int(bool(self.causal)), len(cu), *cu])

    def intervals(self, q_pos: Tensor) -> Intervals:
        # written out once for all tokens, which is quicker than a search for each row
        ends = torch.tensor(self.cu_seqlens, dtype=q_pos.dtype, device=q_pos.device)
        size, lengths, at = self.cu_seqlens[-1], ends.diff(), q_pos.clamp(max=self.cu_seqlens[-1] - 1)
        lo = ends[:-1].repeat_interleave(lengths, output_size=size).take(at)
        return ((lo, q_pos + 1 if self.causal else ends[1:].repeat_interleave(lengths, output_size=size).take(at)),)

    @classmethod
    def _parse(cls, ints: _Reader) -> Mask:
        causal, n = ints.number(), ints.number()
        return cls(tuple(ints.vector(n).tolist()), bool(causal))


@_kind
class Chunked(Mask):
    """Causal inside chunks of `size` tokens whose borders are at `offset + i * size` (Llama 4's local layers, with offset 0).

    Raises:
        ValueError: `size` is below 1 or `offset` is negative.
    """

    size: int
    offset: int = 0
    KIND = 5

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", _count("Chunked", "size", self.size, 1))
        object.__setattr__(self, "offset", _count("Chunked", "offset", self.offset))
        self._seal([self.size, self.offset])

    def intervals(self, q_pos: Tensor) -> Intervals:
        start = torch.div(q_pos - self.offset, self.size, rounding_mode="floor") * self.size + self.offset
        return ((start.clamp(min=0), q_pos + 1),)

    @classmethod
    def _parse(cls, ints: _Reader) -> Mask:
        return cls(ints.number(), ints.number())


@_kind
class PrefixLM(Mask):
    """Causal, and every row sees the first `prefix` keys: a bidirectional prompt, a causal answer."""

    prefix: int
    KIND = 6

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix", _count("PrefixLM", "prefix", self.prefix))
        self._seal([self.prefix])

    def intervals(self, q_pos: Tensor) -> Intervals:
        return ((torch.zeros_like(q_pos), (q_pos + 1).clamp(min=self.prefix)),)

    @classmethod
    def _parse(cls, ints: _Reader) -> Mask:
        return cls(ints.number())


@_kind
class Spans(Mask):
    """Causal, and bidirectional inside each span `(start, end)`: images in a text, for instance.

    Raises:
        ValueError: a span is empty or negative, or spans overlap or are out of order.
    """

    starts_ends: tuple[tuple[int, int], ...]
    KIND = 7

    def __post_init__(self) -> None:
        spans = tuple(_ints("Spans", "a span", pair) for pair in self.starts_ends)
        if any(len(span) != 2 for span in spans):
            raise ValueError(f"Spans: starts_ends is {self.starts_ends!r}; it must hold pairs (start, end).")
        object.__setattr__(self, "starts_ends", spans)
        end = 0
        for start, stop in spans:
            if start < end or stop <= start:
                raise ValueError(
                    f"Spans: ({start}, {stop}) is empty or begins before {end}; spans must be ordered and disjoint."
                )
            end = stop
        self._seal([len(spans), *(x for pair in spans for x in pair)])

    def intervals(self, q_pos: Tensor) -> Intervals:
        hi = q_pos + 1
        if self.starts_ends:
            starts, ends = torch.tensor(self.starts_ends, dtype=q_pos.dtype, device=q_pos.device).T.contiguous()
            i = torch.searchsorted(starts, q_pos, right=True) - 1
            hi = torch.where(i >= 0, torch.maximum(hi, ends[i.clamp(min=0)]), hi)
        return ((torch.zeros_like(q_pos), hi),)

    @classmethod
    def _parse(cls, ints: _Reader) -> Mask:
        n = ints.number()
        return cls(tuple((int(a), int(b)) for a, b in ints.vector(2 * n).reshape(n, 2)))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Bounds(Mask):
    """Any one interval per row: row q sees key k iff `lo[q] <= k < hi[q]`.

    `lo`, `hi`: integers `[N]`, or `[B, N]` where batch rows differ. A row with `lo >= hi` sees nothing; over the other rows
    neither may decrease (checked when the plan is made).

    Raises:
        ValueError: shapes differ, or are not `[N]` or `[B, N]`.
    """

    lo: Tensor
    hi: Tensor
    KIND = 8

    def __post_init__(self) -> None:
        for name in ("lo", "hi"):
            value = getattr(self, name)
            value = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
            if value.dtype not in _INTEGERS:
                raise ValueError(f"Bounds: {name} is {value.dtype}; it must hold integers.")
            # a copy: the caller may write to theirs
            object.__setattr__(self, name, value.to("cpu", torch.int64, copy=True).contiguous())
        if self.lo.shape != self.hi.shape or self.lo.dim() not in (1, 2):
            raise ValueError(
                f"Bounds: lo has shape {tuple(self.lo.shape)} and hi {tuple(self.hi.shape)}; both must be [N], or both [B, N]."
            )
        object.__setattr__(self, "seqlen", self.lo.shape[-1])
        object.__setattr__(self, "batch", self.lo.shape[0] if self.lo.dim() == 2 else None)
        self._seal([-1 if self.batch is None else self.batch, self.lo.shape[-1]], self.lo.flatten(), self.hi.flatten())

    def __repr__(self) -> str:
        return f"Bounds(shape={tuple(self.lo.shape)}, fingerprint={self.fingerprint})"

    def intervals(self, q_pos: Tensor) -> Intervals:
        return ((self.lo[..., q_pos], self.hi[..., q_pos]),)

    @classmethod
    def _parse(cls, ints: _Reader) -> Mask:
        batch, n = ints.number(), ints.number()
        shape = (n,) if batch < 0 else (batch, n)
        lo, hi = (torch.from_numpy(ints.vector(int(np.prod(shape))).copy()).view(shape) for _ in range(2))
        return cls(lo, hi)


def _shared(owner: str, name: str, values: Iterable[int | None]) -> int | None:
    """The one value that is not None."""
    given = sorted({v for v in values if v is not None})
    if len(given) > 1:
        raise ValueError(f"{owner}: its masks are for {name} {given[0]} and {given[1]}; they must agree.")
    return given[0] if given else None


@dataclasses.dataclass(frozen=True, eq=False, init=False)
class Rows(Mask):
    """A mask of its own for each row of the batch: `Rows(m0, m1)` is for a batch of two.

    Raises:
        ValueError: no mask is given, one of them is a mask for a whole batch, or they are for different lengths.
    """

    masks: tuple[Mask, ...]
    KIND = 9

    def __init__(self, *masks: Mask) -> None:
        if not masks or any(not isinstance(m, Mask) or m.batch is not None for m in masks):
            raise ValueError(
                f"Rows: got {masks}; it needs one mask for each batch row, none of them for a whole batch."
            )
        object.__setattr__(self, "masks", masks)
        object.__setattr__(self, "seqlen", _shared("Rows", "lengths", [m.seqlen for m in masks]))
        object.__setattr__(self, "batch", len(masks))
        self._seal([len(masks)], *(m.code for m in masks))

    def intervals(self, q_pos: Tensor) -> Intervals:
        rows = [m.intervals(q_pos) for m in self.masks]
        empty = (torch.zeros_like(q_pos), torch.zeros_like(q_pos))
        count = max(map(len, rows))
        padded = [[*row, *[empty] * (count - len(row))] for row in rows]
        return tuple(
            (torch.stack([r[i][0] for r in padded]), torch.stack([r[i][1] for r in padded])) for i in range(count)
        )

    @classmethod
    def _parse(cls, ints: _Reader) -> Mask:
        return cls(*[ints.mask() for _ in range(ints.number())])


class _Pair(Mask):
    """Two masks and what becomes of their intervals."""

    KIND = 0  # never in a code
    left: Mask
    right: Mask

    def __post_init__(self) -> None:
        name = type(self).__name__
        for side in (self.left, self.right):
            if not isinstance(side, Mask):
                raise ValueError(f"{name}: {side!r} is no mask; both sides must be masks.")
        object.__setattr__(self, "seqlen", _shared(name, "lengths", (self.left.seqlen, self.right.seqlen)))
        object.__setattr__(self, "batch", _shared(name, "batch sizes", (self.left.batch, self.right.batch)))
        self._seal((), self.left.code, self.right.code)

    @classmethod
    def _parse(cls, ints: _Reader) -> Mask:
        make: Callable[[Mask, Mask], Mask] = cls
        return make(ints.mask(), ints.mask())


@_kind
class And(_Pair):
    """`a & b`: what both see. Intervals of either are disjoint, so their pairwise intersections are too."""

    left: Mask
    right: Mask
    KIND = 10

    def intervals(self, q_pos: Tensor) -> Intervals:
        return tuple(
            (torch.maximum(lo, lo2), torch.minimum(hi, hi2))
            for lo, hi in self.left.intervals(q_pos)
            for lo2, hi2 in self.right.intervals(q_pos)
        )


@_kind
class Or(_Pair):
    """`a | b`: what either sees, as the intervals of `a` and what they leave of the intervals of `b`."""

    left: Mask
    right: Mask
    KIND = 11

    def intervals(self, q_pos: Tensor) -> Intervals:
        first = self.left.intervals(q_pos)
        second = self.right.intervals(q_pos)
        if len(first) == len(second) == 1 and (hull := _hull(first[0], second[0])) is not None:
            return (hull,)
        pieces = list(second)
        for taken in first:
            pieces = [rest for piece in pieces for rest in _without(piece, taken)]
        return (*first, *pieces)


def _hull(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | None:
    """The one interval that is the union of both, or None where some row's two leave a gap or one is empty."""
    (lo, hi), (lo2, hi2) = a, b
    touch = (torch.maximum(lo, lo2) <= torch.minimum(hi, hi2)) & (lo < hi) & (lo2 < hi2)
    return (torch.minimum(lo, lo2), torch.maximum(hi, hi2)) if bool(touch.all()) else None


def _without(piece: tuple[Tensor, Tensor], taken: tuple[Tensor, Tensor]) -> Intervals:
    """`piece` less `taken`: its part to the left, its part to the right, and all of it in rows where `taken` is empty.

    Three pieces and not two, so that each keeps bounds that never decrease.
    """
    (lo, hi), (lo2, hi2) = piece, taken
    empty = lo2 >= hi2
    left = (lo, torch.where(empty, lo, torch.minimum(hi, lo2)))
    right = (torch.where(empty, hi, torch.maximum(lo, hi2)), hi)
    whole = (lo, torch.where(empty, hi, lo))
    return tuple((a, b) for a, b in (left, right, whole) if bool((a < b).any()))


def _ints(owner: str, name: str, values: Any) -> tuple[int, ...]:
    if isinstance(values, Tensor | np.ndarray):
        values = values.tolist()
    found = tuple(v if isinstance(v, int) else _index(v) for v in values) if isinstance(values, Iterable) else (None,)
    if any(v is None or isinstance(v, bool) for v in found):
        raise ValueError(f"{owner}: {name} is {values!r}; it must be a sequence of integers.")
    return typing.cast(tuple[int, ...], found)


def _short(values: Sequence[int]) -> str:
    return str(tuple(values)) if len(values) <= 8 else f"({', '.join(map(str, values[:4]))}, ..., {values[-1]})"
