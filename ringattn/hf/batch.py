"""What rows of a whole batch see, and their labels: pure functions of the arguments of a model."""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ringattn.hf.attention import text
from ringattn.masks import Bounds, Causal, Documents, Mask, Rows, Window

__all__ = ["IGNORED", "make_masks", "shift"]

IGNORED = -100  # the label of a row without loss, in transformers


def shift(labels: Tensor) -> Tensor:
    """Labels `[B, N]` with row n's that of token n + 1, across documents too, as in transformers."""
    return nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]


def make_masks(
    who: str, given: Mapping[str, Any], batch: int, seqlen: int, window: int | None
) -> dict[int | None, Mask]:
    """By sliding window (None and `window`, in tokens): causal, in a row's own document, nothing of padding.

    Documents begin where `position_ids` does not rise by one, and where `cu_seq_lens_q` says so; transformers looks for
    them only if no attention mask is given, here they hold beside one.
    """
    starts = [set(_packed(who, given, batch, seqlen))] * batch
    if "position_ids" in given:
        resets = (given["position_ids"].long().diff(dim=-1) != 1).cpu()  # unsigned differences wrap
        if resets.any():
            found = [set((row.nonzero().flatten() + 1).tolist()) for row in resets.expand(batch, -1)]
            starts = [a | b for a, b in zip(starts, found, strict=True)]
    same = all(row == starts[0] for row in starts)
    each = [Documents((0, *sorted(row), seqlen)) if row else Causal() for row in (starts[:1] if same else starts)]
    # An intersection whatever the batch holds: compiled layers are guarded on the class of the mask, not on what it says.
    mask = Causal() & (each[0] if same else Rows(*each))
    padding = _padding(who, given, batch, seqlen)
    if padding is not None:
        mask = mask & padding
    # transformers counts the row itself in a window
    return {None: mask} if window is None else {None: mask, window: mask & Window(window - 1)}


def _packed(who: str, given: Mapping[str, Any], batch: int, seqlen: int) -> tuple[int, ...]:
    """Where documents begin by `cu_seq_lens_q`, the form in which collators hand packings to varlen kernels."""
    lengths = ("max_length_q", "max_length_k")
    q, k = given.get("cu_seq_lens_q"), given.get("cu_seq_lens_k")
    if q is None and k is None:
        for name in lengths:
            if name in given:
                raise ValueError(
                    f"{who}: {name} is {text(given[name])} without cu_seq_lens_q and cu_seq_lens_k; give all, or none."
                )
        return ()
    ends, ends_k = ([int(end) for end in ends] if ends is not None else None for ends in (q, k))
    if batch != 1 or ends is None or ends != ends_k:
        raise ValueError(
            f"{who}: cu_seq_lens_q is {ends} and cu_seq_lens_k {ends_k} at batch {batch}; they must be equal, "
            "and the batch 1."
        )
    if not ends or ends[0] != 0 or ends[-1] != seqlen or ends != sorted(ends):
        raise ValueError(f"{who}: cu_seq_lens_q is {ends}; it must rise from 0 to the number of tokens, {seqlen}.")
    longest = max(b - a for a, b in itertools.pairwise(ends))
    for name in lengths:
        if (length := int(given.get(name, longest))) < longest:
            raise ValueError(f"{who}: {name} is {length}; it must not be less than the longest document, {longest}.")
    return tuple(end for end in ends if 0 < end < seqlen)


def _padding(who: str, given: Mapping[str, Any], batch: int, seqlen: int) -> Mask | None:
    """Causal less what an attention mask of ones and zeros `[B, N]` hides; None where it hides nothing."""
    value = given.get("attention_mask")
    if value is None:
        return None
    shape = (batch, seqlen)
    if not isinstance(value, Tensor) or value.is_floating_point() or tuple(value.shape) != shape:
        raise NotImplementedError(
            f"{who}: attention_mask is {text(value)}; only integer ones and zeros of shape {shape} are supported."
        )
    valid = value.cpu().long()
    if bad := sorted(set(valid.unique().tolist()) - {0, 1}):
        raise NotImplementedError(
            f"{who}: attention_mask has the value {bad[0]}; only 0 and 1 are supported. Pack with position_ids."
        )
    if valid.all():
        return None
    first, count, at = valid.argmax(-1, keepdim=True), valid.sum(-1, keepdim=True), torch.arange(seqlen)
    broken = ((at >= first) & (at < first + count)).ne(valid.bool()).any(-1)
    if broken.any():
        raise NotImplementedError(
            f"{who}: attention_mask has zeros between ones in batch row {int(broken.long().argmax())}; only padding on "
            "the left and on the right is supported."
        )
    lo, hi = first.expand(shape), torch.minimum(at + 1, first + count)
    same = bool((valid == valid[0]).all())
    return Bounds(lo[0], hi[0]) if same else Bounds(lo, hi)
