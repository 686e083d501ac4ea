"""Philox against the known answers of Random123, and what dropout makes of it."""

import pytest
import torch

from ringattn.kernels import Options
from ringattn.kernels.philox import keep_mask, philox

KNOWN = [  # Random123, kat_vectors, philox4x32-10: counter, key, words
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_known_answers(counter, key, want):
    got = philox(tuple(torch.tensor(word) for word in words(counter)), tuple(words(key)))
    assert [int(word) for word in got] == words(want)


def test_keep_mask_counts_by_key_query_head_and_batch_row():
    options = Options(1.0, dropout_p=0.5, seed=(7 << 32) + 9, head_offset=5)
    q_pos, k_pos = torch.tensor([3, 8], dtype=torch.int32), torch.tensor([0, 2, 90000], dtype=torch.int32)
    got = keep_mask(options, q_pos, k_pos, 2, 2, torch.device("cpu"))
    for b, h, i, j in torch.cartesian_prod(*(torch.arange(n) for n in got.shape)).tolist():
        counter = tuple(torch.tensor(int(x)) for x in (k_pos[j], q_pos[i], 5 + h, b))
        assert bool(got[b, h, i, j]) == (int(philox(counter, (9, 7))[0]) >= 2**31)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 2**64 - 1])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_keep_rate(seed, p):
    position = torch.arange(256)
    kept = keep_mask(Options(1.0, dropout_p=p, seed=seed), position, position, 1, 2, torch.device("cpu"))
    # Six standard deviations of a binomial share.
    assert abs(kept.double().mean().item() - (1 - p)) < 6 * (p * (1 - p) / kept.numel()) ** 0.5


def test_nothing_is_dropped_at_p_zero():
    position = torch.arange(64)
    assert keep_mask(Options(1.0), position, position, 1, 1, torch.device("cpu")).all()


@pytest.mark.parametrize("change", [{"seed": 2}, {"seed": 1 + 2**32}, {"head_offset": 1}])
def test_seed_and_head_change_the_mask(change):
    position = torch.arange(64)
    masks = [
        keep_mask(Options(1.0, dropout_p=0.5, **arguments), position, position, 1, 1, torch.device("cpu"))
        for arguments in ({"seed": 1}, {"seed": 1} | change)
    ]
    assert 0.4 < (masks[0] != masks[1]).double().mean().item() < 0.6


def test_tiles_are_cut_from_one_mask():
    options, position = Options(1.0, dropout_p=0.5, seed=1), torch.arange(40)
    whole = keep_mask(options, position, position, 2, 3, torch.device("cpu"))
    part = keep_mask(options, position[7:19], position[30:], 2, 3, torch.device("cpu"))
    assert part.tolist() == whole[:, :, 7:19, 30:].tolist()
