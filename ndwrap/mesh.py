"""The device mesh: four axes, and the flattened ones by which losses and gradients are reduced."""

import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ndwrap import _env
from ndwrap.config import NDConfig

__all__ = ["AXES", "FLATTENED", "check_mesh", "init_mesh"]

AXES = ("dp_replicate", "dp_shard", "cp", "tp")
# data parallel; what FSDP shards over; what the loss is averaged over
FLATTENED = {"dp": AXES[:2], "dp_shard_cp": AXES[1:3], "dp_cp": AXES[:3]}

# torch asks its users to keep flattened meshes themselves, but mesh["dp"] is what everybody writes, Accelerate too
warnings.filterwarnings("ignore", message="Slicing a flattened dim from root mesh")


def init_mesh(config: NDConfig, device_type: str | None = None) -> DeviceMesh:
    """The mesh of `config` over all ranks, with axes `dp_replicate`, `dp_shard`, `cp`, `tp`, those of size 1 too.

    `mesh["dp"]`, `mesh["dp_shard_cp"]` and `mesh["dp_cp"]` are the flattened meshes. `torch.distributed` is initialised
    if it is not: from torchrun's variables, with NCCL on CUDA (each rank on the device of its local rank) and gloo on
    the CPU. Without torchrun it is a mesh of one process.

    Consecutive ranks, which torchrun starts on one host, go to tp first, then to cp, then to the data axes: what is exchanged most
    often stays inside of a host. A warning says where tp cannot.

    Args:
        config: sizes of the axes; one may be -1.
        device_type: "cuda" or "cpu"; None (default) is CUDA if there is a device for every process of this host. Their
            number is `LOCAL_WORLD_SIZE`, or the world size where that is not set.

    Raises:
        ValueError: the sizes do not multiply up to the world size; on every rank, before any communication. Or this
            host has fewer CUDA devices than processes, which are to be started on them.

    Example:
        >>> mesh = init_mesh(NDConfig(), "cpu")  # doctest: +SKIP
        >>> mesh["dp_shard_cp"].size()  # doctest: +SKIP
        1
    """
    world_size = dist.get_world_size() if dist.is_initialized() else _env.world_size()
    config = config.resolve(world_size)
    processes = _env.local_world_size(world_size)
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device_type = device_type or ("cuda" if processes <= devices else "cpu")
    if not dist.is_initialized():
        if device_type == "cuda":
            if processes > devices:
                raise ValueError(
                    f"init_mesh: device_type is 'cuda'; this host has {processes} processes (LOCAL_WORLD_SIZE, or else "
                    f"the world size) and {devices} CUDA devices, and each process must have its own. Launch fewer "
                    "processes, or pass 'cpu'."
                )
            torch.cuda.set_device(_env.local_rank())
        backend = "nccl" if device_type == "cuda" else "gloo"
        store = dist.HashStore() if world_size == 1 else None  # one process needs no rendezvous
        dist.init_process_group(backend, store=store, rank=_env.rank(), world_size=world_size)
    if config.tp_size > 1 and processes % config.tp_size and dist.get_rank() == 0:
        warnings.warn(
            f"init_mesh: tp_size is {config.tp_size} and a host has {processes} processes, so that ranks of one tp group are on several "
            "hosts and every layer waits for the network several times. Choose a tp_size that divides the processes of a host.",
            RuntimeWarning,
            stacklevel=2,
        )
    mesh = init_device_mesh(device_type, tuple(config.sizes.values()), mesh_dim_names=AXES)
    for name, axes in FLATTENED.items():
        mesh[axes]._flatten(name)
    return mesh


def check_mesh(caller: str, mesh: DeviceMesh) -> None:
    """Raise a ValueError if `mesh` is not one of `init_mesh`."""
    names = mesh.mesh_dim_names
    if names != AXES:
        raise ValueError(
            f"{caller}: mesh has the axes {names}; they must be {AXES}. Make the mesh with ndwrap.init_mesh."
        )
