"""`check`: what each attention call of a model would do with a batch, or why it is refused."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ringattn.balance import choose_layout
from ringattn.hf.attention import RingContext, Seen
from ringattn.hf.model import STATE, Hook, Settings, State, check_model, mark, size_rank, unwrapped
from ringattn.kernels import Request, choose
from ringattn.layout import Layout
from ringattn.plan import build_plan

__all__ = ["check"]

COLUMNS = ("layer", "sees", "heads", "dims", "softcap", "sinks", "mask", "layout", "backend", "hops", "bytes")


def check(
    model: PreTrainedModel,
    batch: Mapping[str, Any],
    *,
    world_size: int | None = None,
    layout: Layout | None = None,
    backend: str | None = None,
) -> str:
    """Print, for each attention call that `model` makes, what it would do with `batch`; also the text that is returned.

    A row of the table has what the layer sees of the sequence; heads of queries / keys; head dims of queries / values;
    softcap; sinks; the mask of this batch, by its fingerprint; layout, backend, hops, and the bytes that this rank sends in
    forward. A model that is refused, or a batch, is one line with the reason. Ranks do not talk to each other.

    Args:
        model: of transformers, in PEFT's wrapper or not, with weights; attached or not.
        batch: the whole batch, as the model would get it.
        world_size: ranks; default those of the group that the model is attached to, else 1. layout, backend: those
            that the model is attached with, else "zigzag" and "auto".

    Example:
        >>> import torch
        >>> from transformers import MistralConfig, MistralForCausalLM
        >>> config = MistralConfig(
        ...     vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        ...     num_key_value_heads=1, sliding_window=4
        ... )
        >>> model = MistralForCausalLM._from_config(config, attn_implementation="ringattn")
        >>> text = check(model, {"input_ids": torch.zeros(1, 16, dtype=torch.long)}, world_size=2)
        MistralForCausalLM, 16 tokens, batch 1, rank 0 of 2
        ...
    """
    text = "\n".join(_lines(model, batch, world_size, layout, backend))
    print(text)  # noqa: T201
    return text


def _lines(
    model: PreTrainedModel,
    batch: Mapping[str, Any],
    world_size: int | None,
    layout: Layout | None,
    backend: str | None,
) -> list[str]:
    model = unwrapped(model)
    state: State | None = getattr(model, STATE, None)
    is_new = state is None
    state = state or State(Settings(None, "zigzag", "fsdp", None, "auto", None))
    size, rank = size_rank(state.settings.group)
    world_size = size if world_size is None else world_size
    rank = rank if world_size == size else 0
    who = f"{type(model).__name__} with ringattn.hf"
    try:
        config = check_model(model, world_size)
        mark(model, True)
        facts = state.facts or state.learn(who, model, config)
        hook = Hook(state, model, is_outer=True)
        given = hook.given(who, (), dict(batch), config)
        ring = hook.local(who, given, facts, config)[0]["ring"]
    except (NotImplementedError, ValueError, FloatingPointError) as error:
        return [f"{type(model).__name__}: refused: {error}"]
    finally:
        if is_new:
            mark(model, False)
    source: Tensor = given["input_ids"] if "input_ids" in given else given["inputs_embeds"]
    names = {id(module): name for name, module in model.named_modules()}
    settings = (world_size, rank, layout or state.settings.layout, backend or ring.backend)
    rows = [_row(names[id(call.module)], call, ring, source, model, *settings) for call in facts.calls]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    table = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in (COLUMNS, *rows)]
    positions = "given" if "position_ids" in given else facts.positions or "must be given"
    loss = {None: "none", True: "of the next token", False: "of the token itself"}[facts.is_shifted]
    head = f"{type(model).__name__}, {ring.seqlen} tokens, batch {source.shape[0]}, rank {rank} of {world_size}"
    return [head, f"positions: {positions}; loss: {loss}", *table]


def _row(
    name: str,
    call: Seen,
    ring: RingContext,
    source: Tensor,
    model: nn.Module,
    world_size: int,
    rank: int,
    layout: Layout,
    backend: str,
) -> tuple[str, ...]:
    mask, dtype = ring.masks[call.pattern], next(model.parameters()).dtype
    if layout == "auto":
        layout = choose_layout(mask, ring.seqlen, world_size)
    dims = (call.heads, call.kv_heads, call.head_dim, call.value_dim)
    request = Request(source.device, dtype, *dims, call.softcap is not None, call.has_sinks, ring.seed is not None)
    try:
        chosen = choose(backend, request).name
    except NotImplementedError as error:
        chosen = f"refused: {error}"
    plan = build_plan(mask, layout, ring.seqlen, world_size, rank)
    sent = plan.bytes(
        batch=source.shape[0], kv_heads=call.kv_heads, head_dim=call.head_dim, v_head_dim=call.value_dim, dtype=dtype
    )
    return (
        name,
        str(call.pattern),
        f"{call.heads}/{call.kv_heads}",
        f"{call.head_dim}/{call.value_dim}",
        "-" if call.softcap is None else f"{call.softcap:g}",
        "yes" if call.has_sinks else "-",
        mask.fingerprint,
        layout if isinstance(layout, str) else type(layout).__name__,
        chosen,
        str(len(plan.hops)),
        f"{sent:,}",
    )
