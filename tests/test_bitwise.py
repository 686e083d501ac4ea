"""`deterministic="bitwise"`: the bits of world size 1, whatever the ring."""

import pytest
import torch
import torch.distributed as dist

import ringattn as ra
from ringattn.kernels import Bounds, Grads, Options, backends
from ringattn.kernels.triton import tiles
from ringattn.testing import assert_matches, naive_attention, virtual
from tests import processes

# The reference's tiles begin at multiples of 512: longer than that, or all ranks would compute everything.
N = {"cpu": 700, "reference": 1300, "triton": 300}
MASKS = {
    "full": lambda n: ra.Full(),
    "causal": lambda n: ra.Causal(),
    "window": lambda n: ra.Window(37, 5),
    "documents": lambda n: ra.Documents((0, 13, 14, n // 3, n // 2 + 9, n)),
    "chunked": lambda n: ra.Chunked(100, 7),
    "union": lambda n: ra.Window(20) | ra.PrefixLM(9),
    "rows": lambda n: ra.Rows(ra.Causal(), ra.Documents((0, n // 2 - 1, n))),
}
CPU = pytest.param("cpu", marks=pytest.mark.skipif("cpu" not in backends(), reason="needs the native library"))
TRITON = pytest.param("triton", marks=pytest.mark.interpreter)


def inputs(n, dtype=torch.float32, heads=4, kv_heads=2):
    """q, k, v, dout and the gradient of lse, with a head dim that no register divides."""
    torch.manual_seed(0)
    shapes = [(heads, 24), (kv_heads, 24), (kv_heads, 16), (heads, 16)]
    return *(torch.randn(2, n, *shape).to(dtype) for shape in shapes), torch.randn(2, heads, n)


def attend(world_size, layout, whole, sinks=None, **options):
    """Out, lse, dq, dk, dv of the whole sequence, computed by so many ranks."""
    ring = virtual(world_size)
    leaves = [[x.detach().requires_grad_() for x in ring.shard(x, layout)] for x in whole[:3]]
    arguments = {"layout": layout, "sinks": sinks, "deterministic": "bitwise", "return_lse": True, **options}
    out, lse = ring.attention(*leaves, **arguments)
    upstream = ring.shard(whole[3], layout), ring.shard(whole[4], layout, dim=2)
    grads = torch.autograd.grad([*out, *lse], [x for xs in leaves for x in xs], [*upstream[0], *upstream[1]])
    parts = [out, *(grads[i * world_size : (i + 1) * world_size] for i in range(3))]
    return ring.unshard(lse, layout, dim=2).detach(), *(ring.unshard(list(p), layout).detach() for p in parts)


def assert_same_bits(found, wanted):
    for name, x, y in zip(("lse", "out", "dq", "dk", "dv"), found, wanted, strict=True):
        bits = [t.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]) for t in (x, y)]
        differing = (bits[0] != bits[1]).sum().item()
        assert differing == 0, f"{name}: {differing} of {x.numel()} numbers differ"


def layouts_of(mask, n, world_size):
    yield from ("contiguous", "zigzag", "striped")
    yield ra.balanced(mask, n, world_size)
    if isinstance(mask, ra.Documents):
        yield ra.per_document(mask.cu_seqlens)


@pytest.mark.parametrize("mask_name", MASKS)
@pytest.mark.parametrize("backend", [CPU, "reference"])
def test_out_and_gradients_have_the_bits_of_world_size_1(backend, mask_name):
    n = N[backend]
    mask, whole = MASKS[mask_name](n), inputs(n)
    want = attend(1, "contiguous", whole, mask=mask, backend=backend)
    oracle = naive_attention(*(x.double() for x in whole[:3]), mask)
    assert_matches(want[1], oracle, rtol=1e-4)
    for world_size in (2, 3, 8) if backend == "cpu" else (3,):
        for layout in layouts_of(mask, n, world_size):
            assert_same_bits(attend(world_size, layout, whole, mask=mask, backend=backend), want)


@pytest.mark.parametrize("mask_name", ["causal", "union"])
@pytest.mark.parametrize("backend", [TRITON])
def test_out_and_gradients_have_the_bits_of_world_size_1_interpreted(backend, mask_name):
    n = N[backend]
    mask, whole = MASKS[mask_name](n), inputs(n, heads=2, kv_heads=1)
    want = attend(1, "contiguous", whole, mask=mask, backend=backend)
    for world_size, layout in ((2, "contiguous"), (3, "zigzag")):
        assert_same_bits(attend(world_size, layout, whole, mask=mask, backend=backend), want)


OPTIONS = {
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
    "one head": {"heads": 1, "kv_heads": 1},
    "dropout": {"dropout_p": 0.3, "seed": 5},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": torch.randn(4, generator=torch.Generator().manual_seed(2))},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("backend", [CPU, "reference"])
def test_every_option_has_the_bits_of_world_size_1(backend, option):
    n = N[backend]
    given = dict(OPTIONS[option])
    whole = inputs(n, **{key: given.pop(key) for key in ("dtype", "heads", "kv_heads") if key in given})
    want = attend(1, "contiguous", whole, backend=backend, **given)
    for layout in ("zigzag", "striped"):
        assert_same_bits(attend(4, layout, whole, backend=backend, **given), want)


@pytest.mark.parametrize("n", [1, 2, 5, 33])
def test_sequences_shorter_than_a_tile_or_the_ring(n):
    whole = inputs(n)
    want = attend(1, "contiguous", whole)
    assert_same_bits(attend(4, "zigzag", whole), want)
    assert_same_bits(attend(8, "contiguous", whole), want)


def test_rows_that_see_no_key():
    n = 64
    mask = ra.Bounds(torch.zeros(n, dtype=torch.int32), torch.zeros(n, dtype=torch.int32))
    lse, *others = attend(3, "zigzag", inputs(n), mask=mask)
    assert torch.isneginf(lse).all()
    for x in others:
        torch.testing.assert_close(x, torch.zeros_like(x), rtol=0, atol=0)


@pytest.mark.parametrize("backend", [CPU])
def test_the_number_of_threads_changes_no_bit(backend):
    whole = inputs(N[backend])
    want = attend(1, "contiguous", whole, backend=backend)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert_same_bits(attend(3, "zigzag", whole, backend=backend), want)
    finally:
        torch.set_num_threads(before)


def test_the_default_has_other_bits():
    """Or these tests could not fail."""
    whole = inputs(700)
    with pytest.raises(AssertionError, match="numbers differ"):
        assert_same_bits(attend(3, "zigzag", whole, deterministic=False), attend(1, "contiguous", whole))


def in_processes(rank, world_size, whole, layout):
    group = dist.group.WORLD
    q, k, v, dout = (ra.shard(x, layout, group) for x in whole[:4])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    seqlen = whole[0].shape[1]
    out, lse = ra.ring_attention(
        *leaves, layout=layout, group=group, seqlen=seqlen, deterministic="bitwise", return_lse=True
    )
    grads = torch.autograd.grad((out, lse), leaves, (dout, ra.shard(whole[4], layout, group, dim=2)))
    rows = [ra.unshard(x.detach(), layout, group, seqlen=seqlen) for x in (out, *grads)]
    return ra.unshard(lse.detach(), layout, group, dim=2, seqlen=seqlen), *rows


def test_processes_have_the_bits_of_world_size_1():
    whole = inputs(401)
    want = attend(1, "contiguous", whole)
    for found in processes.run(3, in_processes, whole, "zigzag"):
        assert_same_bits(found, want)


@pytest.mark.parametrize("backend", [CPU, "reference", TRITON])
def test_gradients_of_one_side_have_the_bits_of_both(backend):
    n = 70
    q, k, v, dout, _ = inputs(n)
    rows, columns = torch.arange(n, dtype=torch.int32), torch.arange(n, dtype=torch.int32)
    bounds = Bounds(torch.zeros_like(rows), rows + 1, rows, columns, is_full=False)
    kernels, lse = backends()[backend], torch.randn(2, 4, n) + 5
    delta, zeros = torch.randn(2, 4, n), [torch.zeros_like(x) for x in (q, k, v)]
    both, one, other = ([z.clone() for z in zeros] for _ in range(3))
    for grads in (Grads(*both), Grads(one[0], None, None), Grads(None, *other[1:])):
        kernels.backward(grads, q, k, v, dout, lse, delta, bounds, Options(0.2))
    for x, y in zip(both, (one[0], *other[1:]), strict=True):
        assert x.abs().sum() > 0
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["triton"])
def test_tiles_divide_the_anchor(backend):
    known = [tile for row in (*tiles.TILES.values(), *tiles.CANDIDATES.values()) for tile in row]
    assert len(known) > 50
    anchor = backends()[backend].anchor(torch.device("cpu"))
    for tile in known:
        assert (anchor % tile.block_m, anchor % tile.block_n) == (0, 0), tile
