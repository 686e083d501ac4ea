"""The ring in one process against the oracle: every backend x layout x mask x world size, forward and backward."""

import itertools

import pytest
import torch

import ringattn as ra
from ringattn import kernels, schedule
from ringattn.kernels import Bounds
from ringattn.kernels.reference import Reference
from ringattn.plan import build_plan
from ringattn.testing import Sizes, assert_matches, naive_attention, simulate, virtual, visible
from ringattn.transport import VirtualTransport, _Messages
from tests.cases import SEQLEN, layouts, masks
from tests.contract import BACKENDS, device_of

FEATURES = {
    "plain": {},
    "all": {"softcap": 2.0, "use_sinks": True, "dropout_p": 0.3, "seed": 2**40 + 7, "softmax_scale": 0.3},
}

# exp(s - lse) and dP - delta each round a few times where the dense form does not: 32 units in the last place
FP32 = 32 * 2**-23


def inputs(n=SEQLEN, batch=2, heads=4, kv_heads=2, head_dim=8, v_head_dim=6, dtype=torch.float64):
    q = torch.randn(batch, n, heads, head_dim, dtype=dtype)
    k = torch.randn(batch, n, kv_heads, head_dim, dtype=dtype)
    v = torch.randn(batch, n, kv_heads, v_head_dim, dtype=dtype)
    return [t.requires_grad_() for t in (q, k, v, torch.randn(heads, dtype=dtype))]


def by_ring(world_size, q, k, v, sinks, *, layout, mask, dout, dlse, ring=None, **options):
    """out, lse and the gradients of q, k, v and sinks, whole, through `world_size` ranks in this process."""
    ring = ring or virtual(world_size)
    use_sinks = options.pop("use_sinks", False)
    shards = [ring.shard(t, layout) for t in (q, k, v)]
    outs, lses = ring.attention(
        *shards, mask=mask, layout=layout, sinks=sinks if use_sinks else None, return_lse=True, **options
    )
    return with_grads(
        ring.unshard(outs, layout), ring.unshard(lses, layout, dim=2), q, k, v, sinks, use_sinks, dout, dlse
    )


def by_oracle(q, k, v, sinks, *, mask, dout, dlse, **options):
    use_sinks = options.pop("use_sinks", False)
    out, lse = naive_attention(q, k, v, mask, sinks=sinks if use_sinks else None, return_lse=True, **options)
    return with_grads(out, lse, q, k, v, sinks, use_sinks, dout, dlse)


def with_grads(out, lse, q, k, v, sinks, use_sinks, dout, dlse):
    leaves = [q, k, v, *([sinks] if use_sinks else [])]
    loss = (out * dout.to(out)).sum() + (lse.masked_fill(lse == -torch.inf, 0) * dlse.to(lse)).sum()
    grads = torch.autograd.grad(loss, leaves)
    return dict(zip(("out", "lse", "dq", "dk", "dv", "dsinks"), (out, lse, *grads), strict=False))


def upstream(q, v):
    return {
        "dout": torch.randn(*q.shape[:3], v.shape[3], dtype=torch.float64),
        "dlse": torch.randn(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float64),
    }


def require_equal(got, want, rtol, label=""):
    assert got.keys() == want.keys()
    for name in want:
        assert_matches(got[name], want[name], rtol=rtol, name=f"{label} {name}")


def sweep():
    """Backends x layouts; in Triton's interpreter, some hundred times slower, all but one layout count as slow."""
    for backend, (name, layout) in itertools.product(BACKENDS, layouts().items()):
        is_slow = backend.values == ("triton",) and name != "zigzag"
        yield pytest.param(
            *backend.values,
            layout,
            marks=[*backend.marks, *[pytest.mark.slow] * is_slow],
            id=f"{backend.values[0]}-{name}",
        )


@pytest.mark.parametrize(("backend", "layout"), list(sweep()))
@pytest.mark.parametrize("name", masks())
def test_every_mask_layout_and_world_size(name, layout, backend):
    dtype, rtol = (torch.float64, 1e-12) if backend == "reference" else (torch.float32, FP32)
    mask, exact = masks()[name], inputs()
    exact = [t.detach().to(dtype).double().requires_grad_() for t in exact]
    tensors = [t.detach().to(device_of(backend), dtype).requires_grad_() for t in exact]
    given = upstream(exact[0], exact[2])
    is_interpreted = backend == "triton" and device_of(backend).type == "cpu"
    for feature, options in FEATURES.items():
        if is_interpreted and feature == "plain":
            continue
        want = by_oracle(*exact, mask=mask, **given, **options)
        for world_size in (3,) if is_interpreted else (1, 2, 3, 4):
            got = by_ring(world_size, *tensors, mask=mask, layout=layout, backend=backend, **given, **options)
            require_equal(got, want, rtol, f"{feature}, world size {world_size}:")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["causal", "documents not causal", "or", "bounds with rows that see nothing"])
