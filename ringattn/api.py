"""The public functions: defaults, and one call of the operator."""

import operator
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

from ringattn import layout as layouts
from ringattn import ops
from ringattn.call import Arguments
from ringattn.handshake import share_verdict
from ringattn.layout import Layout
from ringattn.masks import Causal, Mask
from ringattn.transport import group_name, resolve_group

__all__ = ["ring_attention", "shard", "unshard"]

_CAUSAL = Causal()


def arguments(
    mask: Mask,
    layout: Layout,
    group: Any,
    seqlen: int | None,
    softmax_scale: float | None,
    softcap: float | None,
    dropout_p: float,
    seed: int | None,
    head_offset: int,
    backend: str,
    deterministic: bool | str,
    timeout: float | None,
    validate: bool,
) -> Arguments:
    """The keyword arguments of `ring_attention` in the form in which they enter the operator.

    Raises:
        ValueError: one has a type that the operator does not take.
    """
    if not isinstance(mask, Mask):
        raise ValueError(f"ring_attention: mask is {mask!r}; it must be a mask such as ringattn.Causal().")
    named = isinstance(layout, str)
    if not named and not isinstance(layout, layouts.Value):
        raise ValueError(
            f"ring_attention: layout is {layout!r}; it must be a name or a value such as ringattn.per_document(...)."
        )
    return Arguments(
        codes=[mask.code] if named else [mask.code, layout.code],
        layout=layout if named else "",
        group=group_name(group),
        seqlen=_integer("seqlen", seqlen),
        softmax_scale=_number("softmax_scale", softmax_scale),
        softcap=_number("softcap", softcap),
        dropout_p=_number("dropout_p", dropout_p) or 0.0,
        seed=_signed(_integer("seed", seed)),
        head_offset=_integer("head_offset", head_offset) or 0,
        backend=str(backend),
        deterministic=str(deterministic or ""),
        timeout=_number("timeout", timeout),
        validate=bool(validate),
    )


