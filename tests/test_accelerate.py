"""Accelerate's loop with ring attention: losses, gradient norms and weights are those of one process."""

import os
import re

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from tests import processes

accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin  # noqa: E402

from ndwrap import NDConfig  # noqa: E402
from ndwrap.accelerate import RingParallelismConfig, attach  # noqa: E402

STEPS, BATCH, N = 3, 2, 17
SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, num_key_value_heads=1, sliding_window=5)),
}


def make(name):
    torch.manual_seed(0)
    return MODELS[name]().double()


def rows(dp):
    """The batches of all steps and data ranks, in the order in which a loader yields them; labels differ in number."""
    torch.manual_seed(1)
    batches = []
    for tokens in torch.randint(32, (STEPS * dp * BATCH, N)):
        labels = tokens.clone()
        labels[: int(tokens[0]) % N] = -100
        batches.append({"input_ids": tokens, "labels": labels})
    return batches


def as_launched(rank, world_size):
    """The environment that a launcher gives a process."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    accelerate.state.AcceleratorState._reset_state(True)


def train(rank, world_size, name, sizes):
    """A loop as Accelerate's examples have it."""
    as_launched(rank, world_size)
    parallelism = RingParallelismConfig(**sizes)
    accelerator = accelerate.Accelerator(cpu=True, parallelism_config=parallelism)
    if {"dp_shard_size", "tp_size"} & sizes.keys():
        # Accelerate has FSDP on GPUs only, by this type; what it does then runs on a CPU too
        wrapped = [type(make(name).model.layers[0]).__name__]
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=wrapped
        )
    model = make(name)
    attach(model, accelerator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(rows(parallelism.data_parallel_size), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        seen.append((accelerator.reduce(loss.detach(), "mean").item(), float(norm)))
    weights = {
        key: getattr(value, "full_tensor", value.clone)()
        for key, value in accelerator.unwrap_model(model).state_dict().items()
    }
    mesh = accelerator.torch_device_mesh
    return seen, weights, (mesh.mesh_dim_names, tuple(mesh.shape))


def train_alone(name, dp):
    """One process with the batches of all data ranks."""
    model, data = make(name), rows(dp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(STEPS):
        rows_of_step = data[step * dp * BATCH : (step + 1) * dp * BATCH]
        batch = {key: torch.stack([row[key] for row in rows_of_step]) for key in rows_of_step[0]}
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        labels = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), norm.item()))
    return seen, model.state_dict()


@pytest.mark.parametrize(
    ("name", "sizes", "names"),
    [
        ("llama", {"cp_size": 2}, ("cp",)),
        ("mistral", {"dp_replicate_size": 2, "cp_size": 2}, ("dp_replicate", "cp")),
        ("mistral", {"dp_shard_size": 2, "cp_size": 2}, ("dp_shard", "cp")),
        ("llama", {"cp_size": 2, "tp_size": 2}, ("cp", "tp")),
        pytest.param(
            *("llama", {"dp_shard_size": 2, "cp_size": 2, "tp_size": 2}, ("dp_shard", "cp", "tp")),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("llama", {"dp_replicate_size": 2, "dp_shard_size": 2, "cp_size": 2}, ("dp_replicate", "dp_shard", "cp")),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_loop_of_accelerate_trains_as_one_process(name, sizes, names):
    dp = sizes.get("dp_replicate_size", 1) * sizes.get("dp_shard_size", 1)
    want, want_weights = train_alone(name, dp)
    for seen, weights, mesh in processes.run_fresh(2 ** len(names), train, name, sizes, timeout=100):
        assert mesh == (names, tuple([2] * len(names)))
        # transformers' loss is in fp32
        torch.testing.assert_close(torch.tensor(seen), torch.tensor(want), rtol=1e-5, atol=0)
        for key, weight in want_weights.items():
            torch.testing.assert_close(weights[key], weight, rtol=1e-5, atol=1e-7)


def test_what_accelerate_reads_of_the_config():
    """The attributes that the class relies on; this is what fails if a version moves them."""
    mine = RingParallelismConfig(dp_replicate_size=2, dp_shard_size=3, cp_size=4)
    theirs = accelerate.ParallelismConfig(dp_replicate_size=2, dp_shard_size=3, cp_size=4)
    for name in ("dp_dim_names", "non_dp_dim_names", "dp_shard_cp_dim_names", "dp_cp_dim_names", "fsdp_dim_names"):
        assert getattr(mine, name) == getattr(theirs, name), name
    assert mine._get_mesh() == theirs._get_mesh()
    sizes = ("total_size", "data_parallel_size", "non_data_parallel_size", "active_mesh_dims")
    assert [getattr(mine, name) for name in sizes] == [getattr(theirs, name) for name in sizes]
    assert (mine.cp_enabled, theirs.cp_enabled) == (False, True)
    assert NDConfig.from_accelerate(mine) == NDConfig(dp_replicate_size=2, dp_shard_size=3, cp_size=4)


def test_copies_beside_cp_are_allowed_and_read_from_the_environment(monkeypatch):
    assert RingParallelismConfig(dp_replicate_size=2, cp_size=2).total_size == 4
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "3")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    assert NDConfig.from_accelerate(RingParallelismConfig()) == NDConfig(dp_replicate_size=3, cp_size=2)


def refuse(rank, world_size):
    as_launched(rank, world_size)
    said = []
    for make_accelerator in (
        lambda: accelerate.Accelerator(cpu=True, parallelism_config=RingParallelismConfig(cp_size=3)),
        lambda: attach(make("llama"), accelerate.Accelerator(cpu=True)),
        lambda: attach(
            make("llama"), accelerate.Accelerator(cpu=True, parallelism_config=RingParallelismConfig(tp_size=2))
        ),
    ):
        try:
            make_accelerator()
        except ValueError as error:
            said.append(str(error))
        accelerate.state.AcceleratorState._reset_state()
    return said


def test_what_is_refused():
    for sizes, accelerator, tp in processes.run_fresh(2, refuse):
        assert "tp_size is 2 without FSDP2; DDP takes no tensor parallel weights." in tp
        assert sizes.endswith("= 1*1*3*1 = 3 but the world size is 2; launch 3 processes or change a size.")
        assert re.match(
            r"ndwrap\.accelerate\.attach: parallelism_config is a NoneType; it must be a RingParallelismConfig\.",
            accelerator,
        )
    with pytest.raises(ValueError, match=r"sp_size is 2; .* Use cp_size\."):
        RingParallelismConfig(sp_size=2)
