"""`deterministic="bitwise"`: out and gradients have the same bits at every world size and layout.

A sum of floating-point numbers depends on its order and grouping, so here neither knows the ring. Keys, and in backward queries, are
put at their global positions first, and the kernels then walk them as one device would: tiles begin at global multiples of the
backend's `anchor`, out and dQ fold keys, and dK and dV fold queries, in global order. A rank computes every tile that has one of its
rows, with that tile's true bounds. What it was not sent is zeros: no row of its own sees those keys, and none of its keys those
rows. It holds O(N) rows, computes scores once more in backward (for dQ, and for dK and dV), and overlaps nothing.
"""

import dataclasses
import functools
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringattn import layout as layouts
from ringattn.kernels import Backend, Bounds, Grads, Options, State, state_dtype
from ringattn.plan import Plan, bounds_of
from ringattn.schedule import Pass, sink_gradient
from ringattn.transport import Handle, Transport

__all__ = ["backward", "forward"]


@dataclasses.dataclass(frozen=True)
class _Run:
    """Whole tiles of keys, `keys` of the sequence, and what each row of the sequence sees of them, by interval."""

    keys: slice
    bounds: tuple[Bounds, ...]


@dataclasses.dataclass(frozen=True)
class _Geometry:
    """What a rank computes.

    Attributes:
        mine: global positions of its rows, int64 `[S]`.
        tiles: those of all rows of the tiles that have one of them, int64 `[R]`; at: where its rows are among these, int64 `[S]`.
        bounds: what the rows of the tiles see of the sequence, by interval.
        runs: the tiles of keys that have one of its keys.
    """

    mine: Tensor
    tiles: Tensor
    at: Tensor
    bounds: tuple[Bounds, ...]
    runs: tuple[_Run, ...]


