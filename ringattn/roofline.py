"""What the hops of a plan cost on a network: the shortest time that they allow, and whether communication can be hidden. Pure."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ringattn.network import Network
from ringattn.plan import Hop, Plan

__all__ = ["Roofline", "Sizes", "critical_path", "roofline"]

Link = tuple[int, str, bool]  # rank, "send" or "recv", whether to other nodes


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of an attention call that masks and layouts do not know.

    Attributes:
        heads, kv_heads: of queries and keys; `head_dim`: of both; `v_head_dim`: of values, default the same.
        dtype: of q, k, v; default bf16. batch: default 1.
    """

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    dtype: torch.dtype = torch.bfloat16
    batch: int = 1

    @property
    def v_dim(self) -> int:
        """The head dim of values."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    def flops(self, plan: Plan, hop: Hop, backward: bool) -> int:
        """Floating-point operations of a hop; see `Plan.flops`."""
        return plan.flops(
            hop,
            batch=self.batch,
            heads=self.heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_dim,
            backward=backward,
        )

    @property
    def key_bytes(self) -> int:
        """Bytes of one row of K and V."""
        return self.batch * self.kv_heads * (self.head_dim + self.v_dim) * self.dtype.itemsize

    @property
    def grad_bytes(self) -> int:
        """Bytes of one row of dK and dV, which travel in fp32 (fp64 for fp64)."""
        return self.key_bytes // self.dtype.itemsize * max(4, self.dtype.itemsize)


def critical_path(plans: Sequence[Plan], network: Network, sizes: Sizes, backward: bool = False) -> float:
    """The shortest time, in seconds, in which the hops of a plan can be done: no schedule that keeps these rules takes less.

    A received chunk is computed when all of it is there, and its gradients leave when all of them are computed; chunks are sent and
    computed in the order of the hops, and what a rank computes on its own keys may fill any gap. A link carries one byte after the
    other. Buffers are not limited, no message waits for another rank's links, and posting, packing and adding take no time.

    Args:
        plans: of all ranks, in their order.
    """
    busy: dict[Link, float] = collections.defaultdict(float)  # seconds on each link so far
    latencies: dict[Link, float] = {}
    done = [0.0] * len(plans)  # when each rank has computed what it received so far
    home = [0.0] * len(plans)  # when each rank's last gradients have left
    ends = [sum(sizes.flops(plan, hop, backward) for hop in plan.hops) / network.flops_per_s for plan in plans]

    def occupy(source: int, target: int, nbytes: int) -> float:
        seconds = network.seconds(nbytes, source, target)
        links = _links(network, source, target)
        for link in links:
            busy[link] += seconds
            latencies[link] = network.latency(source, target)
        return max(busy[link] for link in links)

    grads: list[tuple[int, int, int]] = []
    for number in range(1, len(plans[0].hops)):
        for plan in plans:
            hop = plan.hops[number]
            source = (plan.rank - hop.offset) % plan.world_size
            if hop.recv_rows:
                sent = occupy(source, plan.rank, hop.recv_rows * sizes.key_bytes)
                done[plan.rank] = max(done[plan.rank], sent + network.latency(source, plan.rank))
            done[plan.rank] += sizes.flops(plan, hop, backward) / network.flops_per_s
            if backward and hop.recv_rows:
                nbytes = hop.recv_rows * sizes.grad_bytes
                grads.append((plan.rank, source, nbytes))
                home[plan.rank] = max(home[plan.rank], done[plan.rank]) + network.seconds(nbytes, plan.rank, source)
                ends.append(home[plan.rank] + network.latency(plan.rank, source))
    for source, target, nbytes in grads:
        occupy(source, target, nbytes)
    return max(*ends, *done, *(seconds + latencies[link] for link, seconds in busy.items()), 0.0)


@dataclasses.dataclass(frozen=True)
class Roofline:
    """What one pass costs, and what of it communication costs.

    Attributes:
        compute_s: seconds of each step's compute, the longest of any rank.
        transfer_s: seconds for what travels during each step, on the busiest link of any rank.
        seconds: of the whole pass; `exposed_s`: how many fewer they would be if messages took no time.
    """

    compute_s: tuple[float, ...]
    transfer_s: tuple[float, ...]
    seconds: float
    exposed_s: float

    @property
    def ratio(self) -> float:
        """Communication over compute on the step where that is largest."""
        pairs = zip(self.compute_s, self.transfer_s, strict=True)
        return max((t / c if c else float("inf") for c, t in pairs if t), default=0.0)

    @property
    def is_hidden(self) -> bool:
        """Whether communication hides behind compute: whether it costs less than a hundredth of the time."""
        return self.exposed_s <= 0.01 * self.seconds


def roofline(plans: Sequence[Plan], network: Network, sizes: Sizes, backward: bool = False) -> Roofline:
    """Can this be hidden? What a pass costs, step by step: a rank is done with a step when its compute and its messages are.

    A message takes as long as it and what is before it in that step on the busier of its two links, from when both its ends began
    the step. That is the simulated time within 5% where on every step `ratio` is at most 2, and up to a sixth too long beyond.

    Args:
        plans: of all ranks, in their order.

    Example:
        >>> from ringattn.masks import Causal
        >>> from ringattn.plan import build_plan
        >>> plans = [build_plan(Causal(), "zigzag", 2**17, 8, rank) for rank in range(8)]
        >>> network = Network(flops_per_s=400e12, bandwidth_bytes_per_s=50e9)
        >>> roofline(plans, network, Sizes(heads=32, kv_heads=8, head_dim=128)).is_hidden
        True
    """
    steps = _steps(plans, network, sizes, backward)
    seconds, free = (_in_steps(steps, len(plans), share) for share in (1.0, 0.0))
    return Roofline(
        tuple(max(step.compute) for step in steps),
        tuple(max((m.seconds + m.latency for m in step.messages), default=0.0) for step in steps),
        seconds,
        seconds - free,
    )


class _Message(NamedTuple):
    source: int
    target: int
    seconds: float  # until it and what is before it on the busier of its links is through
    latency: float


class _Step(NamedTuple):
    """What happens at once: a hop's compute, the next keys, and the gradients of the hop before on their way home."""

    compute: list[float]
    messages: list[_Message]


