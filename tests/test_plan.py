import dataclasses
import itertools

import pytest
import torch

import ringattn as ra
from ringattn import plan as plan_module
from ringattn.plan import build_plan
from ringattn.testing import visible
from tests.cases import SEQLEN, layouts, masks

WORLDS = (1, 2, 3, 4, 5)


def plans(mask, layout, world_size, seqlen=SEQLEN):
    return [build_plan(mask, layout, seqlen, world_size, rank) for rank in range(world_size)]


@pytest.mark.parametrize("kind", [*layouts(), "balanced"])
@pytest.mark.parametrize("name", masks())
def test_plan_against_brute_force(name, kind):
    mask = masks()[name]
    seen = visible(mask, SEQLEN)
    by_any_row = seen if seen.dim() == 2 else seen.any(0)
    for world_size in WORLDS:
        layout = ra.balanced(mask, SEQLEN, world_size) if kind == "balanced" else layouts()[kind]
        ranks = plans(mask, layout, world_size)
        covered = torch.zeros(seen.shape, dtype=torch.int32)
        needed_offsets = {0}
        for plan in ranks:
            for hop in plan.hops:
                keys = plan.positions_of(hop)
                source = ranks[(plan.rank - hop.offset) % world_size]
                reads = by_any_row[plan.positions][:, source.positions].any(0)
                if hop.offset:
                    # exactly the rows that some row of the receiver sees
                    assert keys.tolist() == source.positions[reads].tolist()
                    assert all(a.stop < b.start for a, b in itertools.pairwise(hop.recv))
                    twin = next(h for h in source.hops if h.offset == hop.offset)
                    assert twin.send == hop.recv
                for block in hop.blocks:
                    at = torch.arange(len(block.keys))
                    sees = (block.lo[..., None] <= at) & (at < block.hi[..., None])
                    assert int(sees.sum()) == block.area > 0
                    inside = sees[..., block.rows.start : block.rows.stop, :]
                    assert bool(inside.all()) == block.is_full
                    # no smaller rectangle would do
                    assert inside.reshape(-1, *inside.shape[-2:]).any(0).any(1)[[0, -1]].all()
                    assert inside.reshape(-1, *inside.shape[-2:]).any(0).any(0)[[0, -1]].all()
                    nothing = ~sees.any(-1)
                    assert bool((block.lo[nothing] == len(block.keys)).all() and (block.hi[nothing] == 0).all())
                    cols = keys[block.keys.start : block.keys.stop]
                    covered[..., plan.positions[:, None], cols] += sees.int()
            for source in ranks:
                if by_any_row[plan.positions][:, source.positions].any():
                    needed_offsets.add((plan.rank - source.rank) % world_size)
        torch.testing.assert_close(covered, seen.int(), rtol=0, atol=0)
        assert sum(plan.area for plan in ranks) == int(seen.sum())
        for plan in ranks:
            assert [hop.offset for hop in plan.hops] == sorted(needed_offsets)


def tiles_by_brute_force(block, tile):
    """Tiles from the first key that some row of a tile of rows sees to the last, of one block."""
    at = torch.arange(len(block.keys))
    sees = (block.lo[..., None] <= at) & (at < block.hi[..., None])
    found = 0
    for rows in sees.reshape(-1, *sees.shape[-2:]):
        for part in rows.split(tile):
            keys = part.any(0).nonzero().flatten().tolist()
            found += keys[-1] // tile - keys[0] // tile + 1 if keys else 0
    return found


@pytest.mark.parametrize("tile", [1, 3, 4])
@pytest.mark.parametrize("name", masks())
def test_tiles_against_brute_force(name, tile, monkeypatch):
    monkeypatch.setattr(plan_module, "TILE", tile)
    build_plan.cache_clear()  # blocks remember their tiles
    mask = masks()[name]
    for layout in ra.layouts():
        ranks = plans(mask, layout, 3)
        want = [[sum(tiles_by_brute_force(block, tile) for block in hop.blocks) for hop in plan.hops] for plan in ranks]
        work = ra.cost(mask, layout, SEQLEN, 3)
        assert [[hop.tiles for hop in plan.hops] for plan in ranks] == want
        assert work.rank_tiles == tuple(map(sum, want))
        assert work.hop_tiles == tuple(map(max, zip(*want, strict=True)))
        assert work.rows == sum(hop.recv_rows for plan in ranks for hop in plan.hops)
        (one,) = plans(mask, "contiguous", 1)
        assert work.single_tiles == sum(tiles_by_brute_force(block, tile) for block in one.hops[0].blocks)
    build_plan.cache_clear()


