"""What the compiler makes of every row of the tile table, and of the candidates for it, without a GPU.

    python -m bench.static [--arch sm_90 ...] [--head-dim 128 ...] [--csv FILE]

Each kernel is compiled as its launcher asks for it, and its machine code is read: registers, shared memory, spills in
loops, matrix instructions against the least that the tile needs, exponentials per score, length of the loops. These are
guards against regressions; how fast a kernel runs they do not say.
"""

import argparse
import csv
import dataclasses
import multiprocessing
import re
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.driver import driver

from bench import sass
from ringattn.kernels import Bounds, Grads, Options, State
from ringattn.kernels.triton.tiles import CANDIDATES, KERNELS, SHARED_MEMORY, TILES, Key, Tile

__all__ = ["CHECKS", "Case", "Report", "baseline", "cases", "failures", "measure", "measure_all", "write_csv"]

RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel with a tile on an architecture. `head_dim` and `v_head_dim` are the largest that the row of the table serves."""

    arch: str
    kernel: str
    dtype: str
    head_dim: int
    v_head_dim: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    warp_specialize: bool = False

    def __str__(self) -> str:
        tile = f"{self.block_m}x{self.block_n}x{self.num_warps} stages {self.num_stages}"
        form = " specialised" if self.warp_specialize else ""
        return f"{self.arch} {self.kernel} {self.dtype} {self.head_dim}/{self.v_head_dim} {tile}{form}"

    @property
    def tile(self) -> Tile:
        return Tile(self.block_m, self.block_n, self.num_warps, self.num_stages, self.warp_specialize)

    @property
    def dots(self) -> list[tuple[int, int, int]]:
        """The matrix products of one iteration as (M, N, K)."""
        m, n, d, dv = self.block_m, self.block_n, self.head_dim, self.v_head_dim
        return {
            "forward": [(m, n, d), (m, dv, n)],
            "dkv": [(n, m, d), (n, m, dv), (n, dv, m), (n, d, m)],
            "dq": [(m, n, d), (m, n, dv), (m, d, n)],
        }[self.kernel]


@dataclasses.dataclass(frozen=True)
class Report:
    """What the machine code of a case holds. The loops are the innermost ones with matrix instructions, or with fp32 FMAs
    where there are none: the shortest has no mask, the longest has one. Specialised warps have a loop for each group of rows,
    all with the mask, and the producers one without products."""

    case: Case
    registers: int
    shared: int  # bytes
    loop_spills: int  # instructions that spill or reload a register
    masked_spills: int
    matrix: str  # which instructions do the products
    work: float  # arithmetic issued, over the least that the tile needs
    exp2: float  # exponentials per score
    loop: int  # instructions of a warp in an iteration
    masked_loop: int
    warps: int  # of a block
    producers: int  # loops that copy by descriptors and compute nothing
    register_moves: int  # instructions by which some warps hand registers to others

    def row(self) -> dict[str, Any]:
        """The report as a row of the table and of the CSV."""
        nested = dataclasses.asdict(self)
        return {"triton": triton.__version__, **nested.pop("case"), **nested}


# ---- the machines

DTYPES = {16: torch.bfloat16, 32: torch.float32}
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
MATRIX_UNITS = {"sm_80": "HMMA", "sm_86": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "gfx942": "v_mfma"}
WIDE_UNITS = {"HGMMA": 64, "UTCHMMA": 64}  # rows that a product must have; the older unit does those with fewer


def matrix(case: Case) -> str:
    """The instructions that must do the products. On NVIDIA the matrix units would round fp32 to TF32: it is left to FMAs."""
    unit = MATRIX_UNITS[case.arch]
    if case.dtype == "float32" and TARGETS[case.arch].backend == "cuda":
        return "FFMA"
    return unit if min(m for m, _, _ in case.dots) >= WIDE_UNITS.get(unit, 0) else "HMMA"


def cases(archs: Collection[str] = tuple(TARGETS), head_dims: Collection[int] = ()) -> list[Case]:
    """The rows of the tile table, then the candidates, for some architectures and, where any are named, some head dims."""
    table = ((key, kernel, tile) for key, row in TILES.items() for kernel, tile in zip(KERNELS, row, strict=True))
    candidates = ((key, "forward", tile) for key, row in CANDIDATES.items() for tile in row)
    return [
        case_for(*entry)
        for entry in (*table, *candidates)
        if entry[0][0] in archs and (not head_dims or entry[0][2] in head_dims)
    ]


def case_for(key: Key, kernel: str, tile: Tile) -> Case:
    arch, bits, head_dim, v_head_dim = key
    return Case(
        arch, kernel, str(DTYPES[bits]).removeprefix("torch."), head_dim, v_head_dim, *dataclasses.astuple(tile)
    )


# ---- compiling what a launcher launches


class NoDevice:
    """Stands in for Triton's driver of a GPU that is not there; its device is the target, so that each has a cache of its own."""

    def __init__(self, target: GPUTarget):
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> GPUTarget:
        return self.target

    def get_current_stream(self, device: GPUTarget) -> int:
        return 0


