"""The trial: a few forwards of a dozen tokens that find out what no config says.

With attention replaced by a function of one row's own query, key and value, a model whose attention is all in the
attention function must give each row the same output whatever rows are beside it. Anything else (a recurrence, a
convolution, attention of its own making, positions that it makes up) shows as a difference and is refused. On the way
the trial notes every attention call, with what its mask says.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ringattn.hf.attention import NAME, RingContext, Seen
from ringattn.hf.loss import IGNORED, Experts, balance, balance_sums, cross_entropy

__all__ = ["CONVENTIONS", "Facts", "try_out"]

ROWS = 12  # x k x k ...: each k is compared, beside other neighbours and at another place
TOLERANCES = {
    torch.float64: 1e-6,
    torch.float32: 1e-5,
}  # of rows of one computation in two places, relative to the largest
COARSE = 1e-2  # in 16 bits
LABELLED = 7.0  # a divisor that no mean has


def _from_zero(ids: Tensor, mask: Tensor, pad: int) -> Tensor:
    return torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)


def _after_padding(ids: Tensor, mask: Tensor, pad: int) -> Tensor:
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def _after_pad_id(ids: Tensor, mask: Tensor, pad: int) -> Tensor:
    is_token = (ids != pad).long()
    return is_token.cumsum(-1) * is_token + pad


# How models number the tokens of a whole batch, if they are not told: (input_ids, attention_mask, pad id) -> position_ids.
CONVENTIONS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "from zero": _from_zero,  # Llama
    "after padding": _after_padding,  # OPT
    "after the pad id": _after_pad_id,  # RoBERTa
}


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a trial found.

    Attributes:
        calls: every attention call, in order.
        positions: of `CONVENTIONS`, or None: `position_ids` must be given.
        is_shifted: the loss of a row is that of the next row's label, and not of its own; None: there is no loss, or
            another one than the mean cross-entropy of the logits.
        is_split: the model's own loss goes by `shift_labels` and `num_items_in_batch`.
        experts: the auxiliary loss that is added to it if `output_router_logits` is set; None: none that is known here.
    """

    calls: tuple[Seen, ...]
    positions: str | None
    is_shifted: bool | None
    is_split: bool
    experts: Experts | None


