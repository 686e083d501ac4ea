"""What is the cpu backend's own: levels, threads, views, accuracy beside aten's kernel, the library and its absence."""

import ctypes
import functools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ringattn as ra
from ringattn.kernels import Bounds, Grads, Options, Request, State, choose, cpu
from ringattn.kernels.reference import Reference
from ringattn.testing import assert_matches, naive_attention
from tests import contract
from tests.contract import CASES, case, causal_bounds, compare, oracle, random_bounds, run, seen_by, tensors

ROOT = Path(__file__).resolve().parents[1]
HEADER = (ROOT / "csrc" / "ringattn_cpu.h").read_text()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LEVELS = cpu.levels() or ("none",)  # without a library the tests fail: there is no such level
# On any machine with a compiler there is a library.
needs_library = pytest.mark.skipif(
    not cpu.levels() and not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler"
)


@pytest.fixture(params=LEVELS)
def level(request, monkeypatch):
    """The name of a level, and of the backend that is forced to it."""
    registry = {request.param: cpu.Cpu(request.param), "reference": Reference()}
    monkeypatch.setattr(contract, "backends", lambda: registry)
    return request.param


@pytest.fixture
def threads():
    """Sets the number of threads."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# Numerics at each level, on more rows and keys than a tile of any level holds.

CUTS = (301,)


@functools.cache
def problem(name, dtype):
    """The arguments of a case, the fp64 truth, and an honest twin in the same dtype."""
    inputs, lo, hi, options, sinks = case(**CASES[name], dtype=dtype, rows=150, keys=600)
    seen = seen_by(lo, hi, 600)
    want = oracle(inputs, seen, options, sinks)
    if dtype == torch.float32:
        twin = run("reference", inputs, lo, hi, options, sinks, CUTS)
    else:
        twin = oracle(inputs, seen, options, sinks, dtype)
    return (inputs, lo, hi, options, sinks), want, twin


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_error_is_at_most_twice_an_honest_twins(name, dtype, level):
    arguments, want, twin = problem(name, dtype)
    compare(run(level, *arguments, CUTS), want, twin)


@needs_library
@pytest.mark.parametrize("width", [1, 7, 16, 80, 192, 256])
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (1, 300), (67, 3), (130, 129)])
def test_ragged_sizes(rows, keys, width, level):
    v_width = width // 2 + 1
    inputs = tensors(1, rows, keys, 3, 1, width, v_width, torch.float32)
    inputs[3].mul_(2 * v_width**-0.5)
    lo, hi = random_bounds(rows, keys)
    options = Options(width**-0.5)
    # So few numbers that a twin's luck would set the bound: scores, lse and dP of up to 8 in magnitude round by 8 * 2^-24
    # each, which is the relative error of P; as much again where dP - delta cancels.
    compare(run(level, inputs, lo, hi, options), oracle(inputs, seen_by(lo, hi, keys), options), rtol=16 * 2**-23)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "rows", "keys"), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (0, 0, 0)])
def test_zero_sizes(batch, rows, keys, dtype, level):
    inputs = tensors(batch, rows, keys, 4, 2, 8, 6, dtype)
    lo, hi = torch.full((rows,), keys, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    sinks = torch.randn(4)
    compare(*(run(name, inputs, lo, hi, Options(0.3), sinks) for name in (level, "reference")))


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", range(3), ids=["q", "k", "v"])
def test_what_is_not_finite_stays_where_it_is_seen(where, value, dtype, level):
    """A causal block: row 100 is the first that sees it. In v it may touch the tiles of key 100, which begin after row 64."""
    inputs = tensors(1, 200, 200, 2, 1, 8, 8, dtype)
    lo, hi = causal_bounds(200)
    before = run(level, inputs, lo, hi, Options(0.3))
    inputs[where][0, 100, 0, 3] = value
    got, want = (run(name, inputs, lo, hi, Options(0.3)) for name in (level, "reference"))
    assert not got[0].isfinite().all(), "the case must matter"
    assert not got[2].isfinite().all(), "the case must matter"
    clean = slice(64 if where == 2 else 100)
    for name, x, y in zip(("out", "lse", "dq"), got, before, strict=False):
        x, y = (a.transpose(1, 2) if name == "lse" else a for a in (x, y))
        assert_matches(x[:, clean], y[:, clean], name=name)
    if where < 2:
        for name, x, y in zip(("out", "lse"), got, want, strict=False):
            torch.testing.assert_close(x.isfinite(), y.isfinite(), msg=name)


@needs_library
def test_dropout_drops_what_the_reference_drops(level):
    inputs = tensors(2, 40, 300, 4, 2, 8, 8, torch.float32)
    inputs[2].zero_()
    # Key j alone has a value, in one column: out shows in which rows it was dropped.
    inputs[2][:, 171] = 1.0
    lo, hi = torch.zeros(40, dtype=torch.int32), torch.full((40,), 300, dtype=torch.int32)
    options = Options(0.3, dropout_p=0.5, seed=-(2**62) - 5, head_offset=2**31)
    got, want = (run(name, inputs, lo, hi, options, cuts=(100, 171))[0] for name in (level, "reference"))
    assert 0.3 < float((want == 0).float().mean()) < 0.7
    assert_matches((got == 0).float(), (want == 0).float())


# Threads and views change no bit.


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "heads", "kv_heads"), [(1, 1, 1), (2, 4, 2)])
def test_any_number_of_threads_gives_the_same_bits(batch, heads, kv_heads, dtype, level, threads):
    inputs = tensors(batch, 333, 517, heads, kv_heads, 24, 16, dtype)
    lo, hi = random_bounds(333, 517)
    results = []
    for count in (1, 2, 3):
        threads(count)
        results.append(run(level, inputs, lo, hi, Options(0.2, 3.0, 0.1), cuts=(200,)))
    compare(results[1], results[0])
    compare(results[2], results[0])


def scattered(x):
    """A buffer of NaN, and `x` inside it: misaligned, with the dims in another order, but for the last of four."""
    dims = (2, 0, 1, *range(3, x.ndim))
    turned = x.permute(dims)
    buffer = torch.full([n + 3 for n in turned.shape], torch.nan, dtype=x.dtype)
    inside = buffer[tuple(slice(1, n + 1) for n in turned.shape)]
    inside.copy_(turned)
    return buffer, inside.permute(1, 2, 0, *range(3, x.ndim))


def contiguous(x):
    x = x.clone(memory_format=torch.contiguous_format)
    return x, x


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_and_alignment_change_nothing(dtype, level):
    inputs = tensors(2, 75, 130, 4, 2, 18, 9, dtype)
    lo, hi = (x[:, 75:] for x in random_bounds(150, 130, 2))  # rows of something longer
    position = torch.arange(130, dtype=torch.int32)
    sinks = torch.randn(8)[::2]
    options, backend = Options(0.3, dropout_p=0.2, seed=1), contract.backends()[level]

    def drive(place, lo, hi, sinks):
        placed = []

        def put(x):
            placed.append(place(x))
            return placed[-1][1]

        def empty(*shape, dtype=torch.float32):
            return put(torch.full(shape, torch.nan, dtype=dtype))

        q, k, v, dout, dlse = map(put, inputs)
        bounds = Bounds(lo, hi, position[:75], position, False)
        state = State(
            empty(2, 75, 4, 9), *(empty(2, 4, 75) for _ in "ml"), empty(2, 75, 4, 9, dtype=dtype), empty(2, 4, 75)
        )
        backend.forward(state, q, k, v, bounds, options, sinks=None, start=True, finish=False)
        unfinished = [x.clone() for x in (state.acc, state.m, state.l)]
        backend.forward(state, q, k, v, bounds, options, sinks=sinks, start=True, finish=True)
        grads = Grads(*(put(torch.ones(x.shape)) for x in (q, k, v)))
        backend.backward(grads, q, k, v, dout, state.lse, put(backend.delta(dout, state.out, dlse)), bounds, options)
        results = [*unfinished, *(x.clone() for x in (state.out, state.lse, grads.dq, grads.dk, grads.dv))]
        for buffer, inside in placed:
            inside.fill_(torch.nan)
            assert int(buffer.isfinite().sum()) == 0, "something was written beside a view"
        return results

    got = drive(scattered, lo, hi.contiguous(), sinks)
    want = drive(contiguous, lo.contiguous(), hi.contiguous(), sinks.double())
    for x, y in zip(got, want, strict=True):
        assert_matches(x, y)


# Accuracy beside the kernel that torch has for the same.


def aten(q, k, v, dout, is_causal, scale):
    """out, lse and gradients by aten's flash kernel for CPUs, in the layouts used here."""
    q, k, v, dout = (x.transpose(1, 2) for x in (q, k, v, dout))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, is_causal, scale=scale
    )
    return out.transpose(1, 2), lse, *(x.transpose(1, 2) for x in grads)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("is_causal", [False, True])
