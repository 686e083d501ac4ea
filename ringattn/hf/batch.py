"""What rows of a whole batch see, and their labels: pure functions of the arguments of a model."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ringattn.hf.attention import text
from ringattn.hf.loss import IGNORED
from ringattn.hf.pattern import Pattern, chunk_starts, documents, padding
from ringattn.masks import Causal, Full, Mask, Window

__all__ = ["document_starts", "make_masks", "places", "shift"]


def shift(labels: Tensor) -> Tensor:
    """Labels `[B, N]` with row n's that of token n + 1, across documents too, as in transformers."""
    return nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]


def document_starts(who: str, given: Mapping[str, Any], batch: int, seqlen: int) -> list[list[int]]:
    """For each batch row, where documents begin, 0 apart; one list if that is the same in all.

    Documents begin where `position_ids` does not rise by one, and where `cu_seq_lens_q` or `seq_idx` says so; transformers
    looks for them only if no attention mask is given, here they hold beside one.
    """
    starts = [set(_packed(who, given, batch, seqlen))] * batch
    if "seq_idx" in given:
        starts = [a | set(b) for a, b in zip(starts, _seq_idx(who, given["seq_idx"], batch, seqlen), strict=True)]
    if (resets := _resets(given)) is not None:
        found = [set((row.nonzero().flatten() + 1).tolist()) for row in resets.expand(batch, -1)]
        starts = [a | b for a, b in zip(starts, found, strict=True)]
    each = [sorted(row) for row in starts]
    return each[:1] if all(row == each[0] for row in each) else each


def places(starts: list[list[int]], seqlen: int) -> Tensor:
    """The place of each token in its document, int64 `[B or 1, N]`."""
    at = torch.arange(seqlen)
    each = [torch.tensor([0, *row]) for row in starts]
    return torch.stack([at - begin[torch.searchsorted(begin, at, right=True) - 1] for begin in each])


def make_masks(
    who: str, given: Mapping[str, Any], starts: list[list[int]], seqlen: int, patterns: Iterable[Pattern]
) -> dict[Pattern, Mask]:
    """What rows see, by the pattern of a layer: in a row's own document, nothing of padding."""
    valid = _valid(who, given, seqlen)
    bounds, left = (None, torch.zeros(1, dtype=torch.int64)) if valid is None else _padding(who, valid)
    restarts = given["position_ids"] if _resets(given) is not None else None
    masks = {}
    for pattern in patterns:
        cut = starts if pattern.chunk is None else chunk_starts(starts, restarts, left, seqlen, pattern.chunk)
        plain = Causal() if pattern.is_causal else Full()
        # An intersection whatever the batch holds: compiled layers are guarded on the class of the mask, not on what it says.
        mask = plain & (documents(cut, seqlen, pattern.is_causal) if any(cut) else plain)
        if bounds is not None:
            mask = mask & bounds
        masks[pattern] = mask if pattern.left is None else mask & Window(pattern.left, pattern.right)
    return masks


def _resets(given: Mapping[str, Any]) -> Tensor | None:
    """Where `position_ids` `[B or 1, N]` does not rise by one, bool `[B or 1, N - 1]`; None where it always does."""
    if "position_ids" not in given:
        return None
    resets = (given["position_ids"].long().diff(dim=-1) != 1).cpu()  # unsigned differences wrap
    return resets if resets.any() else None


def _seq_idx(who: str, value: Any, batch: int, seqlen: int) -> list[list[int]]:
    """Where documents begin by `seq_idx`, the number of each token's document `[B or 1, N]`."""
    if not isinstance(value, Tensor) or tuple(value.shape) not in ((batch, seqlen), (1, seqlen)):
        raise ValueError(f"{who}: seq_idx is {text(value)}; it must be integers of the whole batch, {(batch, seqlen)}.")
    return [(row.diff().ne(0).nonzero().flatten() + 1).tolist() for row in value.long().cpu().expand(batch, -1)]


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


def _valid(who: str, given: Mapping[str, Any], seqlen: int) -> Tensor | None:
    """The tokens that an attention mask of ones and zeros `[B, N]` shows; None where it hides nothing."""
    value = given.get("attention_mask")
    if value is None:
        return None
    source = given.get("input_ids", given.get("inputs_embeds"))
    shape = (source.shape[0], seqlen)
    if not isinstance(value, Tensor) or value.is_floating_point() or tuple(value.shape) != shape:
        raise NotImplementedError(
            f"{who}: attention_mask is {text(value)}; only integer ones and zeros of shape {shape} are supported."
        )
    valid = value.cpu().long()
    if bad := sorted(set(valid.unique().tolist()) - {0, 1}):
        raise NotImplementedError(
            f"{who}: attention_mask has the value {bad[0]}; only 0 and 1 are supported. Pack with position_ids."
        )
    return None if valid.all() else valid.bool()


def _padding(who: str, valid: Tensor) -> tuple[Mask, Tensor]:
    try:
        return padding(valid, "attention_mask")
    except NotImplementedError as error:
        raise NotImplementedError(f"{who}: {error}") from None