def _integer(name: str, value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    try:
        return operator.index(value)  # of numpy, or of a tensor
    except TypeError:
        raise ValueError(f"ring_attention: {name} is {value!r}; it must be an integer.") from None


def _signed(seed: int | None) -> int | None:
    """64 bits as an operator takes them."""
    if seed is None or -(2**63) <= seed < 2**63:
        return seed
    if seed >= 2**64 or seed < 0:
        raise ValueError(f"ring_attention: seed is {seed}; it must have 64 bits at most.")
    return seed - 2**64


def _number(name: str, value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        raise ValueError(f"ring_attention: {name} is {value!r}; it must be a number.") from None


def _refuse_tensors(**tensors: Any) -> None:
    """Refuse what would go wrong or give unclear errors below: DTensors, and the transforms of torch.func."""
    for name, t in tensors.items():
        if t is None and name == "sinks":
            continue
        if not isinstance(t, Tensor):
            raise ValueError(f"ring_attention: {name} is a {type(t).__name__}; it must be a tensor.")
        if isinstance(t, DTensor):
            raise NotImplementedError(f"ring_attention: {name} is a DTensor; pass the local shard, {name}.to_local().")
        if torch.compiler.is_compiling():
            continue
        if t.is_meta:
            raise NotImplementedError(f"ring_attention: {name} is on the meta device; only real tensors are computed.")
        # an operator would take the tangent for zero
        if torch._C._functorch.is_functorch_wrapped_tensor(t) or forward_ad.unpack_dual(t).tangent is not None:
            raise NotImplementedError(
                f"ring_attention: {name} is under torch.func or forward-mode differentiation, which is not supported; "
                "use backward or torch.autograd.grad."
            )


class Keywords(TypedDict, total=False):
    """The keyword arguments of `ring_attention`, `return_lse` apart, for type checkers and editors."""

    mask: Mask
    layout: Layout
    group: Any
    seqlen: int | None
    softmax_scale: float | None
    softcap: float | None
    sinks: Tensor | None
    dropout_p: float
    seed: int | None
    head_offset: int
    backend: str
    deterministic: bool | str
    timeout: float | None
    validate: bool


@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **keywords: Unpack[Keywords]
) -> Tensor: ...
@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **keywords: Unpack[Keywords]
) -> tuple[Tensor, Tensor]: ...
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask = _CAUSAL,
    layout: Layout = "zigzag",
    group: Any = None,
    seqlen: int | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    head_offset: int = 0,
    backend: str = "auto",
    deterministic: bool | str = False,
    timeout: float | None = None,
    validate: bool = True,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of a sequence whose tokens are split across the ranks of `group`.

    Every rank passes its own rows, in the order of `layout` (see `shard`), and gets the attention of those rows over the whole
    sequence. Differentiable in q, k, v, sinks and, through `lse`, in the log-sum-exp; gradients come back to the rank that holds
    the row. The online softmax that is carried from hop to hop is Milakov and Gimelshein's (2018), the ring Liu et al.'s (2023).

    Args:
        q: queries `[B, S, H, D]`, fp64, fp32, bf16 or fp16.
        k: keys `[B, S, Hkv, D]`; H is a multiple of Hkv. v: values `[B, S, Hkv, Dv]`.
        mask: what each row sees, of the whole sequence; default `Causal()`.
        layout: which rows each rank holds: a name (`ringattn.layouts()`) or a value such as `per_document(cu_seqlens)` or
            `balanced(mask, seqlen, world_size)`; "auto" must be resolved first, with `choose_layout`.
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None for a ring of one.
        seqlen: global tokens; needed only where shards differ in length; default `S * world size`.
        softmax_scale: multiplies the scores; default `D ** -0.5`.
        softcap: scores become `softcap * tanh(scores / softcap)`; default none.
        sinks: one logit `[H]` for each head that joins every row's softmax with value 0. Its gradient holds this rank's part, to
            be reduced like that of any replicated weight.
        dropout_p: probability with which an attention weight is dropped; the same weights at every world size and layout.
        seed: of the dropout, an integer of up to 64 bits, the same on every rank; required with dropout.
        head_offset: global index of head 0 of q, so that ranks of tensor parallelism drop different weights.
        backend: "auto" or a name out of `ringattn.backends()`.
        deterministic: False: the same bits on two runs of one setting. "bitwise": the same bits of out, lse and the gradients of q, k
            and v at every world size, layout and number of threads, for O(N) rows of memory and more time (docs/numerics.md).
        timeout: seconds that one wait for another rank may take; default: the group's own. With NCCL it holds for the comparison
            of arguments; a hop there does not block the host, and the group's watchdog times it.
        validate: compare all ranks' arguments first, by one small message to each on the CPU. Without it ranks that disagree may hang.
        return_lse: also return the log-sum-exp.

    Returns:
        `out` `[B, S, H, Dv]` in q's dtype, or `(out, lse)` with `lse` `[B, H, S]`, fp32 (fp64 for fp64 inputs), natural log. A row
        that sees no key has out 0, lse -inf (with sinks: the sink) and gradients 0.

    Raises:
        ValueError: an argument is wrong on some rank, or ranks disagree; the same error on every rank, before anything is sent.
        NotImplementedError: a valid request that no backend serves; double backward; a DTensor.
        RuntimeError: a rank died or did not answer in time.

    Example:
        >>> import torch, ringattn
        >>> q, k, v = torch.randn(3, 1, 16, 2, 8).unbind(0)
        >>> ringattn.ring_attention(q, k, v, mask=ringattn.Window(4)).shape
        torch.Size([1, 16, 2, 8])
    """
    try:
        _refuse_tensors(q=q, k=k, v=v, sinks=sinks)
        args = arguments(
            mask,
            layout,
            group,
            seqlen,
            softmax_scale,
            softcap,
            dropout_p,
            seed,
            head_offset,
            backend,
            deterministic,
            timeout,
            validate,
        )
    except (ValueError, NotImplementedError) as error:
        _tell(error, group, timeout, validate)
        raise
    if torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    out, lse = ops.attention([q], [k], [v], sinks, args)
    return (out[0], lse[0]) if return_lse else out[0]


def _tell(error: Exception, group: Any, timeout: Any, validate: bool) -> None:
    """Raise `error` on every rank, where the group is one and the ranks compare at all."""
    try:
        name = group_name(group)
    except ValueError:
        return
    if validate and name and not name.startswith("virtual:"):
        share_verdict(error, group, timeout if isinstance(timeout, int | float) and timeout > 0 else None)


def _process_group(group: Any) -> dist.ProcessGroup | None:
    """The process group of a group or mesh; None for a ring of one."""
    name = group_name(group)
    return resolve_group(name) if name else None


def _sizes(group: dist.ProcessGroup | None) -> tuple[int, int]:
    return (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)


def _rows_of(layout: Layout, seqlen: int, world_size: int, rank: int, device: torch.device) -> Tensor:
    return layouts.positions(layout, seqlen, world_size, rank).to(device)


def _gather(local: Tensor, layout: Layout, group: dist.ProcessGroup | None, dim: int, seqlen: int) -> Tensor:
    """All ranks' rows in global order."""
    rank, world_size = _sizes(group)
    if world_size == 1:
        return local.clone()
    counts = [len(layouts.positions(layout, seqlen, world_size, r)) for r in range(world_size)]
    rows = local.movedim(dim, 0).contiguous()
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: counts[rank]] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    whole = rows.new_empty(seqlen, *rows.shape[1:])
    for r, part in enumerate(parts):
        whole[_rows_of(layout, seqlen, world_size, r, whole.device)] = part[: counts[r]]
    return whole.movedim(0, dim).contiguous()


