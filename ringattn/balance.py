"""Layouts made for one mask: every rank has as many tokens as the others, and as much to compute, on every hop.

Work is counted in tiles, and a tile is computed whole however little of it is seen. So chunks are as long as tiles, and the
chunks in which one document ends and another begins go to rank 0: then all other ranks hold and send nothing but whole tiles,
which are as easy to deal out as cards.
"""

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from ringattn import layout as layouts
from ringattn.layout import Balanced, Layout
from ringattn.masks import Mask
from ringattn.plan import TILE, bounds_of, check_sizes, cost

__all__ = ["balanced", "choose_layout"]

# The first layout whose time is within this of a perfect split is taken; those that move less are tried first.
GOOD = 1.02
# A document is dealt out if it has more than this share of a rank's work: first few are, then more.
SHARES = (1.0, 0.1, 0.05, 0.03)
# How often a sequence that is one document is gone through when it is dealt out; twice is a zigzag.
ROUNDS = (1, 2, 4, 8)
# The keys that rank 0 sends begin with parts of tiles: of a chunk of rows that reads some, this is what it computes more, in tiles.
CUT = 0.55
# Rank 0 computes the ends of documents, and is dealt so much less: at first as packings need it, in the unit of `_Deal.owners` and
# for each chunk of the sequence, then corrected by what it still has too much.
HEAD_START = 2.75
TRIES = 2


@dataclasses.dataclass(frozen=True)
class _Chunks:
    """A sequence in chunks. Each row of chunks sees, by one interval of one batch row, chunks of keys `first` to `stop`.

    Attributes:
        size: tokens of a chunk; count: how many there are, the last perhaps shorter.
        row, first, stop: of every interval of a chunk of rows, int64 `[n]`.
        documents: first and one past the last whole chunk of each part of the sequence that neither sees nor is seen by the
            rest, int64 `[m, 2]`.
    """

    size: int
    count: int
    row: np.ndarray
    first: np.ndarray
    stop: np.ndarray
    documents: np.ndarray

    def work(self, owners: np.ndarray, world_size: int) -> np.ndarray:
        """Tiles that each rank computes with the keys of each, float64 `[W, W]`; chunks of rank -1 do not count."""
        holds = np.equal.outer(owners, np.arange(world_size)).astype(np.float64)
        before = np.concatenate([np.zeros((1, world_size)), holds.cumsum(0)])
        return holds[self.row].T @ (before[self.stop] - before[self.first])

    def readers(self, owners: np.ndarray, world_size: int) -> np.ndarray:
        """How many chunks of rows of each rank see keys of rank 0, `[W]`."""
        before = np.r_[0, (owners == 0).cumsum()]
        sees = before[self.stop] > before[self.first]
        return np.bincount(owners[self.row], sees, world_size)

    def tiles(self) -> np.ndarray:
        """Tiles that each chunk of rows computes, `[count]`."""
        return np.bincount(self.row, self.stop - self.first, self.count)


