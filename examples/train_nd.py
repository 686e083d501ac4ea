"""Train a causal language model on a mesh of data, context and tensor parallel ranks.

    torchrun --nproc-per-node 4 examples/train_nd.py --dp-shard-size 2 --cp-size 2 --sequence-length 4096

The arguments carry the names of Accelerate's `nd_parallel.py`. Without `--model-name` a small random Llama learns
bytes; without `--text` it reads the source files of Python's standard library. `python examples/train_nd.py` is a mesh
of one process.
"""

import argparse
import json
import sys
import sysconfig
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel

from ndwrap import (
    NDConfig,
    clip_grad_norm_,
    export_hf,
    global_loss,
    init_mesh,
    load_checkpoint,
    parallelize,
    save_checkpoint,
)

TEXT_SUFFIXES = {".md", ".py", ".rst", ".txt"}
TEXT_BYTES = 4_000_000  # enough for every run here, and a tokenizer reads it in seconds


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, over the values of `--config`, over the defaults."""
    parser = argparse.ArgumentParser(
        description="Train on a mesh of dp_replicate x dp_shard x cp x tp ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--config", type=Path, help="YAML file, argument: value; the command line wins")
    NDConfig.add_arguments(parser)
    parser.add_argument("--layout", default="zigzag", help="which positions of the sequence each cp rank holds")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--sequence-length", type=int, default=1024, help="tokens, over all cp ranks")
    parser.add_argument("--batch-size", type=int, default=1, help="sequences per data parallel rank")
    parser.add_argument("--num-steps", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float64"],
        default="float32",
        help="of the computation; weights are float32 where it is bfloat16",
    )
    parser.add_argument("--activation-checkpointing", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--text", type=Path, help="file or folder; the standard library's sources if not given")
    parser.add_argument("--model-name", help="name or folder of a pretrained model; a small random Llama if not given")
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--num-kv-heads", type=int, default=2)
    parser.add_argument("--log-path", type=Path, help="JSON lines: step, loss, grad_norm, tokens_per_s")
    parser.add_argument("--save-dir", type=Path, help="for checkpoints, and for the whole model at the end")
    parser.add_argument("--checkpoint-frequency", type=int, default=0, help="steps between checkpoints; 0: none")
    parser.add_argument("--resume", type=Path, help="go on from the newest checkpoint of this --save-dir")

    argv = sys.argv[1:] if argv is None else argv
    config = parser.parse_known_args(argv)[0].config
    if config is not None:
        argv = [*config_argv(parser, config), *argv]
    args = parser.parse_args(argv)
    if args.checkpoint_frequency and args.save_dir is None:
        parser.error(f"--checkpoint-frequency is {args.checkpoint_frequency} and there is no --save-dir; give one.")
    return args


def config_argv(parser: argparse.ArgumentParser, path: Path) -> list[str]:
    """A YAML mapping as command line arguments, so that the parser checks its values like any other."""
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        parser.error(f"--config is {path}; it must be a readable YAML file: {error}")
    if not isinstance(values, dict | None):
        parser.error(
            f"--config is {path}; it must hold a mapping, argument: value, and holds a {type(values).__name__}."
        )
    known = {action.dest: action for action in parser._actions if action.dest not in ("config", "help")}
    argv = []
    for key, value in (values or {}).items():
        name = str(key).replace("-", "_")
        flag = name.replace("_", "-")
        if name not in known:
            parser.error(f"{path}: {name!r} is not an argument of this script; the keys are {sorted(known)}.")
        if isinstance(value, dict | list):
            parser.error(f"{path}: {flag} is {value}; it must be a single value.")
        if isinstance(value, bool) and isinstance(known[name], argparse.BooleanOptionalAction):
            argv.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            argv.append(f"--{flag}={value}")
    return argv


def read_text(path: Path | None = None) -> bytes:
    """The first `TEXT_BYTES` bytes of a file, of a folder's text files, or of the standard library's sources."""
    if path is None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    elif path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES)
    else:
        files = [path]
    text = b""
    for file in files:
        if len(text) >= TEXT_BYTES:
            break
        text += file.read_bytes()
    return text[:TEXT_BYTES]


def load_tokens(text: Path | None = None, model_name: str | None = None) -> Tensor:
    """The text as int64 tokens `[number]`: its bytes, or what the tokenizer of `model_name` makes of it."""
    data = read_text(text)
    if model_name is None:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    return torch.tensor(tokenizer(data.decode(errors="replace"), verbose=False)["input_ids"])


def get_batch(tokens: Tensor, step: int, dp_rank: int, dp_size: int, batch_size: int, seqlen: int, seed: int) -> Tensor:
    """Sequences `[batch_size, seqlen]` of one data parallel rank at one step.

    A pure function of its arguments: the text, cut into sequences, in an order drawn from `seed`. The ranks' batches,
    one after the other, are the batch of a single rank with `dp_size * batch_size` sequences.
    """
    number = tokens.numel() // seqlen
    if number == 0:
        raise ValueError(f"get_batch: the text has {tokens.numel()} tokens and seqlen is {seqlen}; give a longer text.")
    order = torch.randperm(number, generator=torch.Generator().manual_seed(seed))
    first = (step * dp_size + dp_rank) * batch_size
    chosen = order[torch.arange(first, first + batch_size) % number]
    return tokens[: number * seqlen].view(number, seqlen)[chosen]


def build_model(args: argparse.Namespace) -> PreTrainedModel:
    """The pretrained model, or a small random Llama over bytes; the same weights on every rank."""
    dtype = torch.float64 if args.dtype == "float64" else torch.float32
    if args.model_name is not None:
        return AutoModelForCausalLM.from_pretrained(args.model_name, dtype=dtype, use_cache=False)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.hidden_size,
        intermediate_size=args.hidden_size * 4,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_heads,
        num_key_value_heads=args.num_kv_heads,
        max_position_embeddings=args.sequence_length,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    torch.manual_seed(args.seed)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def save_model(folder: Path, model: PreTrainedModel, model_name: str | None = None) -> None:
    """Write the whole model, and the tokenizer of `model_name`, for `from_pretrained`."""
    export_hf(model, folder)
    if dist.get_rank() == 0 and model_name is not None:
        AutoTokenizer.from_pretrained(model_name).save_pretrained(folder)


def main() -> None:
    args = parse_args()
    # With tp the logits are a view of what FSDP returns, which must not be written to in place; nothing here does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    config = NDConfig.from_args(args)
    mesh = init_mesh(config, None if args.device == "auto" else args.device)
    is_first = dist.get_rank() == 0

    tokens = load_tokens(args.text, args.model_name)
    dp = mesh["dp"]
    dp_rank, dp_size = dp.get_local_rank(), dp.size()
    model = build_model(args).to(mesh.device_type)
    # AdamW needs fp32 weights; FSDP2 casts them as it gathers them
    is_mixed = args.dtype == "bfloat16"
    parallelize(
        model,
        mesh,
        layout=args.layout,
        activation_checkpointing=args.activation_checkpointing,
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32) if is_mixed else None,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    done = load_checkpoint(args.resume, model, optimizer) if args.resume is not None else 0

    model.train()
    if is_first and args.log_path is not None:
        args.log_path.parent.mkdir(parents=True, exist_ok=True)
    log = args.log_path.open("a" if done else "w") if is_first and args.log_path is not None else None
    name = " x ".join(f"{axis.removesuffix('_size')} {size}" for axis, size in config.sizes.items() if size > 1)
    steps = tqdm(total=args.num_steps, initial=done, desc=name or "one process", ncols=120, disable=not is_first)
    for step in range(done, args.num_steps):
        start = time.perf_counter()
        batch = get_batch(tokens, step, dp_rank, dp_size, args.batch_size, args.sequence_length, args.seed)
        batch = batch.to(mesh.device_type)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        grad_norm = clip_grad_norm_(model, args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        row = {"step": step + 1, "loss": float(global_loss(loss, mesh)), "grad_norm": float(grad_norm)}
        row["tokens_per_s"] = dp_size * batch.numel() / (time.perf_counter() - start)
        steps.set_postfix_str(
            f"loss {row['loss']:.4f}, gradient norm {row['grad_norm']:.3f}, {row['tokens_per_s']:,.0f} tokens/s"
        )
        steps.update()
        if log is not None:
            log.write(json.dumps(row) + "\n")
            log.flush()
        if args.checkpoint_frequency and (step + 1) % args.checkpoint_frequency == 0:
            save_checkpoint(args.save_dir, model, optimizer, step=step + 1)

    steps.close()
    if args.save_dir is not None:
        save_model(args.save_dir, model, args.model_name)
    if log is not None:
        log.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
