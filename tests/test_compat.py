"""Shims with other systems' names: values and gradients on their shards, and refusals."""

import inspect
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ringattn as ra
from ringattn.compat import ring_flash_attn as compat
from ringattn.compat.context_parallel import context_parallel, context_parallel_unshard
from ringattn.testing import assert_matches, naive_attention
from tests import processes

H, HKV, D = 4, 2, 8


def inputs(n, batch=2):
    torch.manual_seed(0)
    return [torch.randn(batch, n, heads, D, dtype=torch.float64) for heads in (H, HKV, HKV, H)]


def oracle(whole, mask):
    """Out and the gradients of q, k and v in one process."""
    leaves = [x.detach().requires_grad_() for x in whole[:3]]
    out = naive_attention(*leaves, mask)
    return [out.detach(), *torch.autograd.grad(out, leaves, whole[3])]


def piece(x, dim, rank, world_size):
    return x.chunk(world_size, dim)[rank]


def two_pieces(x, dim, rank, world_size):
    pieces = x.chunk(2 * world_size, dim)
    return torch.cat([pieces[rank], pieces[2 * world_size - 1 - rank]], dim)


def stripe(x, dim, rank, world_size):
    return x.movedim(dim, 0)[rank::world_size].movedim(0, dim)


# What that package tells its users to give each rank, written without ringattn's layouts.
FAMILIES = {"ring": piece, "zigzag_ring": two_pieces, "stripe": stripe}


