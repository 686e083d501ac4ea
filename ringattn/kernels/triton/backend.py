"""The Triton backend; see `ringattn.kernels.Backend` for what each method does."""

import functools
import importlib.util

import torch
from torch import Tensor

from ringattn.kernels import Bounds, Grads, Options, Request, State
from ringattn.kernels.triton import tiles
from ringattn.kernels.triton.tiles import Tile

__all__ = ["Triton", "architecture", "has_descriptors"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_HEAD_DIM = 256


def _is_interpreted() -> bool:
    import triton

    return triton.knobs.runtime.interpret


@functools.cache
def architecture(device: torch.device) -> str:
    """What `tiles` calls a GPU: "sm_90", "gfx942" and so on; "interpreter" where kernels are interpreted."""
    if _is_interpreted():
        return "interpreter"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def _tile(kernel: str, q: Tensor, v: Tensor) -> Tile:
    arch = architecture(q.device)
    tile = tiles.choose(kernel, arch, q.shape[3], v.shape[3], q.dtype)
    assert tile is not None, f"no tile of {kernel} for {arch}, {q.dtype}, head dims {q.shape[3]} and {v.shape[3]}"
    return tile


def _forward_tile(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tile:
    key = tiles.serving(tiles.SPECIALIZED, architecture(q.device), q.shape[3], v.shape[3], q.dtype)
    if key and has_descriptors(tiles.SPECIALIZED[key], q, k, v, options):
        return tiles.SPECIALIZED[key]
    return _tile("forward", q, v)


def has_descriptors(tile: Tile, q: Tensor, k: Tensor, v: Tensor, options: Options) -> bool:
    """Whether a warp-specialised `tile` serves these tensors, which it reads by tensor descriptors.

    Rows of a head must start at multiples of 16 bytes (CUDA driver API, cuTensorMapEncodeTiled). Dropout reads positions,
    which have no descriptor; and rows or keys that do not fill a tile are faster without.
    """
    fills = q.shape[1] >= tile.block_m and k.shape[1] >= tile.block_n
    is_aligned = all(
        n % 16 == 0 for x in (q, k, v) for n in (x.data_ptr(), *(x.itemsize * stride for stride in x.stride()[:3]))
    )
    return fills and is_aligned and min(x.stride(1) for x in (q, k, v)) > 0 and not options.dropout_p


@functools.cache
def _repair_interpreter() -> None:
    """Kernels are interpreted or compiled as things are when they are imported, and that is right after this."""
    if _is_interpreted():
        from ringattn.kernels.triton.interpreter import repair

        repair()


class Triton:
    """Block kernels in Triton, for NVIDIA and AMD GPUs, and for CPU tensors where Triton is interpreted."""

    name = "triton"

    def supports(self, request: Request) -> str | None:
        """None, or the reason why the request is not served, and what serves it."""
        dims = (request.head_dim, request.v_head_dim)
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed; install it, or use 'reference'"
        if request.dtype not in DTYPES:
            return f"dtype is {request.dtype}; one of {', '.join(map(str, DTYPES))} is required. Use 'reference'"
        if max(dims) > LARGEST_HEAD_DIM:
            return f"head dims are {dims[0]} and {dims[1]}; at most {LARGEST_HEAD_DIM} is required. Use 'reference'"
        if _is_interpreted():
            return None
        if request.device.type != "cuda":
            return f"device is {request.device}; a GPU is required, or TRITON_INTERPRET=1 for tests. Use 'reference'"
        arch = architecture(request.device)
        if tiles.choose("forward", arch, *dims, request.dtype) is None:
            return f"the GPU is {arch}, for which there are no tiles; use 'reference'"
        return None

    def anchor(self, device: torch.device) -> int:
        """A multiple of both sides of every tile of `tiles.py`."""
        return 128

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
        """Fold the keys into the rows of `state`, in place; with `finish` only `state.out` and `state.lse` are written."""
        if q.shape[0] == 0 or q.shape[1] == 0:
            return
        _repair_interpreter()
        from ringattn.kernels.triton.forward import forward

        with torch.cuda.device_of(q):
            forward(
                _forward_tile(q, k, v, options),
                state,
                q,
                k,
                v,
                bounds,
                options,
                sinks=sinks,
                start=start,
                finish=finish,
            )

    def delta(self, dout: Tensor, out: Tensor, dlse: Tensor) -> Tensor:
        """`rowsum(dout * out) - dlse` as `[B, H, S]`, fp32."""
        _repair_interpreter()
        from ringattn.kernels.triton.backward import delta

        with torch.cuda.device_of(out):
            return delta(dout, out, dlse)

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
        """Add this block's gradients into `grads`, in place."""
        if q.shape[0] == 0 or q.shape[1] == 0 or k.shape[1] == 0:
            return
        _repair_interpreter()
        from ringattn.kernels.triton.backward import backward

        with torch.cuda.device_of(q):
            backward(_tile("dkv", q, v), _tile("dq", q, v), grads, q, k, v, dout, lse, delta, bounds, options)
