"""The ring: forward and backward over the hops of a plan, and the only owner of the buffers it writes.

A pass is a generator that yields the handles it has to wait for; `drive` waits for them, for one rank or for W interleaved. On
every hop the next keys are on their way before this hop's are computed, and waited for after. Posts and waits are in the transport's
timeline by themselves; what is computed and added is written there here.
"""

import functools
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn.kernels import Backend, Bounds, Grads, Options, State, state_dtype
from ringattn.plan import Block, Hop, Plan
from ringattn.transport import Handle, Transport

__all__ = ["Pass", "backward", "drive", "forward", "sink_gradient"]

Pass = Generator[Handle, None, Any]


def drive(passes: Sequence[Pass]) -> list[Any]:
    """Run the passes of all ranks that live in this process to their end, and return what each returns.

    Raises:
        RuntimeError: every pass waits for another: sends and receives do not pair up.
    """
    results: list[Any] = [None] * len(passes)
    waiting: dict[int, Handle | None] = dict.fromkeys(range(len(passes)))
    while waiting:
        able = [i for i, handle in waiting.items() if handle is None or handle.ready()]
        if not able:
            raise RuntimeError(
                f"ring_attention: ranks {sorted(waiting)} wait for each other; sends and receives do not pair up."
            )
        for i in able:
            handle = waiting[i]
            if handle is not None:
                handle.wait()
            try:
                waiting[i] = next(passes[i])
            except StopIteration as stop:
                results[i] = stop.value
                del waiting[i]
    return results


@functools.lru_cache(16)
def _on_device(plan: Plan, device: torch.device) -> dict[tuple[Block, range], Bounds]:
    """The bounds of a plan that have been moved to a device, so that the layers of a model share one copy."""
    return {}


def _bounds(plan: Plan, hop: Hop, block: Block, rows: range, device: torch.device) -> Bounds:
    """The bounds of some rows of a block on the device."""
    known = _on_device(plan, device)
    if (block, rows) not in known:
        keys = plan.positions_of(hop)[block.keys.start : block.keys.stop]
        q_pos, k_pos = (p.to(device, torch.int32) for p in (plan.positions[_rows(rows)], keys))
        lo, hi = (t[..., _rows(rows)].to(device) for t in (block.lo, block.hi))
        known[block, rows] = Bounds(lo, hi, q_pos, k_pos, block.is_full and rows == block.rows)
    return known[block, rows]


def _rows(r: range) -> slice:
    return slice(r.start, r.stop)


class _Pair(NamedTuple):
    """Two tensors `[B, rows, Hkv, D]` and `[B, rows, Hkv, Dv]` that travel as one flat message: K and V, or dK and dV."""

    flat: Tensor
    first: Tensor
    second: Tensor

    @property
    def message(self) -> Tensor | None:
        """What is sent; None where there is nothing to send."""
        return self.flat if self.flat.numel() else None


class _Buffers:
    """Equal flat buffers, taken in turn, each large enough for the longest message."""

    def __init__(self, count: int, rows: int, k: Tensor, v: Tensor, dtype: torch.dtype) -> None:
        self.shapes = [(t.shape[0], t.shape[2], t.shape[3]) for t in (k, v)]
        size = rows * sum(b * h * d for b, h, d in self.shapes)
        self.flats = [torch.empty(size, dtype=dtype, device=k.device) for _ in range(count)]
        self.turn = 0

    def take(self, rows: int) -> _Pair:
        flat = self.flats[self.turn]
        self.turn = (self.turn + 1) % len(self.flats)
        views, at = [], 0
        for b, h, d in self.shapes:
            views.append(flat[at : at + b * rows * h * d].view(b, rows, h, d))
            at += b * rows * h * d
        return _Pair(flat[:at], *views)


