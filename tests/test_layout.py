import itertools

import pytest
import torch

import ringattn as ra
from ringattn import layout as layout_module
from tests.cases import layouts


@pytest.mark.parametrize("name", ra.layouts())
def test_ranks_hold_every_position_once_in_order(name):
    for seqlen, world_size in itertools.product(range(21), range(1, 7)):
        shards = [layout_module.ranges(name, seqlen, world_size, rank) for rank in range(world_size)]
        held = [p for ranges in shards for r in ranges for p in r]
        assert sorted(held) == list(range(seqlen))
        for ranges in shards:
            assert all(len(r) > 0 for r in ranges)
            local = [p for r in ranges for p in r]
            assert local == sorted(local)


@pytest.mark.parametrize("cu_seqlens", [(0, 9), (0, 1, 2, 3), (0, 4, 4, 17, 40), (0, *tuple(range(1, 30, 7)))])
def test_per_document_spreads_each_document(cu_seqlens):
    layout, seqlen = ra.per_document(cu_seqlens), cu_seqlens[-1]
    for world_size in range(1, 5):
        shards = [layout_module.positions(layout, seqlen, world_size, r) for r in range(world_size)]
        assert sorted(torch.cat(shards).tolist()) == list(range(seqlen))
        for shard in shards:
            assert shard.tolist() == sorted(shard.tolist())
            for start, stop in itertools.pairwise(cu_seqlens):
                share = int(((shard >= start) & (shard < stop)).sum())
                assert abs(share - (stop - start) / world_size) <= 2


def test_zigzag_is_an_early_and_a_late_piece():
    assert layout_module.zigzag(16, 4, 1) == (range(2, 4), range(12, 14))
    assert layout_module.zigzag(16, 4, 3) == (range(6, 10),)  # neighbours are one range
    assert layout_module.zigzag(16, 1, 0) == (range(16),)


def test_shards_differ_by_one_row_of_each_piece_at_most():
    for seqlen, world_size in itertools.product(range(1, 40), range(1, 6)):
        for name, slack in (("contiguous", 1), ("striped", 1), ("zigzag", 2)):
            rows = [len(layout_module.positions(name, seqlen, world_size, r)) for r in range(world_size)]
            assert max(rows) - min(rows) <= slack, (name, seqlen, world_size)


def test_positions_are_the_ranges():
    for layout in layouts().values():
        got = layout_module.positions(layout, 17, 3, 1)
        want = [p for r in layout_module.ranges(layout, 17, 3, 1) for p in r]
        assert (got.dtype, got.tolist()) == (torch.int64, want)


def test_a_value_comes_back_from_its_code():
    layout = ra.per_document((0, 3, 10))
    again = layout_module.decode("", layout.code)
    assert (again, hash(again)) == (layout, hash(layout))
    assert layout_module.fingerprint(again) == layout_module.fingerprint(layout) != "per_document"
    assert layout_module.fingerprint(ra.per_document((0, 4, 10))) != layout_module.fingerprint(layout)
    made = ra.balanced(ra.Causal(), 10, 3)
    assert layout_module.decode("", made.code) == made != layout
    assert layout_module.decode("", made.code)(10, 3, 1) == made(10, 3, 1)
    assert layout_module.decode("zigzag", None) == layout_module.fingerprint("zigzag") == "zigzag"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layout_module.resolve("zigzug"), r"layout is 'zigzug'; it must be one of 'contiguous', 'zigzag', "),
        (lambda: layout_module.resolve(7), r"layout is 7; it must be a name .* or a value such as per_document"),
        (lambda: ra.per_document((2, 5)), r"cu_seqlens is \(2, 5\); it must start at 0"),
        (
            lambda: ra.per_document((0, 5))(6, 2, 0),
            r"per_document: its documents have 5 tokens and the sequence 6; they must agree",
        ),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()
