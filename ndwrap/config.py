"""How many ranks each axis of the mesh has."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import yaml

__all__ = ["NDConfig"]


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
