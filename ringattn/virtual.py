"""A ring of W ranks in one process, with the scheduler, plan and kernels that run over processes: for tests and measurements."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ringattn import ops, schedule
from ringattn.api import arguments
from ringattn.kernels import Options, Request, state_dtype
from ringattn.layout import Layout, positions
from ringattn.masks import Causal, Mask
from ringattn.network import Network
from ringattn.plan import build_plan
from ringattn.roofline import Sizes
from ringattn.timeline import Timeline
from ringattn.transport import VirtualWorld

__all__ = ["VirtualRing", "simulate", "virtual"]


class VirtualRing:
    """W ranks of a ring in this process, for tests without processes; made by `virtual`.

    Attributes:
        world_size: number of ranks.
        timeline: what each rank did when (`ringattn.Timeline`), in simulated seconds where there is a network; `timeline.clear()`
            starts anew.
    """

    def __init__(self, world_size: int, network: Network | None = None) -> None:
        self.world_size, self.timeline = world_size, Timeline()
        self._world = VirtualWorld(world_size, network, self.timeline)

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


def virtual(world_size: int, network: Network | None = None) -> VirtualRing:
    """A ring of `world_size` ranks in this process.

    Its transport moves bytes as late as it may and fills what has not arrived with NaN, so that a missing wait is a wrong number.
    With a `network` its timeline is in simulated seconds, the same on every run and machine.

    Raises:
        ValueError: `world_size` is below 1.

    Example:
        >>> from ringattn.testing import assert_matches, naive_attention
        >>> ring = virtual(3)
        >>> q = torch.randn(1, 10, 2, 4)
        >>> outs = ring.attention(ring.shard(q), ring.shard(q), ring.shard(q))
        >>> assert_matches(ring.unshard(outs), naive_attention(q, q, q, Causal()), rtol=1e-6)
    """
    return VirtualRing(world_size, network)


class _Nothing:
    """A backend that computes nothing."""

    name = "nothing"

    def supports(self, request: Request) -> str | None:
        return None

    def forward(self, *args: object, **kwargs: object) -> None:
        pass

    def delta(self, dout: Tensor, out: Tensor, dlse: Tensor) -> Tensor:
        return dlse

    def backward(self, *args: object) -> None:
        pass


def simulate(
    mask: Mask,
    layout: Layout,
    seqlen: int,
    world_size: int,
    *,
    network: Network,
    sizes: Sizes,
    passes: Sequence[str] = ("forward", "backward"),
) -> Timeline:
    """The timeline of one attention call on a simulated network: the scheduler runs, and nothing is computed or moved.

    Args:
        mask, layout, seqlen, world_size: as in `build_plan`. sizes: heads, head dims, dtype and batch.
        passes: which passes, one after the other; all ranks begin each together.

    Raises:
        ValueError: no plan can be made, or a pass has another name.

    Example:
        >>> network = Network(flops_per_s=400e12, bandwidth_bytes_per_s=50e9)
        >>> timeline = simulate(Causal(), "zigzag", 2**17, 8, network=network, sizes=Sizes(heads=32, kv_heads=8, head_dim=128))
        >>> max(timeline.exposed().values()) < 0.01 * timeline.seconds
        True
    """
    for name in passes:
        if name not in ("forward", "backward"):
            raise ValueError(f"simulate: passes has {name!r}; each must be 'forward' or 'backward'.")
    plans = [build_plan(mask, layout, seqlen, world_size, rank) for rank in range(world_size)]
    world = VirtualWorld(world_size, network, Timeline())
    backend, options = _Nothing(), Options(1.0)
    for name in passes:
        ranks: list[schedule.Pass] = []
        for plan, transport in zip(plans, world.transports(), strict=True):
            rows = (sizes.batch, len(plan.positions))
            q, k, v, out = (
                torch.empty(*rows, h, d, dtype=sizes.dtype, device="meta")
                for h, d in (
                    (sizes.heads, sizes.head_dim),
                    (sizes.kv_heads, sizes.head_dim),
                    (sizes.kv_heads, sizes.v_dim),
                    (sizes.heads, sizes.v_dim),
                )
            )
            if name == "forward":
                ranks.append(schedule.forward(plan, transport, backend, q, k, v, None, options))
            else:
                lse = torch.empty(sizes.batch, sizes.heads, rows[1], dtype=state_dtype(sizes.dtype), device="meta")
                ranks.append(schedule.backward(plan, transport, backend, out, lse, q, k, v, None, out, lse, options))
        schedule.drive(ranks)
    assert world.timeline is not None
    return world.timeline