class _Courier:
    """Brings each hop's keys and values: one buffer departing, and two that are in turn arriving and computed on."""

    def __init__(self, plan: Plan, transport: Transport, k: Tensor, v: Tensor) -> None:
        self.transport, self.k, self.v = transport, k, v
        self.outbox = _Buffers(1, max(hop.send_rows for hop in plan.hops), k, v, k.dtype)
        self.inbox = _Buffers(2, max(hop.recv_rows for hop in plan.hops), k, v, k.dtype)
        self.packed: tuple[range, ...] | None = None
        self.departing: _Pair | None = None

    def post(self, hop: Hop) -> tuple[Handle, Tensor, Tensor]:
        """Start a hop's exchange; its keys and values are there once the handle has been waited for."""
        if self.departing is None or self.packed != hop.send:
            self.departing, self.packed = self.outbox.take(hop.send_rows), hop.send
            at = 0
            for r in hop.send:
                self.departing.first[:, at : at + len(r)].copy_(self.k[:, _rows(r)])
                self.departing.second[:, at : at + len(r)].copy_(self.v[:, _rows(r)])
                at += len(r)
        arriving = self.inbox.take(hop.recv_rows)
        handle = self.transport.exchange(hop.offset, self.departing.message, arriving.message)
        return handle, arriving.first, arriving.second


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
    """The forward pass of one rank: q `[B, S, H, D]`, k, v and sinks as in `ring_attention`; returns `(out, lse)`."""
    b, s, h, _ = q.shape
    dtype = state_dtype(q.dtype)
    acc = torch.empty(b, s, h, v.shape[-1], dtype=dtype, device=q.device)
    m, l, lse = (torch.empty(b, h, s, dtype=dtype, device=q.device) for _ in range(3))
    state = State(acc, m, l, torch.empty(acc.shape, dtype=q.dtype, device=q.device), lse)

    courier = _Courier(plan, transport, k, v)
    folds, last = 0, sum(len(hop.blocks) for hop in plan.hops) - 1
    if last < 0:  # no row sees a key, but every row has a result
        nothing = torch.zeros(s, dtype=torch.int32, device=q.device)
        bounds = Bounds(nothing, nothing, nothing, nothing[:0], False)
        backend.forward(state, q, k[:, :0], v[:, :0], bounds, options, sinks=sinks, start=True, finish=True)
    keys, values = k, v
    for hop, following in _with_next(plan.hops):
        coming = courier.post(following) if following else None
        with transport.span("compute", hop.offset, _flops(plan, hop, q, v)):
            for block in hop.blocks:
                start, finish = folds == 0, folds == last
                row_range = range(s) if start or finish else block.rows  # every row is begun and finished
                rows, cols = _rows(row_range), _rows(block.keys)
                backend.forward(
                    state[rows],
                    q[:, rows],
                    keys[:, cols],
                    values[:, cols],
                    _bounds(plan, hop, block, row_range, q.device),
                    options,
                    sinks=sinks,
                    start=start,
                    finish=finish,
                )
                folds += 1
        if coming:
            handle, keys, values = coming
            yield handle
    return state.out, state.lse


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
    """The backward pass of one rank; returns `(dq, dk, dv, dsinks)` in the dtypes of the inputs, dsinks None without sinks."""
    grads = yield from _gradients(plan, transport, backend, dout, dlse, q, k, v, sinks, out, lse, options)
    # the buffers of the hops are gone by now: casts to 16 bits are not held beside them
    return tuple(None if g is None else g.to(t.dtype) for g, t in zip(grads, (q, k, v, sinks), strict=True))


def _gradients(
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
    """What `backward` returns, in the dtype of the state.

    dq stays at home. The gradients of a received block go straight back to its owner one hop behind, in fp32, and are added there.
    A rank's own keys come first and last, so that neither the first keys nor the last gradients travel alone.
    """
    dtype = state_dtype(q.dtype)
    delta = backend.delta(dout, out, dlse)
    dq, dk, dv = (torch.zeros(t.shape, dtype=dtype, device=t.device) for t in (q, k, v))

    courier = _Courier(plan, transport, k, v)
    computed = _Buffers(2, max(hop.recv_rows for hop in plan.hops), k, v, dtype)
    returned = _Buffers(1, max(hop.send_rows for hop in plan.hops), k, v, dtype)
    going_home: tuple[Handle, Hop, _Pair] | None = None

    def add_at_home(hop: Hop, grads: _Pair) -> None:
        at = 0
        with transport.span("add", -hop.offset):
            for r in hop.send:
                dk[:, _rows(r)] += grads.first[:, at : at + len(r)]
                dv[:, _rows(r)] += grads.second[:, at : at + len(r)]
                at += len(r)

    keys, values = k, v
    share = k.element_size() / (k.element_size() + dtype.itemsize)  # of the keys in all bytes that travel
    for hop, following in _with_next(plan.backward_hops(share)):
        coming = courier.post(following) if following and following.offset else None
        if hop.offset == 0:
            keys, values, block_dk, block_dv = k, v, dk, dv
        else:
            travelling = computed.take(hop.recv_rows)
            travelling.flat.zero_()
            block_dk, block_dv = travelling.first, travelling.second
        with transport.span("compute", hop.offset, _flops(plan, hop, q, v, backward=True)):
            for block in hop.blocks:
                rows, cols = _rows(block.rows), _rows(block.keys)
                backend.backward(
                    Grads(dq[:, rows], block_dk[:, cols], block_dv[:, cols]),
                    q[:, rows],
                    keys[:, cols],
                    values[:, cols],
                    dout[:, rows],
                    lse[..., rows],
                    delta[..., rows],
                    _bounds(plan, hop, block, block.rows, q.device),
                    options,
                )
        if going_home:
            yield going_home[0]
            add_at_home(*going_home[1:])
            going_home = None
        if hop.offset:
            arriving = returned.take(hop.send_rows)
            handle = transport.exchange(-hop.offset, travelling.message, arriving.message)
            going_home = (handle, hop, arriving)
        if coming:
            handle, keys, values = coming
            yield handle

    return dq, dk, dv, None if sinks is None else sink_gradient(sinks, lse, delta)


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """What some rows add to the gradient of sinks, `[H]`, from their `lse` and `delta` `[B, H, S]`."""
    # a sink is a key with value 0 whose logit is its own: dlogit = -p * delta
    # where lse is -inf the sink is too, and weighs nothing
    weight = torch.exp(sinks.to(lse.dtype)[:, None] - lse.masked_fill(lse == -torch.inf, torch.inf))
    return -(weight * delta).sum((0, 2))


def _flops(plan: Plan, hop: Hop, q: Tensor, v: Tensor, backward: bool = False) -> int:
    sizes = {"batch": q.shape[0], "heads": q.shape[2], "head_dim": q.shape[3], "v_head_dim": v.shape[3]}
    return plan.flops(hop, **sizes, backward=backward)


def _with_next(hops: tuple[Hop, ...]) -> zip:  # type: ignore[type-arg]
    return zip(hops, [*hops[1:], None], strict=True)
