"""The handshake: the same verdict on every rank before anything else moves.

A rank alone cannot know that another disagrees. So each rank puts what it was asked, or why it refuses, on a card of fixed size,
and all ranks read all cards.
"""

import datetime
import json
import time
from typing import Any

import torch
import torch.distributed as dist

from ringattn.transport import FAILED, ProcessGroupTransport, cpu_group, group_name, has_failed, resolve_group

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
        card = card_of(RuntimeError(f"{who}: {FAILED}"))
    text = json.dumps(card).encode()
    assert len(text) < CARD_BYTES, text
    mine = torch.zeros(CARD_BYTES, dtype=torch.uint8, device="cpu")
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    theirs = [mine if r == rank else torch.zeros_like(mine) for r in range(world_size)]
    cpu, peers = cpu_group(group), [r for r in range(world_size) if r != rank]
    works: list[tuple[int, dist.Work]] = []
    silent: dict[int, RuntimeError] = {}
    # to and from each rank, and not one collective, so that an error is one rank's
    for peer in peers:
        try:
            works.append((peer, dist.isend(mine, group=cpu, group_dst=peer, tag=TAG)))
            works.append((peer, dist.irecv(theirs[peer], group=cpu, group_src=peer, tag=TAG)))
        except RuntimeError as error:
            silent[peer] = error
    # the others' cards are exchanged to the end, or they would take this rank for the one that does not answer
    deadline = time.monotonic() + (timeout or 0.0)
    for peer, work in works:
        try:
            if timeout is None:
                work.wait()
            else:
                work.wait(datetime.timedelta(seconds=max(deadline - time.monotonic(), 1e-3)))
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
