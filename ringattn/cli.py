"""The command line: what runs here, and what a mask and a layout cost.

ringattn env
ringattn plan --mask causal --layout zigzag --seqlen 131072 --world-size 8
"""

import argparse
import importlib.metadata
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import ringattn
from ringattn.balance import balanced, choose_layout
from ringattn.kernels import Request, backends
from ringattn.layout import Layout, layouts
from ringattn.masks import Causal, Chunked, Documents, Full, Mask, PrefixLM, Window
from ringattn.plan import Plan, build_plan, cost

__all__ = ["main"]

PACKAGES = ("torch", "triton", "numpy", "transformers", "accelerate")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _no_numbers(mask: type[Mask]) -> Callable[[str], Mask]:
    def make(text: str) -> Mask:
        if text:
            raise ValueError(text)
        return mask()

    return make


# name: (how it is written, the mask of what follows the colon)
MASKS: dict[str, tuple[str, Callable[[str], Mask]]] = {
    "causal": ("causal", _no_numbers(Causal)),
    "full": ("full", _no_numbers(Full)),
    "window": ("window:LEFT[,RIGHT]", lambda text: Window(*_numbers(text))),
    "documents": ("documents:0,5,9", lambda text: Documents(tuple(_numbers(text)))),
    "chunked": ("chunked:SIZE[,OFFSET]", lambda text: Chunked(*_numbers(text))),
    "prefix": ("prefix:LENGTH", lambda text: PrefixLM(*_numbers(text))),
}

# layouts that are made for a mask, a length and a world size
MADE: dict[str, Callable[[Mask, int, int], Layout]] = {"balanced": balanced, "auto": choose_layout}


