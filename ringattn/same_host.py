"""Messages between processes of one host without a network: the receiver reads the sender's memory.

Ranks tell each other where a message lies by small packets on Unix sockets, one for each pair, and the receiver copies it with
`process_vm_readv` (Linux): one copy, no shared segment to size or to leave behind. A peer that dies is seen at once.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from ringattn import _env

__all__ = ["CARD_BYTES", "Links", "Move", "connect"]

CARD_BYTES = 256
_PACKET = struct.Struct("qqqq")  # kind, number, address, bytes
_POST, _TAKEN = 0, 1
_GONE = "it gave up or its process is gone"
_TOKEN_BYTES = 16

Share = Callable[[Tensor], list[Tensor]]  # this rank's card of CARD_BYTES -> every rank's


class _Span(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


def _read(pid: int, source: int, target: int, size: int) -> None:
    """Copy `size` bytes at `source` in the process `pid` to `target` in this one."""
    done = 0
    while done < size:  # the kernel copies at most 2 GiB at a time
        here, there = _Span(target + done, size - done), _Span(source + done, size - done)
        n = _libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if n <= 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        done += n


def _load() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    span, unsigned = ctypes.POINTER(_Span), ctypes.c_ulong
    libc.process_vm_readv.argtypes = (ctypes.c_int, span, unsigned, span, unsigned, unsigned)
    return libc


if sys.platform == "linux":
    _libc = _load()


@dataclasses.dataclass(frozen=True)
class Move:
    """A message under way: the `number`-th to or from `peer`, by its side of it."""

    peer: int
    number: int
    tensor: Tensor
    is_send: bool


class _Peer:
    """The link to one other rank."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        # the process as this one numbers it, also where the other sits in a container of its own
        self.pid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        self.pidfd = os.pidfd_open(self.pid)  # a fork of a dead peer may keep its socket open
        self.poll = select.poll()
        self.poll.register(sock, select.POLLIN)
        self.poll.register(self.pidfd, select.POLLIN)
        self.posted: dict[int, tuple[int, int]] = {}
        self.taken: set[int] = set()
        self.n_sent = self.n_received = 0
        self.is_gone = False

    def __del__(self) -> None:
        os.close(self.pidfd)

    def send(self, *packet: int) -> None:
        try:
            self.socket.send(_PACKET.pack(*packet))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise RuntimeError(_GONE) from error

    def pump(self, deadline: float | None) -> None:
        """Take in what has come, or wait for it. What a peer sent before it went still counts, so all of it is read first."""
        if self.is_gone:
            raise RuntimeError(_GONE)
        left_ms = None if deadline is None else max(0, deadline - time.monotonic()) * 1000
        events = dict(self.poll.poll(left_ms))
        if not events:
            raise RuntimeError("timed out")
        while self.socket.fileno() in events:
            try:
                packet = self.socket.recv(_PACKET.size)
            except BlockingIOError:
                return
            except ConnectionResetError:  # comes once, before what is left to read
                continue
            if not packet:
                break
            kind, number, address, size = _PACKET.unpack(packet)
            if kind == _TAKEN:
                self.taken.add(number)
            else:
                self.posted[number] = (address, size)
        self.is_gone = True


class Links:
    """The links of one rank to all others of its ring."""

    def __init__(self, peers: dict[int, _Peer]) -> None:
        self.peers = peers

    def give_up(self) -> None:
        """End all links, before a message that is on offer may be overwritten: whoever reads it later finds its receipt refused."""
        for link in self.peers.values():
            with contextlib.suppress(OSError):  # the other end is gone already
                link.socket.shutdown(socket.SHUT_RDWR)

    def post(self, peer: int, tensor: Tensor, is_send: bool) -> Move:
        """Offer a message to `peer`, or count one from it; `tensor` is contiguous."""
        assert tensor.is_contiguous(), tensor.stride()
        link = self.peers[peer]
        if not is_send:
            link.n_received += 1
            return Move(peer, link.n_received, tensor, is_send)
        link.n_sent += 1
        link.send(_POST, link.n_sent, tensor.data_ptr(), tensor.nbytes)
        return Move(peer, link.n_sent, tensor, is_send)

    def wait(self, move: Move, timeout: float | None) -> None:
        """Return once a message has been read, here or by the peer; after `timeout` seconds raise RuntimeError."""
        deadline = None if timeout is None else time.monotonic() + timeout
        link = self.peers[move.peer]
        if move.is_send:
            while move.number not in link.taken:
                link.pump(deadline)
            link.taken.remove(move.number)
            return
        while move.number not in link.posted:
            link.pump(deadline)
        address, size = link.posted.pop(move.number)
        if size != move.tensor.nbytes:
            raise RuntimeError(f"{size} bytes were sent and {move.tensor.nbytes} awaited; both ends must agree")
        try:
            _read(link.pid, address, move.tensor.data_ptr(), size)
        except OSError as error:
            raise RuntimeError(f"its memory cannot be read ({error.strerror})") from error
        link.send(
            _TAKEN, move.number, 0, 0
        )  # refused where the peer gave up meanwhile, and the bytes are then of no worth


def connect(rank: int, world_size: int, share: Share) -> Links | None:
    """Links to all other ranks, or None, on every rank alike: some rank is on another host, may not read another's memory, or opts out.

    `share` gives every rank's card for this rank's; all ranks call it equally often.
    """
    token = ctypes.create_string_buffer(secrets.token_bytes(_TOKEN_BYTES), _TOKEN_BYTES)
    name = f"ringattn-{secrets.token_hex(16)}"
    wants = _env.same_host() and sys.platform == "linux" and hasattr(os, "pidfd_open")
    mine = {"wants": wants, "host": _host(), "name": name, "at": ctypes.addressof(token), "token": token.raw.hex()}
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) if wants else None
    if listener is not None:
        listener.bind(f"\0{name}")
        listener.listen(world_size)
    cards = _shared(mine, share)
    if not all(card["wants"] and card["host"] == mine["host"] for card in cards):
        return None
    assert listener is not None
    peers: dict[int, _Peer] = {}

    def reach() -> None:
        for other in range(rank):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.connect(f"\0{cards[other]['name']}")
            sock.send(struct.pack("q", rank) + bytes.fromhex(cards[other]["token"]))
            peers[other] = _Peer(sock)

    def meet() -> None:
        while len(peers) < world_size - 1:  # all have connected, so none of this waits
            sock, _ = listener.accept()
            hello = sock.recv(8 + _TOKEN_BYTES)
            if hello[8:] == token.raw:
                peers[struct.unpack("q", hello[:8])[0]] = _Peer(sock)
        found = ctypes.create_string_buffer(_TOKEN_BYTES)
        for other, peer in peers.items():
            _read(peer.pid, cards[other]["at"], ctypes.addressof(found), _TOKEN_BYTES)
            if found.raw.hex() != cards[other]["token"]:
                raise OSError("another process answers")

    # a token is freed only once everybody has read it: when the last card has come
    for step in (reach, meet):
        if not all(card["works"] for card in _shared({"works": _works(step)}, share)):
            return None
    return Links(peers)


def _works(step: Callable[[], None]) -> bool:
    try:
        step()
    except OSError:
        return False
    return True


def _shared(card: dict, share: Share) -> list[dict]:
    text = json.dumps(card).encode()
    return [
        json.loads(bytes(t.numpy()))
        for t in share(torch.frombuffer(bytearray(text.ljust(CARD_BYTES)), dtype=torch.uint8))
    ]


def _host() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
