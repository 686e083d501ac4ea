"""What the forward and the backward kernels share: tiles of memory, scores, and the walk over tiles."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels import Options
from ringattn.kernels.triton.tiles import Tile

__all__ = [
    "FUSED",
    "LOG2E",
    "batch_stride",
    "block_dims",
    "dot",
    "dscores",
    "head_start",
    "launch_options",
    "load_tile",
    "offset_dtype",
    "row_starts",
    "score_form",
    "scores",
    "store_tile",
    "walk",
]

LOG2E = tl.constexpr(1.4426950408889634)

# Fused multiply-adds, which halve the softmax. Triton 3.9 warns that 3.10 will only fuse where asked to.
FUSED = {"enable_fp_fusion": True}


def block_dims(head_dim: int, v_head_dim: int) -> dict[str, int]:
    """The head dims, and the widths of the tiles that hold them: powers of two, and no less than a dot takes."""
    return {
        "HEAD_DIM": head_dim,
        "V_HEAD_DIM": v_head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_DV": max(16, triton.next_power_of_2(v_head_dim)),
    }


def score_form(options: Options) -> tuple[str, float, float]:
    """How a score comes of a dot product x: `(SCORE, inner_scale, outer_scale)`, with `inner * outer = softmax_scale`.

    "scaled": `outer * x`; "softcap": `outer * tanh(inner * x)`; "signed": `inner * x`, for a scale that is not positive.
    `outer` is always positive, so the largest score is `outer` times the largest number that `scores` returns.
    """
    if options.softcap:
        return "softcap", options.softmax_scale / options.softcap, options.softcap
    if options.softmax_scale > 0:
        return "scaled", 1.0, options.softmax_scale
    return "signed", options.softmax_scale, 1.0


def batch_stride(bound: Tensor) -> int:
    """The batch stride of `[S]` or `[B, S]` bounds: 0 where batch rows share them."""
    return bound.stride(0) if bound.ndim == 2 else 0


def offset_dtype(*tensors: Tensor) -> tl.dtype:
    """In which integers a loop multiplies the rows of these views by their strides: int64 only for views that need it.

    That costs 8 instructions a pointer, int32 costs 3: of the 550 of a forward tile of 128 x 128 at head dim 128, 80 more.
    """
    reach = max(t.shape[1] * t.stride(1) for t in tensors)
    return tl.int32 if reach < 2**31 else tl.int64


def launch_options(tile: Tile) -> dict[str, Any]:
    """What the compiler is told besides constexprs."""
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages, **FUSED}


@triton.jit
def head_start(batch, head, stride_b, stride_h):
    """Where the first row of a head is, in elements: int64."""
    return batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h


@triton.jit
def row_starts(batch, row, head, stride_b, stride_m, stride_h):
    """Where rows are, in elements: int64, in the shape to which row and head broadcast."""
    return head_start(batch, head, stride_b, stride_h) + row.to(tl.int64) * stride_m


@triton.jit
def load_tile(Rows, starts, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """The rows at `starts` as a tile `[rows, BLOCK_DIM]`, 0 past DIM."""
    d = tl.arange(0, BLOCK_DIM)
    pointers = (Rows + d)[None, :] + starts[:, None]
    if DIM < BLOCK_DIM:
        return tl.load(pointers, mask=(d < DIM)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_tile(Rows, starts, is_row, tile, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """The inverse of `load_tile`, in the dtype of the memory, for the rows where `is_row`."""
    d = tl.arange(0, BLOCK_DIM)
    mask = is_row[:, None] & (d < DIM)[None, :]
    tl.store((Rows + d)[None, :] + starts[:, None], tile.to(Rows.dtype.element_ty), mask=mask)


@triton.jit
def dot(a, b, acc=None):
    """`a @ b (+ acc)` in fp32; "ieee" keeps TF32 out of fp32 inputs and means nothing to others."""
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def scores(a, b, inner_scale, SCORE: tl.constexpr):
    """Scores before `outer_scale`, of the rows of `a` with the columns of `b`; see `score_form`."""
    s = dot(a, b)
    if SCORE == "signed":
        s = s * inner_scale
    elif SCORE == "softcap":
        s = _tanh(s * inner_scale)
    return s


@triton.jit
def dscores(ds, s, SCORE: tl.constexpr):
    """The gradient of the dot products, before softmax_scale, from that of the scores; `s` is what `scores` returned."""
    if SCORE == "softcap":
        ds = ds * (1.0 - s * s)
    return ds


@triton.jit
def _tanh(x):
    # tanh has no fast form that all targets have; exp2 has.
    return 1.0 - 2.0 / (1.0 + tl.math.exp2(x * (2.0 * LOG2E)))


@triton.jit
def walk(first, full_first, full_last, last, BLOCK: tl.constexpr):
    """The edges `(a, b, c, d)` of a walk over `[first, last)` in tiles of BLOCK, anchored at the multiples of BLOCK.

    Kernels walk in three parts: `[a, b)`, then `[b, c)`, which lies in `[full_first, full_last)` and needs no mask, then `[c, d)`,
    which is empty unless it lies past `full_first`.
    """
    b = tl.minimum((full_first + BLOCK - 1) // BLOCK * BLOCK, last)
    c = tl.maximum(tl.minimum(full_last, last) // BLOCK * BLOCK, b)
    return first // BLOCK * BLOCK, b, c, last