def _steps(plans: Sequence[Plan], network: Network, sizes: Sizes, backward: bool) -> list[_Step]:
    share = sizes.key_bytes / (sizes.key_bytes + sizes.grad_bytes)
    hops = list(zip(*(plan.backward_hops(share) if backward else plan.hops for plan in plans), strict=True))
    steps = []
    for number, computed in enumerate(hops):
        busy: dict[Link, float] = collections.defaultdict(float)
        messages = []
        # in the order in which they are posted: gradients of the hop before, the next keys
        for other, row_bytes in ((number - 1, sizes.grad_bytes if backward else 0), (number + 1, sizes.key_bytes)):
            for plan, hop in zip(plans, hops[other] if row_bytes and 0 <= other < len(hops) else (), strict=False):
                if hop.recv_rows:
                    peer = (plan.rank - hop.offset) % plan.world_size
                    a, b = (plan.rank, peer) if other < number else (peer, plan.rank)
                    links = _links(network, a, b)
                    for link in links:
                        busy[link] += network.seconds(hop.recv_rows * row_bytes, a, b)
                    messages.append(_Message(a, b, max(busy[link] for link in links), network.latency(a, b)))
        compute = [sizes.flops(p, hop, backward) / network.flops_per_s for p, hop in zip(plans, computed, strict=True)]
        steps.append(_Step(compute, messages))
    return steps


def _in_steps(steps: list[_Step], world_size: int, share: float) -> float:
    """When the last rank is done, if messages take that share of their time."""
    begin = [0.0] * world_size
    for step in steps:
        done = [at + compute for at, compute in zip(begin, step.compute, strict=True)]
        for message in step.messages:
            there = max(begin[message.source], begin[message.target]) + share * (message.seconds + message.latency)
            for rank in (message.source, message.target):
                done[rank] = max(done[rank], there)
        begin = done
    return max(begin)


def _links(network: Network, source: int, target: int) -> tuple[Link, Link]:
    """The egress and the ingress that a message occupies."""
    is_inter = network.is_inter(source, target)
    return (source, "send", is_inter), (target, "recv", is_inter)
