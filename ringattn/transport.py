"""Transports: how tensors move between ranks.

`exchange(offset, send, recv)` starts sending to the rank `offset` places on and receiving from the rank `offset` places back, and
returns a handle that is waited for later. Every rank issues its exchanges in the same order, so messages between two ranks match
by order. `process_group` serves NCCL and gloo; `virtual` is W ranks in one process, over a simulated network where one is given.
"""

import collections
import contextlib
import dataclasses
import datetime
import itertools
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import same_host
from ringattn.network import Clock, Network, Transfer
from ringattn.timeline import Span, Stamp, Timeline, active, now

__all__ = [
    "Handle",
    "ProcessGroupTransport",
    "Transport",
    "VirtualTransport",
    "VirtualWorld",
    "group_name",
    "transports",
]


class Handle(Protocol):
    """An exchange under way."""

    def ready(self) -> bool:
        """True where `wait` would not block for ever on a peer driven by the same process."""
        ...

    def wait(self) -> None:
        """Return once `recv` holds what was sent and `send` may be written to again (on CUDA: for the current stream)."""
        ...


class Transport(Protocol):
    """Moves tensors between the ranks of one ring."""

    rank: int
    world_size: int

    def exchange(self, offset: int, send: Tensor | None, recv: Tensor | None) -> Handle:
        """Start sending `send` to `rank + offset` and receiving `recv` from `rank - offset` (modulo the world size)."""
        ...

    def connect(self, device: torch.device) -> None:
        """Make ready for tensors on `device`; every rank calls it, once all agree and before the first exchange."""
        ...

    def give_up(self) -> None:
        """Break off a call that failed: no later one on this ring takes what was under way for its own."""
        ...

    def span(self, what: str, offset: int, flops: int = 0) -> AbstractContextManager[None]:
        """Note in the timeline, if anybody asked for one, what happens inside the `with`."""
        ...


_NOTHING = contextlib.nullcontext()


class _Base:
    """What transports share: the timeline, and that posts and waits are written into it."""

    def __init__(self, rank: int, world_size: int, timeline: Timeline | None) -> None:
        self.rank, self.world_size, self.timeline = rank, world_size, timeline
        self.device = torch.device("cpu")

    def connect(self, device: torch.device) -> None:
        self.device = device

    def give_up(self) -> None:
        pass  # a virtual world begins each call without messages

    def exchange(self, offset: int, send: Tensor | None, recv: Tensor | None) -> Handle:
        with self.span("post", offset):
            return self._exchange(offset, send, recv)

    def _exchange(self, offset: int, send: Tensor | None, recv: Tensor | None) -> Handle:
        raise NotImplementedError

    def span(self, what: str, offset: int, flops: int = 0) -> AbstractContextManager[None]:
        return self.timeline.span(self.rank, what, offset, self.now, flops) if self.timeline is not None else _NOTHING

    def now(self) -> Stamp:
        return now(self.device)


# ---- one process a rank ---------------------------------------------------------------------------------------------------------


