"""Block kernels: the contract that every backend keeps, and the registry of backends.

A backend folds one rectangle (query rows x key rows) at a time into tensors that the scheduler owns. It knows nothing of
ranks, layouts or masks: what a row may see is two row indices, `lo` and `hi`, into the keys it is given.
"""

import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Backend", "Bounds", "Grads", "Options", "Request", "State", "backends", "choose", "state_dtype"]


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a running softmax for inputs of `dtype`: fp64 for fp64, fp32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclasses.dataclass(frozen=True)
class Options:
    """The numbers of one attention call that a kernel needs, the same for every block of it."""

    softmax_scale: float
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap), after scaling
    dropout_p: float = 0.0
    seed: int = 0  # 64 bits; the key of Philox
    head_offset: int = 0  # global index of query head 0, for dropout under tensor parallelism


@dataclasses.dataclass(frozen=True)
class Request:
    """What a call asks of a backend, known before anything runs."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    softcap: bool
    sinks: bool
    dropout: bool


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What each query row of a block sees: row q sees key row k iff `lo[q] <= k < hi[q]`.

    `lo`, `hi`: int32 `[S]`, or `[B, S]` where batch rows differ; a row that sees nothing has `lo = T`, `hi = 0`.
    `q_pos` int32 `[S]`, `k_pos` int32 `[T]`: global positions, increasing; only dropout reads them.
    `is_full`: every row sees every key.
    """

    lo: Tensor
    hi: Tensor
    q_pos: Tensor
    k_pos: Tensor
    is_full: bool


@dataclasses.dataclass(frozen=True)
class State:
    """The running softmax of some query rows (views of the scheduler's buffers), and where the result goes.

    `acc` `[B, S, H, Dv]`, `m` and `l` `[B, H, S]` in `state_dtype`; `out` `[B, S, H, Dv]` in q's dtype, `lse` `[B, H, S]`.
    Invariant: a row that has seen no key has `acc = 0`, `m = -inf`, `l = 0`.
    """

    acc: Tensor
    m: Tensor
    l: Tensor
    out: Tensor
    lse: Tensor

    def __getitem__(self, rows: slice) -> "State":
        """The state of some of the query rows."""
        return State(self.acc[:, rows], self.m[..., rows], self.l[..., rows], self.out[:, rows], self.lse[..., rows])


@dataclasses.dataclass(frozen=True)
class Grads:
    """Where a backward block adds its gradients, all in `state_dtype`: `dq` `[B, S, H, D]`, `dk` `[B, T, Hkv, D]`, `dv` `[B, T, Hkv, Dv]`.

    Without `dq`, or without both `dk` and `dv`, those are not computed; the others have the same bits.
    """

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None


class Backend(Protocol):
    """Block kernels. All tensors are views with any strides but a contiguous last dim; S, T and B may be 0."""

    name: str

    def supports(self, request: Request) -> str | None:
        """None where the backend serves the request, else the reason why not."""
        ...

    def anchor(self, device: torch.device) -> int:
        """Tiles of rows and of keys begin at multiples of this in a call, or may: what a row or key gets depends on no other tile.

        So calls cut there, that give a row the same keys in the same order, give it the same bits.
        """
        ...

    def forward(
        self,
        state: State,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bounds: Bounds,
        options: Options,
        *,
        sinks: Tensor | None,
        start: bool,
        finish: bool,
    ) -> None:
        """Fold the keys into the rows of `state`, in place.

        q `[B, S, H, D]`, k `[B, T, Hkv, D]`, v `[B, T, Hkv, Dv]`, sinks `[H]` (logits, read at the finish only).
        `start`: the contents of `state` are undefined; begin it. `finish`: write `state.out` (normalised, cast) and `state.lse`; the
        running state is undefined afterwards.
        """
        ...

    def delta(self, dout: Tensor, out: Tensor, dlse: Tensor) -> Tensor:
        """`rowsum(dout * out) - dlse` as `[B, H, S]` in `state_dtype`: what the gradient of every score subtracts."""
        ...

    def backward(
        self,
        grads: Grads,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        bounds: Bounds,
        options: Options,
    ) -> None:
        """Add this block's gradients into `grads`, in place; `lse` and `delta` are `[B, H, S]`, of the finished rows."""
        ...


@functools.cache
def backends() -> Mapping[str, Backend]:
    """The registry: every backend by name, in order of preference for `backend="auto"`.

    Example:
        >>> list(backends())
        ['cpu', 'triton', 'reference']
    """
    from ringattn.kernels.cpu import Cpu
    from ringattn.kernels.reference import Reference
    from ringattn.kernels.triton import Triton

    known: tuple[Backend, ...] = (Cpu(), Triton(), Reference())
    return types.MappingProxyType({backend.name: backend for backend in known})


def choose(name: str, request: Request) -> Backend:
    """The backend called `name`, or for `"auto"` the first that serves the request.

    Raises:
        ValueError: no backend has that name.
        NotImplementedError: the backend (or, for `"auto"`, every one) refuses the request; the message has each reason.
    """
    registry = backends()
    if name != "auto" and name not in registry:
        raise ValueError(
            f"ring_attention: backend is {name!r}; it must be 'auto' or one of {', '.join(map(repr, registry))}."
        )
    wanted = registry.values() if name == "auto" else (registry[name],)
    reasons = {backend.name: backend.supports(request) for backend in wanted}
    for backend_name, reason in reasons.items():
        if reason is None:
            return registry[backend_name]
    raise NotImplementedError(
        "ring_attention: no backend serves this call; " + "; ".join(f"{n}: {r}" for n, r in reasons.items()) + "."
    )
