"""The axes of the mesh, which ranks its groups hold, and meshes that the processes do not fill."""

import os
import warnings

import pytest
import torch
import torch.distributed as dist

from ndwrap import NDConfig, global_loss, init_mesh
from ndwrap.mesh import AXES, check_mesh
from tests import processes
from tests.processes import run


def groups(rank, world_size, names):
    mesh = init_mesh(NDConfig(dp_replicate_size=2, cp_size=2), "cpu")
    return mesh.mesh_dim_names, {name: dist.get_process_group_ranks(mesh[name].get_group()) for name in names}


def test_every_axis_exists_and_flattened_meshes_hold_the_right_ranks():
    names = (*AXES, "dp", "dp_shard_cp", "dp_cp")
    results = run(4, groups, names)
    assert [axes for axes, _ in results] == [("dp_replicate", "dp_shard", "cp", "tp")] * 4
    want = {  # of rank 2: dp_replicate 1, cp 0
        "dp_replicate": [0, 2],
        "dp_shard": [2],
        "cp": [2, 3],
        "tp": [2],
        "dp": [0, 2],
        "dp_shard_cp": [2, 3],
        "dp_cp": [0, 1, 2, 3],
    }
    assert results[2][1] == want


def mismatch(rank, world_size):
    try:
        init_mesh(NDConfig(dp_shard_size=2, cp_size=2), "cpu")
    except ValueError as error:
        return str(error)


def test_sizes_that_do_not_fill_the_world_raise_on_every_rank():
    message = "dp_shard_size * cp_size * tp_size = 1*2*2*1 = 4 but the world size is 2; launch 4 processes"
    answers = run(2, mismatch)
    assert answers == [answers[0]] * 2
    assert message in answers[0]


def test_the_sizes_are_checked_before_torch_distributed_is_started(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="= 2 but the world size is 3"):
        init_mesh(NDConfig(cp_size=2), "cpu")
    assert not dist.is_initialized()


def test_without_torchrun_it_is_a_mesh_of_one_process():
    mesh = init_mesh(NDConfig(dp_shard_size=-1), "cpu")
    try:
        assert mesh.shape == (1, 1, 1, 1)
        assert mesh["dp_cp"].size() == 1
    finally:
        dist.destroy_process_group()


@pytest.fixture
def devices(monkeypatch):
    """Two CUDA devices to look at; torch.distributed must not be started on them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    started = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    def start(backend, **kwargs):
        started.append(backend)
        raise InterruptedError

    monkeypatch.setattr(dist, "init_process_group", start)
    return started


@pytest.mark.parametrize(
    ("world_size", "local", "backend"),
    [(2, None, "nccl"), (4, 2, "nccl"), (3, None, "gloo"), (8, 4, "gloo")],
)
def test_cuda_is_picked_if_every_process_of_the_host_has_a_device(monkeypatch, devices, world_size, local, backend):
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local or ""))
    with pytest.raises(InterruptedError):
        init_mesh(NDConfig(cp_size=world_size))
    assert devices == [backend]


def test_more_processes_than_devices_are_refused_on_cuda(monkeypatch, devices):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(
        ValueError, match=r"init_mesh: device_type is 'cuda'; .* 4 processes .* 2 CUDA devices, .*'cpu'"
    ):
        init_mesh(NDConfig(cp_size=8), "cuda")
    assert devices == []


def test_a_mesh_with_other_axes_is_refused():
    class Mesh:
        mesh_dim_names = ("fsdp", "tp")

    with pytest.raises(
        ValueError, match=r"parallelize: mesh has the axes \('fsdp', 'tp'\); .* Make the mesh with ndwrap.init_mesh"
    ):
        check_mesh("parallelize", Mesh())
    with pytest.raises(ValueError, match="global_loss: mesh has the axes"):
        global_loss(None, Mesh())


def make_with_hosts_of(rank, world_size, processes_of_a_host):
    os.environ["LOCAL_WORLD_SIZE"] = str(processes_of_a_host)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        init_mesh(NDConfig(tp_size=2, cp_size=world_size // 2), "cpu")
    return [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]


def test_tensor_parallel_ranks_on_several_hosts_are_a_warning():
    first, *others = processes.run_fresh(4, make_with_hosts_of, 1)
    assert first == [
        "init_mesh: tp_size is 2 and a host has 1 processes, so that ranks of one tp group are on several hosts and every layer waits for "
        "the network several times. Choose a tp_size that divides the processes of a host."
    ]
    assert others == [[]] * 3
    assert processes.run_fresh(4, make_with_hosts_of, 2) == [[]] * 4
