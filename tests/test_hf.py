"""Models on a ring against the same model in one process.

The reference is transformers' "sdpa": its "eager" takes the softmax in fp32, whatever the dtype.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import ringattn
from tests.processes import run
from tests.sweep import make as tiny

transformers = pytest.importorskip("transformers", minversion="5")

from transformers.masking_utils import and_masks, causal_mask_function, sliding_window_overlay  # noqa: E402

from ringattn import hf  # noqa: E402
from ringattn.hf.attention import attention  # noqa: E402
from ringattn.hf.pattern import Pattern, ask  # noqa: E402
from ringattn.layout import positions  # noqa: E402
from ringattn.transport import VirtualWorld  # noqa: E402

VOCAB, HIDDEN = 64, 32
TIGHT, LOSS = 1e-12, 5e-6  # fp64 throughout; transformers' loss function works in fp32
LIMITS = {"logits": TIGHT, "gradients": TIGHT, "loss": LOSS, "gradients of the loss": LOSS}
WINDOW = 5
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {"tie_word_embeddings": True},
    "smollm3": {"use_sliding_window": True, "sliding_window": WINDOW, "no_rope_layers": [1, 0], "pad_token_id": None},
}
WINDOWED = ("mistral", "qwen2", "smollm3")
LAYOUTS = ("zigzag", "contiguous")


def make(family: str, implementation: str = "ringattn", dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A causal LM of two layers whose attention is far from uniform; the same weights on every call."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = getattr(transformers, FAMILIES[family]).config_class(**{**sizes, **CHANGES[family], **changes})
    model = getattr(transformers, FAMILIES[family])._from_config(config, attn_implementation=implementation)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.to(dtype).named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5, generator=generator)
        else:
            nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


# ---------------------------------------------------------------------------------------------------- batches


def tokens(batch: int, seqlen: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (batch, seqlen), generator=torch.Generator().manual_seed(seed))


def restarts(*rows: tuple[int, ...]) -> Tensor:
    """Position ids that count from 0 in each document; a tuple of lengths for each batch row."""
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


@dataclasses.dataclass
class Case:
    """What the ring gets, what one process gets where that differs, and rows whose logits count."""

    ring: dict[str, Any]
    dense: dict[str, Any] = dataclasses.field(default_factory=dict)
    valid: Tensor | None = None


def plain(seqlen: int) -> Case:
    ids = tokens(2, seqlen)
    return Case({"input_ids": ids, "labels": ids})


def packed() -> Case:
    ids = tokens(2, 32)
    labels = ids.clone()
    labels[0, 3:19] = -100
    return Case({"input_ids": ids, "labels": labels, "position_ids": restarts((1, 2, 9, 1, 1, 18))})


def packed_by_row() -> Case:
    ids = tokens(2, 17)
    return Case({"input_ids": ids, "labels": ids, "position_ids": restarts((3, 14), (9, 1, 1, 6))})


def packed_with_ones() -> Case:
    case = packed()
    case.ring["attention_mask"] = torch.ones(2, 32, dtype=torch.long)
    case.dense["attention_mask"] = None
    return case


def cu_seq_lens() -> Case:
    """Positions run on, and only `cu_seq_lens_q` says where documents are; transformers gets the mask itself."""
    ids, cu = tokens(1, 17), torch.tensor([0, 4, 5, 17], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 12, "max_length_k": 12}
    visible = torch.block_diag(*[torch.ones(n, n) for n in (4, 1, 12)]).tril().bool()[None, None]
    return Case({"input_ids": ids, "labels": ids, **lengths}, {**dict.fromkeys(lengths), "attention_mask": visible})


def seq_idx() -> Case:
    """Only `seq_idx` says where documents are, in each row for itself."""
    ids = tokens(2, 17)
    lengths = ((4, 1, 12), (9, 8))
    idx = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths])
    visible = (idx[:, :, None] == idx[:, None, :]).tril()[:, None]
    return Case({"input_ids": ids, "labels": ids, "seq_idx": idx}, {"seq_idx": None, "attention_mask": visible})


def padded(*rows: tuple[int, int], seqlen: int = 17) -> Case:
    """Zeros on the left and on the right of each batch row, labels only between."""
    at = torch.arange(seqlen)
    valid = torch.stack([(at >= left) & (at < seqlen - right) for left, right in rows])
    ids = tokens(len(rows), seqlen)
    labels = ids.masked_fill(~valid, -100)
    labels[:, 1:].masked_fill_(~valid[:, :-1], -100)  # the row before the first token predicts nothing
    return Case({"input_ids": ids, "labels": labels, "attention_mask": valid.long()}, valid=valid)


def right_padded_labels_everywhere() -> Case:
    case = padded((0, 0), (0, 6))
    case.ring["labels"] = case.ring["input_ids"]
    case.valid = None  # rows of padding see what they see in transformers: the tokens, but no padding
    return case


def labels_in_one_shard() -> Case:
    ids = tokens(1, 32)
    labels = torch.full_like(ids, -100)
    labels[:, 1:4] = ids[:, 1:4]
    return Case({"input_ids": ids, "labels": labels})


def shifted_labels() -> Case:
    ids = tokens(2, 17)
    return Case({"input_ids": ids, "labels": ids, "shift_labels": tokens(2, 17, seed=5)})


def embeddings() -> Case:
    ids = tokens(2, 17)
    embeds = torch.randn(2, 17, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    return Case({"inputs_embeds": embeds, "labels": ids})


CASES: dict[str, Callable[[], Case]] = {
    **{f"plain {n}": functools.partial(plain, n) for n in (1, 2, 17, 32)},
    "packed": packed,
    "packed by row": packed_by_row,
    "packed, a mask of ones": packed_with_ones,
    "cu_seq_lens": cu_seq_lens,
    "seq_idx": seq_idx,
    "right padding": functools.partial(padded, (0, 5), (0, 0), (0, 16)),
    "right padding, the same": functools.partial(padded, (0, 5), (0, 5)),
    "right padding, labels everywhere": right_padded_labels_everywhere,
    "left padding": functools.partial(padded, (5, 0), (0, 0)),
    "both paddings": functools.partial(padded, (2, 9), (12, 1)),
    "labels in one shard": labels_in_one_shard,
    "shift_labels": shifted_labels,
    "inputs_embeds": embeddings,
}
WINDOWED_CASES = tuple(n for n in CASES if n not in ("cu_seq_lens", "seq_idx"))  # their dense masks have no window
SHORT = ("plain 2", "plain 17", "packed", "packed by row", "left padding")


# ---------------------------------------------------------------------------------------------------- comparing


def targets(batch: dict[str, Any]) -> Tensor:
    """Shifted labels, written down anew."""
    if "shift_labels" in batch:
        return batch["shift_labels"]
    labels = batch["labels"]
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum of the losses of rows with a label, in the dtype of the logits."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def error(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to the largest value; not a number where one is not."""
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    found, wanted = found.detach(), wanted.detach()
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-300)) if wanted.numel() else 0.0