def call_forms(functions, leaves, dim, *args, **kwargs):
    """The function, and its packed forms where all have as many heads, which must agree."""
    q, k, v = leaves
    plain, kvpacked, qkvpacked = functions
    results = [plain(q, k, v, *args, **kwargs), kvpacked(q, torch.stack([k, v], dim), *args, **kwargs)]
    wide = [x.repeat_interleave(H // x.shape[-2], -2) for x in leaves]
    results.append(qkvpacked(torch.stack(wide, dim), *args, **kwargs))
    return results


def forms(name):
    return [getattr(compat, f"{name}{form}_func") for form in ("", "_kvpacked", "_qkvpacked")]


def attend_dense(rank, world_size, family, whole, kwargs):
    cut = FAMILIES[family]
    leaves = [cut(x, 1, rank, world_size).contiguous().requires_grad_() for x in whole[:3]]
    results = call_forms(forms(f"{family}_flash_attn"), leaves, 2, **kwargs)
    dout = cut(whole[3], 1, rank, world_size)
    return [[out.detach(), *torch.autograd.grad(out, leaves, dout)] for out in results]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("kwargs", "mask"),
    [
        ({"causal": True}, ra.Causal()),
        ({}, ra.Full()),
        ({"causal": True, "window_size": (3, 3)}, ra.Window(3)),
        ({"window_size": (2, -1)}, ra.Window(2, None)),
    ],
)
def test_dense_functions(family, world_size, kwargs, mask):
    whole = inputs(4 * 3 * world_size)
    want = oracle(whole, mask)
    for rank, results in enumerate(processes.run(world_size, attend_dense, family, whole, kwargs)):
        for found in results:
            for x, y in zip(found, want, strict=True):
                assert_matches(x, FAMILIES[family](y, 1, rank, world_size), rtol=1e-12)


def by_document(x, cu, cut, rank, world_size):
    """`x` `[N, ...]`: this rank's part of every document."""
    return torch.cat([cut(x[a:b], 0, rank, world_size) for a, b in itertools.pairwise(cu)])


def attend_varlen(rank, world_size, family, whole, cu, kwargs):
    leaves = [by_document(x[0], cu, FAMILIES[family], rank, world_size).requires_grad_() for x in whole[:3]]
    local = torch.tensor(cu, dtype=torch.int32) // world_size
    results = call_forms(forms(f"{family}_flash_attn_varlen"), leaves, 1, local, int(local.diff().max()), **kwargs)
    dout = by_document(whole[3][0], cu, FAMILIES[family], rank, world_size)
    return [[out.detach(), *torch.autograd.grad(out, leaves, dout)] for out in results]


@pytest.mark.parametrize("kwargs", [{"causal": True}, {"causal": True, "window_size": (2, 0)}, {}])
@pytest.mark.parametrize("family", ["ring", "zigzag_ring"])
def test_varlen_functions(family, kwargs):
    world_size, cu = 2, (0, 8, 12, 32)
    whole = inputs(cu[-1], batch=1)
    mask = ra.Documents(cu, causal=kwargs.get("causal", False))
    want = oracle(whole, mask & ra.Window(2, 0) if "window_size" in kwargs else mask)
    for rank, results in enumerate(processes.run(world_size, attend_varlen, family, whole, cu, kwargs)):
        for found in results:
            for x, y in zip(found, want, strict=True):
                assert_matches(x, by_document(y[0], cu, FAMILIES[family], rank, world_size), rtol=1e-12)


def attend_llama3(rank, world_size, whole, cu, causal):
    prepared = compat.llama3_flash_attn_prepare_cu_seqlens(torch.tensor(cu), causal, rank, world_size)
    leaves = [piece(x[0], 0, rank, world_size).contiguous().requires_grad_() for x in whole[:3]]
    cu_q, cu_k, max_q, max_k, k_slice = prepared
    args = (cu_q, cu_k, max_q, max_k, 1, k_slice)
    results = call_forms(forms("llama3_flash_attn_varlen"), leaves, 1, *args, causal=causal)
    dout = piece(whole[3][0], 0, rank, world_size)
    found = [[out.detach(), *torch.autograd.grad(out, leaves, dout)] for out in results]
    return found, (cu_q.tolist(), cu_k.tolist(), max_q, max_k, k_slice.start, k_slice.stop)


@pytest.mark.parametrize("causal", [True, False])
def test_llama3_functions(causal):
    cu = (0, 5, 17, 21, 24)
    whole = inputs(cu[-1], batch=1)
    want = oracle(whole, ra.Documents(cu, causal=causal))
    prepared = []
    for rank, (results, numbers) in enumerate(processes.run(3, attend_llama3, whole, cu, causal)):
        prepared.append(numbers)
        for found in results:
            for x, y in zip(found, want, strict=True):
                assert_matches(x, piece(y[0], 0, rank, 3), rtol=1e-12)
    # rank 1 has tokens 8 to 16 of the document at 5 to 17
    assert prepared[1] == ([0, 8], [0, 11], 8, 11, 5, 16) if causal else ([0, 8], [0, 12], 8, 12, 5, 17)
    assert prepared[0][:2] == ([0, 5, 8], [0, 5, 8] if causal else [0, 5, 17])


def test_one_process_needs_no_group():
    whole = inputs(7)
    out, lse, probs = compat.zigzag_ring_flash_attn_func(*whole[:3], causal=True, return_attn_probs=True)
    want, want_lse = ra.ring_attention(*whole[:3], return_lse=True)
    assert probs is None
    assert_matches(out, want, rtol=1e-12)
    assert_matches(lse, want_lse, rtol=1e-12)


def test_signatures_are_those_of_the_package():
    options = [
        "dropout_p",
        "softmax_scale",
        "causal",
        "window_size",
        "alibi_slopes",
        "deterministic",
        "return_attn_probs",
        "group",
    ]
    assert list(inspect.signature(compat.ring_flash_attn_func).parameters) == ["q", "k", "v", *options]
    varlen = list(inspect.signature(compat.zigzag_ring_flash_attn_varlen_func).parameters)
    assert varlen == ["q", "k", "v", "cu_seqlens", "max_seqlen", *options]
    assert len(compat.__all__) == 21
    for name in compat.__all__:
        assert getattr(compat, name).__name__ == name


def drop(rank, world_size, q):
    torch.manual_seed(rank)  # the ranks' own generators differ
    mine = stripe(q, 1, rank, world_size)
    return [ra.unshard(compat.stripe_flash_attn_func(mine, mine, mine, 0.5), "striped", dist.group.WORLD) for _ in "ab"]


def test_dropout_draws_one_seed_for_all_ranks():
    q = torch.randn(1, 8, 2, 4, dtype=torch.float64)
    torch.manual_seed(0)
    wants = [
        ra.ring_attention(q, q, q, mask=ra.Full(), dropout_p=0.5, seed=int(torch.randint(2**31, (1,)))) for _ in "ab"
    ]
    for found in processes.run(2, drop, q):
        for x, y in zip(found, wants, strict=True):
            assert_matches(x, y, rtol=1e-12)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda q: compat.ring_flash_attn_func(q, q, q, alibi_slopes=torch.ones(2)),
            NotImplementedError,
            r"ring_flash_attn_func: alibi_slopes is given; ringattn has no ALiBi bias\. Pass None\.",
        ),
        (
            lambda q: compat.zigzag_ring_flash_attn_varlen_func(q[0], q[0], q[0], torch.tensor([0, 3, 6]), 3),
            ValueError,
            r"a document has 3 tokens on each rank; it must be an even number, .* Pad documents",
        ),
        (
            lambda q: compat.llama3_flash_attn_varlen_func(q[0], q[0], q[0], torch.tensor([0, 6]), None, 6, 6, 1, None),
            ValueError,
            r"llama3_flash_attn_varlen_func: cu_seqlens_q tells this rank's documents only; .*prepare_cu_seqlens",
        ),
        (
            lambda q: compat.llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 7]), True, 0, 2),
            ValueError,
            r"the sequence has 7 tokens and the world size is 2; it must divide them\. Pad the sequence",
        ),
        (
            lambda q: compat.substitute_hf_flash_attn(None, 1),
            NotImplementedError,
            r"ringattn patches nothing; .*ringattn\.hf\.attach",
        ),
        (
            lambda q: compat.update_ring_flash_attn_params(None, None),
            NotImplementedError,
            r"finds documents by itself, .*ringattn\.hf\.attach",
        ),
    ],
)
def test_what_is_not_served_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.randn(1, 6, 2, 4))


