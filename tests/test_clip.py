"""The global norm of gradients that are plain, sharded in every way, replicated and partial at once."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ndwrap import clip_grad_norm_
from tests.models import full, mesh_of
from tests.processes import run


def gradients():
    """Whole gradients by name; uneven over two ranks, one element, and of unlike size so that each one counts."""
    shapes = {
        "plain": (5,),
        "rows": (7, 3),
        "columns": (3, 5),
        "both": (4, 6),
        "replica": (6,),
        "one": (1,),
        "partial": (5, 2),
    }
    return {name: torch.randn(shape, dtype=torch.float64) * 3**i for i, (name, shape) in enumerate(shapes.items())}


def mixed(sizes):
    """A module with one parameter for each kind of placement, on two meshes; whole gradients beside it."""
    mesh = mesh_of(sizes)
    two, one = mesh["dp_shard", "cp"], mesh["dp_shard_cp"]
    torch.manual_seed(0)
    whole = gradients()
    placements = {
        "rows": (one, [Shard(0)]),
        "columns": (two, [Replicate(), Shard(1)]),
        "both": (two, [Shard(0), Shard(1)]),
        "replica": (two, [Replicate(), Replicate()]),
        "one": (one, [Shard(0)]),  # empty on every rank but one
        "partial": (two, [Replicate(), Shard(0)]),
    }
    model = nn.Module()
    for name, grad in whole.items():
        if name == "plain":
            parameter, grad = nn.Parameter(torch.zeros_like(grad)), grad.clone()
        else:
            on, where = placements[name]
            parameter = nn.Parameter(distribute_tensor(torch.zeros_like(grad), on, where, src_data_rank=None))
            grad = distribute_tensor(grad.clone(), on, where, src_data_rank=None)
        if name == "partial":  # the sum over the first axis is the gradient
            share = grad.to_local() * (0.25 if two.get_local_rank(0) == 0 else 0.75)
            grad = DTensor.from_local(share, two, [Partial(), Shard(0)], run_check=False, shape=(5, 2), stride=(2, 1))
        parameter.grad = grad
        model.register_parameter(name, parameter)
    model.register_parameter("frozen", nn.Parameter(torch.ones(2), requires_grad=False))
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    return model, whole


def clip_mixed(rank, world_size, sizes, max_norm, norm_type):
    model, whole = mixed(sizes)
    norm = clip_grad_norm_(model, max_norm, norm_type)
    want = torch.linalg.vector_norm(torch.cat([g.flatten() for g in whole.values()]), norm_type)
    scale = min(1.0, max_norm / (want.item() + 1e-6))
    for name, grad in whole.items():
        torch.testing.assert_close(full(model.get_parameter(name).grad), grad * scale, rtol=1e-13, atol=0)
    return type(norm), norm.dtype, norm.item(), want.item()


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_norm_and_gradients_of_mixed_parameters(max_norm, norm_type):
    results = run(4, clip_mixed, (1, 2, 2, 1), max_norm, norm_type)
    for kind, dtype, norm, want in results:
        assert (kind, dtype) == (torch.Tensor, torch.float64)
        assert norm == pytest.approx(want, rel=1e-14)
    assert len({norm for _, _, norm, _ in results}) == 1


def clip_strided(rank, world_size, sizes):
    """FSDP2 over TP: its placement of a weight split twice by rows is not a Shard."""
    mesh = mesh_of(sizes)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 6)).double()
    x, dout = torch.randn(3, 8).double(), torch.randn(3, 6).double()
    want = torch.linalg.vector_norm(
        torch.cat([g.flatten() for g in torch.autograd.grad(model(x), list(model.parameters()), dout)])
    )
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp_shard_cp"])
    model(x).backward(dout)
    assert "_StridedShard" in {type(p).__name__ for p in model[0].weight.placements}
    return clip_grad_norm_(model, 1e-3).item() / want.item()


def test_rows_split_by_fsdp_and_by_tp():
    assert run(4, clip_strided, (1, 2, 1, 2)) == pytest.approx([1.0] * 4, rel=1e-13)


def clip_nonfinite(rank, world_size, sizes, value, norm_type):
    """One bad element on one rank; the gradients must be left as they were on all."""
    model, _ = mixed(sizes)
    if rank == 1:
        model.rows.grad.to_local()[0, 0] = value
    before = [p.grad.to_local().clone() for p in model.parameters() if isinstance(p.grad, DTensor)]
    norm = clip_grad_norm_(model, 0.5, norm_type)
    after = [p.grad.to_local() for p in model.parameters() if isinstance(p.grad, DTensor)]
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
    try:
        clip_grad_norm_(model, 0.5, norm_type, error_if_nonfinite=True)
    except RuntimeError as error:
        return norm.item(), str(error)
    return norm.item(), None


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_returned_and_nothing_is_scaled(value, norm_type):
    for norm, message in run(4, clip_nonfinite, (1, 2, 2, 1), value, norm_type):
        assert str(norm) == str(value)
        assert (
            message
            == f"clip_grad_norm_: the norm of the gradients is {value}; skip the step or lower the learning rate."
        )


def test_one_process_agrees_with_torch_and_counts_shared_parameters_once():
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        model(torch.ones(2, 4)).square().sum().backward()
        models.append(model)
    want = nn.utils.clip_grad_norm_(models[0].parameters(), 0.1)
    torch.testing.assert_close(clip_grad_norm_(models[1], 0.1), want)
    for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_half_precision_is_summed_in_double():
    layer = nn.Linear(1, 1, bias=False)
    layer.weight = nn.Parameter(torch.zeros(70_000, dtype=torch.bfloat16))
    layer.weight.grad = torch.full((70_000,), 1e-3, dtype=torch.bfloat16)
    norm = clip_grad_norm_(layer, 1.0)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(70_000**0.5 * layer.weight.grad[0].item(), rel=1e-6)


def clip_absent(rank, world_size, sizes):
    """The norm where one rank has no gradient for a sharded parameter."""
    model, whole = mixed(sizes)
    if rank == 1:
        model.rows.grad = None
    whole["rows"] = whole["rows"][:4]  # rank 0 has rows 0 to 3 of 7
    want = torch.linalg.vector_norm(torch.cat([g.flatten() for g in whole.values()]))
    return clip_grad_norm_(model, 1.0).item() / want.item()


def test_a_gradient_may_be_absent_on_some_ranks():
    assert run(2, clip_absent, (1, 2, 1, 1)) == pytest.approx([1.0] * 2, rel=1e-13)


def test_without_gradients_the_norm_is_zero():
    assert clip_grad_norm_(nn.Linear(2, 2), 1.0).item() == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.0, 1.0), r"norm_type is 1\.0; it must be 2\.0 or infinity"),
        ((-1.0,), r"max_norm is -1\.0; it must be a number >= 0"),
        ((math.nan,), "max_norm is nan"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        clip_grad_norm_(nn.Linear(2, 2), *arguments)
