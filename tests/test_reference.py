"""What is the reference backend's own: fp64, the walk over tiles, and strictness where numbers are not finite."""

import pytest
import torch

from ringattn.kernels import Bounds, Options, Request, reference
from tests.contract import CASES, case, causal_bounds, compare, oracle, run, seen_by, tensors


@pytest.fixture(params=[(16, 24), (128, 512)], ids=["small tiles", "tiles"])
def tile(request, monkeypatch):
    """Tiles so small that every case crosses several, and those in use."""
    monkeypatch.setitem(reference._TILE, "cpu", request.param)


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setitem(reference._TILE, "cpu", (8, 12))


@pytest.mark.parametrize("name", CASES)
def test_fp64_is_the_dense_softmax(name, tile):
    inputs, lo, hi, options, sinks = case(**CASES[name])
    compare(
        run("reference", inputs, lo, hi, options, sinks),
        oracle(inputs, seen_by(lo, hi, 70), options, sinks),
        rtol=1e-12,
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cuts", [(1,), (33, 34), (0, 20, 20, 70)])
def test_a_chain_of_key_chunks_is_one_call(name, cuts, small_tiles):
    inputs, lo, hi, options, sinks = case(**CASES[name])
    compare(
        run("reference", inputs, lo, hi, options, sinks, cuts),
        oracle(inputs, seen_by(lo, hi, 70), options, sinks),
        rtol=1e-12,
    )


def test_causal_across_the_tiles_in_use():
    inputs = tensors(1, 700, 700, 2, 1, 8, 8)
    lo, hi = causal_bounds(700)
    compare(
        run("reference", inputs, lo, hi, Options(0.3), cuts=(600,)),
        oracle(inputs, seen_by(lo, hi, 700), Options(0.3)),
        rtol=1e-12,
    )


def test_tiles_cover_what_is_seen_and_skip_what_no_row_sees(small_tiles):
    lo, hi = causal_bounds(48)
    position = torch.arange(48, dtype=torch.int32)
    tiles = reference._tiles(Bounds((lo := (hi - 6).clamp(min=0)), hi, position, position, False), 48, 48)
    assert len(tiles) == 6
    for tile in tiles:
        rows = range(tile.rows.start, tile.rows.stop)
        keys = [(key, is_full) for at, is_full in tile.parts for key in range(at.start, at.stop)]
        assert [key for key, _ in keys] == list(range(int(lo[rows[0]]), int(hi[rows[-1]])))
        assert [key for key, is_full in keys if is_full] == [
            key for key, _ in keys if all(lo[row] <= key < hi[row] for row in rows)
        ]


def test_nan_under_dropout_reaches_dropped_pairs_too(small_tiles):
    inputs = tensors(1, 20, 20, 2, 1, 8, 6)
    inputs[2][0, 7] = torch.nan
    lo, hi = causal_bounds(20)
    out, *_ = run("reference", inputs, lo, hi, Options(0.3, dropout_p=0.5, seed=3))
    assert out.isnan().all(-1).all(-1).all(0).tolist() == [row >= 7 for row in range(20)]
    assert out.isnan().any(-1).any(-1).any(0).tolist() == [row >= 7 for row in range(20)]


@pytest.mark.parametrize(
    ("dtype", "reason"), [(torch.bfloat16, None), (torch.int32, "dtype is torch.int32; a floating dtype")]
)
def test_supports(dtype, reason):
    request = Request(torch.device("cpu"), dtype, 4, 2, 8, 8, softcap=True, sinks=True, dropout=True)
    got = reference.Reference().supports(request)
    assert got is None if reason is None else got.startswith(reason)
