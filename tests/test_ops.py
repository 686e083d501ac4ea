from unittest import mock

import torch

import ringattn as ra
from ringattn import handshake
from ringattn.kernels.reference import Reference
from ringattn.testing import virtual


def transposed(*shape):
    """A tensor whose last dim is not contiguous."""
    return torch.randn(*shape[:2], shape[3], shape[2]).transpose(2, 3)


def test_kernels_get_tensors_whose_last_dim_is_contiguous():
    q, k, v = (transposed(1, 6, 2, 4).requires_grad_() for _ in range(3))
    strides = {"forward": [], "backward": []}

    def spy(name):
        kernel = getattr(Reference, name)

        def call(self, state, *args, **kwargs):
            tensors = [t for t in args if isinstance(t, torch.Tensor) and t.dim() == 4]  # q, k, v and dout
            strides[name].append([t.stride(-1) for t in tensors])
            return kernel(self, state, *args, **kwargs)

        return mock.patch.object(Reference, name, call)

    with spy("forward"), spy("backward"):
        ra.ring_attention(q, k, v, backend="reference").backward(transposed(1, 6, 2, 4))
    assert strides == {"forward": [[1, 1, 1]], "backward": [[1, 1, 1, 1]]}


def test_ranks_are_compared_in_forward_and_not_again_in_backward():
    ring = virtual(2)
    x = torch.randn(1, 6, 2, 4, requires_grad=True)
    with mock.patch.object(handshake, "compare", wraps=handshake.compare) as compare:
        outs = ring.attention(*[ring.shard(x)] * 3)
        assert compare.call_count == 1
        ring.unshard(outs).sum().backward()
        assert compare.call_count == 1
