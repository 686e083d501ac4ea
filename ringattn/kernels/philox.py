"""Philox4x32-10, the counter-based generator behind dropout: the same mask in every backend, world size and layout.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3.
"""

import torch
from torch import Tensor

from ringattn.kernels import Options

__all__ = ["keep_mask", "philox"]

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def _multiply(multiplier: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 x 32 bit product."""
    # The product wraps in int64, but its 64 bits are right: the shift drags in sign bits, which the mask drops.
    product = word * multiplier
    return (product >> 32) & _WORD, product & _WORD


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four random words of Philox4x32-10 at `counter`, as int64 tensors that hold 32 bits each.

    Args:
        counter: four int64 tensors of values in `[0, 2**32)` that broadcast together.
        key: two numbers in `[0, 2**32)`.

    Example:
        >>> words = philox((torch.zeros(1, dtype=torch.int64),) * 4, (0, 0))
        >>> [f"{int(word):08x}" for word in words]
        ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    # The words are left to broadcast by themselves: the first rounds then work on vectors, not on the whole tile.
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def keep_mask(options: Options, q_pos: Tensor, k_pos: Tensor, batch: int, heads: int, device: torch.device) -> Tensor:
    """Which attention weights survive dropout: bool `[batch, heads, S, T]`.

    The key is the seed, the counter `(key position, query position, options.head_offset + head, batch row)`; a weight
    is kept iff word 0 is at least `floor(dropout_p * 2**32)`.

    Args:
        options: `dropout_p`, `seed` and `head_offset` are read.
        q_pos: int `[S]`, global positions of the query rows.
        k_pos: int `[T]`, global positions of the key rows.
        batch: number of batch rows.
        heads: number of query heads at hand.
        device: where the mask is wanted.

    Example:
        >>> options = Options(softmax_scale=1.0, dropout_p=0.5, seed=1)
        >>> keep_mask(options, torch.arange(2), torch.arange(3), 1, 4, torch.device("cpu")).shape
        torch.Size([1, 4, 2, 3])
    """
    head = torch.arange(options.head_offset, options.head_offset + heads, device=device)
    row = torch.arange(batch, device=device)
    counter = (
        k_pos.to(device, torch.int64) & _WORD,
        (q_pos.to(device, torch.int64) & _WORD)[:, None],
        (head & _WORD)[:, None, None],
        row[:, None, None, None],
    )
    word, *_ = philox(counter, (options.seed & _WORD, (options.seed >> 32) & _WORD))
    return word >= int(options.dropout_p * 2**32)
