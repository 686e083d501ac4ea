"""The environment that torchrun and `accelerate launch` give a process; no other module of the package reads it."""

import os
from collections.abc import Iterable

__all__ = ["local_rank", "local_world_size", "parallelism", "parallelism_name", "rank", "world_size"]


def _integer(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise RuntimeError(
            f"ndwrap: the environment variable {name} is {text!r}; it must be an integer. "
            "Launch with torchrun or accelerate, or unset it."
        ) from None


def world_size() -> int:
    """The number of processes, `WORLD_SIZE`; default 1."""
    return _integer("WORLD_SIZE", 1)


def rank() -> int:
    """The index of this process among all, `RANK`; default 0."""
    return _integer("RANK", 0)


def local_world_size(default: int) -> int:
    """The number of processes on this host, `LOCAL_WORLD_SIZE`."""
    return _integer("LOCAL_WORLD_SIZE", default)


def local_rank() -> int:
    """The index of this process on its host, `LOCAL_RANK`; default 0."""
    return _integer("LOCAL_RANK", 0)


def parallelism_name(size: str) -> str:
    """The variable of a size of the mesh, e.g. `PARALLELISM_CONFIG_CP_SIZE` of `cp_size`."""
    return f"PARALLELISM_CONFIG_{size.upper()}"


def parallelism(sizes: Iterable[str]) -> dict[str, int]:
    """Sizes of the mesh by name; 1 where the variable is not set."""
    return {size: _integer(parallelism_name(size), 1) for size in sizes}
