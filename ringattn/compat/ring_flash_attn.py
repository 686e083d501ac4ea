"""The functions of ring-flash-attention (`ring_flash_attn`, 0.1), with its names, arguments and shards, on `ringattn.ring_attention`.

    from ringattn.compat.ring_flash_attn import zigzag_ring_flash_attn_func    # was: from ring_flash_attn import ...

Shards: `ring_*` one piece each, in order; `zigzag_*` the r-th and the r-th last of 2W pieces; `stripe_*` every W-th token; `*_varlen_*`
the same of every packed document; `llama3_*` one piece each of the whole packed sequence. Tensors are `[B, S, H, D]`, those of `*_varlen_*`
`[S, H, D]`; `kvpacked` and `qkvpacked` have a dim of 2 or 3 before the heads. Any device and backend of ringattn serves.

Every argument is honoured or refused: `alibi_slopes` is refused; `deterministic` is always so; `return_attn_probs` returns
`(out, lse, None)`; with `dropout_p` the first rank draws a seed. `group` defaults to all processes. `max_seqlen` and
`heads_k_stride` are hints that nothing here needs.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import Documents, Mask, per_document, ring_attention
from ringattn.compat._arguments import mask_of, seed_of
from ringattn.layout import Balanced, Layout

__all__ = [
    "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_varlen_func",
    "llama3_flash_attn_varlen_kvpacked_func",
    "llama3_flash_attn_varlen_qkvpacked_func",
    "ring_flash_attn_func",
    "ring_flash_attn_kvpacked_func",
    "ring_flash_attn_qkvpacked_func",
    "ring_flash_attn_varlen_func",
    "ring_flash_attn_varlen_kvpacked_func",
    "ring_flash_attn_varlen_qkvpacked_func",
    "stripe_flash_attn_func",
    "stripe_flash_attn_kvpacked_func",
    "stripe_flash_attn_qkvpacked_func",
    "substitute_hf_flash_attn",
    "update_ring_flash_attn_params",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_kvpacked_func",
    "zigzag_ring_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_varlen_func",
    "zigzag_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func",
]

Functions = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]


def _group(group: Any) -> Any:
    return dist.group.WORLD if group is None and dist.is_initialized() else group


def _world_size(group: Any) -> int:
    return 1 if group is None else dist.get_world_size(group)


def _attend(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    layout: Layout,
    dropout_p: float,
    softmax_scale: float | None,
    alibi_slopes: Tensor | None,
    return_attn_probs: bool,
    group: Any,
) -> Any:
    """One call on shards `[B, S, H, D]`."""
    if alibi_slopes is not None:
        raise NotImplementedError(f"{name}: alibi_slopes is given; ringattn has no ALiBi bias. Pass None.")
    out, lse = ring_attention(
        q,
        k,
        v,
        mask=mask,
        layout=layout,
        group=group,
        softmax_scale=softmax_scale,
        dropout_p=dropout_p,
        seed=seed_of(dropout_p, group, q.device),
        return_lse=True,
    )
    return (out, lse, None) if return_attn_probs else out


def _forms(name: str, attend: Callable[..., Any], dim: int) -> Functions:
    """The three forms of a function of q, k and v: as it is, with k and v packed along `dim`, and with all packed."""

    def kvpacked(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
        return attend(q, *kv.unbind(dim), *args, **kwargs)

    def qkvpacked(qkv: Tensor, *args: Any, **kwargs: Any) -> Any:
        return attend(*qkv.unbind(dim), *args, **kwargs)

    forms = (attend, kvpacked, qkvpacked)
    for form, suffix in zip(forms, ("", "_kvpacked", "_qkvpacked"), strict=True):
        form.__name__ = form.__qualname__ = f"{name}{suffix}_func"
        form.__doc__ = f"`{form.__name__}` of ring-flash-attention; see `ringattn.compat.ring_flash_attn`."
    return forms


def _dense(name: str, layout: str) -> Functions:
    """The functions of one layout, for `[B, S, H, D]`."""

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: Any = None,
    ) -> Any:
        options = dropout_p, softmax_scale, alibi_slopes, return_attn_probs, _group(group)
        return _attend(f"{name}_func", q, k, v, mask_of(causal, window_size), layout, *options)

    return _forms(name, attend, 2)


ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func = _dense(
    "ring_flash_attn", "contiguous"
)
zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_kvpacked_func, zigzag_ring_flash_attn_qkvpacked_func = _dense(
    "zigzag_ring_flash_attn", "zigzag"
)
stripe_flash_attn_func, stripe_flash_attn_kvpacked_func, stripe_flash_attn_qkvpacked_func = _dense(
    "stripe_flash_attn", "striped"
)


# ---- packed documents, each spread over all ranks ---------------------------------------------------------------------------


def _pieces_in_order(local: tuple[int, ...], world_size: int) -> Layout:
    """Every document cut into one piece for each rank, of which `local` says where they begin in a shard."""
    lengths = [b - a for a, b in itertools.pairwise(local)]
    chunk = math.gcd(*lengths) or 1
    owners = [rank for length in lengths for rank in range(world_size) for _ in range(length // chunk)]
    return Balanced(local[-1] * world_size, world_size, chunk, tuple(owners))


def _zigzags(local: tuple[int, ...], world_size: int) -> Layout:
    """Every document cut into two pieces for each rank."""
    odd = [b - a for a, b in itertools.pairwise(local) if (b - a) % 2]
    if odd:
        raise ValueError(
            f"zigzag_ring_flash_attn_varlen: a document has {odd[0]} tokens on each rank; it must be an even number, since each rank has two "
            "equal pieces of it. Pad documents to a multiple of twice the world size, or use ringattn.ring_attention with per_document."
        )
    return per_document([n * world_size for n in local])


def _varlen(name: str, layout_of: Callable[[tuple[int, ...], int], Layout]) -> Functions:
    """The functions for `[S, H, D]` with `cu_seqlens` of one rank's shard, which are the same on all ranks."""

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: Any = None,
    ) -> Any:
        group = _group(group)
        local, world_size = tuple(torch.as_tensor(cu_seqlens).tolist()), _world_size(group)
        mask = Documents([n * world_size for n in local], causal=causal) & mask_of(causal, window_size)
        options = dropout_p, softmax_scale, alibi_slopes, return_attn_probs, group
        return _packed(f"{name}_func", q, k, v, mask, layout_of(local, world_size), *options)

    return _forms(name, attend, 1)


