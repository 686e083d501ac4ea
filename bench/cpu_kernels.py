"""The cpu backend's kernels against PyTorch's flash kernel for CPUs and flex_attention.

    python -m bench.cpu_kernels [--quick | --smoke] [--only REGEX] [--rounds N] [--out CSV]

Two parts: one long sequence under a causal mask, a window and packed documents, where the time should follow the number of
visible pairs; and full and causal attention at several lengths, head dims and thread counts. Rows go to
`bench/results/cpu_kernels_<CPU>.csv`, and a picture beside it.
"""

import argparse
import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from bench.contenders import aten_cpu, block_kernel, flex
from bench.harness import Case, Contender, CpuClock, device_name, record
from bench.kernels import default_path, packed_documents
from bench.plot import picture
from ringattn.kernels.cpu import Cpu, levels
from ringattn.masks import Causal, Full, Mask, Window

ATEN = aten_cpu("aten flash")
FLEX = flex("flex_attention")


@dataclasses.dataclass(frozen=True)
class Setting:
    """How large the cases are. `seqlens` are by number of threads."""

    seqlens: dict[int, tuple[int, ...]]
    head_dims: tuple[int, ...]
    heads: int
    masked_tokens: int
    masked_heads: int
    window: int
    peers: tuple[Contender, ...]


FULL = Setting(
    seqlens={1: (2048, 4096, 8192), 2: (2048, 4096)},
    head_dims=(64, 128),
    heads=8,
    masked_tokens=16384,
    masked_heads=1,
    window=1024,
    peers=(ATEN, FLEX),
)
QUICK = dataclasses.replace(FULL, seqlens={1: (1024,)}, head_dims=(64,), masked_tokens=4096, window=256, peers=(ATEN,))
SMOKE = dataclasses.replace(QUICK, seqlens={1: (64,)}, head_dims=(16,), heads=2, masked_tokens=64, window=16)


def own(every_level: bool) -> list[Contender]:
    """The kernels for the best instruction set of this processor, or for each of its own; without the library its refusal."""
    found = [level for level in levels() if not level.startswith("emulated")]
    if not found:
        return [block_kernel("cpu", Cpu())]
    return [block_kernel(f"cpu {level}", Cpu(level)) for level in (found if every_level else found[-1:])]


def visible_pairs(setting: Setting) -> Iterator[list[tuple[Case, Contender]]]:
    """Masks that hide most pairs of a long sequence, timed beside the causal one."""
    n, heads = setting.masked_tokens, setting.masked_heads
    masks = {
        "causal": Causal(),
        f"window {setting.window}": Window(setting.window - 1),
        "documents": packed_documents(n),
    }
    for direction in ("forward", "backward"):
        cases = [Case(name, mask, n, 64, 64, torch.float32, direction, 1, heads, heads) for name, mask in masks.items()]
        yield [(case, contender) for case in cases for contender in [*own(every_level=False), ATEN]]


def lengths(setting: Setting, threads: int) -> Iterator[list[tuple[Case, Contender]]]:
    """Full and causal attention; lesser instruction sets in the smallest cases only."""
    masks: tuple[tuple[str, Mask], ...] = (("full", Full()), ("causal", Causal()))
    sizes = list(itertools.product(setting.seqlens[threads], setting.head_dims))
    for dtype, (seqlen, head_dim), (name, mask), direction in itertools.product(
        (torch.float32, torch.bfloat16), sizes, masks, ("forward", "backward")
    ):
        case = Case(name, mask, seqlen, head_dim, head_dim, dtype, direction, 1, setting.heads, setting.heads)
        contenders = [*own(every_level=(seqlen, head_dim) == sizes[0]), *setting.peers]
        yield [(case, contender) for contender in contenders]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The cpu backend's kernels against PyTorch's.")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="one length, one thread, about a minute")
    size.add_argument("--smoke", action="store_true", help="tiny sizes, to exercise the code")
    parser.add_argument("--only", type=re.compile, default=re.compile(""), help="only groups with a case that matches")
    parser.add_argument("--threads", type=int, nargs="*", choices=FULL.seqlens, help="only with so many threads")
    parser.add_argument("--rounds", type=int, default=15, help="at most this many rounds a group (15)")
    parser.add_argument(
        "--budget", type=float, default=10.0, help="seconds after which a group starts no new round (10)"
    )
    parser.add_argument("--out", type=Path, help="CSV to write; default bench/results/cpu_kernels_<CPU>.csv")
    args = parser.parse_args(argv)
    setting = SMOKE if args.smoke else QUICK if args.quick else FULL
    out = args.out or default_path(args.smoke, "cpu_kernels", device_name(torch.device("cpu")))
    out.unlink(missing_ok=True)
    before = torch.get_num_threads()
    rows = []
    for threads in args.threads or setting.seqlens:
        torch.set_num_threads(threads)
        groups = itertools.chain(visible_pairs(setting) if threads == 1 else (), lengths(setting, threads))
        chosen = (group for group in groups if any(args.only.search(str(case)) for case, _ in group))
        rows += record(chosen, CpuClock(), out, args.rounds, args.budget)
    torch.set_num_threads(before)
    picture([row for row in rows if row.threads == 1 and row.heads == setting.heads], out.with_suffix(".png"))
    print(f"{len(rows)} rows in {out}, a picture in {out.with_suffix('.png')}")
    return int(any(row.reason.startswith("wrong") and not row.is_peer for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