def test_error_is_at_most_twice_that_of_aten(is_causal, width, dtype, level):
    n, options = 640, Options(width**-0.5)
    q, k, v, dout, dlse = tensors(1, n, n, 2, 2, width, width, dtype)
    inputs = q, k, v, dout, torch.zeros_like(dlse)
    lo, hi = causal_bounds(n) if is_causal else (torch.zeros(n, dtype=torch.int32), torch.full((n,), n).int())
    want = oracle(inputs, seen_by(lo, hi, n), options)
    got = run(level, inputs, lo, hi, options, is_full=not is_causal)
    compare(got, want, aten(q, k, v, dout, is_causal, options.softmax_scale))


# The library: what it is, what it refuses, and its absence.


def fields(structure):
    """(name, type) of each member, as the header has them."""
    body = re.search(rf"typedef struct \{{([^}}]*)\}} {structure};", HEADER)[1]
    for declaration in filter(None, (part.strip() for part in re.sub(r"//[^\n]*", "", body).split(";"))):
        type_name, names = re.fullmatch(r"((?:const )?\w+) (.*)", declaration, re.DOTALL).groups()
        for name in re.split(r",\s*", names):
            yield name.lstrip("*"), "address" if "*" in name else type_name


TYPES = {
    "address": ctypes.c_void_p,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "ra_tensor": cpu._View,
}