def _packed(name: str, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Any:
    """`_attend` on `[S, H, D]`."""
    result = _attend(name, *(x.unsqueeze(0) for x in (q, k, v)), *args)
    return (result[0][0], result[1][0], None) if isinstance(result, tuple) else result[0]


ring_flash_attn_varlen_func, ring_flash_attn_varlen_kvpacked_func, ring_flash_attn_varlen_qkvpacked_func = _varlen(
    "ring_flash_attn_varlen", _pieces_in_order
)
(
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
) = _varlen("zigzag_ring_flash_attn_varlen", _zigzags)


# ---- one packed sequence, cut without regard to documents ---------------------------------------------------------------------


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    """`(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice)` of a rank, from `cu_seqlens` of the whole packed sequence.

    Raises:
        ValueError: the world size does not divide the number of tokens.
    """
    whole = torch.as_tensor(cu_seqlens).tolist()
    if whole[-1] % world_size:
        raise ValueError(
            f"llama3_flash_attn_prepare_cu_seqlens: the sequence has {whole[-1]} tokens and the world size is {world_size}; it must divide them. "
            "Pad the sequence, or use ringattn.ring_attention, which takes shards of any length."
        )
    rows = whole[-1] // world_size
    begin, end = rank * rows, (rank + 1) * rows
    inside = [n for n in whole if begin < n < end]
    first = max(n for n in whole if n <= begin)
    last = end if causal else min(n for n in whole if n >= end)
    q = torch.tensor([0, *(n - begin for n in inside), rows], dtype=torch.int32, device=cu_seqlens.device)
    k = torch.tensor([0, *(n - first for n in inside), last - first], dtype=torch.int32, device=cu_seqlens.device)
    # a rank's part does not tell the others', which every rank has to know
    q.whole_sequence = tuple(whole)  # type: ignore[attr-defined]
    return q, k, int(q.diff().max()), int(k.diff().max()), slice(first, last)


def _llama3(name: str) -> Functions:
    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        heads_k_stride: int,
        local_k_slice: slice,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: Any = None,
    ) -> Any:
        whole = getattr(cu_seqlens_q, "whole_sequence", None)
        if whole is None:
            raise ValueError(
                f"{name}_func: cu_seqlens_q tells this rank's documents only; it must be the tensor that "
                "ringattn.compat.ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens returns, which knows the whole sequence, and no copy."
            )
        mask = Documents(whole, causal=causal) & mask_of(causal, window_size)
        options = dropout_p, softmax_scale, alibi_slopes, return_attn_probs, _group(group)
        return _packed(f"{name}_func", q, k, v, mask, "contiguous", *options)

    return _forms(name, attend, 1)


(
    llama3_flash_attn_varlen_func,
    llama3_flash_attn_varlen_kvpacked_func,
    llama3_flash_attn_varlen_qkvpacked_func,
) = _llama3("llama3_flash_attn_varlen")


# ---- Hugging Face models ------------------------------------------------------------------------------------------------------


def substitute_hf_flash_attn(*args: Any, **kwargs: Any) -> None:
    """Refused: it replaces functions of transformers in the running process.

    Raises:
        NotImplementedError: always, with what to do.
    """
    raise NotImplementedError(
        'substitute_hf_flash_attn: ringattn patches nothing; load the model with attn_implementation="ringattn" and call '
        "ringattn.hf.attach(model, group)."
    )


def update_ring_flash_attn_params(*args: Any, **kwargs: Any) -> None:
    """Refused: an attached model finds documents in each batch.

    Raises:
        NotImplementedError: always, with what to do.
    """
    raise NotImplementedError(
        "update_ring_flash_attn_params: an attached model finds documents by itself, from position_ids or cu_seq_lens_q; call "
        "ringattn.hf.attach(model, group) once and leave this out."
    )