def test_lower_precision_is_no_worse_than_an_honest_twin(name, dtype, backend):
    mask = masks(40)[name]
    low = [t.detach().to(device_of(backend)).requires_grad_() for t in inputs(40, dtype=dtype)]
    given = upstream(low[0], low[2])
    exact = [t.detach().cpu().double().requires_grad_() for t in low]
    given = {key: value.to(dtype).double() for key, value in given.items()}
    want, twin = (
        by_oracle(*exact, mask=mask, use_sinks=True, **given),
        by_oracle(*(t.detach().cpu().requires_grad_() for t in low), mask=mask, use_sinks=True, **given),
    )
    for world_size in (1, 3, 4):
        got = by_ring(world_size, *low, mask=mask, layout="zigzag", use_sinks=True, backend=backend, **given)
        for key in want:
            if dtype == torch.float32:
                assert_matches(got[key], want[key], rtol=FP32, name=f"world size {world_size}: {key}")
            else:
                assert_matches(got[key], want[key], twin[key], name=f"world size {world_size}: {key}")


@pytest.mark.parametrize("seqlen", [1, 2, 3, 5])
@pytest.mark.parametrize("layout", ra.layouts())
def test_shards_shorter_than_the_ring_and_without_rows(seqlen, layout):
    tensors = inputs(seqlen)
    given = upstream(tensors[0], tensors[2])
    for mask in (ra.Causal(), ra.Full(), ra.Window(1)):
        want = by_oracle(*tensors, mask=mask, **given)
        for world_size in (2, 4, 6):
            require_equal(by_ring(world_size, *tensors, mask=mask, layout=layout, **given), want, 1e-12)


@pytest.mark.parametrize(("heads", "kv_heads", "n"), [(1, 1, 9), (9, 3, 9), (6, 1, 11), (4, 4, 16)])
def test_heads(heads, kv_heads, n):
    tensors = inputs(n, 1, heads, kv_heads, 5, 7)
    given = upstream(tensors[0], tensors[2])
    want = by_oracle(*tensors, mask=ra.Causal(), **given)
    require_equal(by_ring(3, *tensors, mask=ra.Causal(), layout="zigzag", **given), want, 1e-12)


# ---- what travels, and in which order -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["causal", "window", "documents", "full"])
@pytest.mark.parametrize("layout", ra.layouts())
def test_order_of_events(name, layout):
    mask, tensors = masks()[name], inputs()
    given = upstream(tensors[0], tensors[2])
    for world_size in (2, 3, 4):
        offsets = [hop.offset for hop in build_plan(mask, layout, SEQLEN, world_size, 0).hops]
        ring = virtual(world_size)
        shards = [ring.shard(t, layout) for t in tensors[:3]]
        outs, _ = ring.attention(*shards, mask=mask, layout=layout, return_lse=True)
        forward = ring.timeline.order
        ring.timeline.clear()
        torch.autograd.grad((ring.unshard(outs, layout) * given["dout"]).sum(), tensors[:3])
        for rank in range(world_size):
            mine = [(what, offset) for r, what, offset in forward if r == rank]
            # the next keys are on their way before this hop is computed, and waited for after it; nothing else moves
            assert mine == forward_order(offsets)
            mine = [(what, offset) for r, what, offset in ring.timeline.order if r == rank]
            # the second part of a rank's own keys comes last
            own = [("compute", 0)] if len(offsets) > 1 else []
            assert [e for e in mine if e[1] >= 0] == forward_order(offsets) + own
            assert sorted(o for what, o in mine if what == "post" and o < 0) == sorted(-o for o in offsets if o)
            for i, offset in enumerate(offsets[1:], 1):
                home = mine.index(("post", -offset))
                assert mine.index(("compute", offset)) < home < mine.index(("wait", -offset))
                # one hop behind: on its way while the next hop, or what is left of a rank's own keys, is computed
                assert mine.index(("wait", -offset)) + 1 == mine.index(("add", -offset))
                following = [*offsets, 0][i + 1]
                assert home < len(mine) - 1 - mine[::-1].index(("compute", following)) < mine.index(("wait", -offset))


