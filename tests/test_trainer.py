"""transformers' Trainer with ring attention: what it logs, and the weights, are those of one process."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Trainer, TrainingArguments

from tests import processes

accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
from ndwrap.accelerate import RingParallelismConfig  # noqa: E402
from ndwrap.trainer import RingAttnCallback  # noqa: E402
from tests.test_accelerate import as_launched  # noqa: E402

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, num_key_value_heads=1, sliding_window=5)),
}
STEPS, N = 3, 15


def make(name):
    torch.manual_seed(0)
    return MODELS[name]().double()


def data(rows):
    """Sequences with different numbers of labels, and the second half a document of its own where packed."""
    torch.manual_seed(1)
    found = []
    for tokens in torch.randint(32, (rows, N)):
        labels = tokens.clone()
        labels[: int(tokens[0]) % N] = -100
        found.append(
            {"input_ids": tokens, "labels": labels, "position_ids": torch.cat([torch.arange(9), torch.arange(6)])}
        )
    return found


def run(name, folder, batch_size, parallelism=None, callbacks=(), **options):
    arguments = {
        "output_dir": folder,
        "use_cpu": True,
        "max_steps": STEPS,
        "logging_steps": 1,
        "report_to": "none",
        "per_device_train_batch_size": batch_size,
        "per_device_eval_batch_size": batch_size,
        "learning_rate": 0.01,
        "save_strategy": "no",
        "disable_tqdm": True,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "parallelism_config": parallelism,
        **options,
    }
    args, model = TrainingArguments(**arguments), make(name)
    rows = data(64)
    trainer = Trainer(model, args, train_dataset=rows, eval_dataset=rows[:8], callbacks=list(callbacks))
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    logs = [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]
    weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    return torch.tensor(logs), evaluated, {key: value.clone() for key, value in weights.items()}


def run_ring(rank, world_size, name, folder, sizes):
    as_launched(rank, world_size)
    return run(name, folder, 2, RingParallelismConfig(**sizes), [RingAttnCallback()])


def run_alone(name, folder, dp):
    """One process; eager attention in fp64, which knows documents by position_ids."""
    accelerate.state.AcceleratorState._reset_state(True)
    try:
        return run(name, folder, 2 * dp)
    finally:
        accelerate.state.AcceleratorState._reset_state(True)


@pytest.mark.parametrize(
    ("name", "sizes"), [("llama", {"cp_size": 2}), ("mistral", {"dp_replicate_size": 2, "cp_size": 2})]
)
def test_the_trainer_logs_what_one_process_does(name, sizes, tmp_path):
    dp = sizes.get("dp_replicate_size", 1)
    logs, evaluated, weights = run_alone(name, str(tmp_path), dp)
    assert len(logs) == STEPS
    for found, found_evaluated, found_weights in processes.run_fresh(2 * dp, run_ring, name, str(tmp_path), sizes):
        torch.testing.assert_close(found, logs, rtol=2e-4, atol=0)  # logged with four digits or more
        assert found_evaluated == pytest.approx(evaluated, rel=1e-5)
        for key, weight in weights.items():
            torch.testing.assert_close(found_weights[key], weight, rtol=1e-4, atol=1e-6)


def refuse(rank, world_size, folder):
    as_launched(rank, world_size)

    def smooth(outputs, labels, num_items_in_batch=None):
        return outputs.logits.mean()

    said = []
    for options, changes in (
        ({"label_smoothing_factor": 0.1}, {}),
        ({"average_tokens_across_devices": False}, {}),
        ({"parallelism_config": None}, {}),
        ({}, {"compute_loss_func": smooth}),
    ):
        accelerate.state.AcceleratorState._reset_state()
        arguments = {"output_dir": folder, "use_cpu": True, "max_steps": 1, "report_to": "none", "disable_tqdm": True}
        arguments |= {"parallelism_config": RingParallelismConfig(cp_size=2), "save_strategy": "no", **options}
        try:
            args = TrainingArguments(**arguments)
            Trainer(make("llama"), args, train_dataset=data(8), callbacks=[RingAttnCallback()], **changes).train()
        except (ValueError, NotImplementedError) as error:
            said.append(str(error))
    return said


def test_what_cannot_be_right_is_refused(tmp_path):
    for said in processes.run_fresh(2, refuse, str(tmp_path)):
        assert said[0] == (
            "RingAttnCallback: label_smoothing_factor is 0.1; it must be 0.0: it needs whole rows of labels and logits on one rank."
        )
        assert said[1].startswith(
            "RingAttnCallback: average_tokens_across_devices is False; it must be True: ranks have"
        )
        assert said[2].startswith(
            "RingAttnCallback: parallelism_config is a NoneType; it must be a RingParallelismConfig."
        )
        assert "labels are None in training with loss_scale='caller'; they must be given." in said[3]
