"""Who computes attention in the benches: the package's own kernels and ring, and what else there is.

Each takes tensors in the form that suits it best, made before the clock starts.
"""

import functools
import importlib
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import ringattn
from bench.harness import Case, Contender, Inputs, Run, dense_mask
from ringattn.kernels import Backend, Bounds, Grads, Options, Request, State, state_dtype
from ringattn.masks import Causal, Documents, Full, Mask, Window
from ringattn.plan import build_plan
from ringattn.testing import virtual

__all__ = ["aten_cpu", "autograd", "block_kernel", "flash_attn", "flex", "ring_of_one", "sdpa", "virtual_ring"]

# q, k, v in a contender's own form -> out in the same form, and lse where it has one
Attend = Callable[[list[Tensor], list[Tensor], list[Tensor]], tuple[list[Tensor], Tensor | None]]


class Form(NamedTuple):
    """How a contender wants its tensors: `split` from `[B, S, H, D]`, `join` back."""

    split: Callable[[Tensor], list[Tensor]]
    join: Callable[[list[Tensor]], Tensor]


ROWS_FIRST = Form(lambda x: [x], lambda xs: xs[0])
HEADS_FIRST = Form(lambda x: [x.transpose(1, 2).contiguous()], lambda xs: xs[0].transpose(1, 2))


