"""`attach`: the families it knows, what it refuses, and the hooks that split a batch."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from ringattn.balance import choose_layout
from ringattn.handshake import share_verdict
from ringattn.hf.attention import FIRST, NAME, Group, RingContext, text
from ringattn.hf.batch import IGNORED, make_masks, shift
from ringattn.layout import Layout, positions, resolve
from ringattn.transport import VirtualWorld, group_name

__all__ = ["FAMILIES", "Family", "attach"]


class Family(NamedTuple):
    """The classes of one model family that `attach` knows."""

    causal_lm: str
    decoder: str


# A family belongs here if its layers pass **kwargs down to the attention function, its attention is causal with at most
# a sliding window, its first attention is `layers[0].self_attn`, and its loss function takes `shift_labels` and
# `num_items_in_batch`.
FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", "LlamaModel"),
    "mistral": Family("MistralForCausalLM", "MistralModel"),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Model"),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Model"),
    "smollm3": Family("SmolLM3ForCausalLM", "SmolLM3Model"),
}
LAYER_TYPES = ("full_attention", "sliding_attention")
LOCAL_ROPE = ("dynamic", "longrope")  # their frequencies depend on the largest position that a rank sees

# Arguments of the model that the hook reads, and those that it only passes on.
READ = (
    *("input_ids", "inputs_embeds", "labels", "shift_labels", "num_items_in_batch", "position_ids", "attention_mask"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
)
PASSED = ("output_hidden_states", "return_dict")

_STATE = "_ringattn"  # on the model: its settings and hooks


@dataclasses.dataclass(frozen=True)
class _Settings:
    group: Group
    layout: Layout
    loss_scale: str
    data_group: Group
    backend: str
    timeout: float | None


def attach(
    model: PreTrainedModel,
    group: Group,
    layout: Layout = "zigzag",
    *,
    loss_scale: str = "fsdp",
    data_group: Group = None,
    backend: str = "auto",
    timeout: float | None = None,
) -> PreTrainedModel:
    """Split the sequence of every batch of `model` over the ranks of `group`.

    Afterwards every rank of `group` calls the model with the same whole batch, and gets its own rows: `logits`,
    `last_hidden_state` and each of `hidden_states` are `[B, S, ...]` with the S rows that `layout` gives to the rank;
    `gather` makes them whole. Documents are where `position_ids` restarts (or, at batch 1, `cu_seq_lens_q`); an
    `attention_mask` may pad on the left and on the right. With labels, the loss of a rank is

        ranks * (sum of its rows' losses) / (labelled tokens of the whole batch)

    where `ranks` is the size of `group` times that of `data_group`. So the mean over ranks, which is what FSDP and DDP
    take of gradients, is the loss of one process with all batches. A rank without labelled tokens has loss 0.

    Calling it twice with the same settings does nothing; with others, it replaces them. Arguments of the model that one
    rank of `group` refuses raise the same error on every rank of `group`.

    Args:
        model: a causal LM or bare decoder of a family in `FAMILIES`, loaded with `attn_implementation="ringattn"`.
        group: a process group, a mesh of one axis, or None for one process.
        layout: "zigzag" (default), "contiguous", "striped", a layout value, or "auto": for each batch that of
            `ringattn.choose_layout`, from what its layers without a window see.
        loss_scale: "fsdp" (default) as above, where `num_items_in_batch`, if the caller gives it, is the number of
            labelled tokens over all data ranks and accumulated micro-batches; "caller" hands the caller's
            `num_items_in_batch` to the loss function untouched.
        data_group: ranks that hold other batches, over which labelled tokens are counted (one all-reduce); None
            (default): this batch is all there is. Every data rank must pass labels, and `num_items_in_batch`, or none.
        backend: block kernels, "auto" by default.
        timeout: seconds that a hop may take; None (default) is the group's.

    Raises:
        NotImplementedError: the model's family, class, layer types, rope type or attention dropout has no support.
        ValueError: `attn_implementation`, `group`, `loss_scale`, `data_group` or `layout` is wrong.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> model = LlamaForCausalLM._from_config(config, attn_implementation="ringattn")
        >>> attach(model, None)(torch.zeros(1, 5, dtype=torch.long)).logits.shape
        torch.Size([1, 5, 8])
    """
    _check_group("group", group)
    _check_group("data_group", data_group)
    _check_model(model, _size(group))
    if loss_scale not in ("fsdp", "caller"):
        raise ValueError(f"ringattn.hf.attach: loss_scale is {loss_scale!r}; it must be 'fsdp' or 'caller'.")
    if layout != "auto":
        resolve(layout)
    settings = _Settings(group, layout, loss_scale, data_group, backend, timeout)
    old, handles = getattr(model, _STATE, (None, ()))
    if old == settings:
        return model
    for handle in handles:
        handle.remove()
    decoder = _decoder(model)
    handles = []
    for module in (model,) if decoder is model else (model, decoder):
        hook = _Hook(settings, _parameters(module), is_outer=module is not decoder)
        handles.append(module.register_forward_pre_hook(hook.before, with_kwargs=True))
        handles.append(module.register_forward_hook(hook.after, with_kwargs=True))
    setattr(decoder.layers[0].self_attn, FIRST, True)
    setattr(model, _STATE, (settings, tuple(handles)))
    return model


def _check_group(name: str, group: object) -> None:
    """Refuse what is no group of processes."""
    who = "ringattn.hf.attach"
    try:
        group_name(group)
    except ValueError as error:  # "group is ...", whichever it is
        raise ValueError(f"{who}: {name.removesuffix('group')}{error}") from None
    if isinstance(group, VirtualWorld):
        raise ValueError(
            f"{who}: {name} is a VirtualWorld; it must be a ProcessGroup, a one-dimensional DeviceMesh or None."
        )


def _check_model(model: nn.Module, world_size: int) -> None:
    """Refuse what would run and be wrong."""
    who = "ringattn.hf.attach"
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind not in FAMILIES:
        raise NotImplementedError(
            f"{who}: model_type {kind!r} is not supported; it must be one of {', '.join(FAMILIES)}."
        )
    family = FAMILIES[kind]
    if not set(family) & {cls.__name__ for cls in type(model).__mro__}:
        raise NotImplementedError(
            f"{who}: model is a {type(model).__name__}; it must be a {family.causal_lm} or a {family.decoder}."
        )
    if (used := getattr(config, "_attn_implementation", None)) != NAME:
        raise ValueError(
            f"{who}: the model's attn_implementation is {used!r}; it must be {NAME!r}. Load the model with "
            f"attn_implementation={NAME!r}, or call model.set_attn_implementation({NAME!r}) first."
        )
    _check_dropout(who, config)
    if getattr(config, "is_causal", True) is False:
        raise NotImplementedError(f"{who}: config.is_causal is False; only causal decoders are supported.")
    if unknown := sorted(set(getattr(config, "layer_types", None) or ()) - set(LAYER_TYPES)):
        raise NotImplementedError(
            f"{who}: layer_types has {unknown[0]!r}; only {' and '.join(LAYER_TYPES)} are supported."
        )
    if world_size > 1 and (rope := sorted(_rope_types(config) & set(LOCAL_ROPE))):
        raise NotImplementedError(
            f"{who}: rope type {rope[0]!r} depends on the largest position, and each of {world_size} ranks sees its own"
            " only; use another rope type (default, linear, llama3, yarn), or a group of one."
        )


def _check_dropout(who: str, config: Any) -> None:
    if dropout := getattr(config, "attention_dropout", 0.0):
        raise NotImplementedError(
            f"{who}: attention_dropout is {dropout}, which is not supported yet; set config.attention_dropout to 0.0 "
            "before the model is made."
        )


def _check_attached(who: str, config: Any) -> None:
    """Refuse a config that was changed after `attach` to what would run and be wrong."""
    if (used := getattr(config, "_attn_implementation", None)) != NAME:
        raise ValueError(
            f"{who}: the model's attn_implementation is {used!r}; it must be {NAME!r} while the model is attached. Call "
            f"model.set_attn_implementation({NAME!r}), or make a model that is not attached."
        )
    _check_dropout(who, config)


def _decoder(model: nn.Module) -> nn.Module:
    return getattr(model, str(model.base_model_prefix), model)


def _rope_types(config: Any) -> set[str]:
    """Every rope type in the config, whose parameters are flat or one mapping for each layer type."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    each = [given, *(v for v in given.values() if isinstance(v, Mapping))]
    return {str(p.get("rope_type", p.get("type"))) for p in each}


def _parameters(module: nn.Module) -> tuple[str, ...]:
    """The names of what `module.forward` takes by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in inspect.signature(module.forward).parameters.values() if p.kind in kinds)


def _process_group(group: Group) -> dist.ProcessGroup | None:
    return group.get_group() if isinstance(group, DeviceMesh) else group


def _size(group: Group) -> int:
    return 1 if group is None else dist.get_world_size(_process_group(group))


def _rank(group: Group) -> int:
    return 0 if group is None else dist.get_rank(_process_group(group))


class _Hook:
    """Takes this rank's rows of the batch before `module.forward`, and cuts what is too much afterwards."""

    def __init__(self, settings: _Settings, parameters: tuple[str, ...], is_outer: bool) -> None:
        self.settings, self.parameters, self.is_outer = settings, parameters, is_outer

    @torch.compiler.disable
    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]] | None:
        """This rank's keyword arguments instead of the whole batch's.

        A rank cannot know that another refuses its arguments, and would wait for it in the first layer: so the verdict
        is shared over the group, before anything else is exchanged.
        """
        if isinstance(kwargs.get("ring"), RingContext):
            return None  # the causal LM has split the batch already
        who = f"{type(module).__name__} with ringattn.hf"
        config: Any = _decoder(module).config
        local: dict[str, Any] = {}
        labels: Tensor | None = None
        refusal: Exception | None = None
        try:
            _check_attached(who, config)
            given = self._given(who, args, kwargs)
            self._refuse(who, given)
            local, labels = self._local(who, given, getattr(config, "sliding_window", None))
        except (ValueError, NotImplementedError) as error:
            refusal = error
        share_verdict(refusal, self.settings.group, self.settings.timeout)
        if labels is not None:
            local["num_items_in_batch"] = self._items(local.get("num_items_in_batch"), labels)
        return (), local

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """A rank without rows returns none of its one row, cut in the graph, so that it runs backward as others do."""
        ring = kwargs.get("ring")
        if not isinstance(ring, RingContext) or ring.rows or ring.is_outer != self.is_outer:
            return None
        return _no_rows(output)

    def _given(self, who: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments that are not None, by name."""
        if len(args) > len(self.parameters):
            raise ValueError(
                f"{who}: arguments by position are {len(args)}; they must be at most {len(self.parameters)}: "
                f"{', '.join(self.parameters)}."
            )
        by_position = dict(zip(self.parameters, args, strict=False))
        if twice := [name for name in by_position if name in kwargs]:
            raise ValueError(f"{who}: {twice[0]} is given by position and by name; it must be given once.")
        return {name: value for name, value in {**by_position, **kwargs}.items() if value is not None}

    def _refuse(self, who: str, given: dict[str, Any]) -> None:
        """Raise at what is not honoured, and take out of `given` what then has only one value."""
        for name in ("past_key_values", "cache"):
            if name in given:
                raise NotImplementedError(
                    f"{who}: {name} is {text(given[name])}; generation over a ring is not supported yet, pass None."
                )
        for name, good, why in (
            ("use_cache", False, "generation over a ring is not supported yet"),
            ("output_attentions", False, "attention weights are never formed"),
            ("is_causal", True, "only causal attention is supported"),
            ("logits_to_keep", 0, "a rank's last rows are not the last of the sequence; cut the gathered logits"),
        ):
            value = given.pop(name, good)
            if not isinstance(value, bool | int) or value != good:
                raise NotImplementedError(f"{who}: {name} is {text(value)}; it must be {good}: {why}.")
        known = {*READ, *PASSED} - (set() if self.is_outer else {"labels", "shift_labels"})
        for name, value in given.items():
            if name not in known:
                raise NotImplementedError(f"{who}: {name} is {text(value)}, which is not known here; leave it out.")

    def _local(self, who: str, given: dict[str, Any], window: int | None) -> tuple[dict[str, Any], Tensor | None]:
        """This rank's arguments, and the shifted labels of the whole batch if there are any; nothing is exchanged."""
        s = self.settings
        sources = [name for name in ("input_ids", "inputs_embeds") if name in given]
        if len(sources) != 1:
            raise ValueError(f"{who}: got {' and '.join(sources) or 'no input_ids'}; give input_ids or inputs_embeds.")
        source: Tensor = given[sources[0]]
        if source.dim() != (2 if sources == ["input_ids"] else 3) or 0 in source.shape[:2]:
            raise ValueError(
                f"{who}: {sources[0]} has shape {tuple(source.shape)}; it must be [B, N] or [B, N, hidden], B > 0, N > 0."
            )
        batch, seqlen = shape = tuple(source.shape[:2])
        for name in ("labels", "shift_labels", "position_ids"):
            got = tuple(given[name].shape) if name in given else shape
            if got != shape and not (name == "position_ids" and got == (1, seqlen)):
                raise ValueError(f"{who}: {name} has shape {got}; it must be that of the whole batch, {shape}.")

        masks = make_masks(who, given, batch, seqlen, window)
        layout = choose_layout(masks[None], seqlen, _size(s.group)) if s.layout == "auto" else s.layout
        index = positions(layout, seqlen, _size(s.group), _rank(s.group)).to(source.device)
        rows = len(index)
        if rows == 0:  # models do not run on nothing
            index = torch.zeros(1, dtype=torch.int64, device=source.device)
        ids = given.get("position_ids", torch.arange(seqlen, device=source.device)[None]).to(source.device)
        local = {name: given[name] for name in PASSED if name in given}
        local[sources[0]] = source.index_select(1, index)
        local["position_ids"] = ids.index_select(1, index)
        local["use_cache"] = False
        labels: Tensor | None = None
        if "labels" in given or "shift_labels" in given:
            if s.loss_scale == "caller" and "num_items_in_batch" not in given:
                raise ValueError(f"{who}: num_items_in_batch is None; with loss_scale='caller' it must be given.")
            labels = given["shift_labels"] if "shift_labels" in given else shift(given["labels"])
            mine = labels.to(source.device).index_select(1, index)
            local["labels"] = local["shift_labels"] = mine if rows else torch.full_like(mine, IGNORED)
            local["num_items_in_batch"] = given.get("num_items_in_batch")
        local["ring"] = RingContext(s.group, layout, seqlen, rows, masks, s.backend, s.timeout, self.is_outer)
        return local, labels

    def _items(self, items: Any, labels: Tensor) -> Any:
        """What the loss function divides the sum over this rank's rows by."""
        s = self.settings
        if s.loss_scale == "caller":
            return items
        if items is None:
            items = (labels != IGNORED).sum()
            if s.data_group is not None:
                dist.all_reduce(items, group=_process_group(s.data_group))
        return torch.as_tensor(items, device=labels.device).clamp(min=1) / (_size(s.group) * _size(s.data_group))


def _no_rows(output: Any) -> Any:
    """`output` with its tensors `[B, 1, ...]` cut to `[B, 0, ...]`."""
    if isinstance(output, Tensor):
        return output[:, :0] if output.dim() > 1 else output
    if isinstance(output, dict):
        for name, value in output.items():
            output[name] = _no_rows(value)
        return output
    return type(output)(map(_no_rows, output)) if isinstance(output, tuple | list) else output
