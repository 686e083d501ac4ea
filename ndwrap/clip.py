"""Clipping by the global gradient norm, whatever each gradient is sharded over."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

__all__ = ["clip_grad_norm_"]

Bucket = tuple[DeviceMesh | None, tuple[int, ...]]  # a mesh, and the axes over which gradients are split


def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale the gradients so that their global norm is at most `max_norm`, and return the norm before.

    The norm is that of the gradients of one process, the same on every rank: shards are added up, replicas counted
    once. Parameters may be plain tensors (taken as the same on every rank) or DTensors, on several meshes. Sums are in
    fp64. If the norm is not finite, the gradients are left as they are, so that the caller can skip the step.

    A parameter may have a gradient on some ranks only, unless that gradient is partial: then it must have one on every
    rank of its mesh, because summing it up is a collective of them all.

    Args:
        model: every rank must call with its own part of the same model.
        max_norm: a number >= 0.
        norm_type: 2.0 (default) or infinity.
        error_if_nonfinite: raise if the norm is not finite, default False.

    Returns:
        `[]`, a plain tensor on the device of the gradients, fp32 (fp64 for fp64 gradients).

    Raises:
        ValueError: `norm_type` is neither 2 nor infinity, or `max_norm` is negative or NaN.
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> layer(torch.full((1, 1), 4.0)).backward()
        >>> clip_grad_norm_(layer, 1.0)
        tensor(4.)
        >>> layer.weight.grad
        tensor([[1.0000]])
    """
    if norm_type not in (2.0, math.inf):
        raise ValueError(f"clip_grad_norm_: norm_type is {norm_type}; it must be 2.0 or infinity.")
    if not max_norm >= 0:
        raise ValueError(f"clip_grad_norm_: max_norm is {max_norm}; it must be a number >= 0.")

    # Buckets come from the parameters, not from the gradients: every rank reduces the same ones in the same order, also
    # when a parameter has a gradient on some ranks only. Summing up a partial gradient is the exception: see above.
    parts: dict[Bucket, list[Tensor]] = {}
    grads: list[Tensor] = []
    dtype = torch.float32
    device = torch.device("cpu")
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        device = parameter.device
        part = parts.setdefault(_bucket(parameter), [])
        grad = parameter.grad
        if grad is None:
            continue
        dtype = torch.promote_types(dtype, grad.dtype)
        grads.append(_local(grad))
        if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
            grad = grad.redistribute(placements=parameter.placements)  # a partial gradient: its norm is that of the sum
        part.append(_local(grad))

    power = _SquareSum if norm_type == 2.0 else _Largest
    norms = [power.reduced(bucket, part, device) for bucket, part in parts.items()]
    norm = power.root(norms, device)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"clip_grad_norm_: the norm of the gradients is {norm.item()}; skip the step or lower the learning rate."
        )

    scale = torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)
    for grad in grads:
        grad.mul_(scale.to(grad.dtype))  # linear, so right for a partial gradient too
    return norm.to(dtype)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bucket(parameter: Tensor) -> Bucket:
    if not isinstance(parameter, DTensor):
        return None, ()
    # FSDP2 over TP gives placements that are neither Shard nor Replicate, so ask for "not a replica"
    return parameter.device_mesh, tuple(
        i for i, placement in enumerate(parameter.placements) if not placement.is_replicate()
    )


def _all_reduce(value: Tensor, bucket: Bucket, op: dist.ReduceOp.RedOpType) -> Tensor:
    mesh, axes = bucket
    for axis in axes:
        assert mesh is not None
        if mesh.size(axis) > 1:
            dist.all_reduce(value, op=op, group=mesh.get_group(axis))
    return value


class _SquareSum:
    """The 2-norm: square sums add up over shards and over buckets."""

    @staticmethod
    def reduced(bucket: Bucket, part: list[Tensor], device: torch.device) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=device)
        for grad in part:
            total += torch.linalg.vector_norm(grad, dtype=torch.float64) ** 2
        return _all_reduce(total, bucket, dist.ReduceOp.SUM)

    @staticmethod
    def root(norms: list[Tensor], device: torch.device) -> Tensor:
        return torch.stack([torch.zeros((), dtype=torch.float64, device=device), *norms]).sum().sqrt()


class _Largest:
    """The infinity norm: the largest magnitude, and NaN if there is one."""

    @staticmethod
    def reduced(bucket: Bucket, part: list[Tensor], device: torch.device) -> Tensor:
        largest = torch.zeros((), dtype=torch.float64, device=device)
        for grad in part:
            if grad.numel():
                largest = torch.maximum(largest, grad.abs().amax().double())
        # backends disagree on the maximum of a number and NaN, so NaN travels as a flag
        both = torch.stack([largest.nan_to_num(posinf=math.inf), largest.isnan().double()])
        largest, is_nan = _all_reduce(both, bucket, dist.ReduceOp.MAX)
        return torch.where(is_nan > 0, math.nan, largest)

    @staticmethod
    def root(norms: list[Tensor], device: torch.device) -> Tensor:
        return torch.stack([torch.zeros((), dtype=torch.float64, device=device), *norms]).amax()