def gradients(model: nn.Module, world_size: int = 1) -> Tensor:
    """All gradients, summed over ranks, as one vector; the model has none afterwards."""
    flat = torch.cat([p.grad.flatten() if p.grad is not None else torch.zeros(p.numel()) for p in model.parameters()])
    model.zero_grad()
    if world_size > 1:
        dist.all_reduce(flat)
    return flat


def compare(model: Any, dense: Any, case: Case, rank: int, world_size: int, layout: str) -> dict[str, float]:
    """Relative errors of logits, of gradients of a loss in fp64, and of the model's own loss and its gradients."""
    group = dist.group.WORLD if world_size > 1 else None
    source = case.ring.get("input_ids", case.ring.get("inputs_embeds"))
    seqlen = source.shape[1]
    index = positions(layout, seqlen, world_size, rank)
    labels = targets(case.ring)
    count = int((labels != -100).sum())

    expected = dense(**{**case.ring, **case.dense}, use_cache=False)
    expected.loss.backward()
    wanted_own = gradients(dense)
    logits = dense(**{**case.ring, **case.dense}, use_cache=False).logits
    (loss_sum(logits, labels) / max(count, 1)).backward()
    wanted = gradients(dense)

    out = model(**case.ring)
    assert out.logits.shape == (source.shape[0], len(index), VOCAB)
    out.loss.backward()
    found_own = gradients(model, world_size) / world_size  # the mean over ranks is what FSDP takes
    mean = out.loss.detach().clone()
    if world_size > 1:
        dist.all_reduce(mean)
    local = model(**case.ring).logits
    # not scaled by ranks: norms work in fp32 in transformers, where a factor of three rounds
    (loss_sum(local, labels[:, index]) / max(count, 1)).backward()
    found = gradients(model, world_size)
    with torch.no_grad():
        whole = hf.gather(local, group, layout, seqlen)
    valid = torch.ones(logits.shape[:2], dtype=torch.bool) if case.valid is None else case.valid
    errors = {"logits": error(whole[valid], logits[valid]), "gradients": error(found, wanted)}
    if count:  # transformers takes a mean of nothing otherwise
        errors["loss"] = error(mean / world_size, expected.loss)
        errors["gradients of the loss"] = error(found_own, wanted_own)
    else:
        assert float(mean) == 0
        assert not found_own.any()
    return errors


def ring_model(family: str, world_size: int, layout: str, **changes: Any) -> Any:
    group = dist.group.WORLD if world_size > 1 else None
    return hf.attach(make(family, **changes), group, layout)


def parity(
    rank: int, world_size: int, family: str, layout: str, names: tuple[str, ...]
) -> dict[tuple[str, str], float]:
    model, dense = ring_model(family, world_size, layout), make(family, "sdpa")
    return {
        (name, what): value
        for name in names
        for what, value in compare(model, dense, CASES[name](), rank, world_size, layout).items()
    }


