"""Which tile each kernel uses: a table of data, with no import of triton.

Every row was compiled for its architecture: it fits the shared memory, does no product twice, and spills nothing in its main
loop (fp32 on NVIDIA: a little). `python -m bench.static` prints the evidence and `tests/test_static.py` keeps it true. Which of
such tiles is the fastest only a GPU can say.
"""

import dataclasses

import torch

__all__ = ["SHARED_MEMORY", "TILES", "Tile", "choose"]


@dataclasses.dataclass(frozen=True)
class Tile:
    """`block_m` query rows by `block_n` key rows, worked on by `num_warps` warps with `num_stages` loads in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    warp_specialize: bool = False


KERNELS = ("forward", "dkv", "dq")

# Bytes of shared memory that one block may use.
SHARED_MEMORY = {"sm_80": 163 << 10, "sm_86": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}

# (architecture, bits of the inputs, head dim, value head dim): tiles of forward, dkv, dq.
# A row serves all head dims up to its own; within an architecture and width the first row that serves is taken. At head dim
# 256 the gradients of 64 keys, the least that Hopper's and Blackwell's matrix instructions take, fill the registers: there
# dkv has 32 keys and the older instructions. fp32 has FMAs on NVIDIA, whose operands lie in registers: tiles are small.
TILES: dict[tuple[str, int, int, int], tuple[Tile, Tile, Tile]] = {
    ("sm_80", 16, 64, 64): (Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    ("sm_80", 16, 128, 128): (Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 4, 2)),
    ("sm_80", 16, 256, 256): (Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(64, 32, 4, 2)),
    ("sm_80", 32, 128, 128): (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    ("sm_80", 32, 256, 256): (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    ("sm_86", 16, 64, 64): (Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    ("sm_86", 16, 128, 128): (Tile(128, 32, 8, 2), Tile(32, 64, 4, 1), Tile(64, 32, 4, 2)),
    ("sm_86", 16, 256, 256): (Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    ("sm_86", 32, 128, 128): (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    ("sm_86", 32, 256, 256): (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    ("sm_90", 16, 64, 64): (Tile(128, 128, 8, 2), Tile(64, 128, 8, 2), Tile(128, 64, 8, 2)),
    ("sm_90", 16, 128, 128): (Tile(128, 128, 8, 2), Tile(32, 128, 8, 2), Tile(128, 64, 8, 2)),
    ("sm_90", 16, 256, 128): (Tile(128, 64, 8, 2), Tile(32, 32, 4, 1), Tile(128, 32, 8, 2)),
    ("sm_90", 16, 256, 256): (Tile(128, 64, 8, 2), Tile(32, 32, 4, 2), Tile(128, 32, 8, 2)),
    ("sm_90", 32, 128, 128): (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    ("sm_90", 32, 256, 256): (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    ("sm_100", 16, 64, 64): (Tile(128, 128, 8, 2), Tile(64, 128, 8, 2), Tile(128, 64, 8, 2)),
    ("sm_100", 16, 128, 128): (Tile(128, 128, 8, 2), Tile(64, 128, 8, 1), Tile(128, 64, 8, 2)),
    ("sm_100", 16, 256, 256): (Tile(128, 64, 8, 2), Tile(32, 32, 4, 1), Tile(128, 64, 8, 1)),
    ("sm_100", 32, 128, 128): (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    ("sm_100", 32, 256, 256): (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    ("gfx942", 16, 64, 64): (Tile(128, 64, 4, 1), Tile(32, 128, 4, 1), Tile(128, 32, 4, 1)),
    ("gfx942", 16, 128, 128): (Tile(128, 64, 4, 1), Tile(16, 128, 4, 1), Tile(128, 32, 4, 1)),
    ("gfx942", 16, 256, 256): (Tile(64, 16, 4, 1), Tile(16, 64, 4, 1), Tile(64, 16, 4, 1)),
    ("gfx942", 32, 128, 128): (Tile(64, 16, 4, 1), Tile(16, 64, 4, 1), Tile(64, 16, 4, 1)),
    ("gfx942", 32, 256, 256): (Tile(64, 16, 4, 1), Tile(16, 64, 4, 1), Tile(32, 16, 2, 1)),
    ("interpreter", 16, 256, 256): (Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    ("interpreter", 32, 256, 256): (Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
}

# Architectures that take the rows of another, whose shared memory and matrix instructions are theirs too.
RELATIVES = {
    "sm_87": "sm_80",
    "sm_89": "sm_86",
    "sm_120": "sm_86",
    "sm_121": "sm_86",
    "sm_103": "sm_100",
    "gfx950": "gfx942",
}


def choose(kernel: str, arch: str, head_dim: int, v_head_dim: int, dtype: torch.dtype) -> Tile | None:
    """The tile of `kernel` ("forward", "dkv" or "dq") on `arch` for inputs of `dtype`; None where no row serves.

    `arch` is "sm_90", "gfx942" and so on, or "interpreter".

    Example:
        >>> choose("forward", "sm_90", 96, 96, torch.bfloat16)
        Tile(block_m=128, block_n=128, num_warps=8, num_stages=2, warp_specialize=False)
        >>> choose("forward", "sm_70", 96, 96, torch.bfloat16) is None
        True
    """
    family = RELATIVES.get(arch, arch)
    for (row_arch, bits, row_dim, row_v_dim), row in TILES.items():
        if (row_arch, bits) == (family, 8 * dtype.itemsize) and head_dim <= row_dim and v_head_dim <= row_v_dim:
            return row[KERNELS.index(kernel)]
    return None
