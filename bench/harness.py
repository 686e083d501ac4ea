"""One harness for every bench of attention: it checks each contender against an fp64 oracle, then times all in turn.

Data flows one way: a `Case` says what is computed, a `Contender` says who computes it, `measure` checks, times and returns
`Row`s, `append` writes them as CSV. Tables and pictures are made from the CSV only (`bench/plot.py`).
"""

import csv
import dataclasses
import functools
import importlib.metadata
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ringattn.masks import Causal, Documents, Full, Mask, Window
from ringattn.plan import build_plan
from ringattn.testing import assert_matches, naive_attention

__all__ = [
    "Case",
    "Contender",
    "CpuClock",
    "CudaClock",
    "Inputs",
    "Row",
    "Run",
    "append",
    "dense_mask",
    "interleave",
    "measure",
    "read",
    "record",
    "slug",
]

# ---- what is computed

SMALL_TOKENS = 256  # sequences up to here are checked in every row, longer ones in a sample
SAMPLED_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention, forward or backward: `mask` over `seqlen` tokens, called `mask_name` in tables."""

    mask_name: str
    mask: Mask
    seqlen: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    direction: str  # "forward" or "backward"
    batch: int = 1
    heads: int = 8
    kv_heads: int = 8

    @property
    def flops(self) -> int:
        """Floating-point operations over visible pairs, exactly as many as the plan counts."""
        plan = build_plan(self.mask, "contiguous", self.seqlen, 1, 0)
        sizes = {"batch": self.batch, "heads": self.heads, "head_dim": self.head_dim, "v_head_dim": self.v_head_dim}
        return plan.flops(**sizes, backward=self.direction == "backward")

    @property
    def bytes(self) -> int:
        """The least that moves through memory: each input read once, each result written once, lse in fp32."""
        tokens = self.batch * self.seqlen
        q, k = self.heads * self.head_dim, self.kv_heads * self.head_dim
        out, v = self.heads * self.v_head_dim, self.kv_heads * self.v_head_dim
        # Backward reads q, k, v, out, dout and writes dq, dk, dv.
        elements = 2 * (q + k + v + out) if self.direction == "backward" else q + k + v + out
        return tokens * (elements * self.dtype.itemsize + self.heads * 4)

    def small(self) -> "Case":
        """The same at a size whose every row can be checked."""
        seqlen = min(self.seqlen, SMALL_TOKENS)
        return dataclasses.replace(self, mask=shrink(self.mask, self.seqlen, seqlen), seqlen=seqlen, batch=1)

    def __str__(self) -> str:
        dims = f"D {self.head_dim}" + (f"/{self.v_head_dim}" if self.v_head_dim != self.head_dim else "")
        heads = f"H {self.heads}" + (f":{self.kv_heads}" if self.kv_heads != self.heads else "")
        return (
            f"{self.direction} {self.mask_name} {dtype_name(self.dtype)} {dims} {heads} B {self.batch} S {self.seqlen}"
        )


def shrink(mask: Mask, seqlen: int, small: int) -> Mask:
    """The mask with every length in it scaled from `seqlen` tokens to `small`."""

    def scaled(n: int) -> int:
        return n * small // seqlen

    match mask:
        case Full() | Causal():
            return mask
        case Window(int(left), 0):
            return Window(max(1, scaled(left)))
        case Documents(cu_seqlens):
            return Documents(tuple(sorted({scaled(n) for n in cu_seqlens})), mask.causal)
    raise ValueError(
        f"shrink: mask is {mask!r}; it must be full, causal, a causal window or documents. Use one of these."
    )


def dtype_name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """q `[B, S, H, D]`, k `[B, S, Hkv, D]`, v `[B, S, Hkv, Dv]`, dout `[B, S, H, Dv]` of a case, of normal distribution."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @staticmethod
    def random(case: Case, device: torch.device) -> "Inputs":
        generator = torch.Generator(device).manual_seed(0)
        widths = (
            (case.heads, case.head_dim),
            (case.kv_heads, case.head_dim),
            (case.kv_heads, case.v_head_dim),
            (case.heads, case.v_head_dim),
        )
        shape = (case.batch, case.seqlen)
        draw = functools.partial(torch.randn, dtype=torch.float32, device=device, generator=generator)
        return Inputs(case, *(draw(*shape, *width).to(case.dtype) for width in widths))