def call(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    return run(world_size, function, *args) if world_size > 1 else [function(0, 1, *args)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_ring_is_one_process(family: str, layout: str, world_size: int) -> None:
    names = {"llama": tuple(CASES), "mistral": WINDOWED_CASES}.get(family, SHORT)
    for rank, errors in enumerate(call(world_size, parity, family, layout, names)):
        wrong = {key: value for key, value in errors.items() if not value <= LIMITS[key[1]]}
        assert not wrong, f"rank {rank}"


# ---------------------------------------------------------------------------------------------------- what is told


@pytest.mark.parametrize("family", WINDOWED)
def test_a_dropped_window_is_noticed(family: str) -> None:
    model, dense = ring_model(family, 1, "zigzag"), make(family, "sdpa")

    def drop(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        ring = kwargs["ring"]
        return args, {**kwargs, "ring": dataclasses.replace(ring, masks=dict.fromkeys(ring.masks, ringattn.Causal()))}

    assert compare(model, dense, plain(17), 0, 1, "zigzag")["logits"] <= TIGHT
    model.model.register_forward_pre_hook(drop, with_kwargs=True)
    assert compare(model, dense, plain(17), 0, 1, "zigzag")["logits"] > 1e-3


def whole_logits(rank: int, world_size: int, family: str, ids: Tensor, position_ids: Tensor) -> Tensor:
    model = ring_model(family, world_size, "zigzag")
    with torch.no_grad():
        out = model(ids, position_ids=position_ids).logits
        return hf.gather(out, dist.group.WORLD, "zigzag", ids.shape[1])


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_documents_do_not_see_each_other(family: str) -> None:
    ids, position_ids = tokens(1, 24), restarts((5, 12, 7))
    changed = ids.clone()
    changed[0, 6] = (ids[0, 6] + 1) % VOCAB  # the second token of the second document
    before, after = (run(2, whole_logits, family, x, position_ids)[0][0] for x in (ids, changed))
    moved = (before != after).any(-1)
    assert moved.nonzero().flatten().tolist()[:2] == [6, 7]
    assert not moved[:6].any()
    assert not moved[17:].any()


def test_one_mask_for_each_window_and_one_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = ringattn.ring_attention

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs)
        return real(*args, **kwargs)

    monkeypatch.setattr(ringattn, "ring_attention", spy)
    model = hf.attach(make("qwen2", num_hidden_layers=4, max_window_layers=2), None)
    model(tokens(1, 9), position_ids=restarts((4, 5)))
    assert [kwargs["validate"] for kwargs in seen] == [True, False, False, False]
    assert [kwargs["mask"] is seen[0]["mask"] for kwargs in seen] == [True, True, False, False]
    assert seen[2]["mask"] is seen[3]["mask"]
    documents = ringattn.Causal() & ringattn.Documents((0, 4, 9))
    assert seen[0]["mask"] == documents
    assert seen[2]["mask"] == documents & ringattn.Window(WINDOW - 1)


# ---------------------------------------------------------------------------------------------------- ranks


def without_rows(rank: int, world_size: int, is_bare: bool) -> dict[str, Any]:
    """One token for three ranks, through the causal LM or through its decoder."""
    model = ring_model("llama", world_size, "zigzag")
    ids = tokens(2, 1)
    model = model.model if is_bare else model
    out = model(ids, output_hidden_states=True)
    values = out.last_hidden_state if is_bare else out.logits
    values.sum().backward()
    as_tuple = model(ids, return_dict=False)[0]
    return {
        "shapes": [tuple(t.shape) for t in (values, as_tuple, *out.hidden_states)],
        "rows": len(positions("zigzag", 1, world_size, rank)),
        "grads": [p.grad is not None for p in model.parameters()],
        "sums": [float(p.grad.abs().sum()) for p in model.parameters()],
    }


@pytest.mark.parametrize("is_bare", [False, True])
def test_a_rank_without_rows_takes_part_in_backward(is_bare: bool) -> None:
    results = run(3, without_rows, is_bare)
    assert sorted(r["rows"] for r in results) == [0, 0, 1]
    for r in results:
        assert r["shapes"] == [(2, r["rows"], HIDDEN if is_bare else VOCAB)] * 2 + [(2, r["rows"], HIDDEN)] * 3
        assert all(r["grads"])
        assert any(r["sums"]) == (r["rows"] == 1)


def checkpointed(rank: int, world_size: int, family: str, is_reentrant: bool) -> float:
    """The largest difference that recomputing makes in gradients, dropout and all."""
    model = ring_model(family, world_size, "zigzag", attention_dropout=0.3)
    batch = packed_by_row().ring
    model.train()
    torch.manual_seed(7 + rank)
    model(**batch).loss.backward()
    wanted = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
    if is_reentrant:
        model.enable_input_require_grads()
    torch.manual_seed(7 + rank)
    calls = []
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: calls.append(1))
    model(**batch).loss.backward()
    assert len(calls) == 2
    return float((gradients(model) - wanted).abs().max())


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("family", "is_reentrant"), [("llama", False), ("qwen2", False), ("llama", True)])
def test_checkpointing_changes_nothing(family: str, is_reentrant: bool, world_size: int) -> None:
    assert call(world_size, checkpointed, family, is_reentrant) == [0.0] * world_size


def dropped(rank: int, world_size: int, how: str) -> list[Tensor]:
    """The whole logits of two steps in training, with weights of attention dropped."""
    model = make("llama", attention_dropout=0.4).train()
    group = dist.group.WORLD if world_size > 1 else None
    if how == "cp":
        hf.attach(model, group)
    else:
        hf.attach(model, None, data_group=group)
    torch.manual_seed(7 + rank if how == "cp" else 7)  # cp ranks may be seeded apart, and dp ranks alike
    steps = [model(tokens(1, 17)).logits for _ in range(2)]
    steps[0].sum().backward()
    return [hf.gather(x.detach(), group if how == "cp" else None, "zigzag", 17) for x in steps]


