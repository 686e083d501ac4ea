"""The cpu backend: the native kernels of `csrc/`, called through their C interface.

The library is loaded with ctypes and knows neither Python nor torch: one build serves every version of both, building needs
neither, and a call costs less than through a binding generator (7.3 us against nanobind's 9.8 us with DLPack, one query,
one Zen 5 core). It is compiled once per instruction set, its *levels*, and uses the fastest of those that the processor has.
"""

import ctypes
import dataclasses
import functools
import importlib.resources
import os
import warnings

import torch
from torch import Tensor

from ringattn import _env
from ringattn.kernels import Bounds, Grads, Options, Request, State
from ringattn.kernels.reference import Reference

__all__ = ["Cpu", "levels"]

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_BEST = -1
_ERRORS = {
    1: "out of memory for its scratch",
    2: "this processor, or the library, lacks the level",
    3: "an argument is out of range",
}


class _View(ctypes.Structure):
    """`ra_tensor`: an address, and strides in elements."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("stride_batch", ctypes.c_int64),
        ("stride_row", ctypes.c_int64),
        ("stride_head", ctypes.c_int64),
    )


class _Args(ctypes.Structure):
    """`ra_args`. It holds addresses, not tensors: whoever calls keeps those alive."""

    _fields_ = (
        ("dtype", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in ("batch", "rows", "keys", "heads", "kv_heads", "head_dim", "v_head_dim")),
        *((name, _View) for name in ("q", "k", "v", "dout", "out", "acc", "m", "l", "lse", "delta", "dq", "dk", "dv")),
        ("lo", ctypes.c_void_p),
        ("hi", ctypes.c_void_p),
        ("bounds_batch_stride", ctypes.c_int64),
        ("q_pos", ctypes.c_void_p),
        ("k_pos", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("is_full", "start", "finish", "threads")),
        ("softmax_scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("dropout_p", ctypes.c_double),
        ("seed", ctypes.c_uint64),
        ("head_offset", ctypes.c_int64),
    )


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The library, or the reason why there is none; looked for once."""
    # An editable install has the library in another directory than the modules; importlib knows both.
    path = _env.cpu_library() or str(importlib.resources.files("ringattn.kernels") / "libringattn_cpu.so")
    if not os.path.isfile(path):
        return _without(
            f"its library is missing ({path}); `pip install -v` with a C++ compiler builds it, or shows why not"
        )
    try:
        # torch is imported above, so that its OpenMP runtime is the one that the library finds.
        library = ctypes.CDLL(path)
    except OSError as error:
        return _without(f"its library does not load ({error})")
    for function in (library.ra_forward, library.ra_backward):
        function.argtypes = [ctypes.POINTER(_Args), ctypes.c_int]
    library.ra_level_name.restype = ctypes.c_char_p
    return library


def _without(reason: str) -> str:
    """The reason, said once: `backend="auto"` goes on, several times slower."""
    warnings.warn(f"ringattn: the cpu backend is not used: {reason}.", RuntimeWarning, stacklevel=2)
    return reason


def _levels() -> dict[str, int]:
    library = _library()
    if isinstance(library, str):
        return {}
    mask, best = library.ra_levels(), library.ra_best_level()
    bits = [1 << i for i in range(mask.bit_length()) if mask & 1 << i]
    return {library.ra_level_name(bit).decode(): bit for bit in sorted(bits, key=lambda bit: bit == best)}


def levels() -> tuple[str, ...]:
    """The instruction sets that both the library and this processor have, e.g. `("portable", "avx2")`; without the library none.

    The last is the fastest and the default. That need not be the newest: Intel's processors sum pairs of bf16 more slowly than
    they multiply in fp32, so that there AVX-512 comes after AVX512-BF16.
    """
    return tuple(_levels())