def test_structures_are_those_of_the_header():
    assert [(name, TYPES[kind]) for name, kind in fields("ra_args")] == list(cpu._Args._fields_)
    assert list(fields("ra_tensor")) == [("data", "address"), ("stride[3]", "int64_t")]
    strides = [name for name, kind in cpu._View._fields_ if kind == ctypes.c_int64]
    assert strides == ["stride_batch", "stride_row", "stride_head"]


def test_codes_are_those_of_the_header():
    codes = {name: int(value) for name, value in re.findall(r"\b(RA_\w+) = (\d+)", HEADER)}
    names = {torch.float32: "RA_FLOAT32", torch.bfloat16: "RA_BFLOAT16", torch.float16: "RA_FLOAT16"}
    assert {dtype: codes[name] for dtype, name in names.items()} == cpu._DTYPES
    failures = ("RA_OUT_OF_MEMORY", "RA_NO_SUCH_LEVEL", "RA_BAD_ARGUMENT")
    assert [codes[name] for name in failures] == list(cpu._ERRORS)


@needs_library
def test_levels():
    assert cpu.levels()[0] == "portable"
    assert set(cpu.levels()) <= {"portable", "avx2", "avx512", "avx512bf16", "emulated_w16", "emulated_bf16dot"}
    message = rf"Cpu: level is 'avx'; it must be one of {', '.join(cpu.levels())}\. Or pass None\."
    with pytest.raises(ValueError, match=message):
        cpu.Cpu("avx")


@needs_library
def test_the_last_level_is_the_fastest():
    newest = [name for name in ("portable", "avx2", "avx512", "avx512bf16") if name in cpu.levels()][-1]
    processor = Path("/proc/cpuinfo")
    is_intel = processor.exists() and "GenuineIntel" in processor.read_text()
    # There pairs of bf16 are summed more slowly than numbers in fp32 are multiplied.
    assert cpu.levels()[-1] == ("avx512" if is_intel and newest == "avx512bf16" else newest)


@needs_library
def test_the_last_level_is_the_one_used(monkeypatch):
    inputs, lo, hi, options, sinks = case(**CASES["all"], dtype=torch.bfloat16)
    monkeypatch.setattr(contract, "backends", lambda: {"auto": cpu.Cpu(), "best": cpu.Cpu(cpu.levels()[-1])})
    compare(*(run(name, inputs, lo, hi, options, sinks) for name in ("auto", "best")))


