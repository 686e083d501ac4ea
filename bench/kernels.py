"""The Triton kernels on a GPU against PyTorch's and FlashAttention's.

    python -m bench.kernels [--only REGEX] [--rounds N] [--out CSV]     the comparison
    python -m bench.kernels --tune [--only REGEX]                       candidates for ringattn/kernels/triton/tiles.py
    python -m bench.kernels --smoke                                     tiny sizes on the CPU, to exercise the code

Rows go to `bench/results/kernels_<device>.csv`; `python -m bench.plot` makes the table and the picture.
"""

import argparse
import dataclasses
import itertools
import multiprocessing
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend

from bench.contenders import block_kernel, flash_attn, flex, ring_of_one, sdpa, virtual_ring
from bench.harness import (
    Case,
    Clock,
    Contender,
    CpuClock,
    CudaClock,
    Inputs,
    Row,
    Run,
    append,
    blank_row,
    conditions,
    device_name,
    read,
    record,
    slug,
)
from ringattn.kernels import backends
from ringattn.kernels.triton.backend import architecture
from ringattn.kernels.triton.tiles import CANDIDATES, KERNELS, SPECIALIZED, TILES, Key, Tile, serving
from ringattn.masks import Causal, Documents, Full, Mask, Window

RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where the bench runs, who takes part, and how large the cases are."""

    clock: Callable[[], Clock]
    backend: str  # the one that is judged
    others: tuple[Contender, ...]
    dtype: torch.dtype
    head_dims: tuple[tuple[int, int], ...]
    seqlens: tuple[int, ...]
    batch_tokens: int  # tokens in a batch of short sequences
    width: int  # heads times head dim
    group: int  # query heads per key head, with GQA
    window: int
    tune_tokens: int
    tiles: tuple[Tile, ...]


GPU = Setting(
    clock=CudaClock,
    backend="triton",
    others=(
        sdpa("sdpa flash", SDPBackend.FLASH_ATTENTION),
        sdpa("sdpa cudnn", SDPBackend.CUDNN_ATTENTION),
        sdpa("sdpa efficient", SDPBackend.EFFICIENT_ATTENTION),
        flex("flex_attention"),
        flash_attn("flash-attn 2", "flash_attn"),
        flash_attn("flash-attn 3", "flash_attn_interface"),
    ),
    dtype=torch.bfloat16,
    head_dims=((64, 64), (128, 128), (192, 128)),
    seqlens=tuple(1 << n for n in range(11, 18)),
    batch_tokens=16384,
    width=2048,
    group=8,
    window=4096,
    tune_tokens=8192,
    tiles=tuple(Tile(*x) for x in itertools.product((64, 128), (32, 64, 128), (4, 8), (1, 2, 3))),
)

SMOKE = Setting(
    clock=CpuClock,
    backend="reference",
    others=(block_kernel("cpu kernels", backends()["cpu"]), sdpa("sdpa math", SDPBackend.MATH)),
    dtype=torch.float32,
    head_dims=((24, 16),),
    seqlens=(64,),
    batch_tokens=128,
    width=64,
    group=2,
    window=16,
    tune_tokens=64,
    tiles=(Tile(64, 64, 4, 2), Tile(128, 64, 8, 2)),
)


# ---- the comparison


def masks(seqlen: int, window: int) -> Iterator[tuple[str, Mask]]:
    """The masks by name; a window that is no shorter than the sequence is left out, being the causal mask."""
    yield "causal", Causal()
    yield "full", Full()
    if window < seqlen:
        yield f"window {window}", Window(window - 1)
    yield "documents", packed_documents(seqlen)


def packed_documents(seqlen: int) -> Documents:
    """Eight documents, of 1 to 8 parts of the sequence's 32."""
    lengths = (3, 1, 5, 2, 8, 4, 6, 3)
    return Documents(tuple(n * seqlen // 32 for n in itertools.accumulate(lengths, initial=0)))


def cases(setting: Setting) -> Iterator[Case]:
    for (head_dim, v_head_dim), seqlen, group in itertools.product(
        setting.head_dims, setting.seqlens, (1, setting.group)
    ):
        # As many heads as the group divides.
        heads = max(1, setting.width // head_dim // setting.group) * setting.group
        batch = max(1, setting.batch_tokens // seqlen)
        for (name, mask), direction in itertools.product(masks(seqlen, setting.window), ("forward", "backward")):
            yield Case(name, mask, seqlen, head_dim, v_head_dim, setting.dtype, direction, batch, heads, heads // group)


def contenders(setting: Setting, case: Case) -> list[Contender]:
    own = [
        ring_of_one("ringattn", setting.backend),
        block_kernel("ringattn kernels", backends()[setting.backend]),
    ]
    if isinstance(case.mask, Causal):
        own.append(virtual_ring("ringattn, ring of 8", setting.backend, 8))
    return [*own, *setting.others]


def comparison(setting: Setting, only: re.Pattern[str]) -> Iterator[list[tuple[Case, Contender]]]:
    for case in filter(lambda case: only.search(str(case)), cases(setting)):
        yield [(case, contender) for contender in contenders(setting, case)]


# ---- the tiles

Group = list[tuple[Case, Contender]]


def tuning_cases(setting: Setting, only: re.Pattern[str]) -> Iterator[tuple[str, Case, Key]]:
    """Each kernel and head dim: the kernel, a case that it decides, and the row of the table that serves it."""
    arch = architecture(torch.device("cuda")) if setting.clock is CudaClock else "interpreter"
    for (head_dim, v_head_dim), kernel in itertools.product(setting.head_dims, KERNELS):
        direction = "forward" if kernel == "forward" else "backward"
        heads = max(1, setting.width // head_dim)
        sizes = (setting.tune_tokens, head_dim, v_head_dim, setting.dtype, direction, 1, heads, heads)
        case = Case("causal", Causal(), *sizes)
        key = serving(TILES, arch, head_dim, v_head_dim, setting.dtype)
        assert key is not None, f"no tiles for {arch}"
        if only.search(f"{kernel} {case}"):
            yield kernel, case, key


def tuning(setting: Setting, only: re.Pattern[str]) -> Iterator[Group]:
    """One group per kernel and head dim: the backend with each candidate tile, and, as the peer, with the table's own."""
    kernels = block_kernel("", backends()[setting.backend])
    for kernel, case, key in tuning_cases(setting, only):
        now = TILES[key][KERNELS.index(kernel)]
        candidates = [now, *(tile for tile in setting.tiles if tile != now)]
        yield [(case, with_tile(kernels, key, kernel, tile, is_peer=tile == now)) for tile in candidates]


def with_tile(contender: Contender, key: Key, kernel: str, tile: Tile, is_peer: bool) -> Contender:
    """The contender while the tables have `tile` for `kernel` in the row `key`, and no other that is specialised."""
    row = tuple(tile if name == kernel else old for name, old in zip(KERNELS, TILES[key], strict=True))

    @contextmanager
    def in_table() -> Iterator[None]:
        table, changes = (SPECIALIZED, {key: tile}) if tile.warp_specialize else (TILES, {key: row})
        with patch.dict(SPECIALIZED, clear=True), patch.dict(table, changes):
            yield

    def prepare(inputs: Inputs) -> Run:
        with in_table():
            run = contender.prepare(inputs)

        def call() -> object:
            with in_table():
                return run.call()

        return Run(call, run.read)

    return Contender(f"{kernel} {tile_name(tile)}", prepare, is_peer)


# ---- tiles that may never return

LONGEST_TRIAL_S = 300.0


def specialised(setting: Setting, only: re.Pattern[str], out: Path, rounds: int, budget_s: float) -> list[Row]:
    """Measure the candidates whose warps are specialised, each beside the table's own tile and in a process of its own.

    The warps of such a kernel wait for each other; where the compiler got that wrong they wait for ever, and nobody has yet
    seen these run. The process is killed then, and the candidate's row says so.
    """
    rows = []
    for kernel, case, key in tuning_cases(setting, only):
        for tile in CANDIDATES.get(key, ()) if kernel == "forward" else ():
            trial = out.with_suffix(".trial.csv")
            reason = survive(try_tile, setting.backend, setting.clock, case, key, tile, trial, rounds, budget_s)
            found = read(trial) if trial.exists() else []
            trial.unlink(missing_ok=True)
            if reason:
                contender = with_tile(block_kernel("", backends()[setting.backend]), key, kernel, tile, is_peer=False)
                row = blank_row(case, contender, conditions(setting.clock()))
                found = [dataclasses.replace(row, reason=reason)]
                print(f"{case} | {row.contender} | {reason}", flush=True)
            append(out, found)
            rows += found
    return rows


def try_tile(
    backend: str, clock: Callable[[], Clock], case: Case, key: Key, tile: Tile, out: Path, rounds: int, budget_s: float
) -> None:
    """Check and time a candidate of the forward kernel beside the table's tile."""
    kernels, now = block_kernel("", backends()[backend]), TILES[key][KERNELS.index("forward")]
    group = [(case, with_tile(kernels, key, "forward", x, is_peer=x == now)) for x in (now, tile)]
    record([group], clock(), out, rounds, budget_s)


def survive(function: Callable[..., None], *args: Any, longest_s: float = LONGEST_TRIAL_S) -> str:
    """Call a function in a process of its own: "" when it returned, else what became of it."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=args)
    process.start()
    process.join(longest_s)
    if process.is_alive():
        process.kill()
        process.join()
        return f"did not end in {longest_s:.0f} s: its warps may wait for each other for ever"
    return "" if process.exitcode == 0 else f"its process ended with exit code {process.exitcode}"


def tile_name(tile: Tile) -> str:
    specialised = " specialised" if tile.warp_specialize else ""
    return f"{tile.block_m}x{tile.block_n} warps {tile.num_warps} stages {tile.num_stages}{specialised}"


def best_tiles(rows: Sequence[Row]) -> list[str]:
    """For each kernel and head dim the fastest tile, and how much faster it is than the table's."""
    lines = []
    groups: dict[tuple[str, str, int, int], list[Row]] = {}
    for row in rows:
        kernel, _ = row.contender.split(maxsplit=1)
        groups.setdefault((kernel, row.direction, row.head_dim, row.v_head_dim), []).append(row)
    for (kernel, direction, head_dim, v_head_dim), group in groups.items():
        ran = [row for row in group if row.median_ms is not None]
        best = min(ran, key=lambda row: row.median_ms or 0.0, default=None)
        found = (
            "no tile ran"
            if best is None
            else f"{best.contender}, {best.ratio:.2f}x the table's, {best.tflops:.3g} TFLOP/s"
        )
        lines.append(f"{kernel} ({direction}) D {head_dim}/{v_head_dim}: {found}")
    return lines


# ---- command line


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The Triton kernels against PyTorch's and FlashAttention's.")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU, to exercise the code")
    parser.add_argument("--tune", action="store_true", help="time candidate tiles and print the best of each case")
    parser.add_argument("--only", type=re.compile, default=re.compile(""), help="only cases whose name matches")
    parser.add_argument("--rounds", type=int, default=30, help="at most this many rounds a group (30)")
    parser.add_argument(
        "--budget", type=float, default=20.0, help="seconds after which a group starts no new round (20)"
    )
    parser.add_argument("--out", type=Path, help="CSV to write; default bench/results/kernels[_tune]_<device>.csv")
    args = parser.parse_args(argv)
    if not args.smoke and not torch.cuda.is_available():
        parser.exit(1, "bench.kernels: there is no GPU and this bench needs one; --smoke exercises it on the CPU.\n")
    setting = SMOKE if args.smoke else GPU
    clock = setting.clock()
    out = args.out or default_path(args.smoke, "kernels_tune" if args.tune else "kernels", device_name(clock.device))
    out.unlink(missing_ok=True)
    groups = tuning(setting, args.only) if args.tune else comparison(setting, args.only)
    rows = record(groups, clock, out, args.rounds, args.budget)
    if args.tune:
        rows += specialised(setting, args.only, out, args.rounds, args.budget)
        print(*best_tiles(rows), sep="\n")
    print(f"{len(rows)} rows in {out}")
    return int(any(row.reason.startswith("wrong") and not row.is_peer for row in rows))


def default_path(is_smoke: bool, bench: str, device: str) -> Path:
    """Where the rows of a bench go; those of a smoke run are of no use to anybody."""
    return (Path(tempfile.mkdtemp()) if is_smoke else RESULTS) / f"{bench}_{slug(device)}.csv"


if __name__ == "__main__":
    raise SystemExit(main())