def forward_order(offsets):
    events = []
    for i, offset in enumerate(offsets):
        following = offsets[i + 1] if i + 1 < len(offsets) else None
        events += [("post", following)] if following else []
        events += [("compute", offset)]
        events += [("wait", following)] if following else []
    return events


@pytest.mark.parametrize("layout", layouts().values(), ids=layouts())
@pytest.mark.parametrize("name", masks())
def test_what_travels_is_the_least_that_the_mask_allows(name, layout):
    mask, sizes = masks()[name], Sizes(heads=2, kv_heads=1, head_dim=3, v_head_dim=2)
    seen = visible(mask, SEQLEN)
    seen = seen if seen.dim() == 2 else seen.any(0)
    network = ra.Network(flops_per_s=1.0, bandwidth_bytes_per_s=1.0)
    for world_size in (1, 2, 3, 4):
        held = [ra.layout.positions(layout, SEQLEN, world_size, rank) for rank in range(world_size)]
        # (sender, offset): the sender's rows that some row of the receiver sees
        rows = {
            (source, (target - source) % world_size): int(seen[held[target]][:, held[source]].any(0).sum())
            for source, target in itertools.permutations(range(world_size), 2)
        }
        keys = {move: n * 5 * 2 for move, n in rows.items() if n}  # bf16
        grads = {((s + o) % world_size, -o): n * 5 * 4 for (s, o), n in rows.items() if n}  # fp32
        for passes, want in (("forward", keys), ("backward", keys | grads)):
            ran = simulate(mask, layout, SEQLEN, world_size, network=network, sizes=sizes, passes=[passes]).spans
            moved = [((span.rank, span.offset), span.bytes) for span in ran if span.what == "transfer"]
            assert len(moved) == len(dict(moved)), "a message came twice"
            assert dict(moved) == want
            for rank in range(world_size):  # and every rank takes part in no more exchanges than there are offsets
                posted = sorted(span.offset for span in ran if (span.rank, span.what) == (rank, "post"))
                assert posted == sorted({offset for _, offset in want})


def test_hops_that_nobody_needs_are_not_made():
    for layout, mask, hops in (
        ("contiguous", ra.Window(2), 2),
        ("contiguous", ra.Documents((0, 8, 16, 24, 32)), 1),
        ("striped", ra.Window(1), 2),
        ("zigzag", ra.Causal(), 4),
    ):
        ring = virtual(4)
        x = torch.randn(1, 32, 2, 4, requires_grad=True)
        outs = ring.attention(*[ring.shard(x, layout)] * 3, mask=mask, layout=layout)
        sum(o.sum() for o in outs).backward()
        posts = [offset for rank, what, offset in ring.timeline.order if what == "post" and rank == 0]
        assert len({o for o in posts if o > 0}) == len({o for o in posts if o < 0}) == hops - 1, (layout, mask)


def test_passes_that_do_not_pair_up_raise():
    class Never:
        def ready(self):
            return False

        def wait(self):
            raise AssertionError

    def waits():
        yield Never()

    with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] wait for each other; sends and receives do not pair up"):
        schedule.drive([waits(), waits()])


# ---- invariants -----------------------------------------------------------------------------------------------------


def test_inputs_are_not_written_to_and_two_runs_give_the_same_bits():
    tensors = inputs()
    given = upstream(tensors[0], tensors[2])
    before = [t.detach().clone() for t in (*tensors, *given.values())]
    runs = [by_ring(3, *tensors, mask=ra.Causal(), layout="zigzag", **given, **FEATURES["all"]) for _ in range(2)]
    for key in runs[0]:
        assert_matches(runs[1][key], runs[0][key], name=key)
    for t, copy in zip((*tensors, *given.values()), before, strict=True):
        assert_matches(t, copy)


def test_dropout_drops_the_same_weights_at_every_world_size_and_layout():
    tensors = inputs()
    given = upstream(tensors[0], tensors[2])
    options = {"mask": ra.Causal(), "dropout_p": 0.5, "seed": 11, **given}
    want = by_ring(1, *tensors, layout="zigzag", **options)
    for world_size, layout in itertools.product((2, 3, 4), ra.layouts()):
        require_equal(by_ring(world_size, *tensors, layout=layout, **options), want, 1e-12)
    other = by_ring(2, *tensors, layout="zigzag", **{**options, "seed": 12})
    with pytest.raises(AssertionError, match="out"):
        assert_matches(other["out"], want["out"], rtol=1e-3, name="out")