class ProcessGroupTransport(_Base):
    """Sends and receives of a `torch.distributed` process group, batched (NCCL, gloo).

    CPU tensors go from memory to memory (`same_host.py`) where every rank of the group can read every other's.

    Args:
        group: the process group.
        timeout: seconds that one wait may take on a CPU backend; None leaves it to the group's own timeout. On NCCL the group's
            watchdog does the timing, since a wait there only orders streams.
        number: the how manieth pass over the group this is, forward or backward, for messages; 0 if it is none.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout: float | None = None,
        timeline: Timeline | None = None,
        number: int = 0,
    ) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), timeline)
        self.group, self.timeout, self.number = group, timeout, number

    def connect(self, device: torch.device) -> None:
        super().connect(device)
        _warm_up(self.group, device.type)
        if device.type == "cpu" and self.world_size > 1 and self.group not in _links:
            _links[self.group] = same_host.connect(self.rank, self.world_size, self._share)

    def give_up(self) -> None:
        # what was under way may still come, and a later call would take it for its own
        _failed.add(self.group)
        links = _links.get(self.group)
        if links is not None:
            links.give_up()

    def _share(self, card: Tensor) -> list[Tensor]:
        """Every rank's card."""
        cards = [card] + [torch.empty_like(card) for _ in range(1, self.world_size)]
        quiet = ProcessGroupTransport(self.group, self.timeout)
        for handle in [quiet.exchange(offset, card, cards[-offset]) for offset in range(1, self.world_size)]:
            handle.wait()
        return [cards[rank - self.rank] for rank in range(self.world_size)]

    def _exchange(self, offset: int, send: Tensor | None, recv: Tensor | None) -> Handle:
        target, source = (self.rank + offset) % self.world_size, (self.rank - offset) % self.world_size
        if has_failed(self.group):
            raise RuntimeError(f"ring_attention: rank {self.rank} of {self.world_size}: {FAILED}")
        links = _links.get(self.group)
        if links is not None and all(t is None or t.device.type == "cpu" for t in (send, recv)):
            return _Reads(self, offset, links, [(source, recv, False), (target, send, True)])
        moves = []
        if send is not None:
            moves.append(
                (f"sending to rank {target}", dist.P2POp(dist.isend, send, group=self.group, group_peer=target))
            )
        if recv is not None:
            moves.append(
                (f"receiving from rank {source}", dist.P2POp(dist.irecv, recv, group=self.group, group_peer=source))
            )
        handle = _Works(self, offset)
        if moves:
            try:
                works = dist.batch_isend_irecv([op for _, op in moves])
            except RuntimeError as error:
                raise handle.failed(" and ".join(what for what, _ in moves), error) from error
            # NCCL coalesces a batch into one work; gloo gives one for each move
            names = (
                [what for what, _ in moves] if len(works) == len(moves) else [" and ".join(what for what, _ in moves)]
            )
            handle.moves = list(zip(names, works, strict=True))
            handle.is_timed = _waits_on_host(self.group, moves[0][1].tensor.device.type)
        return handle


class _Pending:
    """The handle of an exchange over a process group: `moves` are what is under way, each with what to call it."""

    moves: list[tuple[str, Any]]

    def __init__(self, transport: ProcessGroupTransport, offset: int) -> None:
        self.transport, self.offset, self.moves = transport, offset, []

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        with self.transport.span("wait", self.offset):
            for what, move in self.moves:
                try:
                    self._wait(move)
                except RuntimeError as error:
                    raise self.failed(what, error) from error
            self.moves = []

    def _wait(self, move: Any) -> None:
        raise NotImplementedError

    def failed(self, what: str, error: Exception) -> RuntimeError:
        self.transport.give_up()
        way = f"hop {self.offset}" if self.offset > 0 else f"the gradients' way home of hop {-self.offset}"
        if self.transport.number:
            way += f" of pass {self.transport.number} over its group"
        limit = "the group's timeout" if self.transport.timeout is None else f"{self.transport.timeout:g} s"
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return RuntimeError(
            f"ring_attention: rank {self.transport.rank} of {self.transport.world_size} failed {what} on {way} (limit {limit}): "
            f"{reason}; that rank died, left, or hangs. Look at its log first."
        )


class _Works(_Pending):
    """By sends and receives of the group."""

    is_timed = True

    def _wait(self, move: dist.Work) -> None:
        if self.transport.timeout is None or not self.is_timed:
            move.wait()
        else:
            move.wait(datetime.timedelta(seconds=self.transport.timeout))


class _Reads(_Pending):
    """From memory to memory."""

    def __init__(
        self,
        transport: ProcessGroupTransport,
        offset: int,
        links: same_host.Links,
        moves: list[tuple[int, Tensor | None, bool]],
    ) -> None:
        super().__init__(transport, offset)
        self.links = links
        for peer, tensor, is_send in moves:
            if tensor is not None:
                what = f"sending to rank {peer}" if is_send else f"receiving from rank {peer}"
                try:
                    self.moves.append((what, links.post(peer, tensor, is_send)))
                except RuntimeError as error:
                    raise self.failed(what, error) from error

    def _wait(self, move: same_host.Move) -> None:
        # what arrives comes first in `moves`: the sender of each waits for its reader
        self.links.wait(
            move, group_timeout(self.transport.group) if self.transport.timeout is None else self.transport.timeout
        )


