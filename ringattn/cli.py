"""The command line: what runs here, and what a mask and a layout cost.

ringattn env
ringattn plan --mask causal --layout zigzag --seqlen 131072 --world-size 8
ringattn trace --mask causal --seqlen 131072 --world-size 8 --network 50,5 --tflops 400
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
from ringattn.network import Network
from ringattn.plan import Plan, build_plan, cost
from ringattn.roofline import Sizes, critical_path, roofline
from ringattn.virtual import simulate

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
    plan = commands.add_parser("plan", help="who computes and sends what", formatter_class=_Help)
    _add_sizes(plan)
    plan.add_argument("--png", type=Path, help="also draw it into this file")
    trace = commands.add_parser(
        "trace", help="simulate a step on a network, without computing it", formatter_class=_Help
    )
    _add_sizes(trace)
    trace.add_argument("--network", default="50,5", help=f"{NETWORK_FORM}: GB/s and µs of each link")
    trace.add_argument("--tflops", type=float, default=400.0, help="of one rank, on attention")
    trace.add_argument("--batch", type=int, default=1)
    trace.add_argument("--out", type=Path, default=Path("trace"), help="writes OUT.json (chrome://tracing) and OUT.png")
    args = parser.parse_args(argv)
    try:
        if args.command == "env":
            print_env()
        elif args.command == "plan":
            print_plan(args)
        else:
            print_trace(args)
    except (ImportError, OSError, ValueError) as error:
        print(f"ringattn: {error}", file=sys.stderr)
        return 2
    return 0


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults where there are any."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None or action.required else super()._get_help_string(action)


def _add_sizes(command: argparse.ArgumentParser) -> None:
    command.add_argument("--mask", default="causal", help=" | ".join(form for form, _ in MASKS.values()))
    command.add_argument("--layout", default="zigzag", help=" | ".join([*layouts(), *MADE]))
    command.add_argument("--seqlen", type=int, required=True, help="tokens of the whole sequence")
    command.add_argument("--world-size", type=int, required=True, help="ranks")
    command.add_argument("--heads", type=int, default=32, help="of queries")
    command.add_argument("--kv-heads", type=int, default=8, help="of keys and values")
    command.add_argument("--head-dim", type=int, default=128, help="of all three")
    command.add_argument("--dtype", choices=list(DTYPES), default="bf16", help="of q, k, v")


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


def _checked(args: argparse.Namespace) -> tuple[Mask, Layout]:
    """The mask and the layout, if all sizes are legal."""
    for name in ("seqlen", "world_size", "heads", "kv_heads", "head_dim", "batch"):
        if getattr(args, name, 1) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1.")
    if args.heads % args.kv_heads:
        raise ValueError(
            f"--heads is {args.heads} and --kv-heads {args.kv_heads}; heads must be a multiple of kv-heads."
        )
    mask = parse_mask(args.mask)
    is_made = args.layout in MADE
    return mask, MADE[args.layout](mask, args.seqlen, args.world_size) if is_made else args.layout


NETWORK_FORM = "GBPS,MICROSECONDS[,NODE_SIZE,GBPS,MICROSECONDS]"


def parse_network(text: str, tflops: float) -> Network:
    """The network of its numbers on the command line: of the links, and where ranks are in nodes of the links between them.

    Raises:
        ValueError: the numbers are not those, or one is out of range.

    Example:
        >>> parse_network("450,2,8,50,5", 400).inter_latency_s
        5e-06
    """
    try:
        numbers = [float(part) for part in text.split(",")]
        fields = {"bandwidth_bytes_per_s": numbers[0] * 1e9, "latency_s": numbers[1] / 1e6}
        if len(numbers) > 2:
            node_size, bandwidth, latency = numbers[2:]
            fields |= {"inter_bandwidth_bytes_per_s": bandwidth * 1e9, "inter_latency_s": latency / 1e6}
            return Network(tflops * 1e12, **fields, node_size=int(node_size))
        return Network(tflops * 1e12, **fields)
    except (IndexError, ValueError) as error:
        reason = f" ({error})" if str(error).startswith("Network") else ""
        raise ValueError(
            f"--network is {text!r}, --tflops {tflops:g}; --network must be {NETWORK_FORM}.{reason}"
        ) from None


def print_trace(args: argparse.Namespace) -> None:
    """Simulate forward and backward, print what is exposed, and write the trace and its picture."""
    from ringattn.picture import draw_timeline

    mask, layout = _checked(args)
    network = parse_network(args.network, args.tflops)
    sizes = Sizes(args.heads, args.kv_heads, args.head_dim, dtype=DTYPES[args.dtype], batch=args.batch)
    ring = (mask, layout, args.seqlen, args.world_size)
    plans = [build_plan(*ring, rank) for rank in range(args.world_size)]
    print(
        f"{'pass':<9} {'simulated ms':>13} {'critical path ms':>17} {'ratio':>6} {'roofline ms':>12} {'exposed':>8}  hidden"
    )
    for name in ("forward", "backward"):
        is_backward = name == "backward"
        seconds = simulate(*ring, network=network, sizes=sizes, passes=[name]).seconds
        shortest, roof = (f(plans, network, sizes, is_backward) for f in (critical_path, roofline))
        share = roof.exposed_s / roof.seconds if roof.seconds else 0.0
        print(
            f"{name:<9} {seconds * 1e3:>13,.3f} {shortest * 1e3:>17,.3f} {roof.ratio:>6.2f} {roof.seconds * 1e3:>12,.3f} {share:>8.1%}"
            f"  {'yes' if roof.is_hidden else 'no'}"
        )
    timeline = simulate(*ring, network=network, sizes=sizes)
    print()
    print("exposed communication, microseconds, by hop (below 0: gradients on their way home)")
    exposed = timeline.exposed()
    offsets = sorted({offset for _, offset in exposed}, key=lambda offset: (offset < 0, abs(offset)))
    print("rank" + "".join(f"{offset:>+9}" for offset in offsets))
    for rank in range(args.world_size):
        print(f"{rank:>4}" + "".join(f"{exposed.get((rank, offset), 0) * 1e6:>9,.1f}" for offset in offsets))
    files = [args.out.with_name(args.out.name + end) for end in (".json", ".png")]
    timeline.save(files[0])
    shown = layout if isinstance(layout, str) else layout.title
    title = (
        f"{args.mask} mask, {shown} layout: {args.seqlen:,} tokens over {args.world_size} ranks, forward and backward"
    )
    draw_timeline(timeline, files[1], title)
    print(f"wrote {files[0]} and {files[1]}")


def print_plan(args: argparse.Namespace) -> None:
    """Per rank and hop what is computed and sent, and the totals."""
    mask, layout = _checked(args)
    sizes = (args.seqlen, args.world_size)
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
