"""The oracle and the comparison: what they accept and, above all, what they object to."""

import pytest
import torch

from ringattn import masks
from ringattn.kernels import Options
from ringattn.kernels.philox import keep_mask
from ringattn.testing import assert_matches, naive_attention, visible

PICTURES = {  # rows are queries, columns keys
    "full": (masks.Full(), "111 111 111"),
    "causal": (masks.Causal(), "100 110 111"),
    "window": (masks.Window(1), "1000 1100 0110 0011"),
    "window, both sides": (masks.Window(1, 1), "1100 1110 0111 0011"),
    "window, open": (masks.Window(None, 1), "110 111 111"),
    "window, open to the right": (masks.Window(0, None), "111 011 001"),
    "documents": (masks.Documents((0, 2, 2, 5)), "10000 11000 00100 00110 00111"),
    "documents, not causal": (masks.Documents((0, 2, 3), causal=False), "110 110 001"),
    "chunked": (masks.Chunked(2), "1000 1100 0010 0011"),
    "chunked, offset": (masks.Chunked(2, 1), "1000 0100 0110 0001"),
    "prefix": (masks.PrefixLM(2), "1100 1100 1110 1111"),
    "spans": (masks.Spans(((1, 3),)), "1000 1110 1110 1111"),
    "bounds": (masks.Bounds(torch.tensor([0, 1, 1]), torch.tensor([2, 1, 3])), "110 000 011"),
    "and": (masks.Causal() & masks.Window(0, None), "100 010 001"),
    "or": (masks.Window(0) | masks.PrefixLM(1), "100 110 111"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_visible(name):
    mask, picture = PICTURES[name]
    rows = picture.split()
    assert visible(mask, len(rows)).int().tolist() == [[int(x) for x in row] for row in rows]


def test_visible_by_batch_row():
    seen = visible(masks.Rows(masks.Full(), masks.Causal()) & masks.Window(1, 1), 3)
    assert seen.int().tolist() == [[[1, 1, 0], [1, 1, 1], [0, 1, 1]], [[1, 0, 0], [1, 1, 0], [0, 1, 1]]]
    lo, hi = torch.tensor([[0, 0], [1, 1]]), torch.tensor([[1, 2], [2, 1]])
    assert visible(masks.Bounds(lo, hi), 2).int().tolist() == [[[1, 0], [1, 1]], [[0, 1], [0, 0]]]


def test_every_kind_of_mask_is_known():
    pictured = {type(mask) for mask, _ in PICTURES.values()} | {masks.Rows}
    assert pictured == set(masks.kinds()) - {kind for kind in masks.kinds() if kind.__name__.startswith("_")}


def test_unknown_mask():
    with pytest.raises(ValueError, match=r"mask is 3, of an unknown kind; pass one of the masks of ringattn.masks"):
        visible(3, 4)


def inputs(heads=4, kv_heads=2, n=12, v_width=6):
    return [torch.randn(2, n, h, d, dtype=torch.float64) for h, d in ((heads, 8), (kv_heads, 8), (kv_heads, v_width))]


def test_naive_attention_is_torchs():
    q, k, v = inputs()
    seen = visible(masks.Window(4), 12)
    got = naive_attention(q, k, v, masks.Window(4), softmax_scale=0.7)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=0.7, enable_gqa=True).transpose(1, 2)
    assert_matches(got, want, rtol=1e-14, name="out")


def test_naive_attention_by_its_definition():
    q, k, v = inputs()
    sinks = torch.randn(4, dtype=torch.float64)
    out, lse = naive_attention(q, k, v, masks.Causal(), softcap=1.5, sinks=sinks, return_lse=True)
    for b, h, i in [(0, 0, 0), (1, 3, 11), (1, 2, 5)]:
        scores = [1.5 * torch.tanh(q[b, i, h] @ k[b, j, h // 2] * 8**-0.5 / 1.5) for j in range(i + 1)]
        total = sum(x.exp() for x in scores) + sinks[h].exp()
        assert_matches(lse[b, h, i], total.log(), rtol=1e-14, name="lse")
        value = sum(x.exp() / total * v[b, j, h // 2] for j, x in enumerate(scores))
        assert_matches(out[b, i, h], value, rtol=1e-14, name="out")


@pytest.mark.parametrize("with_sinks", [False, True])
def test_naive_attention_of_rows_without_keys(with_sinks):
    q, k, v = (x.requires_grad_() for x in inputs())
    sinks = torch.randn(4, dtype=torch.float64) if with_sinks else None
    seen = visible(masks.Causal(), 12)
    seen[3] = False
    out, lse = naive_attention(q, k, v, seen, sinks=sinks, return_lse=True)
    assert_matches(out[:, 3], torch.zeros(2, 4, 6, dtype=torch.float64), name="out")
    want = sinks.expand(2, 4) if with_sinks else torch.full((2, 4), -torch.inf, dtype=torch.float64)
    assert_matches(lse[:, :, 3], want, rtol=1e-15, name="lse")
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (torch.randn_like(out), torch.randn_like(lse)))
    assert_matches(dq[:, 3], torch.zeros(2, 4, 8, dtype=torch.float64), name="dq")
    assert all(x.isfinite().all() for x in (dq, dk, dv))


def test_both_philoxes_agree():
    q, k, _ = inputs(n=40)
    value = torch.eye(40, dtype=torch.float64)[None, :, None].expand(2, 40, 2, 40)
    out = naive_attention(q, k, value, masks.Full(), dropout_p=0.4, seed=-5, head_offset=6)
    plain = naive_attention(q, k, value, masks.Full())
    position = torch.arange(40)
    keep = keep_mask(Options(1.0, dropout_p=0.4, seed=-5, head_offset=6), position, position, 2, 4, torch.device("cpu"))
    assert_matches(out, plain * keep.transpose(1, 2) / 0.6, rtol=1e-15, name="weights")


def test_dropout_needs_a_seed():
    with pytest.raises(ValueError, match=r"dropout_p is 0.1 and seed is None; dropout needs a seed. Pass seed=0"):
        naive_attention(*inputs(), masks.Causal(), dropout_p=0.1)


WANT = torch.linspace(-3, 3, 24, dtype=torch.float64).view(4, 6)


def spoiled(index, value, like=WANT):
    x = like.clone()
    x[index] = value
    return x


@pytest.mark.parametrize(
    ("got", "want", "arguments", "message"),
    [
        (spoiled((2, 1), 9.0), WANT, {"rtol": 1e-3}, r"x: max error .* at \(2, 1\), the bound is 3.000e-03"),
        (WANT + 1e-15, WANT, {}, r"x: max error"),
        (spoiled((2, 1), torch.nan), WANT, {"rtol": 1.0}, r"x: NaN differs in 1 of 24 places, first at \(2, 1\)"),
        (WANT, spoiled((0, 0), torch.nan), {"rtol": 1.0}, r"x: NaN differs"),
        (spoiled((2, 1), torch.inf), WANT, {"rtol": 1.0}, r"x: \+inf differs"),
        (spoiled((2, 1), torch.inf), spoiled((2, 1), -torch.inf), {"rtol": 1.0}, r"x: \+inf differs"),
        (WANT, spoiled((2, 1), -torch.inf), {"rtol": 1.0}, r"x: -inf differs"),
        (WANT[:3], WANT, {"rtol": 1.0}, r"x: shape is \(3, 6\), \(4, 6\) is wanted"),
        (WANT, WANT.float(), {"rtol": 1.0}, r"x: dtype is torch.float64, torch.float32 or a lower"),
        (WANT.int(), WANT, {"rtol": 1.0}, r"x: dtype is torch.int32"),
        (WANT.float(), WANT, {"twin": spoiled((0, 0), torch.nan).float()}, r"x: the twin is not finite"),
        (WANT.float(), WANT, {"twin": WANT[:3]}, r"x: the twin's shape is \(3, 6\)"),
        (WANT.float() + 0.1, WANT, {"twin": WANT.float()}, r"x: max error"),
        (WANT.float() + 0.1, WANT, {"twin": WANT.float() + 0.04}, r"x: max error 1.0"),
        (WANT.float() + 0.1, WANT, {"twin": spoiled((0, 0), -2.94).float()}, r"x: max error 1.0.*RMS error 1.0"),
    ],
)
def test_assert_matches_objects(got, want, arguments, message):
    with pytest.raises(AssertionError, match=message):
        assert_matches(got, want, name="x", **arguments)


@pytest.mark.parametrize(
    ("got", "want", "arguments"),
    [
        (WANT, WANT, {}),
        (spoiled((2, 1), -torch.inf), spoiled((2, 1), -torch.inf), {}),
        (spoiled((2, 1), torch.nan), spoiled((2, 1), torch.nan), {}),
        (WANT + 2.9e-3, WANT, {"rtol": 1e-3}),
        (WANT.bfloat16(), WANT, {"twin": WANT.bfloat16()}),
        (WANT.float() + 0.1, WANT, {"twin": WANT.float() + 0.06}),
        (WANT[:0], WANT[:0], {}),
    ],
)
def test_assert_matches_accepts(got, want, arguments):
    assert_matches(got, want, **arguments)


def test_two_bounds():
    with pytest.raises(ValueError, match=r"twin and rtol=0.1 are both given; only one sets the bound. Drop one"):
        assert_matches(WANT, WANT, WANT, rtol=0.1)
