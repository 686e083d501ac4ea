"""The plan: who computes which keys at which hop, and what travels. Pure, host only, the same on every rank.

Local order is global order, so an interval of global positions is an interval of rows of whatever keys were received. That is
all the geometry there is: the plan translates a mask's intervals once per hop, and nothing below it knows a layout.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ringattn import layout as layouts
from ringattn.layout import Layout
from ringattn.masks import Mask

__all__ = ["TILE", "Block", "Cost", "Hop", "Plan", "bounds_of", "build_plan", "check_sizes", "cost"]

TILE = 128  # rows and keys of the tiles in which work is counted, those of the fastest kernels


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

    @functools.cached_property
    def tiles(self) -> int:
        """Tiles of 128 x 128 that are computed, partial ones whole, summed over the batch rows of a mask for a whole batch.

        A tile of rows begins at a multiple of 128 local rows, one of keys at a multiple of 128 of `keys`; as a kernel does, a
        tile of rows walks from the first key that one of its rows sees to the last.
        """
        lo, hi = self.lo.numpy(), self.hi.numpy()
        starts = np.arange(0, lo.shape[-1], TILE)
        first = np.minimum.reduceat(lo, starts, axis=-1) // TILE
        stop = -(-np.maximum.reduceat(hi, starts, axis=-1) // TILE)
        return int(np.maximum(stop - first, 0).sum(dtype=np.int64))


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

    @property
    def area(self) -> int:
        """(query, key) pairs that this rank computes on this hop; see `Block.area`."""
        return sum(block.area for block in self.blocks)

    @property
    def tiles(self) -> int:
        """Tiles that this rank computes with the keys of this hop; see `Block.tiles`."""
        return sum(block.tiles for block in self.blocks)


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
        return sum(hop.area for hop in self.hops)

    def backward_hops(self, share: float) -> tuple[Hop, ...]:
        """The hops in the order of the backward pass: a rank's own keys are cut in two, by rows.

        The first part, a `share` of the pairs, is computed while the first keys arrive; the rest, at the end, while the last
        gradients go home. So it is best the share that keys have in the bytes of both.
        """
        return _backward_hops(self, share)

    @property
    def tiles(self) -> int:
        """Tiles that this rank computes; see `Block.tiles`."""
        return sum(hop.tiles for hop in self.hops)

    def flops(
        self,
        hop: Hop | None = None,
        *,
        batch: int,
        heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        backward: bool = False,
    ) -> int:
        """Floating-point operations of this rank's matrix products over visible pairs only; a multiply-add is two.

        `hop`: count those of one hop; default: of all.

        Forward: Q K^T and P V. Backward: those of dQ, dK, dP, dV and Q K^T once more.
        """
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        per_pair = 3 * head_dim + 2 * v_head_dim if backward else head_dim + v_head_dim
        area = self.area if hop is None else hop.area
        return 2 * heads * per_pair * area * (1 if self.mask.batch is not None else batch)

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


@functools.lru_cache(64)
def _backward_hops(plan: Plan, share: float) -> tuple[Hop, ...]:
    own, *others = plan.hops
    if not others:
        return plan.hops
    seen = [np.maximum(b.hi.numpy() - b.lo.numpy(), 0).reshape(-1, b.lo.shape[-1]).sum(0) for b in own.blocks]
    pairs = np.cumsum(sum(seen), dtype=np.int64) if seen else np.zeros(0, dtype=np.int64)
    row = int(np.searchsorted(pairs, share * own.area))
    if row > TILE:  # no tile is cut
        row = round(row / TILE) * TILE
    return (_part(own, 0, row), *others, _part(own, row, len(pairs)))


def _part(hop: Hop, start: int, stop: int) -> Hop:
    """What some of the rows compute on a hop that moves nothing."""
    blocks = []
    for block in hop.blocks:
        rows = range(max(start, block.rows.start), min(stop, block.rows.stop))
        if rows:
            inside = slice(rows.start, rows.stop)
            lo, hi = torch.full_like(block.lo, len(block.keys)), torch.zeros_like(block.hi)
            lo[..., inside], hi[..., inside] = block.lo[..., inside], block.hi[..., inside]
            area = int((hi - lo).clamp(min=0).sum())
            blocks.append(dataclasses.replace(block, rows=rows, area=area, lo=lo, hi=hi))
    return Hop(hop.offset, (), (), tuple(blocks))


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a layout costs, over all ranks of a ring, in tiles of 128 x 128 and in rows of K and V.

    Attributes:
        hop_tiles: for each hop, rank 0's own keys first, the tiles of the rank that computes most on it.
        rank_tiles: for each rank, its tiles on all hops.
        rows: rows of K and V that all ranks send in a forward pass.
        single_tiles: the tiles of the same mask on one device.
    """

    hop_tiles: tuple[int, ...]
    rank_tiles: tuple[int, ...]
    rows: int
    single_tiles: int

    @property
    def lockstep_tiles(self) -> int:
        """How long the ring takes, in tiles, if every hop waits for the rank that computes most on it."""
        return sum(self.hop_tiles)

    @property
    def balance(self) -> float:
        """Tiles of the busiest rank over the mean: 1 is even; the time if hops wait for nobody."""
        return max(self.rank_tiles) * len(self.rank_tiles) / max(1, sum(self.rank_tiles))

    @property
    def lockstep_balance(self) -> float:
        """`lockstep_tiles` over the mean tiles of a rank: 1 is even on every hop; never below `balance`."""
        return self.lockstep_tiles * len(self.rank_tiles) / max(1, sum(self.rank_tiles))

    @property
    def inflation(self) -> float:
        """Tiles of all ranks over those of one device: above 1 where the layout cuts tiles that one device computes whole."""
        return sum(self.rank_tiles) / max(1, self.single_tiles)