@pytest.mark.parametrize("layout", layouts().values(), ids=layouts())
@pytest.mark.parametrize("mask", [ra.Documents((0, 3, 10, SEQLEN)), ra.Window(4), ra.Chunked(5)], ids=repr)
def test_a_changed_token_moves_no_row_that_does_not_see_it(mask, layout):
    q, k, v, _ = (t.detach() for t in inputs())
    ring, token = virtual(3), 2
    before = ring.unshard(ring.attention(*(ring.shard(t, layout) for t in (q, k, v)), mask=mask, layout=layout), layout)
    k[:, token] += 1.0
    v[:, token] -= 1.0
    after = ring.unshard(ring.attention(*(ring.shard(t, layout) for t in (q, k, v)), mask=mask, layout=layout), layout)
    sees = visible(mask, SEQLEN)[:, token]
    assert_matches(after[:, ~sees], before[:, ~sees])
    assert ((after - before)[:, sees].abs().amax((0, 2, 3)) > 1e-6).all()


@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_nan_reaches_the_rows_that_see_it_and_no_other(which, world_size):
    row, mask, layout = 4, ra.Window(3), "zigzag"
    q, k, v, sinks = inputs()
    given = upstream(q, v)
    clean = by_ring(world_size, q, k, v, sinks, mask=mask, layout=layout, **given)
    tensors = {"q": q.detach().clone(), "k": k.detach().clone(), "v": v.detach().clone(), "dout": given["dout"].clone()}
    tensors[which][:, row] = torch.nan
    dirty = by_ring(
        world_size,
        *(tensors[n].requires_grad_() for n in "qkv"),
        sinks,
        mask=mask,
        layout=layout,
        dout=tensors["dout"],
        dlse=given["dlse"],
    )
    seen = visible(mask, SEQLEN)
    rows = torch.zeros(SEQLEN, dtype=torch.bool)
    if which in "qdout":
        rows[row] = which == "q"
    if which in "kv":
        rows = seen[:, row]
    # rows whose result is NaN; keys that such a row sees get NaN gradients, and so do rows that see such a key's gradient
    assert bool(dirty["out"][:, rows].isnan().all())
    assert_matches(dirty["out"][:, ~rows], clean["out"][:, ~rows])
    bad_rows = rows | (torch.arange(SEQLEN) == row if which == "dout" else rows)
    reached_keys = seen[bad_rows].any(0)
    for name in ("dk", "dv"):
        assert_matches(dirty[name][:, ~reached_keys], clean[name][:, ~reached_keys], name=name)
    assert_matches(dirty["dq"][:, ~bad_rows], clean["dq"][:, ~bad_rows], name="dq")
    assert bool(dirty["dq"][:, bad_rows].isnan().all())


def test_rows_that_see_no_key():
    mask = ra.Bounds(torch.arange(SEQLEN), torch.arange(SEQLEN) + torch.arange(SEQLEN) % 2)
    blind = torch.arange(SEQLEN) % 2 == 0
    tensors = inputs()
    given = upstream(tensors[0], tensors[2])
    got = by_ring(3, *tensors, mask=mask, layout="striped", **given)
    assert_matches(got["out"][:, blind], torch.zeros_like(got["out"][:, blind]))
    assert bool((got["lse"][..., blind] == -torch.inf).all())
    for name in ("dq", "dk", "dv"):
        assert_matches(got[name][:, blind], torch.zeros_like(got[name][:, blind]), name=name)
    got = by_ring(3, *tensors, mask=mask, layout="striped", use_sinks=True, **given)
    assert_matches(got["lse"][..., blind], tensors[3][None, :, None].expand_as(got["lse"][..., blind]), rtol=1e-15)


def test_a_sink_of_minus_infinity_where_a_row_sees_no_key():
    q, k, v, sinks = inputs()
    with torch.no_grad():
        sinks[0] = -torch.inf
    given = upstream(q, v)
    options = {"mask": ra.Bounds([0] * SEQLEN, [0] * 6 + [SEQLEN] * (SEQLEN - 6)), "use_sinks": True, **given}
    got = by_ring(2, q, k, v, sinks, layout="zigzag", **options)
    assert got["dsinks"][0] == 0
    assert bool(got["dsinks"].isfinite().all())
    require_equal(
        {n: got[n] for n in ("out", "lse")}, {n: by_oracle(q, k, v, sinks, **options)[n] for n in ("out", "lse")}, 1e-12
    )


