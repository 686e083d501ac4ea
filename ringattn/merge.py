"""Merging finished attention results over disjoint key sets."""

from typing import Any

import torch
from torch import Tensor

from ringattn.kernels import Request, choose, state_dtype

__all__ = ["merge"]


def merge(*parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint key sets, from the finished result of each.

    `lse = log(sum_i exp(lse_i))` and `out = sum_i exp(lse_i - lse) * out_i` (Dao et al., FlashAttention,
    2022, section 3.1). Differentiable in every `out` and `lse`.

    Args:
        parts: one or more `(out, lse)`: out `[B, S, H, Dv]`, lse `[B, H, S]`, natural log, `-inf` for a row that saw
            no key (its `out` is 0).

    Returns:
        out `[B, S, H, Dv]` in the dtype of the first `out`, and lse `[B, H, S]` in fp32 (fp64 where the first `out` is
        fp64). A row that saw no key in any part has `out` 0 and `lse` -inf.

    Raises:
        ValueError: no part is given, or the shapes do not fit together.

    Example:
        >>> one, none = torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1, 2)
        >>> out, lse = merge((one, torch.zeros(1, 1, 1)), (none, torch.full((1, 1, 1), -torch.inf)))
        >>> out.flatten().tolist(), lse.item()
        ([1.0, 1.0], 0.0)
    """
    if not parts:
        raise ValueError("merge: parts has 0 entries; at least 1 is required. Pass each partial result as (out, lse).")
    shape = tuple(parts[0][0].shape)
    for index, (out, lse) in enumerate(parts):
        if out.ndim != 4:
            raise ValueError(f"merge: parts[{index}] has out of shape {tuple(out.shape)}; [B, S, H, Dv] is required.")
        if tuple(out.shape) != shape:
            raise ValueError(
                f"merge: parts[{index}] has out of shape {tuple(out.shape)} and parts[0] {shape}; "
                "all must agree. Merge results of the same queries."
            )
        wanted = (shape[0], shape[2], shape[1])
        if tuple(lse.shape) != wanted:
            raise ValueError(
                f"merge: parts[{index}] has lse of shape {tuple(lse.shape)}; "
                f"[B, H, S] = {wanted} is required for out of shape {shape}."
            )
    if _has_kernel(*parts[0][0].shape[2:], parts[0][0]) and all(lse.dtype == torch.float32 for _, lse in parts):
        merged, lse = torch.ops.ringattn.merge([out for out, _ in parts], [lse for _, lse in parts])
        return merged, lse
    return _by_torch(parts)


def _has_kernel(heads: int, v_head_dim: int, out: Tensor) -> bool:
    """Whether the Triton backend is what `backend="auto"` means for such tensors."""
    request = Request(out.device, out.dtype, heads, heads, v_head_dim, v_head_dim, False, False, False)
    return choose("auto", request).name == "triton"


def _by_torch(parts: tuple[tuple[Tensor, Tensor], ...]) -> tuple[Tensor, Tensor]:
    """The formula in torch operators, for any device and floating dtype, differentiable any number of times."""
    dtype = state_dtype(parts[0][0].dtype)
    lses = torch.stack([lse.to(dtype) for _, lse in parts])
    # The shift cancels in value and gradient, so it needs none; 0 stands in where every part is -inf.
    top = lses.detach().amax(0)
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = torch.exp(lses - top)
    total = weights.sum(0)
    is_empty = total == 0
    # log and division see 1 in place of 0, so that no infinite derivative meets a 0.
    total = total.masked_fill(is_empty, 1.0)
    lse = (top + torch.log(total)).masked_fill(is_empty, -torch.inf)
    shares = (weights / total).transpose(-1, -2).unsqueeze(-1)
    # Part by part, so that the outs are never all held in the wider dtype at once.
    merged = shares[0] * parts[0][0].to(dtype)
    for share, (out, _) in zip(shares[1:], parts[1:], strict=True):
        merged = merged + share * out.to(dtype)
    return merged.to(parts[0][0].dtype), lse


@torch.library.custom_op("ringattn::merge", mutates_args=())
def _merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    from ringattn.kernels.triton import merge as kernels

    return kernels.merge(outs, lses)


@_merge.register_fake
def _merge_fake(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.empty_like(outs[0], memory_format=torch.contiguous_format), lses[0].new_empty(lses[0].shape)


@torch.library.custom_op("ringattn::merge_backward", mutates_args=())
def _merge_backward(
    dout: Tensor, dlse: Tensor, outs: list[Tensor], lses: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    from ringattn.kernels.triton import merge as kernels

    return kernels.merge_backward(dout, dlse, outs, lses)


@_merge_backward.register_fake
def _merge_backward_fake(
    dout: Tensor, dlse: Tensor, outs: list[Tensor], lses: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    return [x.new_empty(x.shape) for x in outs], [x.new_empty(x.shape) for x in lses]


def _setup_context(ctx: Any, inputs: tuple[list[Tensor], list[Tensor]], output: tuple[Tensor, Tensor]) -> None:
    outs, lses = inputs
    ctx.save_for_backward(*outs, *lses)


def _autograd(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    parts = len(ctx.saved_tensors) // 2
    outs, lses = list(ctx.saved_tensors[:parts]), list(ctx.saved_tensors[parts:])
    return torch.ops.ringattn.merge_backward(dout, dlse, outs, lses)


_merge.register_autograd(_autograd, setup_context=_setup_context)