def test_dropout_is_that_of_one_process_whatever_the_ranks() -> None:
    wanted = dropped(0, 1, "cp")
    for found in run(2, dropped, "cp"):
        assert max(map(error, found, wanted)) <= TIGHT
    assert error(wanted[0], wanted[1]) > 1e-3  # a seed for each step
    first, second = run(2, dropped, "dp")
    assert error(first[0], wanted[0]) <= TIGHT
    assert error(second[0], wanted[0]) > 1e-3  # and for each data rank


def test_layers_drop_other_weights() -> None:
    model = hf.attach(make("llama", attention_dropout=0.4), None).train()
    seeds = []
    real = ringattn.ring_attention
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ringattn, "ring_attention", lambda *a, **k: seeds.append(k.get("seed")) or real(*a, **k))
        model(IDS)
        model.eval()(IDS)
    assert None not in seeds[:2]
    assert seeds[0] != seeds[1]
    assert seeds[2:] == [None, None]


ROPES = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": 16,
    },
}


def with_rope(rank: int, world_size: int, kind: str) -> list[dict[str, float]]:
    """Errors of a long batch and then of a short one: the largest position says which frequencies are taken."""
    changes = {"rope_parameters": ROPES[kind], "max_position_embeddings": 16}
    model, dense = ring_model("llama", world_size, "zigzag", **changes), make("llama", "sdpa", **changes)
    return [compare(model, dense, plain(n), rank, world_size, "zigzag") for n in (17, 9)]


@pytest.mark.parametrize("kind", list(ROPES))
def test_rope_goes_by_the_largest_position_of_all(kind: str) -> None:
    for errors in (e for rank in run(2, with_rope, kind) for e in rank):
        assert {what: value for what, value in errors.items() if not value <= 2e-6} == {}  # frequencies are fp32


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_one_process_without_attach(family: str) -> None:
    model, dense = make(family), make(family, "sdpa")
    for name in ("plain 17", "packed", "left padding", "both paddings"):
        case = CASES[name]()
        valid = torch.ones(case.ring["input_ids"].shape, dtype=torch.bool) if case.valid is None else case.valid
        found, wanted = (m(**case.ring, use_cache=False).logits[valid] for m in (model, dense))
        assert error(found, wanted) <= TIGHT
        found.square().sum().backward()
        wanted.square().sum().backward()
        assert error(gradients(model), gradients(dense)) <= TIGHT
    ids, options = tokens(2, 9), {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    wanted = dense.generate(ids, attention_mask=mask, **options)
    assert model.generate(ids, attention_mask=mask, **options).tolist() == wanted.tolist()
    assert wanted.shape == (2, 17)
    with pytest.raises(NotImplementedError, match="attention_mask has zeros between ones in batch row 0"):
        model(IDS, attention_mask=HOLE)


def sharded_before_weights(rank: int, world_size: int) -> list[float]:
    """Errors of two batches of a model that had no weights when it was attached, and then was sharded by FSDP."""
    mesh = init_device_mesh("cpu", (world_size,))
    model = make("llama").to("meta")
    hf.attach(model, mesh)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)
    model.to_empty(device="cpu")
    dense = make("llama", "sdpa")
    state = dict(dense.named_buffers()) | dense.state_dict()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(distribute_tensor(state[name], mesh, p.placements))
        for name, buffer in model.named_buffers():
            buffer.copy_(state[name])
    found = [hf.gather(model(tokens(1, n)).logits.detach(), mesh, "zigzag", n) for n in (17, 9)]
    return [error(x, dense(tokens(1, n)).logits) for x, n in zip(found, (17, 9), strict=True)]


def test_the_trial_waits_for_weights_under_fsdp() -> None:
    assert max(max(errors) for errors in run(2, sharded_before_weights)) <= TIGHT


def test_check_says_what_layers_do(capsys: pytest.CaptureFixture[str]) -> None:
    model = make("qwen2")
    said = hf.check(model, packed().ring, world_size=2)
    assert capsys.readouterr().out == said + "\n"
    head, facts, names, *rows = said.splitlines()
    assert head == "Qwen2ForCausalLM, 32 tokens, batch 2, rank 0 of 2"
    assert facts == "positions: given; loss: of the next token"
    assert names.split()[:2] == ["layer", "sees"]
    first, second = (row.split() for row in rows)
    assert (first[0], first[1]) == ("model.layers.0.self_attn", "causal")
    assert second[1:4] == ["causal,", "window", str(WINDOW)]
    plan = ringattn.build_plan(ringattn.Causal() & ringattn.Documents((0, 1, 3, 12, 13, 14, 32)), "zigzag", 32, 2, 0)
    assert first[-1] == f"{plan.bytes(batch=2, kv_heads=2, head_dim=8, dtype=torch.float64):,}"
    assert first[-2] == str(len(plan.hops))
    assert hf.check(model, {"input_ids": IDS, "attention_mask": HOLE}).startswith("Qwen2ForCausalLM: refused: ")
    model(IDS)  # as it was: not attached
    hf.attach(model, None, "contiguous")
    assert "contiguous" in hf.check(model, packed().ring)
    model.config.layer_types = ["linear_attention"] * 2
    assert "refused: ringattn.hf.attach: layer_types has 'linear_attention'" in hf.check(model, packed().ring)