def _cut(mask: Mask, seqlen: int, world_size: int) -> _Chunks:
    """The sequence in chunks of a tile, or in shorter ones if a rank had less than two."""
    size = min(TILE, max(1, seqlen // (2 * world_size)))
    count = -(-seqlen // size)
    padding = (0, count * size - seqlen)
    floor = np.arange(seqlen, dtype=np.int32)
    reach = floor + np.int32(1)
    first, stop = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for bounds in bounds_of(mask, seqlen):
        for lo, hi in zip(*map(np.atleast_2d, bounds), strict=True):
            floor, reach = np.minimum(floor, lo), np.maximum(reach, hi)
            lo, hi = np.pad(lo, padding, constant_values=seqlen), np.pad(hi, padding)
            first.append(lo.reshape(count, size).min(1) // size)
            stop.append(-(-hi.reshape(count, size).max(1) // size))
    row = np.tile(np.arange(count), len(first) - 1)
    begin, end = np.concatenate(first), np.concatenate(stop)
    # nothing before such a position sees anything after it, and the reverse
    apart = np.maximum.accumulate(reach)[:-1] <= np.minimum.accumulate(floor[::-1])[::-1][1:]
    ends = np.r_[0, np.flatnonzero(apart) + 1, seqlen]
    documents = np.stack([-(-ends[:-1] // size), ends[1:] // size], 1)
    return _Chunks(size, count, row, begin, np.maximum(begin, end), documents[documents[:, 0] < documents[:, 1]])


def balanced(mask: Mask, seqlen: int, world_size: int) -> Balanced:
    """The layout that gives every rank as many chunks of 128 tokens, and as much to compute on every hop, as the others.

    A sequence that is one document (causal, full, a window, a prefix) is dealt out in as few pieces as are even. Of packed
    documents, the small ones stay whole on the rank that lacks work, and need no hop; the large ones are dealt out chunk by
    chunk to all. Any mask goes: documents are whatever parts of the sequence see nothing of each other. Tokens per rank differ
    by one chunk at most; below 256 tokens a rank chunks are shorter. A pure function of its arguments, so every rank makes the same.

    Args:
        mask: what each row sees; of a mask for a whole batch, the batch rows' work is added up.
        seqlen: tokens of the whole sequence. world_size: ranks of the ring.

    Raises:
        ValueError: the mask is for another length, its bounds decrease, or there is no such ring.

    Example:
        >>> from ringattn.masks import Causal
        >>> balanced(Causal(), 2048, 2)(2048, 2, 0)
        (range(0, 512), range(1536, 2048))
    """
    check_sizes("balanced", mask, seqlen, world_size)
    return _balanced(mask, seqlen, world_size)


@functools.lru_cache(16)
def _balanced(mask: Mask, seqlen: int, world_size: int) -> Balanced:
    chunks = _cut(mask, seqlen, world_size)
    perfect = chunks.tiles().sum() / world_size
    best, least = np.zeros(chunks.count, dtype=np.int64), np.inf
    for owners, work in _candidates(chunks, world_size):
        time = _lockstep(work)
        if time < least:
            best, least = owners, time
        if time <= GOOD * perfect:
            break
    return Balanced(seqlen, world_size, chunks.size, tuple(best.tolist()))


def _lockstep(work: np.ndarray) -> float:
    """The time of a ring in which every hop waits for the rank that computes most; `work` `[W, W]` as of `_Chunks.work`."""
    rank = np.arange(len(work))
    return float(sum(work[rank, rank - offset].max() for offset in rank))


def _candidates(chunks: _Chunks, world_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Owners of chunks, `[count]`, and the work of ranks, `[W, W]`; those that move less first."""
    ends = chunks.count - int(np.diff(chunks.documents).sum())
    is_packed = len(chunks.documents) > 1 and ends <= chunks.count // world_size
    finest = -(-chunks.count // world_size)
    for rounds in (1,) if is_packed else (*ROUNDS, finest):
        quotas = _quotas(chunks.count, world_size)
        owners = _snake(quotas if rounds % 2 == 0 else quotas[::-1], rounds)
        yield owners, chunks.work(owners, world_size)
    for share in SHARES if is_packed else ():
        deal = _Deal(chunks, world_size, share)
        head_start = HEAD_START * chunks.count if ends else 0.0
        for _ in range(TRIES):
            owners = deal.owners(head_start)
            work = deal.work(owners)
            yield owners, work
            head_start += deal.surplus(work)


def _quotas(count: int, world_size: int) -> np.ndarray:
    """How many of `count` chunks each rank gets, rank 0 not fewer than others: it gets the last, which may be short."""
    return count // world_size + (np.arange(world_size) < count % world_size)


def _snake(counts: np.ndarray, rounds: int, turn: int = 0) -> np.ndarray:
    """Ranks in the order in which they are dealt `counts` cards in so many rounds, to and fro, from the other end if `turn` is odd.

    Who gets fewer is dealt late, where a chunk sees more and is seen by fewer.
    """
    rank = np.repeat(np.arange(len(counts)), counts)
    nth = np.arange(len(rank)) - np.repeat(counts.cumsum() - counts, counts)
    at = ((nth + 1) * rounds - 1) // counts[rank]
    return rank[np.lexsort((nth, np.where((at + turn) % 2, -rank, rank), at))]


def _fill(levels: np.ndarray, room: np.ndarray, count: int) -> np.ndarray:
    """How many of `count` cards go to each rank, no more than its room, so that levels with them are as even as can be."""
    heights = np.add.outer(levels, np.arange(min(count, int(room.max(initial=0)))))
    heights[np.less.outer(room, np.arange(heights.shape[1]) + 1)] = np.inf
    lowest = np.argsort(heights.T, axis=None, kind="stable")[:count]
    return np.bincount(lowest % len(levels), minlength=len(levels))


class _Deal:
    """Documents with more than a share of a rank's work dealt out, the others whole, and what is left of both on rank 0."""

    def __init__(self, chunks: _Chunks, world_size: int, share: float) -> None:
        self.chunks, self.world_size = chunks, world_size
        before = np.r_[0, chunks.tiles().cumsum()]
        self.first, self.stop = chunks.documents.T
        self.length, self.tiles = self.stop - self.first, before[self.stop] - before[self.first]
        is_dealt = self.tiles > share * before[-1] / world_size
        order = np.argsort(-self.tiles, kind="stable")
        self.dealt, self.whole = order[is_dealt[order]], order[~is_dealt[order]]
        self.ends = np.zeros(chunks.count, dtype=np.int64)
        for a, b in chunks.documents:
            self.ends[a:b] = -1
        self.has_ends = bool((self.ends == 0).any())
        self.room = _quotas(chunks.count, world_size)
        self.room[0] -= np.count_nonzero(self.ends == 0)

    def owners(self, head_start: float) -> np.ndarray:
        """Owners of chunks, `[count]`, if rank 0 counts as having been dealt `head_start`, in chunks x chunks of their document.

        One chunk more of a document than its share costs a rank half a tile on every hop for each chunk that others have of it.
        """
        owners, room = self.ends.copy(), self.room.copy()
        hands = np.r_[head_start, np.zeros(self.world_size - 1)]
        for turn, i in enumerate(self.dealt):
            counts = _fill(hands / self.length[i], room, self.length[i])
            owners[self.first[i] : self.stop[i]] = _snake(counts, counts.max(), turn)
            hands += self.length[i] * counts
            room -= counts
        self._place(owners, room.tolist())
        return owners

    def _place(self, owners: np.ndarray, room: list[int]) -> None:
        """Put whole documents, largest first, where least is computed on hop 0; what fits nowhere is cut."""
        load = self.chunks.work(owners, self.world_size).diagonal().tolist()
        for i in self.whole.tolist():
            at, stop, density = int(self.first[i]), int(self.stop[i]), self.tiles[i] / self.length[i]
            while at < stop:
                fits = [r for r in range(self.world_size) if room[r] >= stop - at] or [room.index(max(room))]
                rank = min(fits, key=load.__getitem__)
                taken = min(stop - at, room[rank])
                owners[at : at + taken] = rank
                load[rank] += density * taken
                room[rank] -= taken
                at += taken

    def work(self, owners: np.ndarray) -> np.ndarray:
        """Tiles that each rank computes with the keys of each, `[W, W]`, those that rank 0 cuts included."""
        work = self.chunks.work(owners, self.world_size)
        if self.has_ends:
            work[1:, 0] += CUT * self.chunks.readers(owners, self.world_size)[1:]
        return work

    def surplus(self, work: np.ndarray) -> float:
        """By how much rank 0's hops are too long, in the unit of `head_start`."""
        if self.world_size < 3:
            return 0.0
        others = work[1:, 1:]
        usual = (others.sum() - others.trace()) / (others.size - len(others))
        return 2 * self.world_size * (max(work[0, 1:].max(), work[1:, 0].max()) - usual)


@functools.lru_cache(64)
def choose_layout(mask: Mask, seqlen: int, world_size: int) -> Layout:
    """The layout that costs least, of the named ones and `balanced(mask, seqlen, world_size)`: what `"auto"` stands for.

    Least is the time of a ring in lock-step, in tiles; of equal ones the one that moves fewest rows of K and V, then the first of
    contiguous, zigzag, striped, balanced. It depends on the plan alone, so every rank chooses the same. Tensors are cut by it, so
    it is chosen once for a batch and passed to `shard`, `ring_attention` and `unshard`.

    Raises:
        ValueError: as `balanced` does.

    Example:
        >>> from ringattn.masks import Causal, Full, Window
        >>> [choose_layout(mask, 4096, 4) for mask in (Causal(), Full(), Window(100))]
        ['zigzag', 'contiguous', 'contiguous']
    """
    candidates: list[Layout] = [*layouts.layouts(), balanced(mask, seqlen, world_size)]
    costs = [cost(mask, layout, seqlen, world_size) for layout in candidates]
    return candidates[min(range(len(costs)), key=lambda i: (costs[i].lockstep_tiles, costs[i].rows))]
