"""The plan: who computes which keys at which hop, and what travels. Pure, host only, the same on every rank.

Local order is global order, so an interval of global positions is an interval of rows of whatever keys were received. That is
all the geometry there is: the plan translates a mask's intervals once per hop, and nothing below it knows a layout.
"""

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ringattn import layout as layouts
from ringattn.layout import Layout
from ringattn.masks import Mask

__all__ = ["Block", "Hop", "Plan", "build_plan"]

Runs = tuple[tuple[int, int], ...]  # disjoint, increasing [start, stop)


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """The smallest rectangle of local query rows x received key rows that holds what one interval sees on one hop.

    Attributes:
        rows: local query rows; `keys`: key rows among those received (of a rank's own keys on hop 0).
        is_full: every row sees every key.
        area: (query, key) pairs seen, summed over the batch rows of a mask for a whole batch.
        lo, hi: int32 `[S]` or `[batch, S]` for *every* local row, relative to `keys.start`; a row that sees nothing has
            `lo = len(keys)`, `hi = 0`.
    """

    rows: range
    keys: range
    is_full: bool
    area: int
    lo: Tensor = dataclasses.field(repr=False)
    hi: Tensor = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, eq=False)
class Hop:
    """One exchange: rows go straight to the rank `offset` places on, and come from the rank `offset` places back.

    Attributes:
        send: this rank's rows that the receiver reads; `recv`: the sender's rows that this rank reads. Both empty on hop 0.
        blocks: what is computed with the keys of this hop.
    """

    offset: int
    send: tuple[range, ...]
    recv: tuple[range, ...]
    blocks: tuple[Block, ...]

    @property
    def send_rows(self) -> int:
        """How many rows this rank sends."""
        return sum(map(len, self.send))

    @property
    def recv_rows(self) -> int:
        """How many rows this rank receives."""
        return sum(map(len, self.recv))


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """All hops of one rank. Two plans are equal if they were built from the same five arguments.

    `len(plan.hops)` counts the hops made, a rank's own included; it is the same on all ranks.
    """

    mask: Mask
    layout: Layout
    seqlen: int
    world_size: int
    rank: int
    hops: tuple[Hop, ...] = dataclasses.field(repr=False)

    def _key(self) -> tuple[Mask, Layout, int, int, int]:
        return self.mask, self.layout, self.seqlen, self.world_size, self.rank

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    @property
    def positions(self) -> Tensor:
        """The global positions of this rank's rows, int64 `[S]`, increasing."""
        return layouts.positions(self.layout, self.seqlen, self.world_size, self.rank)

    def positions_of(self, hop: Hop) -> Tensor:
        """The global positions of the key rows at hand on a hop, int64 `[T]`, increasing."""
        if hop.offset == 0:
            return self.positions
        source = (self.rank - hop.offset) % self.world_size
        theirs = layouts.positions(self.layout, self.seqlen, self.world_size, source)
        return torch.cat([theirs[r.start : r.stop] for r in hop.recv]) if hop.recv else theirs[:0]

    @property
    def area(self) -> int:
        """(query, key) pairs that this rank computes and a row sees, per batch row (of the whole batch, if the mask is for one)."""
        return sum(block.area for hop in self.hops for block in hop.blocks)

    def flops(
        self, *, batch: int, heads: int, head_dim: int, v_head_dim: int | None = None, backward: bool = False
    ) -> int:
        """Floating-point operations of this rank's matrix products over visible pairs only; a multiply-add is two.

        Forward: Q K^T and P V. Backward: those of dQ, dK, dP, dV and Q K^T once more.
        """
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        per_pair = 3 * head_dim + 2 * v_head_dim if backward else head_dim + v_head_dim
        return 2 * heads * per_pair * self.area * (1 if self.mask.batch is not None else batch)

    def bytes(
        self,
        *,
        batch: int,
        kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        backward: bool = False,
    ) -> int:
        """Bytes that this rank sends: K and V of `dtype`; in backward these again, and dK and dV in fp32 (fp64 for fp64)."""
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        per_row = batch * kv_heads * (head_dim + v_head_dim)
        keys = sum(hop.send_rows for hop in self.hops) * per_row * dtype.itemsize
        if not backward:
            return keys
        # what was received goes home as gradients
        return keys + sum(hop.recv_rows for hop in self.hops) * per_row * max(4, dtype.itemsize)


