"""For tests of code that uses ring attention: a brute-force oracle, its comparison, and a ring in one process.

The oracle uses nothing that it judges: no interval arithmetic, no plan, no kernel, no generator of the package's own.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringattn.network import Network
from ringattn.roofline import Sizes
from ringattn.virtual import VirtualRing, simulate, virtual

__all__ = ["Network", "Sizes", "VirtualRing", "assert_matches", "naive_attention", "simulate", "virtual", "visible"]


def visible(mask: Any, seqlen: int) -> Tensor:
    """What each row of a sequence sees, pair by pair: bool `[N, N]` (query, key), `[B, N, N]` where batch rows differ.

    Args:
        mask: any mask of `ringattn.masks`; only its fields are read.
        seqlen: number of global tokens N.

    Raises:
        ValueError: the kind of mask is unknown.

    Example:
        >>> from ringattn.masks import Window
        >>> visible(Window(1), 3).int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    q, k = torch.arange(seqlen)[:, None], torch.arange(seqlen)[None, :]
    causal, everything = k <= q, (k >= 0) & (q >= 0)
    match type(mask).__name__:
        case "Full":
            return everything
        case "Causal":
            return causal
        case "Window":
            seen = everything
            if mask.left is not None:
                seen = seen & (q - k <= mask.left)
            if mask.right is not None:
                seen = seen & (k - q <= mask.right)
            return seen
        case "Documents":
            starts = torch.tensor(mask.cu_seqlens)
            document = (torch.arange(seqlen)[:, None] >= starts).sum(1)
            same = document[:, None] == document[None, :]
            return same & causal if mask.causal else same
        case "Chunked":
            chunk = [(n - mask.offset) // mask.size for n in range(seqlen)]
            return (
                torch.tensor([[a == b for b in chunk] for a in chunk], dtype=torch.bool).view(seqlen, seqlen) & causal
            )
        case "PrefixLM":
            return causal | (k < mask.prefix)
        case "Spans":
            seen = causal
            for start, end in mask.starts_ends:
                seen = seen | ((q >= start) & (q < end) & (k >= start) & (k < end))
            return seen
        case "Bounds":
            lo, hi = torch.as_tensor(mask.lo).cpu(), torch.as_tensor(mask.hi).cpu()
            return (k >= lo[..., None]) & (k < hi[..., None])
        case "Rows":
            return torch.stack([visible(row, seqlen) for row in mask.masks])
        case "And":
            return visible(mask.left, seqlen) & visible(mask.right, seqlen)
        case "Or":
            return visible(mask.left, seqlen) | visible(mask.right, seqlen)
    raise ValueError(f"visible: mask is {mask!r}, of an unknown kind; pass one of the masks of ringattn.masks.")


def _philox_word(counter: tuple[Any, Any, Any, Any], seed: int) -> np.ndarray:
    """Word 0 of Philox4x32-10 (Salmon et al., SC 2011), elementwise over counters that broadcast."""
    u64, mask, shift = np.uint64, np.uint64(0xFFFFFFFF), np.uint64(32)
    c = [np.asarray(x, dtype=u64) for x in np.broadcast_arrays(*counter)]
    key = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    for _ in range(10):
        a, b = c[0] * u64(0xD2511F53), c[2] * u64(0xCD9E8D57)
        c = [(b >> shift) ^ c[1] ^ u64(key[0]), b & mask, (a >> shift) ^ c[3] ^ u64(key[1]), a & mask]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return c[0]


def naive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    *,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    head_offset: int = 0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Dense softmax attention over the whole sequence, in the dtype of the inputs, differentiable by autograd.

    With fp64 inputs it is the oracle; with inputs of a low dtype it is the honest twin whose error sets the tolerance.

    Args:
        q: `[B, N, H, D]`.
        k: `[B, M, Hkv, D]`, H a multiple of Hkv; M is N where `mask` is a mask object.
        v: `[B, M, Hkv, Dv]`.
        mask: a mask of `ringattn.masks`, or bool `[N, M]` or `[B, N, M]`, True where a row sees a key.
        softmax_scale: default `D ** -0.5`.
        softcap: scores become `softcap * tanh(scores / softcap)`; default None, no cap.
        sinks: `[H]`, a logit per head that joins the softmax and has no value; default None.
        dropout_p: share of the attention weights that is dropped, default 0.
        seed: 64 bits, needed for dropout.
        head_offset: global index of head 0, default 0.
        return_lse: also return lse, default False.

    Returns:
        out `[B, N, H, Dv]`, 0 in rows that see no key; with `return_lse` also lse `[B, H, N]`, natural log, sinks
        included, -inf in rows that see no key (the sink, where there are sinks).

    Raises:
        ValueError: dropout without a seed.

    Example:
        >>> from ringattn.masks import Causal
        >>> x = torch.ones(1, 3, 2, 4, dtype=torch.float64)
        >>> naive_attention(x, x, x, Causal()).unique().tolist()
        [1.0]
    """
    batch, n, heads, width = q.shape
    group = heads // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    seen = mask if isinstance(mask, Tensor) else visible(mask, n)
    seen = seen.to(q.device)
    seen = seen[:, None] if seen.ndim == 3 else seen
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (width**-0.5 if softmax_scale is None else softmax_scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    # A column of -inf keeps the max defined where there are no keys; it weighs nothing.
    extra = scores.new_full((batch, heads, n, 1), -torch.inf)
    if sinks is not None:
        extra = sinks.to(scores.dtype)[None, :, None, None].expand(batch, heads, n, 1)
    scores = torch.cat([scores, extra], -1)
    top = scores.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    is_empty = total == 0
    total = total.masked_fill(is_empty, 1.0)
    shares = (weights / total)[..., :-1]
    if dropout_p:
        if seed is None:
            raise ValueError(
                f"naive_attention: dropout_p is {dropout_p} and seed is None; dropout needs a seed. Pass seed=0."
            )
        b, h, i, j = np.ogrid[:batch, head_offset : head_offset + heads, :n, : k.shape[1]]
        keep = _philox_word((j, i, h, b), seed) >= np.uint64(np.floor(dropout_p * 2**32))
        shares = shares * torch.from_numpy(keep).to(q.device, q.dtype) / (1.0 - dropout_p)
    out = torch.einsum("bhqk,bkhd->bqhd", shares, v)
    if not return_lse:
        return out
    lse = (top + torch.log(total)).masked_fill(is_empty, -torch.inf)
    return out, lse.squeeze(-1)


def _worst(error: Tensor) -> tuple[float, tuple[int, ...]]:
    flat = int(error.argmax())
    return float(error.flatten()[flat]), tuple(int(i) for i in np.unravel_index(flat, tuple(error.shape)))


def assert_matches(
    got: Tensor, want: Tensor, twin: Tensor | None = None, *, rtol: float | None = None, name: str = ""
) -> None:
    """Require that `got` is `want` up to an error that can be derived.

    With `twin` (the same quantity by an honest computation in the low dtype): the largest error is at most twice the
    twin's plus one rounding, and so is the RMS error (the rule of FlashAttention-4's tests: the rounding is
    `2 * max |want + 0.3 - 0.3 - want|` in `got`'s dtype). With `rtol`: `max |got - want| <= rtol * max(1, max |want|)`.
    With neither the two must be equal. NaN and infinities must stand in the same places.

    Args:
        got: what is judged, any shape.
        want: the truth, same shape, of `got`'s dtype or a wider one.
        twin: same shape, any dtype; excludes `rtol`.
        rtol: relative to the largest magnitude, with 1 as the least.
        name: what the error message calls `got`.

    Raises:
        AssertionError: they do not match; the message has the error, the index and the bound.
        ValueError: both `twin` and `rtol` are given.

    Example:
        >>> want = torch.tensor([1.0, 2.0], dtype=torch.float64)
        >>> assert_matches(want.float(), want, rtol=1e-6)
        >>> assert_matches(want + 1e-3, want, rtol=1e-6, name="out")
        Traceback (most recent call last):
        AssertionError: out: max error 1.000e-03 at (0,), the bound is 2.000e-06...
    """
    if twin is not None and rtol is not None:
        raise ValueError(f"assert_matches: twin and rtol={rtol} are both given; only one sets the bound. Drop one.")
    name = name or "got"
    got, want = got.detach().cpu(), want.detach().cpu()
    if got.shape != want.shape:
        raise AssertionError(f"{name}: shape is {tuple(got.shape)}, {tuple(want.shape)} is wanted.")
    is_float = got.dtype.is_floating_point and want.dtype.is_floating_point
    if got.dtype != want.dtype and not (is_float and got.dtype.itemsize < want.dtype.itemsize):
        raise AssertionError(f"{name}: dtype is {got.dtype}, {want.dtype} or a lower precision of it is wanted.")
    if twin is not None and twin.shape != want.shape:
        raise AssertionError(f"{name}: the twin's shape is {tuple(twin.shape)}, {tuple(want.shape)} is wanted.")
    if got.numel() == 0:
        return
    wide_got, wide = got.double(), want.double()
    for word, differs in (
        ("NaN", wide_got.isnan() != wide.isnan()),
        ("+inf", wide_got.isposinf() != wide.isposinf()),
        ("-inf", wide_got.isneginf() != wide.isneginf()),
    ):
        if differs.any():
            at = tuple(differs.nonzero()[0].tolist())
            raise AssertionError(
                f"{name}: {word} differs in {int(differs.sum())} of {got.numel()} places, first at {at}: "
                f"{wide_got[at].item()} where {wide[at].item()} is wanted."
            )
    is_finite = wide.isfinite()
    truth = wide.masked_fill(~is_finite, 0.0)
    error = (wide_got.masked_fill(~is_finite, 0.0) - truth).abs()
    largest, at = _worst(error)
    rms = float(error.square().mean().sqrt())
    if twin is None:
        bound, rms_bound = (rtol or 0.0) * max(1.0, float(truth.abs().max())), torch.inf
    else:
        low = truth.to(got.dtype)
        floor = 2 * float((low + 0.3 - 0.3 - low).double().abs().max())
        twin_error = (twin.detach().cpu().double().masked_fill(~is_finite, 0.0) - truth).abs()
        bound, rms_bound = 2 * float(twin_error.max()) + floor, 2 * float(twin_error.square().mean().sqrt()) + floor
        if not np.isfinite(bound):
            raise AssertionError(f"{name}: the twin is not finite where {name} should be; it sets no bound.")
    if largest > bound or rms > rms_bound:
        raise AssertionError(
            f"{name}: max error {largest:.3e} at {at}, the bound is {bound:.3e}; "
            f"RMS error {rms:.3e}, the bound is {rms_bound:.3e}; "
            f"there it is {wide_got[at].item()} where {wide[at].item()} is wanted."
        )
