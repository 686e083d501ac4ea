"""What transformers asks of a mask, read from the mask function that a model makes, instead of a tensor of N x N.

transformers builds masks as functions of (batch, head, query, key) out of a few parts. Their parts say exactly what each
layer sees, whatever the model's config calls it; a part that is not known here is refused by its name.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn.masks import Bounds, Causal, Documents, Full, Mask, Rows, Window

__all__ = ["Asked", "Pattern", "ask", "chunk_starts", "documents", "one_process", "padding"]


# What the mask function is told besides: sizes that the attention call has too, and how others make their tensors.
HINTS = frozenset({
    *("batch_size", "q_length", "kv_length", "local_size", "dtype", "device", "config", "use_vmap"),
    *("allow_is_causal_skip", "allow_is_bidirectional_skip", "allow_torch_fix"),
})  # fmt: skip


class Pattern(NamedTuple):
    """What a layer sees, apart from what the batch says: of the other tokens, `left` before a row and `right` after it
    (None: all), within chunks of `chunk` tokens (None: no chunks)."""

    left: int | None = None
    right: int | None = 0
    chunk: int | None = None

    @property
    def is_causal(self) -> bool:
        return self.right == 0

    def mask(self) -> Mask:
        """The pattern alone; chunks, which begin where documents do, are not in it."""
        if (self.left, self.right) == (None, 0):
            return Causal()
        return Full() if (self.left, self.right) == (None, None) else Window(self.left, self.right)

    def __str__(self) -> str:
        kind = "causal" if self.is_causal else "bidirectional"
        window = "" if self.left is None else f", window {self.left + self.is_causal}"
        return kind + window + ("" if self.chunk is None else f", chunks of {self.chunk}")


@dataclasses.dataclass(frozen=True, eq=False)
class Asked:
    """What transformers passes to every attention call in place of a mask.

    Attributes:
        pattern: what the layer sees of the sequence.
        refused: the part of the mask function that is not known here, or None.
        documents: int `[B, N]`, a number for each packed document, or None.
        positions: int `[B, N]`, positions in documents, or None; by them a chunk is found.
        padding: bool `[B, N]`, False where keys are padding, or None.
        q_offset, kv_offset: the first row and the first key at hand, with a cache.
    """

    pattern: Pattern
    refused: str | None
    documents: Tensor | None
    positions: Tensor | None
    padding: Tensor | None
    q_offset: Any
    kv_offset: Any

    ndim = 4  # as transformers has it of a mask that is made: it is passed on


@torch.compiler.disable
def ask(
    *,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | Asked | None = None,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    cache_position: Tensor | None = None,
    **kwargs: Any,
) -> Asked:
    """The mask function that transformers calls; nothing of N x N is made. Older versions give `cache_position` for `q_offset`.

    Raises:
        NotImplementedError: transformers passes a keyword that is not known here.
    """
    if isinstance(attention_mask, Asked):  # made before the model was called, for a cache of fixed size
        return attention_mask
    if unknown := sorted(kwargs.keys() - HINTS):
        raise NotImplementedError(
            f"ringattn.hf: transformers passes {unknown[0]} to the mask function, which is not known here; use a version of "
            "transformers that the documentation names."
        )
    if cache_position is not None:
        q_offset = cache_position[0]
    left, right, chunk, refused = None, None, None, None
    found: dict[str, Tensor] = {}
    for name, held in _parts(mask_function):
        match name:
            case "causal_mask_function":
                right = 0
            case "bidirectional_mask_function":
                pass
            case "sliding_window_overlay":
                left = held["sliding_window"] - 1
            case "sliding_window_bidirectional_overlay":
                left = right = held["sliding_window"]
            case "chunked_overlay":
                chunk = held["chunk_size"]
            case "packed_sequence_mask_function":
                found["documents"] = held["packed_sequence_mask"]
            case "remap_positions_for_packed_sequence":
                found["positions"] = held["position_ids"]
            case _:
                refused = name
    return Asked(
        Pattern(left, right, chunk),
        refused,
        found.get("documents"),
        found.get("positions"),
        attention_mask,
        q_offset,
        kv_offset,
    )


def _parts(function: Callable[..., Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name and what is bound in it of every part of a mask function; a union is one part, known to nobody."""
    name = str(getattr(function, "__qualname__", function)).split(".<locals>")[0]
    cells = getattr(function, "__closure__", None) or ()
    held = dict(zip(function.__code__.co_freevars, (c.cell_contents for c in cells), strict=True)) if cells else {}
    if name == "and_masks":
        for part in held["mask_functions"]:
            yield from _parts(part)
        return
    yield name, held
    if name == "remap_positions_for_packed_sequence":
        yield from _parts(held["mask_function"])


