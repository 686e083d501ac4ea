"""Merging partial results over disjoint key sets."""

import sys

import pytest
import torch

from ringattn.merge import merge
from ringattn.testing import assert_matches, naive_attention

merging = sys.modules["ringattn.merge"]  # the module: the package's name for it is the function


def problem(dtype=torch.float64):
    q, k, v = (torch.randn(2, n, h, 8).to(dtype) for n, h in ((9, 4), (20, 2), (20, 2)))
    owner = torch.randint(0, 3, (9, 20))
    owner[:, 0] = 3  # a key that nobody sees
    owner[4] = 3  # a row that sees no key at all
    owner[5] = 1  # and one that only one part serves
    return q, k, v, owner


def parts_of(q, k, v, owner):
    return [naive_attention(q, k, v, owner == i, return_lse=True) for i in range(3)]


def test_merge_is_attention_over_all_keys():
    q, k, v, owner = problem()
    out, lse = naive_attention(q, k, v, owner < 3, return_lse=True)
    got_out, got_lse = merge(*parts_of(q, k, v, owner))
    assert_matches(got_out, out, rtol=1e-14, name="out")
    assert_matches(got_lse, lse, rtol=1e-14, name="lse")


def test_gradients_are_those_of_attention_over_all_keys():
    q, k, v, owner = problem()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out, lse = naive_attention(*inputs, owner < 3, return_lse=True)
    upstream = torch.randn_like(out), torch.randn_like(lse).masked_fill(lse == -torch.inf, 0.0)
    want = torch.autograd.grad((out, lse), inputs, upstream)
    got = torch.autograd.grad(merge(*parts_of(*inputs, owner)), inputs, upstream)
    for name, g, w in zip(("dq", "dk", "dv"), got, want, strict=True):
        assert_matches(g, w, rtol=1e-13, name=name)


def test_gradients_are_zero_where_no_part_saw_a_key():
    parts = [
        (torch.zeros(1, 2, 1, 3, requires_grad=True), torch.full((1, 1, 2), -torch.inf, requires_grad=True))
        for _ in range(2)
    ]
    out, lse = merge(*parts)
    assert_matches(out, torch.zeros(1, 2, 1, 3), name="out")
    assert_matches(lse, torch.full((1, 1, 2), -torch.inf), name="lse")
    (out.sum() + lse.masked_fill(lse == -torch.inf, 0.0).sum() + (lse * 0).nan_to_num().sum()).backward()
    for x in (x for part in parts for x in part):
        assert_matches(x.grad, torch.zeros_like(x), name="gradient")


def test_upstream_at_empty_rows_does_not_reach_the_parts():
    lses = [torch.full((1, 1, 2), -torch.inf, requires_grad=True) for _ in range(2)]
    _, lse = merge(*((torch.zeros(1, 2, 1, 3), x) for x in lses))
    for gradient in torch.autograd.grad(lse, lses, torch.ones_like(lse)):
        assert_matches(gradient, torch.zeros(1, 1, 2), name="dlse")


@pytest.mark.parametrize("gap", [200.0, -200.0])
@pytest.mark.parametrize("level", [0.0, 1e4, -1e4])
def test_far_apart(gap, level):
    outs = [torch.randn(1, 2, 1, 3, requires_grad=True) for _ in range(2)]
    lses = [torch.full((1, 1, 2), x, requires_grad=True) for x in (level, level + gap)]
    out, lse = merge(*zip(outs, lses, strict=True))
    winner = int(gap > 0)
    assert_matches(out, outs[winner], name="out")
    assert_matches(lse, lses[winner], name="lse")
    for i, gradient in enumerate(torch.autograd.grad(lse.sum(), lses)):
        assert_matches(gradient, torch.full((1, 1, 2), float(i == winner)), name=f"gradient {i}")


def test_low_precision_twin():
    q, k, v, owner = problem(torch.bfloat16)
    want, _ = naive_attention(q.double(), k.double(), v.double(), owner < 3, return_lse=True)
    out, lse = merge(*((out, lse.float()) for out, lse in parts_of(q, k, v, owner)))
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert_matches(out, want, naive_attention(q, k, v, owner < 3), name="out")