def test_what_only_ranks_cannot_do_is_refused_for_them_alone() -> None:
    batch = {"input_ids": IDS}
    for name, value, words in (
        ("decoder_layerdrop", 0.1, "config.decoder_layerdrop is 0.1; ranks would leave out layers"),
        ("rope_parameters", {"rope_type": "dynamic"}, "rope type 'dynamic' depends on the largest position"),
    ):
        model = make("llama")
        setattr(model.config, name, value)  # after the model was made: its rotary module knows nothing of it
        hf.attach(model, None)(**batch)
        assert words in hf.check(model, batch, world_size=2)


def test_a_model_stays_attached_where_it_cannot_be_attached_anew() -> None:
    model = hf.attach(make("llama"), None)
    wanted = model(IDS).logits
    model.config.layer_types = ["linear_attention"] * 2
    with pytest.raises(NotImplementedError, match="layer_types has 'linear_attention'"):
        hf.attach(model, None, "contiguous")
    assert hooks(model) == 4
    assert torch.equal(model(IDS).logits, wanted)


def test_the_trial_leaves_a_model_as_it_was_and_waits_for_weights() -> None:
    model = make("llama").train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.lm_head.weight.data.fill_(float("nan"))
    random = torch.get_rng_state()
    hf.attach(model, None)  # nothing can be told from outputs that are not finite
    assert torch.equal(torch.get_rng_state(), random)
    with pytest.raises(ValueError, match="outputs are not finite; load the model's weights first"):
        model(IDS)
    model.load_state_dict(state)
    assert all(module.training for module in model.modules())
    assert error(model(IDS).logits, make("llama", "sdpa")(IDS).logits) <= TIGHT


def on_a_mesh(rank: int, world_size: int) -> float:
    """A mesh as the group, and the bare decoder called with tokens and with embeddings."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    decoder = hf.attach(make("llama").model, mesh, "striped")
    ids = tokens(2, 17)
    with torch.no_grad():
        wanted = make("llama", "sdpa").model(ids).last_hidden_state
        found = decoder(ids).last_hidden_state
        embedded = decoder(inputs_embeds=decoder.embed_tokens(ids)).last_hidden_state
        return max(error(hf.gather(x, mesh, "striped", 17), wanted) for x in (found, embedded))


def test_a_mesh_and_a_bare_decoder() -> None:
    assert max(run(2, on_a_mesh)) <= TIGHT


def scaled(rank: int, world_size: int, how: str) -> tuple[float, float]:
    """This rank's loss on its own batch, and the loss of one process on all batches."""
    labels = [tokens(1, 9, seed=i) for i in range(world_size)]
    for i, row in enumerate(labels):
        row[:, 1 + 2 * i :] = -100
    ids = tokens(world_size, 9)
    total = int((torch.cat(labels)[:, 1:] != -100).sum())
    dense = make("llama", "sdpa")(ids, labels=torch.cat(labels)).loss
    model = make("llama")
    mine = {"input_ids": ids[rank : rank + 1], "labels": labels[rank]}
    if how == "counted":
        hf.attach(model, None, data_group=dist.group.WORLD)
    elif how == "given":
        hf.attach(model, None, data_group=dist.group.WORLD)
        mine["num_items_in_batch"] = total
    else:
        hf.attach(model, None, loss_scale="caller")
        mine["num_items_in_batch"] = torch.tensor(total / world_size)
    return float(model(**mine).loss), float(dense)


@pytest.mark.parametrize("how", ["counted", "given", "caller"])
def test_the_mean_over_data_ranks_is_one_process(how: str) -> None:
    results = run(3, scaled, how)
    assert results[0][0] == 0  # no labelled token there
    assert sum(mine for mine, _ in results) / 3 == pytest.approx(results[0][1], rel=LOSS)


def balanced_experts(rank: int, world_size: int, name: str, how: str) -> dict[str, float]:
    """Errors of the loss of a mixture of experts, of its auxiliary part and of gradients."""
    dense, model = (tiny(name, implementation) for implementation in ("eager", "ringattn"))
    for m in (dense, model):
        m.config.output_router_logits = True
        m.config.router_aux_loss_coef = m.router_aux_loss_coef = 1.0
    batch = plain(1).ring if how == "short" else padded((0, 0), (0, 4), (0, 1)).ring
    if how == "short":  # no token has a label, and so the auxiliary part is all there is
        batch.pop("labels")
    mine = {key: value[rank : rank + 1] for key, value in batch.items()} if how == "dp" else batch
    hf.attach(model, *((None, "zigzag") if how == "dp" else (dist.group.WORLD,)), data_group=DATA[how]())
    wanted, found = dense(**batch), model(**mine)
    losses = [x.aux_loss if how == "short" else x.loss for x in (wanted, found)]
    for loss in losses:
        loss.backward()
    sums = torch.stack([losses[1].detach().double(), found.aux_loss.detach().double()])
    dist.all_reduce(sums)
    return {
        "loss": error(sums[0] / world_size, losses[0]),
        "auxiliary": error(sums[1] / world_size, wanted.aux_loss),
        "gradients": error(gradients(model, world_size) / world_size, gradients(dense)),
    }


