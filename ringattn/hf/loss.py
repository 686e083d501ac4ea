"""The losses of a rank's rows, where `attach` makes them and not the model."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["IGNORED", "Experts", "LossParts", "balance", "balance_sums", "cross_entropy", "with_loss"]

IGNORED = -100  # the label of a row without loss, in transformers


@dataclasses.dataclass(frozen=True)
class Experts:
    """The auxiliary loss of a mixture of experts: `coefficient` times the `balance` of its router's logits."""

    coefficient: float
    top_k: int


@dataclasses.dataclass(frozen=True, eq=False)
class LossParts:
    """What a rank's loss is made of.

    Attributes:
        labels: of this rank's rows, int64 `[B, S]`, or None.
        items: what the sum of their losses is divided by.
        experts: the auxiliary loss, or None.
        valid: the tokens that it counts, bool `[B, S]`.
        ranks: ranks that have parts of it; the mean over them is the whole.
        reduce: sums a tensor over these ranks.
    """

    labels: Tensor | None
    items: Any
    experts: Experts | None
    valid: Tensor
    ranks: int
    reduce: Callable[[Tensor], Tensor]


def cross_entropy(logits: Tensor, labels: Tensor, reduction: str = "sum") -> Tensor:
    """Of logits `[B, S, V]` and labels `[B, S]`, in fp32 as in transformers."""
    return nn.functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=reduction
    )


def balance_sums(router_logits: Sequence[Tensor], top_k: int, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Over all layers and valid tokens: how often each expert is chosen, the sum of its probabilities, and the tokens.

    `router_logits`: `[B * S, experts]` of each layer, in the order of valid `[B, S]`. Returns fp32 `[experts]`, `[experts]`, `[]`.
    """
    weight = valid.reshape(-1, 1).float()
    probabilities = [logits.softmax(-1) for logits in router_logits]
    chosen = [torch.zeros_like(p).scatter(-1, p.topk(top_k, dim=-1).indices, 1.0) for p in probabilities]
    return (
        torch.stack([(c.float() * weight).sum(0) for c in chosen]).sum(0),
        torch.stack([(p.float() * weight).sum(0) for p in probabilities]).sum(0),
        weight.sum() * len(router_logits),
    )


def balance(chosen: Tensor, probability: Tensor, tokens: Tensor) -> Tensor:
    """The load balancing loss of the Switch Transformer (Fedus et al. 2021, equation 4) over all layers at once."""
    return len(chosen) * (chosen / tokens * probability / tokens).sum()


def with_loss(output: Any, parts: LossParts) -> Any:
    """`output` with this rank's part of the loss, and of the auxiliary loss.

    How often experts are chosen has no gradient and is counted over all ranks; probabilities enter linearly, so that each
    rank adds its own, and the mean of `ranks` times these parts is the loss of one process.
    """
    is_tuple = isinstance(output, tuple)
    logits = output[0] if is_tuple else output.logits
    made: dict[str, Any] = {}
    loss = None if parts.labels is None else cross_entropy(logits, parts.labels) / parts.items
    if parts.experts is not None:
        mine, probability, tokens = balance_sums(output.router_logits, parts.experts.top_k, parts.valid)
        sums = parts.reduce(torch.cat([mine.detach(), tokens[None]]))
        aux = parts.ranks * balance(sums[:-1], probability, sums[-1].clamp(min=1))
        made["aux_loss"] = aux
        loss = None if loss is None else loss + parts.experts.coefficient * aux
    if is_tuple:
        return output if loss is None else (loss, *output)
    made = made if loss is None else {"loss": loss, **made}
    return type(output)(**{**made, **{name: value for name, value in output.items() if name not in made}})
