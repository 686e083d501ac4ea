"""Generation over a ring: the prompt's keys and values stay where the ring computed them, and new tokens ask all ranks.

The first call with an empty cache is a ring as any other, and each rank's cache keeps the rank's own rows. Afterwards every rank
computes the new tokens, and keeps them, but only the last rank counts them as its keys: a rank's keys that a row sees are then one
interval. A layer with a window drops old rows of a rank's cache by their number, which leaves at least those inside the window.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ringattn.hf.attention import Decode, text
from ringattn.hf.pattern import Pattern, padding

__all__ = ["Prompt", "begin", "check_cache", "continued", "prompt_of"]

CACHE_NAMES = ("past_key_values", "cache")  # what a cache is called by one version or another
MARK = "_ringattn_prompt"


@dataclasses.dataclass
class Prompt:
    """What a cache holds on this rank.

    Attributes:
        positions: of its rows of the prompt, int64 `[T]`, increasing; -1 for the row of a rank without rows.
        left: tokens of padding on the left, int64 `[B or 1]`. total: tokens so far, on all ranks.
        seqlen: tokens of the prompt.
        is_last: whether the new tokens are this rank's keys.
    """

    positions: Tensor
    left: Tensor
    total: int
    seqlen: int
    is_last: bool


def check_cache(who: str, given: dict[str, Any], config: Any) -> DynamicCache | None:
    """The cache among the arguments, taken out of them; None where none is wanted. A new one is made for `use_cache=True`.

    Raises:
        NotImplementedError: another kind of cache.
        ValueError: it holds tokens that were not computed over this ring.
    """
    name = next((name for name in CACHE_NAMES if name in given), None)
    wants = given.pop("use_cache", name is not None)
    if not isinstance(wants, bool):
        raise NotImplementedError(f"{who}: use_cache is {text(wants)}; it must be True or False.")
    if name is None:
        return DynamicCache(config=config) if wants else None
    cache = given.pop(name)
    if type(cache) is not DynamicCache or any(
        type(x) not in (DynamicLayer, DynamicSlidingWindowLayer) for x in cache.layers
    ):
        kinds = sorted(
            {type(x).__name__ for x in getattr(cache, "layers", ())} - {"DynamicLayer", "DynamicSlidingWindowLayer"}
        )
        raise NotImplementedError(
            f"{who}: {name} is {text(cache)}{' of ' + kinds[0] if kinds else ''}; only a DynamicCache is supported over a ring."
        )
    if not wants:
        raise NotImplementedError(f"{who}: use_cache is False with {name}; it must be True, or {name} None.")
    if getattr(cache, MARK, None) is None and cache.get_seq_length():
        raise ValueError(
            f"{who}: {name} holds {cache.get_seq_length()} tokens that were not computed with the attached model; begin with an empty one."
        )
    return cache


def prompt_of(cache: DynamicCache | None) -> Prompt | None:
    """What an earlier call has left in the cache."""
    return getattr(cache, MARK, None)


def begin(
    who: str,
    cache: DynamicCache,
    given: dict[str, Any],
    starts: list[list[int]],
    positions: Tensor,
    seqlen: int,
    is_last: bool,
) -> None:
    """Note what the ring is about to leave in the cache: this rank's rows, at `positions`.

    Raises:
        NotImplementedError: the prompt is padded on the right, or has documents (`starts`, as of `document_starts`).
    """
    mask = given.get("attention_mask")
    left = torch.zeros(1, dtype=torch.int64)
    if mask is not None and not mask.bool().all():
        if not mask[:, -1].all():
            raise NotImplementedError(
                f"{who}: attention_mask has zeros at its end, with a cache; pad prompts on the left."
            )
        left = padding(mask.cpu().long().bool(), "attention_mask")[1]
    if any(start > int(left[b % len(left)]) for b, row in enumerate(starts) for start in row):
        raise NotImplementedError(
            f"{who}: the prompt has documents, with a cache; give each of them a batch row of its own."
        )
    rows = positions if len(positions) else torch.full((1,), -1)
    setattr(cache, MARK, Prompt(rows.cpu(), left, seqlen, seqlen, is_last))


def continued(who: str, prompt: Prompt, given: dict[str, Any], rows: int) -> Decode:
    """What attention is told of `rows` more tokens, which are counted here.

    Raises:
        NotImplementedError: the mask is not that of the tokens so far and these, or hides some of these.
    """
    total = prompt.total + rows
    mask = given.get("attention_mask")
    if mask is not None:
        if mask.shape[-1] != total:
            raise NotImplementedError(
                f"{who}: attention_mask has {mask.shape[-1]} tokens; the cache holds {prompt.total} and {rows} are new. A cache that was cut, or used "
                "for another prompt, is not supported."
            )
        if not mask[:, prompt.seqlen :].all():
            raise NotImplementedError(f"{who}: attention_mask hides new tokens; only padding on the left is supported.")
    at = torch.arange(prompt.total, total)
    new = torch.arange(prompt.seqlen, total)
    everything = torch.cat([prompt.positions, new])

    def bounds(pattern: Pattern, keys: int) -> tuple[Tensor, Tensor]:
        """What the new rows see of `keys` rows of the cache, the last ones: int32 `[B or 1, rows]` each."""
        reach = (
            pattern.left if pattern.chunk is None else pattern.chunk - 1
        )  # of such layers transformers keeps no more
        if not min(len(everything), len(everything) if reach is None else reach + rows) <= keys <= len(everything):
            raise NotImplementedError(
                f"{who}: a layer's cache holds {keys} rows and should hold {len(everything)}; a cache that was cut is not supported."
            )
        held = everything[len(everything) - keys :]
        lowest = prompt.left[:, None].expand(-1, rows)
        if pattern.left is not None:
            lowest = torch.maximum(lowest, at - pattern.left)
        if pattern.chunk is not None:
            lowest = torch.maximum(
                lowest, prompt.left[:, None] + (at - prompt.left[:, None]) // pattern.chunk * pattern.chunk
            )
        lo = torch.searchsorted(held, lowest.contiguous())
        ends = at + 1 if prompt.is_last else torch.full_like(at, prompt.seqlen)
        hi = torch.searchsorted(held, ends).expand_as(lo)
        return lo.int(), hi.int()

    prompt.total = total
    return Decode(bounds)
