"""The loss of the global batch."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ndwrap.mesh import check_mesh

__all__ = ["global_loss"]


def global_loss(loss: Tensor, mesh: DeviceMesh) -> Tensor:
    """The loss of the global batch, weighted by token, the same on every rank.

    A rank's loss is scaled so that the mean over the data and context parallel ranks is the mean over all labelled
    tokens (`ringattn.hf.attach`). This is that mean: detached, for logging; `backward` belongs to the rank's own loss.

    Args:
        loss: `[]`, what the model returned on this rank.
        mesh: of `init_mesh`. Every rank must call.

    Raises:
        ValueError: `loss` is not a scalar, or the mesh is not one of `init_mesh`.
    """
    check_mesh("global_loss", mesh)
    if loss.ndim != 0:
        raise ValueError(
            f"global_loss: loss has the shape {tuple(loss.shape)}; it must be a scalar. Give the loss of the model."
        )
    ranks = mesh["dp_cp"]
    total = loss.detach().clone()
    dist.all_reduce(total, group=ranks.get_group())
    return total / ranks.size()
