"""Balanced layouts: the work that they even out, what stays at home, and that the ring computes the same on them."""

import itertools

import numpy as np
import pytest
import torch

import ringattn as ra
from ringattn import balance as balance_module
from ringattn import layout as layout_module
from ringattn.testing import assert_matches, naive_attention, virtual
from tests.cases import SEQLEN, masks

TOKENS, RANKS = 131072, 8
FEW = range(0, 100, 10)


def packing(seed, causal=True):
    """Documents of log-normal lengths (median 1097 tokens, mean 3379), the last one cut where the sequence ends."""
    rng = np.random.default_rng(seed)
    ends = [0]
    while ends[-1] < TOKENS:
        ends.append(min(TOKENS, ends[-1] + max(1, int(rng.lognormal(7, 1.5)))))
    return ra.Documents(tuple(ends), causal)


def shards(layout, seqlen, world_size):
    return [layout_module.positions(layout, seqlen, world_size, rank) for rank in range(world_size)]


def require_a_partition(layout, seqlen, world_size):
    held = shards(layout, seqlen, world_size)
    assert sorted(torch.cat(held).tolist()) == list(range(seqlen))
    for shard in held:
        assert shard.tolist() == sorted(shard.tolist())
    rows = [len(shard) for shard in held]
    assert max(rows) - min(rows) <= layout.chunk


@pytest.mark.parametrize("name", masks())
def test_every_token_has_one_rank_and_ranks_have_equally_many(name):
    for seqlen, world_size in itertools.product((SEQLEN, 40, 64), (1, 2, 3, 5, 8)):
        mask = masks(seqlen)[name]
        require_a_partition(ra.balanced(mask, seqlen, world_size), seqlen, world_size)