def _scatter_sum(whole: Tensor, layout: Layout, group: dist.ProcessGroup | None, dim: int, seqlen: int) -> Tensor:
    """This rank's rows of the sum of all ranks' tensors."""
    rank, world_size = _sizes(group)
    if world_size == 1:
        return whole.clone()
    rows = whole.movedim(dim, 0)
    counts = [len(layouts.positions(layout, seqlen, world_size, r)) for r in range(world_size)]
    padded = rows.new_zeros(world_size, max(counts), *rows.shape[1:])
    for r, count in enumerate(counts):
        padded[r, :count] = rows[_rows_of(layout, seqlen, world_size, r, rows.device)]
    mine = torch.empty_like(padded[0])
    dist.reduce_scatter(mine, list(padded), group=group)
    return mine[: counts[rank]].movedim(0, dim).contiguous()


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, group: dist.ProcessGroup | None, dim: int) -> Tensor:
        ctx.args = (layout, group, dim, x.shape[dim])
        rank, world_size = _sizes(group)
        return x.index_select(dim, _rows_of(layout, x.shape[dim], world_size, rank, x.device))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _gather(grad, *ctx.args), None, None, None


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, layout: Layout, group: dist.ProcessGroup | None, dim: int, seqlen: int
    ) -> Tensor:
        ctx.args = (layout, group, dim, seqlen)
        return _gather(local, *ctx.args)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _scatter_sum(grad, *ctx.args), None, None, None, None


def shard(x: Tensor, layout: Layout = "zigzag", group: Any = None, dim: int = 1) -> Tensor:
    """This rank's rows of a tensor that every rank of `group` holds whole; a copy. Its gradient is an all-gather.

    Args:
        x: any shape; `dim` is its sequence. layout: as in `ring_attention`. group: a ProcessGroup, a one-dimensional DeviceMesh or
            None for a ring of one.

    Raises:
        ValueError: the layout is unknown or for another length, or `dim` is no dim of `x`.

    Example:
        >>> shard(torch.arange(4)[None])
        tensor([[0, 1, 2, 3]])
    """
    return _Shard.apply(x, layout, _process_group(group), _dim("shard", x, dim))


def unshard(
    local: Tensor,
    layout: Layout = "zigzag",
    group: Any = None,
    dim: int = 1,
    seqlen: int | None = None,
    timeout: float | None = None,
) -> Tensor:
    """The whole tensor on every rank of `group`, in global order, out of each rank's rows: the inverse of `shard`.

    Its gradient is a reduce-scatter (a sum over ranks).

    Args:
        local: this rank's rows along `dim`. seqlen: global tokens; needed only where shards differ in length; default: local rows
            times world size. timeout: seconds that ranks wait for each other's arguments; default: the group's own.

    Raises:
        ValueError: on some rank `local` does not have the rows that the layout gives it, or ranks disagree; on every rank.
    """
    process_group = _process_group(group)
    rank, world_size = _sizes(process_group)
    refused, card = None, None
    try:
        dim = _dim("unshard", local, dim)
        seqlen = local.shape[dim] * world_size if seqlen is None else seqlen
        rows = len(layouts.positions(layout, seqlen, world_size, rank))
        if local.shape[dim] != rows:
            raise ValueError(
                f"unshard: rank {rank} has {local.shape[dim]} rows and the layout gives it {rows} of seqlen {seqlen}; "
                "they must agree. Pass seqlen where shards differ in length."
            )
        others = [n for d, n in enumerate(local.shape) if d != dim]
        card = {"dim": str(dim), "the other dims": str(others), "dtype": str(local.dtype), "seqlen": str(seqlen)}
        card["layout"] = layouts.fingerprint(layout)
    except ValueError as error:
        refused = error
    share_verdict(refused, group, timeout, card, who="unshard")
    return _Unshard.apply(local, layout, process_group, dim, seqlen)


def _dim(name: str, x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{name}: dim is {dim} and the tensor has shape {tuple(x.shape)}; it must be one of its dims.")
    return dim % x.dim()
