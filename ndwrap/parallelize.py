"""Tensor parallelism, ring attention, activation checkpointing and FSDP2 on one mesh, in that order."""

import fnmatch
import functools
import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import ringattn.hf
from ndwrap.mesh import check_mesh

__all__ = ["apply_tp", "parallelize"]

PERIOD = 65521  # of the positions' weights; prime, so that it divides the size of no usual row


def parallelize(
    model: Any,
    mesh: DeviceMesh,
    *,
    layout: Any = "zigzag",
    activation_checkpointing: bool = False,
    backend: str = "auto",
    timeout: float | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool = True,
) -> Any:
    """The same model, spread over the mesh: every parameter is a DTensor, and attention is a ring over `cp`.

    Afterwards `model(input_ids=..., labels=...)` takes the whole batch, the same on every cp and tp rank, and returns
    this rank's rows. The mean of the ranks' losses is the loss of the global batch (`global_loss`), and so it is with
    the gradients, which FSDP averages. Names in the state dict stay what they were.

    In order: the model's own tensor parallel plan over `tp`, if its size is > 1; `ringattn.hf.attach` over `cp`, of any
    size; activation checkpointing; `fully_shard` of each decoder layer and then of the model over `dp_shard_cp`, with
    copies over `dp_replicate` if its size is > 1. There is one path for every mesh: FSDP over a single rank, as on a
    mesh with tp only, moves nothing.

    Tied embeddings stay tied, and are then split over `tp` by vocabulary; otherwise only the head is. A vocabulary that
    `tp_size` does not divide is not split.

    Args:
        model: a causal language model of transformers, with the same weights on every rank, or on the meta device.
        mesh: of `init_mesh`.
        layout: which positions of the sequence each cp rank holds, default "zigzag"; see `ringattn`.
        activation_checkpointing: recompute each decoder layer in backward, default False. It acts in training mode.
        backend: block kernels of the attention, "auto" by default.
        timeout: seconds that a hop of the ring may take; None (default) is the process group's.
        mp_policy: FSDP2's dtypes; None (default) is those of the model.
        reshard_after_forward: free a layer's gathered weights between forward and backward, default True.

    Raises:
        ValueError: the mesh is not one of `init_mesh`, the model is quantized, or its heads or its plan do not go with
            `tp`.
        NotImplementedError: from `ringattn.hf.attach`, which does not know the model's class, or something in it.
        RuntimeError: the model or its weights are not the same on every rank; on every rank alike.
    """
    check_mesh("parallelize", mesh)
    layers = _decoder_layers(model)
    tp = mesh["tp"]
    styles = _tp_styles(model, tp.size()) if tp.size() > 1 else {}
    _check_same_weights(model, mesh)

    model.set_attn_implementation("ringattn")
    if tp.size() > 1:
        _apply_tp(model, tp, styles)

    dp = mesh["dp"]
    ringattn.hf.attach(
        model,
        mesh["cp"].get_group(),
        layout,
        data_group=dp.get_group() if dp.size() > 1 else None,
        backend=backend,
        timeout=timeout,
    )

    if activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    is_replicated = mesh["dp_replicate"].size() > 1
    shard = functools.partial(
        fully_shard,
        mesh=mesh["dp_replicate", "dp_shard_cp"] if is_replicated else mesh["dp_shard_cp"],
        mp_policy=mp_policy or MixedPrecisionPolicy(),
    )
    for layer in layers:
        shard(layer, reshard_after_forward=reshard_after_forward)
    shard(model)  # the root's own weights are needed again first thing in backward, so FSDP keeps them
    return model


