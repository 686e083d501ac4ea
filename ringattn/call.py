"""From the arguments of one attention call to everything that runs it, with the same verdict on every rank.

A rank alone cannot know that another disagrees. So each rank puts what it was asked, or why it refuses, on a card of fixed size,
and all ranks read all cards before anything else moves.
"""

import dataclasses
import datetime
import json
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import layout as layouts
from ringattn import masks
from ringattn.kernels import Backend, Options, Request, choose
from ringattn.layout import Layout
from ringattn.masks import Mask
from ringattn.plan import Plan, build_plan
from ringattn.transport import Transport, cpu_group, transports

__all__ = ["Arguments", "Call", "prepare"]

CARD_BYTES = 1536
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
    mask = masks.decode(args.codes[0])
    layout = layouts.decode(args.layout, args.codes[-1] if len(args.codes) > 1 else None)
    calls: list[Call | Exception] = []
    for transport, *shards in zip(ring, q, k, v, strict=True):
        try:
            calls.append(_checked(*shards, sinks, mask, layout, transport, args))
        except (ValueError, NotImplementedError) as error:
            calls.append(error)
    if args.validate and ring[0].world_size > 1:
        cards = [_card(call, shard, sinks) for call, shard in zip(calls, zip(q, k, v, strict=True), strict=True)]
        if len(cards) < ring[0].world_size:
            cards = _all_cards(cards[0], ring[0], args)
        _agree(cards)
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
    if args.deterministic == "bitwise":
        raise NotImplementedError(
            f"{name}: deterministic='bitwise' is not supported yet; deterministic=False already gives the same bits on two runs of one setting."
        )
    if args.deterministic:
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


def _card(call: Call | Exception, shards: tuple[Tensor, ...], sinks: Tensor | None) -> dict[str, str]:
    """What a rank tells the others: all that must be the same, or its error."""
    if isinstance(call, Exception):
        text = str(call)
        while len(json.dumps(text)) > CARD_BYTES - 100:  # quotes and letters beyond ASCII take several bytes
            text = text[: len(text) * 9 // 10]
        return {"error": text, "type": type(call).__name__}
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
    }


def _all_cards(card: dict[str, str], transport: Transport, args: Arguments) -> list[dict[str, str]]:
    """Every rank's card, by one all-gather of fixed size on a CPU group."""
    text = json.dumps(card).encode()
    assert len(text) < CARD_BYTES, text
    mine = torch.zeros(CARD_BYTES, dtype=torch.uint8, device="cpu")
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    theirs = [torch.zeros_like(mine) for _ in range(transport.world_size)]
    try:
        work = dist.all_gather(theirs, mine, group=cpu_group(args.group), async_op=True)
        if args.timeout is None:
            work.wait()
        else:
            work.wait(datetime.timedelta(seconds=args.timeout))
    except RuntimeError as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RuntimeError(
            f"ring_attention: rank {transport.rank} of {transport.world_size} got no answer from every rank before hop 0: {reason}; a rank died, "
            "left, or makes another call. Look at the other ranks' logs first."
        ) from error
    return [json.loads(bytes(t.numpy()).rstrip(b"\0")) for t in theirs]


def _agree(cards: list[dict[str, str]]) -> None:
    """Raise the same error on every rank, unless all cards are equal."""
    for rank, card in enumerate(cards):
        if "error" in card:
            kind = NotImplementedError if card["type"] == "NotImplementedError" else ValueError
            same = all(other.get("error") == card["error"] for other in cards)
            where = "" if same else f" (found on rank {rank} of {len(cards)})"
            raise kind(card["error"] + where)
    for field in cards[0]:
        holders: dict[str, list[int]] = {}
        for rank, card in enumerate(cards):
            holders.setdefault(card[field], []).append(rank)
        if len(holders) > 1:
            said = "; ".join(
                f"{value} on rank{'s' * (len(r) > 1)} {', '.join(map(str, r))}" for value, r in holders.items()
            )
            raise ValueError(f"ring_attention: ranks disagree on {field}: {said}; every rank must pass the same.")