class Cpu:
    """Native block kernels for fp32, bf16 and fp16 on the CPU; see `ringattn.kernels.Backend` for what each method does.

    Results have the same bits at every number of threads, which is `torch.get_num_threads()`.

    Args:
        level: one of `levels()`; default None, the best of them. Tests name one, to run the code for lesser processors.

    Raises:
        ValueError: the level is not one of `levels()`.
    """

    name = "cpu"

    def __init__(self, level: str | None = None) -> None:
        if level is not None and level not in _levels():
            raise ValueError(f"Cpu: level is {level!r}; it must be one of {', '.join(levels())}. Or pass None.")
        self._level = _BEST if level is None else _levels()[level]

    def supports(self, request: Request) -> str | None:
        """None, or the reason why the request is not served."""
        if request.device.type != "cpu":
            return f"device is {request.device}; a CPU is required"
        if request.dtype not in _DTYPES:
            return f"dtype is {request.dtype}; torch.float32, bfloat16 or float16 is required ('reference' takes every floating dtype)"
        library = _library()
        return f"{library} ('reference' serves without it)" if isinstance(library, str) else None

    def anchor(self, device: torch.device) -> int:
        """A multiple of the rows of a tile at every level; a key's results depend on no other key."""
        return 32

    def forward(
        self,
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
        """Fold the keys into the rows of `state`, in place."""
        bounds = _contiguous(bounds)
        args = _arguments(q, k, v, bounds, options)
        args.out, args.acc = _rows("out", state.out), _rows("acc", state.acc)
        args.m, args.l, args.lse = _row_numbers(state.m), _row_numbers(state.l), _row_numbers(state.lse)
        args.start, args.finish = start, finish
        if sinks is not None:
            sinks = sinks.to(torch.float32).contiguous()
            args.sinks = sinks.data_ptr()
        self._call("ra_forward", args)

    def delta(self, dout: Tensor, out: Tensor, dlse: Tensor) -> Tensor:
        """`rowsum(dout * out) - dlse` as `[B, H, S]` in fp32."""
        return Reference().delta(dout, out, dlse)

    def backward(
        self,
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
        """Add this block's gradients into `grads`, in place."""
        bounds = _contiguous(bounds)
        args = _arguments(q, k, v, bounds, options)
        args.dout, args.lse, args.delta = _rows("dout", dout), _row_numbers(lse), _row_numbers(delta)
        for name, x in (("dq", grads.dq), ("dk", grads.dk), ("dv", grads.dv)):
            if x is not None:
                setattr(args, name, _rows(name, x))
        self._call("ra_backward", args)

    def _call(self, function: str, args: _Args) -> None:
        code = getattr(_library(), function)(args, self._level)
        if code:
            raise RuntimeError(f"cpu backend: {function} failed: {_ERRORS.get(code, f'error code {code}')}.")


def _contiguous(bounds: Bounds) -> Bounds:
    """The same bounds; the library knows one batch stride for `lo` and `hi`, and rows that lie side by side."""
    lo, hi = bounds.lo.contiguous(), bounds.hi.contiguous()
    return bounds if lo is bounds.lo and hi is bounds.hi else dataclasses.replace(bounds, lo=lo, hi=hi)


def _arguments(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, options: Options) -> _Args:
    """What forward and backward have in common."""
    batch, rows, heads, head_dim = q.shape
    _, keys, kv_heads, v_head_dim = v.shape
    return _Args(
        dtype=_DTYPES[q.dtype],
        batch=batch,
        rows=rows,
        keys=keys,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        q=_rows("q", q),
        k=_rows("k", k),
        v=_rows("v", v),
        lo=bounds.lo.data_ptr(),
        hi=bounds.hi.data_ptr(),
        bounds_batch_stride=rows if bounds.lo.ndim == 2 else 0,
        q_pos=bounds.q_pos.data_ptr(),
        k_pos=bounds.k_pos.data_ptr(),
        is_full=bounds.is_full,
        threads=torch.get_num_threads(),
        softmax_scale=options.softmax_scale,
        softcap=options.softcap or 0.0,
        dropout_p=options.dropout_p,
        seed=options.seed,
        head_offset=options.head_offset,
    )


def _rows(name: str, x: Tensor) -> _View:
    """The view of `[B, S, H, D]`."""
    batch, row, head, last = x.stride()
    if last != 1 and x.shape[3] > 1:
        raise ValueError(
            f"cpu backend: {name} has stride {last} in its last dim; it must be contiguous there. Pass {name}.contiguous()."
        )
    return _View(x.data_ptr(), batch, row, head)


def _row_numbers(x: Tensor) -> _View:
    """The view of `[B, H, S]`."""
    batch, head, row = x.stride()
    return _View(x.data_ptr(), batch, row, head)