def autograd(name: str, make: Callable[[Case], Attend], form: Form = ROWS_FIRST, is_peer: bool = True) -> Contender:
    """A contender out of a function that autograd differentiates; `make` builds the function for a case."""

    def prepare(inputs: Inputs) -> Run:
        attend = make(inputs.case)
        qs, ks, vs, douts = (form.split(x) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
        if inputs.case.direction == "forward":

            def forward() -> tuple[list[Tensor], Tensor | None]:
                with torch.no_grad():
                    return attend(qs, ks, vs)

            return Run(forward, lambda r: {"out": form.join(r[0])} | ({} if r[1] is None else {"lse": r[1]}))

        leaves = [[x.detach().requires_grad_() for x in xs] for xs in (qs, ks, vs)]
        outs, _ = attend(*leaves)

        def backward() -> tuple[Tensor, ...]:
            return torch.autograd.grad(outs, [x for xs in leaves for x in xs], douts, retain_graph=True)

        def read(grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
            n = len(qs)
            return {name: form.join(list(grads[i * n : (i + 1) * n])) for i, name in enumerate(("dq", "dk", "dv"))}

        return Run(backward, read)

    return Contender(name, prepare, is_peer)


# ---- the package's own


def block_kernel(name: str, backend: Backend) -> Contender:
    """The kernels of a backend alone, over the one block of a ring of one: the timed part plans and allocates nothing."""

    def prepare(inputs: Inputs) -> Run:
        case, q, k, v, dout = inputs.case, inputs.q, inputs.k, inputs.v, inputs.dout
        refusal = backend.supports(request(case, q.device))
        if refusal:
            raise NotImplementedError(refusal)
        (block,) = build_plan(case.mask, "contiguous", case.seqlen, 1, 0).hops[0].blocks
        positions = torch.arange(case.seqlen, dtype=torch.int32)
        bounds = Bounds(*(x.to(q.device) for x in (block.lo, block.hi, positions, positions)), block.is_full)
        options = Options(softmax_scale=case.head_dim**-0.5)
        wide = functools.partial(torch.zeros, dtype=state_dtype(q.dtype), device=q.device)
        m, l, lse, dlse = (wide(case.batch, case.heads, case.seqlen) for _ in range(4))
        state = State(wide(dout.shape), m, l, torch.empty_like(dout), lse)

        def forward() -> None:
            backend.forward(state, q, k, v, bounds, options, sinks=None, start=True, finish=True)

        if case.direction == "forward":
            return Run(forward, lambda _: {"out": state.out, "lse": state.lse})
        forward()
        grads = Grads(*(wide(x.shape) for x in (q, k, v)))

        def backward() -> None:
            delta = backend.delta(dout, state.out, dlse)
            backend.backward(grads, q, k, v, dout, state.lse, delta, bounds, options)

        # Every call adds to them: after the first they are the gradients.
        return Run(backward, lambda _: {x: getattr(grads, x).to(q.dtype) for x in ("dq", "dk", "dv")})

    return Contender(name, prepare, is_peer=False)


def request(case: Case, device: torch.device) -> Request:
    widths = (case.heads, case.kv_heads, case.head_dim, case.v_head_dim)
    return Request(device, case.dtype, *widths, softcap=False, sinks=False, dropout=False)


def ring_of_one(name: str, backend: str) -> Contender:
    """`ringattn.ring_attention` at world size 1: kernels, buffers, checks and plan, as a model calls them."""

    def make(case: Case) -> Attend:
        def attend(qs: list[Tensor], ks: list[Tensor], vs: list[Tensor]) -> tuple[list[Tensor], Tensor]:
            out, lse = ringattn.ring_attention(
                qs[0], ks[0], vs[0], mask=case.mask, layout="contiguous", backend=backend, return_lse=True
            )
            return [out], lse

        return attend

    return autograd(name, make, is_peer=False)


def virtual_ring(name: str, backend: str, world_size: int) -> Contender:
    """All ranks of a zigzag ring, one after the other on one device; the copies of its transport are timed too."""
    ring = virtual(world_size)

    def make(case: Case) -> Attend:
        return lambda qs, ks, vs: (ring.attention(qs, ks, vs, mask=case.mask, backend=backend), None)

    return autograd(name, make, Form(ring.shard, ring.unshard), is_peer=False)


# ---- PyTorch's


def sdpa(name: str, backend: SDPBackend) -> Contender:
    """`scaled_dot_product_attention` by one of its backends; masks other than full and causal enter as a dense bool mask."""

    def make(case: Case) -> Attend:
        is_causal = isinstance(case.mask, Causal)
        is_gqa = case.heads != case.kv_heads
        bias = functools.cache(
            lambda device: None if isinstance(case.mask, Full | Causal) else dense_mask(case, device)
        )

        def attend(qs: list[Tensor], ks: list[Tensor], vs: list[Tensor]) -> tuple[list[Tensor], None]:
            q, k, v = qs[0], ks[0], vs[0]
            with sdpa_kernel(backend):
                out = scaled_dot_product_attention(q, k, v, bias(q.device), is_causal=is_causal, enable_gqa=is_gqa)
            return [out], None

        return attend

    return autograd(name, make, HEADS_FIRST)


def aten_cpu(name: str) -> Contender:
    """The flash kernel behind `scaled_dot_product_attention` on CPUs, called by itself, since it then returns its lse."""

    def make(case: Case) -> Attend:
        is_causal = isinstance(case.mask, Causal)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        bias = None
        if not isinstance(case.mask, Full | Causal):
            seen = dense_mask(case, torch.device("cpu"))
            bias = torch.zeros(seen.shape, dtype=case.dtype).masked_fill_(seen.logical_not_(), -torch.inf)

        def attend(qs: list[Tensor], ks: list[Tensor], vs: list[Tensor]) -> tuple[list[Tensor], Tensor]:
            out, lse = kernel(qs[0], ks[0], vs[0], 0.0, is_causal, attn_mask=bias)
            return [out], lse

        return attend

    return autograd(name, make, HEADS_FIRST)


def flex(name: str) -> Contender:
    """`flex_attention`, compiled for the exact shapes, with a block mask made before the clock starts."""

    def make(case: Case) -> Attend:
        # A trace that failed, as that of backward on CPUs does, would leave all later cases uncompiled.
        torch._dynamo.reset()
        torch._functorch.config.donated_buffer = False  # the graph is kept between calls of backward
        torch._inductor.config.cpp.threads = torch.get_num_threads()
        compiled = torch.compile(flex_attention, dynamic=False)
        is_gqa = case.heads != case.kv_heads
        block_mask = functools.cache(lambda device: flex_block_mask(case, device))

        def attend(qs: list[Tensor], ks: list[Tensor], vs: list[Tensor]) -> tuple[list[Tensor], None]:
            q, k, v = qs[0], ks[0], vs[0]
            return [compiled(q, k, v, block_mask=block_mask(q.device), enable_gqa=is_gqa)], None

        return attend

    return autograd(name, make, HEADS_FIRST)


def flex_block_mask(case: Case, device: torch.device) -> Any:
    """The case's mask as flex_attention takes it; None for the full one."""
    if isinstance(case.mask, Full):
        return None
    # Uncompiled, it builds all pairs at once.
    create = torch.compile(create_block_mask) if device.type == "cuda" else create_block_mask
    return create(predicate(case.mask, case.seqlen, device), None, None, case.seqlen, case.seqlen, device=device)


def predicate(mask: Mask, seqlen: int, device: torch.device) -> Callable[[Any, Any, Any, Any], Any]:
    """The mask as a function of (batch row, head, query, key), the way a user of flex_attention writes it."""
    match mask:
        case Causal():
            return lambda b, h, q, k: q >= k
        case Window(int(left), 0):
            return lambda b, h, q, k: (q >= k) & (q - k <= left)
        case Documents(cu_seqlens, True):
            token = torch.arange(seqlen, device=device)
            document = torch.searchsorted(torch.tensor(cu_seqlens, device=device), token, right=True)
            return lambda b, h, q, k: (q >= k) & (document[q] == document[k])
    raise NotImplementedError(f"no predicate for {mask!r}")


# ---- FlashAttention


def flash_attn(name: str, module_name: str) -> Contender:
    """The package `flash_attn` (FlashAttention-2) or `flash_attn_interface` (FlashAttention-3), where it is installed."""

    def make(case: Case) -> Attend:
        module = importlib.import_module(module_name)

        def attend(qs: list[Tensor], ks: list[Tensor], vs: list[Tensor]) -> tuple[list[Tensor], None]:
            q, k, v = qs[0], ks[0], vs[0]
            match case.mask:
                case Full() | Causal():
                    out = module.flash_attn_func(q, k, v, causal=isinstance(case.mask, Causal))
                case Window(int(left), 0):
                    out = module.flash_attn_func(q, k, v, causal=True, window_size=(left, 0))
                case Documents(cu_seqlens, True):
                    out = packed(module, q, k, v, cu_seqlens)
                case mask:
                    raise NotImplementedError(f"no call for {mask!r}")
            return [out[0] if isinstance(out, tuple) else out], None

        return attend

    return autograd(name, make)


@functools.cache
def all_cu_seqlens(cu_seqlens: tuple[int, ...], batch: int, device: torch.device) -> Tensor:
    """The bounds of the documents of all batch rows laid end to end: int32 `[batch * documents + 1]`."""
    seqlen = cu_seqlens[-1]
    starts = [row * seqlen + n for row in range(batch) for n in cu_seqlens[:-1]]
    return torch.tensor([*starts, batch * seqlen], dtype=torch.int32, device=device)


def packed(module: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: tuple[int, ...]) -> Tensor:
    bounds = all_cu_seqlens(cu_seqlens, q.shape[0], q.device)
    longest = max(b - a for a, b in itertools.pairwise(cu_seqlens))
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    out = module.flash_attn_varlen_func(q, k, v, bounds, bounds, longest, longest, causal=True)
    return (out[0] if isinstance(out, tuple) else out).view(-1, cu_seqlens[-1], *q.shape[1:2], v.shape[2])