DATA: dict[str, Callable[[], Any]] = {"cp": lambda: None, "short": lambda: None, "dp": lambda: dist.group.WORLD}


@pytest.mark.parametrize(
    ("name", "how", "world_size"),
    [
        ("MixtralForCausalLM", "cp", 2),
        ("Qwen3MoeForCausalLM", "cp", 3),
        ("GptOssForCausalLM", "cp", 2),
        ("MixtralForCausalLM", "dp", 3),
        ("MixtralForCausalLM", "short", 3),
    ],
)
def test_the_auxiliary_loss_of_experts_is_that_of_one_process(name: str, how: str, world_size: int) -> None:
    for errors in run(world_size, balanced_experts, name, how):
        assert {what: value for what, value in errors.items() if not value <= LOSS} == {}


def refused_on_rank_0(rank: int, world_size: int, changes: dict[str, Any]) -> tuple[str, str, dict[str, float]]:
    """How a batch ends that only rank 0 refuses, and the errors of the next."""
    model = ring_model("llama", world_size, "zigzag")
    with pytest.raises((ValueError, NotImplementedError)) as refused:
        model(**{"input_ids": IDS, "labels": IDS, **(changes if rank == 0 else {})})
    errors = compare(model, make("llama", "sdpa"), plain(17), rank, world_size, "zigzag")
    return type(refused.value).__name__, str(refused.value), errors


@pytest.mark.parametrize("name", ["attention_mask", "token_type_ids", "labels"])
def test_ranks_refuse_together(name: str) -> None:
    kind, value, words = {
        "attention_mask": ("NotImplementedError", HOLE, "attention_mask has zeros between ones in batch row 0"),
        "token_type_ids": ("NotImplementedError", ONES, "token_type_ids is a tensor of shape (1, 6)"),
        "labels": ("ValueError", IDS[:, :3], "labels has shape (1, 3); it must be that of the whole batch, (1, 6)"),
    }[name]
    for found, message, errors in run(2, refused_on_rank_0, {name: value}):
        assert found == kind
        assert message.startswith(f"LlamaForCausalLM with ringattn.hf: {words}")
        assert "rank 0 of 2" in message
        assert all(value <= LIMITS[what] for what, value in errors.items()), errors


# ---------------------------------------------------------------------------------------------------- attach


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def test_attach_twice() -> None:
    model = make("llama")
    assert hf.attach(model, None) is model
    assert hooks(model) == 4
    ids = list(model._forward_pre_hooks)
    hf.attach(model, None)
    assert list(model._forward_pre_hooks) == ids
    hf.attach(model, None, "contiguous")
    assert hooks(model) == 4
    assert list(model._forward_pre_hooks) != ids
    assert compare(model, make("llama", "sdpa"), plain(17), 0, 1, "contiguous")["logits"] <= TIGHT


def test_packings_make_no_new_graphs() -> None:
    model = hf.attach(make("mistral"), None)
    batches = [{"position_ids": restarts(row, row)} for row in ((16,), (5, 11), (1, 2, 3, 10), (4, 4, 4, 4))]
    batches += [
        {"position_ids": restarts((3, 13), (16,))},
        {
            "position_ids": restarts((16,), (16,)),
            "attention_mask": torch.arange(16).ge(torch.tensor([[4], [0]])).long(),
        },
    ]
    ids = tokens(2, 16)
    wanted = [model(ids, **batch).logits for batch in batches]
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(backend=counter, fullgraph=True)
    counts = []
    for batch, want in zip(batches, wanted, strict=True):
        assert error(model(ids, **batch).logits, want) <= TIGHT
        counts.append(counter.frame_count)
    # a graph for the first layer, in which ranks compare their arguments, and one for the others; then the same for masks
    # of any length
    assert counts == [2, 4, 4, 4, 4, 4]


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        (ValueError, {"_attn_implementation": "sdpa"}, ["'sdpa'", "set_attn_implementation('ringattn')"]),
        (NotImplementedError, {"layer_types": ["linear_attention"]}, ["layer_types has 'linear_attention'; only"]),
    ],
)
def test_attach_refuses_models(kind: type[Exception], changes: dict[str, Any], words: list[str]) -> None:
    model = make("llama")
    for name, value in changes.items():
        setattr(model.config, name, value)
    with pytest.raises(kind, match=r"ringattn\.hf\.attach: .*" + ".*".join(map(re.escape, words))):
        hf.attach(model, None)


