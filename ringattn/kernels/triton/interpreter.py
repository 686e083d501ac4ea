"""Repairs of Triton's interpreter, without which it computes the wrong numbers or none, and takes twice as long."""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

__all__ = ["repair"]


def _as_float32(handle: Any) -> np.ndarray:
    """The numbers of an operand; the interpreter holds bf16 as the upper halves of fp32, in uint16."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle.data
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


def _repaired_dot(create_dot: Any) -> Any:
    # It multiplies the bit patterns of bf16 as integers (triton-lang/triton#11584, closed as not supported).
    def repaired(self: Any, a: Any, b: Any, acc: Any, *precision: Any) -> Any:
        if tl.bfloat16 not in (a.dtype.scalar, b.dtype.scalar):
            return create_dot(self, a, b, acc, *precision)
        return interpreter.TensorHandle(np.matmul(_as_float32(a), _as_float32(b)) + acc.data, acc.dtype.scalar)

    return repaired


def _repaired_cast(cast_impl: Any) -> Any:
    # It cuts fp32 off to bf16, where GPUs round to the nearest, ties to even.
    def repaired(self: Any, source: Any, dtype: Any) -> Any:
        if (source.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return cast_impl(self, source, dtype)
        bits = source.data.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = np.where(np.isnan(source.data), 0x7FC0, rounded)
        return interpreter.TensorHandle(rounded.astype(np.uint16), tl.bfloat16)

    return repaired


def _repaired_tensor(patch_tensor: Any) -> Any:
    # Triton 3.6 makes an index of an array with one dimension, which numpy 2.4 refuses (triton-lang/triton#9171).
    def repaired(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return repaired


def _repaired_builtin(patch_builtin: Any) -> Any:
    # Every call of a function inside a kernel patches the whole language again, which is half of the time.
    def repaired(package: Any, builder: Any, scope: Any) -> None:
        if "is_patched" not in vars(package):
            patch_builtin(package, builder, scope)
            scope.set_attr(package, "is_patched", True)

    return repaired


def repair() -> None:
    """Repair the interpreter of the installed Triton; a second call does nothing.

    Raises:
        RuntimeError: the interpreter has not the parts that are to be repaired.
    """
    for owner, name, repaired in (
        (interpreter.InterpreterBuilder, "create_dot", _repaired_dot),
        (interpreter.InterpreterBuilder, "cast_impl", _repaired_cast),
        (interpreter, "_patch_lang_tensor", _repaired_tensor),
        (interpreter, "_patch_builtin", _repaired_builtin),
    ):
        original = getattr(owner, name, None)
        if original is None:
            raise RuntimeError(
                f"repair: triton.runtime.interpreter has no {name} to be repaired; Triton 3.6 to 3.9 have. "
                "Install one of these, or use backend='reference'."
            )
        if original.__module__ != __name__:
            setattr(owner, name, repaired(original))
