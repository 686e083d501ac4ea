"""The ring on two processes of one thread against one process of two threads on the same backend, causal, forward and backward.

python -m bench.ring [--seqlens 1024 2048 4096] [--rounds 9] [--dtype fp32]

Each round runs every contender once, in turn: one process with two threads (the other rank waits on a socket), the ring from memory to memory,
the ring over gloo, and both with `validate=False`, whose difference is the cost of the handshake; where deepspeed is installed (DS_BUILD_OPS=0) its
Ulysses over PyTorch's SDPA. Results and gradients are checked against the one process first. Not run: torch's context_parallel, which has no operator
for CPU tensors, and ring-attention-pytorch, whose gradients are wrong.
"""

import argparse
import csv
import dataclasses
import functools
import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import ringattn as ra
from bench.harness import commit, device_name, slug
from ringattn import transport

RESULTS = Path(__file__).parent / "results"
HEADS, HEAD_DIM, RANKS = 8, 64, 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ONE = "one process, 2 threads"
FIELDS = ("device", "commit", "load", "dtype", "seqlen", "contender", "rounds", "median_ms", "p20_ms", "p80_ms", "speed_of_one")  # fmt: skip


def group_over(memory: bool) -> dist.ProcessGroup:
    group = dist.new_group()
    if not memory:
        transport._links[group] = None
    transport.ProcessGroupTransport(group).connect(torch.device("cpu"))
    return group


@dataclasses.dataclass(frozen=True)
class Contender:
    """A context-parallel attention: `attend(q, k, v)` of this rank's rows under `layout`."""

    attend: Callable[..., torch.Tensor]
    layout: str

    def __call__(self, parts: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Out and the gradients of q, k and v, for `parts` q, k, v and dout."""
        leaves = [x.detach().requires_grad_() for x in parts[:3]]
        out = self.attend(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, parts[3])


def ring(group: dist.ProcessGroup, validate: bool) -> Contender:
    return Contender(functools.partial(ra.ring_attention, group=group, validate=validate), "zigzag")


def ulysses() -> Contender:
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    attention = DistributedAttention(_sdpa, dist.group.WORLD, 2, 1)
    return Contender(lambda q, k, v: attention(q, k, v, 0), "contiguous")


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def measure(rank: int, args: argparse.Namespace, rendezvous: str) -> None:
    """One rank's life; rank 0 writes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    memory, gloo = group_over(True), group_over(False)
    dtype = DTYPES[args.dtype]
    for seqlen in args.seqlens:
        torch.manual_seed(0)
        whole = [torch.randn(1, seqlen, HEADS, HEAD_DIM, dtype=dtype) for _ in range(4)]

        def one(whole: list[torch.Tensor] = whole) -> tuple[torch.Tensor, ...]:
            torch.set_num_threads(RANKS)
            q, k, v = (x.detach().requires_grad_() for x in whole[:3])
            out = ra.ring_attention(q, k, v)
            grads = torch.autograd.grad(out, (q, k, v), whole[3])
            torch.set_num_threads(1)
            return out.detach(), *grads

        contenders: dict[str, Contender] = {
            "ring, memory": ring(memory, True),
            "ring, gloo": ring(gloo, True),
            "ring, memory, not validated": ring(memory, False),
            "ring, gloo, not validated": ring(gloo, False),
        }
        if importlib.util.find_spec("deepspeed"):
            contenders["DeepSpeed Ulysses, SDPA"] = ulysses()
        wanted, parts = one(), {}
        for name, contender in contenders.items():
            parts[name] = [ra.shard(x, contender.layout, memory) for x in whole]
            for found, want in zip(contender(parts[name]), wanted, strict=True):
                tolerance = 2e-2 if dtype is torch.bfloat16 else 2e-5
                torch.testing.assert_close(found, ra.shard(want, contender.layout, memory), rtol=0, atol=tolerance)
        del wanted
        names = [ONE, *contenders]
        times: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(args.rounds + 1):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                dist.barrier()
                began = time.perf_counter()
                if name != ONE:
                    contenders[name](parts[name])
                elif rank == 0:
                    one()
                dist.barrier()
                if turn:
                    times[name].append((time.perf_counter() - began) * 1e3)
        if rank == 0:
            write(seqlen, args, times)
    dist.barrier()
    dist.destroy_process_group()


def write(seqlen: int, args: argparse.Namespace, times: dict[str, list[float]]) -> None:
    device = device_name(torch.device("cpu"))
    path = RESULTS / f"ring_{slug(device)}.csv"
    is_new = not path.exists()
    base = times[ONE]
    with open(path, "a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(FIELDS)
        for name, own in times.items():
            p20, *_, p80 = statistics.quantiles(own, n=5)
            speed = statistics.median(b / t for b, t in zip(base, own, strict=True))
            row = [f"{x:.2f}" for x in (statistics.median(own), p20, p80)] + [f"{speed:.3f}"]
            writer.writerow([device, commit(), f"{os.getloadavg()[0]:.1f}", args.dtype, seqlen, name, len(own), *row])
            print(f"{args.dtype} N {seqlen:6d}  {name:28s} {row[0]:>9s} ms  {row[3]} of one process", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlens", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(measure, args=(args, f"{directory}/rendezvous"), nprocs=RANKS)


if __name__ == "__main__":
    main()