def group_timeout(group: dist.ProcessGroup) -> float:
    """The group's own limit in seconds."""
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def _waits_on_host(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether the group's backend for such tensors blocks the host in `wait`. `dist.get_backend` cannot tell: a group may have several."""
    device = torch.device(device_type)
    return device in group._device_types and group._get_backend(device).name() in ("gloo", "mpi", "ucc")


# By group and not by name: a name is used again once the groups of a process have been destroyed.
FAILED = "an earlier call on this group failed, and what was under way then may still come. Make a new group."
_failed: "weakref.WeakSet[dist.ProcessGroup]" = weakref.WeakSet()
_warm: "weakref.WeakSet[dist.ProcessGroup]" = weakref.WeakSet()
_links: "weakref.WeakKeyDictionary[dist.ProcessGroup, same_host.Links | None]" = weakref.WeakKeyDictionary()
_passes: "weakref.WeakKeyDictionary[dist.ProcessGroup, int]" = weakref.WeakKeyDictionary()
_cpu_groups: "weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = weakref.WeakKeyDictionary()


def _warm_up(group: dist.ProcessGroup, device_type: str) -> None:
    """Make NCCL connect all ranks of a group now: where its first call is a batch of sends, every rank would have to be in it."""
    if device_type == "cuda" and group not in _warm and not _waits_on_host(group, device_type):
        _warm.add(group)
        dist.all_reduce(torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device())), group=group)


def has_failed(group: dist.ProcessGroup) -> bool:
    """Whether a call on the group was broken off, so that no later one can be right."""
    return group in _failed


def links_of(group: dist.ProcessGroup) -> same_host.Links | None:
    """How messages of CPU tensors go from memory to memory, where they do; the same on all ranks of the group."""
    return _links.get(group)


def resolve_group(name: str) -> dist.ProcessGroup:
    """The process group of that name."""
    return dist.distributed_c10d._resolve_process_group(name)


def cpu_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks that takes CPU tensors: the group itself where it can, else a gloo group beside it."""
    if _waits_on_host(group, "cpu"):
        return group
    if group not in _cpu_groups:
        # only the members make it: another ring of the same job may be elsewhere
        ranks = dist.get_process_group_ranks(group)
        _cpu_groups[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _cpu_groups[group]


# ---- W ranks in one process -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Message:
    """A send and a receive that match, one of them perhaps not posted yet."""

    source: int
    send: Tensor | None = None
    recv: Tensor | None = None
    delivered: bool = False
    transfer: Transfer | None = None  # where the network is simulated

    def deliver(self) -> None:
        if self.delivered or self.send is None or self.recv is None:
            return
        if self.send.numel() != self.recv.numel() or self.send.dtype != self.recv.dtype:
            raise RuntimeError(
                f"virtual transport: {self.send.numel()} elements of {self.send.dtype} were sent and {self.recv.numel()} of "
                f"{self.recv.dtype} awaited; both ends must agree."
            )
        self.recv.copy_(self.send)
        self.delivered = True


_numbers = itertools.count()
_worlds: "weakref.WeakValueDictionary[str, VirtualWorld]" = weakref.WeakValueDictionary()


class VirtualWorld:
    """W ranks in one process, over a simulated network if one is given. `name` stands for it where a process group's name would."""

    def __init__(self, world_size: int, network: Network | None = None, timeline: Timeline | None = None) -> None:
        if world_size < 1:
            raise ValueError(f"virtual: world_size is {world_size}; it must be at least 1.")
        self.world_size = world_size
        self.name = f"virtual:{next(_numbers)}"
        self.timeline = timeline
        self.clock = None if network is None else Clock(network, world_size)
        self.messages: dict[tuple[int, int], collections.deque[_Message]] = collections.defaultdict(collections.deque)
        _worlds[self.name] = self

    def transports(self) -> list["VirtualTransport"]:
        """All ranks, at the beginning of a call."""
        self.messages.clear()  # what a call that failed may have left
        if self.clock:
            self.clock.align()
        return [VirtualTransport(self, rank) for rank in range(self.world_size)]

    def message(self, source: int, target: int, side: str, tensor: Tensor) -> _Message:
        """Post one side of the next message from `source` to `target` that lacks it."""
        queue = self.messages[source, target]
        while queue and queue[0].delivered:
            queue.popleft()
        message = next((m for m in queue if getattr(m, side) is None), None)
        if message is None:
            message = _Message(source)
            queue.append(message)
        setattr(message, side, tensor)
        if self.clock:
            if message.transfer is None:
                message.transfer = self.clock.transfer(tensor.nbytes, source, target)
            self.clock.post(message.transfer, *((source, target) if side == "send" else (target, source)), side)
        return message


