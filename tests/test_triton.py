"""What is the Triton backend's own; the contract that it shares with the others is in tests/test_kernels.py.

Kernels run on a GPU where there is one, else in Triton's interpreter, which TRITON_INTERPRET=1 turns on.
"""

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch

from ringattn.kernels import Bounds, Grads, Options, Request, State
from ringattn.kernels.philox import keep_mask
from ringattn.kernels.triton import Triton, backend, tiles
from ringattn.kernels.triton.tiles import Tile
from ringattn.testing import assert_matches
from tests.contract import CASES, blocks, case, causal_bounds, compare, oracle, random_bounds, run, seen_by, tensors

triton = pytest.importorskip("triton", reason="no triton for this platform")
tl = pytest.importorskip("triton.language")

from ringattn.kernels.triton import backward as backward_kernels  # noqa: E402
from ringattn.kernels.triton import common, dropout, interpreter  # noqa: E402
from ringattn.kernels.triton import forward as forward_kernels  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# exp(score - lse) and dP - delta of scores up to 8 in magnitude, as in tests/test_kernels.py
FP32 = 16 * 2**-23


def runs_kernels(function):
    return pytest.mark.interpreter(pytest.mark.gpu(function))


@pytest.fixture(autouse=True)
def repaired():
    backend._repair_interpreter()


def empty_state(q, v):
    batch, rows, heads, _ = q.shape
    acc, out = (
        torch.full((batch, rows, heads, v.shape[3]), torch.nan, dtype=t, device=DEVICE) for t in (torch.float, q.dtype)
    )
    m, l, lse = (torch.full((batch, heads, rows), torch.nan, device=DEVICE) for _ in range(3))
    return State(acc, m, l, out, lse)


def forward(inputs, lo, hi, options, cuts=(), finish=True, sinks=None, is_full=False):
    """The state after the keys, in the chunks that `cuts` makes of them."""
    q, k, v = (x.to(DEVICE) for x in inputs[:3])
    state = empty_state(q, v)
    steps = list(blocks(q, k, lo, hi, cuts, is_full))
    for i, (at, bounds) in enumerate(steps):
        ends = {"start": i == 0, "finish": finish and i == len(steps) - 1}
        Triton().forward(state, q, k[:, at], v[:, at], bounds, options, sinks=sinks, **ends)
    return state


def window_bounds(n, left):
    _, hi = causal_bounds(n)
    return (hi - left).clamp(min=0), hi


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("left", [256, 70])
def test_a_chain_cut_at_multiples_of_the_tile_is_one_call_bit_for_bit(dtype, left):
    inputs = tensors(1, 256, 256, 1, 1, 16, 16, dtype)
    lo, hi = window_bounds(256, left)
    one, chain = (forward(inputs, lo, hi, Options(0.3), cuts) for cuts in ((), (128,)))
    assert_matches(chain.out, one.out, name="out")
    assert_matches(chain.lse, one.lse, name="lse")


@runs_kernels
def test_left_edge_middle_and_right_edge_of_several_tiles():
    inputs = tensors(1, 200, 200, 1, 1, 16, 16, torch.float32)
    lo, hi = window_bounds(200, 110)
    assert int(lo[191]) <= 96, "a tile of 32 keys lies in the windows of rows 160 to 191"
    want = oracle(inputs, seen_by(lo, hi, 200), Options(0.3))
    compare(run("triton", inputs, lo, hi, Options(0.3)), want, rtol=FP32)


@triton.jit
def _edges(Edges, first, full_first, full_last, last, BLOCK: tl.constexpr):
    a, b, c, d = common.walk(first, full_first, full_last, last, BLOCK)
    tl.store(Edges, a)
    tl.store(Edges + 1, b)
    tl.store(Edges + 2, c)
    tl.store(Edges + 3, d)