# ---- what others got wrong ------------------------------------------------------------------------------------------


def whole(ring, q, k, v, layout="zigzag", **options):
    return ring.unshard(ring.attention(*(ring.shard(t, layout) for t in (q, k, v)), layout=layout, **options), layout)


def test_a_window_is_not_replaced_by_causal():
    q, k, v, _ = inputs(16)
    got = whole(virtual(2), q, k, v, mask=ra.Window(3))[:, 15:]
    four_keys = torch.ones(1, 4, dtype=torch.bool)
    assert_matches(got, naive_attention(q[:, 15:], k[:, 12:], v[:, 12:], four_keys), rtol=1e-12)


def test_sinks_take_their_share_of_every_row():
    q, k, v, sinks = inputs(16)
    got = whole(virtual(2), q, k, v, sinks=sinks)
    without, lse = naive_attention(q, k, v, ra.Causal(), return_lse=True)
    share = torch.sigmoid(lse - sinks[:, None]).transpose(1, 2)[..., None]
    assert_matches(got, without * share, rtol=1e-12)


@pytest.mark.parametrize("lengths", [(5, 11), (3, 6, 7), (11, 5)])
@pytest.mark.parametrize("layout", ra.layouts())
def test_packed_documents_are_documents_alone(lengths, layout):
    # the last of (11, 5) is what a batch is padded with: its rows are nobody's, and take nothing from the others
    cu_seqlens = [0, *itertools.accumulate(lengths)]
    q, k, v, _ = inputs(cu_seqlens[-1])
    got = whole(virtual(2), q, k, v, layout, mask=ra.Documents(cu_seqlens))
    alone = [naive_attention(q[:, a:b], k[:, a:b], v[:, a:b], ra.Causal()) for a, b in itertools.pairwise(cu_seqlens)]
    assert_matches(got, torch.cat(alone, 1), rtol=1e-12)


@pytest.mark.parametrize(("seqlen", "mask"), [(15, ra.Causal()), (16, ra.Full())], ids=repr)
def test_no_length_or_mask_needs_another_layout(seqlen, mask):
    q, k, v, _ = inputs(seqlen)
    for layout, world_size in itertools.product(ra.layouts(), (2, 4)):
        assert_matches(
            whole(virtual(world_size), q, k, v, layout, mask=mask), naive_attention(q, k, v, mask), rtol=1e-12
        )


def test_steps_stay_finite_where_a_block_hides_whole_rows():
    weight = torch.eye(8, requires_grad=True)
    ring, x = virtual(4), torch.randn(1, 16, 2, 8)
    for _ in range(3):
        out = whole(ring, x @ weight, x @ weight, x, "contiguous", mask=ra.Documents((0, 3, 9, 16)))
        (grad,) = torch.autograd.grad(out.square().sum(), weight)
        assert_matches(grad.isfinite(), torch.ones(8, 8, dtype=torch.bool))
        weight = (weight - 0.1 * grad).detach().requires_grad_()


def test_error_does_not_grow_with_the_world_size():
    low = [t.detach().requires_grad_() for t in inputs(64, dtype=torch.bfloat16)]
    given = {key: value.bfloat16().double() for key, value in upstream(low[0], low[2]).items()}
    exact = [t.detach().double().requires_grad_() for t in low]
    want = by_oracle(*exact, mask=ra.Causal(), **given)
    one = by_ring(1, *low, mask=ra.Causal(), layout="zigzag", **given)
    eight = by_ring(8, *low, mask=ra.Causal(), layout="zigzag", **given)
    for key in want:
        # no hop rounds to bf16, so that the twin of one rank bounds eight
        assert_matches(eight[key], want[key], one[key], name=key)


@pytest.mark.parametrize("shift", [200.0, -200.0])
def test_scores_far_apart_on_different_hops_do_not_overflow(shift):
    q, k, v, sinks = inputs(16, dtype=torch.float32)
    with torch.no_grad():
        q[..., 0], k[:, :8, :, 0], k[:, 8:, :, 0] = 8.0, 0.0, shift
    given = upstream(q, v)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v, sinks)]
    want = by_oracle(*exact, mask=ra.Full(), **given)
    got = by_ring(4, q, k, v, sinks, mask=ra.Full(), layout="contiguous", **given)
    for key in ("out", "dv"):
        assert_matches(got[key], want[key], rtol=1e-4, name=key)  # scores of 600: their own rounding is 600 * 2**-24
    assert all(bool(t.isfinite().all()) for t in got.values())


