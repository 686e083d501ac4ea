import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import torch

import ringattn as ra
from ringattn import masks as masks_module
from ringattn.testing import visible
from tests.cases import SEQLEN, masks


def counts(mask, n):
    """How many intervals hold each pair, [N, N] or [B, N, N]."""
    keys = torch.arange(n)
    return sum(
        ((lo[..., None] <= keys) & (keys < hi[..., None])).int() for lo, hi in mask.intervals(torch.arange(n))
    ) + torch.zeros(n, n, dtype=torch.int32)


@pytest.mark.parametrize("n", [SEQLEN, 24])
@pytest.mark.parametrize("name", masks())
def test_intervals_are_the_predicate_and_disjoint(name, n):
    mask = masks(n)[name]
    torch.testing.assert_close(counts(mask, n), visible(mask, n).int().expand_as(counts(mask, n)), rtol=0, atol=0)


def test_random_unions_and_intersections():
    generator = torch.Generator().manual_seed(3)
    pool = [m for m in masks().values() if m.batch is None]
    for _ in range(150):
        a, b, c = (pool[i] for i in torch.randint(len(pool), (3,), generator=generator).tolist())
        mask = (a | b) & c if torch.rand((), generator=generator) < 0.5 else a | (b & c)
        torch.testing.assert_close(counts(mask, SEQLEN), visible(mask, SEQLEN).int(), rtol=0, atol=0, msg=repr(mask))


def test_some_rows_only():
    rows = torch.tensor([2, 5, 6, 11])
    for name, mask in masks().items():
        whole, part = mask.intervals(torch.arange(SEQLEN)), mask.intervals(rows)
        if len(whole) == len(part):  # a union may need fewer intervals for some rows
            for (lo, hi), (part_lo, part_hi) in zip(whole, part, strict=True):
                torch.testing.assert_close(part_lo, lo[..., rows], rtol=0, atol=0, msg=name)
                torch.testing.assert_close(part_hi, hi[..., rows], rtol=0, atol=0, msg=name)


def test_a_union_of_touching_intervals_is_one():
    assert len((ra.Causal() | ra.Window(0, 4)).intervals(torch.arange(8))) == 1


@pytest.mark.parametrize("name", masks())
def test_code_says_which_mask_it_is(name):
    mask = masks()[name]
    again = masks_module.decode(mask.code)
    assert (again, hash(again), again.fingerprint, repr(again)) == (mask, hash(mask), mask.fingerprint, repr(mask))
    assert (again.seqlen, again.batch) == (mask.seqlen, mask.batch)
    assert mask.code.dtype == torch.int64
    torch.testing.assert_close(counts(again, SEQLEN), counts(mask, SEQLEN), rtol=0, atol=0)


def test_different_masks_differ():
    every = list(masks().values())
    assert len(set(every)) == len({m.fingerprint for m in every}) == len(every)
    assert ra.Window(3) != ra.Window(3, 1)
    assert ra.Window(None) != ra.Window(0)
    assert ra.Bounds([0, 0], [1, 1]) != ra.Bounds([0, 0], [1, 2])
    assert (ra.Causal() & ra.Window(1)) != (ra.Window(1) & ra.Causal())
    assert ra.Causal() != "causal"


def test_fingerprints_are_the_same_in_every_process():
    code = "from tests.cases import masks; print(*[m.fingerprint for m in masks().values()])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == [m.fingerprint for m in masks().values()]


def test_masks_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ra.Window(3).left = 4


def test_window_counts_the_other_tokens():
    # transformers: sliding_window=w lets row q see keys k with q - w < k <= q
    w, n = 4, 12
    q, k = torch.arange(n)[:, None], torch.arange(n)
    torch.testing.assert_close(counts(ra.Window(w - 1), n).bool(), (q - w < k) & (k <= q), rtol=0, atol=0)


