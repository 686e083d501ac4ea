"""The backward kernels: delta of each row, gradients of keys and values, and gradients of queries. No atomics.

Formulas: Dao, "FlashAttention-2", 2023, algorithm 2. Each kernel adds what it owns in one place and one order, so two runs
give the same bits.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels import Bounds, Grads, Options
from ringattn.kernels.triton.common import (
    FUSED,
    LOG2E,
    batch_stride,
    block_dims,
    dot,
    dscores,
    head_start,
    launch_options,
    load_tile,
    offset_dtype,
    row_starts,
    score_form,
    scores,
    store_tile,
    walk,
)
from ringattn.kernels.triton.dropout import DROPOUT_WORDS, dropout_arguments, keep_mask
from ringattn.kernels.triton.tiles import Tile

__all__ = ["backward", "constexprs", "delta", "row_ranges"]

SIZES = ("seqlen", "keys", "group")  # kernels are not compiled anew for their values


@triton.jit(do_not_specialize=["seqlen"])
def _delta(
    DO,
    Out,
    DLse,
    Delta,
    stride_dob,
    stride_dom,
    stride_doh,
    stride_ob,
    stride_om,
    stride_oh,
    stride_eb,
    stride_eh,
    stride_em,
    stride_db,
    stride_dh,
    seqlen,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """One program: `rowsum(DO * Out) - DLse` of BLOCK_M rows. Grid: (row tiles, H, B)."""
    head, batch = tl.program_id(1), tl.program_id(2)
    index = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.minimum(index, seqlen - 1)
    do_rows = row_starts(batch, row, head, stride_dob, stride_dom, stride_doh)
    out_rows = row_starts(batch, row, head, stride_ob, stride_om, stride_oh)
    do = load_tile(DO, do_rows, V_HEAD_DIM, BLOCK_DV).to(tl.float32)
    out = load_tile(Out, out_rows, V_HEAD_DIM, BLOCK_DV).to(tl.float32)
    dlse = tl.load(DLse + row_starts(batch, row, head, stride_eb, stride_em, stride_eh))
    delta = tl.sum(do * out, 1) - dlse.to(tl.float32)
    tl.store(Delta + row_starts(batch, row, head, stride_db, 1, stride_dh), delta, mask=index < seqlen)


@triton.jit(do_not_specialize=["seqlen", "keys"])
def _row_ranges(Lo, Hi, Ranges, stride_lob, stride_hib, seqlen, keys, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """One program: the rows that see one key tile, as four int32 in `Ranges`. Grid: (key tiles, batch rows of the bounds).

    `[first, last)` has every row that sees a key of the tile; all rows of `[full_first, full_last)` see all of them.
    """
    begin = tl.program_id(0) * BLOCK_N
    end = tl.minimum(begin + BLOCK_N, keys)
    batch = tl.program_id(1)
    Lo += batch.to(tl.int64) * stride_lob
    Hi += batch.to(tl.int64) * stride_hib
    first, last, full_first, full_last = seqlen, 0, seqlen, seqlen
    for start in tl.range(0, seqlen, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        lo = tl.load(Lo + row, mask=row < seqlen, other=keys)
        hi = tl.load(Hi + row, mask=row < seqlen, other=0)
        sees_some = (lo < end) & (hi > begin)
        sees_all = (lo <= begin) & (hi >= end)
        first = tl.minimum(first, tl.min(tl.where(sees_some, row, seqlen)))
        last = tl.maximum(last, tl.max(tl.where(sees_some, row + 1, 0)))
        full_first = tl.minimum(full_first, tl.min(tl.where(sees_all, row, seqlen)))
        full_last = tl.minimum(full_last, tl.min(tl.where((row > full_first) & ~sees_all, row, seqlen)))
    Ranges += (batch.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * 4
    tl.store(Ranges, first)
    tl.store(Ranges + 1, full_first)
    tl.store(Ranges + 2, full_last)
    tl.store(Ranges + 3, last)


@triton.jit(do_not_specialize=[*SIZES, *DROPOUT_WORDS])
def _dkv(
    Q,
    K,
    V,
    DO,
    Lse,
    Delta,
    DK,
    DV,
    Lo,
    Hi,
    Ranges,
    QPos,
    KPos,
    stride_qb,
    stride_qm,
    stride_qh,
    stride_kb,
    stride_kn,
    stride_kh,
    stride_vb,
    stride_vn,
    stride_vh,
    stride_dob,
    stride_dom,
    stride_doh,
    stride_eb,
    stride_eh,
    stride_em,
    stride_db,
    stride_dh,
    stride_dm,
    stride_dkb,
    stride_dkn,
    stride_dkh,
    stride_dvb,
    stride_dvn,
    stride_dvh,
    stride_lob,
    stride_hib,
    stride_rb,
    seqlen,
    keys,
    group,
    inner_scale,
    outer_scale,
    seed_low,
    seed_high,
    threshold,
    head_offset,
    keep_scale,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    OFFSET: tl.constexpr,
    SCORE: tl.constexpr,
    IS_FULL: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):
    """One program: adds to dK, dV of BLOCK_N keys what all rows of all query heads of their key head give.

    Grid: (key tiles, Hkv, B). Tiles are transposed, keys by rows, so that P and dS enter the products from registers.
    `Lse` is in base 2, and +inf for rows without keys: their weights come out as 0. So do those of rows past the end.
    """
    key_head, batch = tl.program_id(1), tl.program_id(2)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_key = n < keys
    key = tl.minimum(n, keys - 1)
    k = load_tile(K, row_starts(batch, key, key_head, stride_kb, stride_kn, stride_kh), HEAD_DIM, BLOCK_D)
    v = load_tile(V, row_starts(batch, key, key_head, stride_vb, stride_vn, stride_vh), V_HEAD_DIM, BLOCK_DV)
    if IS_FULL:
        edges = walk(0, 0, seqlen, seqlen, BLOCK_M)
    else:
        Ranges += batch.to(tl.int64) * stride_rb + tl.program_id(0) * 4
        edges = walk(tl.load(Ranges), tl.load(Ranges + 1), tl.load(Ranges + 2), tl.load(Ranges + 3), BLOCK_M)
        Lo += batch.to(tl.int64) * stride_lob
        Hi += batch.to(tl.int64) * stride_hib
    if HAS_DROPOUT:
        k_pos = tl.load(KPos + key)

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for member in tl.range(0, group):
        head = key_head * group + member
        q_head = Q + head_start(batch, head, stride_qb, stride_qh)
        do_head = DO + head_start(batch, head, stride_dob, stride_doh)
        lse_head = Lse + head_start(batch, head, stride_eb, stride_eh)
        delta_head = Delta + head_start(batch, head, stride_db, stride_dh)
        for PART in tl.static_range(3):
            for start in tl.range(edges[PART], edges[PART + 1], BLOCK_M, num_stages=NUM_STAGES):
                m = start + tl.arange(0, BLOCK_M)
                # Rows past the end are copies of the last one, without weight.
                row = (m if PART == 1 else tl.minimum(m, seqlen - 1)).to(OFFSET)
                q = load_tile(q_head, row * stride_qm, HEAD_DIM, BLOCK_D)
                lse = tl.load(lse_head + row * stride_em)
                if PART != 1:
                    lse = tl.where(m < seqlen, lse, float("inf"))
                s = scores(k, tl.trans(q), inner_scale, SCORE)
                p = tl.math.exp2(s * (outer_scale * LOG2E) - lse[None, :])
                if PART == 0 and not IS_FULL:
                    hi = tl.load(Hi + row)
                    p = tl.where(n[:, None] < hi[None, :], p, 0.0)
                if PART != 1 and not IS_FULL:
                    # Past the first row that sees the whole tile hi is no limit, and lo = T hides rows that see nothing.
                    lo = tl.load(Lo + row)
                    p = tl.where(n[:, None] >= lo[None, :], p, 0.0)
                do = load_tile(do_head, row * stride_dom, V_HEAD_DIM, BLOCK_DV)
                dp = dot(v, tl.trans(do))
                kept = p
                if HAS_DROPOUT:
                    q_pos = tl.load(QPos + row)
                    keep = keep_mask(
                        k_pos[:, None], q_pos[None, :], head_offset + head, batch, seed_low, seed_high, threshold
                    )
                    kept = tl.where(keep, p, 0.0)
                    dp = tl.where(keep, dp * keep_scale, 0.0)
                dv = dot(kept.to(do.dtype), do, dv)
                delta = tl.load(delta_head + row * stride_dm)
                ds = dscores(p * (dp - delta[None, :]), s, SCORE)
                dk = dot(ds.to(q.dtype), q, dk)

    dk = dk * (inner_scale * outer_scale)
    if HAS_DROPOUT:
        dv = dv * keep_scale
    dk_rows = row_starts(batch, key, key_head, stride_dkb, stride_dkn, stride_dkh)
    dv_rows = row_starts(batch, key, key_head, stride_dvb, stride_dvn, stride_dvh)
    store_tile(DK, dk_rows, is_key, load_tile(DK, dk_rows, HEAD_DIM, BLOCK_D) + dk, HEAD_DIM, BLOCK_D)
    store_tile(DV, dv_rows, is_key, load_tile(DV, dv_rows, V_HEAD_DIM, BLOCK_DV) + dv, V_HEAD_DIM, BLOCK_DV)


@triton.jit(do_not_specialize=[*SIZES, *DROPOUT_WORDS])
def _dq(
    Q,
    K,
    V,
    DO,
    Lse,
    Delta,
    DQ,
    Lo,
    Hi,
    QPos,
    KPos,
    stride_qb,
    stride_qm,
    stride_qh,
    stride_kb,
    stride_kn,
    stride_kh,
    stride_vb,
    stride_vn,
    stride_vh,
    stride_dob,
    stride_dom,
    stride_doh,
    stride_eb,
    stride_eh,
    stride_em,
    stride_db,
    stride_dh,
    stride_dm,
    stride_dqb,
    stride_dqm,
    stride_dqh,
    stride_lob,
    stride_hib,
    seqlen,
    keys,
    group,
    inner_scale,
    outer_scale,
    seed_low,
    seed_high,
    threshold,
    head_offset,
    keep_scale,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    OFFSET: tl.constexpr,
    SCORE: tl.constexpr,
    IS_FULL: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):
    """One program: adds to dQ of BLOCK_M rows what all keys give. Grid: (row tiles, H, B); see the forward kernel."""
    head, batch = tl.program_id(1), tl.program_id(2)
    index = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = index < seqlen
    row = tl.minimum(index, seqlen - 1)
    q = load_tile(Q, row_starts(batch, row, head, stride_qb, stride_qm, stride_qh), HEAD_DIM, BLOCK_D)
    do = load_tile(DO, row_starts(batch, row, head, stride_dob, stride_dom, stride_doh), V_HEAD_DIM, BLOCK_DV)
    lse = tl.load(Lse + row_starts(batch, row, head, stride_eb, stride_em, stride_eh))
    delta = tl.load(Delta + row_starts(batch, row, head, stride_db, stride_dm, stride_dh))
    if IS_FULL:
        edges = walk(0, 0, keys, keys, BLOCK_N)
        lo = tl.zeros([BLOCK_M], tl.int32)
        hi = tl.full([BLOCK_M], keys, tl.int32)
    else:
        lo = tl.load(Lo + batch.to(tl.int64) * stride_lob + row)
        hi = tl.load(Hi + batch.to(tl.int64) * stride_hib + row)
        edges = walk(tl.min(lo), tl.max(lo), tl.min(hi), tl.max(hi), BLOCK_N)
    if HAS_DROPOUT:
        q_pos = tl.load(QPos + row)

    K += head_start(batch, head // group, stride_kb, stride_kh)
    V += head_start(batch, head // group, stride_vb, stride_vh)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for PART in tl.static_range(3):
        for start in tl.range(edges[PART], edges[PART + 1], BLOCK_N, num_stages=NUM_STAGES):
            n = start + tl.arange(0, BLOCK_N)
            key = (n if PART == 1 else tl.minimum(n, keys - 1)).to(OFFSET)
            k = load_tile(K, key * stride_kn, HEAD_DIM, BLOCK_D)
            s = scores(q, tl.trans(k), inner_scale, SCORE)
            p = tl.math.exp2(s * (outer_scale * LOG2E) - lse[:, None])
            if PART == 0:
                p = tl.where(n[None, :] >= lo[:, None], p, 0.0)
            if PART != 1:
                p = tl.where(n[None, :] < hi[:, None], p, 0.0)
            v = load_tile(V, key * stride_vn, V_HEAD_DIM, BLOCK_DV)
            dp = dot(do, tl.trans(v))
            if HAS_DROPOUT:
                k_pos = tl.load(KPos + key)
                keep = keep_mask(
                    k_pos[None, :], q_pos[:, None], head_offset + head, batch, seed_low, seed_high, threshold
                )
                dp = tl.where(keep, dp * keep_scale, 0.0)
            ds = dscores(p * (dp - delta[:, None]), s, SCORE)
            dq = dot(ds.to(k.dtype), k, dq)

    dq_rows = row_starts(batch, row, head, stride_dqb, stride_dqm, stride_dqh)
    dq = load_tile(DQ, dq_rows, HEAD_DIM, BLOCK_D) + dq * (inner_scale * outer_scale)
    store_tile(DQ, dq_rows, is_row, dq, HEAD_DIM, BLOCK_D)


def constexprs(
    tile: Tile,
    head_dim: int,
    v_head_dim: int,
    *,
    offset: tl.dtype = tl.int32,
    score: str = "scaled",
    is_full: bool = False,
    has_dropout: bool = False,
) -> dict[str, Any]:
    """What the two gradient kernels are compiled for."""
    return {
        **block_dims(head_dim, v_head_dim),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "NUM_STAGES": tile.num_stages,
        "OFFSET": offset,
        "SCORE": score,
        "IS_FULL": is_full,
        "HAS_DROPOUT": has_dropout,
    }


def delta(dout: Tensor, out: Tensor, dlse: Tensor) -> Tensor:
    """`Backend.delta`."""
    batch, seqlen, heads, dim = out.shape
    result = torch.empty(batch, heads, seqlen, dtype=torch.float32, device=out.device)
    if result.numel():
        dims, block_m = block_dims(dim, dim), 64
        _delta[(triton.cdiv(seqlen, block_m), heads, batch)](
            dout,
            out,
            dlse,
            result,
            *dout.stride()[:3],
            *out.stride()[:3],
            *dlse.stride(),
            *result.stride()[:2],
            seqlen,
            V_HEAD_DIM=dim,
            BLOCK_DV=dims["BLOCK_DV"],
            BLOCK_M=block_m,
            **FUSED,
        )
    return result


def row_ranges(bounds: Bounds, keys: int, block_n: int) -> Tensor:
    """For each tile of `block_n` keys the rows that see it, int32 `[1 or B, key tiles, 4]`.

    The four are first, full_first, full_last, last: `[first, last)` has every row that sees a key of the tile, and all rows of
    `[full_first, full_last)` see all of them.
    """
    seqlen, batch = bounds.lo.shape[-1], bounds.lo.shape[0] if bounds.lo.ndim == 2 else 1
    ranges = torch.empty(batch, triton.cdiv(keys, block_n), 4, dtype=torch.int32, device=bounds.lo.device)
    _row_ranges[(ranges.shape[1], batch)](
        bounds.lo,
        bounds.hi,
        ranges,
        batch_stride(bounds.lo),
        batch_stride(bounds.hi),
        seqlen,
        keys,
        BLOCK_N=block_n,
        BLOCK_M=1024,
        **FUSED,
    )
    return ranges


def backward(
    dkv_tile: Tile,
    dq_tile: Tile,
    grads: Grads,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    bounds: Bounds,
    options: Options,
) -> None:
    """`Backend.backward` with tiles; B, S and T are at least 1."""
    batch, seqlen, heads, head_dim = q.shape
    keys, kv_heads, v_head_dim = v.shape[1:]
    # A row without keys has a weight of exp2(score - inf) = 0, and nothing of it may be NaN.
    is_empty = lse == -torch.inf
    lse = (lse * LOG2E.value).masked_fill_(is_empty, torch.inf)
    delta = delta.masked_fill(is_empty, 0.0)
    score, inner_scale, outer_scale = score_form(options)
    form = {
        "offset": offset_dtype(q, k, v, dout),
        "score": score,
        "is_full": bounds.is_full,
        "has_dropout": options.dropout_p > 0,
    }
    strides = [x for t in (q, k, v, dout) for x in t.stride()[:3]] + [*lse.stride(), *delta.stride()]
    bound_strides = batch_stride(bounds.lo), batch_stride(bounds.hi)
    numbers = seqlen, keys, heads // kv_heads, inner_scale, outer_scale

    if grads.dk is not None and grads.dv is not None:
        ranges = None if bounds.is_full else row_ranges(bounds, keys, dkv_tile.block_n)
        _dkv[(triton.cdiv(keys, dkv_tile.block_n), kv_heads, batch)](
            q,
            k,
            v,
            dout,
            lse,
            delta,
            grads.dk,
            grads.dv,
            bounds.lo,
            bounds.hi,
            ranges,
            bounds.q_pos,
            bounds.k_pos,
            *strides,
            *grads.dk.stride()[:3],
            *grads.dv.stride()[:3],
            *bound_strides,
            0 if ranges is None or ranges.shape[0] == 1 else ranges.stride(0),
            *numbers,
            **dropout_arguments(options),
            **constexprs(dkv_tile, head_dim, v_head_dim, **form),
            **launch_options(dkv_tile),
        )
    if grads.dq is not None:
        _dq[(triton.cdiv(seqlen, dq_tile.block_m), heads, batch)](
            q,
            k,
            v,
            dout,
            lse,
            delta,
            grads.dq,
            bounds.lo,
            bounds.hi,
            bounds.q_pos,
            bounds.k_pos,
            *strides,
            *grads.dq.stride()[:3],
            *bound_strides,
            *numbers,
            **dropout_arguments(options),
            **constexprs(dq_tile, head_dim, v_head_dim, **form),
            **launch_options(dq_tile),
        )
