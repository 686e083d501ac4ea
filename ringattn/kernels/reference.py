"""The reference backend: block kernels in plain torch, for any device and floating dtype.

It walks tiles of query rows x keys, so that the scores at hand are bounded, and never builds scores that no row sees.
All arithmetic is in `state_dtype`. Formulas: Dao, "FlashAttention-2", 2023, algorithms 1 and 2.
"""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from ringattn.kernels import Bounds, Grads, Options, Request, State, state_dtype
from ringattn.kernels.philox import keep_mask

__all__ = ["Reference"]

# Query rows x keys. CPU: a few MB of scores, which stay in cache. 128 x 512 took 140 ms of CPU time, 256 x 512 162 ms
# and 256 x 256 184 ms for a causal fp32 forward of B1 H8 D64 S2048 on one EPYC core. Elsewhere launches are what costs.
_TILE = {"cpu": (128, 512)}
_TILE_ELSEWHERE = (1024, 1024)


@dataclasses.dataclass(frozen=True)
class _Tile:
    """Some query rows, and the key ranges to fold into them, each with whether every row sees every key of it."""

    rows: slice
    parts: tuple[tuple[slice, bool], ...]


def _split(start: int, stop: int, size: int, is_full: bool) -> Iterator[tuple[slice, bool]]:
    """Keys [start, stop) cut at multiples of `size`."""
    for first in range(start // size * size, stop, size) if start < stop else ():
        yield slice(max(first, start), min(first + size, stop)), is_full


def _tiles(bounds: Bounds, seqlen: int, keys: int) -> list[_Tile]:
    """The walk over one block, from numbers on the host: one transfer per call, whatever the number of tiles."""
    tile_rows, tile_keys = _TILE.get(bounds.lo.device.type, _TILE_ELSEWHERE)
    rows = [slice(start, min(start + tile_rows, seqlen)) for start in range(0, seqlen, tile_rows)]
    if bounds.is_full:
        return [_Tile(r, tuple(_split(0, keys, tile_keys, True))) for r in rows]
    lo, hi = torch.stack([bounds.lo, bounds.hi]).reshape(2, -1, seqlen).cpu()
    # The last tile is filled up with copies of the last row, which change no min or max.
    index = torch.arange(len(rows) * tile_rows, device="cpu").clamp_(max=seqlen - 1).view(len(rows), tile_rows)
    least, most = (lo.amin(0), hi.amin(0)), (lo.amax(0), hi.amax(0))
    limits = torch.stack([x[index].amin(1) for x in least] + [x[index].amax(1) for x in most])
    tiles = []
    for r, (first, full_last, full_first, last) in zip(rows, limits.T.tolist(), strict=True):
        # A row that sees nothing (lo = T, hi = 0) leaves first and last alone and makes the full range empty.
        first, last = max(first, 0), min(last, keys)
        full_first, full_last = max(full_first, first), min(full_last, last)
        if full_first < full_last:
            spans = ((first, full_first, False), (full_first, full_last, True), (full_last, last, False))
        else:
            spans = ((first, last, False),)
        parts = tuple(part for start, stop, is_full in spans for part in _split(start, stop, tile_keys, is_full))
        tiles.append(_Tile(r, parts))
    return tiles


def _is_finite(*tensors: Tensor) -> bool:
    """Whether everything is finite, in one transfer; a sum that overflows may say no, which costs only time."""
    return bool(torch.stack([x.sum(dtype=state_dtype(x.dtype)).double() for x in tensors]).isfinite().all())


def _matmul_seen(a: Tensor, b: Tensor, seen: Tensor) -> Tensor:
    """`a @ b` where NaN and infinity in a row of `b` touch only the rows of `a` that see it; 0 * NaN touches all."""
    bad = ~b.isfinite()
    product = torch.bmm(a, b.masked_fill(bad, 0.0))
    for j in bad.any(-1).any(0).nonzero().flatten().tolist():
        reached = seen[:, :, j, None] & bad[:, None, j]
        product += torch.where(reached, a[:, :, j, None] * b[:, None, j], 0.0)
    return product


class _Heads:
    """Between `[B, S, H, D]` and `[B * Hkv, G * S, D]`: the `G = H / Hkv` query heads of a key head in one.

    One matmul then serves the whole group, forward and backward, and K and V are never repeated.
    """

    def __init__(self, batch: int, heads: int, kv_heads: int, dtype: torch.dtype):
        self.batch, self.heads, self.kv_heads, self.dtype = batch, heads, kv_heads, dtype

    def fold(self, x: Tensor) -> Tensor:
        """`[B, S, G * Hkv, D]` (any G, for keys 1) -> `[B * Hkv, G * S, D]` in the state's dtype; may alias `x`."""
        batch, _, _, width = x.shape
        x = x.unflatten(2, (self.kv_heads, -1)).permute(0, 2, 3, 1, 4)
        x = x.to(self.dtype, memory_format=torch.contiguous_format)
        return x.reshape(batch * self.kv_heads, x.shape[2] * x.shape[3], width)

    def unfold(self, x: Tensor, heads: int) -> Tensor:
        """The inverse of `fold`, as a view `[B, S, heads, D]`."""
        group = heads // self.kv_heads
        x = x.view(self.batch, self.kv_heads, group, x.shape[1] // group, x.shape[2])
        return x.permute(0, 3, 1, 2, 4).reshape(self.batch, x.shape[3], heads, x.shape[4])

    def fold_rows(self, x: Tensor) -> Tensor:
        """A number per row, `[B, H, S]` -> `[B * Hkv, G * S, 1]`; may alias `x`."""
        return x.to(self.dtype).reshape(self.batch * self.kv_heads, -1, 1)

    def unfold_rows(self, x: Tensor) -> Tensor:
        """The inverse of `fold_rows`."""
        return x.view(self.batch, self.heads, -1)

    def hide_(self, x: Tensor, hidden: Tensor, value: float) -> Tensor:
        """Set `x` `[B * Hkv, G * S, T]` to `value` where `hidden` (`[S, T]` or `[B, S, T]`), in place."""
        rows, keys = hidden.shape[-2:]
        x.view(self.batch, self.heads, rows, keys).masked_fill_(hidden if hidden.ndim == 2 else hidden[:, None], value)
        return x

    def spread(self, hidden: Tensor) -> Tensor:
        """`hidden` as its complement, one copy per head, in the folded form `[B * Hkv, G * S, T]`."""
        rows, keys = hidden.shape[-2:]
        seen = ~(hidden if hidden.ndim == 2 else hidden[:, None])
        return seen.expand(self.batch, self.heads, rows, keys).reshape(self.batch * self.kv_heads, -1, keys)


class Reference:
    """Block kernels in plain torch; see `ringattn.kernels.Backend` for what each method does."""

    name = "reference"

    def supports(self, request: Request) -> str | None:
        """None, or the reason why the request is not served."""
        if not request.dtype.is_floating_point:
            return f"dtype is {request.dtype}; a floating dtype is required"
        return None

    def anchor(self, device: torch.device) -> int:
        """A multiple of both sides of a tile."""
        return max(_TILE.get(device.type, _TILE_ELSEWHERE))

    def forward(
        self,
        state: State,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bounds: Bounds,
        options: Options,
        *,
        sinks: Tensor | None,
        start: bool,
        finish: bool,
    ) -> None:
        """Fold the keys into the rows of `state`, in place."""
        if q.shape[0] == 0 or q.shape[1] == 0:
            return
        # Under autocast the matmuls would be rounded to 16 bits.
        with torch.autocast(q.device.type, enabled=False):
            self._forward(state, q, k, v, bounds, options, sinks, start, finish)

    def _forward(self, state, q, k, v, bounds, options, sinks, start, finish) -> None:
        batch, seqlen, heads, _ = q.shape
        as_heads = _Heads(batch, heads, k.shape[2], state_dtype(q.dtype))
        block = _Block(as_heads, bounds, options, k.shape[1], q.device)
        # Masked scores become -inf whatever they were, so only V can carry a NaN to a row that does not see it.
        is_strict = not bounds.is_full and not _is_finite(v)
        keys, values = as_heads.fold(k), as_heads.fold(v)
        for tile in _tiles(bounds, seqlen, k.shape[1]):
            part = state[tile.rows]
            queries = as_heads.fold(q[:, tile.rows]) * block.q_scale
            if start:
                acc = queries.new_zeros(*queries.shape[:2], v.shape[3])
                m = queries.new_full((*queries.shape[:2], 1), -torch.inf)
                l = torch.zeros_like(m)
            else:
                acc, m, l = as_heads.fold(part.acc), as_heads.fold_rows(part.m), as_heads.fold_rows(part.l)
            for at, is_full in tile.parts:
                hidden = None if is_full else block.hidden(tile.rows, at)
                p, _ = block.scores(queries, keys[:, at], hidden)
                new_m = torch.maximum(m, p.amax(-1, keepdim=True))
                # 0 stands in for -inf, so that a row without keys gets exp(-inf - 0) = 0.
                shift = new_m.masked_fill(new_m == -torch.inf, 0.0)
                p.sub_(shift).exp_()
                decay = (m - shift).exp_()
                m = new_m
                l = l * decay + p.sum(-1, keepdim=True)
                if options.dropout_p:
                    p.mul_(block.keep(tile.rows, at))
                acc = acc * decay
                if is_strict and hidden is not None:
                    acc += _matmul_seen(p, values[:, at], as_heads.spread(hidden)) * block.keep_scale
                else:
                    acc.baddbmm_(p, values[:, at], alpha=block.keep_scale)
            # Without keys nothing changed, and these may be views of what would be written.
            if start or tile.parts:
                part.acc.copy_(as_heads.unfold(acc, heads))
                part.m.copy_(as_heads.unfold_rows(m))
                part.l.copy_(as_heads.unfold_rows(l))
            if finish:
                if sinks is not None:
                    sink = sinks.to(acc.dtype)[None, :, None].expand(batch, heads, part.m.shape[2])
                    sink = as_heads.fold_rows(sink)
                    new_m = torch.maximum(m, sink)
                    shift = new_m.masked_fill(new_m == -torch.inf, 0.0)
                    decay = (m - shift).exp_()
                    l = l * decay + (sink - shift).exp_()
                    acc, m = acc * decay, new_m
                part.out.copy_(as_heads.unfold(acc / l.masked_fill(l == 0, 1.0), heads))
                # l = 0 only where m = -inf, and -inf + log(0) is the -inf wanted there.
                part.lse.copy_(as_heads.unfold_rows(m + l.log()))

    def delta(self, dout: Tensor, out: Tensor, dlse: Tensor) -> Tensor:
        """`rowsum(dout * out) - dlse` as `[B, H, S]` in `state_dtype`."""
        dtype = state_dtype(out.dtype)
        delta = dlse.to(dtype).neg()
        # by tiles, since wide copies of dout and out, whole, would be the most that backward holds
        tile_rows, _ = _TILE.get(out.device.type, _TILE_ELSEWHERE)
        for start in range(0, out.shape[1], tile_rows):
            rows = slice(start, start + tile_rows)
            delta[..., rows] += (dout[:, rows].to(dtype) * out[:, rows].to(dtype)).sum(-1).transpose(1, 2)
        return delta

    def backward(
        self,
        grads: Grads,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        bounds: Bounds,
        options: Options,
    ) -> None:
        """Add this block's gradients into `grads`, in place."""
        if q.shape[0] == 0 or q.shape[1] == 0 or k.shape[1] == 0:
            return
        with torch.autocast(q.device.type, enabled=False):
            self._backward(grads, q, k, v, dout, lse, delta, bounds, options)

    def _backward(self, grads, q, k, v, dout, lse, delta, bounds, options) -> None:
        batch, seqlen, heads, _ = q.shape
        as_heads = _Heads(batch, heads, k.shape[2], state_dtype(q.dtype))
        block = _Block(as_heads, bounds, options, k.shape[1], q.device)
        # exp(score - inf) = 0 for the rows without keys.
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        # Where lse is NaN, out was, and so is delta.
        is_strict = not bounds.is_full and not _is_finite(q, k, v, dout, delta)
        keys, values = as_heads.fold(k), as_heads.fold(v)
        dk, dv = (None if g is None else torch.zeros_like(x) for g, x in ((grads.dk, keys), (grads.dv, values)))
        for tile in _tiles(bounds, seqlen, k.shape[1]):
            queries = as_heads.fold(q[:, tile.rows]) * block.q_scale
            # Dropout multiplies by keep / (1 - p) twice below; the division is done here, once.
            douts = as_heads.fold(dout[:, tile.rows]) * block.keep_scale
            tile_lse, tile_delta = as_heads.fold_rows(lse[..., tile.rows]), as_heads.fold_rows(delta[..., tile.rows])
            dq = torch.zeros_like(queries)
            for at, is_full in tile.parts:
                hidden = None if is_full else block.hidden(tile.rows, at)
                p, slope = block.scores(queries, keys[:, at], hidden, with_slope=True)
                p.sub_(tile_lse).exp_()
                ds = torch.bmm(douts, values[:, at].mT)
                kept = p
                if options.dropout_p:
                    keep = block.keep(tile.rows, at)
                    ds.mul_(keep)
                    kept = p * keep
                ds.sub_(tile_delta).mul_(p)
                if slope is not None:
                    ds.mul_(slope)
                if is_strict and hidden is not None:
                    # With NaN about, 0 is no longer what a product with a masked weight gives.
                    as_heads.hide_(kept, hidden, 0.0)
                    as_heads.hide_(ds, hidden, 0.0)
                    seen = as_heads.spread(hidden)
                    if dk is not None and dv is not None:
                        dv[:, at] += _matmul_seen(kept.mT, douts, seen.mT)
                        dk[:, at] += _matmul_seen(ds.mT, queries, seen.mT) * block.dk_scale
                    if grads.dq is not None:
                        dq += _matmul_seen(ds, keys[:, at], seen)
                else:
                    if dk is not None and dv is not None:
                        dv[:, at].baddbmm_(kept.mT, douts)
                        dk[:, at].baddbmm_(ds.mT, queries, alpha=block.dk_scale)
                    if grads.dq is not None:
                        dq.baddbmm_(ds, keys[:, at])
            if grads.dq is not None:
                grads.dq[:, tile.rows].add_(as_heads.unfold(dq, heads), alpha=options.softmax_scale)
        if grads.dk is not None and grads.dv is not None:
            grads.dk.add_(as_heads.unfold(dk, k.shape[2]))
            grads.dv.add_(as_heads.unfold(dv, k.shape[2]))


class _Block:
    """What the tiles of one block share: the scores, what is hidden, what dropout keeps."""

    def __init__(self, as_heads: _Heads, bounds: Bounds, options: Options, keys: int, device: torch.device):
        self.as_heads, self.bounds, self.options, self.device = as_heads, bounds, options, device
        self.key_index = torch.arange(keys, dtype=torch.int32, device=device)
        # Queries are scaled once per tile, by what the scores need; with softcap that is its argument.
        self.q_scale = options.softmax_scale / (options.softcap or 1.0)
        self.dk_scale = options.softcap or 1.0
        self.keep_scale = 1.0 / (1.0 - options.dropout_p)

    def hidden(self, rows: slice, at: slice) -> Tensor:
        """True where a row does not see a key: `[S, T]` or `[B, S, T]`."""
        lo, hi, index = self.bounds.lo[..., rows, None], self.bounds.hi[..., rows, None], self.key_index[at]
        return (index < lo).logical_or_(index >= hi)

    def scores(
        self, queries: Tensor, keys: Tensor, hidden: Tensor | None, with_slope: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Scores, -inf where hidden, and with softcap (where asked for) their derivative in the uncapped ones."""
        scores, slope = torch.bmm(queries, keys.mT), None
        if self.options.softcap:
            scores.tanh_()
            slope = 1.0 - scores * scores if with_slope else None
            scores.mul_(self.options.softcap)
        if hidden is not None:
            self.as_heads.hide_(scores, hidden, -torch.inf)
        return scores, slope

    def keep(self, rows: slice, at: slice) -> Tensor:
        """What dropout keeps, in the folded form."""
        q_pos, k_pos = self.bounds.q_pos[rows], self.bounds.k_pos[at]
        mask = keep_mask(self.options, q_pos, k_pos, self.as_heads.batch, self.as_heads.heads, self.device)
        return mask.view(self.as_heads.batch * self.as_heads.kv_heads, -1, mask.shape[3])
