"""`attach`: what it refuses, and the hooks that split a batch."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from ringattn.balance import choose_layout
from ringattn.handshake import exchange, share_verdict
from ringattn.hf.attention import ATTACHED, FIRST, INDEX, NAME, Group, RingContext, mixed, text
from ringattn.hf.batch import document_starts, make_masks, places, shift
from ringattn.hf.families import RECURRENT
from ringattn.hf.generate import Prompt, begin, check_cache, continued, prompt_of
from ringattn.hf.loss import IGNORED, LossParts, with_loss
from ringattn.hf.trial import CONVENTIONS, Facts, try_out
from ringattn.layout import Layout, positions, resolve
from ringattn.transport import VirtualWorld, group_name

__all__ = ["STATE", "Hook", "Settings", "State", "attach", "check_model", "mark", "size_rank", "unwrapped"]


LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "attention")
LOCAL_ROPE = ("dynamic", "longrope")  # their frequencies depend on the largest position, which one rank does not see

# Arguments of the model that the hook reads, and those that it only passes on.
READ = (
    *("input_ids", "inputs_embeds", "labels", "shift_labels", "num_items_in_batch", "position_ids", "attention_mask"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),
)
PASSED = ("output_hidden_states", "output_router_logits", "return_dict")

STATE = "_ringattn"  # on the model: its settings and hooks


@dataclasses.dataclass(frozen=True)
class Settings:
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
    `gather` makes them whole. Documents are where `position_ids` restarts, where `seq_idx` changes, or, at batch 1, by
    `cu_seq_lens_q`; an `attention_mask` may pad on the left and on the right. `check` says what each layer does with a
    batch. With labels, the loss of a rank is

        ranks * (sum of its rows' losses) / (labelled tokens of the whole batch)

    where `ranks` is the size of `group` times that of `data_group`. So the mean over ranks, which is what FSDP and DDP
    take of gradients, is the loss of one process with all batches. A rank without labelled tokens has loss 0. The auxiliary
    loss of experts (`output_router_logits`) is that of all batches likewise. Where a class's own loss does not go by
    `shift_labels`, and is the cross-entropy of its logits, it is made here. Attention dropout, in training, drops the
    weights that one process would drop with the same seed; one is drawn in each forward from torch's CPU generator on
    the first rank of `group`, and mixed with the layer and the rank in `data_group`.

    Calling it twice with the same settings does nothing; with others, it replaces them. Arguments of the model that one
    rank of `group` refuses raise the same error on every rank of `group`.

    Args:
        model: a language model (one that gives a row of logits for each token) or bare decoder or encoder, loaded with
            `attn_implementation="ringattn"`. Which classes are right is in docs/models.md; a model whose tokens meet
            outside of the attention function is found by a trial on a dozen tokens and refused. A PEFT model is attached inside its wrapper. The trial is made here,
            or, if the weights are not there yet (on the meta device, or not finite), before the first batch.
        group: a process group, a mesh of one axis, or None for one process.
        layout: "zigzag" (default), "contiguous", "striped", a layout value, or "auto": for each batch that of
            `ringattn.choose_layout`, from what its layers without a window see.
        loss_scale: "fsdp" (default) as above, where `num_items_in_batch`, if the caller gives it, is the number of
            labelled tokens over all data ranks and accumulated micro-batches; "caller" (for the Trainer) hands the
            caller's `num_items_in_batch` to the loss function untouched, requires labels in training, and returns no
            logits beside labels in evaluation, where the caller would take some rows for all.
        data_group: ranks that hold other batches, over which labelled tokens are counted (one all-reduce); None
            (default): this batch is all there is. Every data rank must pass labels, and `num_items_in_batch`, or none.
        backend: block kernels, "auto" by default.
        timeout: seconds that a hop may take; None (default) is the group's.

    Raises:
        NotImplementedError: the model's class, a layer of it or an argument of an attention call has no support.
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
    base = unwrapped(model)
    config = check_model(base, _size(group))
    if loss_scale not in ("fsdp", "caller"):
        raise ValueError(f"ringattn.hf.attach: loss_scale is {loss_scale!r}; it must be 'fsdp' or 'caller'.")
    if layout != "auto":
        resolve(layout)
    settings = Settings(group, layout, loss_scale, data_group, backend, timeout)
    old: State | None = getattr(base, STATE, None)
    if old is not None and old.settings == settings:
        return model
    state = State(settings)
    mark(base, True)
    if not any(p.is_meta for p in base.parameters()):
        try:
            state.learn("ringattn.hf.attach", base, config)
        except FloatingPointError:  # weights that are still to be loaded
            pass
        except Exception:
            mark(base, old is not None)
            raise
    if old is not None:
        old.remove()
    decoder = _decoder(base)
    for module in (base,) if decoder is base else (base, decoder):
        hook = Hook(state, module, is_outer=module is not decoder)
        state.handles.append(module.register_forward_pre_hook(hook.before, with_kwargs=True))
        state.handles.append(module.register_forward_hook(hook.after, with_kwargs=True))
    for rope in _local_ropes(base):
        state.handles.append(rope.register_forward_pre_hook(_lengthen, with_kwargs=True))
        state.handles.append(rope.register_forward_hook(_shorten, with_kwargs=True))
    setattr(base, STATE, state)
    return model


def unwrapped(model: nn.Module) -> Any:
    """The model of transformers in PEFT's wrapper, which hands the batch on; any other model is itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