def test_attach_refuses_heads_and_settings() -> None:
    config = make("llama").config
    head = transformers.LlamaForSequenceClassification._from_config(config, attn_implementation="ringattn")
    with pytest.raises(
        NotImplementedError, match=r"LlamaForSequenceClassification gives \(1, 2\) for tokens \(1, 12\)"
    ):
        hf.attach(head, None)
    with pytest.raises(ValueError, match=r"loss_scale is 'mean'; it must be 'fsdp' or 'caller'"):
        hf.attach(make("llama"), None, loss_scale="mean")
    with pytest.raises(ValueError, match=r"layout is 'spiral'"):
        hf.attach(make("llama"), None, "spiral")
    for name in ("group", "data_group"):
        for value, kind in ((3, "int"), (VirtualWorld(2), "VirtualWorld")):
            with pytest.raises(ValueError, match=rf"attach: {name} is a {kind}; it must be a ProcessGroup"):
                hf.attach(make("llama"), **{"group": None, name: value})


IDS = tokens(1, 6)
ONES = torch.ones(1, 6, dtype=torch.long)
HOLE = torch.tensor([[1, 1, 0, 1, 0, 0]])


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        (NotImplementedError, {"past_key_values": "x"}, ["past_key_values is 'x'; only a DynamicCache is supported"]),
        (NotImplementedError, {"cache": object()}, ["cache is a object; only a DynamicCache is supported"]),
        (NotImplementedError, {"use_cache": 3}, ["use_cache is 3; it must be True or False"]),
        (NotImplementedError, {"output_attentions": True}, ["output_attentions is True; it must be False"]),
        (NotImplementedError, {"is_causal": False}, ["is_causal is False; it must be True"]),
        (
            NotImplementedError,
            {"output_router_logits": True},
            ["output_router_logits is True, and no auxiliary loss is known"],
        ),
        (NotImplementedError, {"logits_to_keep": 1}, ["logits_to_keep is 1; it must be 0"]),
        (NotImplementedError, {"logits_to_keep": ONES}, ["logits_to_keep is a tensor of shape (1, 6)"]),
        (NotImplementedError, {"token_type_ids": ONES}, ["token_type_ids is a tensor of shape (1, 6)", "leave it out"]),
        (NotImplementedError, {"attention_mask": ONES.double()}, ["attention_mask is", "torch.float64; only integer"]),
        (NotImplementedError, {"attention_mask": ONES[:, None, None]}, ["attention_mask is", "(1, 1, 1, 6)"]),
        (NotImplementedError, {"attention_mask": ONES + 1}, ["attention_mask has the value 2; only 0 and 1"]),
        (NotImplementedError, {"attention_mask": HOLE}, ["attention_mask has zeros between ones in batch row 0"]),
        (ValueError, {"input_ids": None}, ["got no input_ids; give input_ids or inputs_embeds"]),
        (ValueError, {"inputs_embeds": ONES}, ["got input_ids and inputs_embeds"]),
        (ValueError, {"input_ids": IDS[:, :0]}, ["input_ids has shape (1, 0)", "N > 0"]),
        (ValueError, {"input_ids": IDS[:0]}, ["input_ids has shape (0, 6)", "B > 0"]),
        (ValueError, {"labels": IDS[:, :3]}, ["labels has shape (1, 3)", "whole batch, (1, 6)"]),
        (ValueError, {"position_ids": ONES[0]}, ["position_ids has shape (6,)"]),
        (ValueError, {"cu_seq_lens_q": [0, 6]}, ["cu_seq_lens_q is [0, 6] and cu_seq_lens_k None at batch 1"]),
        (ValueError, {"cu_seq_lens_q": [0, 5], "cu_seq_lens_k": [0, 5]}, ["is [0, 5]; it must rise from 0", "6"]),
        (
            ValueError,
            {"cu_seq_lens_q": [0, 2, 6], "cu_seq_lens_k": [0, 2, 6], "max_length_k": 3},
            ["max_length_k is 3; it must not be less than the longest document, 4"],
        ),
        (ValueError, {"cu_seq_lens_q": [], "cu_seq_lens_k": []}, ["cu_seq_lens_q is []; it must rise from 0"]),
        (ValueError, {"max_length_q": 6}, ["max_length_q is 6 without cu_seq_lens_q"]),
    ],
)
def test_the_model_refuses_arguments(kind: type[Exception], changes: dict[str, Any], words: list[str]) -> None:
    model = hf.attach(make("llama"), None)
    with pytest.raises(kind, match="LlamaForCausalLM with ringattn.hf: .*" + ".*".join(map(re.escape, words))):
        model(**{"input_ids": IDS, **changes})


def test_a_changed_config_is_refused() -> None:
    model = hf.attach(make("llama"), None)
    wanted = model(IDS).logits
    for module in (model, model.model):
        model.set_attn_implementation("sdpa")
        with pytest.raises(ValueError, match=r"attn_implementation is 'sdpa'; it must be 'ringattn' while .* attached"):
            module(IDS)
        model.set_attn_implementation("ringattn")
        assert torch.equal(model(IDS).logits, wanted)
    model.config.output_router_logits = True
    with pytest.raises(NotImplementedError, match=r"LlamaForCausalLM with ringattn.hf: output_router_logits is True"):
        model(IDS)


def test_positions_of_any_integer_type() -> None:
    ids, at = tokens(1, 256), restarts((3, 253))
    model = hf.attach(make("llama"), None)
    wanted = model(ids, position_ids=at).logits
    assert torch.equal(model(ids, position_ids=at.to(torch.uint8)).logits, wanted)


