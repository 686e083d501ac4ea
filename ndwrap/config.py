"""How many ranks each axis of the mesh has."""

import argparse
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import yaml

from ndwrap import _env

__all__ = ["NDConfig"]

# What Axolotl calls the fields that it has other names for.
AXOLOTL = {"cp_size": "context_parallel_size", "tp_size": "tensor_parallel_size"}
MEANINGS = {
    "dp_replicate_size": "groups that hold the whole model each",
    "dp_shard_size": "data parallel ranks that share one copy of the model",
    "cp_size": "ranks that share each sequence",
    "tp_size": "ranks that share each matrix product",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NDConfig:
    """The sizes of the mesh, with the field names of Accelerate's `ParallelismConfig`.

    One size may be -1: what the others leave of the world size, see `resolve`.

    Args:
        dp_replicate_size: groups that hold the whole model each, default 1.
        dp_shard_size: data parallel ranks that share one copy of the model, default 1. Context parallel ranks share
            it too.
        cp_size: ranks that share each sequence, default 1.
        tp_size: ranks that share each matrix product, default 1.

    Raises:
        ValueError: a size is neither an integer >= 1 nor -1, or more than one is -1.

    It is read from, and written to, a mapping, a YAML file, a command line, Accelerate's environment variables and
    `ParallelismConfig`, and Axolotl's names.

    Example:
        >>> NDConfig(dp_shard_size=2, cp_size=4).total_size
        8
    """

    dp_replicate_size: int = 1
    dp_shard_size: int = 1
    cp_size: int = 1
    tp_size: int = 1

    def __post_init__(self) -> None:
        for name, size in self.sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
                raise ValueError(
                    f"NDConfig: {name} is {size!r}; it must be an integer >= 1, or -1 for what the other sizes leave."
                )
        left = [name for name, size in self.sizes.items() if size == -1]
        if len(left) > 1:
            raise ValueError(
                f"NDConfig: {' and '.join(left)} are -1; only one size can be what the others leave. Give the rest."
            )

    @classmethod
    def from_dict(cls, sizes: Mapping[str, Any]) -> Self:
        """The config of a mapping whose keys are the field names, with `-` or `_`.

        Raises:
            ValueError: a key is not a field.

        Example:
            >>> NDConfig.from_dict({"cp-size": 2}).cp_size
            2
        """
        sizes = {str(name).replace("-", "_"): size for name, size in sizes.items()}
        known = [field.name for field in dataclasses.fields(cls)]
        for name in sizes:
            if name not in known:
                raise ValueError(f"NDConfig: {name!r} is not a size of the mesh; the sizes are {', '.join(known)}.")
        return cls(**sizes)

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """The config of a YAML file that holds nothing but sizes, as for `from_dict`.

        Raises:
            ValueError: the file is not a mapping, or a key is not a field.
        """
        sizes = yaml.safe_load(Path(path).read_text())
        if sizes is not None and not isinstance(sizes, dict):
            raise ValueError(
                f"NDConfig: {path} holds a {type(sizes).__name__}; it must be a mapping such as `cp_size: 2`."
            )
        return cls.from_dict(sizes or {})

    def to_yaml(self, path: str | Path) -> None:
        """Write the sizes to a file that `from_yaml` reads."""
        Path(path).write_text(yaml.safe_dump(self.sizes, sort_keys=False))

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add `--dp-replicate-size`, `--dp-shard-size`, `--cp-size` and `--tp-size` to a command line; the default of each is 1."""
        group = parser.add_argument_group("mesh", "sizes of the mesh; one may be -1, what the others leave")
        for name, size in cls().sizes.items():
            group.add_argument(
                f"--{name.replace('_', '-')}",
                type=int,
                default=size,
                metavar="N",
                help=f"{MEANINGS[name]} (default: %(default)s)",
            )

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        """The config of a command line with `add_arguments`.

        Example:
            >>> parser = argparse.ArgumentParser()
            >>> NDConfig.add_arguments(parser)
            >>> NDConfig.from_args(parser.parse_args(["--cp-size", "4"])).cp_size
            4
        """
        return cls(**{field.name: getattr(args, field.name) for field in dataclasses.fields(cls)})

    def to_args(self) -> list[str]:
        """The command line that `from_args` reads.

        Example:
            >>> NDConfig(cp_size=4).to_args()[4:]
            ['--cp-size', '4', '--tp-size', '1']
        """
        return [text for name, size in self.sizes.items() for text in (f"--{name.replace('_', '-')}", str(size))]

    @classmethod
    def from_env(cls) -> Self:
        """The config of the variables `PARALLELISM_CONFIG_DP_REPLICATE_SIZE` and so on, which `accelerate launch` sets; 1 where one is not set.

        Raises:
            ValueError: `PARALLELISM_CONFIG_SP_SIZE` is above 1. RuntimeError: one is no integer.
        """
        return cls._without_sp(
            _env.parallelism(field.name for field in dataclasses.fields(cls)), _env.parallelism(["sp_size"])
        )

    def to_env(self) -> dict[str, str]:
        """The variables that `from_env` reads.

        Example:
            >>> NDConfig(cp_size=4).to_env()["PARALLELISM_CONFIG_CP_SIZE"]
            '4'
        """
        return {_env.parallelism_name(name): str(size) for name, size in self.sizes.items()}

    @classmethod
    def from_accelerate(cls, parallelism: Any) -> Self:
        """The config of an Accelerate `ParallelismConfig`. The way back is `ParallelismConfig(**config.sizes)`, or
        `ndwrap.accelerate.RingParallelismConfig(**config.sizes)`.

        Raises:
            ValueError: its `sp_size` is above 1.
        """
        sizes = {field.name: getattr(parallelism, field.name) for field in dataclasses.fields(cls)}
        return cls._without_sp(sizes, {"sp_size": getattr(parallelism, "sp_size", 1)})

    @classmethod
    def from_axolotl(cls, settings: Mapping[str, Any]) -> Self:
        """The config of an Axolotl config, whatever else is in it: `dp_replicate_size`, `dp_shard_size`, `context_parallel_size`,
        `tensor_parallel_size`, each 1 where it is missing or null.

        Example:
            >>> NDConfig.from_axolotl({"context_parallel_size": 4, "sequence_len": 65536}).cp_size
            4
        """
        names = {field.name: AXOLOTL.get(field.name, field.name) for field in dataclasses.fields(cls)}
        return cls(**{name: 1 if (size := settings.get(theirs)) is None else size for name, theirs in names.items()})

    def to_axolotl(self) -> dict[str, int]:
        """The sizes by Axolotl's names."""
        return {AXOLOTL.get(name, name): size for name, size in self.sizes.items()}

    @classmethod
    def _without_sp(cls, sizes: Mapping[str, int], sp: Mapping[str, int | None]) -> Self:
        if (sp["sp_size"] or 1) > 1:
            raise ValueError(
                f"NDConfig: sp_size is {sp['sp_size']}; sequence parallelism over heads is not one of the axes here. Use cp_size."
            )
        return cls(**{name: 1 if size is None else size for name, size in sizes.items()})

    def resolve(self, world_size: int) -> Self:
        """The config for `world_size` ranks, with a number in place of -1.

        Raises:
            ValueError: the sizes do not multiply up to `world_size`.

        Example:
            >>> NDConfig(dp_shard_size=-1, cp_size=2).resolve(8).dp_shard_size
            4
        """
        left = [name for name, size in self.sizes.items() if size == -1]
        product = math.prod(size for size in self.sizes.values() if size != -1)
        factors = f"{' * '.join(self.sizes)} = {'*'.join(map(str, self.sizes.values()))}"
        if left and world_size % product:
            raise ValueError(
                f"NDConfig: {factors}, where {left[0]} is what the others leave, but those multiply to {product} and "
                f"the world size is {world_size}; launch a multiple of {product} processes or change a size."
            )
        if left:
            return dataclasses.replace(self, **{left[0]: world_size // product})
        if product != world_size:
            raise ValueError(
                f"NDConfig: {factors} = {product} but the world size is {world_size}; "
                f"launch {product} processes or change a size."
            )
        return self

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes by name, in the order of the mesh's axes."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def total_size(self) -> int:
        """Ranks of the mesh."""
        return self.data_parallel_size * self.non_data_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different batches: dp_replicate_size * dp_shard_size."""
        return self._product("dp_replicate_size", "dp_shard_size")

    @property
    def non_data_parallel_size(self) -> int:
        """Ranks that see the same batch: cp_size * tp_size."""
        return self._product("cp_size", "tp_size")

    def _product(self, first: str, second: str) -> int:
        a, b = self.sizes[first], self.sizes[second]
        if -1 in (a, b):
            raise ValueError(f"NDConfig: {first} is {a} and {second} is {b}; call resolve(world_size) first.")
        return a * b

    def __str__(self) -> str:
        return " x ".join(f"{name.removesuffix('_size')} {size}" for name, size in self.sizes.items())