def cost(mask: Mask, layout: Layout, seqlen: int, world_size: int) -> Cost:
    """What a layout costs over all ranks; see `Cost`.

    Raises:
        ValueError: as `build_plan` does.

    Example:
        >>> from ringattn.masks import Causal
        >>> measured = cost(Causal(), "zigzag", 4096, 4)
        >>> measured.balance, measured.lockstep_balance, measured.inflation
        (1.0, 1.0, 1.0)
    """
    plans = [build_plan(mask, layout, seqlen, world_size, rank) for rank in range(world_size)]
    return Cost(
        tuple(max(hop.tiles for hop in hops) for hops in zip(*(plan.hops for plan in plans), strict=True)),
        tuple(plan.tiles for plan in plans),
        sum(hop.send_rows for plan in plans for hop in plan.hops),
        build_plan(mask, "contiguous", seqlen, 1, 0).tiles,
    )


def check_sizes(who: str, mask: Mask, seqlen: int, world_size: int, rank: int = 0) -> None:
    """Refuse what is no mask, no length, no ring or no rank of it, or a mask for another length."""
    if not isinstance(mask, Mask):
        raise ValueError(f"{who}: mask is {mask!r}; it must be a mask such as ringattn.Causal().")
    if seqlen < 0 or world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(
            f"{who}: seqlen {seqlen}, world_size {world_size}, rank {rank}; needs seqlen >= 0 and 0 <= rank < world_size."
        )
    if mask.seqlen is not None and mask.seqlen != seqlen:
        raise ValueError(
            f"{who}: mask {type(mask).__name__} is for {mask.seqlen} tokens and the sequence has {seqlen}; they must agree."
        )


