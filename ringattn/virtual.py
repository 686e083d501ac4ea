"""A ring of W ranks in one process, with the scheduler, plan and kernels that run over processes: for tests and measurements."""

import torch
from torch import Tensor

from ringattn import ops
from ringattn.api import arguments
from ringattn.layout import Layout, positions
from ringattn.masks import Causal, Mask
from ringattn.transport import VirtualWorld

__all__ = ["VirtualRing", "virtual"]


class VirtualRing:
    """W ranks of a ring in this process, for tests without processes; made by `virtual`.

    Attributes:
        world_size: number of ranks.
        events: the order of things, as `(rank, "post" | "compute" | "wait", offset of the hop)`; offsets below 0 are gradients on
            their way home. Clear the list to start anew.
    """

    def __init__(self, world_size: int) -> None:
        self._world = VirtualWorld(world_size)
        self.world_size = world_size
        self.events: list[tuple[int, str, int]] = []
        self._world.events = self.events

    def shard(self, x: Tensor, layout: Layout = "zigzag", dim: int = 1) -> list[Tensor]:
        """Every rank's rows of `x` along `dim`; differentiable."""
        ranks = range(self.world_size)
        return [x.index_select(dim, positions(layout, x.shape[dim], self.world_size, r).to(x.device)) for r in ranks]

    def unshard(self, shards: list[Tensor], layout: Layout = "zigzag", dim: int = 1) -> Tensor:
        """The whole tensor out of every rank's rows, the inverse of `shard`; differentiable."""
        seqlen = sum(s.shape[dim] for s in shards)
        rows = torch.cat([positions(layout, seqlen, self.world_size, r) for r in range(self.world_size)])
        return torch.cat(shards, dim).index_select(dim, rows.argsort().to(shards[0].device))

    def attention(
        self,
        q: list[Tensor],
        k: list[Tensor],
        v: list[Tensor],
        *,
        mask: Mask | None = None,
        layout: Layout = "zigzag",
        seqlen: int | None = None,
        softmax_scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        dropout_p: float = 0.0,
        seed: int | None = None,
        head_offset: int = 0,
        backend: str = "auto",
        deterministic: bool | str = False,
        validate: bool = True,
        return_lse: bool = False,
    ) -> list[Tensor] | tuple[list[Tensor], list[Tensor]]:
        """`ringattn.ring_attention` of all ranks at once: lists of W shards in, lists of W results out; differentiable.

        The same scheduler, plan and kernels as over processes; only the transport differs. `seqlen` is by default the number of
        rows in all shards. The gradient of `sinks` is the sum over ranks.
        """
        args = arguments(
            Causal() if mask is None else mask,
            layout,
            self._world,
            sum(x.shape[1] for x in q) if seqlen is None else seqlen,
            softmax_scale,
            softcap,
            dropout_p,
            seed,
            head_offset,
            backend,
            deterministic,
            None,
            validate,
        )
        out, lse = ops.attention(q, k, v, sinks, args)
        return (out, lse) if return_lse else out


def virtual(world_size: int) -> VirtualRing:
    """A ring of `world_size` ranks in this process.

    Its transport moves bytes as late as it may and fills what has not arrived with NaN, so that a missing wait is a wrong number.

    Raises:
        ValueError: `world_size` is below 1.

    Example:
        >>> from ringattn.testing import assert_matches, naive_attention
        >>> ring = virtual(3)
        >>> q = torch.randn(1, 10, 2, 4)
        >>> outs = ring.attention(ring.shard(q), ring.shard(q), ring.shard(q))
        >>> assert_matches(ring.unshard(outs), naive_attention(q, q, q, Causal()), rtol=1e-6)
    """
    return VirtualRing(world_size)