def test_surplus_arguments_are_refused() -> None:
    model = hf.attach(make("llama"), None)
    with pytest.raises(ValueError, match=r"arguments by position are 20; they must be at most \d+: input_ids, "):
        model(IDS, *[None] * 19)
    with pytest.raises(ValueError, match="input_ids is given by position and by name; it must be given once"):
        model(IDS, input_ids=IDS)


def test_the_model_refuses_labels_where_there_is_no_loss() -> None:
    model = hf.attach(make("llama"), None, loss_scale="caller")
    with pytest.raises(ValueError, match="num_items_in_batch is None; with loss_scale='caller' it must be given"):
        model(IDS, labels=IDS)
    with pytest.raises(NotImplementedError, match=r"LlamaModel with ringattn.hf: labels is a tensor of shape \(1, 6\)"):
        model.model(IDS, labels=IDS)


def test_arguments_by_position_are_arguments_by_name() -> None:
    model = hf.attach(make("llama"), None)
    mask, position_ids = torch.tensor([[0, 1, 1, 1, 1, 1]]), restarts((2, 4))
    by_position = model(IDS, mask, position_ids).logits
    assert error(by_position, model(input_ids=IDS, attention_mask=mask, position_ids=position_ids).logits) == 0
    assert error(by_position, model(IDS).logits) > 1e-3


def asked(function: Any, window: int | None = None) -> Any:
    parts = (function,) if window is None else (function, sliding_window_overlay(window))
    return ask(mask_function=and_masks(*parts))


def told(rows: int = 4) -> hf.RingContext:
    return hf.RingContext(
        group=None,
        layout="zigzag",
        seqlen=4,
        rows=rows,
        masks={Pattern(): ringattn.Causal()},
        backend="auto",
        timeout=None,
        is_outer=True,
        places=torch.arange(max(rows, 1))[None],
    )


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        (
            NotImplementedError,
            {"attention_mask": ONES},
            ["attention_mask is a tensor of shape (1, 6)", "be None or made"],
        ),
        (
            NotImplementedError,
            {"attention_mask": asked(causal_mask_function, 3), "sliding_window": 4},
            ["is 4; it", "window 3"],
        ),
        (
            NotImplementedError,
            {"attention_mask": asked(sum)},
            ["the mask's part is 'sum'; it must be causal, bidirectional"],
        ),
        (NotImplementedError, {"dropout": 0.1}, ["dropout is 0.1; it must be 0.0"]),
        (NotImplementedError, {"is_causal": False}, ["the pattern is 'bidirectional'; it must be one of", ": causal"]),
        (NotImplementedError, {"sliding_window": 3}, ["the pattern is 'causal, window 3'; it must be one of those"]),
        (NotImplementedError, {"indices": ONES}, ["indices is a tensor"]),
        (NotImplementedError, {"block_indices": ONES}, ["block_indices is a tensor"]),
        (NotImplementedError, {"position_bias": ONES}, ["position_bias is a tensor"]),
        (NotImplementedError, {"anything": {}}, ["anything is a dict"]),
        (NotImplementedError, {"anything": False}, ["anything is False; it must be None or left out"]),
        (NotImplementedError, {"output_attentions": True}, ["output_attentions is True; it must be False or left out"]),
        (NotImplementedError, {"use_cache": True}, ["use_cache is True; it must be False or left out"]),
        (ValueError, {"ring": told(rows=3)}, ["query has 4 rows and this rank 3 of 4; they must agree"]),
    ],
)
def test_the_attention_refuses_arguments(kind: type[Exception], changes: dict[str, Any], words: list[str]) -> None:
    module = make("llama").model.layers[1].self_attn
    q, k = torch.randn(1, 4, 4, 8), torch.randn(1, 2, 4, 8)
    given = {"attention_mask": None, "scaling": 0.5, "ring": told(), "output_attentions": False, "s_aux": None}
    attention(module, q, k, k, position_ids=ONES, **given)
    with pytest.raises(
        kind, match=r"ringattn\.hf attention in LlamaAttention 1: .*" + ".*".join(map(re.escape, words))
    ):
        attention(module, q, k, k, **{**given, **changes})


def test_a_layer_of_an_attached_model_is_not_called_alone() -> None:
    model = hf.attach(make("llama"), None)
    hidden = torch.randn(1, 4, HIDDEN, dtype=torch.float64)
    at = model.model.rotary_emb(hidden, torch.arange(4)[None])
    with pytest.raises(
        RuntimeError, match=r"LlamaAttention 0: .* ring is missing; call the attached model or its decoder"
    ):
        model.model.layers[0](hidden, position_embeddings=at)


def test_a_keyword_of_the_mask_function_that_is_not_known_is_refused() -> None:
    config = make("llama").config
    with pytest.raises(NotImplementedError, match="transformers passes sparsity to the mask function"):
        ask(mask_function=causal_mask_function, config=config, sparsity=2)


def test_older_versions_say_with_cache_position_where_rows_begin() -> None:
    asked = ask(mask_function=causal_mask_function, cache_position=torch.arange(5, 8), kv_length=8)
    assert int(asked.q_offset) == 5