def test_costs_of_known_layouts():
    causal = ra.cost(ra.Causal(), "zigzag", 8192, 4)
    assert (causal.balance, causal.lockstep_balance, causal.inflation) == (1, 1, 1)
    assert causal.single_tiles == 64 * 65 // 2
    late = ra.cost(ra.Causal(), "contiguous", 8192, 4)
    assert late.rank_tiles == (136, 392, 648, 904)
    assert late.hop_tiles == (136, 256, 256, 256)
    assert (late.balance, late.lockstep_balance, late.inflation) == (904 * 4 / 2080, 904 * 4 / 2080, 1)
    striped = ra.cost(ra.Causal(), "striped", 8192, 4)
    assert striped.inflation == 2176 / 2080  # the diagonal is cut on every hop
    nothing = ra.cost(ra.Causal(), "zigzag", 0, 4)
    assert (nothing.balance, nothing.lockstep_balance, nothing.inflation) == (0, 0, 0)


def test_flops_and_bytes():
    mask, b, h, hkv, d, dv = ra.Window(4), 2, 6, 2, 8, 5
    for plan in plans(mask, "contiguous", 4, 37):
        pairs = int(visible(mask, 37)[plan.positions].sum()) * b * h
        assert plan.flops(batch=b, heads=h, head_dim=d, v_head_dim=dv) == pairs * 2 * (d + dv)
        assert plan.flops(batch=b, heads=h, head_dim=d, v_head_dim=dv, backward=True) == pairs * 2 * (3 * d + 2 * dv)
        sent, received = 4 * (plan.rank < 3), 4 * (plan.rank > 0)
        row = b * hkv * (d + dv)
        assert plan.bytes(batch=b, kv_heads=hkv, head_dim=d, v_head_dim=dv) == sent * row * 2
        assert (
            plan.bytes(batch=b, kv_heads=hkv, head_dim=d, v_head_dim=dv, backward=True)
            == sent * row * 2 + received * row * 4
        )
        assert plan.bytes(batch=b, kv_heads=hkv, head_dim=d, v_head_dim=dv, dtype=torch.float64) == sent * row * 8


def test_flops_of_a_mask_for_a_batch_count_its_rows():
    mask = ra.Rows(ra.Causal(), ra.Window(0))
    plan = build_plan(mask, "zigzag", 8, 1, 0)
    assert plan.area == 36 + 8
    assert plan.flops(batch=2, heads=1, head_dim=1) == 2 * 2 * 44


def test_a_window_into_the_neighbours_rows_is_one_hop_of_its_own_rows():
    for plan in plans(ra.Window(3), "contiguous", 8, 64):
        assert [hop.offset for hop in plan.hops] == [0, 1]
        assert plan.hops[1].recv_rows == (3 if plan.rank else 0)


