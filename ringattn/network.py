"""A network that is only computed: how long work and messages take, and the clock of a simulated ring. Pure.

A message occupies the egress of its sender and the ingress of its receiver together, from when both ends are posted and both
links have done what was posted before it (links are full duplex and keep the order, as one communicator does), and is there a
latency after its last byte left. When it arrives follows from the order of each rank's posts alone, so a simulation has one
result, in whatever order the ranks are driven.
"""

import dataclasses

__all__ = ["Clock", "Network", "Transfer"]


@dataclasses.dataclass(frozen=True)
class Network:
    """Links and arithmetic of a simulated ring.

    Attributes:
        flops_per_s: floating-point operations per second of a rank, over visible pairs (see `Plan.flops`).
        bandwidth_bytes_per_s: of a rank's link, each way.
        latency_s: seconds from a message's last byte leaving to its arrival; default 0.
        node_size: ranks of one node, numbered in turn; default None: all are in one.
        inter_bandwidth_bytes_per_s, inter_latency_s: of a rank's link to other nodes, which is another one than that inside the
            node; default: the same numbers.

    Example:
        >>> Network(flops_per_s=400e12, bandwidth_bytes_per_s=450e9).seconds(9_000_000, 0, 1)
        2e-05
    """

    flops_per_s: float
    bandwidth_bytes_per_s: float
    latency_s: float = 0.0
    node_size: int | None = None
    inter_bandwidth_bytes_per_s: float | None = None
    inter_latency_s: float | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, is_optional = getattr(self, field.name), field.default is None
            is_latency = "latency" in field.name
            if not (value is None and is_optional) and not (value >= 0 if is_latency else value > 0):
                raise ValueError(
                    f"Network: {field.name} is {value}; it must be {'at least 0' if is_latency else 'positive'}."
                )

    def is_inter(self, rank: int, peer: int) -> bool:
        """Whether two ranks are in different nodes."""
        return self.node_size is not None and rank // self.node_size != peer // self.node_size

    def seconds(self, nbytes: int, rank: int, peer: int) -> float:
        """How long a message occupies the links between two ranks."""
        inter = self.inter_bandwidth_bytes_per_s if self.is_inter(rank, peer) else None
        return nbytes / (inter or self.bandwidth_bytes_per_s)

    def latency(self, rank: int, peer: int) -> float:
        """From the last byte's leaving to its arrival, in seconds."""
        inter = self.inter_latency_s if self.is_inter(rank, peer) else None
        return self.latency_s if inter is None else inter


@dataclasses.dataclass
class Transfer:
    """A message in the simulated network; `start` and `end` are None until they can be known."""

    seconds: float
    latency: float
    posts: list[float] = dataclasses.field(default_factory=list)
    before: list["Transfer"] = dataclasses.field(default_factory=list)
    start: float | None = None

    @property
    def end(self) -> float | None:
        """When its links are free again."""
        if self.start is None and len(self.posts) == 2:
            ends = [transfer.end for transfer in self.before]
            known = [end for end in ends if end is not None]
            if len(known) == len(ends):
                self.start = max(self.posts + known)
                self.before.clear()
        return None if self.start is None else self.start + self.seconds

    @property
    def arrival(self) -> float:
        """When it is there; to be asked once `end` is known."""
        assert self.end is not None
        return self.end + self.latency


class Clock:
    """The simulated time of each rank, and the last message on each link."""

    def __init__(self, network: Network, world_size: int) -> None:
        self.network = network
        self.now = [0.0] * world_size
        self.last: dict[tuple[int, str, bool], Transfer] = {}

    def align(self) -> None:
        """Begin a call: on all ranks at once, on idle links."""
        self.now = [max(self.now)] * len(self.now)
        self.last.clear()

    def compute(self, rank: int, flops: int) -> None:
        """Let a rank work."""
        self.now[rank] += flops / self.network.flops_per_s

    def transfer(self, nbytes: int, source: int, target: int) -> Transfer:
        """A message that neither end has posted yet."""
        return Transfer(self.network.seconds(nbytes, source, target), self.network.latency(source, target))

    def post(self, transfer: Transfer, rank: int, peer: int, side: str) -> None:
        """One end ("send" or "recv") of a message is ready: it is next on that link of `rank`."""
        link = (rank, side, self.network.is_inter(rank, peer))
        if link in self.last:
            transfer.before.append(self.last[link])
        self.last[link] = transfer
        transfer.posts.append(self.now[rank])

    def wait(self, rank: int, transfer: Transfer) -> None:
        """Let a rank wait until a message is there."""
        self.now[rank] = max(self.now[rank], transfer.arrival)