class State:
    """What `attach` leaves on a model."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.handles: list[Any] = []
        self.facts: Facts | None = None

    def learn(self, who: str, model: nn.Module, config: Any, *, is_called: bool = False) -> Facts:
        """Make the trial, and number the attention modules in the order of their calls."""
        ropes = [
            (rope, dict(vars(rope)), {k: b.clone() for k, b in rope.named_buffers()}) for rope in _local_ropes(model)
        ]
        try:
            self.facts = try_out(who, model, config, is_called=is_called)
        finally:
            for rope, attributes, buffers in ropes:  # they remember the longest sequence that they have seen
                vars(rope).update(attributes)
                rope._buffers = {**rope._buffers, **buffers}
        for index, call in enumerate(reversed(self.facts.calls), 1):
            setattr(call.module, INDEX, len(self.facts.calls) - index)
        setattr(self.facts.calls[0].module, FIRST, True)
        return self.facts

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def mark(model: nn.Module, is_attached: bool) -> None:
    for module in model.modules():
        setattr(module, ATTACHED, is_attached)


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


def check_model(model: nn.Module, world_size: int) -> Any:
    """Refuse what would run and be wrong; the config of the text model."""
    who = "ringattn.hf.attach"
    if not isinstance(model, PreTrainedModel):
        raise NotImplementedError(f"{who}: model is a {type(model).__name__}; it must be a model of transformers.")
    if model.config.is_encoder_decoder and _decoder(model) is not model:
        raise NotImplementedError(
            f"{who}: {type(model).__name__} is an encoder and a decoder, which see each other; only one of them alone is "
            "supported."
        )
    config: Any = model.config.get_text_config(decoder=True)
    check_attached(who, config)
    if unknown := sorted(set(getattr(config, "layer_types", None) or ()) - set(LAYER_TYPES)):
        raise NotImplementedError(
            f"{who}: layer_types has {unknown[0]!r}; only {', '.join(LAYER_TYPES)} are supported."
        )
    for name, value in vars(config).items():
        if "layerdrop" in name and value and world_size > 1:
            raise NotImplementedError(
                f"{who}: config.{name} is {value}; ranks would leave out layers of their own choice, and wait for each other. "
                "Set it to 0.0."
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase) or RECURRENT.search(type(module).__name__):
            raise NotImplementedError(
                f"{who}: {name or 'model'} is a {type(module).__name__}, which carries something from token to token outside "
                "of attention; only attention is split over ranks."
            )
    if world_size > 1 and (rope := sorted(_rope_types(config) & set(LOCAL_ROPE))) and not _local_ropes(model):
        raise NotImplementedError(
            f"{who}: rope type {rope[0]!r} depends on the largest position, and {type(model).__name__} has no module that "
            "could be told; use another rope type (default, linear, llama3, yarn)."
        )
    return config


def check_attached(who: str, config: Any) -> None:
    """Refuse a config that was changed after `attach` to what would run and be wrong."""
    if (used := getattr(config, "_attn_implementation", None)) != NAME:
        raise ValueError(
            f"{who}: the model's attn_implementation is {used!r}; it must be {NAME!r} while the model is attached. Load "
            f"the model with attn_implementation={NAME!r}, or call model.set_attn_implementation({NAME!r})."
        )


def _has_dropout(config: Any) -> bool:
    """Whether some attention of the model drops weights: `attention_dropout`, `attn_pdrop`, and their like."""
    return any(
        isinstance(value, float) and value > 0
        for name, value in vars(config).items()
        if name.startswith("att") and "drop" in name
    )


def _decoder(model: nn.Module) -> nn.Module:
    base = getattr(model, str(model.base_model_prefix), None)
    return base if isinstance(base, nn.Module) else model.get_decoder()  # type: ignore[operator]


def _has_local_rope(config: Any) -> bool:
    return bool(_rope_types(config) & set(LOCAL_ROPE))


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


def size_rank(group: Group) -> tuple[int, int]:
    return _size(group), _rank(group)


def _rank(group: Group) -> int:
    return 0 if group is None else dist.get_rank(_process_group(group))


def _local_ropes(model: nn.Module) -> list[nn.Module]:
    """The modules whose frequencies depend on the largest of the positions that they are given."""

    def types(module: nn.Module) -> set[Any]:
        found = getattr(module, "rope_type", None)
        return set(found.values()) if isinstance(found, Mapping) else {found}

    return [module for module in model.modules() if types(module) & set(LOCAL_ROPE)]


LAST = "_ringattn_last"  # on such a module: the largest position of the whole batch


def _lengthen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give the module one more position, the largest of the whole batch."""
    last = getattr(module, LAST, None)
    if last is None:
        return None
    given = inspect.signature(module.forward).bind(*args, **kwargs)
    ids = given.arguments["position_ids"]
    given.arguments["position_ids"] = torch.cat([ids, torch.full_like(ids[..., :1], last)], dim=-1)
    return given.args, given.kwargs