def _decoder_layers(model: Any) -> list[nn.Module]:
    layers = getattr(getattr(model, "base_model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(
            f"parallelize: model is a {type(model).__name__}, whose decoder layers are not in base_model.layers; "
            "it must be a causal language model of transformers."
        )
    if (
        getattr(model, "hf_quantizer", None) is not None
        or getattr(model.config, "quantization_config", None) is not None
    ):
        raise ValueError(
            f"parallelize: model is a quantized {type(model).__name__}; FSDP2 and TP need plain weights. "
            "Load it unquantized."
        )
    return list(layers)


def _check_same_weights(model: nn.Module, mesh: DeviceMesh) -> None:
    """Each rank keeps its own shards, so ranks that were seeded differently would make up a model that nobody has.

    What a rank does next depends only on what all have agreed on, so that none is left alone in a collective.
    """
    if mesh.size() == 1:
        return
    parameters = dict(model.named_parameters())
    layout = [(name, tuple(p.shape), p.dtype) for name, p in parameters.items()]
    facts = {
        "the number of parameters": len(parameters),
        "the number of parameters on the meta device": sum(p.is_meta for p in parameters.values()),
        "a hash of the parameters' names, shapes and dtypes": int.from_bytes(
            hashlib.sha256(repr(layout).encode()).digest()[:8], "big", signed=True
        ),
    }
    smallest, largest = _extremes(torch.tensor(list(facts.values()), device=mesh.device_type))
    differing = [
        f"{fact} is between {low} and {high}"
        for fact, low, high in zip(facts, smallest.tolist(), largest.tolist(), strict=True)
        if low != high
    ]
    if differing:
        raise RuntimeError(
            f"parallelize: model differs between ranks: {', '.join(differing)}; the model must be the same on every "
            "rank. Build it from one configuration, on the meta device on every rank or on none."
        )

    nothing = torch.zeros(2, dtype=torch.int64)
    sums = [(nothing if p.is_meta else _byte_sums(p)).to(mesh.device_type) for p in parameters.values()]
    if not sums:
        return
    smallest, largest = _extremes(torch.stack(sums))
    number = int((smallest != largest).any(dim=1).sum())
    if number:
        raise RuntimeError(
            f"parallelize: {number} of {len(sums)} parameters differ between ranks; the weights must be the same on "
            "every rank. Seed every rank alike before the model is built, or load one checkpoint."
        )


def _extremes(own: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest of all ranks, element by element."""
    smallest, largest = own.clone(), own.clone()
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return smallest, largest


def _byte_sums(weight: Tensor) -> Tensor:
    """`[2]`, int64: the sum of the bytes, and a sum weighted by position, which a permutation changes."""
    chunks = weight.detach().contiguous().flatten().view(torch.uint8).split(PERIOD * 64)  # int64 takes eight times it
    positions = torch.arange(chunks[0].numel(), device=weight.device) % PERIOD + 1
    return torch.stack(
        [torch.stack([chunk.sum(), (chunk * positions[: chunk.numel()]).sum()]) for chunk in chunks]
    ).sum(dim=0)


class _Replicated(ParallelStyle):
    """Every rank holds the whole module; its parameters become DTensors, so that FSDP and clipping see one mesh.

    Args:
        rows: how the input's rows lie on the ranks. `Replicate()` (default): each has all of them. `Shard(0)`: each has
            its own, for modules that look at the last dim only, such as a norm per head; the gradient of their weights
            is then a sum over ranks, which FSDP takes when it sees that it is partial.
    """

    def __init__(self, rows: Placement | None = None) -> None:
        super().__init__()
        self.rows = rows or Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in module.named_parameters(recurse=False):
            replica = DTensor.from_local(parameter.detach(), device_mesh, [Replicate()], run_check=False)
            module.register_parameter(name, nn.Parameter(replica, requires_grad=parameter.requires_grad))

        def wrap(value: Any) -> Any:
            if isinstance(value, Tensor) and not isinstance(value, DTensor):
                return DTensor.from_local(value, device_mesh, [self.rows], run_check=False)
            return value

        def before(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return tuple(map(wrap, args)), {key: wrap(value) for key, value in kwargs.items()}

        def after(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
            return out.to_local() if isinstance(out, DTensor) else out

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)
        return module


# By their names in the plans of transformers; "colwise_rep" is what older versions call "colwise_gather_output".
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    "replicated_with_grad_allreduce": lambda: _Replicated(Shard(0)),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "replicate": _Replicated,
}
SPLIT_FEATURES = {"colwise": "out_features", "rowwise": "in_features"}


def _tp_styles(model: Any, tp_size: int) -> dict[str, str]:
    """The style of every module with parameters of its own, by the model's plan; nothing is changed.

    Raises:
        ValueError: model and plan do not go with `tp_size`.
    """
    who, kind = "parallelize", type(model).__name__
    config = model.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if heads is not None and heads % tp_size:
            raise ValueError(
                f"{who}: {kind} has {name}={heads} and tp_size is {tp_size}; tp_size must divide it. Lower tp_size."
            )
    plan = _plan(model, config)
    if not plan:
        raise ValueError(
            f"{who}: {kind} has no tensor parallel plan (config.base_model_tp_plan) and tp_size is {tp_size}. "
            "Set it to 1."
        )

    def planned(*paths: str) -> str | None:
        return next((plan[key] for key in plan for path in paths if fnmatch.fnmatchcase(path, key)), None)

    # What stands beside a split projection, such as a norm per head, meets on each rank its own heads only; plans of
    # older versions (transformers 5.2) do not mention such modules.
    beside_split = {name.rpartition(".")[0] for name, _ in model.named_modules() if planned(name) == "colwise"}
    styles: dict[str, str] = {}
    for name, module in model.named_modules():
        own = [f"{name}.{key}" for key, _ in module.named_parameters(recurse=False)]
        style = planned(name, *own)
        if style not in (None, *STYLES):
            raise ValueError(
                f"{who}: the plan of {kind} has the style {style!r} for {name}, which is not known here, and tp_size "
                f"is {tp_size}. Set it to 1."
            )
        if not own:
            continue
        if style is None and next(module.children(), None) is not None:
            raise ValueError(
                f"{who}: the parameter {own[0]} of {kind} belongs to a module with modules inside, which cannot be "
                f"replicated over tp, and tp_size is {tp_size}. Set it to 1."
            )
        features = SPLIT_FEATURES.get(style or "", "")
        size = getattr(module, features, None)
        if size is not None and size % tp_size:
            raise ValueError(
                f"{who}: {name} has {features}={size} and tp_size is {tp_size}; tp_size must divide it. Lower tp_size."
            )
        default = "replicated_with_grad_allreduce" if name.rpartition(".")[0] in beside_split else "replicate"
        styles[name] = style or default

    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    names = {module: name for name, module in model.named_modules()}
    is_tied = head is not None and head.weight is embedding.weight
    if head is not None and head.weight.shape[0] % tp_size:
        styles[names[head]] = "replicate"
    # Only the head's matrix product costs much, so the embedding is split only where it is the same tensor.
    is_split = is_tied and styles[names[head]] != "replicate"
    styles[names[embedding]] = "embedding_rowwise" if is_split else "replicate"
    return styles


def _plan(model: Any, config: Any) -> dict[str, str]:
    """The plan of the base model, whose patterns become those of the whole, and of the head."""
    base = getattr(config, "base_model_tp_plan", None)
    if not base:
        return {}
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    return {prefix + pattern: style for pattern, style in base.items()} | (getattr(type(model), "_tp_plan", None) or {})


def apply_tp(model: Any, tp: DeviceMesh) -> None:
    """Spread the model's matrix products over `tp`, by its own plan: every parameter becomes a DTensor.

    Raises:
        ValueError: model and plan do not go with the size of `tp`.
    """
    _apply_tp(model, tp, _tp_styles(model, tp.size()))


def _apply_tp(model: Any, tp: DeviceMesh, styles: dict[str, str]) -> None:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    modules = dict(model.named_modules())
    for name, style in styles.items():
        # src_data_rank None: every rank has the whole weight, and takes its part without communication
        parallelize_module(modules[name], tp, STYLES[style](), src_data_rank=None)
    if is_tied:
        head.weight = embedding.weight  # each was given a tensor of its own, of the same values
