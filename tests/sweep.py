"""Every causal LM class of transformers, tiny and random, on a ring against one process: right, or refused by name.

`python -m tests.sweep` writes docs/models.md.
"""

import contextlib
import copy
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from ringattn import hf
from ringattn.layout import positions
from tests.processes import run

SEQLEN = 24
DOCUMENTS = (9, 15)
LARGEST = 15_000_000
TOLERANCE = 1e-9  # fp64 throughout, but where a model works in fp32 inside
SINGLE = 2e-4  # there

# What makes a config tiny, whatever a family calls it.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "dim", "model_dim"), 32),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "d_ff", "dim_ff"), 48
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads",), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions", "n_ctx", "max_seq_len"), 128),
    **dict.fromkeys(("sliding_window", "attention_window", "local_attention"), 5),
    **dict.fromkeys(("vocab_size", "n_words", "pronunciation_vocab_size", "shape_vocab_size"), 96),
    "pad_token_id": 1,
    "head_dim": 8,
    "use_sliding_window": True,
    "attention_chunk_size": 7,
    "floor_scale": 4,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 4,
    "use_cache": False,
    "is_decoder": True,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "rotary_dim": 4,
    "word_embed_proj_dim": 32,
    "router_jitter_noise": 0.0,
}
# Where a family's sizes hang together otherwise.
CHANGES: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8, "layer_types": ["mamba", "attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 5, "num_layers": 2},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},  # as its checkpoints have it
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4},
    },
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"]},
}
COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
LAYERS = {"layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type", "mlp_only_layers"}


class Result(NamedTuple):
    """What became of one class at one world size."""

    kind: str  # "right", "refused", "wrong" or "not made"
    detail: str


def classes() -> dict[str, str]:
    """The model type of every class of the sweep: all causal LMs, and all masked LMs."""
    found, known = {}, set(dir(transformers))
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES):
        for kind, name in mapping.items():
            if name in known:
                found.setdefault(name, kind)
    return found


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def shrink(config: Any) -> dict[str, Any]:
    """The arguments of a tiny config of the same kind: the sizes that it has."""
    known = config.to_dict()
    sizes = {name: value for name, value in SIZES.items() if name in known}
    if "kv_lora_rank" in known:  # latent attention has no groups
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            sizes[name] = {**shrink(part), "model_type": part.model_type}
    kinds = {name: list(dict.fromkeys(known[name])) for name in LAYERS & set(known) if _is_list(known[name])}
    count = max(2, *map(len, kinds.values())) if kinds else 2
    for name, found in kinds.items():
        sizes[name] = (found + known[name])[:count]
    # not a count of its own, as in the text part of a model that holds another
    return {**sizes, **{name: count for name in COUNTS if isinstance(known.get(name), int)}}


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and not isinstance(value[0], list)


def make(name: str, implementation: str, dtype: torch.dtype = torch.float64) -> Any:
    """A tiny model of one class; the same weights on every call."""
    cls = getattr(transformers, name)
    config_class = cls.config_class
    sizes = shrink(config_class())
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        sizes.pop("is_decoder", None)
    config = config_class(**{**sizes, **CHANGES.get(config_class.model_type, {})})
    with torch.device("meta"):
        count = sum(p.numel() for p in cls._from_config(copy.deepcopy(config)).parameters())
    if count > LARGEST:
        raise LookupError(f"{count} parameters are too many")
    torch.manual_seed(0)
    model = cls._from_config(config, attn_implementation=implementation, experts_implementation="eager").to(dtype)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" in name.lower() and parameter.dim() < 2:
            nn.init.uniform_(parameter, 0.5, 1.5, generator=generator)
        else:
            nn.init.normal_(parameter, std=0.25, generator=generator)
    return model.eval()