@pytest.mark.parametrize("seqlen", [0, 1, 2, 5, 7])
def test_sequences_shorter_than_the_ring(seqlen):
    for mask in (ra.Causal(), ra.Window(0), ra.Documents((0, seqlen // 2, seqlen))):
        for world_size in (1, 3, 8):
            require_a_partition(ra.balanced(mask, seqlen, world_size), seqlen, world_size)


def test_lengths_that_no_chunk_divides():
    for seqlen in (2047, 4097, 5000):
        cut = (0, seqlen // 7, seqlen // 3, seqlen - 5, seqlen)
        for mask, world_size in itertools.product((ra.Causal(), ra.Full(), ra.Documents(cut)), (3, 4)):
            require_a_partition(ra.balanced(mask, seqlen, world_size), seqlen, world_size)


def require_even(mask):
    layout = ra.balanced(mask, TOKENS, RANKS)
    work = ra.cost(mask, layout, TOKENS, RANKS)
    assert work.balance <= work.lockstep_balance <= 1.05, work
    assert work.inflation <= 1.05, work
    assert layout.chunk == 128
    assert {len(shard) for shard in shards(layout, TOKENS, RANKS)} == {TOKENS // RANKS}


@pytest.mark.parametrize("seed", FEW)
def test_packings_are_even_on_every_hop(seed):
    require_even(packing(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", sorted(set(range(100)) - set(FEW)))
def test_more_packings_are_even_on_every_hop(seed):
    require_even(packing(seed))


@pytest.mark.parametrize(
    "mask", [ra.Causal(), ra.Full(), ra.PrefixLM(20000), ra.PrefixLM(100000), ra.Spans(((1000, 5000), (60000, 64000)))]
)
def test_one_document_is_even_within_a_hundredth(mask):
    work = ra.cost(mask, ra.balanced(mask, TOKENS, RANKS), TOKENS, RANKS)
    assert work.lockstep_balance <= 1.01, work
    assert work.inflation == 1, work


def test_a_causal_sequence_is_a_zigzag_and_a_window_stays_in_one_piece():
    for mask, twin in ((ra.Causal(), "zigzag"), (ra.Window(4096), "contiguous")):
        layout = ra.balanced(mask, TOKENS, RANKS)
        for rank in range(RANKS):
            assert layout(TOKENS, RANKS, rank) == layout_module.ranges(twin, TOKENS, RANKS, rank)


def test_documents_that_fit_stay_whole_and_travel_nowhere():
    lengths = [2048, 512, 1024, 512, 512, 2048, 512, 1024]
    mask = ra.Documents(tuple(np.cumsum([0, *lengths]).tolist()), causal=False)
    work = ra.cost(mask, ra.balanced(mask, 8192, 2), 8192, 2)
    assert (len(work.hop_tiles), work.rows) == (1, 0)


def test_whole_documents_travel_less_than_documents_dealt_out():
    mask = packing(10)
    assert ra.cost(mask, ra.balanced(mask, TOKENS, RANKS), TOKENS, RANKS).rows < 5 * TOKENS  # striped: 7


def test_the_work_of_batch_rows_is_added_up():
    mask = ra.Rows(ra.Causal(), ra.Full())
    work = ra.cost(mask, ra.balanced(mask, 8192, 4), 8192, 4)
    assert work.lockstep_balance <= 1.01
    assert work.single_tiles == 64 * 65 // 2 + 64 * 64


def test_every_rank_makes_the_same():
    first = ra.balanced(packing(3), TOKENS, RANKS)
    balance_module._balanced.cache_clear()
    again = ra.balanced(packing(3), TOKENS, RANKS)
    assert again is not first
    assert (again, hash(again)) == (first, hash(first))
    assert layout_module.fingerprint(again) == layout_module.fingerprint(first)


@pytest.mark.parametrize("name", masks())
def test_a_ring_is_one_device(name):
    torch.manual_seed(0)
    mask, n = masks(40)[name], 40
    q, k, v = (torch.randn(2, n, heads, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    dout = torch.randn(2, n, 4, 4, dtype=torch.float64)
    want = naive_attention(q, k, v, mask)
    grads = torch.autograd.grad(want, (q, k, v), dout)
    for world_size in (2, 3, 4):
        ring, layout = virtual(world_size), ra.balanced(mask, n, world_size)
        outs = ring.attention(*(ring.shard(x, layout) for x in (q, k, v)), mask=mask, layout=layout)
        got = ring.unshard(outs, layout)
        assert_matches(got, want, rtol=1e-12, name=f"world size {world_size}: out")
        for label, a, b in zip(("dq", "dk", "dv"), torch.autograd.grad(got, (q, k, v), dout), grads, strict=True):
            assert_matches(a, b, rtol=1e-12, name=f"world size {world_size}: {label}")


@pytest.mark.parametrize(
    ("mask", "want"),
    [
        (ra.Causal(), "zigzag"),
        (ra.Full(), "contiguous"),
        (ra.Window(100), "contiguous"),
        (ra.Chunked(1024), "contiguous"),
    ],
)
def test_the_choice_for_simple_masks_is_a_name(mask, want):
    assert ra.choose_layout(mask, 8192, 4) == want


def test_the_choice_costs_least_in_time_and_then_in_rows():
    for mask in (ra.PrefixLM(5000), ra.Documents((0, 5000, 5600, 8192)), ra.Causal() & ra.Window(3000), ra.Window(0)):
        candidates = [*ra.layouts(), ra.balanced(mask, 8192, 4)]
        costs = [ra.cost(mask, layout, 8192, 4) for layout in candidates]
        keys = [(work.lockstep_tiles, work.rows) for work in costs]
        assert ra.choose_layout(mask, 8192, 4) == candidates[keys.index(min(keys))]


def test_packings_choose_what_is_balanced():
    assert ra.choose_layout(packing(0), TOKENS, RANKS) == ra.balanced(packing(0), TOKENS, RANKS)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ra.balanced("causal", 8, 2),
            r"balanced: mask is 'causal'; it must be a mask such as ringattn.Causal\(\)",
        ),
        (lambda: ra.balanced(ra.Causal(), 8, 0), r"balanced: seqlen 8, world_size 0, rank 0; needs seqlen >= 0"),
        (
            lambda: ra.balanced(ra.Documents((0, 5)), 8, 2),
            r"balanced: mask Documents is for 5 tokens and the sequence has 8",
        ),
        (
            lambda: ra.balanced(ra.Causal(), 8, 2)(9, 2, 0),
            r"balanced: it was made for 8 tokens on 2 ranks and is used for 9 on 2; they must agree. Make one with",
        ),
        (
            lambda: ra.shard(torch.zeros(1, 8), "auto"),
            r"layout is 'auto'; it must be one layout before tensors are cut. Take ringattn.choose_layout\(mask, seqlen, world_size\)",
        ),
        (
            lambda: ra.ring_attention(*torch.zeros(3, 1, 8, 1, 4).unbind(), layout="auto"),
            r"layout is 'auto'; it must be one layout before tensors are cut",
        ),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()
