"""The handshake: the same verdict on every rank before anything else moves.

A rank alone cannot know that another disagrees. So each rank puts what it was asked, or why it refuses, on a card of fixed size,
and all ranks read all cards.
"""

import datetime
import functools
import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import same_host
from ringattn.transport import (
    FAILED,
    ProcessGroupTransport,
    cpu_group,
    group_name,
    group_timeout,
    has_failed,
    links_of,
    resolve_group,
)

__all__ = ["Card", "card_of", "compare", "exchange", "share_verdict"]

CARD_BYTES = 1536
TAG = 1  # the ring's own messages have 0
Card = dict[str, str]


def card_of(error: Exception) -> Card:
    """The card of a rank that refuses."""
    text = str(error)
    while len(json.dumps(text)) > CARD_BYTES - 100:  # quotes and letters beyond ASCII take several bytes
        text = text[: len(text) * 9 // 10]
    return {"error": text, "type": type(error).__name__}


def exchange(card: Card, name: str, timeout: float | None, who: str = "ring_attention") -> list[Card]:
    """Every rank's card, by messages of fixed size on a CPU group; `name` is that of the process group."""
    group = resolve_group(name)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if has_failed(group):
        error = RuntimeError(f"{who}: {FAILED}")
        if links_of(group) is not None:  # the others have been told
            raise error
        card = card_of(error)
    text = json.dumps(card).encode()
    assert len(text) < CARD_BYTES, text
    mine = torch.zeros(CARD_BYTES, dtype=torch.uint8, device="cpu")
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    theirs = [mine if r == rank else torch.zeros_like(mine) for r in range(world_size)]
    waits: list[tuple[int, Callable[[float | None], object]]] = []
    silent: dict[int, RuntimeError] = {}
    # to and from each rank, and not one collective, so that an error is one rank's
    for peer in range(world_size):
        if peer != rank:
            try:
                waits += [(peer, wait) for wait in _swap(group, peer, mine, theirs[peer])]
            except RuntimeError as error:
                silent[peer] = error
    # the others' cards are exchanged to the end, or they would take this rank for the one that does not answer
    deadline = time.monotonic() + (timeout or 0.0)
    for peer, wait in waits:
        try:
            wait(None if timeout is None else max(deadline - time.monotonic(), 1e-3))
        except RuntimeError as error:
            silent.setdefault(peer, error)
    if silent:
        ProcessGroupTransport(group).give_up()
        peer, error = next(iter(silent.items()))
        named = f"rank {peer}" if len(silent) == 1 else f"ranks {', '.join(map(str, sorted(silent)))}"
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RuntimeError(
            f"{who}: rank {rank} of {world_size} got no answer from {named} before hop 0: {reason}; that rank died, left, or makes "
            "another call. Look at its log first."
        ) from error
    return [json.loads(bytes(t.numpy()).rstrip(b"\0")) for t in theirs]


def _swap(group: dist.ProcessGroup, peer: int, mine: Tensor, theirs: Tensor) -> list[Callable[[float | None], object]]:
    """Start to swap cards with a rank; what waits for it, at most so many seconds. Where messages go from memory to memory so do cards."""
    links = links_of(group)
    if links is not None:
        sent, received = links.post(peer, mine, True), links.post(peer, theirs, False)
        # what is read first lets the other's wait end
        return [functools.partial(_read, links, move, group) for move in (received, sent)]
    cpu = cpu_group(group)
    works = [
        dist.isend(mine, group=cpu, group_dst=peer, tag=TAG),
        dist.irecv(theirs, group=cpu, group_src=peer, tag=TAG),
    ]
    return [functools.partial(_wait, work) for work in works]


def _read(links: same_host.Links, move: same_host.Move, group: dist.ProcessGroup, timeout: float | None) -> None:
    links.wait(move, group_timeout(group) if timeout is None else timeout)


def _wait(work: dist.Work, timeout: float | None) -> None:
    work.wait() if timeout is None else work.wait(datetime.timedelta(seconds=timeout))


def compare(cards: list[Card], who: str = "ring_attention") -> None:
    """Raise the same error on every rank, unless all cards are equal."""
    for rank, card in enumerate(cards):
        if "error" in card:
            kind = {"NotImplementedError": NotImplementedError, "RuntimeError": RuntimeError}.get(
                card["type"], ValueError
            )
            same = all(other.get("error") == card["error"] for other in cards)
            where = "" if same else f" (found on rank {rank} of {len(cards)})"
            raise kind(card["error"] + where)
    for field in cards[0]:
        holders: dict[str, list[int]] = {}
        for rank, card in enumerate(cards):
            holders.setdefault(card.get(field, "nothing"), []).append(rank)
        if len(holders) > 1:
            said = "; ".join(
                f"{value} on rank{'s' * (len(r) > 1)} {', '.join(map(str, r))}" for value, r in holders.items()
            )
            raise ValueError(f"{who}: ranks disagree on {field}: {said}; every rank must pass the same.")


def share_verdict(
    error: Exception | None,
    group: Any,
    timeout: float | None = None,
    card: Card | None = None,
    who: str = "ring_attention",
) -> None:
    """Return if no rank of `group` has an error and all have equal cards, else raise the same error on every rank.

    `error`: why this rank refuses, or None. `card`: what must be the same on every rank, by name. `timeout`: seconds. `who`: the function that
    messages name.
    """
    name = group_name(group)
    if not name or dist.get_world_size(resolve_group(name)) == 1:
        if error is not None:
            raise error
        return
    compare(exchange(card_of(error) if error is not None else card or {"verdict": "good"}, name, timeout, who), who)
