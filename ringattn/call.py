"""From the arguments of one attention call to everything that runs it, with the same verdict on every rank."""

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ringattn import handshake, masks
from ringattn import layout as layouts
from ringattn.kernels import Backend, Options, Request, choose
from ringattn.layout import Layout
from ringattn.masks import Mask
from ringattn.plan import Plan, build_plan
from ringattn.transport import Transport, transports

__all__ = ["Arguments", "Call", "prepare"]

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What an attention call was asked, tensors apart, in the form in which it enters the operator."""

    codes: Sequence[Tensor]  # of the mask, and of the layout where that is a value
    layout: str  # "" where the layout is a value
    group: str
    seqlen: int | None
    softmax_scale: float | None
    softcap: float | None
    dropout_p: float
    seed: int | None
    head_offset: int
    backend: str
    deterministic: str
    timeout: float | None
    validate: bool


@dataclasses.dataclass(frozen=True)
class Call:
    """A checked call of one rank, ready to run."""

    plan: Plan
    transport: Transport
    backend: Backend
    options: Options


def prepare(
    q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor], sinks: Tensor | None, args: Arguments
) -> list[Call]:
    """One checked call for each rank that this process drives.

    Raises:
        ValueError, NotImplementedError: some rank's arguments are wrong or nothing supports them, or ranks disagree; the same
            error on every rank (with `validate=False` only on the ranks concerned).
        RuntimeError: a rank did not answer.
    """
    ring = transports(args.group, args.timeout)
    if not len(q) == len(k) == len(v) == len(ring):
        raise ValueError(
            f"ring_attention: got {len(q)}, {len(k)}, {len(v)} shards of q, k, v for {len(ring)} ranks; one each is needed."
        )
    calls: list[Call | Exception] = []
    for transport, *shards in zip(ring, q, k, v, strict=True):
        try:
            mask = masks.decode(args.codes[0])
            layout = layouts.decode(args.layout, args.codes[-1] if len(args.codes) > 1 else None)
            calls.append(_checked(*shards, sinks, mask, layout, transport, args))
        except Exception as error:  # whatever a mask of the user's own may raise: the others must hear of it
            calls.append(error)
    if args.validate and ring[0].world_size > 1:
        cards = [
            _card(call, shard, sinks, args.deterministic)
            for call, shard in zip(calls, zip(q, k, v, strict=True), strict=True)
        ]
        if len(cards) < ring[0].world_size:
            cards = handshake.exchange(cards[0], args.group, args.timeout)
        handshake.compare(cards)
    for call in calls:
        if isinstance(call, Exception):
            raise call
    for transport in ring:
        transport.connect(q[0].device)
    return [call for call in calls if isinstance(call, Call)]


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    mask: Mask,
    layout: Layout,
    transport: Transport,
    args: Arguments,
) -> Call:
    """Check the arguments of one rank."""
    name, world_size, rank = "ring_attention", transport.world_size, transport.rank
    for label, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 4:
            raise ValueError(f"{name}: {label} has shape {tuple(t.shape)}; it must be [B, S, H, D].")
        if t.dtype != q.dtype or t.device != q.device:
            raise ValueError(
                f"{name}: {label} is {t.dtype} on {t.device} and q is {q.dtype} on {q.device}; they must agree."
            )
        if t.shape[-1] < 1 or t.shape[2] < 1:
            raise ValueError(f"{name}: {label} has shape {tuple(t.shape)}; heads and head dim must be at least 1.")
    if q.dtype not in DTYPES:
        raise ValueError(f"{name}: q is {q.dtype}; it must be one of {', '.join(map(str, DTYPES))}.")
    b, s, h, d = q.shape
    if k.shape[:2] != (b, s) or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"{name}: q, k, v have shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}; batch and length must be the same in all, "
            "and heads in k and v. Queries and keys are shards of one sequence."
        )
    if k.shape[-1] != d:
        raise ValueError(f"{name}: k has head dim {k.shape[-1]} and q has {d}; they must be equal.")
    if h % k.shape[2]:
        raise ValueError(f"{name}: k has {k.shape[2]} heads and q has {h}; q's heads must be a multiple of k's.")
    if sinks is not None and (sinks.shape != (h,) or sinks.device != q.device or not sinks.is_floating_point()):
        raise ValueError(
            f"{name}: sinks is {sinks.dtype} {tuple(sinks.shape)} on {sinks.device}; it must be floating point [{h}] on {q.device}."
        )
    if args.softmax_scale is not None and not math.isfinite(args.softmax_scale):
        raise ValueError(f"{name}: softmax_scale is {args.softmax_scale}; it must be finite.")
    if args.softcap is not None and not (args.softcap > 0 and math.isfinite(args.softcap)):
        raise ValueError(f"{name}: softcap is {args.softcap}; it must be positive, or None for no cap.")
    if not 0 <= args.dropout_p < 1:
        raise ValueError(f"{name}: dropout_p is {args.dropout_p}; it must be at least 0 and below 1.")
    if args.dropout_p and args.seed is None:
        raise ValueError(
            f"{name}: dropout_p is {args.dropout_p} and seed None; a seed, the same on every rank, is required."
        )
    if args.timeout is not None and not args.timeout > 0:
        raise ValueError(
            f"{name}: timeout is {args.timeout}; it must be positive seconds, or None for the group's own."
        )
    if not 0 <= args.head_offset < 2**31:
        raise ValueError(f"{name}: head_offset is {args.head_offset}; it must be at least 0 and below 2**31.")
    if args.deterministic not in ("", "bitwise"):
        raise ValueError(f"{name}: deterministic is {args.deterministic!r}; it must be False or 'bitwise'.")
    if mask.batch is not None and mask.batch != b:
        raise ValueError(
            f"{name}: mask {type(mask).__name__} is for a batch of {mask.batch} and q has {b} rows; they must agree."
        )
    layouts.resolve(layout)
    seqlen = s * world_size if args.seqlen is None else args.seqlen
    plan = build_plan(mask, layout, seqlen, world_size, rank)
    if len(plan.positions) != s:
        shown = layout if isinstance(layout, str) else type(layout).__name__
        raise ValueError(
            f"{name}: q has {s} rows on rank {rank}, and layout {shown!r} gives rank {rank} of {world_size} {len(plan.positions)} of seqlen {seqlen}; "
            "they must agree. Make shards with ringattn.shard, and pass seqlen where their lengths differ."
        )
    request = Request(
        q.device,
        q.dtype,
        h,
        k.shape[2],
        d,
        v.shape[-1],
        args.softcap is not None,
        sinks is not None,
        args.dropout_p > 0,
    )
    scale = d**-0.5 if args.softmax_scale is None else args.softmax_scale
    options = Options(scale, args.softcap, args.dropout_p, args.seed or 0, args.head_offset)
    return Call(plan, transport, choose(args.backend, request), options)


def _card(
    call: Call | Exception, shards: tuple[Tensor, ...], sinks: Tensor | None, deterministic: str
) -> handshake.Card:
    """What a rank tells the others: all that must be the same, or its error."""
    if isinstance(call, Exception):
        return handshake.card_of(call)
    plan, (q, k, v) = call.plan, shards
    return {
        "batch": str(q.shape[0]),
        "heads of q and k": f"{q.shape[2]}, {k.shape[2]}",
        "head dims of q and v": f"{q.shape[3]}, {v.shape[3]}",
        "dtype": str(q.dtype),
        "sinks": "none" if sinks is None else str(sinks.dtype),
        "device type": q.device.type,
        "seqlen": str(plan.seqlen),
        "mask": f"{repr(plan.mask)[:80]} #{plan.mask.fingerprint}",
        "layout": layouts.fingerprint(plan.layout),
        "options": repr(call.options),
        "backend": call.backend.name,
        "deterministic": deterministic or "False",
    }