def parse_mask(text: str) -> Mask:
    """The mask of its name on the command line.

    Raises:
        ValueError: there is no mask of that name, or its numbers are not what it takes.

    Example:
        >>> parse_mask("window:3")
        Window(left=3, right=0)
    """
    name, _, numbers = text.partition(":")
    if name not in MASKS:
        raise ValueError(f"--mask is {text!r}; it must be one of {', '.join(form for form, _ in MASKS.values())}.")
    form, make = MASKS[name]
    try:
        return make(numbers)
    except (TypeError, ValueError) as error:
        # the masks' own messages begin with their name; others say nothing of use here
        reason = f" ({error})" if str(error).split(":")[0] in {"Window", "Documents", "Chunked", "PrefixLM"} else ""
        raise ValueError(f"--mask is {text!r}; it must be written {form}.{reason}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0, or 2 after an error, which is one line on stderr."""
    parser = argparse.ArgumentParser(prog="ringattn", description="Exact attention over sequences split across ranks.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("env", help="versions, devices, and which backend serves what here")
    plan = commands.add_parser(
        "plan",
        help="who computes and sends what",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    plan.add_argument("--mask", default="causal", help=" | ".join(form for form, _ in MASKS.values()))
    plan.add_argument("--layout", default="zigzag", help=" | ".join([*layouts(), *MADE]))
    plan.add_argument("--seqlen", type=int, required=True, help="tokens of the whole sequence")
    plan.add_argument("--world-size", type=int, required=True)
    plan.add_argument("--heads", type=int, default=32)
    plan.add_argument("--kv-heads", type=int, default=8)
    plan.add_argument("--head-dim", type=int, default=128)
    plan.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    plan.add_argument("--png", type=Path, help="also draw it into this file")
    args = parser.parse_args(argv)
    try:
        if args.command == "env":
            print_env()
        else:
            print_plan(args)
    except (ImportError, OSError, ValueError) as error:
        print(f"ringattn: {error}", file=sys.stderr)
        return 2
    return 0


def print_env() -> None:
    """Versions, devices, and each backend's verdict on a plain call in fp32 and bf16."""
    print(f"{'python':<13} {platform.python_version()}, {platform.system()} {platform.machine()}")
    print(f"{'ringattn':<13} {ringattn.__version__}")
    for package in PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        # torch's own says which build it is: +cpu, +cu130.
        print(f"{package:<13} {torch.__version__ if package == 'torch' else version}")
    devices = [torch.device("cpu")]
    print(f"{'cpu':<13} {torch.get_num_threads()} threads")
    for i in range(torch.cuda.device_count()):
        devices = [torch.device("cpu"), torch.device("cuda", 0)]
        major, minor = torch.cuda.get_device_capability(i)
        print(f"{f'cuda:{i}':<13} {torch.cuda.get_device_name(i)}, compute capability {major}.{minor}")
    print()
    for name, backend in backends().items():
        for device in devices:
            for dtype_name in ("fp32", "bf16"):
                request = Request(device, DTYPES[dtype_name], 8, 8, 64, 64, softcap=False, sinks=False, dropout=False)
                reason = backend.supports(request)
                print(
                    f"backend {name:<11} {device.type:<5} {dtype_name}  {'yes' if reason is None else f'no: {reason}'}"
                )


def print_plan(args: argparse.Namespace) -> None:
    """Per rank and hop what is computed and sent, and the totals."""
    for name in ("seqlen", "world_size", "heads", "kv_heads", "head_dim"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1.")
    if args.heads % args.kv_heads:
        raise ValueError(
            f"--heads is {args.heads} and --kv-heads {args.kv_heads}; heads must be a multiple of kv-heads."
        )
    mask = parse_mask(args.mask)
    sizes = (args.seqlen, args.world_size)
    layout = MADE[args.layout](mask, *sizes) if args.layout in MADE else args.layout
    plans = [build_plan(mask, layout, *sizes, rank) for rank in range(args.world_size)]
    _print_hops(plans, 2 * args.kv_heads * args.head_dim * DTYPES[args.dtype].itemsize)
    _print_totals(plans, args)
    if args.png is not None:
        from ringattn.picture import draw_schedule

        draw_schedule(mask, layout, *sizes, args.png)
        print(f"wrote {args.png}")


def _print_hops(plans: list[Plan], bytes_per_row: int) -> None:
    print(f"{'rank':>4} {'hop':>4} {'pairs':>17} {'share':>7} {'sends to':>9} {'rows':>10} {'bytes':>15}")
    total = max(1, sum(plan.area for plan in plans))
    for plan in plans:
        for number, hop in enumerate(plan.hops):
            area = sum(block.area for block in hop.blocks)
            rows = hop.send_rows
            target = (plan.rank + hop.offset) % plan.world_size if rows else "-"
            who = f"{plan.rank if number == 0 else '':>4} {number:>4}"
            print(f"{who} {area:>17,} {area / total:>7.2%} {target:>9} {rows:>10,} {rows * bytes_per_row:>15,}")


def _print_totals(plans: list[Plan], args: argparse.Namespace) -> None:
    heads = {"batch": 1, "kv_heads": args.kv_heads, "head_dim": args.head_dim, "dtype": DTYPES[args.dtype]}
    forward = sum(plan.bytes(**heads) for plan in plans)
    both = forward + sum(plan.bytes(**heads, backward=True) for plan in plans)
    flops = max(plan.flops(batch=1, heads=args.heads, head_dim=args.head_dim) for plan in plans)
    total = sum(plan.area for plan in plans)
    work = cost(plans[0].mask, plans[0].layout, args.seqlen, args.world_size)
    layout = plans[0].layout if isinstance(plans[0].layout, str) else plans[0].layout.title
    print()
    print(f"pairs seen            {total:,} of {args.seqlen**2:,} ({total / args.seqlen**2:.1%})")
    print(f"layout                {layout}, {len(plans[0].hops)} hops")
    print(f"tiles of 128 x 128    {sum(work.rank_tiles):,}, {work.inflation:.3f} x those of one device")
    print(f"busiest rank          {work.balance:.3f} x the mean, {flops / 1e12:,.3f} TFLOP forward")
    print(f"hops in lock-step     {work.lockstep_balance:.3f} x the mean")
    print(f"sent, all ranks       {forward:,} bytes forward, {both:,} with backward (batch 1)")


if __name__ == "__main__":
    sys.exit(main())
