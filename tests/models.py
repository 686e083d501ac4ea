"""Tiny models, batches with uneven labels, and five training steps, on a mesh or in one process."""

import dataclasses
import functools
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from ndwrap import NDConfig, clip_grad_norm_, global_loss, init_mesh, parallelize
from ringattn import layout

BATCH, SEQLEN, VOCAB = 4, 32, 256
MAX_NORM = 0.5  # clips: the norms of these models are larger
CLASSES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


def build(
    family: str, dtype: torch.dtype, *, is_tied: bool = False, seed: int = 0, **changes: object
) -> PreTrainedModel:
    """A causal language model of three layers; the same weights for the same seed."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": is_tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_implementation": "sdpa",
    }
    config_class, model_class = CLASSES[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**(sizes | changes))).to(dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones at first, and then a norm that is left out costs little
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def global_batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels `[BATCH, SEQLEN]` of the whole mesh; rows have unlike numbers of labelled tokens."""
    tokens = torch.randint(0, VOCAB, (BATCH, SEQLEN), generator=torch.Generator().manual_seed(100 + step))
    labels = tokens.clone()
    labels[:, : 3 + step] = -100
    labels[0, 10:25] = -100
    labels[3, 20:] = -100
    return tokens, labels


def shifted(labels: Tensor) -> Tensor:
    return F.pad(labels[:, 1:], (0, 1), value=-100)


def loss_sum(logits: Tensor, shift_labels: Tensor) -> Tensor:
    """The sum over labelled tokens, in the dtype of the logits: transformers' own loss is in fp32."""
    return F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), ignore_index=-100, reduction="sum")


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@dataclasses.dataclass
class Run:
    """What training leaves behind; gradients and weights on the first rank only."""

    losses: list[float]
    norms: list[float]
    grads: list[dict[str, Tensor]]  # of every step, before clipping
    weights: dict[str, Tensor]  # after the last step
    is_tied: bool
    layer_calls: int  # of the first decoder layer's query projection, in step 0


def train(
    model: PreTrainedModel,
    mesh: DeviceMesh | None = None,
    *,
    steps: int = 5,
    is_own_loss: bool = True,
    layout_name: str = "zigzag",
) -> Run:
    """AdamW steps with clipping. `is_own_loss`: a loss on the logits, in their dtype; otherwise the model's own."""
    # The first step is lr * g / (|g| + eps): with the usual eps of 1e-8 a sign, also of what is rounding and no more.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
    dp, cp = (mesh["dp"], mesh["cp"]) if mesh is not None else (None, None)
    dp_rank, dp_size = (dp.get_local_rank(), dp.size()) if mesh is not None else (0, 1)
    cp_rank, cp_size = (cp.get_local_rank(), cp.size()) if mesh is not None else (0, 1)
    rows = slice(dp_rank * BATCH // dp_size, (dp_rank + 1) * BATCH // dp_size)
    positions = layout.positions(layout_name, SEQLEN, cp_size, cp_rank)
    calls: list[int] = []
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: calls.append(1))

    run = Run([], [], [], {}, False, 0)
    grads = []
    model.train()
    for step in range(steps):
        tokens, labels = global_batch(step)
        if is_own_loss or mesh is None:
            logits = model(input_ids=tokens[rows], use_cache=False).logits
            own = loss_sum(logits, shifted(labels)[rows][:, positions])
            loss = own * (dp_size * cp_size) / (shifted(labels) != -100).sum()
        else:
            loss = model(input_ids=tokens[rows], labels=labels[rows]).loss
        optimizer.zero_grad()
        loss.backward()
        grads.append({name: full(p.grad) for name, p in model.named_parameters()})
        if step == 0:
            run.layer_calls = len(calls)
        norm = (
            clip_grad_norm_(model, MAX_NORM)
            if mesh is not None
            else torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        )
        optimizer.step()
        run.norms.append(norm.item())
        run.losses.append((global_loss(loss, mesh) if mesh is not None else loss).item())
    weights = {name: full(p) for name, p in model.state_dict().items()}
    if mesh is None or dist.get_rank() == 0:
        run.grads, run.weights = grads, weights
    run.is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    return run


@functools.cache
def one_process(family: str, dtype: torch.dtype, is_tied: bool) -> Run:
    """The run that the mesh has to repeat: stock attention, clipping and loss reduction."""
    return train(build(family, dtype, is_tied=is_tied))


def on_mesh(
    rank: int,
    world_size: int,
    sizes: tuple[int, int, int, int],
    family: str,
    dtype: torch.dtype,
    is_tied: bool,
    steps: int,
    options: dict[str, object],
) -> Run:
    """A job of one rank: the run on a mesh of `sizes`."""
    mesh = mesh_of(sizes)
    is_own_loss = bool(options.pop("is_own_loss", True))
    model = build(family, dtype, is_tied=is_tied)
    unplanned = str(options.pop("unplanned", ""))
    if unplanned:
        plan = model.config.base_model_tp_plan
        model.config.base_model_tp_plan = {key: style for key, style in plan.items() if not key.endswith(unplanned)}
    model = parallelize(model, mesh, **options)
    return train(model, mesh, steps=steps, is_own_loss=is_own_loss, layout_name=str(options.get("layout", "zigzag")))


@functools.cache
def mesh_of(sizes: tuple[int, int, int, int]) -> DeviceMesh:
    """One mesh for all jobs of a rank: each makes process groups."""
    names = ("dp_replicate_size", "dp_shard_size", "cp_size", "tp_size")
    return init_mesh(NDConfig(**dict(zip(names, sizes, strict=True))), "cpu")


def relative_error(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest of ||got - want|| / ||want||, over tensors; infinite if names differ."""
    if got.keys() != want.keys():
        return math.inf
    return max(((got[name] - want[name]).norm() / want[name].norm()).item() for name in want)