def batches(is_eager: bool) -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(10, 96, (2, SEQLEN), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, -4:] = 0
    if is_eager:  # which is not finite in fp64 in a row that sees nothing
        mask[0, -3:] = 0
    else:
        mask[0, :5] = 0
    return {
        "plain": {"input_ids": ids},
        "packed": {"input_ids": ids, "position_ids": torch.cat([torch.arange(n) for n in DOCUMENTS])[None]},
        "padded": {"input_ids": ids.where(mask.bool(), 1), "attention_mask": mask},
    }


def weights(shape: torch.Size) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def run_one(model: Any, batch: dict[str, Tensor], index: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logits, and gradients of their product with fixed random numbers, of tokens that are not padding.

    `index`: the rows of a ring's rank; None: one process, in which packed documents are run one by one.
    """
    model.zero_grad()
    ids = batch["input_ids"]
    if index is not None:
        logits = model(**batch).logits
    elif "position_ids" in batch:
        parts = zip(ids.split(DOCUMENTS, 1), batch["position_ids"].split(DOCUMENTS, 1), strict=True)
        logits = torch.cat([model(input_ids=i, position_ids=p, use_cache=False).logits for i, p in parts], 1)
    else:
        logits = model(**batch, use_cache=False).logits
    index = torch.arange(SEQLEN) if index is None else index
    valid = batch.get("attention_mask", torch.ones_like(ids))[:, index, None]
    upstream = weights((*ids.shape, logits.shape[-1]))[:, index] * valid
    (logits * upstream.to(logits.dtype)).sum().backward()
    flat = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in model.parameters()])
    return (logits * valid).detach(), flat


def error_of(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-300))


def one_process(name: str) -> tuple[Any, bool]:
    """The reference, and whether it is "eager", which classes have that know no "sdpa"."""
    errors = []
    for implementation, dtype in (("sdpa", torch.float64), ("eager", torch.float64), ("eager", torch.float32)):
        try:
            config = getattr(transformers, name).config_class()
            if implementation == "sdpa" and getattr(config, "attn_logit_softcapping", None):
                raise LookupError("sdpa has no softcap, and older versions of transformers do not say so")
            dense = make(name, implementation, dtype)
            run_one(dense, batches(False)["plain"], None)
            return dense, implementation == "eager"
        except Exception as error:
            errors.append(error)
    raise errors[0]


def judge(name: str, rank: int, world_size: int) -> Result:
    """Logits and gradients of a ring against one process, and the loss where the class has one that can be split."""
    group = dist.group.WORLD if world_size > 1 else None
    try:
        dense, is_eager = one_process(name)
    except Exception as error:
        return Result("not made", f"{type(error).__name__}: {error}")
    try:
        model = hf.attach(make(name, "ringattn", dense.dtype), group, timeout=30)
    except KeyError as error:
        return Result("refused", f"its attention is of its own making, and it takes no {error}")
    except (NotImplementedError, ValueError) as error:
        return Result("refused", str(error))
    index, notes, worst = positions("zigzag", SEQLEN, world_size, rank), [], 0.0
    for kind, batch in batches(is_eager).items():
        try:
            mine, flat = run_one(model, batch, index)
        except (NotImplementedError, ValueError) as error:
            if kind == "plain":
                return Result("refused", str(error))
            notes.append(f"{kind}: {error}")
            continue
        if world_size > 1:
            dist.all_reduce(flat)
        wanted, grads = run_one(dense, batch, None)
        errors = error_of(hf.gather(mine, group, "zigzag", SEQLEN), wanted), error_of(flat, grads)
        if not max(errors) <= SINGLE:
            return Result("wrong", f"{kind}: logits {errors[0]:.1e}, gradients {errors[1]:.1e}")
        worst = max(worst, *errors)
    labels = batches(False)["plain"]["input_ids"].clone()
    labels[:, 3:9] = -100
    with torch.no_grad():
        try:
            loss = model(**batches(False)["plain"], labels=labels).loss
            if world_size > 1:
                dist.all_reduce(loss)
            wanted = dense(**batches(False)["plain"], labels=labels, use_cache=False).loss
            if not error_of(loss / world_size, wanted) <= SINGLE:
                return Result("wrong", f"the loss is {float(loss) / world_size}, of one process {float(wanted)}")
        except NotImplementedError:
            notes.append("labels")
    return Result("right", f"{worst:.0e}" + "".join(f"; refuses {note}" for note in notes))


def sweep(rank: int, world_size: int, names: tuple[str, ...]) -> dict[str, Result]:
    """A job of one rank."""
    found = {}
    for name in names:
        with quiet():
            try:
                kind, detail = judge(name, rank, world_size)
            except Exception as error:
                kind, detail = "wrong", f"{type(error).__name__}: {error}"
        found[name] = Result(kind, " ".join(detail.split())[:300])
    return found


PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
WORLDS = (2, 3)
HEAD = """# Models

What `python -m tests.sweep` found with transformers {version}: every causal and masked LM class, tiny and random, at {worlds} ranks,
zigzag, against one process. *Right*: logits, gradients and loss, of a plain, a packed and a padded batch, are those of one process;
an error above 1e-9 is that of fp32 inside the model. *Refused*: `attach` or the call raises, with the reason given here. *Not tried*: no tiny
model of the class could be made. None was silently wrong.

Not in the tables (`tests/test_families.py`): text alone in LLaVA, Qwen3-VL and Gemma 3 is right at 2 and 3 ranks; images (`pixel_values`, `token_type_ids`, positions of three
rows) are refused, and so is an encoder together with its decoder.

| | right | refused | not tried |
|---|---|---|---|
"""


def page(results: dict[str, Result]) -> str:
    """docs/models.md."""
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    lines = []
    for title, names in (
        ("causal LMs", [name for name in results if name in causal]),
        ("masked LMs and encoder-decoders", [name for name in results if name not in causal]),
    ):
        kinds = [results[name].kind for name in names]
        lines.append(f"| {title} | {' | '.join(str(kinds.count(k)) for k in ('right', 'refused', 'not made'))} |")
    head = HEAD.format(version=transformers.__version__, worlds=" and ".join(map(str, WORLDS)))
    text = head + "\n".join(lines) + "\n"
    for kind, title, column in (
        ("right", "Right", "largest relative error"),
        ("refused", "Refused", "reason"),
        ("not made", "Not tried", "reason"),
    ):
        text += f"\n## {title}\n\n| class | {column} |\n|---|---|\n"
        for name in sorted(results):
            if results[name].kind == kind:
                detail = results[name].detail.replace("ringattn.hf.attach: ", "").replace("|", "\\|")
                text += f"| {name} | {detail} |\n"
    return text


def version_on_page() -> str:
    """The version of transformers that docs/models.md is about."""
    found = re.search(r"with transformers ([\d.]+\d)", PAGE.read_text())
    assert found
    return found[1]


def kinds_on_page() -> dict[str, str]:
    """What docs/models.md says of each class."""
    found = {}
    for part in PAGE.read_text().split("\n## ")[1:]:
        title, _, rows = part.partition("\n")
        kind = {"Right": "right", "Refused": "refused", "Not tried": "not made"}[title]
        found.update(dict.fromkeys(re.findall(r"^\| (\w+) \|", rows, re.M), kind))
    found.pop("class", None)
    return found


def sweep_all(world_size: int, names: tuple[str, ...]) -> dict[str, Result]:
    """By class, the worst that any rank found."""
    order = ("wrong", "refused", "not made", "right")
    by_rank = run(world_size, sweep, names, timeout=1800)
    return {name: min((found[name] for found in by_rank), key=lambda r: order.index(r.kind)) for name in names}


if __name__ == "__main__":
    both = [sweep_all(world_size, tuple(classes())) for world_size in WORLDS]
    for name in classes():
        first, second = (results[name] for results in both)
        assert first.kind == second.kind != "wrong", (name, first, second)
    PAGE.write_text(page(both[-1]))