# ---- who computes it


class Run(NamedTuple):
    """A prepared case: `call` is what is timed, `read` turns what it returned into named results.

    The names: `out` `[B, S, H, Dv]` and, where the contender returns it, `lse` `[B, H, S]`; in backward `dq`, `dk`, `dv`.
    """

    call: Callable[[], Any]
    read: Callable[[Any], dict[str, Tensor]]


@dataclasses.dataclass(frozen=True)
class Contender:
    """`prepare` makes a run of the inputs, none of which is timed; it raises, or the run does, where the case cannot be run."""

    name: str
    prepare: Callable[[Inputs], Run]
    is_peer: bool = True  # somebody else's


# ---- whether it is right


class Oracle:
    """The truth about a case, dense and in fp64, and how far from it a right result may be.

    With 16 bits that is twice the error of the same dense computation in that dtype. In fp32 the dense softmax has no like
    of exp(score - lse): scores and lse round by 2^-24 of their size each, P by the sum of both, and dP - delta as much again.

    Of a long sequence only some rows are compared. Gradients are linear in dout: where it is zero in all other rows, the
    dense gradients of these rows are those of the whole.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        self.rows = sampled_rows(case.seqlen).to(device)
        inputs = Inputs.random(case, device)
        dout = torch.zeros_like(inputs.dout)
        dout[:, self.rows] = inputs.dout[:, self.rows]
        self.inputs = dataclasses.replace(inputs, dout=dout)
        self.want, size = self._results(torch.float64)
        self.rtol = size * 2**-22
        self.twin = {} if case.dtype == torch.float32 else self._results(case.dtype)[0]

    def _results(self, dtype: torch.dtype) -> tuple[dict[str, Tensor], float]:
        """The results by name, and the largest magnitude of lse."""
        case = self.inputs.case
        q, k, v, dout = (x.to(dtype) for x in (self.inputs.q, self.inputs.k, self.inputs.v, self.inputs.dout))
        q, dout = q[:, self.rows], dout[:, self.rows]
        q, k, v = (x.detach().requires_grad_(case.direction == "backward") for x in (q, k, v))
        out, lse = naive_attention(q, k, v, dense_mask(case, q.device, self.rows), return_lse=True)
        size = float(lse.detach().abs().max())
        if case.direction == "forward":
            return {"out": out, "lse": lse}, size
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
        return {"dq": dq, "dk": dk[:, self.rows], "dv": dv[:, self.rows]}, size

    def check(self, contender: Contender) -> dict[str, float]:
        """The largest error of each result of a contender.

        Raises:
            AssertionError: a result is off by more than that.
        """
        run = contender.prepare(self.inputs)
        errors = {}
        for name, whole in run.read(run.call()).items():
            got = whole.index_select(2 if name == "lse" else 1, self.rows)
            rtol = None if self.twin else self.rtol
            assert_matches(got, self.want[name], self.twin.get(name), rtol=rtol, name=name)
            errors[name] = float((got.double() - self.want[name]).abs().max())
        return errors


def sampled_rows(seqlen: int) -> Tensor:
    """Rows to check, increasing: all of a short sequence; the ends and a fixed random sample of a long one."""
    if seqlen <= SMALL_TOKENS:
        return torch.arange(seqlen)
    inner = 1 + torch.randperm(seqlen - 2, generator=torch.Generator().manual_seed(0))[: SAMPLED_ROWS - 2]
    return torch.cat([torch.tensor([0, seqlen - 1]), inner]).sort().values


def dense_mask(case: Case, device: torch.device, rows: Tensor | None = None) -> Tensor:
    """What some rows (default: all) see: bool `[rows, S]`."""
    rows = torch.arange(case.seqlen) if rows is None else rows.cpu()
    key = torch.arange(case.seqlen, device=device)
    spans = ((lo.to(device)[:, None], hi.to(device)[:, None]) for lo, hi in case.mask.intervals(rows))
    return functools.reduce(torch.logical_or, ((key >= lo).logical_and_(key < hi) for lo, hi in spans))


# ---- how long it takes


class Clock(Protocol):
    """Times one call; the seconds are asked for later, so that a device need not be waited for between calls."""

    name: str
    device: torch.device

    def time(self, call: Callable[[], Any]) -> Callable[[], float]: ...


class CpuClock:
    """CPU time of one thread, which other processes cannot take away; wall time of several."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        is_alone = torch.get_num_threads() == 1
        self.name, self.now = ("cpu time", time.process_time) if is_alone else ("wall", time.perf_counter)

    def time(self, call: Callable[[], Any]) -> Callable[[], float]:
        start = self.now()
        call()
        seconds = self.now() - start
        return lambda: seconds


