"""Dropout in Triton: the mask of `ringattn.kernels.philox`, bit for bit."""

from typing import Any

import triton
import triton.language as tl

from ringattn.kernels import Options

__all__ = ["DROPOUT_WORDS", "dropout_arguments", "keep_mask"]

# The integers among `dropout_arguments`. Kernels specialised to their values would be compiled anew for every seed.
DROPOUT_WORDS = ("seed_low", "seed_high", "threshold", "head_offset")


def _int32(word: int) -> int:
    """The int32 with the low 32 bits of `word`."""
    return (word + 2**31) % 2**32 - 2**31


def dropout_arguments(options: Options) -> dict[str, Any]:
    """What kernels are told about dropout: 32-bit words as int32, and the factor of what is kept."""
    return {
        "seed_low": _int32(options.seed),
        "seed_high": _int32(options.seed >> 32),
        "threshold": _int32(int(options.dropout_p * 2**32)),
        "head_offset": options.head_offset,
        "keep_scale": 1.0 / (1.0 - options.dropout_p),
    }


@triton.jit
def keep_mask(k_pos, q_pos, head, batch, seed_low, seed_high, threshold):
    """Which weights are kept, in the shape to which the int32 counter `(k_pos, q_pos, head, batch)` broadcasts."""
    high, low = seed_high.to(tl.uint32, bitcast=True), seed_low.to(tl.uint32, bitcast=True)
    # tl.philox leaves the words to broadcast by themselves, so the first rounds work on vectors and not on the whole tile.
    word, _, _, _ = tl.philox((high.to(tl.uint64) << 32) | low, k_pos, q_pos, head, batch)
    return word >= threshold.to(tl.uint32, bitcast=True)
