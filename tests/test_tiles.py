"""The tile table: what is served, by which row, and that every row can be launched. What rows compile to is in test_static.py."""

import pytest
import torch

from ringattn.kernels.triton.tiles import (
    CANDIDATES,
    KERNELS,
    RELATIVES,
    SHARED_MEMORY,
    SPECIALIZED,
    TILES,
    Tile,
    choose,
    serving,
)

HEAD_DIMS = (1, 16, 64, 72, 80, 96, 128, 192, 256)
ARCHS = {arch for arch, _, _, _ in TILES}


def is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


@pytest.mark.parametrize("arch", sorted(ARCHS | set(RELATIVES)))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_head_dim_up_to_256_is_served(arch, dtype):
    missing = [
        (kernel, head_dim, v_head_dim)
        for kernel in KERNELS
        for head_dim in HEAD_DIMS
        for v_head_dim in HEAD_DIMS
        if choose(kernel, arch, head_dim, v_head_dim, dtype) is None
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("kernel", "arch", "head_dim", "v_head_dim", "dtype"),
    [
        ("forward", "sm_70", 64, 64, torch.bfloat16),
        ("forward", "sm_90", 257, 64, torch.bfloat16),
        ("forward", "sm_90", 64, 257, torch.bfloat16),
        ("forward", "sm_90", 64, 64, torch.float64),
    ],
)
def test_what_no_row_serves(kernel, arch, head_dim, v_head_dim, dtype):
    assert choose(kernel, arch, head_dim, v_head_dim, dtype) is None


def test_the_smallest_row_that_serves_is_taken():
    wrong = []
    for arch, bits, head_dim, v_head_dim in TILES:
        dtype = {16: torch.float16, 32: torch.float32}[bits]
        own = TILES[arch, bits, head_dim, v_head_dim]
        if tuple(choose(kernel, arch, head_dim, v_head_dim, dtype) for kernel in KERNELS) != own:
            wrong.append((arch, bits, head_dim, v_head_dim))
    assert wrong == [], "an earlier row serves what this one is for"


def test_both_head_dims_must_fit():
    wide = TILES["sm_90", 16, 256, 256]
    assert choose("forward", "sm_90", 64, 256, torch.bfloat16) == wide[0]
    assert choose("dkv", "sm_90", 64, 256, torch.bfloat16) == wide[1]
    assert choose("dq", "sm_90", 64, 256, torch.bfloat16) == wide[2]


def test_relatives_have_no_rows_of_their_own_and_take_rows_that_exist():
    assert set(RELATIVES) & ARCHS == set()
    assert set(RELATIVES.values()) <= ARCHS
    assert choose("dq", "sm_89", 64, 64, torch.float16) == choose("dq", "sm_86", 64, 64, torch.float16)


def test_every_architecture_has_a_limit_of_shared_memory():
    assert set(SHARED_MEMORY) == ARCHS - {"interpreter"}


def test_calls_that_specialised_tiles_do_not_serve_have_others():
    specialised = [key for key, row in TILES.items() for tile in row if tile.warp_specialize]
    assert specialised == [], "forward takes from SPECIALIZED what a call allows, and else from here"


def test_specialised_tiles_are_candidates_that_the_tables_rows_can_do_without():
    assert set(CANDIDATES) <= set(TILES)
    assert [key for key, tile in SPECIALIZED.items() if tile not in CANDIDATES.get(key, ())] == []
    for tile in (tile for row in CANDIDATES.values() for tile in row):
        assert tile.warp_specialize, tile
        assert tile.num_warps == 4, "Triton specialises no others, and does not say so"


def test_serving_looks_in_any_table():
    assert serving(CANDIDATES, "sm_90", 72, 80, torch.bfloat16) == ("sm_90", 16, 128, 128)
    assert serving(CANDIDATES, "sm_90", 192, 128, torch.float16) == ("sm_90", 16, 256, 128)
    assert serving(CANDIDATES, "sm_90", 64, 256, torch.float16) is None
    assert serving(CANDIDATES, "sm_90", 64, 64, torch.float32) is None
    assert serving(CANDIDATES, "sm_80", 64, 64, torch.float16) is None
    assert serving({("sm_86", 32, 64, 64): None}, "sm_120", 8, 8, torch.float32) == ("sm_86", 32, 64, 64)


@pytest.mark.parametrize("row", TILES, ids=str)
def test_rows_can_be_launched(row):
    for tile in (*TILES[row], *CANDIDATES.get(row, ())):
        assert isinstance(tile, Tile)
        assert is_power_of_two(tile.block_m), tile
        assert is_power_of_two(tile.block_n), tile
        assert tile.num_warps in (1, 2, 4, 8), tile
        assert min(tile.block_m, tile.block_n) >= 16, "the least that a product takes"
        assert tile.num_stages >= 1, tile