class CudaClock:
    """CUDA events around each call, whose inputs are not in the L2 cache."""

    name = "cuda events"
    FLUSH_BYTES = 256 << 20  # several times the largest L2

    def __init__(self) -> None:
        self.device = torch.device("cuda")
        self.flush = torch.empty(self.FLUSH_BYTES, dtype=torch.int8, device=self.device)

    def time(self, call: Callable[[], Any]) -> Callable[[], float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        start.record()
        call()
        end.record()

        def seconds() -> float:
            end.synchronize()
            return start.elapsed_time(end) / 1e3

        return seconds


MIN_ROUNDS = 3
LONGEST_CALL_S = 30.0  # a contender that takes longer is not timed


def interleave(
    calls: Sequence[Callable[[], Any]], clock: Clock, rounds: int = 15, budget_s: float = 20.0
) -> list[list[float]]:
    """Seconds of every call in every round, `[call][round]`. Each round makes every call once, starting one call further on.

    After `budget_s` seconds no new round starts, but for the first three.
    """
    seconds: list[list[float]] = [[] for _ in calls]
    started = time.perf_counter()
    for n in range(rounds):
        order = [(i + n) % len(calls) for i in range(len(calls))]
        for i, later in [(i, clock.time(calls[i])) for i in order]:
            seconds[i].append(later())
        if n + 1 >= MIN_ROUNDS and time.perf_counter() - started > budget_s:
            break
    return seconds


def peak_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the matrix product that sets the peak: fp32 on a CPU without instructions for `dtype`.

    There torch multiplies element by element: 0.85 GFLOP/s in bf16 against 50 in fp32 on a loaded Zen 3 core, n = 1024.
    """
    is_slow = {
        torch.bfloat16: lambda: not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: lambda: not torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    return torch.float32 if device.type == "cpu" and dtype in is_slow and is_slow[dtype]() else dtype


def matmul(dtype: torch.dtype, device: torch.device) -> tuple[Callable[[], Any], int]:
    """A product of square matrices, and its floating-point operations: the arithmetic peak."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return functools.partial(torch.mm, a, b, out=torch.empty_like(a)), 2 * n**3


def copy(device: torch.device) -> tuple[Callable[[], Any], int]:
    """A copy, and the bytes that it reads and writes: the bandwidth."""
    size = 1 << (30 if device.type == "cuda" else 26)
    source, target = (torch.zeros(size, dtype=torch.int8, device=device) for _ in range(2))
    return functools.partial(target.copy_, source), 2 * size


# ---- rows


@dataclasses.dataclass(frozen=True)
class Row:
    """One contender in one case: a line of the CSV. Where `reason` is not empty the contender did not run, or was wrong."""

    device: str
    threads: int
    clock: str
    load: float  # processes that were running or ready, over the last minute
    torch: str
    triton: str
    commit: str  # with a + where the tree had changes

    mask: str
    seqlen: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    direction: str

    contender: str
    is_peer: int
    reason: str = ""
    rounds: int = 0
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    gflop: float | None = None
    tflops: float | None = None
    # Of the matrix product and the copy that were timed in the same rounds; what the case would take at these rates.
    matmul_dtype: str = ""
    matmul_tflops: float | None = None
    copy_gb_s: float | None = None
    arithmetic_floor_ms: float | None = None
    bytes_floor_ms: float | None = None
    # Median over rounds of the time of the fastest peer over one's own.
    best_peer: str = ""
    ratio: float | None = None
    # Largest absolute error against fp64 in the rows checked at this size.
    error_out: float | None = None
    error_lse: float | None = None
    error_dq: float | None = None
    error_dk: float | None = None
    error_dv: float | None = None


def conditions(clock: Clock) -> dict[str, Any]:
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = ""
    return {
        "device": device_name(clock.device),
        "threads": torch.get_num_threads() if clock.device.type == "cpu" else 0,
        "clock": clock.name,
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "triton": triton,
        "commit": commit(),
    }


@functools.cache
def device_name(device: torch.device) -> str:
    """The model of the GPU or CPU; of a CPU with its family and model numbers, since a cloud may hide the rest."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    found = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", text, re.MULTILINE))
    if "model name" not in found:
        return platform.processor() or platform.machine()
    return f"{found['model name']} family {found['cpu family']} model {found['model']}"


def slug(name: str) -> str:
    """A name as part of a file name.

    Example:
        >>> slug("NVIDIA H200")
        'nvidia_h200'
    """
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


@functools.cache
def commit() -> str:
    def git(*arguments: str) -> str:
        where = Path(__file__).parent
        return subprocess.run(["git", *arguments], cwd=where, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def measure(
    entries: Sequence[tuple[Case, Contender]], clock: Clock, rounds: int = 15, budget_s: float = 20.0
) -> list[Row]:
    """Check every contender at a small size and at its own, then time those that are right, all in turn; a row for each entry.

    Cases may differ between entries, but not in dtype; a ratio is taken to the fastest peer in the same case.
    """
    same = conditions(clock)
    oracles = functools.cache(lambda case: Oracle(case, clock.device))
    inputs = functools.cache(lambda case: Inputs.random(case, clock.device))
    rows, calls = [], []
    for case, contender in entries:
        row = blank_row(case, contender, same)
        try:
            for checked in dict.fromkeys((case.small(), case)):
                errors = oracles(checked).check(contender)
            call = contender.prepare(inputs(case)).call
            warm(call, clock)
        except Exception as error:  # whatever it is, it is why there is no figure
            rows.append(dataclasses.replace(row, reason=reason(error)))
            continue
        rows.append(dataclasses.replace(row, **{f"error_{name}": value for name, value in errors.items()}))
        calls.append(call)
    oracles.cache_clear()
    if not calls:
        return rows
    return timed(rows, [case for case, _ in entries], calls, clock, rounds, budget_s)


def warm(call: Callable[[], Any], clock: Clock) -> None:
    """One call before those that count.

    Raises:
        TimeoutError: it took too long for more of them.
    """
    seconds = clock.time(call)()
    if seconds > LONGEST_CALL_S:
        raise TimeoutError(f"one call took {seconds:.0f} s; at most {LONGEST_CALL_S:.0f} s are timed")


def timed(
    rows: list[Row], cases: list[Case], calls: list[Callable[[], Any]], clock: Clock, rounds: int, budget_s: float
) -> list[Row]:
    """The rows, those without a reason filled in from the timing of `calls`, which are theirs in order."""
    dtype = peak_dtype(cases[0].dtype, clock.device)
    (product, product_flops), (move, move_bytes) = matmul(dtype, clock.device), copy(clock.device)
    product(), move()
    *samples, product_s, move_s = interleave([*calls, product, move], clock, rounds, budget_s)
    flops_per_s, bytes_per_s = product_flops / np.median(product_s), move_bytes / np.median(move_s)
    at = [i for i, row in enumerate(rows) if not row.reason]
    seconds = dict(zip(at, map(np.array, samples), strict=True))
    filled = list(rows)
    for i, own in seconds.items():
        case = cases[i]
        p20, median, p80 = np.quantile(own, (0.2, 0.5, 0.8)) * 1e3
        peers = [j for j in seconds if rows[j].is_peer and cases[j] == case]
        best = min(peers, key=lambda j: np.median(seconds[j]), default=None)
        filled[i] = dataclasses.replace(
            rows[i],
            rounds=len(own),
            median_ms=float(median),
            p20_ms=float(p20),
            p80_ms=float(p80),
            gflop=case.flops / 1e9,
            tflops=float(case.flops / median / 1e9),
            matmul_dtype=dtype_name(dtype),
            matmul_tflops=float(flops_per_s / 1e12),
            copy_gb_s=float(bytes_per_s / 1e9),
            arithmetic_floor_ms=float(case.flops / flops_per_s * 1e3),
            bytes_floor_ms=float(case.bytes / bytes_per_s * 1e3),
            best_peer="" if best is None else rows[best].contender,
            ratio=None if best is None else float(np.median(seconds[best] / own)),
        )
    return filled


def blank_row(case: Case, contender: Contender, same: dict[str, Any]) -> Row:
    return Row(
        **same,
        mask=case.mask_name,
        seqlen=case.seqlen,
        batch=case.batch,
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        v_head_dim=case.v_head_dim,
        dtype=dtype_name(case.dtype),
        direction=case.direction,
        contender=contender.name,
        is_peer=int(contender.is_peer),
    )


def reason(error: Exception) -> str:
    """An error as one line of a table."""
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{'wrong' if isinstance(error, AssertionError) else type(error).__name__}: {text.strip()}"[:300]


# ---- CSV


def record(
    groups: Iterable[Sequence[tuple[Case, Contender]]],
    clock: Clock,
    path: Path,
    rounds: int = 15,
    budget_s: float = 20.0,
) -> list[Row]:
    """Measure group by group, and write and print each group's rows as soon as they are there."""
    rows = []
    for entries in groups:
        found = measure(entries, clock, rounds, budget_s)
        append(path, found)
        for (case, _), row in zip(entries, found, strict=True):
            print(f"{case} | {row.contender} | {row.reason or figures(row)}", flush=True)
        rows += found
    return rows


def figures(row: Row) -> str:
    """The figures of a row that was timed, as one line."""
    text = f"{row.median_ms:.3g} ms ({row.p20_ms:.3g}-{row.p80_ms:.3g}), {row.tflops:.3g} TFLOP/s"
    text += f", matrix product {row.matmul_tflops:.3g}"
    return text + (f", {row.ratio:.2f}x {row.best_peer}" if row.best_peer else "")


def append(path: Path, rows: Iterable[Row]) -> None:
    """Write rows at the end of a CSV; a new file gets a header."""
    is_new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(field.name for field in dataclasses.fields(Row))
        writer.writerows(map(cells, rows))


def cells(row: Row) -> list[str]:
    return ["" if x is None else f"{x:.6g}" if isinstance(x, float) else str(x) for x in dataclasses.astuple(row)]


def read(path: Path) -> list[Row]:
    """The rows of a CSV; numbers to six digits."""
    with path.open(newline="") as file:
        return [
            Row(**{f.name: parsed(f.type, line[f.name]) for f in dataclasses.fields(Row)})
            for line in csv.DictReader(file)
        ]


def parsed(kind: Any, text: str) -> Any:
    if kind in (str, int):
        return kind(text)
    return float(text) if text else None
