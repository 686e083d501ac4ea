"""Attention of a few rows, which every rank has, over keys that are spread over ranks: a step of generation."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn.kernels import Bounds, Options, Request, State, choose, state_dtype
from ringattn.transport import group_name, resolve_group

__all__ = ["decode_attention"]


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lo: Tensor,
    hi: Tensor,
    *,
    group: Any = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention of rows that all ranks have over the keys of all ranks, `[B, S, H, Dv]`, the same bits on every rank.

    Each rank computes the running softmax `(acc, m, l)` of its own keys; one all-gather of these brings them together (Dao et al.,
    FlashAttention, 2022, section 3.1), in fp32. There is no gradient.

    Args:
        q: `[B, S, H, D]`, the same on every rank. k, v: this rank's keys `[B, T, Hkv, D]` and values `[B, T, Hkv, Dv]`; T may be 0.
        lo, hi: int32 `[S]` or `[B, S]`: row s sees this rank's key t iff `lo[s] <= t < hi[s]`; neither decreases over the rows that see something.
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None for one rank. The others: as in `ring_attention`.

    Raises:
        NotImplementedError: no backend serves the call, or a gradient is wanted.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise NotImplementedError("decode_attention: a gradient is wanted; there is none. Use torch.no_grad().")
    b, s, h, d = q.shape
    request = Request(q.device, q.dtype, h, k.shape[2], d, v.shape[3], softcap is not None, sinks is not None, False)
    dtype = state_dtype(q.dtype)
    # acc, m and l in one tensor, which travels
    flat = torch.empty(b * s * h * (v.shape[3] + 2), dtype=dtype, device=q.device)
    acc, m, l = _parts(flat, (b, s, h, v.shape[3]))
    state = State(acc, m, l, torch.empty(acc.shape, dtype=q.dtype, device=q.device), torch.empty_like(m))
    seen = lo < hi
    lo, hi = torch.where(seen, lo, k.shape[1]).int(), torch.where(seen, hi, 0).int()
    nowhere = [torch.zeros(n, dtype=torch.int32, device=q.device) for n in (s, k.shape[1])]  # only dropout asks where
    options = Options(d**-0.5 if softmax_scale is None else softmax_scale, softcap)
    bounds = Bounds(lo.to(q.device), hi.to(q.device), *nowhere, is_full=False)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    kernels = choose(backend, request)
    kernels.forward(state, q, k, v, bounds, options, sinks=None, start=True, finish=False)

    everyone = [flat]
    if name := group_name(group):
        process_group = resolve_group(name)
        everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size(process_group))]
        dist.all_gather(everyone, flat, group=process_group)
    accs, ms, ls = map(torch.stack, zip(*(_parts(x, acc.shape) for x in everyone), strict=True))
    logit = None if sinks is None else sinks.to(dtype)[None, :, None]
    top = ms.amax(0) if logit is None else torch.maximum(ms.amax(0), logit)
    top = top.masked_fill(top == -torch.inf, 0)  # a row that sees nothing: exp(-inf - 0) = 0
    weights = torch.exp(ms - top)
    total = (weights * ls).sum(0) + (0 if logit is None else torch.exp(logit - top))
    out = (accs * weights.transpose(2, 3).unsqueeze(-1)).sum(0) / total.masked_fill(total == 0, 1).mT.unsqueeze(-1)
    return out.to(q.dtype)


def _parts(flat: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """acc `[B, S, H, Dv]`, m and l `[B, H, S]` in one flat tensor."""
    b, s, h, width = shape
    rows = b * s * h
    acc, m, l = flat.split([rows * width, rows, rows])
    return acc.view(b, s, h, width), m.view(b, h, s), l.view(b, h, s)