@functools.lru_cache(8)
def bounds_of(mask: Mask, seqlen: int) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """The mask's intervals over the whole sequence, pairs of int32 `[N]` or `[batch, N]`: clipped, checked, none all empty.

    A row that sees nothing has `lo = N`, `hi = 0`.
    """
    out = []
    for ends in mask.intervals(layouts.positions("contiguous", seqlen, 1, 0)):
        lo, hi = (t.numpy().clip(0, seqlen).astype(np.int32) for t in torch.broadcast_tensors(*ends))
        seen = lo < hi
        if not seen.any():
            continue
        _check_order(mask, lo, hi, seen)
        if not seen.all():
            lo, hi = np.where(seen, lo, np.int32(seqlen)), np.where(seen, hi, np.int32(0))
        out.append((lo, hi))
    return tuple(out)


def _check_order(mask: Mask, lo: np.ndarray, hi: np.ndarray, seen: np.ndarray) -> None:
    """Refuse bounds that decrease from one row that sees something to the next."""
    for name, values in (("lo", lo), ("hi", hi)):
        for row_values, row_seen in zip(np.atleast_2d(values), np.atleast_2d(seen), strict=True):
            inside = row_values if row_seen.all() else row_values[row_seen]
            falls = inside[1:] < inside[:-1]
            if falls.any():
                at = int(falls.argmax())
                a, b = np.flatnonzero(row_seen)[at : at + 2]
                raise ValueError(
                    f"{type(mask).__name__}: {name} falls from {row_values[a]} at row {a} to {row_values[b]} at row {b}; "
                    "over the rows that see something it must not decrease. Split the mask with | into parts that do not."
                )