def test_bounds_are_a_copy():
    lo, hi = torch.zeros(4, dtype=torch.int64), torch.arange(1, 5)
    mask = ra.Bounds(lo, hi)
    lo.fill_(3)
    assert mask.lo.tolist() == masks_module.decode(mask.code).lo.tolist() == [0] * 4
    assert ra.Bounds([0, 1], [1, 2]) == ra.Bounds(torch.tensor([0, 1]), torch.tensor([1, 2]))


def test_cu_seqlens_may_be_a_tensor():
    assert ra.Documents(torch.tensor([0, 4, 9])) == ra.Documents((0, 4, 9))
    assert ra.Documents((0, 4, 9)).seqlen == 9


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ra.Window(-1), r"Window: left is -1; it must be an integer of at least 0"),
        (lambda: ra.Window(2, True), r"Window: right is True; it must be an integer"),
        (lambda: ra.Chunked(0), r"Chunked: size is 0; it must be an integer of at least 1"),
        (lambda: ra.Chunked(4, -2), r"Chunked: offset is -2"),
        (lambda: ra.PrefixLM(1.5), r"PrefixLM: prefix is 1\.5"),
        (lambda: ra.Documents((1, 5)), r"Documents: cu_seqlens is \(1, 5\); it must start at 0"),
        (lambda: ra.Documents((0,)), r"Documents: cu_seqlens is \(0,\); it must start at 0 and end at the number"),
        (lambda: ra.Documents((0, 7, 4, 9)), r"Documents: cu_seqlens falls from 7 to 4; it must not decrease"),
        (lambda: ra.Spans(((3, 3),)), r"Spans: \(3, 3\) is empty or begins before 0"),
        (lambda: ra.Spans(((2, 6), (5, 8))), r"Spans: \(5, 8\) is empty or begins before 6; spans must be ordered"),
        (lambda: ra.Bounds([0] * 3, [0] * 4), r"Bounds: lo has shape \(3,\) and hi \(4,\); both must"),
        (lambda: ra.Bounds([[[0] * 3]], [[[0] * 3]]), r"Bounds: lo has shape \(1, 1, 3\)"),
        (lambda: ra.Bounds(torch.zeros(3), [1] * 3), r"Bounds: lo is torch.float32; it must hold integers"),
        (lambda: ra.Documents((0, 3.7, 6)), r"Documents: cu_seqlens is \(0, 3\.7, 6\); it must be a sequence of int"),
        (lambda: ra.Spans((0, 2)), r"Spans: a span is 0; it must be a sequence of integers"),
        (lambda: ra.Rows(ra.Causal(), None), r"Rows: got .*None.*; it needs one mask for each batch row"),
        (lambda: ra.Rows(), r"Rows: got \(\); it needs one mask for each batch row"),
        (lambda: ra.Rows(ra.Rows(ra.Causal())), r"Rows: got .*none of them for a whole batch"),
        (
            lambda: ra.Documents((0, 4)) & ra.Documents((0, 5)),
            r"And: its masks are for lengths 4 and 5; they must agree",
        ),
        (
            lambda: ra.Rows(ra.Causal()) | ra.Rows(ra.Full(), ra.Full()),
            r"Or: its masks are for batch sizes 1 and 2; they must agree",
        ),
        (lambda: ra.Causal() & 3, r"And: 3 is no mask; both sides must be masks"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_integers_of_numpy_and_torch_and_huge_ones():
    assert ra.Window(np.int64(2)) == ra.Window(torch.tensor(2)) == ra.Window(2)
    ((lo, hi),) = ra.Window(2**61, 2**61).intervals(torch.arange(3))
    assert (lo.tolist(), bool((hi >= 3).all())) == ([0, 0, 0], True)


def test_a_mask_made_under_inference_mode_serves_training():
    with torch.inference_mode():
        mask = ra.Rows(ra.Documents((0, 3, 8)))
    q = torch.randn(1, 8, 2, 4, requires_grad=True)
    ra.ring_attention(q, q, q, mask=mask).sum().backward()
    assert bool((q.grad != 0).any())


def test_a_kind_number_belongs_to_one_class():
    with pytest.raises(ValueError, match=r"Mine: kind 3 is Window's; choose a free number"):
        type("Mine", (ra.Mask,), {"KIND": 3})