class VirtualTransport(_Base):
    """One rank of a `VirtualWorld`.

    Bytes move as late as they may, when one end waits, and until then the receiver's buffer holds NaN: an exchange that is not
    waited for, or a buffer that is written too early, becomes a wrong number instead of luck.
    """

    def __init__(self, world: VirtualWorld, rank: int) -> None:
        super().__init__(rank, world.world_size, world.timeline)
        self.world = world

    def _exchange(self, offset: int, send: Tensor | None, recv: Tensor | None) -> Handle:
        target, source = (self.rank + offset) % self.world_size, (self.rank - offset) % self.world_size
        messages = []
        if send is not None:
            messages.append(self.world.message(self.rank, target, "send", send))
        if recv is not None:
            recv.fill_(torch.nan)
            messages.append(self.world.message(source, self.rank, "recv", recv))
        return _Messages(self, offset, messages)

    @contextlib.contextmanager
    def span(self, what: str, offset: int, flops: int = 0) -> Iterator[None]:
        with super().span(what, offset, flops):
            yield
            if self.world.clock:
                self.world.clock.compute(self.rank, flops)

    def now(self) -> Stamp:
        return self.world.clock.now[self.rank] if self.world.clock else super().now()


@dataclasses.dataclass
class _Messages:
    """The handle of a virtual exchange."""

    transport: VirtualTransport
    offset: int
    messages: list[_Message]

    def ready(self) -> bool:
        return all(
            m.send is not None and m.recv is not None and (m.transfer is None or m.transfer.end is not None)
            for m in self.messages
        )

    def wait(self) -> None:
        with self.transport.span("wait", self.offset):
            for message in self.messages:
                if message.transfer:
                    self._take_time(message, message.transfer)
                message.deliver()

    def _take_time(self, message: _Message, transfer: Transfer) -> None:
        world, rank = self.transport.world, self.transport.rank
        assert world.clock
        assert transfer.start is not None
        world.clock.wait(rank, transfer)
        if world.timeline is not None and not message.delivered:
            assert message.send is not None
            times = (transfer.start, transfer.arrival)
            world.timeline.add(Span(message.source, "transfer", self.offset, *times, bytes=message.send.nbytes))


# ---- by name --------------------------------------------------------------------------------------------------------------------


def group_name(group: object) -> str:
    """The name by which an operator knows a ring: of a ProcessGroup, a one-dimensional DeviceMesh, a VirtualWorld; "" for None."""
    if group is None:
        return ""
    if isinstance(group, VirtualWorld):
        return group.name
    if isinstance(group, dist.ProcessGroup):
        return group.group_name
    if isinstance(group, dist.device_mesh.DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group is a mesh with the axes {group.mesh_dim_names}; it must have one. Pass mesh['cp']."
            )
        return group.get_group().group_name
    raise ValueError(
        f"group is a {type(group).__name__}; it must be a ProcessGroup, a one-dimensional DeviceMesh or None."
    )


def transports(name: str, timeout: float | None = None) -> list[Transport]:
    """One transport for each rank of the ring that this process drives: one, or all W of a virtual world."""
    if name == "":
        return [*VirtualWorld(1, timeline=active()).transports()]
    if name.startswith("virtual:"):
        world = _worlds.get(name)
        if world is None:
            raise RuntimeError(
                f"ring_attention: the virtual ring {name} is gone; keep the object that virtual() returned."
            )
        return [*world.transports()]
    group = resolve_group(name)
    _passes[group] = _passes.get(group, 0) + 1
    return [ProcessGroupTransport(group, timeout, active(), _passes[group])]