Launch = tuple[ASTSource, dict[str, Any]]  # what is compiled, and the options of the compiler


def launches(target: GPUTarget, launch: Callable[[], object]) -> dict[str, Launch]:
    """The kernels, by name, that `launch` launches on a target: recorded and not run."""
    recorded: dict[str, Launch] = {}

    def record(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        source = ASTSource(fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0])
        recorded[fn.jit_function.__name__] = (
            source,
            {option: compile[option] for option in ("num_warps", "num_stages", "enable_fp_fusion")},
        )
        return True

    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = record
        driver.set_active(NoDevice(target))
        launch()
    return recorded


def compiled(target: GPUTarget, name: str, launch: Callable[[], object]) -> CompiledKernel:
    """The kernel called `name` as `launch` specialises it."""
    source, options = launches(target, launch)[name]
    return triton.compile(source, target=target, options=options)


def launch(
    case: Case,
    *,
    start: bool = False,
    finish: bool = False,
    is_full: bool = False,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    has_sinks: bool = False,
) -> None:
    """A call of the kernel of a case, as launchers make it.

    By default one in the middle of a ring: the state comes from memory and goes there, and rows have bounds.

    The tensors hold no memory; their sizes matter only in that strides are what they are in practice, multiples of 16.
    """
    batch, seqlen, heads, kv_heads = 2, 4096, 8, 2
    dtype = getattr(torch, case.dtype)

    def rows(heads: int, dim: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(batch, seqlen, heads, dim, dtype=dtype, device="meta")

    def numbers() -> torch.Tensor:
        return torch.empty(batch, heads, seqlen, device="meta")

    index = torch.empty(seqlen, dtype=torch.int32, device="meta")
    d, dv = case.head_dim, case.v_head_dim
    q, k, v, out = rows(heads, d), rows(kv_heads, d), rows(kv_heads, dv), rows(heads, dv)
    bounds = Bounds(index, index, index, index, is_full)
    options = Options(d**-0.5, softcap, dropout_p)
    if case.kernel == "forward":
        from ringattn.kernels.triton.forward import forward

        state = State(rows(heads, dv, torch.float32), numbers(), numbers(), out, numbers())
        sinks = torch.empty(heads, device="meta") if has_sinks else None
        forward(case.tile, state, q, k, v, bounds, options, sinks=sinks, start=start, finish=finish)
    else:
        from ringattn.kernels.triton.backward import backward

        grads = Grads(*(rows(h, dim, torch.float32) for h, dim in ((heads, d), (kv_heads, d), (kv_heads, dv))))
        backward(case.tile, case.tile, grads, q, k, v, out, numbers(), numbers(), bounds, options)


# ---- reading what came out


def disassembled(kernel: CompiledKernel) -> tuple[list[sass.Instruction], int]:
    """The program and the registers of one of its threads."""
    if "amdgcn" in kernel.asm:
        return sass.parse_amdgcn(kernel.asm["amdgcn"]), number(r"\.vgpr_count:\s+(\d+)", kernel.asm["amdgcn"])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        listing, usage = (
            subprocess.run([tool, option, cubin.name], check=True, capture_output=True, text=True).stdout
            for option in ("-sass", "-res-usage")
        )
    return sass.parse_sass(listing), number(r"REG:(\d+)", usage)


def number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, f"{pattern} is not in what the compiler printed"
    return int(found[1])


def issued(case: Case, loop: list[sass.Instruction]) -> float:
    """The arithmetic of the products in one iteration, over the least that the tile needs."""
    if sass.count(re.compile("UTC"), loop):
        # One such instruction, issued once per block, multiplies 128 x 16 by 16 x 256, or less where the product is smaller.
        least = sum(-(-m // 128) * -(-n // 256) * -(-k // 16) for m, n, k in case.dots)
        return sass.count(sass.MATRIX, loop) / least
    kind = sass.MATRIX if sass.count(sass.MATRIX, loop) else sass.FMA
    flops = case.num_warps * sum(sass.flops_per_warp(i) for i in loop if kind.match(i.text))
    return flops / sum(2 * m * n * k for m, n, k in case.dots)


def measure(case: Case, **features: Any) -> Report:
    """Compile a case, with features of `launch`, and read its machine code.

    Takes seconds, or none where Triton has the kernel in its cache.
    """
    target = TARGETS[case.arch]
    kernel = compiled(target, f"_{case.kernel}", lambda: launch(case, **features))
    program, registers = disassembled(kernel)
    loops = sorted(sass.main_loops(program), key=len)
    # Where on-chip memory does not suffice ptxas may write a kernel that only traps, and say nothing.
    assert loops, f"{case}: no loop with products was compiled"
    products = sass.MATRIX if sass.count(sass.MATRIX, program) else sass.FMA
    scores_per_warp = case.block_m * case.block_n / (target.warp_size * case.num_warps)
    # Specialised warps share out the tile, a loop for each group of them; else every warp runs each of the loops.
    passes = [[i for loop in loops for i in loop]] if case.warp_specialize else loops
    copies = [
        loop for nodes in sass.natural_loops(program) if sass.count(sass.COPY, loop := [program[i] for i in nodes])
    ]
    return Report(
        case=case,
        registers=registers,
        shared=kernel.metadata.shared,
        loop_spills=sass.count(sass.SPILL, loops[0]),
        masked_spills=max(sass.count(sass.SPILL, loop) for loop in loops),
        matrix=" ".join(sorted({m[0] for loop in loops for i in loop if (m := products.match(i.text))})),
        work=max(issued(case, loop) for loop in passes),
        exp2=sass.count(sass.EXP2, passes[0]) / scores_per_warp,
        loop=len(loops[0]),
        masked_loop=len(loops[-1]),
        warps=kernel.metadata.num_warps,
        producers=sum(not sass.count(products, loop) for loop in copies),
        register_moves=sass.count(sass.REGISTER_MOVE, program),
    )


def measure_all(wanted: Iterable[Case]) -> list[Report]:
    """`measure` of many cases, in parallel, in their order."""
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(measure, wanted))


# ---- what is required of it

EXP2_BOUND = 1.07  # one per score, and for each row and tile one more, which wide tiles amortise
FMA_BOUND = 1.1  # without a matrix unit the softmax has its share of the multiply-adds
FMA_SPILLS = 0.1  # without a matrix unit whole operands sit in registers; few spills hide behind the multiply-adds
LOOP_GROWTH = 1.05
LOOPS = ("loop", "masked_loop", "masked_spills")  # may not grow by more

# (name, what must hold, what is said where it does not)
CHECKS: tuple[tuple[str, Callable[[Report], bool], str], ...] = (
    (
        "shared memory",
        lambda r: r.shared <= SHARED_MEMORY[r.case.arch],
        "{shared} bytes are more than a block may have",
    ),
    (
        "spills",
        lambda r: r.loop_spills <= (FMA_SPILLS * r.loop if r.matrix.startswith("FFMA") else 0),
        "{loop_spills} spills in its loop",
    ),
    (
        "matrix instructions",
        lambda r: r.matrix == matrix(r.case),
        "products are done by {matrix}",
    ),
    (
        "work",
        lambda r: 1 <= r.work <= FMA_BOUND if r.matrix.startswith("FFMA") else r.work == 1,
        "arithmetic is {work} times the least",
    ),
    (
        "exponentials",
        lambda r: 1 <= r.exp2 <= EXP2_BOUND or r.case.block_n < 64,
        "{exp2} exponentials per score",
    ),
    (
        "warp specialisation",
        lambda r: (r.warps > r.case.num_warps and r.producers == 1 and r.register_moves > 0) == r.case.warp_specialize,
        "{warps} warps, {producers} loops that only load, {register_moves} moves of registers",
    ),
)


def failures(report: Report) -> list[str]:
    """What is wrong with a report, in words."""
    return [f"{report.case}: {say.format(**report.row())}" for _, holds, say in CHECKS if not holds(report)]


def baseline(version: str = triton.__version__) -> dict[Case, dict[str, int]] | None:
    """The loops stored for a version of Triton, by case; None where there are none."""
    path = RESULTS / f"static_{version}.csv"
    if not path.exists():
        return None
    with path.open(newline="") as file:
        return {case_of(row): {name: int(row[name]) for name in LOOPS} for row in csv.DictReader(file)}


def case_of(row: dict[str, str]) -> Case:
    texts = {field.name: (field.type, row[field.name]) for field in dataclasses.fields(Case)}
    return Case(**{name: text == "True" if kind is bool else kind(text) for name, (kind, text) in texts.items()})


def growth(report: Report, stored: dict[Case, dict[str, int]]) -> list[str]:
    """What has grown past the stored numbers, in words."""
    if report.case not in stored:
        return [f"{report.case}: not in the stored results; write them anew with python -m bench.static --csv FILE"]
    return [
        f"{report.case}: {name} is {now} and was {was}"
        for name, was in stored[report.case].items()
        if (now := getattr(report, name)) > LOOP_GROWTH * was
    ]


# ---- the command line


HEADINGS = (
    *("arch", "kernel", "dtype", "dims", "tile", "stages", "warps", "registers", "shared", "spills", "in masked"),
    *("matrix", "work", "exp2", "loop", "masked"),
)


def table(reports: Iterable[Report]) -> str:
    """One aligned line per report."""
    lines = [
        HEADINGS,
        *(
            (
                *(c.arch, c.kernel, c.dtype, f"{c.head_dim}/{c.v_head_dim}"),
                *(f"{c.block_m}x{c.block_n}x{c.num_warps}", str(c.num_stages), str(r.warps), str(r.registers)),
                *(f"{r.shared / 1024:.1f}K", str(r.loop_spills), str(r.masked_spills), r.matrix),
                *(f"{r.work:.3f}", f"{r.exp2:.3f}", str(r.loop), str(r.masked_loop)),
            )
            for r in reports
            for c in (r.case,)
        ),
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def write_csv(path: Path, reports: Iterable[Report]) -> None:
    rows = [report.row() for report in reports]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile every row of the tile table and read its machine code.")
    parser.add_argument("--arch", nargs="+", choices=TARGETS, default=tuple(TARGETS), help="default: all")
    parser.add_argument("--head-dim", nargs="+", type=int, default=(), help="largest head dims of rows; default: all")
    parser.add_argument(
        "--csv", type=Path, help="write the reports here; the baselines are bench/results/static_<triton version>.csv"
    )
    options = parser.parse_args()
    reports = measure_all(cases(options.arch, options.head_dim))
    print(table(reports))
    if options.csv:
        write_csv(options.csv, reports)
    if wrong := [line for report in reports for line in failures(report)]:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
