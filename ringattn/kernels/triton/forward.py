"""The forward kernel: folds one block of keys into the running softmax of its rows."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels import Bounds, Options, State
from ringattn.kernels.triton.common import (
    LOG2E,
    batch_stride,
    block_dims,
    dot,
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

__all__ = ["constexprs", "forward", "packing"]

# Stands in for a row maximum of -inf, so that no -inf is subtracted from another: scores of -inf still get a weight of 0,
# and nothing is spent on it in the loop. Scores below it overflow fp32 anyhow.
FLOOR = tl.constexpr(-1.0e38)


@triton.jit(do_not_specialize=["seqlen", "keys", "group", *DROPOUT_WORDS])
def _forward(
    Q,
    K,
    V,
    Acc,
    M,
    L,
    Out,
    Lse,
    Sinks,
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
    stride_ab,
    stride_am,
    stride_ah,
    stride_mb,
    stride_mh,
    stride_mm,
    stride_lb,
    stride_lh,
    stride_lm,
    stride_ob,
    stride_om,
    stride_oh,
    stride_eb,
    stride_eh,
    stride_em,
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
    WARP_SPECIALIZE: tl.constexpr,
    OFFSET: tl.constexpr,
    PACK: tl.constexpr,
    SCORE: tl.constexpr,
    IS_FULL: tl.constexpr,
    START: tl.constexpr,
    FINISH: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):
    """One program: BLOCK_M rows, which are BLOCK_M / PACK tokens of PACK heads that share a key head, over all keys.

    Grid: (row tiles, H / PACK, B). Rows past the end are copies of the last row, which change no bound and are not stored.
    With WARP_SPECIALIZE some warps load by descriptors and the others compute.
    """
    tl.static_assert(not WARP_SPECIALIZE or (PACK == 1 and not HAS_DROPOUT), "no descriptor describes such rows")
    # Causal rows see the more keys the later they are: the longest programs start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    first_head = tl.program_id(1) * PACK
    batch = tl.program_id(2)
    index = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = index < seqlen * PACK
    index = tl.minimum(index, seqlen * PACK - 1)
    row = index // PACK
    head = first_head + index % PACK

    K += head_start(batch, first_head // group, stride_kb, stride_kh)
    V += head_start(batch, first_head // group, stride_vb, stride_vh)
    if WARP_SPECIALIZE:
        Q += head_start(batch, first_head, stride_qb, stride_qh)
        q_rows = tl.make_tensor_descriptor(Q, [seqlen, HEAD_DIM], [stride_qm, 1], [BLOCK_M, BLOCK_D])
        k_rows = tl.make_tensor_descriptor(K, [keys, HEAD_DIM], [stride_kn, 1], [BLOCK_N, BLOCK_D])
        v_rows = tl.make_tensor_descriptor(V, [keys, V_HEAD_DIM], [stride_vn, 1], [BLOCK_N, BLOCK_DV])
        q = q_rows.load([tile * BLOCK_M, 0])
    else:
        q = load_tile(Q, row_starts(batch, row, head, stride_qb, stride_qm, stride_qh), HEAD_DIM, BLOCK_D)
    acc_rows = row_starts(batch, row, head, stride_ab, stride_am, stride_ah)
    m_rows = row_starts(batch, row, head, stride_mb, stride_mm, stride_mh)
    l_rows = row_starts(batch, row, head, stride_lb, stride_lm, stride_lh)
    if START:
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        m = tl.full([BLOCK_M], FLOOR, tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)
    else:
        acc = load_tile(Acc, acc_rows, V_HEAD_DIM, BLOCK_DV)
        m = tl.maximum(tl.load(M + m_rows), FLOOR)
        l = tl.load(L + l_rows)

    if IS_FULL:
        lo = tl.zeros([BLOCK_M], tl.int32)
        hi = tl.full([BLOCK_M], keys, tl.int32)
        edges = walk(0, 0, keys, keys, BLOCK_N)
    else:
        lo = tl.load(Lo + batch.to(tl.int64) * stride_lob + row)
        hi = tl.load(Hi + batch.to(tl.int64) * stride_hib + row)
        # A row that sees nothing (lo = T, hi = 0) leaves the ends alone and makes the middle empty.
        edges = walk(tl.min(lo), tl.max(lo), tl.min(hi), tl.max(hi), BLOCK_N)
    if HAS_DROPOUT:
        q_pos = tl.load(QPos + row)

    if WARP_SPECIALIZE:
        # Triton splits no loop with another beside it or a branch inside: this one walks all parts, with the mask of the first.
        # It also admits nothing that was loaded before the loop and stays as it is: bounds count from each tile.
        lo -= edges[0]
        hi -= edges[0]
    for PART in tl.static_range(1 if WARP_SPECIALIZE else 3):
        end = edges[3] if WARP_SPECIALIZE else edges[PART + 1]
        # In key order, so that a chain of calls cut at multiples of BLOCK_N computes what one call does, bit for bit.
        for start in tl.range(edges[PART], end, BLOCK_N, num_stages=NUM_STAGES, warp_specialize=WARP_SPECIALIZE):
            n = (0 if WARP_SPECIALIZE else start) + tl.arange(0, BLOCK_N)
            # Keys past the end are copies of the last one, which hi hides; those of descriptors are zeros.
            key = (n if PART == 1 else tl.minimum(n, keys - 1)).to(OFFSET)
            if WARP_SPECIALIZE:
                k = k_rows.load([start, 0])
            else:
                k = load_tile(K, key * stride_kn, HEAD_DIM, BLOCK_D)
            s = scores(q, tl.trans(k), inner_scale, SCORE)
            if PART == 0:
                s = tl.where(n[None, :] >= lo[:, None], s, -float("inf"))
            if PART != 1:
                s = tl.where(n[None, :] < hi[:, None], s, -float("inf"))
            if WARP_SPECIALIZE:
                lo -= BLOCK_N
                hi -= BLOCK_N
            new_m = tl.maximum(m, tl.max(s, 1) * outer_scale)
            p = tl.math.exp2(s * (outer_scale * LOG2E) - (new_m * LOG2E)[:, None])
            decay = tl.math.exp2((m - new_m) * LOG2E)
            m = new_m
            l = l * decay + tl.sum(p, 1)
            acc = acc * decay[:, None]
            if HAS_DROPOUT:
                k_pos = tl.load(KPos + key)
                keep = keep_mask(
                    k_pos[None, :], q_pos[:, None], (head_offset + head)[:, None], batch, seed_low, seed_high, threshold
                )
                p = tl.where(keep, p, 0.0)
            if WARP_SPECIALIZE:
                v = v_rows.load([start, 0])
            else:
                v = load_tile(V, key * stride_vn, V_HEAD_DIM, BLOCK_DV)
            acc = dot(p.to(v.dtype), v, acc)

    if FINISH:
        if HAS_SINKS:
            sink = tl.load(Sinks + head).to(tl.float32)
            new_m = tl.maximum(m, sink)
            decay = tl.math.exp2((m - new_m) * LOG2E)
            l = l * decay + tl.math.exp2((sink - new_m) * LOG2E)
            acc = acc * decay[:, None]
            m = new_m
        # Where nothing was seen l = 0, and acc = 0.
        is_empty = l == 0.0
        l = tl.where(is_empty, 1.0, l)
        scale = (keep_scale if HAS_DROPOUT else 1.0) / l
        out_rows = row_starts(batch, row, head, stride_ob, stride_om, stride_oh)
        store_tile(Out, out_rows, is_row, acc * scale[:, None], V_HEAD_DIM, BLOCK_DV)
        lse = tl.where(is_empty, -float("inf"), m + tl.log(l))
        tl.store(Lse + row_starts(batch, row, head, stride_eb, stride_em, stride_eh), lse, mask=is_row)
    else:
        store_tile(Acc, acc_rows, is_row, acc, V_HEAD_DIM, BLOCK_DV)
        tl.store(M + m_rows, tl.where(l == 0.0, -float("inf"), m), mask=is_row)
        tl.store(L + l_rows, l, mask=is_row)


def packing(seqlen: int, group: int, block_m: int) -> int:
    """How many of the `group` query heads of a key head share a tile of `block_m` rows: a power of two that divides `group`.

    Tokens fill the tile where there are enough of them; where there are not, heads do, and K and V are read once for all of these.

    Example:
        >>> packing(seqlen=128, group=8, block_m=128), packing(seqlen=20, group=8, block_m=128), packing(1, 6, 128)
        (1, 4, 2)
    """
    pack = 1
    while group % (2 * pack) == 0 and 2 * pack * seqlen <= block_m:
        pack *= 2
    return pack


def constexprs(
    tile: Tile,
    head_dim: int,
    v_head_dim: int,
    *,
    offset: tl.dtype = tl.int32,
    pack: int = 1,
    score: str = "scaled",
    is_full: bool = False,
    start: bool = True,
    finish: bool = True,
    has_sinks: bool = False,
    has_dropout: bool = False,
) -> dict[str, Any]:
    """What a forward kernel is compiled for."""
    return {
        **block_dims(head_dim, v_head_dim),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "NUM_STAGES": tile.num_stages,
        "WARP_SPECIALIZE": tile.warp_specialize,
        "OFFSET": offset,
        "PACK": pack,
        "SCORE": score,
        "IS_FULL": is_full,
        "START": start,
        "FINISH": finish,
        "HAS_SINKS": has_sinks,
        "HAS_DROPOUT": has_dropout,
    }


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Memory for the descriptors of a launch on the current stream of the current device, which no later one has before its end."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def forward(
    tile: Tile,
    state: State,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Bounds,
    options: Options,
    *,
    sinks: Tensor | None,
    start: bool,
    finish: bool,
) -> None:
    """`Backend.forward` with a tile; B and S are at least 1.

    With `finish` only `state.out` and `state.lse` are written: the running softmax has served its purpose.
    """
    batch, seqlen, heads, head_dim = q.shape
    group = heads // k.shape[2]
    pack = packing(seqlen, group, tile.block_m)
    score, inner_scale, outer_scale = score_form(options)
    if tile.warp_specialize:
        triton.set_allocator(_scratch)
    _forward[(triton.cdiv(seqlen * pack, tile.block_m), heads // pack, batch)](
        q,
        k,
        v,
        state.acc,
        state.m,
        state.l,
        state.out,
        state.lse,
        sinks,
        bounds.lo,
        bounds.hi,
        bounds.q_pos,
        bounds.k_pos,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *state.acc.stride()[:3],
        *state.m.stride(),
        *state.l.stride(),
        *state.out.stride()[:3],
        *state.lse.stride(),
        batch_stride(bounds.lo),
        batch_stride(bounds.hi),
        seqlen,
        k.shape[1],
        group,
        inner_scale,
        outer_scale,
        **dropout_arguments(options),
        **constexprs(
            tile,
            head_dim,
            v.shape[3],
            offset=offset_dtype(k, v),
            pack=pack,
            score=score,
            is_full=bounds.is_full,
            start=start,
            finish=finish,
            has_sinks=sinks is not None,
            has_dropout=options.dropout_p > 0,
        ),
        **launch_options(tile),
    )