def test_one_part_is_itself():
    out, lse = torch.randn(1, 4, 2, 3), torch.randn(1, 2, 4)
    got_out, got_lse = merge((out, lse))
    assert_matches(got_out, out, rtol=0, name="out")
    assert_matches(got_lse, lse, rtol=0, name="lse")


@pytest.mark.parametrize("shape", [(0, 4, 2, 3), (1, 0, 2, 3)])
def test_zero_sizes(shape):
    out, lse = merge(*[(torch.zeros(shape), torch.zeros(shape[0], shape[2], shape[1]))] * 2)
    assert (out.shape, lse.shape) == (shape, (shape[0], shape[2], shape[1]))


OUT, LSE = torch.zeros(1, 4, 2, 3), torch.zeros(1, 2, 4)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((), r"merge: parts has 0 entries; at least 1 is required. Pass"),
        (((OUT[0], LSE),), r"merge: parts\[0\] has out of shape \(4, 2, 3\); \[B, S, H, Dv\] is required"),
        (
            ((OUT, LSE), (OUT[:, :3], LSE)),
            r"parts\[1\] has out of shape \(1, 3, 2, 3\) and parts\[0\] \(1, 4, 2, 3\); all must agree",
        ),
        (((OUT, LSE.mT),), r"parts\[0\] has lse of shape \(1, 4, 2\); \[B, H, S\] = \(1, 2, 4\) is required"),
    ],
)
def test_wrong_parts(parts, message):
    with pytest.raises(ValueError, match=message):
        merge(*parts)


def low_problem(dtype, device):
    """Parts with rows that one, two or none of them have seen, strided, and upstream gradients."""
    outs = [torch.randn(2, 3, 5, 6).transpose(1, 2).to(device, dtype) for _ in range(3)]
    lses = [4 * torch.randn(2, 3, 5, device=device) for _ in range(3)]
    for i, lse in enumerate(lses):
        lse[:, :, 2] = -torch.inf
        lse[:, i, 1] = -torch.inf
        outs[i][lse.isneginf().transpose(1, 2)] = 0.0
    leaves = [x.requires_grad_() for x in (*outs, *lses)]
    dout, dlse = torch.randn(2, 5, 3, 6).to(device, dtype), torch.randn(2, 3, 5, device=device)
    dlse[:, :, 2] = torch.inf  # of rows that saw no key; reaches nothing
    return leaves, (dout, dlse)


def with_grads(leaves, upstream):
    out, lse = merge(*zip(leaves[:3], leaves[3:], strict=True))
    return (
        out,
        lse,
        *torch.autograd.grad((out, lse), leaves, [x.to(y.dtype) for x, y in zip(upstream, (out, lse), strict=True)]),
    )


@pytest.mark.interpreter
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_is_the_formula(dtype, monkeypatch):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    leaves, upstream = low_problem(dtype, device)
    exact = [x.detach().cpu().double().requires_grad_() for x in leaves]
    monkeypatch.setattr(merging, "_has_kernel", lambda *_: False)
    want = with_grads(exact, [x.cpu() for x in upstream])
    twin = with_grads(leaves, upstream)
    monkeypatch.setattr(merging, "_has_kernel", lambda *_: True)
    got = with_grads(leaves, upstream)
    assert [x.dtype for x in got] == [x.dtype for x in twin]
    for i, three in enumerate(zip(got, want, twin, strict=True)):
        assert_matches(*three, name=str(i))


@pytest.mark.interpreter
@pytest.mark.gpu
def test_the_kernels_operators_pass_opcheck():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    leaves, _ = low_problem(torch.float32, device)
    torch.library.opcheck(torch.ops.ringattn.merge.default, (leaves[:3], leaves[3:]))


@pytest.mark.gpu
def test_a_gpu_merges_by_the_kernel():
    leaves, _ = low_problem(torch.bfloat16, "cuda")
    assert merging._has_kernel(3, 6, leaves[0])