def _shorten(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    return None if getattr(module, LAST, None) is None else tuple(x[..., :-1, :] for x in output)


class Hook:
    """Takes this rank's rows of the batch before `module.forward`, and cuts what is too much afterwards."""

    def __init__(self, state: State, module: nn.Module, is_outer: bool) -> None:
        self.state, self.settings = state, state.settings
        self.module, self.parameters, self.is_outer = module, _parameters(module), is_outer

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
        config: Any = module.config.get_text_config(decoder=True)
        local: dict[str, Any] = {}
        labels: Tensor | None = None
        refusal: Exception | None = None
        try:
            check_attached(who, config)
            given = self.given(who, args, kwargs, config)
            local, labels = self.local(who, given, self._facts(who, module, config), config)
        except (ValueError, NotImplementedError) as error:
            refusal = error
        share_verdict(refusal, self.settings.group, self.settings.timeout)
        if module.training and _has_dropout(config):
            local["ring"] = dataclasses.replace(local["ring"], seed=self._seed())
        for rope in _local_ropes(module):
            setattr(rope, LAST, local["ring"].last)
        if labels is not None:
            items = self._items(local.pop("num_items_in_batch"), labels)
            if local["ring"].loss is None:
                local["num_items_in_batch"] = items
            else:
                parts = dataclasses.replace(local["ring"].loss, items=items)
                local["ring"] = dataclasses.replace(local["ring"], loss=parts)
        return (), local

    def _facts(self, who: str, module: nn.Module, config: Any) -> Facts:
        """What the trial found; it is made now if there were no weights before."""
        if self.state.facts is not None:
            return self.state.facts
        try:
            return self.state.learn(who, module, config, is_called=True)
        except FloatingPointError as error:
            raise ValueError(str(error)) from None

    def _seed(self) -> int:
        """Of this forward's dropout: the same on the ranks of the group, another on each data rank."""
        s, seed = self.settings, int(torch.randint(2**62, (), device="cpu"))
        if _size(s.group) > 1:
            cards = exchange({"seed": str(seed)}, group_name(s.group), s.timeout, "ringattn.hf")
            seed = int(cards[0]["seed"])
        return mixed(seed, _rank(s.data_group))

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Add the loss, where the model does not make it.

        A rank without rows returns none of its one row, cut in the graph, so that it runs backward as others do.
        """
        ring = kwargs.get("ring")
        if not isinstance(ring, RingContext) or ring.is_outer != self.is_outer:
            return None
        if ring.last_rank is not None:
            return self._last_logits(output, ring.last_rank)
        if ring.loss is not None:
            output = with_loss(output, ring.loss)
        if self.settings.loss_scale == "caller" and not module.training and "loss" in output:
            output = type(output)(**{name: value for name, value in output.items() if name != "logits"})
        return output if ring.rows else _no_rows(output)

    def _last_logits(self, output: Any, last_rank: int) -> Any:
        """`output` with the logits of the prompt's last token, on every rank."""
        if "logits" in output:
            last = output["logits"][:, -1:].contiguous()
            if _size(self.settings.group) > 1:
                dist.broadcast(last, group=_process_group(self.settings.group), group_src=last_rank)
            output["logits"] = last
        return output

    def given(self, who: str, args: tuple[Any, ...], kwargs: dict[str, Any], config: Any) -> dict[str, Any]:
        """All arguments that are not None, by name, those apart that have only one value; "cache" may be None."""
        if len(args) > len(self.parameters):
            raise ValueError(
                f"{who}: arguments by position are {len(args)}; they must be at most {len(self.parameters)}: "
                f"{', '.join(self.parameters)}."
            )
        by_position = dict(zip(self.parameters, args, strict=False))
        if twice := [name for name in by_position if name in kwargs]:
            raise ValueError(f"{who}: {twice[0]} is given by position and by name; it must be given once.")
        found = {name: value for name, value in {**by_position, **kwargs}.items() if value is not None}
        found["cache"] = check_cache(who, found, config)
        self._refuse(who, found)
        return found

    def _refuse(self, who: str, given: dict[str, Any]) -> None:
        """Raise at what is not honoured, and take out of `given` what then has only one value."""
        if given["cache"] is not None:
            value = given.pop("logits_to_keep", 0)
            if prompt_of(given["cache"]) is not None:
                given["kept"] = value  # all ranks have all of the new rows
            elif not isinstance(value, int) or value not in (0, 1):
                raise NotImplementedError(
                    f"{who}: logits_to_keep is {text(value)}; for a prompt it must be 1: all ranks return the logits of the last token."
                )
            if given.get("return_dict", True) is not True:
                raise NotImplementedError(
                    f"{who}: return_dict is {text(given['return_dict'])}; with a cache it must be True."
                )
            for name in ("labels", "shift_labels"):
                if name in given:
                    raise NotImplementedError(f"{who}: {name} are given with a cache; leave them out, or the cache.")
            # older versions say so beside positions, where the tokens stand in the cache
            done = 0 if (prompt := prompt_of(given["cache"])) is None else prompt.total
            at = given.pop("cache_position", None)
            if at is not None and at.tolist() != list(range(done, done + len(at))):
                raise NotImplementedError(
                    f"{who}: cache_position is {text(at)} from {at[:1].tolist()}; the cache holds {done} tokens, and it must go on from there."
                )
        for name, good, why in (
            ("output_attentions", False, "attention weights are never formed"),
            ("is_causal", True, "what a layer sees is in its mask; set it in the config"),
            ("logits_to_keep", 0, "a rank's last rows are not the last of the sequence; cut the gathered logits"),
        ):
            value = given.pop(name, good)
            if not isinstance(value, bool | int) or value != good:
                raise NotImplementedError(f"{who}: {name} is {text(value)}; it must be {good}: {why}.")
        known = {*READ, *PASSED, "cache", "kept"} - (
            set() if "labels" in self.parameters else {"labels", "shift_labels"}
        )
        for name, value in given.items():
            if name not in known:
                raise NotImplementedError(f"{who}: {name} is {text(value)}, which is not known here; leave it out.")

    def local(self, who: str, given: dict[str, Any], facts: Facts, config: Any) -> tuple[dict[str, Any], Tensor | None]:
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

        if (prompt := prompt_of(given["cache"])) is not None:
            return self._continued(who, given, prompt, source, sources[0], config), None
        patterns = dict.fromkeys(call.pattern for call in facts.calls)
        starts = document_starts(who, given, batch, seqlen)
        masks = make_masks(who, given, starts, seqlen, patterns)
        widest = masks[max(patterns, key=lambda p: (p.left is None, p.chunk is None))]
        layout = choose_layout(widest, seqlen, _size(s.group)) if s.layout == "auto" else s.layout
        index = positions(layout, seqlen, _size(s.group), _rank(s.group)).to(source.device)
        rows = len(index)
        if rows == 0:  # models do not run on nothing
            index = torch.zeros(1, dtype=torch.int64, device=source.device)
        ids = self._positions(who, given, facts, config, source).to(source.device)
        local = {name: given[name] for name in PASSED if name in given}
        local[sources[0]] = source.index_select(1, index)
        local["position_ids"] = ids.index_select(1, index)
        cache = given["cache"]
        local.update(self._with_cache(cache, 1))
        if cache is not None:
            size, rank = _size(s.group), _rank(s.group)
            mine_at = positions(layout, seqlen, size, rank)
            begin(who, cache, given, starts, mine_at, seqlen, rank == size - 1)
        has_experts = self._has_experts(who, given, facts, config)
        if has_experts:
            local["output_router_logits"] = True
        labels: Tensor | None = None
        mine: Tensor | None = None
        if "labels" in given or "shift_labels" in given:
            if facts.is_shifted is None:
                raise NotImplementedError(
                    f"{who}: labels are given, and the loss of this class is not the cross-entropy of its logits; leave "
                    "them out, and take the loss from the logits."
                )
            if s.loss_scale == "caller" and self.module.training and "num_items_in_batch" not in given:
                raise ValueError(f"{who}: num_items_in_batch is None; with loss_scale='caller' it must be given.")
            if "shift_labels" in given:
                labels = given["shift_labels"]
            else:
                labels = shift(given["labels"]) if facts.is_shifted else given["labels"]
            mine = labels.to(source.device).index_select(1, index)
            mine = mine if rows else torch.full_like(mine, IGNORED)
            if facts.is_split and not has_experts:
                local["labels"] = local["shift_labels"] = mine
            local["num_items_in_batch"] = given.get("num_items_in_batch")
        elif s.loss_scale == "caller" and self.module.training and "labels" in self.parameters and cache is None:
            raise NotImplementedError(
                f"{who}: labels are None in training with loss_scale='caller'; they must be given. What makes a loss of logits outside of the "
                "model (label smoothing, compute_loss_func and the like) has some rows on each rank only, and is not supported."
            )
        last = int(ids.max()) if _has_local_rope(config) else None
        local["ring"] = RingContext(
            s.group,
            layout,
            seqlen,
            rows,
            masks,
            s.backend,
            s.timeout,
            self.is_outer,
            places(starts, seqlen).to(source.device).index_select(1, index),
            loss=self._parts(mine, facts, given, index, rows, has_experts)
            if has_experts or (mine is not None and not facts.is_split)
            else None,
            last=last,
            last_rank=None if cache is None else _holder(layout, seqlen, _size(s.group)),
        )
        return local, labels

    def _with_cache(self, cache: Any, logits_to_keep: Any) -> dict[str, Any]:
        """What says to the model which cache it has, and which rows' logits it is to make."""
        if cache is None:
            return {"use_cache": False}
        name = "cache" if "cache" in inspect.signature(self.module.forward).parameters else "past_key_values"
        return {"use_cache": True, name: cache} | (
            {"logits_to_keep": logits_to_keep} if "logits_to_keep" in self.parameters else {}
        )

    def _continued(
        self, who: str, given: dict[str, Any], prompt: Prompt, source: Tensor, name: str, config: Any
    ) -> dict[str, Any]:
        """The arguments for tokens after a prompt, which every rank computes."""
        rows = source.shape[1]
        if "position_ids" not in given:
            raise NotImplementedError(f"{who}: position_ids is None with a cache that holds a prompt; give them.")
        ids = given["position_ids"]
        at = torch.arange(prompt.total, prompt.total + rows) - prompt.left[:, None]
        local = {key: given[key] for key in PASSED if key in given}
        local |= {name: source, "position_ids": ids, **self._with_cache(given["cache"], given["kept"])}
        s = self.settings
        local["ring"] = RingContext(
            s.group,
            "contiguous",
            rows,
            rows,
            {},
            s.backend,
            s.timeout,
            self.is_outer,
            at.to(source.device),
            last=int(ids.max()) if _has_local_rope(config) else None,
            decode=continued(who, prompt, given, rows),
        )
        return local

    def _has_experts(self, who: str, given: dict[str, Any], facts: Facts, config: Any) -> bool:
        """Whether the loss holds the auxiliary loss of experts."""
        default = bool(getattr(config, "output_router_logits", False))
        if "labels" not in self.parameters or not given.get("output_router_logits", default):
            return False
        if facts.experts is None:
            raise NotImplementedError(
                f"{who}: output_router_logits is True, and no auxiliary loss is known: it must be False, or set in the config "
                "before attach, of a class that balances experts as the Switch Transformer does."
            )
        if given.get("return_dict") is False:
            raise NotImplementedError(f"{who}: return_dict is False with output_router_logits; it must be True.")
        return True

    def _parts(
        self, labels: Tensor | None, facts: Facts, given: dict[str, Any], index: Tensor, rows: int, has_experts: bool
    ) -> LossParts:
        s, source = self.settings, given.get("input_ids", given.get("inputs_embeds"))
        valid = given.get("attention_mask", torch.ones(source.shape[:2], dtype=torch.int64)).to(source.device)
        valid = valid.index_select(1, index).bool() & (rows > 0)
        groups = [group for group in (s.group, s.data_group) if group is not None]

        def reduce(x: Tensor) -> Tensor:
            for group in groups:
                dist.all_reduce(x, group=_process_group(group))
            return x

        ranks = _size(s.group) * _size(s.data_group)
        return LossParts(labels, None, facts.experts if has_experts else None, valid, ranks, reduce)

    def _positions(self, who: str, given: dict[str, Any], facts: Facts, config: Any, source: Tensor) -> Tensor:
        """`position_ids` of the whole batch, as the model would number its tokens if it is not told."""
        if "position_ids" in given:
            return given["position_ids"]
        if facts.positions is None:
            raise NotImplementedError(
                f"{who}: position_ids is None, and how this class numbers tokens is not known here; give them."
            )
        ids = given.get("input_ids")
        if ids is None:
            if facts.positions == "after the pad id":
                raise NotImplementedError(
                    f"{who}: position_ids is None, and this class numbers tokens by input_ids, which are not given; give "
                    "position_ids with inputs_embeds."
                )
            ids = torch.empty(source.shape[:2], dtype=torch.int64, device="meta")
        mask = given.get("attention_mask", torch.ones(source.shape[:2], dtype=torch.int64)).to(source.device)
        pad = getattr(config, "pad_token_id", None)
        found = CONVENTIONS[facts.positions](ids, mask, 0 if pad is None else int(pad))
        return torch.arange(ids.shape[1])[None] if found.is_meta else found

    def _items(self, items: Any, labels: Tensor) -> Any:
        """What the loss function divides the sum over this rank's rows by."""
        s = self.settings
        if s.loss_scale == "caller" and items is not None:
            return items
        if items is None:
            items = (labels != IGNORED).sum()
            if s.data_group is not None:
                dist.all_reduce(items, group=_process_group(s.data_group))
        return torch.as_tensor(items, device=labels.device).clamp(min=1) / (_size(s.group) * _size(s.data_group))


def _holder(layout: Layout, seqlen: int, world_size: int) -> int:
    """The rank that holds the last token."""
    return next(r for r in range(world_size) if seqlen - 1 in positions(layout, seqlen, world_size, r)[-1:])


def _no_rows(output: Any) -> Any:
    """`output` with its tensors `[B, 1, ...]` cut to `[B, 0, ...]`."""
    if isinstance(output, Tensor):
        return output[:, :0] if output.dim() > 1 else output
    if isinstance(output, dict):
        for name, value in output.items():  # routers have the rows of all the batch in the first dim
            output[name] = tuple(x[:0] for x in value) if name == "router_logits" and value else _no_rows(value)
        return output
    return type(output)(map(_no_rows, output)) if isinstance(output, tuple | list) else output
