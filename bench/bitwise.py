"""What `deterministic="bitwise"` costs: all ranks of a virtual ring in one process, forward and backward, against the default.

python -m bench.bitwise [--seqlen 8192] [--rounds 7]

The work of all ranks is summed (CPU time of one thread), which is what more processors would share. The transport of a virtual ring copies
once, in both modes.
"""

import argparse
import csv
import os
import statistics
import time
from pathlib import Path

import torch

from bench.harness import commit, device_name, slug
from ringattn import Causal, Mask, Window
from ringattn.testing import virtual

RESULTS = Path(__file__).parent / "results"
FIELDS = ("device", "commit", "load", "mask", "seqlen", "heads", "head_dim", "dtype", "world_size", "layout", "pass", "default_ms", "bitwise_ms", "ratio")  # fmt: skip
HEADS, HEAD_DIM = 4, 64


def times(
    world_size: int, layout: str, mask: Mask, whole: list[torch.Tensor], deterministic: bool | str
) -> list[float]:
    """Milliseconds of CPU time of a forward and of a backward pass of all ranks."""
    ring = virtual(world_size)
    q, k, v = ([x.detach().requires_grad_() for x in ring.shard(x, layout)] for x in whole[:3])
    began = time.process_time()
    out = ring.attention(q, k, v, mask=mask, layout=layout, deterministic=deterministic)
    between = time.process_time()
    torch.autograd.grad(out, [*q, *k, *v], ring.shard(whole[3], layout))
    return [(between - began) * 1e3, (time.process_time() - between) * 1e3]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    whole = [torch.randn(1, args.seqlen, HEADS, HEAD_DIM) for _ in range(4)]
    device = device_name(torch.device("cpu"))
    path = RESULTS / f"bitwise_{slug(device)}.csv"
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(FIELDS)
        for mask in (Causal(), Window(1023)):
            for world_size, layout in ((1, "contiguous"), (2, "zigzag"), (4, "zigzag"), (8, "zigzag"), (4, "striped")):
                rounds = []
                for turn in range(args.rounds + 1):
                    modes = (False, "bitwise") if turn % 2 else ("bitwise", False)
                    found = {mode: times(world_size, layout, mask, whole, mode) for mode in modes}
                    if turn:
                        rounds.append((found[False], found["bitwise"]))
                for i, name in enumerate(("forward", "backward")):
                    default, bitwise = (statistics.median(r[j][i] for r in rounds) for j in range(2))
                    ratio = statistics.median(r[1][i] / r[0][i] for r in rounds)
                    case = [type(mask).__name__.lower(), args.seqlen, HEADS, HEAD_DIM, "fp32", world_size, layout, name]
                    figures = [f"{default:.1f}", f"{bitwise:.1f}", f"{ratio:.3f}"]
                    writer.writerow([device, commit(), f"{os.getloadavg()[0]:.1f}", *case, *figures])
                    print(*case, *figures, sep="\t", flush=True)


if __name__ == "__main__":
    main()
