"""The operators `ringattn::attention` and `ringattn::attention_backward`, their fake forms, and the one autograd definition.

Checking and planning happen inside the operator, so a compiled graph holds one node for an attention call. Lists of tensors hold
one entry for each rank that this process drives: one, or W in a virtual ring.
"""

from typing import Any

import torch
from torch import Tensor

from ringattn import bitwise, schedule
from ringattn.call import Arguments, Call, prepare
from ringattn.kernels import state_dtype

__all__ = ["attention"]

_ARGUMENTS = (
    "Tensor[] codes, str layout, str group, SymInt? seqlen, float? softmax_scale, float? softcap, float dropout_p, SymInt? seed, "
    "SymInt head_offset, str backend, str deterministic, float? timeout, bool validate"
)
torch.library.define(
    "ringattn::attention",
    f"(Tensor[] q, Tensor[] k, Tensor[] v, Tensor? sinks, {_ARGUMENTS}) -> (Tensor[] out, Tensor[] lse)",
)
torch.library.define(
    "ringattn::attention_backward",
    f"(Tensor[] dout, Tensor[] dlse, Tensor[] q, Tensor[] k, Tensor[] v, Tensor? sinks, Tensor[] out, Tensor[] lse, {_ARGUMENTS})"
    " -> (Tensor[] dq, Tensor[] dk, Tensor[] dv, Tensor[] dsinks)",
)

Tensors = list[Tensor]


def attention(q: Tensors, k: Tensors, v: Tensors, sinks: Tensor | None, args: Arguments) -> tuple[Tensors, Tensors]:
    """`(out, lse)` of every rank that this process drives, differentiable."""
    return torch.ops.ringattn.attention(
        q,
        k,
        v,
        sinks,
        args.codes,
        args.layout,
        args.group,
        args.seqlen,
        args.softmax_scale,
        args.softcap,
        args.dropout_p,
        args.seed,
        args.head_offset,
        args.backend,
        args.deterministic,
        args.timeout,
        args.validate,
    )


def _last_dim_contiguous(tensors: Tensors) -> Tensors:
    return [t if t.stride(-1) == 1 else t.contiguous() for t in tensors]


def _drive(calls: list[Call], passes: list[schedule.Pass]) -> list[Any]:
    """Run the passes of the ranks in this process; where one fails, their ring takes no more calls."""
    try:
        return schedule.drive(passes)
    except BaseException:  # Ctrl-C too
        for call in calls:
            call.transport.give_up()
        raise


@torch.library.impl("ringattn::attention", "CompositeExplicitAutograd")
def _attention(q: Tensors, k: Tensors, v: Tensors, sinks: Tensor | None, *args: Any) -> tuple[Tensors, Tensors]:
    calls = prepare(q, k, v, sinks, Arguments(*args))
    q, k, v = map(_last_dim_contiguous, (q, k, v))
    run = bitwise if Arguments(*args).deterministic else schedule
    passes = [
        run.forward(call.plan, call.transport, call.backend, *shards, sinks, call.options)
        for call, *shards in zip(calls, q, k, v, strict=True)
    ]
    results = _drive(calls, passes)
    return [out for out, _ in results], [lse for _, lse in results]


@torch.library.register_fake("ringattn::attention")
def _attention_fake(q: Tensors, k: Tensors, v: Tensors, sinks: Tensor | None, *args: Any) -> tuple[Tensors, Tensors]:
    out = [a.new_empty((*a.shape[:3], b.shape[3])) for a, b in zip(q, v, strict=True)]
    return out, [a.new_empty((a.shape[0], a.shape[2], a.shape[1]), dtype=state_dtype(a.dtype)) for a in q]


@torch.library.impl("ringattn::attention_backward", "CompositeExplicitAutograd")
def _backward(
    dout: Tensors,
    dlse: Tensors,
    q: Tensors,
    k: Tensors,
    v: Tensors,
    sinks: Tensor | None,
    out: Tensors,
    lse: Tensors,
    *args: Any,
) -> tuple[Tensors, Tensors, Tensors, Tensors]:
    # what forward compared has not changed since
    calls = prepare(q, k, v, sinks, Arguments(*args[:-1], validate=False))
    q, k, v, dout = map(_last_dim_contiguous, (q, k, v, dout))
    run = bitwise if Arguments(*args).deterministic else schedule
    passes = [
        run.backward(call.plan, call.transport, call.backend, do, dl, *shards, sinks, o, stats, call.options)
        for call, do, dl, *shards, o, stats in zip(calls, dout, dlse, q, k, v, out, lse, strict=True)
    ]
    dq, dk, dv, dsinks = (list(t) for t in zip(*_drive(calls, passes), strict=True))
    return dq, dk, dv, [torch.stack(dsinks).sum(0)] if sinks is not None else []


@torch.library.register_fake("ringattn::attention_backward")
def _backward_fake(
    dout: Tensors,
    dlse: Tensors,
    q: Tensors,
    k: Tensors,
    v: Tensors,
    sinks: Tensor | None,
    out: Tensors,
    lse: Tensors,
    *args: Any,
) -> tuple[Tensors, Tensors, Tensors, Tensors]:
    dq, dk, dv = ([torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in ts] for ts in (q, k, v))
    return dq, dk, dv, [] if sinks is None else [torch.empty_like(sinks)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensors, Tensors]) -> None:
    q, k, v, sinks, codes, *ctx.numbers = inputs
    out, lse = output
    ctx.world, ctx.has_sinks, ctx.n_codes = len(q), sinks is not None, len(codes)
    ctx.save_for_backward(*q, *k, *v, *out, *lse, *codes, *([sinks] if sinks is not None else []))


def _autograd(ctx: Any, dout: Tensors, dlse: Tensors) -> tuple[Any, ...]:
    saved, w = list(ctx.saved_tensors), ctx.world
    q, k, v, out, lse = (saved[i * w : (i + 1) * w] for i in range(5))
    codes = saved[5 * w : 5 * w + ctx.n_codes]
    sinks = saved[-1] if ctx.has_sinks else None
    dout = [torch.zeros_like(o) if d is None else d for d, o in zip(dout or [None] * w, out, strict=True)]
    dlse = [torch.zeros_like(s) if d is None else d for d, s in zip(dlse or [None] * w, lse, strict=True)]
    dq, dk, dv, dsinks = torch.ops.ringattn.attention_backward(
        dout, dlse, q, k, v, sinks, out, lse, codes, *ctx.numbers
    )
    return dq, dk, dv, dsinks[0] if ctx.has_sinks else None, [None] * ctx.n_codes, *[None] * len(ctx.numbers)


torch.library.register_autograd("ringattn::attention", _autograd, setup_context=_setup_context)


def _second_backward(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError(
        "ring_attention: a second derivative is asked for; only first ones are supported. Call backward without create_graph=True."
    )


# without it autograd would take the gradients for constants, and second derivatives would be silently wrong
torch.library.register_autograd("ringattn::attention_backward", _second_backward)
