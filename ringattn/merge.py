"""Merging finished attention results over disjoint key sets."""

import torch
from torch import Tensor

from ringattn.kernels import state_dtype

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
