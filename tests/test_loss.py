"""The loss of the global batch is the mean over the data and context parallel ranks, and tp ranks count once."""

import pytest
import torch

from ndwrap import global_loss
from tests.models import mesh_of
from tests.processes import run


def losses(rank, world_size, sizes):
    loss = torch.tensor(float(2**rank), requires_grad=True)
    mean = global_loss(loss, mesh_of(sizes))
    return mean.item(), mean.requires_grad, loss.item()


@pytest.mark.parametrize(
    ("sizes", "want"),
    [
        ((1, 2, 2, 1), [15 / 4] * 4),
        ((2, 1, 2, 1), [15 / 4] * 4),
        (
            (1, 1, 2, 2),
            [5 / 2, 10 / 2] * 2,
        ),  # each tp rank averages over its own cp ranks: the same once their losses are
    ],
)
def test_mean_over_data_and_context_parallel_ranks(sizes, want):
    assert run(4, losses, sizes) == [(value, False, 2.0**rank) for rank, value in enumerate(want)]


def refusal(rank, world_size):
    with pytest.raises(ValueError, match=r"loss has the shape \(2,\); it must be a scalar"):
        global_loss(torch.zeros(2), mesh_of((1, 2, 1, 1)))
    return True


def test_a_loss_that_is_no_scalar_is_refused():
    assert run(2, refusal) == [True, True]
