import pytest
import torch
import torch.distributed as dist

from ringattn.decode import decode_attention
from ringattn.testing import assert_matches
from tests import processes

B, S, H, HKV, D, DV, T = 2, 3, 4, 2, 8, 6, 11


def inputs(dtype=torch.float64):
    torch.manual_seed(0)
    q, k, v = torch.randn(B, S, H, D), torch.randn(3, B, T, HKV, D), torch.randn(3, B, T, HKV, DV)
    lo = torch.tensor([[0, 2, 3], [4, 4, 11]], dtype=torch.int32)
    hi = torch.tensor([[5, 6, 11], [4, 9, 0]], dtype=torch.int32)  # some rows see nothing
    return q.to(dtype), k.to(dtype), v.to(dtype), lo, hi


def dense(q, k, v, lo, hi, ranks, scale, softcap, sinks):
    """Over the keys of so many ranks, written out."""
    k, v = (torch.cat([*x[:ranks]], 1).repeat_interleave(H // HKV, 2).double() for x in (k, v))
    at = torch.arange(T)
    seen = torch.cat([(at >= lo[..., None]) & (at < hi[..., None])] * ranks, -1)[:, None]
    scores = torch.einsum("bshd,bthd->bhst", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[None, :, None, None].expand(B, H, S, 1)], -1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., : k.shape[1]]
    return torch.einsum("bhst,bthd->bshd", weights, v)


OPTIONS = [
    {"softmax_scale": None, "softcap": None, "sinks": None},
    {"softmax_scale": 0.3, "softcap": 2.0, "sinks": None},
    {"softmax_scale": 0.3, "softcap": None, "sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])},
]


def wanted(ranks, options, whole):
    return dense(*whole, ranks, options["softmax_scale"] or D**-0.5, options["softcap"], options["sinks"])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_one_rank(options, dtype, rtol):
    q, k, v, lo, hi = whole = inputs(dtype)
    found = decode_attention(q, k[0], v[0], lo, hi, **options)
    assert found.dtype == dtype
    assert_matches(found, wanted(1, options, whole), rtol=rtol)


def decode(rank, world_size, options):
    q, k, v, lo, hi = inputs()
    found = decode_attention(q, k[rank], v[rank], lo, hi, group=dist.group.WORLD, **options)
    empty = decode_attention(
        q, k[rank, :, : T * (rank == 1)], v[rank, :, : T * (rank == 1)], lo, hi * (rank == 1), group=dist.group.WORLD
    )
    return found, empty


@pytest.mark.parametrize("options", OPTIONS)
def test_the_keys_of_all_ranks_count(options):
    whole = inputs()
    q, k, v, lo, hi = whole
    results = processes.run(3, decode, options)
    for found, empty in results:
        assert_matches(found, wanted(3, options, whole), rtol=1e-12)
        assert_matches(empty, dense(q, k[1:], v[1:], lo, hi, 1, D**-0.5, None, None), rtol=1e-12)
        torch.testing.assert_close(found, results[0][0], rtol=0, atol=0)


def test_a_gradient_is_refused():
    q, k, v, lo, hi = inputs()
    with pytest.raises(NotImplementedError, match=r"a gradient is wanted; there is none\. Use torch\.no_grad\(\)\."):
        decode_attention(q.requires_grad_(), k[0], v[0], lo, hi)