def test_zigzag_causal_sends_three_quarters_of_a_relay():
    n, w = 64, 4
    sent = sum(hop.send_rows for plan in plans(ra.Causal(), "zigzag", w, n) for hop in plan.hops)
    assert sent == 3 * (w * (w - 1) * n // w) // 4


def test_zigzag_causal_is_even_on_every_hop():
    for hops in zip(*(plan.hops for plan in plans(ra.Causal(), "zigzag", 4, 64)), strict=True):
        assert len({sum(block.area for block in hop.blocks) for hop in hops}) == 1


@pytest.mark.parametrize("share", [0.0, 1 / 3, 0.5, 1.0])
@pytest.mark.parametrize("name", masks())
def test_the_parts_of_a_ranks_own_keys_are_disjoint_and_all(name, share):
    mask = masks()[name]
    for layout, world_size in itertools.product(layouts().values(), (2, 3)):
        for plan in plans(mask, layout, world_size):
            own, *others = plan.hops
            first, *between, last = plan.backward_hops(share) if others else (own, own)
            if not others:
                assert plan.backward_hops(share) == plan.hops
                continue
            assert between == others
            assert first.area + last.area == own.area
            rows = [[set(block.rows) for block in part.blocks] for part in (first, last)]
            assert not any(a & b for a in rows[0] for b in rows[1])
            assert set().union(*rows[0], *rows[1]) == set().union(*(block.rows for block in own.blocks))
            by_row = (visible(mask, SEQLEN)[..., plan.positions, :][..., plan.positions]).sum(-1)
            widest = int(by_row.reshape(-1, len(plan.positions)).sum(0).max()) if len(plan.positions) else 0
            assert share * own.area - widest <= first.area <= share * own.area  # to a row


def test_the_parts_of_a_ranks_own_keys_cut_no_tile():
    first, *_, last = build_plan(ra.Causal(), "zigzag", 8192, 4, 1).backward_hops(1 / 3)
    assert first.blocks[0].rows.stop == last.blocks[0].rows.start == 1152
    assert first.tiles + last.tiles == build_plan(ra.Causal(), "zigzag", 8192, 4, 1).hops[0].tiles
    assert first.area / (first.area + last.area) == pytest.approx(1 / 3, abs=0.03)


def test_short_sequences_and_empty_shards():
    for seqlen, world_size, layout in itertools.product(range(6), (1, 3, 6), ra.layouts()):
        ranks = plans(ra.Causal(), layout, world_size, seqlen)
        assert sum(plan.area for plan in ranks) == seqlen * (seqlen + 1) // 2
        assert sum(len(plan.positions) for plan in ranks) == seqlen


def test_plans_are_values():
    plan = build_plan(ra.Window(3), "zigzag", 17, 2, 0)
    build_plan.cache_clear()
    again = build_plan(ra.Window(3), "zigzag", 17, 2, 0)
    assert again is not plan
    assert (again, hash(again)) == (plan, hash(plan))
    assert plan != build_plan(ra.Window(3), "zigzag", 17, 2, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.rank = 1


@pytest.mark.parametrize("name", masks())
def test_a_default_device_of_the_users_changes_nothing(name):
    want = build_plan(masks()[name], "zigzag", SEQLEN, 2, 1)
    build_plan.cache_clear()
    plan_module.bounds_of.cache_clear()
    with torch.device("meta"):
        got = build_plan(want.mask, "zigzag", SEQLEN, 2, 1)
    for hop, wanted in zip(got.hops, want.hops, strict=True):
        assert (hop.send, hop.recv) == (wanted.send, wanted.recv)
        for block, other in zip(hop.blocks, wanted.blocks, strict=True):
            torch.testing.assert_close((block.lo, block.hi), (other.lo, other.hi), rtol=0, atol=0)


def decreasing():
    lo = torch.tensor([0, 3, 2, 2])
    return ra.Bounds(lo, lo + 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: build_plan(decreasing(), "zigzag", 4, 2, 0),
            r"Bounds: lo falls from 3 at row 1 to 2 at row 2; .* must not decrease. Split the mask with \|",
        ),
        (
            lambda: build_plan(
                ra.Bounds(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([[1, 2, 3], [1, 3, 2]])), "zigzag", 3, 1, 0
            ),
            r"Bounds: hi falls from 3 at row 1 to 2 at row 2",
        ),
        (
            lambda: build_plan(ra.Documents((0, 5)), "zigzag", 6, 2, 0),
            r"mask Documents is for 5 tokens and the sequence has 6; they must agree",
        ),
        (lambda: build_plan(ra.Causal(), "zigzag", 6, 2, 2), r"rank 2; needs seqlen >= 0 and 0 <= rank < world_size"),
        (lambda: build_plan(ra.Causal(), "spiral", 6, 2, 0), r"layout is 'spiral'; it must be one of"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()
