"""Tuning of tiles whose warps may wait for each other for ever."""

import re
import sys
import time

import pytest

from bench import harness, kernels
from ringattn.kernels.triton.tiles import SPECIALIZED, TILES, Tile

KEY = ("interpreter", 32, 256, 256)
CANDIDATE = Tile(64, 64, 4, 2, warp_specialize=True)


@pytest.fixture
def candidate(monkeypatch):
    monkeypatch.setattr(kernels, "CANDIDATES", {KEY: (CANDIDATE,)})


def specialised(out):
    return kernels.specialised(kernels.SMOKE, re.compile(""), out, rounds=1, budget_s=1.0)


def test_a_candidate_is_timed_beside_the_tables_tile(candidate, tmp_path):
    rows = specialised(tmp_path / "tune.csv")
    now = TILES[KEY][0]
    assert [row.contender for row in rows] == [f"forward {kernels.tile_name(tile)}" for tile in (now, CANDIDATE)]
    assert rows[1].contender == "forward 64x64 warps 4 stages 2 specialised"
    assert [(row.reason, row.is_peer) for row in rows] == [("", 1), ("", 0)]
    assert rows[1].ratio > 0
    assert harness.read(tmp_path / "tune.csv") == rows
    assert [path.name for path in tmp_path.iterdir()] == ["tune.csv"]


@pytest.mark.parametrize(("tile", "specialised"), [(CANDIDATE, {KEY: CANDIDATE}), (Tile(64, 64, 4, 2), {})])
def test_the_tile_that_is_timed_is_the_one_in_use(tile, specialised, monkeypatch):
    seen = []
    monkeypatch.setitem(SPECIALIZED, KEY, Tile(32, 32, 4, 1, warp_specialize=True))
    before = dict(SPECIALIZED), dict(TILES)

    def look(*_):
        seen.append((dict(SPECIALIZED), TILES[KEY][0]))

    looking = harness.Contender("looking", lambda inputs: look() or harness.Run(look, look))
    kernels.with_tile(looking, KEY, "forward", tile, is_peer=False).prepare(None).call()
    assert seen == [(specialised, before[1][KEY][0] if tile == CANDIDATE else tile)] * 2
    assert (dict(SPECIALIZED), dict(TILES)) == before


def test_a_candidate_that_fails_is_a_row_with_the_reason(candidate, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "try_tile", sys.exit)  # with a code that is no code: 1
    (row,) = specialised(tmp_path / "tune.csv")
    assert (row.reason, row.median_ms) == ("its process ended with exit code 1", None)


def test_what_never_returns_is_ended():
    said = "did not end in 2 s: its warps may wait for each other for ever"
    assert kernels.survive(time.sleep, 600, longest_s=2) == said