def document_starts(documents: Tensor) -> list[list[int]]:
    """For each batch row, where documents begin, 0 apart."""
    return [(row.diff().ne(0).nonzero().flatten() + 1).tolist() for row in documents.cpu()]


def one_process(pattern: Pattern, asked: Asked | None, rows: int, keys: int) -> tuple[Mask, int]:
    """The mask of a sequence of max(rows, keys) tokens in one process, and the place of the first row in it.

    Rows and keys differ with a cache and in cross-attention; places without a row see nothing, and nothing sees places
    without a key.

    Raises:
        NotImplementedError: the cache is not contiguous, or padding lies between tokens.
    """
    n = max(rows, keys)
    first = 0
    if asked is not None and rows <= keys:
        first = max(0, min(int(asked.q_offset) - int(asked.kv_offset), keys - rows))
    elif pattern.is_causal and rows == 1:  # as transformers takes one row without a mask: the last
        first = keys - 1
    mask = pattern.mask()
    starts: list[list[int]] = [[]]
    left = torch.zeros(1, dtype=torch.int64)
    if asked is not None and asked.documents is not None and asked.documents.shape[-1] == n:
        starts = document_starts(asked.documents)
    bounds = None
    if asked is not None and asked.padding is not None:
        at = int(asked.kv_offset)
        valid = asked.padding[:, at : at + keys].cpu()
        valid = torch.nn.functional.pad(valid, (0, n - valid.shape[1]))
        if not valid.all():
            bounds, left = padding(valid, "attention_mask")
    if pattern.chunk is not None:
        if asked is not None and int(asked.kv_offset):
            raise NotImplementedError("a chunked layer has a cache without its first tokens; it must hold them all")
        positions = asked.positions if asked is not None else None
        starts = chunk_starts(starts, positions, left, n, pattern.chunk)
    if any(starts):
        mask = mask & documents(starts, n, pattern.is_causal)
    if bounds is not None:
        mask = mask & bounds
    if (rows, keys) != (n, n):
        at = torch.arange(n)
        sees = (at >= first) & (at < first + rows)
        mask = mask & Bounds(torch.where(sees, 0, n), torch.where(sees, keys, 0))
    return mask, first


def documents(starts: list[list[int]], seqlen: int, is_causal: bool) -> Mask:
    """Documents that begin at `starts`, 0 apart, for each batch row (or for all, if there is one list)."""
    same = all(row == starts[0] for row in starts)
    each = [Documents((0, *row, seqlen), causal=is_causal) for row in (starts[:1] if same else starts)]
    return each[0] if same else Rows(*each)


def chunk_starts(
    starts: list[list[int]], positions: Tensor | None, left: Tensor, seqlen: int, chunk: int
) -> list[list[int]]:
    """`starts` and where chunks begin: every `chunk` tokens of a document, or, of one document, after its padding.

    As transformers has it: where `positions` `[B or 1, N]` are given, because documents are packed, at positions that
    are multiples of `chunk`; else every `chunk` tokens from `left` `[B or 1]`, the number of tokens of padding.
    """
    count = max(len(starts), len(left), 1 if positions is None else len(positions))
    found = []
    for b in range(count):
        mine = set(starts[b % len(starts)])
        if positions is not None:
            row = positions[b % len(positions)].cpu()
            mine |= set((row % chunk == 0).nonzero().flatten().tolist())
        else:
            begin = int(left[b % len(left)])
            edges = [*sorted(mine), seqlen]
            at = begin
            for edge in edges:  # `cu_seq_lens` may say where documents are while positions run on
                mine |= set(range(at, edge, chunk))
                at = edge
        found.append(sorted(mine - {0}))
    return found


def padding(valid: Tensor, name: str) -> tuple[Mask, Tensor]:
    """What keys `valid` `[B, N]` let every row see, and the number of tokens of padding on the left `[B]`."""
    first, count, at = valid.long().argmax(-1), valid.sum(-1), torch.arange(valid.shape[1])
    broken = ((at >= first[:, None]) & (at < (first + count)[:, None])).ne(valid.bool()).any(-1)
    if broken.any():
        raise NotImplementedError(
            f"{name} has zeros between ones in batch row {int(broken.long().argmax())}; only padding on the left and on "
            "the right is supported."
        )
    lo, hi = first[:, None].expand(valid.shape), (first + count)[:, None].expand(valid.shape)
    same = bool((valid == valid[:1]).all())
    return (Bounds(lo[0], hi[0]) if same else Bounds(lo, hi)), first
