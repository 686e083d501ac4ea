"""Accelerate's own loop with ring attention: its `ParallelismConfig` with another context parallelism, and `attach`.

    parallelism = RingParallelismConfig(dp_shard_size=2, cp_size=4)            # was: ParallelismConfig(...)
    accelerator = Accelerator(parallelism_config=parallelism, ...)
    attach(model, accelerator)                                                 # new, before accelerator.prepare
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

Nothing of Accelerate is patched. Its context parallelism, which knows full causal attention only, never runs: it is told that there is
none, while the mesh, the data loader and the number of batches see all axes. The loop stays as it is, `maybe_context_parallel` too.
"""

import dataclasses
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import ringattn.hf
from ndwrap.config import NDConfig
from ndwrap.parallelize import apply_tp

__all__ = ["RingParallelismConfig", "attach", "attach_by_state"]


@dataclasses.dataclass
class RingParallelismConfig(ParallelismConfig):
    """Accelerate's `ParallelismConfig` whose `cp_size` ranks share each sequence by ring attention.

    Fields, environment variables, mesh axes and flattened meshes are Accelerate's. Data parallelism beside cp may be FSDP2, HSDP or, with
    `dp_shard_size=1`, copies (DDP).

    Raises:
        ValueError: `sp_size` is above 1, or, by `Accelerator`, the sizes do not multiply up to the number of processes.
    """

    def __post_init__(self) -> None:
        # Accelerate refuses copies of the model beside cp, since its own needs FSDP; so it is told of them afterwards
        replicas, self.dp_replicate_size = self.dp_replicate_size, 1
        super().__post_init__()
        self._set_size("dp_replicate", NDConfig.from_env().dp_replicate_size if replicas is None else replicas)
        NDConfig.from_accelerate(self)

    @property
    def cp_enabled(self) -> bool:
        """False: Accelerate's own context parallelism stays off."""
        return False

    @property
    def tp_enabled(self) -> bool:
        """False: `attach` applies tensor parallelism, and Accelerate's own stays off."""
        return False

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Axes along which ranks see the same batch."""
        return [*super().non_dp_dim_names, *["tp"] * (self.tp_size > 1), *self._cp]

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Axes over which the model is sharded."""
        return [*super().dp_shard_cp_dim_names, *self._cp]

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Axes over which the loss is averaged."""
        return [*super().dp_cp_dim_names, *self._cp]

    @property
    def _cp(self) -> list[str]:
        return ["cp"] * (self.cp_size > 1)

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Accelerate's mesh.

        Raises:
            ValueError: the sizes do not multiply up to the number of processes.
        """
        if self.total_size > 1:
            NDConfig.from_accelerate(self).resolve(dist.get_world_size())
        return super().build_device_mesh(device_type)

    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        if self.total_size == 1:  # as Accelerate has it: plain data parallelism
            self._set_size("dp_replicate", accelerator.num_processes)


def attach(model: nn.Module, accelerator: Accelerator, layout: Any = "zigzag", **options: Any) -> nn.Module:
    """Tensor parallelism over the tp axis and `ringattn.hf.attach` over the cp axis of the accelerator, before `accelerator.prepare`; the
    same model.

    Afterwards the loop gives the model the whole batch, as the prepared data loader yields it: the same on the cp ranks of a data rank, another on
    each data rank. `outputs.loss` is such that its mean over ranks is the loss of the global batch, and so are the gradients that FSDP2 or
    DDP average; `accelerator.reduce(loss, "mean")` is that loss. `accelerator.clip_grad_norm_` is right as it is.

    Args:
        model: loaded with `attn_implementation="ringattn"`, or any other, which is changed. options: those of `ringattn.hf.attach`.

    Raises:
        ValueError: the accelerator's `parallelism_config` is no `RingParallelismConfig`, or it has tp without FSDP2.
        NotImplementedError: as `ringattn.hf.attach`.
    """
    return attach_by_state("ndwrap.accelerate.attach", model, accelerator.state, layout, **options)


def attach_by_state(who: str, model: Any, state: AcceleratorState, layout: Any, **options: Any) -> Any:
    """`attach` where there is no accelerator at hand; `who` is what messages name."""
    parallelism = state.parallelism_config
    if not isinstance(parallelism, RingParallelismConfig):
        raise ValueError(
            f"{who}: parallelism_config is a {type(parallelism).__name__}; it must be a RingParallelismConfig. Pass "
            "parallelism_config=ndwrap.accelerate.RingParallelismConfig(cp_size=...)."
        )
    mesh: DeviceMesh | None = state.device_mesh
    names = () if mesh is None else mesh.mesh_dim_names or ()

    def group(axis: str, *parts: str) -> dist.ProcessGroup | None:
        return mesh[axis].get_group() if mesh is not None and set(parts) & set(names) else None

    model.set_attn_implementation("ringattn")
    if mesh is not None and "tp" in names:
        if not state.is_fsdp2:
            raise ValueError(
                f"{who}: tp_size is {parallelism.tp_size} without FSDP2; DDP takes no tensor parallel weights. Pass "
                "fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)."
            )
        apply_tp(model, mesh["tp"])
    data_group = group("dp", "dp_replicate", "dp_shard")
    return ringattn.hf.attach(model, group("cp", "cp"), layout, data_group=data_group, **options)