@runs_kernels
def test_walk_takes_every_tile_once_and_masks_no_more_than_it_must():
    edges = torch.empty(4, dtype=torch.int32, device=DEVICE)
    for first, last in itertools.combinations((0, 5, 8, 13, 24, 31), 2):
        for full_first, full_last in itertools.product(range(first, last + 1, 4), repeat=2):
            _edges[(1,)](edges, first, full_first, full_last, last, BLOCK=8)
            a, b, c, d = edges.tolist()
            starts = [start for part in ((a, b), (b, c), (c, d)) for start in range(*part, 8)]
            assert starts == list(range(first // 8 * 8, last, 8))
            unmasked = [start for start in starts if full_first <= start and start + 8 <= full_last]
            assert list(range(b, c, 8)) == unmasked
            assert c == d or c >= full_first


@runs_kernels
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize(("rows", "keys", "empty"), [(40, 70, 0.2), (70, 40, 0.0), (33, 32, 0.9), (1, 1, 0.0)])
def test_row_ranges(rows, keys, empty, batch):
    lo, hi = random_bounds(rows, keys, *batch, empty=empty)
    nothing = torch.zeros(0, dtype=torch.int32)
    bounds = Bounds(lo.to(DEVICE), hi.to(DEVICE), nothing, nothing, False)
    ranges = backward_kernels.row_ranges(bounds, keys, 16).cpu()
    for b, of_batch in enumerate(seen_by(lo, hi, keys).view(-1, rows, keys)):
        for tile, (first, full_first, full_last, last) in enumerate(ranges[b].tolist()):
            seen = of_batch[:, tile * 16 : tile * 16 + 16]
            some, every = seen.any(1), seen.all(1)
            assert [first, last] == ([*some.nonzero()[[0, -1], 0] + torch.tensor([0, 1])] if some.any() else [rows, 0])
            assert full_first == (int(every.nonzero()[0]) if every.any() else rows)
            after = (~every[full_first:]).nonzero()
            assert full_last == (full_first + int(after[0]) if len(after) else rows)


@runs_kernels
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_heads_packed_into_a_tile(rows, monkeypatch):
    inputs = tensors(2, rows, 40, 8, 2, 16, 24, torch.float32)
    lo, hi = random_bounds(rows, 40, 2)
    options = Options(0.3, dropout_p=0.3, seed=5)
    assert forward_kernels.packing(rows, 4, 32) == (4 if rows < 9 else 2)
    packed = forward(inputs, lo, hi, options, cuts=(20,))
    compare((packed.out, packed.lse), oracle(inputs, seen_by(lo, hi, 40), options)[:2], rtol=FP32)
    monkeypatch.setattr(forward_kernels, "packing", lambda *_: 1)
    alone = forward(inputs, lo, hi, options, cuts=(20,))
    assert_matches(packed.lse, alone.lse, rtol=2**-22, name="lse")


def test_packing_fills_a_tile_and_no_more():
    for seqlen, group, block_m in itertools.product((1, 2, 31, 32, 33, 500), (1, 2, 3, 6, 8, 64), (16, 128)):
        pack = forward_kernels.packing(seqlen, group, block_m)
        assert group % pack == 0
        assert pack & (pack - 1) == 0
        assert pack == 1 or pack * seqlen <= block_m
        assert group % (2 * pack) or 2 * pack * seqlen > block_m


@triton.jit
def _keep(Keep, QPos, KPos, head, batch, seed_low, seed_high, threshold, head_offset, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    q_pos, k_pos = tl.load(QPos + at)[:, None], tl.load(KPos + at)[None, :]
    keep = dropout.keep_mask(k_pos, q_pos, head_offset + head, batch, seed_low, seed_high, threshold)
    tl.store(Keep + at[:, None] * BLOCK + at[None, :], keep.to(tl.int32))


@runs_kernels
@pytest.mark.parametrize("seed", [0, 1, -5, -(2**40) + 77, 2**63 + 12345, 2**64 - 1])
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
def test_dropout_keeps_what_philox_keeps(seed, dropout_p):
    options = Options(1.0, None, dropout_p, seed, head_offset=3)
    q_pos, k_pos = (torch.randint(-(2**31), 2**31 - 1, (16,), dtype=torch.int32) for _ in range(2))
    keep = torch.zeros(16, 16, dtype=torch.int32, device=DEVICE)
    words = {name: x for name, x in dropout.dropout_arguments(options).items() if name in dropout.DROPOUT_WORDS}
    _keep[(1,)](keep, q_pos.to(DEVICE), k_pos.to(DEVICE), 1, 2, **words, BLOCK=16)
    assert_matches(keep.cpu().bool(), keep_mask(options, q_pos, k_pos, 3, 2, torch.device("cpu"))[2, 1], name="keep")


@runs_kernels
def test_rows_further_apart_than_int32_can_say(tmp_path):
    """Rows of one array, 2**30 + 64 elements from one to the next, which nothing touches between them."""
    rows, stride, width = 3, 2**30 + 64, 2 * 16
    inputs = tensors(1, rows, rows, 2, 2, 16, 16, torch.float32)
    lo, hi = causal_bounds(rows)
    size = (rows - 1) * stride + 9 * width
    if DEVICE.type == "cpu":  # a file of holes, where torch would fill memory
        memory = torch.from_numpy(np.memmap(tmp_path / "far", np.float32, "w+", shape=(size,)))
    else:
        memory = torch.zeros(size, device=DEVICE)
    # q, k, v, dout, acc, out, dq, dk, dv
    far = [memory[i * width :].as_strided((1, rows, 2, 16), (size, stride, 16, 1)) for i in range(9)]
    for x, y in zip(far, inputs[:4], strict=False):
        x.copy_(y)
    q, k, v, dout, acc, out, *grads = far
    m, l, lse = (torch.full((1, 2, rows), torch.nan, device=DEVICE) for _ in range(3))
    state, options = State(acc, m, l, out, lse), Options(0.3)
    for at, bounds in blocks(q, k, lo, hi, (2,)):
        ends = {"start": at.start == 0, "finish": at.start > 0}
        Triton().forward(state, q, k[:, at], v[:, at], bounds, options, sinks=None, **ends)
    delta = Triton().delta(dout, out, inputs[4].to(DEVICE))
    for _, bounds in blocks(q, k, lo, hi, ()):
        Triton().backward(Grads(*grads), q, k, v, dout, lse, delta, bounds, options)
    compare((out, lse, *grads), oracle(inputs, seen_by(lo, hi, rows), options), rtol=FP32)


def test_offsets_are_int64_where_a_view_needs_it():
    def view(rows, stride):
        return torch.empty_strided((1, rows, 1, 8), (0, stride, 8, 1), device="meta")

    assert common.offset_dtype(view(2**20, 2**10)) == tl.int32
    assert common.offset_dtype(view(8, 8), view(2**21, 2**10)) == tl.int64


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dims", [(16, 16), (72, 80), (96, 64), (192, 128), (256, 256)], ids=str)
def test_head_dims(dims, dtype):
    inputs = tensors(1, 20, 40, 1, 1, *dims, dtype)
    lo, hi = random_bounds(20, 40)
    options, seen = Options(dims[0] ** -0.5), seen_by(lo, hi, 40)
    want, twin = (oracle(inputs, seen, options, dtype=d) for d in (torch.float64, dtype))
    got = run("triton", inputs, lo, hi, options)
    if dtype == torch.float32:
        compare(got, want, rtol=FP32)
    else:
        compare(got, want, twin)


@runs_kernels
@pytest.mark.parametrize("softmax_scale", [-0.3, 0.0])
def test_scales_that_are_not_positive(softmax_scale):
    inputs = tensors(1, 40, 50, 1, 1, 16, 16, torch.float32)
    lo, hi = random_bounds(40, 50)
    want = oracle(inputs, seen_by(lo, hi, 50), Options(softmax_scale))
    compare(run("triton", inputs, lo, hi, Options(softmax_scale)), want, rtol=FP32)


@runs_kernels
def test_the_state_between_two_calls():
    inputs = tensors(1, 40, 50, 2, 2, 16, 16, torch.float32)
    lo, hi = random_bounds(40, 50, empty=0.4)
    state = forward(inputs, lo, hi, Options(0.3), finish=False)
    q, k, v = (x.double() for x in inputs[:3])
    seen = seen_by(lo, hi, 50)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(0.3).masked_fill(~seen, -torch.inf)
    m = scores.amax(-1)
    p = (scores - m.masked_fill(m == -torch.inf, 0.0)[..., None]).exp()
    assert not seen.any(-1).all(), "some rows see nothing"
    assert_matches(state.m, m, rtol=FP32, name="m")
    assert_matches(state.l, p.sum(-1), rtol=FP32, name="l")
    assert_matches(state.acc, torch.einsum("bhqk,bkhd->bqhd", p, v), rtol=FP32, name="acc")


# No tile of this form has run on a GPU yet, where a wrong one may never return: bench/kernels.py tries them in a process of its own.
SPECIALIZED = Tile(32, 16, 4, 2, warp_specialize=True)


@pytest.fixture
def specialized(monkeypatch):
    """Has the forward kernel specialise its warps where it can; the tiles that it ran with since, in a list."""
    ran, launch = [], forward_kernels.forward
    monkeypatch.setattr(tiles, "SPECIALIZED", {("interpreter", 16, 256, 256): SPECIALIZED})
    monkeypatch.setattr(
        forward_kernels, "forward", lambda tile, *rest, **ends: (ran.append(tile), launch(tile, *rest, **ends))
    )
    return ran


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["gqa", "wide values", "softcap", "sinks", "batch bounds"])
def test_specialised_warps_compute_the_same_bits(name, dtype, specialized, monkeypatch):
    inputs, lo, hi, options, sinks = case(**CASES[name], dtype=dtype)
    got = forward(inputs, lo, hi, options, (32,), sinks=sinks)
    plain = Tile(32, 16, 4, 2)
    monkeypatch.setitem(tiles.SPECIALIZED, ("interpreter", 16, 256, 256), plain)
    want = forward(inputs, lo, hi, options, (32,), sinks=sinks)
    assert specialized == [SPECIALIZED] * 2 + [plain] * 2
    compare((got.out, got.lse), (want.out, want.lse))


@pytest.mark.interpreter
@pytest.mark.parametrize("dims", [(72, 80), (96, 24), (192, 128)], ids=str)
@pytest.mark.parametrize("is_full", [False, True])
def test_specialised_warps_at_any_head_dim(dims, is_full, specialized):
    inputs = tensors(1, 40, 50, 2, 1, *dims, torch.bfloat16)
    lo, hi = (torch.zeros(40).int(), torch.full((40,), 50).int()) if is_full else window_bounds(40, 30)
    options, seen = Options(dims[0] ** -0.5), seen_by(lo, hi, 50)
    got = forward(inputs, lo, hi, options, is_full=is_full)
    want, twin = (oracle(inputs, seen, options, dtype=d) for d in (torch.float64, torch.bfloat16))
    compare((got.out, got.lse), want, twin)
    assert specialized == [SPECIALIZED]


@pytest.mark.interpreter
def test_calls_without_descriptors_take_the_other_kernel(specialized):
    inputs, lo, hi, options, sinks = case(**CASES["all"], dtype=torch.bfloat16)  # with dropout, and values of width 5
    forward(inputs, lo, hi, options, sinks=sinks)
    assert specialized == [tiles.choose("forward", "interpreter", 16, 5, torch.bfloat16)]


def described(rows=32, keys=16, width=16, offset=0, stride=None, dropout_p=0.0):
    q, k = (torch.zeros(2 * n * width + offset, dtype=torch.bfloat16)[offset:] for n in (rows, keys))
    strides = (width, width if stride is None else stride, width, 1)
    q, k = (x.as_strided((1, n, 1, width), strides) for x, n in ((q, rows), (k, keys)))
    return backend.has_descriptors(SPECIALIZED, q, k, k, Options(0.3, dropout_p=dropout_p))


def test_which_tensors_have_descriptors():
    assert described()
    assert described(offset=8, stride=24)
    assert not described(rows=31), "less than a tile of rows"
    assert not described(keys=15), "less than a tile of keys"
    assert not described(offset=1), "it starts between multiples of 16 bytes"
    assert not described(stride=20), "its rows start there"
    assert not described(stride=0), "its rows are one row"
    assert not described(dropout_p=0.1)


def request(device="cuda", dtype=torch.bfloat16, head_dim=64, v_head_dim=64):
    return Request(torch.device(device), dtype, 4, 2, head_dim, v_head_dim, softcap=True, sinks=True, dropout=True)


@pytest.mark.parametrize(
    ("changes", "arch", "reason"),
    [
        ({}, "sm_90", None),
        ({"head_dim": 1, "v_head_dim": 256, "dtype": torch.float32}, "gfx942", None),
        ({"device": "cpu"}, "sm_90", "device is cpu; a GPU is required.*'reference'"),
        ({"dtype": torch.float64}, "sm_90", "dtype is torch.float64; one of torch.bfloat16.*'reference'"),
        ({"v_head_dim": 257}, "sm_90", "head dims are 64 and 257; at most 256.*'reference'"),
        ({}, "sm_70", "the GPU is sm_70, for which there are no tiles; use 'reference'"),
    ],
)
def test_supports(changes, arch, reason, monkeypatch):
    monkeypatch.setattr(backend, "_is_interpreted", lambda: False)
    monkeypatch.setattr(backend, "architecture", lambda device: arch)
    refusal = Triton().supports(request(**changes))
    if reason is None:
        assert refusal is None
    else:
        with pytest.raises(NotImplementedError, match=reason):
            raise NotImplementedError(refusal)


def test_supports_where_interpreted(monkeypatch):
    monkeypatch.setattr(backend, "_is_interpreted", lambda: True)
    assert Triton().supports(request("cpu")) is None


def test_supports_without_triton(monkeypatch):
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None)
    assert Triton().supports(request()) == "triton is not installed; install it, or use 'reference'"


def test_the_package_imports_no_triton():
    code = "import sys, ringattn.kernels.triton; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@triton.jit
def _product(A, B, C, length, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tile = at[:, None] * BLOCK + at[None, :]
    c = tl.zeros([BLOCK, BLOCK], tl.float32)
    for _ in tl.range(0, length):
        c = tl.dot(tl.load(A + tile), tl.load(B + tile), c)
    tl.store(C + tile, c.to(C.dtype.element_ty))


@runs_kernels
def test_bf16_products_are_right_and_rounded_to_the_nearest():
    interpreter.repair()  # a second time
    a, b = (torch.randn(16, 16, device=DEVICE).bfloat16() for _ in range(2))
    c = torch.empty(16, 16, dtype=torch.bfloat16, device=DEVICE)
    _product[(1,)](a, b, c, 3, BLOCK=16)
    exact = 3 * a.double() @ b.double()
    # Half a unit in the last place of the largest, which cutting off would exceed.
    assert_matches(c.double(), exact, rtol=2**-8)
    errors = (c.double() - exact) * exact.sign()
    assert -0.25 < float((errors / exact.abs()).mean() * 2**8) < 0.25, "errors to both sides"


def test_a_repair_that_finds_nothing_to_repair_says_so(monkeypatch):
    monkeypatch.delattr(interpreter.interpreter.InterpreterBuilder, "create_dot")
    with pytest.raises(RuntimeError, match=r"repair: .* has no create_dot .*; Triton 3\.6 to 3\.9 have\. Install"):
        interpreter.repair()
