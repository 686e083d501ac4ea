"""Checkpoints: exact on the same mesh, right on another, whole or absent whatever dies."""

import os
import signal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ndwrap import (
    NDConfig,
    checkpoint,
    clip_grad_norm_,
    export_hf,
    global_loss,
    init_mesh,
    latest_step,
    load_checkpoint,
    parallelize,
    save_checkpoint,
)
from tests import processes

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
N, LATER = 16, 10


class Count:
    """Where the data are."""

    def __init__(self):
        self.batches = 0

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]


class Run:
    """A model on a mesh, and all that training it changes."""

    def __init__(self, sizes, seed=0, **changes):
        self.mesh = init_mesh(NDConfig(**sizes), "cpu")
        torch.manual_seed(seed)
        self.model = parallelize(LlamaForCausalLM(LlamaConfig(**SIZES, **changes)), self.mesh).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.data = Count()

    @property
    def parts(self):
        return {"scheduler": self.scheduler, "data": self.data}

    def steps(self, number):
        """The losses of so many steps; each data rank takes its rows of batches that are the same on every mesh."""
        losses, dp = [], self.mesh["dp"]
        for _ in range(number):
            torch.manual_seed(100 + self.data.batches)
            batch = torch.randint(32, (4, N)).chunk(dp.size())[dp.get_local_rank()]
            loss = self.model(input_ids=batch, labels=batch).loss
            loss.backward()
            clip_grad_norm_(self.model, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.data.batches += 1
            losses.append(global_loss(loss, self.mesh).item())
        return losses


def train_and_save(rank, world_size, folder, sizes, is_async):
    run = Run(sizes)
    run.steps(2)
    saving = save_checkpoint(folder, run.model, run.optimizer, step=2, is_async=is_async, **run.parts)
    drawn = torch.rand(3)
    torch.manual_seed(0)
    losses = run.steps(LATER)
    saving.wait()
    return losses, drawn


def load_and_train(rank, world_size, folder, sizes):
    run = Run(sizes, seed=7)
    done = load_checkpoint(folder, run.model, run.optimizer, **run.parts)
    drawn = torch.rand(3)
    return done, run.data.batches, drawn, run.steps(LATER)


MESH = {"dp_shard_size": 2, "cp_size": 2}


@pytest.mark.parametrize("is_async", [False, True])
def test_training_goes_on_bit_for_bit(tmp_path, is_async):
    folder = str(tmp_path)
    before = processes.run(4, train_and_save, folder, MESH, is_async)
    after = processes.run(4, load_and_train, folder, MESH)
    for (losses, drawn), (done, batches, drawn_after, losses_after) in zip(before, after, strict=True):
        assert (done, batches) == (2, 2)
        assert losses_after == losses
        torch.testing.assert_close(drawn_after, drawn, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("sizes", "others"),
    [
        (MESH, {"cp_size": 2, "tp_size": 2}),
        (MESH, {}),
        pytest.param(
            {"dp_shard_size": 2, "cp_size": 2, "tp_size": 2}, {"dp_shard_size": 4, "tp_size": 2}, marks=pytest.mark.slow
        ),
    ],
)
def test_another_mesh_goes_on(tmp_path, sizes, others):
    folder, count = str(tmp_path), {key: NDConfig(**value).total_size for key, value in (("a", sizes), ("b", others))}
    losses, _ = processes.run(count["a"], train_and_save, folder, sizes, False)[0]
    for done, batches, _, losses_after in processes.run(count["b"], load_and_train, folder, others):
        assert (done, batches) == (2, 2)
        torch.testing.assert_close(torch.tensor(losses_after), torch.tensor(losses), rtol=1e-5, atol=0)


def die(rank, world_size, folder, moment):
    """Save step 1, and be killed while saving step 2."""
    run = Run({"dp_shard_size": 2})
    save_checkpoint(folder, run.model, run.optimizer, step=1)

    def kill(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    where = {
        "before its shards": (checkpoint.dcp, "save"),
        "after its shards": (checkpoint, "_barrier"),
        "before the name": (checkpoint, "_complete"),
    }[moment]
    name = where[1]
    if rank == 0:
        original = getattr(*where)
        calls = []

        def killed(*args, **kwargs):
            calls.append(name)
            # the first barrier is before the shards
            return kill() if name != "_barrier" or len(calls) == 2 else original(*args, **kwargs)

        with mock.patch.object(*where, killed):
            save_checkpoint(folder, run.model, run.optimizer, step=2)
    save_checkpoint(folder, run.model, run.optimizer, step=2)


@pytest.mark.parametrize("moment", ["before its shards", "after its shards", "before the name"])
def test_a_rank_killed_while_saving_leaves_the_last_good_checkpoint(tmp_path, moment):
    outcomes = processes.run_fresh(2, die, str(tmp_path), moment, timeout=60)
    assert outcomes[0] == processes.Exit(-signal.SIGKILL)
    assert latest_step(tmp_path) == 1
    assert (tmp_path / ".step_2.partial").is_dir()
    for done, *_ in processes.run(2, load_and_train_plainly, str(tmp_path)):
        assert done == 1


def load_and_train_plainly(rank, world_size, folder):
    run = Run({"dp_shard_size": 2}, seed=7)
    done = load_checkpoint(folder, run.model, run.optimizer)
    save_checkpoint(folder, run.model, run.optimizer, step=2)  # over what the dead left
    return done, run.steps(1)


def keep_two(rank, world_size, folder):
    run = Run({"dp_shard_size": 2})
    for step in (1, 2, 10):
        save_checkpoint(folder, run.model, run.optimizer, step=step, keep=2)
    said = []
    for call in (
        lambda: save_checkpoint(folder, run.model, run.optimizer, step=10),
        lambda: save_checkpoint(folder, run.model, run.optimizer, step=11, keep=0),
        lambda: load_checkpoint(folder, run.model, run.optimizer, step=1),
        lambda: load_checkpoint(f"{folder}/nothing", run.model, run.optimizer),
        lambda: load_checkpoint(folder, run.model, run.optimizer, data=Count()),
    ):
        try:
            call()
        except (ValueError, FileNotFoundError) as error:
            said.append(str(error))
    return said


def test_old_checkpoints_go_and_mistakes_are_named(tmp_path):
    for said in processes.run(2, keep_two, str(tmp_path)):
        assert said == [
            f"save_checkpoint: {tmp_path}/step_10 exists; save another step, or remove it.",
            "save_checkpoint: keep is 0; it must be at least 1, or None for all.",
            f"load_checkpoint: {tmp_path} has no complete checkpoint of step 1; its steps are 2, 10.",
            f"load_checkpoint: {tmp_path}/nothing has no complete checkpoint; its steps are none.",
            f"load_checkpoint: data is given and {tmp_path}/step_10 has none; leave it out.",
        ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", "step_2"]


def export(rank, world_size, folder, tied):
    run = Run({"cp_size": 2, "tp_size": 2}, tie_word_embeddings=tied)
    export_hf(run.model, folder)
    ids = torch.arange(N)[None]
    logits = run.model.eval()(input_ids=ids).logits
    import ringattn.hf

    return ringattn.hf.gather(logits.detach(), run.mesh["cp"], "zigzag", N)


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_exported_loads_elsewhere(tmp_path, tied):
    logits = processes.run(4, export, str(tmp_path), tied)[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    torch.testing.assert_close(model(input_ids=torch.arange(N)[None]).logits.detach(), logits)


def test_one_process_needs_no_group(tmp_path):
    assert not dist.is_initialized()
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    want = model.weight.clone()
    save_checkpoint(tmp_path, model, optimizer, step=3)
    torch.nn.init.zeros_(model.weight)
    assert load_checkpoint(tmp_path, model, optimizer) == 3
    torch.testing.assert_close(model.weight, want, rtol=0, atol=0)