# ---- torch's context_parallel -------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """Two layers of attention with positions, as a user of torch's context_parallel has it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed = torch.nn.Embedding(16, 16, dtype=torch.float64)
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(16, 32, dtype=torch.float64) for _ in range(2))

    def forward(self, tokens, positions, is_causal):
        x = self.embed(tokens) + positions
        for layer in self.qkv:
            q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in layer(x).split((16, 8, 8), -1))
            attention = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=is_causal, scale=0.7, enable_gqa=True
            )
            x = x + attention.transpose(1, 2).flatten(2)
        return x


def batch(n):
    torch.manual_seed(2)
    tokens, positions = torch.randint(16, (2, n)), torch.randn(1, n, 16, dtype=torch.float64)
    return tokens, positions, torch.randn(2, n, 16, dtype=torch.float64)


def train_in_context(rank, world_size, n, is_causal, backward_inside):
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    model, (tokens, positions, dout) = Model(), batch(n)
    before = tokens.clone()
    # what backward needs must not be restored before it
    kept = {dout} if backward_inside else {dout, tokens}
    with context_parallel(mesh, buffers=[tokens, positions, dout], buffer_seq_dims=[1, 1, 1], no_restore_buffers=kept):
        rows = tokens.shape[1]
        out = model(tokens, positions, is_causal)
        loss = (out * dout).sum()
        if backward_inside:
            loss.backward()
    if not backward_inside:
        loss.backward()
    grads = [p.grad for p in model.parameters()]
    for grad in grads:
        dist.all_reduce(grad)
    (whole,) = context_parallel_unshard(mesh, [out.detach()], [1], n)
    assert dout.shape[1] == rows
    assert before.equal(tokens) == backward_inside
    assert positions.equal(batch(n)[1])
    return whole, grads


@pytest.mark.parametrize(
    ("world_size", "n", "is_causal", "backward_inside"),
    [(2, 16, True, True), (2, 16, False, False), (3, 13, True, False)],
)
def test_context_parallel_trains_as_one_process(world_size, n, is_causal, backward_inside):
    model, (tokens, positions, dout) = Model(), batch(n)
    want = model(tokens, positions, is_causal)
    (want * dout).sum().backward()
    for out, grads in processes.run(world_size, train_in_context, n, is_causal, backward_inside):
        assert_matches(out, want.detach(), rtol=1e-12)
        for found, p in zip(grads, model.parameters(), strict=True):
            assert_matches(found, p.grad, rtol=1e-11)


def refuse_in_context(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    sdpa, q = torch.nn.functional.scaled_dot_product_attention, torch.randn(1, 2, 4, 8)
    calls = [
        lambda: sdpa(q, q, q, attn_mask=torch.ones(4, 4, dtype=torch.bool)),
        lambda: sdpa(q, q[:, :1], q[:, :1]),
        lambda: sdpa(q[0], q[0], q[0]),
    ]
    said = []
    for call in calls:
        with context_parallel(mesh):
            try:
                call()
            except (ValueError, NotImplementedError) as error:
                said.append(f"{type(error).__name__}: {error}")
    for arguments in (
        {"buffers": [q], "buffer_seq_dims": []},
        {"buffers": [q, q], "buffer_seq_dims": [2, 3]},
        {"no_restore_buffers": {q}},
    ):
        try:
            with context_parallel(mesh, **arguments):
                pass
        except ValueError as error:
            said.append(str(error))
    return said, sdpa(q, q, q).shape


def test_context_parallel_refuses_by_name_and_ends_with_its_block():
    for said, shape in processes.run(2, refuse_in_context):
        wanted = [
            "NotImplementedError: context_parallel: attn_mask is given, which no rank has whole; call ringattn.ring_attention with a mask",
            "ValueError: context_parallel: query has 2 heads and key 1; they must be equal without enable_gqa=True.",
            "ValueError: context_parallel: query has shape (2, 4, 8); it must be [B, H, S, D].",
            "context_parallel: 1 buffers and 0 buffer_seq_dims; there must be a dim for each buffer.",
            "context_parallel: buffers have lengths [4, 8]; all must be one sequence.",
            "context_parallel: no_restore_buffers has a tensor that is not in buffers; it must be a subset.",
        ]
        assert len(said) == len(wanted)
        for message, want in zip(said, wanted, strict=True):
            assert message.startswith(want)
        assert shape == (1, 2, 4, 8)