@functools.lru_cache(16)
def _geometry(plan: Plan, anchor: int, device: torch.device) -> _Geometry:
    n, mine = plan.seqlen, plan.positions.numpy()
    everything = np.arange(n)
    has_mine = np.zeros(-(-n // anchor), dtype=bool)
    has_mine[mine // anchor] = True
    tiles = everything[np.repeat(has_mine, anchor)[:n]]
    edges = np.flatnonzero(np.diff(has_mine, prepend=False, append=False)) * anchor

    def on_device(x: np.ndarray, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(device, dtype)

    def restricted(rows: np.ndarray, start: int, stop: int) -> tuple[Bounds, ...]:
        """What some rows see of keys [start, stop)."""
        found = []
        for lo, hi in bounds_of(plan.mask, n):
            lo, hi = (x.take(rows, axis=-1).clip(start, stop) - start for x in (lo, hi))
            seen = lo < hi
            if seen.any():
                lo, hi = np.where(seen, lo, stop - start), np.where(seen, hi, 0)
                positions = on_device(rows), on_device(everything[start:stop])
                found.append(Bounds(on_device(lo), on_device(hi), *positions, is_full=False))
        return tuple(found)

    runs = [
        _Run(slice(start, stop), restricted(everything, start, stop))
        for start, stop in edges.clip(0, n).reshape(-1, 2).tolist()
    ]
    index = (mine, tiles, np.searchsorted(tiles, mine))
    return _Geometry(*(on_device(x, torch.int64) for x in index), restricted(tiles, 0, n), tuple(runs))


def _placed(x: Tensor, at: Tensor, rows: int) -> Tensor:
    """`[B, rows, H, D]` with the rows of `x` at `at`, and zeros elsewhere."""
    whole = x.new_zeros(x.shape[0], rows, *x.shape[2:])
    whole[:, at] = x
    return whole


def _gather(
    plan: Plan, transport: Transport, tensors: Sequence[Tensor], queries: bool
) -> Generator[Handle, None, list[Tensor]]:
    """Rows of all ranks at their global positions, of tensors `[B, S, H, any]` of one dtype: `[B, N, H, any]`.

    Keys go where the plan sends them; `queries` go the other way, all of a rank's to each rank whose keys one of them sees.
    """
    ring, world_size = (plan.layout, plan.seqlen, plan.world_size), plan.world_size
    whole = [_placed(x, plan.positions.to(x.device), plan.seqlen) for x in tensors]
    everything = (range(len(plan.positions)),)
    for hop in plan.hops[1:]:
        if queries:
            offset = world_size - hop.offset
            send = everything if hop.recv_rows else ()
            theirs = layouts.positions(*ring, (plan.rank + hop.offset) % world_size)
            arriving = theirs if hop.send_rows else theirs[:0]
        else:
            offset, send, arriving = hop.offset, hop.send, plan.positions_of(hop)
        sizes = [x.shape[0] * len(arriving) * x.shape[2] * x.shape[3] for x in tensors]
        incoming = tensors[0].new_empty(sum(sizes))
        rows = [torch.cat([x[:, :0], *(x[:, r.start : r.stop] for r in send)], 1) for x in tensors]
        departing = torch.cat([x.reshape(-1) for x in rows])
        yield transport.exchange(
            offset, departing if departing.numel() else None, incoming if incoming.numel() else None
        )
        arriving = arriving.to(incoming.device)
        for x, flat in zip(whole, incoming.split(sizes), strict=True):
            x[:, arriving] = flat.view(x.shape[0], len(arriving), *x.shape[2:])
    return whole


def forward(
    plan: Plan,
    transport: Transport,
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    options: Options,
) -> Pass:
    """The forward pass of one rank, with the arguments and results of `schedule.forward`."""
    keys, values = yield from _gather(plan, transport, (k, v), queries=False)
    geometry = _geometry(plan, backend.anchor(q.device), q.device)
    b, _, h, _ = q.shape
    rows, dtype = len(geometry.tiles), state_dtype(q.dtype)
    acc = torch.empty(b, rows, h, v.shape[-1], dtype=dtype, device=q.device)
    m, l, lse = (torch.empty(b, h, rows, dtype=dtype, device=q.device) for _ in range(3))
    state = State(acc, m, l, torch.empty(acc.shape, dtype=q.dtype, device=q.device), lse)
    queries = _placed(q, geometry.at, rows)
    with transport.span("compute", 0, _flops(plan, q, v)):
        folds = geometry.bounds or (_nothing(rows, q.device),)  # where no row sees a key every row still has a result
        for i, bounds in enumerate(folds):
            seen = slice(0, len(bounds.k_pos))
            start, finish = i == 0, i == len(folds) - 1
            kv = keys[:, seen], values[:, seen]
            backend.forward(state, queries, *kv, bounds, options, sinks=sinks, start=start, finish=finish)
    return state.out[:, geometry.at], state.lse[..., geometry.at]


def backward(
    plan: Plan,
    transport: Transport,
    backend: Backend,
    dout: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    options: Options,
) -> Pass:
    """The backward pass of one rank, with the arguments and results of `schedule.backward`."""
    delta = backend.delta(dout, out, dlse)
    keys, values = yield from _gather(plan, transport, (k, v), queries=False)
    queries, douts = yield from _gather(plan, transport, (q, dout), queries=True)
    numbers = [x.transpose(1, 2).unsqueeze(-1) for x in (lse, delta)]
    numbers = yield from _gather(plan, transport, numbers, queries=True)
    stats = [x.squeeze(-1).transpose(1, 2) for x in numbers]

    geometry = _geometry(plan, backend.anchor(q.device), q.device)
    mine, tiles, dtype = geometry.mine, geometry.tiles, state_dtype(q.dtype)
    dq = torch.zeros(q.shape[0], len(tiles), *q.shape[2:], dtype=dtype, device=q.device)
    dk, dv = (torch.zeros(t.shape, dtype=dtype, device=t.device) for t in (keys, values))
    with transport.span("compute", 0, _flops(plan, q, v, backward=True)):
        own = queries[:, tiles], douts[:, tiles], [x[..., tiles] for x in stats]
        for bounds in geometry.bounds:
            backend.backward(Grads(dq, None, None), own[0], keys, values, own[1], *own[2], bounds, options)
        for run in geometry.runs:
            at = run.keys
            for bounds in run.bounds:
                grads = Grads(None, dk[:, at], dv[:, at])
                backend.backward(grads, queries, keys[:, at], values[:, at], douts, *stats, bounds, options)
    dsinks = None if sinks is None else sink_gradient(sinks, lse, delta).to(sinks.dtype)
    return dq[:, geometry.at].to(q.dtype), dk[:, mine].to(k.dtype), dv[:, mine].to(v.dtype), dsinks


def _nothing(rows: int, device: torch.device) -> Bounds:
    none = torch.zeros(rows, dtype=torch.int32, device=device)
    return Bounds(none, none, none, none[:0], is_full=False)


def _flops(plan: Plan, q: Tensor, v: Tensor, backward: bool = False) -> int:
    sizes: dict[str, Any] = {"batch": q.shape[0], "heads": q.shape[2], "head_dim": q.shape[3], "v_head_dim": v.shape[3]}
    return plan.flops(**sizes, backward=backward)
