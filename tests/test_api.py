import functools
import inspect
import re

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

import ringattn as ra
from ringattn import api, ops
from ringattn import layout as layout_module
from ringattn.api import arguments
from ringattn.testing import assert_matches, naive_attention, virtual
from tests import cases, processes

B, H, HKV, D, DV = 2, 4, 2, 6, 5
NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


def inputs(n, dtype=torch.float64, batch=B):
    """q, k, v, sinks and the upstream gradients of out and lse, of a whole sequence."""
    shapes = ((n, H, D), (n, HKV, D), (n, HKV, DV), (n, H, DV))
    q, k, v, dout = (torch.randn(batch, *shape, dtype=dtype) for shape in shapes)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return q, k, v, torch.randn(H, dtype=dtype), dout, torch.randn(batch, H, n, dtype=wide)


def leaves(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def oracle(mask, q, k, v, sinks, dout, dlse, **kwargs):
    x = leaves(q, k, v, sinks)
    out, lse = naive_attention(*x[:3], mask, sinks=x[3], return_lse=True, **kwargs)
    return dict(zip(NAMES, (out, lse, *torch.autograd.grad((out, lse), x, (dout, dlse))), strict=True))


# ---- over processes -----------------------------------------------------------------------------------------------


def many_cases():
    """Every mask with one layout after the other, and every layout with lengths that no ring divides."""
    names = list(cases.layouts())
    made = [
        (f"{name}, {names[i % len(names)]}", mask, cases.layouts()[names[i % len(names)]], cases.SEQLEN)
        for i, (name, mask) in enumerate(cases.masks().items())
    ]
    for n in (0, 1, 3, 12):
        for layout in (*ra.layouts(), ra.per_document((0, n // 2, n))):
            for mask in (ra.Causal(), ra.Window(1, 2)):
                made.append((f"{mask}, {layout}, {n} tokens", mask, layout, n))
    return made


def run_cases(rank, world_size, jobs):
    """By case the local results of this rank."""
    group, results = dist.group.WORLD, []
    for mask, layout, (q, k, v, sinks, dout, dlse) in jobs:
        cut = functools.partial(ra.shard, layout=layout, group=group)
        mine = leaves(*map(cut, (q, k, v)), sinks)
        before = [t.detach().clone() for t in mine]
        out, lse = ra.ring_attention(
            *mine[:3], mask=mask, layout=layout, group=group, seqlen=q.shape[1], sinks=mine[3], return_lse=True
        )
        grads = torch.autograd.grad((out, lse), mine, (cut(dout), cut(dlse, dim=2)))
        for t, was in zip(mine, before, strict=True):
            assert torch.equal(t, was)
        results.append(tuple(t.detach() for t in (out, lse, *grads)))
    return results


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_ring_of_processes_is_the_oracle_and_the_virtual_ring_bit_for_bit(world_size):
    made = [(name, mask, layout, inputs(n)) for name, mask, layout, n in many_cases()]
    results = processes.run(world_size, run_cases, [case[1:] for case in made])
    ring = virtual(world_size)
    for i, (name, mask, layout, (q, k, v, sinks, dout, dlse)) in enumerate(made):
        n = q.shape[1]
        parts = [[result[i][j] for result in results] for j in range(6)]
        rows = torch.cat([layout_module.positions(layout, n, world_size, r) for r in range(world_size)]).argsort()
        got = {
            what: torch.cat(parts[j], 2 if what == "lse" else 1).index_select(2 if what == "lse" else 1, rows)
            for j, what in enumerate(NAMES[:-1])
        }
        got["dsinks"] = torch.stack(parts[5]).sum(0)
        for what, want in oracle(mask, q, k, v, sinks, dout, dlse).items():
            assert_matches(got[what], want, rtol=1e-12, name=f"{name}: {what}")

        x = leaves(*(s for t in (q, k, v) for s in ring.shard(t, layout)), sinks)
        shards = [x[j * world_size : (j + 1) * world_size] for j in range(3)]
        outs, lses = ring.attention(*shards, mask=mask, layout=layout, sinks=x[-1], return_lse=True)
        grads = torch.autograd.grad((*outs, *lses), x, (*ring.shard(dout, layout), *ring.shard(dlse, layout, dim=2)))
        here = [outs, lses, *(grads[j * world_size : (j + 1) * world_size] for j in range(3))]
        for what, mine, theirs in zip(NAMES[:-1], here, parts[:5], strict=True):
            for rank in range(world_size):
                assert torch.equal(mine[rank], theirs[rank]), f"{name}: {what} of rank {rank}"
        assert torch.equal(grads[-1], got["dsinks"]), name


def run_options(rank, world_size, q, k, v, kwargs):
    mine = (ra.shard(t, group=dist.group.WORLD) for t in (q, k, v))
    out = ra.ring_attention(*mine, group=dist.group.WORLD, seqlen=q.shape[1], **kwargs)
    return ra.unshard(out, group=dist.group.WORLD, seqlen=q.shape[1])


@pytest.mark.parametrize(
    "kwargs",
    [{"softmax_scale": 0.7}, {"softcap": 1.5}, {"dropout_p": 0.3, "seed": 2**64 - 5, "head_offset": 8}],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_options_reach_every_rank(kwargs):
    q, k, v, *_ = inputs(11)
    want = naive_attention(q, k, v, ra.Causal(), **kwargs)
    for out in processes.run(2, run_options, q, k, v, kwargs):
        assert_matches(out, want, rtol=1e-12)


def checkpointed(rank, world_size, q, k, v, dout, use_reentrant):
    """The gradients without and with activation checkpointing."""
    group, results = dist.group.WORLD, []

    def layer(q, k, v):
        q, k, v = q.sin(), k.sin(), v.sin()
        return ra.ring_attention(q, k, v, mask=ra.Window(4), group=group, seqlen=9)

    for call in (layer, lambda *x: checkpoint(layer, *x, use_reentrant=use_reentrant)):
        x = leaves(*(ra.shard(t, group=group) for t in (q, k, v)))
        out = call(*x)
        out.backward(ra.shard(dout, group=group))
        results.append((out.detach(), *(t.grad for t in x)))
    return results


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(use_reentrant):
    q, k, v, _, dout, _ = inputs(9)
    for plain, recomputed in processes.run(2, checkpointed, q, k, v, dout, use_reentrant):
        assert plain[1].abs().max() > 0
        for a, b in zip(plain, recomputed, strict=True):
            assert_matches(b, a)


# ---- shard and unshard --------------------------------------------------------------------------------------------

SHARD_CASES = [("zigzag", 12, 1), ("zigzag", 7, 1), ("striped", 7, 0), ("contiguous", 2, -1), ("striped", 0, 1)]
SHARD_CASES += [(ra.per_document((0, 2, 11)), 11, 1)]


def tensor_of(n, dim):
    return torch.randn(*(n if d == dim % 3 else 3 for d in range(3)), dtype=torch.float64)


def there_and_back(rank, world_size, jobs):
    """Local rows, the whole again, and the gradients of `shard` and `unshard`, with an upstream gradient of each rank's own."""
    group, results = dist.group.WORLD, []
    for layout, n, dim, x in jobs:
        (x,) = leaves(x)
        local = ra.shard(x, layout, group, dim)
        (dx,) = torch.autograd.grad(local, x, local.detach() * (rank + 1))
        (part,) = leaves(local)
        whole = ra.unshard(part, layout, group, dim, seqlen=n)
        (dpart,) = torch.autograd.grad(whole, part, x.detach() + rank)
        results.append((local.detach(), whole.detach(), dx, dpart))
    return results


def test_shard_and_unshard_and_their_gradients():
    world_size = 3
    jobs = [(layout, n, dim, tensor_of(n, dim)) for layout, n, dim in SHARD_CASES]
    results = processes.run(world_size, there_and_back, jobs)
    for i, (layout, n, dim, x) in enumerate(jobs):
        rows = [layout_module.positions(layout, n, world_size, r) for r in range(world_size)]
        gathered = torch.zeros_like(x)
        for r in range(world_size):
            gathered.index_copy_(dim, rows[r], x.index_select(dim, rows[r]) * (r + 1))
        for r in range(world_size):
            local, whole, dx, dpart = results[r][i]
            assert_matches(local, x.index_select(dim, rows[r]), name="shard")
            assert_matches(whole, x, name="unshard")
            assert_matches(dx, gathered, name="gradient of shard")
            summed = (x * world_size + sum(range(world_size))).index_select(dim, rows[r])
            assert_matches(dpart, summed, rtol=1e-15 * world_size, name="gradient of unshard")


def test_shard_and_unshard_refuse():
    remedy = "they must agree. Pass seqlen where shards differ in length."
    shared = [
        "unshard: dim is 2 and the tensor has shape {shape}; it must be one of its dims.",
        "layout is 'spiral'; it must be one of 'contiguous', 'zigzag', 'striped', or a value such as per_document(...).",
        "per_document: its documents have 4 tokens and the sequence {n}; they must agree.",
        "group is a str; it must be a ProcessGroup, a one-dimensional DeviceMesh or None.",
    ]
    refusal = f"unshard: rank 0 has 2 rows and the layout gives it 3 of seqlen 7; {remedy} (found on rank 0 of 2)"
    disagreement = "unshard: ranks disagree on dtype: torch.float32 on rank 0; torch.float64 on rank 1; every rank must pass the same."
    for said in processes.run(2, refuse_unshard):
        assert said == [refusal, disagreement]
    for n, said in ((2, refusals(2)), (3, refusals(3))):
        assert said == [text.format(shape=(1, n), n=n) for text in shared]
    with pytest.raises(ValueError, match=r"shard: dim is -3 and the tensor has shape \(1, 2\); it must be one of its"):
        ra.shard(torch.zeros(1, 2), dim=-3)


def refuse_unshard(rank, world_size):
    said = []
    for local, seqlen in (
        (torch.zeros(1, 4 if rank else 2), 7),  # wrong on rank 0 only
        (torch.zeros(1, 4, dtype=torch.float64 if rank else torch.float32), 8),
    ):
        with pytest.raises(ValueError) as info:  # noqa: PT011
            ra.unshard(local, "contiguous", dist.group.WORLD, seqlen=seqlen, timeout=30)
        said.append(str(info.value))
    return said


WRONG_TYPES = [
    ({"mask": None}, r"ring_attention: mask is None; it must be a mask such as ringattn.Causal\(\)"),
    ({"layout": None}, r"layout is None; it must be a name or a value such as ringattn.per_document"),
    ({"seed": 1.5}, r"seed is 1\.5; it must be an integer"),
    ({"seed": 2**64}, r"seed is 18446744073709551616; it must have 64 bits at most"),
    ({"seqlen": 8.5}, r"seqlen is 8\.5; it must be an integer"),
    ({"softcap": "a"}, r"softcap is 'a'; it must be a number"),
    ({"deterministic": True}, r"deterministic is 'True'; it must be False or 'bitwise'"),
    ({"head_offset": -1}, r"head_offset is -1; it must be at least 0"),
    ({"sinks": [0.0, 0.0]}, r"sinks is a list; it must be a tensor"),
]


def wrong_type_on_rank_0(rank, world_size):
    q, said = torch.randn(1, 4, 2, 8), []
    for wrong, _ in WRONG_TYPES:
        with pytest.raises(ValueError) as info:  # noqa: PT011
            ra.ring_attention(q, q, q, group=dist.group.WORLD, timeout=30, **({} if rank else wrong))
        said.append(str(info.value))
    return said, ra.ring_attention(q, q, q, group=dist.group.WORLD, timeout=30).shape


def test_an_argument_of_a_wrong_type_on_one_rank_is_an_error_on_all():
    for said, shape in processes.run(2, wrong_type_on_rank_0):
        assert shape == (1, 4, 2, 8)
        for text, (_, pattern) in zip(said, WRONG_TYPES, strict=True):
            assert re.search(pattern + r".*\(found on rank 0 of 2\)", text), text


@pytest.mark.parametrize("transform", ["jvp", "grad", "vmap", "dual"])
def test_transforms_are_refused_and_never_silently_wrong(transform):
    q = torch.randn(1, 6, 2, 4)

    def attention(x):
        return ra.ring_attention(x, q, q)

    def by_dual():
        with torch.autograd.forward_ad.dual_level():
            attention(torch.autograd.forward_ad.make_dual(q, q))

    calls = {
        "jvp": lambda: torch.func.jvp(attention, (q,), (q,)),
        "grad": lambda: torch.func.grad(lambda x: attention(x).sum())(q),
        "vmap": lambda: torch.vmap(attention)(torch.stack([q, q])),
        "dual": by_dual,
    }
    with pytest.raises(NotImplementedError, match=r"q is under torch.func or forward-mode .*; use backward or"):
        calls[transform]()


def events_of_a_gloo_ring(rank, world_size):
    from ringattn import kernels, plan, schedule, transport

    timeline, x = ra.Timeline(), torch.randn(1, 8, 2, 4)
    a_plan = plan.build_plan(ra.Causal(), "zigzag", 8 * world_size, world_size, rank)
    ring = transport.ProcessGroupTransport(dist.group.WORLD, 30, timeline)
    ring.connect(x.device)
    options, backend = kernels.Options(0.5), kernels.backends()["reference"]
    out, lse = schedule.drive([schedule.forward(a_plan, ring, backend, x, x, x, None, options)])[0]
    schedule.drive([schedule.backward(a_plan, ring, backend, out, lse * 0, x, x, x, None, out, lse, options)])
    return timeline.order


def test_events_over_processes_are_those_of_the_virtual_ring():
    world_size = 3
    ring = virtual(world_size)
    x = torch.randn(1, 8 * world_size, 2, 4, requires_grad=True)
    outs = ring.attention(*[ring.shard(x)] * 3)
    sum(o.sum() for o in outs).backward()
    for rank, events in enumerate(processes.run(world_size, events_of_a_gloo_ring)):
        assert events == [e for e in ring.timeline.order if e[0] == rank]


def refusals(n):
    local, said = torch.zeros(1, n), []
    for call in (
        lambda: ra.unshard(local, dim=2),
        lambda: ra.shard(local, "spiral"),
        lambda: ra.shard(local, ra.per_document((0, 4))),
        lambda: ra.shard(local, "zigzag", "cp"),
    ):
        with pytest.raises(ValueError) as info:  # noqa: PT011
            call()
        said.append(str(info.value))
    return said


def test_a_shard_is_a_copy():
    x = torch.zeros(1, 4)
    ra.shard(x).fill_(1.0)
    ra.unshard(x).fill_(1.0)
    assert x.tolist() == [[0.0] * 4]


# ---- a ring of one ------------------------------------------------------------------------------------------------


def test_lse_alone_is_differentiable():
    q, k, v, sinks, _, dlse = inputs(9)
    x, y = leaves(q, k, v, sinks), leaves(q, k, v, sinks)
    _, lse = ra.ring_attention(*x[:3], sinks=x[3], return_lse=True)
    _, want = naive_attention(*y[:3], ra.Causal(), sinks=y[3], return_lse=True)
    assert_matches(lse, want, rtol=1e-12)
    lse.backward(dlse)
    want.backward(dlse)
    for name, a, b in zip(("dq", "dk", "dsinks"), (x[0], x[1], x[3]), (y[0], y[1], y[3]), strict=True):
        assert b.grad.abs().max() > 0
        assert_matches(a.grad, b.grad, rtol=1e-12, name=name)
    assert_matches(x[2].grad, torch.zeros_like(v), name="dv")


def test_inputs_that_are_not_contiguous_and_stay_as_they_were():
    q, k, v, sinks, dout, dlse = inputs(9)
    want = oracle(ra.Window(3), q, k, v, sinks, dout, dlse)
    x = [
        q.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),  # no dim with stride 1 at the end
        torch.cat([k, k + 1], 3)[..., :D],
        torch.stack([v, v + 1], -1)[..., 0],
        torch.stack([sinks, sinks], 1)[:, 0],
    ]
    for t in x:
        assert not t.is_contiguous()
        t.requires_grad_()
    before = [t.detach().clone() for t in x]
    out, lse = ra.ring_attention(*x[:3], mask=ra.Window(3), sinks=x[3], return_lse=True)
    strided = dout.transpose(1, 3).contiguous().transpose(1, 3), dlse.mT.contiguous().mT
    grads = torch.autograd.grad((out, lse), x, strided)
    for name, got in zip(NAMES, (out, lse, *grads), strict=True):
        assert_matches(got, want[name], rtol=1e-12, name=name)
    for t, was in zip(x, before, strict=True):
        assert_matches(t, was)
    for t, was in zip(strided, (dout, dlse), strict=True):
        assert_matches(t, was)


@pytest.mark.parametrize(("batch", "n"), [(0, 5), (2, 0), (0, 0)])
@pytest.mark.parametrize("world_size", [1, 3])
def test_no_batch_rows_and_no_tokens_are_legal(batch, n, world_size):
    q, k, v, sinks, dout, _ = inputs(n, batch=batch)
    (sinks,) = leaves(sinks)
    ring = virtual(world_size)
    shards = [leaves(*ring.shard(t)) for t in (q, k, v)]
    out, lse = ring.attention(*shards, sinks=sinks, return_lse=True)
    torch.autograd.backward(out, ring.shard(dout))
    assert tuple(ring.unshard(out).shape) == (batch, n, H, DV)
    assert tuple(ring.unshard(lse, dim=2).shape) == (batch, H, n)
    for whole, parts in zip((q, k, v), shards, strict=True):
        assert tuple(ring.unshard([t.grad for t in parts]).shape) == tuple(whole.shape)
    assert_matches(sinks.grad, torch.zeros_like(sinks))


def test_autocast_is_honoured():
    q, k, v, *_ = inputs(9, torch.float32)
    x = leaves(q, k, v)
    low = [t.bfloat16() for t in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = ra.ring_attention(*x, return_lse=True)
    want, want_lse = ra.ring_attention(*low, return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert_matches(out, want)
    assert_matches(lse, want_lse)
    out.sum().backward()
    assert {t.grad.dtype for t in x} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        assert ra.ring_attention(*(t.double() for t in (q, k, v))).dtype == torch.float64


def test_type_checkers_are_told_of_every_keyword():
    given = inspect.signature(ra.ring_attention).parameters
    keywords = {name: p.annotation for name, p in given.items() if p.kind is p.KEYWORD_ONLY and name != "return_lse"}
    assert api.Keywords.__annotations__ == keywords


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_good_as_its_twin(dtype):
    low = inputs(17, dtype)
    want = oracle(ra.Causal(), *(t.double() for t in low))
    twin = oracle(ra.Causal(), *low[:-1], low[-1].to(dtype))
    x = leaves(*low[:4])
    out, lse = ra.ring_attention(*x[:3], sinks=x[3], return_lse=True)
    grads = torch.autograd.grad((out, lse), x, low[4:])
    for name, got in zip(NAMES, (out, lse, *grads), strict=True):
        assert_matches(got, want[name], twin[name], name=name)


def give_a_dtensor(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    x = torch.zeros(1, 2, 1, 4)
    said = []
    for name in ("q", "k", "v", "sinks"):
        arguments = {"q": x, "k": x, "v": x, "sinks": torch.zeros(1)}
        arguments[name] = DTensor.from_local(arguments[name], mesh, [Replicate()])
        with pytest.raises(NotImplementedError) as info:
            ra.ring_attention(**arguments, group=mesh)
        said.append(str(info.value))
    return said


def test_a_dtensor_is_refused_by_name():
    want = [
        f"ring_attention: {name} is a DTensor; pass the local shard, {name}.to_local()."
        for name in ("q", "k", "v", "sinks")
    ]
    assert processes.run(2, give_a_dtensor) == [want, want]


def test_a_second_backward_is_refused():
    x = leaves(*inputs(5)[:3])
    (dq,) = torch.autograd.grad(ra.ring_attention(*x).sin().sum(), x[0], create_graph=True)
    message = "ring_attention: a second derivative is asked for; only first ones are supported. Call backward without create_graph=True."
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        dq.sum().backward()


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("layout", ["zigzag", ra.per_document((0, 4, 9))])
def test_the_operator_passes_opcheck(has_sinks, layout):
    q, k, v, sinks, *_ = inputs(9, torch.float32)
    x = leaves(q, k, v, sinks)
    args = arguments(ra.Window(2), layout, None, None, None, None, 0.0, None, 0, "auto", False, None, True)
    sample = ([x[0]], [x[1]], [x[2]], x[3] if has_sinks else None, *vars(args).values())
    torch.library.opcheck(
        torch.ops.ringattn.attention.default,
        sample,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
    out, lse = ops.attention([q], [k], [v], sinks, args)
    sample = (
        [torch.ones_like(out[0])],
        [torch.ones_like(lse[0])],
        [q],
        [k],
        [v],
        sinks,
        out,
        lse,
        *vars(args).values(),
    )
    torch.library.opcheck(
        torch.ops.ringattn.attention_backward.default, sample, test_utils=("test_schema", "test_faketensor")
    )


# ---- torch.compile ------------------------------------------------------------------------------------------------


@pytest.fixture
def counter():
    torch._dynamo.reset()
    yield CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()


def layer(q, k, v, sinks, mask):
    out, lse = ra.ring_attention(q.sin(), k, v, mask=mask, sinks=sinks, return_lse=True)
    return out * 2, lse


def layer_with_its_own_mask(q, k, v, sinks, cu_seqlens):
    return layer(q, k, v, sinks, ra.Documents(cu_seqlens) & ra.Window(3))


def results_of(function, n, mask):
    torch.manual_seed(1)
    q, k, v, sinks, dout, dlse = inputs(n)
    x = leaves(q, k, v, sinks)
    out, lse = function(*x, mask)
    return (out, lse, *torch.autograd.grad((out, lse), x, (dout, dlse)))


def test_compiled_is_eager(counter):
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for name, a, b in zip(NAMES, results_of(compiled, 9, ra.Causal()), results_of(layer, 9, ra.Causal()), strict=True):
        assert_matches(a, b, name=name)
    assert counter.frame_count == 1


def test_twenty_packings_make_two_graphs_at_most(counter):
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for i in range(1, 21):
        mask = ra.Documents((0, *range(1, 2 + i % 5), 7 + i % 13, 24))
        for name, a, b in zip(NAMES, results_of(compiled, 24, mask), results_of(layer, 24, mask), strict=True):
            assert_matches(a, b, name=name)
    assert 1 <= counter.frame_count <= 2


def test_a_mask_made_in_the_compiled_function(counter):
    compiled = torch.compile(layer_with_its_own_mask, fullgraph=True, backend=counter)
    for name, a, b in zip(
        NAMES,
        results_of(compiled, 9, (0, 4, 9)),
        results_of(layer_with_its_own_mask, 9, (0, 4, 9)),
        strict=True,
    ):
        assert_matches(a, b, name=name)
    assert counter.frame_count == 1
