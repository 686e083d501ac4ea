"""Which tile each kernel uses: a table of data, with no import of triton.

Every row was compiled for its architecture: it fits the shared memory, does no product twice, and spills nothing in its main
loop (fp32 on NVIDIA: a little). `python -m bench.static` prints the evidence and `tests/test_static.py` keeps it true. Which of
such tiles is the fastest only a GPU can say.
"""

import dataclasses
from collections.abc import Iterable

import torch

__all__ = [
    "CANDIDATES",
    "KERNELS",
    "RELATIVES",
    "SHARED_MEMORY",
    "SPECIALIZED",
    "TILES",
    "Key",
    "Tile",
    "choose",
    "serving",
]


@dataclasses.dataclass(frozen=True)
class Tile:
    """`block_m` query rows by `block_n` key rows, worked on by `num_warps` warps with `num_stages` loads in flight.

    With `warp_specialize` other warps load the keys, by tensor descriptors, and each `num_warps` warps take some of the rows.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    warp_specialize: bool = False


KERNELS = ("forward", "dkv", "dq")

# Bytes of shared memory that one block may use.
SHARED_MEMORY = {"sm_80": 163 << 10, "sm_86": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}

Key = tuple[str, int, int, int]  # architecture, bits of the inputs, head dim, value head dim

# Tiles of forward, dkv, dq. A row serves all head dims up to its own; within an architecture and width the first row that
# serves is taken. At head dim 256 the gradients of 64 keys, the least that Hopper's and Blackwell's matrix instructions take, fill the registers: there
# dkv has 32 keys and the older instructions. fp32 has FMAs on NVIDIA, whose operands lie in registers: tiles are small.
TILES: dict[Key, tuple[Tile, Tile, Tile]] = {
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

# Warp-specialised tiles of forward, taken before those of TILES by calls that they serve (`backend.has_descriptors`). There
# are none: no GPU has run the candidates yet. `python -m bench.kernels --tune` does; what is faster there moves up here.
SPECIALIZED: dict[Key, Tile] = {}
# On Triton 3.6, 3.7 and 3.9 they compile without a spill in their loops over keys. None do for values wider than 128, nor on
# Blackwell, whose warps that rescale spill (128 x 128 at head dim 128: 102 to 172 a loop).
CANDIDATES: dict[Key, tuple[Tile, ...]] = {
    ("sm_90", 16, 64, 64): (Tile(128, 128, 4, 2, True), Tile(128, 128, 4, 3, True), Tile(128, 64, 4, 3, True)),
    ("sm_90", 16, 128, 128): (Tile(128, 128, 4, 2, True), Tile(128, 64, 4, 2, True), Tile(128, 64, 4, 3, True)),
    ("sm_90", 16, 256, 128): (Tile(128, 64, 4, 2, True),),
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


def serving(table: Iterable[Key], arch: str, head_dim: int, v_head_dim: int, dtype: torch.dtype) -> Key | None:
    """The row of a table that serves inputs of `dtype` on `arch`; None where no row does.

    `arch` is "sm_90", "gfx942" and so on, or "interpreter".
    """
    wanted = RELATIVES.get(arch, arch), 8 * dtype.itemsize
    return next((key for key in table if key[:2] == wanted and head_dim <= key[2] and v_head_dim <= key[3]), None)


def choose(kernel: str, arch: str, head_dim: int, v_head_dim: int, dtype: torch.dtype) -> Tile | None:
    """The tile of `kernel` ("forward", "dkv" or "dq"); None where no row serves. The other arguments are those of `serving`.

    Example:
        >>> choose("forward", "sm_90", 96, 96, torch.bfloat16)
        Tile(block_m=128, block_n=128, num_warps=8, num_stages=2, warp_specialize=False)
        >>> choose("forward", "sm_70", 96, 96, torch.bfloat16) is None
        True
    """
    key = serving(TILES, arch, head_dim, v_head_dim, dtype)
    return TILES[key][KERNELS.index(kernel)] if key else None