class _Trial:
    def __init__(self, who: str, model: nn.Module, config: Any, is_called: bool) -> None:
        self.who, self.model, self.config = who, model, config
        self.call: Callable[..., Any] = model.forward if is_called else model
        table = model.get_input_embeddings().weight  # type: ignore[operator]
        self.device = table.device
        special = {
            id
            for name, ids in config.to_dict().items()
            if name.endswith(("token_id", "token_index"))
            for id in (ids if isinstance(ids, list) else [ids])
        }
        usual = [id for id in range(min(int(table.shape[0]), 512)) if id not in special]
        self.tokens = torch.tensor(usual, device=self.device)
        pad = getattr(config, "pad_token_id", None)
        self.pad = 0 if pad is None else int(pad)
        self.length = min([
            int(n)
            for name in ("max_position_embeddings", "n_positions", "original_max_position_embeddings", "max_target_positions")
            if (n := getattr(config, name, None))
        ] or [2048])  # fmt: skip

    def run(self, seen: list[Seen] | None = None, index: Tensor | None = None, **inputs: Any) -> Any:
        """The outputs of one forward."""
        rows = inputs["input_ids"].shape[1]
        index = torch.arange(rows, device=self.device) if index is None else index
        calls: list[Seen] = []
        ring = RingContext(None, "contiguous", rows, rows, {}, "auto", None, True, index[None], seen=calls)
        try:
            out = self.call(**inputs, use_cache=False, ring=ring)
        except NotImplementedError:
            raise
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            raise NotImplementedError(
                f"{self.who}: {type(self.model).__name__} does not run on {rows} tokens with attention_implementation "
                f"{NAME!r}: {type(error).__name__}: {first[:200]}"
            ) from error
        if seen is not None:
            seen += calls
        return out

    def rows(self, seen: list[Seen] | None = None, **inputs: Any) -> Tensor:
        """The logits or the last hidden state, `[B, S, ...]`."""
        out = self.run(seen, **inputs)
        values = out[0] if not hasattr(out, "logits") else out.logits
        shape = inputs["input_ids"].shape
        if not isinstance(values, Tensor) or values.shape[:2] != shape:
            got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise NotImplementedError(
                f"{self.who}: {type(self.model).__name__} gives {got} for tokens {tuple(shape)}; only models that give "
                "one row for each token (a language model's logits, a decoder's hidden states) are supported."
            )
        return values

    def agree(self, a: Tensor, b: Tensor) -> bool:
        """Whether at least half of the rows `[n, ...]` are the same."""
        error = (a.double() - b.double()).abs().flatten(1).amax(1) / a.double().abs().max().clamp(min=1e-30)
        return bool(error.median() <= TOLERANCES.get(a.dtype, COARSE))

    def places(self, n: int) -> tuple[Tensor, Tensor]:
        """Tokens and positions `[1, n]`, spread over all that the model has."""
        at = torch.arange(n, device=self.device)
        ids = self.tokens[(at * 37 + 11) % len(self.tokens)]
        step = max(min(self.length - 1, 2**20) // n, 1)
        return ids[None], (at * step)[None]

    def neighbours(self) -> tuple[Seen, ...]:
        seen: list[Seen] = []
        ids, positions = self.places(3 * ROWS // 2)  # groups of x, k, y
        at = torch.arange(3 * ROWS // 2, device=self.device)
        first, second = at[at % 3 != 2], at[at % 3 != 0]  # x k x k ..., k y k y ...
        a = self.rows(seen, input_ids=ids[:, first], position_ids=positions[:, first], index=first)[0, 1::2]
        b = self.rows(input_ids=ids[:, second], position_ids=positions[:, second], index=second)[0, 0::2]
        if not seen:
            raise NotImplementedError(
                f"{self.who}: {type(self.model).__name__} makes no attention call under the name {NAME!r}; its attention is "
                "of its own making, or it has none."
            )
        if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
            raise FloatingPointError(f"{self.who}: outputs are not finite; load the model's weights first.")
        if not self.agree(a, b):
            raise NotImplementedError(
                f"{self.who}: {type(self.model).__name__} mixes tokens outside of attention, or does not use position_ids: "
                "rows change with their neighbours even where attention sees none. Recurrent, convolutional and sparse-index "
                "layers, and attention of a model's own making, are not supported."
            )
        return tuple(seen)

    def numbering(self) -> str | None:
        ids = self.places(ROWS)[0].repeat(2, 1)
        mask = torch.ones_like(ids)
        ids[1, :3], mask[1, :3] = self.pad, 0
        try:
            own = self.rows(input_ids=ids, attention_mask=mask)
        except NotImplementedError:
            return None
        for name, convention in CONVENTIONS.items():
            try:
                told = self.rows(input_ids=ids, position_ids=convention(ids, mask, self.pad))
            except NotImplementedError:  # a position that the model does not have
                continue
            if self.agree(own[0], told[0]) and self.agree(own[1, 3:], told[1, 3:]):
                return name
        return None

    def labelled(self) -> tuple[dict[str, Any], Tensor]:
        ids, positions = self.places(ROWS)
        labels = self.tokens[(torch.arange(ROWS, device=self.device) * 29 + 5) % len(self.tokens)][None].clone()
        labels[0, 3] = IGNORED
        inputs: dict[str, Any] = {"input_ids": ids, "position_ids": positions}
        if getattr(self.config, "output_router_logits", False):  # adds to the loss
            inputs["output_router_logits"] = False
        return inputs, labels

    def labels(self) -> tuple[bool | None, bool]:
        inputs, labels = self.labelled()
        try:
            whole = self.run(**inputs, labels=labels)
            if _is_near(whole.loss, cross_entropy(whole.logits[:, :-1], labels[:, 1:], "mean")):
                is_shifted = True
            elif _is_near(whole.loss, cross_entropy(whole.logits, labels, "mean")):
                is_shifted = False
            else:
                return None, False
        except (NotImplementedError, AttributeError):
            return None, False
        try:
            items = torch.tensor(LABELLED, device=self.device)
            split = self.run(**inputs, labels=labels, shift_labels=labels, num_items_in_batch=items)
            return is_shifted, _is_near(split.loss, cross_entropy(split.logits, labels) / LABELLED)
        except (NotImplementedError, AttributeError):
            return is_shifted, False

    def experts(self) -> Experts | None:
        if not getattr(
            self.config, "output_router_logits", False
        ):  # asking leaves hooks that torch.compile cannot trace
            return None
        coefficient = getattr(self.config, "router_aux_loss_coef", None)
        counts = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k")
        top_k = next((int(k) for name in counts if (k := getattr(self.config, name, None))), None)
        if coefficient is None or top_k is None:
            return None
        inputs, labels = self.labelled()
        try:
            plain = self.run(**inputs, labels=labels)
            out = self.run(**{**inputs, "output_router_logits": True}, labels=labels)
            own = balance(*balance_sums(out.router_logits, top_k, torch.ones_like(labels)))
        except (NotImplementedError, AttributeError, TypeError, RuntimeError):
            return None
        if not (_is_near(out.aux_loss, own) and _is_near(out.loss, plain.loss + coefficient * own)):
            return None
        return Experts(float(coefficient), top_k)


def _is_near(a: Any, b: Tensor) -> bool:
    return isinstance(a, Tensor) and a.dim() == 0 and bool((a.float() - b.float()).abs() <= 1e-3 * b.float().abs())


def try_out(who: str, model: nn.Module, config: Any, *, is_called: bool = False) -> Facts:
    """Run the trial on a model with weights; it is as it was afterwards.

    `is_called`: the model is being called, so that its hooks have run already.

    Raises:
        NotImplementedError: the model's rows depend on each other outside of attention, or an attention call is refused.
        FloatingPointError: outputs are not finite, so that nothing can be told.
    """
    with torch.no_grad(), _evaluating(model):
        trial = _Trial(who, model, config, is_called)
        calls = trial.neighbours()
        return Facts(calls, trial.numbering(), *trial.labels(), trial.experts())


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    with torch.random.fork_rng(devices=[]):
        try:
            model.eval()
            yield
        finally:
            for module, mode in modes:
                module.training = mode
