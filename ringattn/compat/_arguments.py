"""What the arguments of other systems mean here."""

from typing import Any

import torch
import torch.distributed as dist

from ringattn import Causal, Full, Mask, Window

__all__ = ["mask_of", "seed_of"]


def mask_of(causal: bool, window_size: tuple[int, int] = (-1, -1)) -> Mask:
    """flash-attn's rule: `window_size` counts keys to the left and right of a row, -1 is no limit, and `causal` hides what is right."""
    left, right = (None if n < 0 else int(n) for n in window_size)
    mask: Mask = Full() if left is None and right is None else Window(left, right)
    if causal:
        mask = Causal() if left is None else Window(left, 0)
    return mask


def seed_of(dropout_p: float, group: Any, device: torch.device) -> int | None:
    """A seed for one call, the same on every rank: the first rank draws it from torch's generator. None without dropout.

    Activation checkpointing, which puts the generator back, draws the same one again.
    """
    if not dropout_p:
        return None
    seed = torch.randint(2**31, (1,))
    if group is None or dist.get_world_size(group) == 1:
        return int(seed)
    shared = seed.to(device)
    dist.broadcast(shared, group=group, group_src=0)
    return int(shared)