@functools.lru_cache(8)
def _canonical(mask: Mask, seqlen: int) -> tuple[np.ndarray, ...]:
    """The mask's intervals over the whole sequence, each int64 `[2, N]` or `[2, batch, N]`: clipped, checked, none all empty.

    A row that sees nothing has `lo = N`, `hi = 0`.
    """
    out = []
    for lo, hi in mask.intervals(torch.arange(seqlen, device="cpu")):
        lo, hi = (t.numpy().clip(0, seqlen) for t in torch.broadcast_tensors(lo, hi))
        seen = lo < hi
        if not seen.any():
            continue
        bounds = np.stack([np.where(seen, lo, seqlen), np.where(seen, hi, 0)])
        _check_order(mask, bounds, seen)
        out.append(bounds)
    return tuple(out)


def _check_order(mask: Mask, bounds: np.ndarray, seen: np.ndarray) -> None:
    """Refuse bounds that decrease from one row that sees something to the next."""
    for name, values in zip(("lo", "hi"), bounds, strict=True):
        for row_values, row_seen in zip(np.atleast_2d(values), np.atleast_2d(seen), strict=True):
            rows = np.flatnonzero(row_seen)
            falls = np.flatnonzero(np.diff(row_values[rows]) < 0)
            if len(falls):
                a, b = rows[falls[0]], rows[falls[0] + 1]
                raise ValueError(
                    f"{type(mask).__name__}: {name} falls from {row_values[a]} at row {a} to {row_values[b]} at row {b}; "
                    "over the rows that see something it must not decrease. Split the mask with | into parts that do not."
                )


@functools.lru_cache(1024)
def _visible(mask: Mask, layout: Layout, seqlen: int, world_size: int, rank: int) -> np.ndarray:
    """The global keys that a rank's rows see, over all intervals and batch rows, as disjoint increasing runs, int64 `[n, 2]`."""
    mine = layouts.positions(layout, seqlen, world_size, rank).numpy()
    pairs = []
    for bounds in _canonical(mask, seqlen):
        lo, hi = bounds[..., mine].reshape(2, -1)
        pairs.append(np.stack([lo, hi], 1)[lo < hi])
    runs = np.concatenate(pairs) if pairs else np.zeros((0, 2), dtype=np.int64)
    if len(runs) == 0:
        return runs
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    reach = np.maximum.accumulate(runs[:, 1])
    starts = np.flatnonzero(np.r_[True, runs[1:, 0] > reach[:-1]])  # a gap before it
    return np.stack([runs[starts, 0], reach[np.r_[starts[1:] - 1, len(runs) - 1]]], 1)


def _needed(mask: Mask, layout: Layout, seqlen: int, world_size: int, rank: int, source: int) -> tuple[range, ...]:
    """The local rows of `source` that a row of `rank` sees."""
    runs = _visible(mask, layout, seqlen, world_size, rank)
    theirs = layouts.positions(layout, seqlen, world_size, source).numpy()
    rows = np.searchsorted(theirs, runs)
    rows = rows[rows[:, 0] < rows[:, 1]]
    if len(rows) == 0:
        return ()
    # runs that are apart in the sequence may touch among the rows of one rank
    starts = np.flatnonzero(np.r_[True, rows[1:, 0] > rows[:-1, 1]])
    stops = rows[np.r_[starts[1:] - 1, len(rows) - 1], 1]
    return tuple(range(int(a), int(b)) for a, b in zip(rows[starts, 0], stops, strict=True))


