"""The attention function that transformers calls, and what it is told."""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import ringattn
from ringattn.layout import Layout
from ringattn.masks import Mask

__all__ = ["FIRST", "NAME", "Group", "RingContext", "attention", "no_mask", "text"]

NAME = "ringattn"
FIRST = "_ringattn_first"  # on the first attention module: ranks compare their arguments there, once for each forward

# Keyword arguments that reach an attention call and that the pre-hook has dealt with for the whole batch.
HANDLED = (
    *("position_ids", "labels", "shift_labels", "num_items_in_batch"),
    *("output_hidden_states", "return_dict"),
)
OFF = ("use_cache", "output_attentions")  # these may reach it too, and are refused unless they are False

Group = dist.ProcessGroup | DeviceMesh | None


@dataclasses.dataclass(frozen=True, eq=False)
class RingContext:
    """What every attention call of one forward is told.

    Attributes:
        group: the ranks that share the sequence; None is a ring of one.
        layout: which rows each rank holds.
        seqlen: global tokens.
        rows: rows of this rank. A rank without rows computes on one row that is not part of the sequence.
        masks: what rows see, by the sliding window of a layer in tokens (None: no window).
        backend: block kernels, by name.
        timeout: seconds that a hop may take, or None.
        is_outer: the batch was split by the causal LM, not by its decoder.
    """

    group: Group
    layout: Layout
    seqlen: int
    rows: int
    masks: dict[int | None, Mask]
    backend: str
    timeout: float | None
    is_outer: bool


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    ring: RingContext | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Ring attention of query `[B, H, S, D]`, key and value `[B, Hkv, S, D]`, as `[B, S, H, D]`; no weights.

    Raises:
        RuntimeError: the model was not attached.
        NotImplementedError: an argument is given that is not honoured.
        ValueError: the rows are not this rank's.
    """
    if ring is None:
        raise RuntimeError(
            f"{_who(module)}: the keyword argument ring is missing; call ringattn.hf.attach(model, group) first, with "
            "group None for one process, and then the model or its decoder, not a layer."
        )
    if attention_mask is not None:
        raise _refused(module, "attention_mask", attention_mask, "None")
    if dropout != 0.0:
        raise _refused(module, "dropout", dropout, "0.0")
    if is_causal is False:
        raise _refused(module, "is_causal", is_causal, "True or None")
    if sliding_window not in ring.masks:
        raise _refused(module, "sliding_window", sliding_window, f"one of {[*ring.masks]}, as in the model's config")
    for name, extra in kwargs.items():
        if extra is None or name in HANDLED or (name in OFF and extra is False):
            continue
        raise _refused(module, name, extra, "False or left out" if name in OFF else "None or left out")
    for name, rows in (("query", query.shape[2]), ("key", key.shape[2]), ("value", value.shape[2])):
        if rows != max(ring.rows, 1):
            raise ValueError(
                f"{_who(module)}: {name} has {rows} rows and this rank {ring.rows} of {ring.seqlen}; they must agree."
            )
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if ring.rows == 0:
        q, k, v = q[:, :0], k[:, :0], v[:, :0]
    out = ringattn.ring_attention(
        q,
        k,
        v,
        mask=ring.masks[sliding_window],
        layout=ring.layout,
        group=ring.group,
        seqlen=ring.seqlen,
        softmax_scale=scaling,
        backend=ring.backend,
        timeout=ring.timeout,
        validate=getattr(module, FIRST, False),
    )
    if ring.rows == 0:  # the row that is not part of the sequence, in the graph behind the ring
        out = torch.cat([out, out.new_zeros(out.shape[0], 1, *out.shape[2:])], dim=1)
    return out, None


def no_mask(*args: Any, **kwargs: Any) -> None:
    """The mask function that transformers calls: what rows see is in the `RingContext`."""
    return None


def text(value: Any) -> str:
    """A value in an error message: itself if short, else what it is."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return repr(value) if isinstance(value, bool | int | float | str | None) else f"a {type(value).__name__}"


def _who(module: nn.Module) -> str:
    return f"ringattn.hf attention in {type(module).__name__} {getattr(module, 'layer_idx', '?')}"


def _refused(module: nn.Module, name: str, value: Any, good: str) -> NotImplementedError:
    return NotImplementedError(f"{_who(module)}: {name} is {text(value)}; it must be {good}.")