def _each_row(bounds: tuple[np.ndarray, np.ndarray], rows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """`lo` and `hi` of some rows, `[rows]`, one batch row after the other."""
    yield from zip(*(np.atleast_2d(x.take(rows, axis=-1)) for x in bounds), strict=True)


def _runs(lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    """The union of `[lo, hi)`, neither of which decreases, as runs that are apart, `[n, 2]`."""
    gaps = np.flatnonzero(lo[1:] > hi[:-1])
    runs = np.empty((len(gaps) + 1 if len(lo) else 0, 2), dtype=lo.dtype)
    if len(lo):
        runs[0, 0], runs[-1, 1] = lo[0], hi[-1]
        runs[1:, 0], runs[:-1, 1] = lo[gaps + 1], hi[gaps]
    return runs


class _Ring:
    """Who needs what on a ring, found when asked for and kept as long as the ring is."""

    def __init__(self, mask: Mask, layout: Layout, seqlen: int, world_size: int) -> None:
        self.mask, self.layout, self.seqlen, self.world_size = mask, layout, seqlen, world_size
        self._visible: dict[int, np.ndarray] = {}
        self._needed: dict[tuple[int, int], tuple[range, ...]] = {}

    def positions(self, rank: int) -> np.ndarray:
        """The global positions of a rank's rows."""
        return layouts.positions(self.layout, self.seqlen, self.world_size, rank).numpy()

    def visible(self, rank: int) -> np.ndarray:
        """The global keys that a rank's rows see, over all intervals and batch rows, as disjoint increasing runs, int32 `[n, 2]`."""
        if rank not in self._visible:
            mine = self.positions(rank)
            found = [np.zeros((0, 2), dtype=np.int32)]
            for bounds in bounds_of(self.mask, self.seqlen):
                for lo, hi in _each_row(bounds, mine):
                    seen = lo < hi
                    found.append(_runs(lo, hi) if seen.all() else _runs(lo[seen], hi[seen]))
            runs = np.concatenate(found)
            runs = runs[np.argsort(runs[:, 0], kind="stable")]
            self._visible[rank] = _runs(runs[:, 0], np.maximum.accumulate(runs[:, 1]))
        return self._visible[rank]

    def needed(self, rank: int, source: int) -> tuple[range, ...]:
        """The local rows of `source` that a row of `rank` sees."""
        if (rank, source) not in self._needed:
            rows = np.searchsorted(self.positions(source), self.visible(rank))
            # runs that are apart in the sequence may touch among the rows of one rank
            rows = rows[rows[:, 0] < rows[:, 1]]
            runs = _runs(rows[:, 0], rows[:, 1]).tolist()
            self._needed[rank, source] = tuple(itertools.starmap(range, runs))
        return self._needed[rank, source]

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """The offsets at which some rank reads something, ascending, without 0."""
        ranks = range(self.world_size)
        return tuple(o for o in ranks[1:] if any(self.needed(rank, (rank - o) % self.world_size) for rank in ranks))


_ring = functools.lru_cache(16)(_Ring)


@dataclasses.dataclass(frozen=True, eq=False)
class _Ends:
    """One end of an interval for each row of a rank, global positions, int32 `[S]` or `[batch, S]`."""

    values: np.ndarray

    @functools.cached_property
    def is_sorted(self) -> bool:
        return self.values.ndim == 1 and not bool((self.values[1:] < self.values[:-1]).any())

    def rows_before(self, keys: np.ndarray, stretches: np.ndarray) -> np.ndarray:
        """`np.searchsorted(keys, values)` in int32, quicker where values do not decrease and keys are few stretches without a gap.

        From one end of a stretch to the next the answer is a constant, or the value less a constant.
        """
        if 2 * len(stretches) > self.values.shape[-1] or not self.is_sorted:
            return np.searchsorted(keys, self.values).astype(np.int32)
        edges = np.searchsorted(self.values, stretches.ravel())
        lengths = np.diff(edges, prepend=0, append=len(self.values))
        before = np.concatenate([[0], np.diff(stretches)[:, 0].cumsum()])  # keys before each stretch
        slope, offset = np.zeros((2, len(lengths)), dtype=np.int32)
        slope[1::2], offset[::2], offset[1::2] = 1, before, before[:-1] - stretches[:, 0]
        return self.values * np.repeat(slope, lengths) + np.repeat(offset, lengths)


def _blocks(bounds: list[tuple[_Ends, _Ends]], keys: np.ndarray) -> Iterator[Block]:
    """One block for each of a rank's intervals that sees one of the keys at hand (global positions `keys`)."""
    keys = keys.astype(np.int32)
    stretches = _runs(keys, keys + np.int32(1))
    for ends in bounds:
        lo, hi = (end.rows_before(keys, stretches) for end in ends)
        seen = lo < hi
        rows = np.flatnonzero(seen.any(0) if seen.ndim > 1 else seen)
        if len(rows) == 0:
            continue
        sees_all = bool(seen.all())
        area = int(((hi - lo) if sees_all else (hi - lo)[seen]).sum(dtype=np.int64))
        first, last = int((lo if sees_all else lo[seen]).min()), int((hi if sees_all else hi[seen]).max())
        lo, hi = lo - np.int32(first), hi - np.int32(first)
        if not sees_all:
            lo, hi = np.where(seen, lo, np.int32(last - first)), np.where(seen, hi, np.int32(0))
        row_range = range(int(rows[0]), int(rows[-1]) + 1)
        is_full = area == len(row_range) * (last - first) * (lo.size // lo.shape[-1])
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
    check_sizes("build_plan", mask, seqlen, world_size, rank)
    ring = _ring(mask, layout, seqlen, world_size)
    mine = ring.positions(rank)
    bounds = [(_Ends(lo.take(mine, axis=-1)), _Ends(hi.take(mine, axis=-1))) for lo, hi in bounds_of(mask, seqlen)]
    hops = [Hop(0, (), (), tuple(_blocks(bounds, mine)))]
    for offset in ring.offsets:
        source, target = (rank - offset) % world_size, (rank + offset) % world_size
        send, recv = ring.needed(target, rank), ring.needed(rank, source)
        theirs = ring.positions(source)
        keys = np.concatenate([theirs[:0], *(theirs[r.start : r.stop] for r in recv)])
        hops.append(Hop(offset, send, recv, tuple(_blocks(bounds, keys))))
    return Plan(mask, layout, seqlen, world_size, rank, tuple(hops))