@functools.lru_cache(64)
def _offsets(mask: Mask, layout: Layout, seqlen: int, world_size: int) -> tuple[int, ...]:
    """The offsets at which some rank reads something, ascending, without 0."""
    table = [
        (r.start, r.stop, r.step, rank)
        for rank in range(world_size)
        for r in layouts.ranges(layout, seqlen, world_size, rank)
    ]
    if not table:
        return ()
    start, stop, step, owner = np.array(table, dtype=np.int64).T
    found: set[int] = set()
    for rank in range(world_size):
        for a, b in _visible(mask, layout, seqlen, world_size, rank):
            first = (
                start + np.maximum(0, -(-(a - start) // step)) * step
            )  # the first position of each range that is not before a
            found.update(np.unique((rank - owner[first < np.minimum(stop, b)]) % world_size).tolist())
        if len(found) == world_size:
            break
    return tuple(sorted(found - {0}))


def _blocks(mask: Mask, seqlen: int, mine: np.ndarray, keys: np.ndarray) -> Iterator[Block]:
    """One block for each interval that sees one of the keys at hand (global positions `keys`)."""
    if len(mine) == 0:
        return
    for bounds in _canonical(mask, seqlen):
        lo, hi = np.searchsorted(keys, bounds[..., mine])
        seen = lo < hi
        rows = np.flatnonzero(seen.reshape(-1, len(mine)).any(0))
        if len(rows) == 0:
            continue
        first, last = int(lo[seen].min()), int(hi[seen].max())
        lo = np.where(seen, lo - first, last - first).astype(np.int32)
        hi = np.where(seen, hi - first, 0).astype(np.int32)
        row_range = range(int(rows[0]), int(rows[-1]) + 1)
        inside = slice(row_range.start, row_range.stop)
        area = int((hi - lo)[seen].sum(dtype=np.int64))
        is_full = bool((lo[..., inside] == 0).all() and (hi[..., inside] == last - first).all())
        yield Block(row_range, range(first, last), is_full, area, torch.from_numpy(lo), torch.from_numpy(hi))


@functools.lru_cache(16)
def build_plan(mask: Mask, layout: Layout, seqlen: int, world_size: int, rank: int) -> Plan:
    """The plan of one rank: per hop what it sends, receives and computes.

    `layout` is a name or a layout value; `seqlen` counts the tokens of the whole sequence. Built without communication, remembered,
    and the same whichever rank builds it.

    Raises:
        ValueError: the layout is unknown, the mask is for another length, its bounds decrease, or `rank` is no rank.

    Example:
        >>> from ringattn.masks import Window
        >>> [hop.offset for hop in build_plan(Window(3), "contiguous", 64, 8, 0).hops]
        [0, 1]
    """
    if not isinstance(mask, Mask):
        raise ValueError(f"build_plan: mask is {mask!r}; it must be a mask such as ringattn.Causal().")
    if seqlen < 0 or world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(
            f"build_plan: seqlen {seqlen}, world_size {world_size}, rank {rank}; needs seqlen >= 0 and 0 <= rank < world_size."
        )
    if mask.seqlen is not None and mask.seqlen != seqlen:
        raise ValueError(
            f"build_plan: mask {type(mask).__name__} is for {mask.seqlen} tokens and the sequence has {seqlen}; they must agree."
        )
    mine = layouts.positions(layout, seqlen, world_size, rank)
    hops = [Hop(0, (), (), tuple(_blocks(mask, seqlen, mine.numpy(), mine.numpy())))]
    for offset in _offsets(mask, layout, seqlen, world_size):
        source, target = (rank - offset) % world_size, (rank + offset) % world_size
        send = _needed(mask, layout, seqlen, world_size, target, rank)
        recv = _needed(mask, layout, seqlen, world_size, rank, source)
        theirs = layouts.positions(layout, seqlen, world_size, source).numpy()
        keys = np.concatenate([theirs[r.start : r.stop] for r in recv]) if recv else theirs[:0]
        hops.append(Hop(offset, send, recv, tuple(_blocks(mask, seqlen, mine.numpy(), keys))))
    return Plan(mask, layout, seqlen, world_size, rank, tuple(hops))