def test_gradients_of_keys_on_other_ranks_by_finite_differences():
    q, k, v, _ = inputs(6, 1, 2, 1, 3, 3)
    ring = virtual(2)

    def attention(q, k, v):
        return ring.unshard(ring.attention(*(ring.shard(t) for t in (q, k, v)), mask=ra.Causal()))

    assert torch.autograd.gradcheck(attention, (q, k, v))


def test_backward_drops_the_weights_that_forward_dropped():
    tensors = inputs(5, 1, 2, 1, 3, 2)
    ring, options = virtual(2), {"dropout_p": 0.5, "seed": 3, "softcap": 2.0}

    def attention(q, k, v, sinks):
        return ring.unshard(ring.attention(*(ring.shard(t) for t in (q, k, v)), sinks=sinks, **options))

    assert torch.autograd.gradcheck(attention, tensors)


# ---- the comparison objects -----------------------------------------------------------------------------------------


def broken(monkeypatch, how):
    """Break one thing of the ring."""
    forward, backward = Reference.forward, Reference.backward

    def off_by_one(bounds):
        return Bounds((bounds.lo + 1), bounds.hi, bounds.q_pos, bounds.k_pos, False)

    def no_rescale(self, state, q, k, v, bounds, options, *, sinks, start, finish):
        acc, m = state.acc.clone(), state.m.clone()
        forward(self, state, q, k, v, bounds, options, sinks=sinks, start=start, finish=finish)
        if not (start or finish):
            decay = torch.exp(m - state.m).transpose(1, 2)[..., None]
            state.acc.add_(acc * (1 - decay))

    if how == "mask off by one":
        monkeypatch.setattr(
            Reference, "forward", lambda self, s, q, k, v, b, o, **kw: forward(self, s, q, k, v, off_by_one(b), o, **kw)
        )
    elif how == "state not rescaled":
        monkeypatch.setattr(Reference, "forward", no_rescale)
    elif how == "block dropped":
        monkeypatch.setattr(
            Reference,
            "forward",
            lambda self, s, q, k, v, b, o, *, start, finish, **kw: forward(
                self, s, q, k, v, b if start or finish else off_by_nothing(b, k), o, start=start, finish=finish, **kw
            ),
        )
    elif how == "gradient block dropped":
        calls = itertools.count()
        monkeypatch.setattr(
            Reference, "backward", lambda self, *args: backward(self, *args) if next(calls) % 3 else None
        )
    elif how == "not waited for":
        monkeypatch.setattr(_Messages, "wait", lambda self: None)
    elif how == "gradients lost on the way home":
        exchange = VirtualTransport.exchange

        def lose(self, offset, send, recv):
            if offset < 0 and send is not None:
                send = torch.zeros_like(send)
            return exchange(self, offset, send, recv)

        monkeypatch.setattr(VirtualTransport, "exchange", lose)
    else:
        raise ValueError(how)


def off_by_nothing(bounds, k):
    return Bounds(
        torch.full_like(bounds.lo, k.shape[1]), torch.zeros_like(bounds.hi), bounds.q_pos, bounds.k_pos, False
    )


@pytest.mark.parametrize(
    "how",
    [
        "mask off by one",
        "state not rescaled",
        "block dropped",
        "gradient block dropped",
        "gradients lost on the way home",
        "not waited for",
    ],
)
def test_a_broken_ring_is_noticed(monkeypatch, how):
    tensors = inputs()
    given = upstream(tensors[0], tensors[2])
    want = by_oracle(*tensors, mask=ra.Causal(), **given)
    require_equal(by_ring(3, *tensors, mask=ra.Causal(), layout="zigzag", **given), want, 1e-12)
    broken(monkeypatch, how)
    with pytest.raises(AssertionError, match=r"max error|NaN differs"):
        require_equal(by_ring(3, *tensors, mask=ra.Causal(), layout="zigzag", **given), want, 1e-12)


def test_registry():
    assert list(kernels.backends()) == list(ra.backends())
    with pytest.raises(
        ValueError, match=r"backend is 'cuda'; it must be 'auto' or one of 'cpu', 'triton', 'reference'"
    ):
        ra.ring_attention(*torch.randn(3, 1, 4, 2, 4).unbind(0), backend="cuda")
