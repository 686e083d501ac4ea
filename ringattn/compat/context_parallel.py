"""`context_parallel` of `torch.distributed.tensor.experimental`, on `ringattn.ring_attention`.

    from ringattn.compat.context_parallel import context_parallel    # was: from torch.distributed.tensor.experimental import ...

Inside the context calls of `torch.nn.functional.scaled_dot_product_attention` are ring attention over the mesh. A `TorchFunctionMode`
sees them, so nothing of torch is patched, and other threads and later calls are as they were.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from ringattn import ring_attention, shard, unshard
from ringattn.compat._arguments import mask_of, seed_of

__all__ = ["context_parallel", "context_parallel_unshard"]

LAYOUT = "zigzag"


class _Attention(TorchFunctionMode):
    """Makes scaled_dot_product_attention a ring."""

    def __init__(self, mesh: DeviceMesh, seqlen: int | None) -> None:
        super().__init__()
        self.mesh, self.seqlen = mesh, seqlen

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return self.attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None:
            raise NotImplementedError(
                "context_parallel: attn_mask is given, which no rank has whole; call ringattn.ring_attention with a mask such as "
                "Documents or Window instead."
            )
        if query.dim() != 4:
            raise ValueError(f"context_parallel: query has shape {tuple(query.shape)}; it must be [B, H, S, D].")
        if query.shape[1] != key.shape[1] and not enable_gqa:
            raise ValueError(
                f"context_parallel: query has {query.shape[1]} heads and key {key.shape[1]}; they must be equal without enable_gqa=True."
            )
        group = self.mesh.get_group()
        out = ring_attention(
            *(x.transpose(1, 2) for x in (query, key, value)),
            mask=mask_of(is_causal),
            layout=LAYOUT,
            group=group,
            seqlen=self.seqlen,
            softmax_scale=scale,
            dropout_p=dropout_p,
            seed=seed_of(dropout_p, group, query.device),
        )
        return out.transpose(1, 2)


@contextlib.contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: list[Tensor] | None = None,
    buffer_seq_dims: list[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
) -> Iterator[None]:
    """Inside, `buffers` are this rank's rows and attention is a ring.

    Args:
        mesh: one-dimensional. buffers: tensors that every rank holds whole, such as inputs, labels and RoPE tables; each is cut in
            place, along its dim in `buffer_seq_dims`, in the zigzag layout. All must have the same length, which may be any.
        no_restore_buffers: those that stay cut when the context ends; the others get their contents back.

    Attention calls have `[B, H, S, D]`, no `attn_mask`, and are causal or full. With `dropout_p` the first rank draws a seed. Run backward
    inside: afterwards torch refuses it where an operator, such as an embedding, has saved a buffer that was restored.

    Raises:
        ValueError: lists of different lengths, buffers of different lengths, or a mesh with several axes.
        NotImplementedError: an attention call with `attn_mask`.
    """
    buffers, dims, kept = buffers or [], buffer_seq_dims or [], no_restore_buffers or set()
    if mesh.ndim != 1:
        raise ValueError(f"context_parallel: mesh has axes {mesh.mesh_dim_names}; it must have one. Pass mesh['cp'].")
    if len(buffers) != len(dims):
        raise ValueError(
            f"context_parallel: {len(buffers)} buffers and {len(dims)} buffer_seq_dims; there must be a dim for each buffer."
        )
    if any(all(b is not buffer for buffer in buffers) for b in kept):
        raise ValueError(
            "context_parallel: no_restore_buffers has a tensor that is not in buffers; it must be a subset."
        )
    lengths = {buffer.shape[dim] for buffer, dim in zip(buffers, dims, strict=True)}
    if len(lengths) > 1:
        raise ValueError(f"context_parallel: buffers have lengths {sorted(lengths)}; all must be one sequence.")
    whole = [None if any(b is buffer for b in kept) else buffer.detach().clone() for buffer in buffers]
    with torch.no_grad():
        for buffer, dim in zip(buffers, dims, strict=True):
            _become(buffer, shard(buffer, LAYOUT, mesh, dim))
    try:
        with _Attention(mesh, lengths.pop() if lengths else None):
            yield
    finally:
        with torch.no_grad():
            for buffer, contents in zip(buffers, whole, strict=True):
                if contents is not None:
                    _become(buffer, contents)


def _become(buffer: Tensor, contents: Tensor) -> None:
    """Give a tensor other contents of another shape in place."""
    buffer.resize_(contents.shape)
    buffer.copy_(contents)


def context_parallel_unshard(
    mesh: DeviceMesh, buffers: list[Tensor], seq_dims: list[int], seqlen: int | None = None
) -> list[Tensor]:
    """The whole tensors out of each rank's rows, on every rank; `seqlen` is needed where shards differ in length."""
    return [unshard(b, LAYOUT, mesh, dim, seqlen) for b, dim in zip(buffers, seq_dims, strict=True)]
