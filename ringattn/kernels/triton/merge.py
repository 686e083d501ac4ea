"""Merging finished partial results, and its gradient: one program reads each number once or twice and writes it once."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.triton.common import FUSED

__all__ = ["merge", "merge_backward"]

_ROWS = 16  # of a program; with 128 columns of fp32 a tile is 8 KB


@triton.jit
def _weights(Lses, at, is_row, PARTS: tl.constexpr):
    """`(top, total)`: a shift of the lses of some rows that is finite, and the sum of `exp(lse - top)` over the parts."""
    top = tl.full(at.shape, -float("inf"), tl.float32)
    for i in tl.static_range(PARTS):
        top = tl.maximum(top, tl.load(Lses[i] + at, mask=is_row, other=0.0).to(tl.float32))
    top = tl.where(top == -float("inf"), 0.0, top)
    total = tl.zeros(at.shape, tl.float32)
    for i in tl.static_range(PARTS):
        total += tl.exp(tl.load(Lses[i] + at, mask=is_row, other=0.0).to(tl.float32) - top)
    return top, total


@triton.jit
def _rows(seqlen, heads, rows, ROWS: tl.constexpr):
    """Of a program: its rows, which of them exist, and where each stands in `[B, S, H]` and in `[B, H, S]`, contiguous."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head, token = row % heads, row // heads
    return row < rows, row, ((token // seqlen) * heads + head) * seqlen + token % seqlen


@triton.jit(do_not_specialize=["seqlen", "heads", "rows"])
def _merge_kernel(
    Outs,
    Lses,
    Out,
    Lse,
    seqlen,
    heads,
    rows,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One program: ROWS of the B * S * H rows. Grid: (row tiles,)."""
    is_row, row, at = _rows(seqlen, heads, rows, ROWS)
    d = tl.arange(0, BLOCK_DV)
    cells, mask = row[:, None] * V_HEAD_DIM + d, is_row[:, None] & (d < V_HEAD_DIM)
    top, total = _weights(Lses, at, is_row, PARTS)
    some = tl.where(total == 0.0, 1.0, total)
    merged = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    for i in tl.static_range(PARTS):
        weight = tl.exp(tl.load(Lses[i] + at, mask=is_row, other=0.0).to(tl.float32) - top) / some
        merged += weight[:, None] * tl.load(Outs[i] + cells, mask=mask, other=0.0).to(tl.float32)
    tl.store(Out + cells, merged.to(Out.dtype.element_ty), mask=mask)
    tl.store(Lse + at, tl.where(total == 0.0, -float("inf"), top + tl.log(some)), mask=is_row)


@triton.jit(do_not_specialize=["seqlen", "heads", "rows"])
def _merge_backward_kernel(
    DOut,
    DLse,
    Outs,
    Lses,
    DOuts,
    DLses,
    seqlen,
    heads,
    rows,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """`dout_i = w_i dout` and `dlse_i = w_i (dout . (out_i - out) + dlse)`, `w_i` the weight of part i; the same grid."""
    is_row, row, at = _rows(seqlen, heads, rows, ROWS)
    d = tl.arange(0, BLOCK_DV)
    cells, mask = row[:, None] * V_HEAD_DIM + d, is_row[:, None] & (d < V_HEAD_DIM)
    top, total = _weights(Lses, at, is_row, PARTS)
    some = tl.where(total == 0.0, 1.0, total)
    dout = tl.load(DOut + cells, mask=mask, other=0.0).to(tl.float32)
    # What reaches lse where no part saw a key reaches nothing: its weights are 0, and 0 times an infinity is not.
    dlse = tl.where(total == 0.0, 0.0, tl.load(DLse + at, mask=is_row, other=0.0).to(tl.float32))
    mean = tl.zeros([ROWS], tl.float32)
    for i in tl.static_range(PARTS):
        weight = tl.exp(tl.load(Lses[i] + at, mask=is_row, other=0.0).to(tl.float32) - top) / some
        mean += weight * tl.sum(dout * tl.load(Outs[i] + cells, mask=mask, other=0.0).to(tl.float32), 1)
    for i in tl.static_range(PARTS):
        weight = tl.exp(tl.load(Lses[i] + at, mask=is_row, other=0.0).to(tl.float32) - top) / some
        part = tl.sum(dout * tl.load(Outs[i] + cells, mask=mask, other=0.0).to(tl.float32), 1)
        tl.store(DOuts[i] + cells, (weight[:, None] * dout).to(DOuts[i].dtype.element_ty), mask=mask)
        tl.store(DLses[i] + at, (weight * (part - mean + dlse)).to(DLses[i].dtype.element_ty), mask=is_row)


def _launch(kernel, parts: int, out: Tensor, *args) -> None:  # type: ignore[no-untyped-def]
    batch, seqlen, heads, v_head_dim = out.shape
    rows = batch * seqlen * heads
    if out.numel():
        widths = {"V_HEAD_DIM": v_head_dim, "BLOCK_DV": triton.next_power_of_2(v_head_dim), "ROWS": _ROWS}
        kernel[(triton.cdiv(rows, _ROWS),)](*args, seqlen, heads, rows, PARTS=parts, **widths, **FUSED)


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """out `[B, S, H, Dv]` and lse fp32 `[B, H, S]` of the union, from outs `[B, S, H, Dv]` and lses `[B, H, S]`."""
    outs, lses = (tuple(x.contiguous() for x in xs) for xs in (outs, lses))
    out = torch.empty_like(outs[0])
    lse = torch.empty(lses[0].shape, dtype=torch.float32, device=out.device)
    _launch(_merge_kernel, len(outs), out, outs, lses, out, lse)
    return out, lse


def merge_backward(
    dout: Tensor, dlse: Tensor, outs: Sequence[Tensor], lses: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of `outs` and `lses`, in their dtypes, contiguous."""
    outs, lses = (tuple(x.contiguous() for x in xs) for xs in (outs, lses))
    douts, dlses = (tuple(torch.empty_like(x) for x in xs) for xs in (outs, lses))
    _launch(_merge_backward_kernel, len(outs), outs[0], dout.contiguous(), dlse.contiguous(), outs, lses, douts, dlses)
    return list(douts), list(dlses)