@needs_library
def test_an_error_code_becomes_words(monkeypatch):
    backend = cpu.Cpu()
    monkeypatch.setattr(backend, "_level", 1 << 20)
    monkeypatch.setattr(contract, "backends", lambda: {"cpu": backend})
    with pytest.raises(RuntimeError, match=r"cpu backend: ra_forward failed: this processor, or the library, lacks"):
        run("cpu", *case(dtype=torch.float32))


@needs_library
def test_a_last_dim_that_is_not_contiguous_is_refused(monkeypatch):
    (q, k, v, *rest), *arguments = case(dtype=torch.float32)
    monkeypatch.setattr(contract, "backends", lambda: {"cpu": cpu.Cpu()})
    with pytest.raises(ValueError, match=r"cpu backend: k has stride 2 in its last dim; .* Pass k\.contiguous\(\)"):
        run("cpu", (q, torch.randn(*k.shape, 2)[..., 0], v, *rest), *arguments)


def request(device="cpu", dtype=torch.float32):
    return Request(torch.device(device), dtype, 4, 2, 8, 8, softcap=True, sinks=True, dropout=True)


@needs_library
def test_supports():
    assert [cpu.Cpu().supports(request(dtype=dtype)) for dtype in DTYPES] == [None] * 3
    assert cpu.Cpu().supports(request("cuda:1")) == "device is cuda:1; a CPU is required"
    assert cpu.Cpu().supports(request(dtype=torch.float64)) == (
        "dtype is torch.float64; torch.float32, bfloat16 or float16 is required ('reference' takes every floating dtype)"
    )


@pytest.fixture(params=["absent", "broken"])
def no_library(request, monkeypatch, tmp_path):
    """The path of a library that is not there, or is none; and why it is refused."""
    path = tmp_path / "libringattn_cpu.so"
    reason = rf"its library is missing \({path}\); `pip install -v` with a C\+\+ compiler builds it"
    if request.param == "broken":
        path.write_text("not a library")
        reason = rf"its library does not load \({path}: .*\)"
    monkeypatch.setenv("RINGATTN_CPU_LIBRARY", str(path))
    cpu._library.cache_clear()
    yield reason
    cpu._library.cache_clear()


def test_without_a_library_the_reference_serves(no_library, recwarn):
    with pytest.warns(RuntimeWarning, match=f"ringattn: the cpu backend is not used: {no_library}"):
        reason = cpu.Cpu().supports(request())
    assert re.match(no_library + r".* \('reference' serves without it\)", reason)
    assert cpu.levels() == ()
    with pytest.raises(NotImplementedError, match=rf"no backend serves this call; cpu: {no_library}"):
        choose("cpu", request())
    assert choose("auto", request()).name == "reference"
    q, k, v, *_ = tensors(1, 9, 9, 2, 1, 4, 4, torch.float32)
    want, twin = (naive_attention(q.to(d), k.to(d), v.to(d), ra.Causal()) for d in (torch.float64, torch.float32))
    assert_matches(ra.ring_attention(q, k, v, mask=ra.Causal(), backend="auto"), want, twin)
    assert len(recwarn) == 0, "the reason is said once"


@needs_library
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc/self/maps")
def test_one_openmp_runtime():
    code = "from ringattn.kernels import cpu; assert cpu.levels(); print(open('/proc/self/maps').read())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    mapped = {line.split(maxsplit=5)[5] for line in done.stdout.splitlines() if len(line.split(maxsplit=5)) == 6}
    assert sum("ringattn_cpu" in path for path in mapped) == 1
    assert len({path for path in mapped if re.search(r"lib([gi]?omp|iomp5)\b", path)}) == 1


@needs_library
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc/self/task")
def test_as_many_threads_as_torch_says():
    code = """if True:
        import os, torch, ringattn as ra
        x = torch.randn(1, 64, 8, 8)
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            before = len(os.listdir("/proc/self/task"))
            ra.ring_attention(x, x, x, mask=ra.Full(), backend="cpu")
            print(len(os.listdir("/proc/self/task")) - before)
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1", "2"], "threads started by each call"
