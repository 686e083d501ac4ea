"""The attention function that transformers calls, and what it is told."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import ringattn
from ringattn.decode import decode_attention
from ringattn.hf.families import QUERY_SCALES
from ringattn.hf.loss import LossParts
from ringattn.hf.pattern import Asked, Pattern, one_process
from ringattn.layout import Layout
from ringattn.masks import Mask

__all__ = ["ATTACHED", "FIRST", "INDEX", "NAME", "Decode", "Group", "RingContext", "Seen", "attention", "mixed", "text"]

NAME = "ringattn"
ATTACHED = "_ringattn_attached"  # on every module of an attached model: its attention calls must be told
FIRST = "_ringattn_first"  # on the first attention module: ranks compare their arguments there, once for each forward
INDEX = "_ringattn_index"  # on an attention module: its number, which keeps the dropout of layers apart

# Keyword arguments that reach an attention call and that the pre-hook has dealt with for the whole batch.
HANDLED = (
    *("position_ids", "labels", "shift_labels", "num_items_in_batch"),
    *("output_hidden_states", "output_router_logits", "return_dict"),
    "deterministic",  # two runs of one setting give the same bits
)
# These may reach it too, and are refused unless they have this value.
OFF = {"use_cache": False, "output_attentions": False, "logits_to_keep": 0}
CACHED = ("use_cache", "logits_to_keep")  # with a cache the pre-hook has dealt with these too

Group = dist.ProcessGroup | DeviceMesh | None


@dataclasses.dataclass(frozen=True)
class Seen:
    """One attention call of a model, as the trial of `attach` saw it."""

    module: nn.Module
    pattern: Pattern
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    softcap: float | None
    has_sinks: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Decode:
    """What new tokens, which every rank has, see of this rank's cache: `bounds(pattern, keys) -> (lo, hi)`, int32 `[B or 1, S]`."""

    bounds: Callable[[Pattern, int], tuple[Tensor, Tensor]]


@dataclasses.dataclass(frozen=True, eq=False)
class RingContext:
    """What every attention call of one forward is told.

    Attributes:
        group: the ranks that share the sequence; None is a ring of one.
        layout: which rows each rank holds.
        seqlen: global tokens.
        rows: rows of this rank. A rank without rows computes on one row that is not part of the sequence.
        masks: what rows see, by the pattern of a layer.
        backend: block kernels, by name.
        timeout: seconds that a hop may take, or None.
        is_outer: the batch was split by the causal LM, not by its decoder.
        places: int64 `[B or 1, S]`, the place of each row of this rank in its document.
        seed: of this forward's dropout, or None where there is none.
        loss: where `attach` and not the model makes the loss, what it is made of; else None.
        last: the largest position of the whole batch, if the model's RoPE depends on it.
        last_rank: with a cache, the rank that holds the last row of the prompt, whose logits all ranks return.
        decode: with a cache that holds a prompt, what its attention is; `seqlen` and `rows` count the new tokens then.
        seen: a list to which calls are added instead of computed: the trial of `attach`.
    """

    group: Group
    layout: Layout
    seqlen: int
    rows: int
    masks: dict[Pattern, Mask]
    backend: str
    timeout: float | None
    is_outer: bool
    places: Tensor
    seed: int | None = None
    loss: LossParts | None = None
    last: int | None = None
    last_rank: int | None = None
    decode: Decode | None = None
    seen: list[Seen] | None = None


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Asked | None = None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    ring: RingContext | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of query `[B, H, S, D]`, key `[B, Hkv, S, D]` and value `[B, Hkv, S, Dv]`, as `[B, S, H, Dv]`; no weights.

    In a model that `attach` has split, a ring; else plain attention in one process, where keys may outnumber queries.

    Raises:
        RuntimeError: the model is attached and does not hand `ring` down.
        NotImplementedError: an argument is given that is not honoured.
        ValueError: the rows are not this rank's.
    """
    pattern = _pattern(module, attention_mask, sliding_window, is_causal, query.shape[2])
    for name, extra in kwargs.items():
        if extra is None or name in HANDLED or (name == "use_cache" and ring is None):
            continue
        if name not in OFF:
            raise _refused(module, name, extra, "None or left out")
        if name in CACHED and ring is not None and (ring.decode is not None or ring.last_rank is not None):
            continue
        if not isinstance(extra, bool | int) or extra != OFF[name]:
            raise _refused(module, name, extra, f"{OFF[name]} or left out")
    options = {"softmax_scale": scaling, "softcap": softcap, "sinks": s_aux, "dropout_p": dropout}
    if ring is None:
        if getattr(module, ATTACHED, False):
            raise RuntimeError(
                f"{_who(module)}: the keyword argument ring is missing; call the attached model or its decoder, not a "
                "layer. A model that does not hand keyword arguments down to its attention is not supported."
            )
        return _alone(module, query, key, value, attention_mask, pattern, options), None
    if (rescale := QUERY_SCALES.get(type(module).__name__)) is not None:
        query = rescale(module, query, ring.places)
    if ring.decode is not None:
        if dropout:
            raise _refused(module, "dropout", dropout, "0.0 with a cache; call model.eval()")
        del options["dropout_p"]
        lo, hi = ring.decode.bounds(pattern, key.shape[2])
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        return decode_attention(q, k, v, lo, hi, group=ring.group, backend=ring.backend, **options), None
    for name, rows in (("query", query.shape[2]), ("key", key.shape[2]), ("value", value.shape[2])):
        if rows != max(ring.rows, 1):
            raise ValueError(
                f"{_who(module)}: {name} has {rows} rows and this rank {ring.rows} of {ring.seqlen}; they must agree."
            )
    if ring.seen is not None:
        return _note(module, query, key, value, pattern, softcap, s_aux, ring.seen), None
    if pattern not in ring.masks:
        good = ", ".join(map(str, ring.masks))
        raise _refused(module, "the pattern", str(pattern), f"one of those seen when the model was attached: {good}")
    if dropout:
        if ring.seed is None:
            raise _refused(module, "dropout", dropout, "0.0 unless config.attention_dropout (or the like) says so")
        options["seed"] = mixed(ring.seed, getattr(module, INDEX, 0))
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if ring.rows == 0:
        q, k, v = q[:, :0], k[:, :0], v[:, :0]
    out = ringattn.ring_attention(
        q,
        k,
        v,
        mask=ring.masks[pattern],
        layout=ring.layout,
        group=ring.group,
        seqlen=ring.seqlen,
        backend=ring.backend,
        timeout=ring.timeout,
        validate=getattr(module, FIRST, False),
        **options,
    )
    if ring.rows == 0:  # the row that is not part of the sequence, in the graph behind the ring
        out = torch.cat([out, out.new_zeros(out.shape[0], 1, *out.shape[2:])], dim=1)
    return out, None


def _pattern(
    module: nn.Module, asked: Tensor | Asked | None, sliding_window: int | None, is_causal: bool | None, rows: int
) -> Pattern:
    """What the layer sees: what its mask says, as in transformers' "sdpa", or else what its keywords say."""
    window = None if sliding_window is None else int(sliding_window) - 1
    if asked is None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        return Pattern(window, 0 if causal else window)
    if not isinstance(asked, Asked):
        raise _refused(module, "attention_mask", asked, "None or made by transformers.masking_utils")
    if asked.refused is not None:
        raise _refused(module, "the mask's part", asked.refused, "causal, bidirectional, sliding, chunked or packed")
    if window is not None and window != asked.pattern.left:
        raise _refused(module, "sliding_window", sliding_window, f"that of its mask, which is {asked.pattern}")
    return asked.pattern


def _alone(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    asked: Any,
    pattern: Pattern,
    options: dict[str, Any],
) -> Tensor:
    """One process: shorter queries or keys are filled up with rows that see, and keys that are seen by, nothing."""
    rows, keys = query.shape[2], key.shape[2]
    if options["dropout_p"]:
        options["seed"] = mixed(int(torch.randint(2**62, (), device="cpu")), 0)
    try:
        mask, first = one_process(pattern, asked, rows, keys)
    except NotImplementedError as error:
        raise NotImplementedError(f"{_who(module)}: {error}") from None
    n = max(rows, keys)
    query = nn.functional.pad(query, (0, 0, first, n - rows - first))
    key, value = (nn.functional.pad(x, (0, 0, 0, n - keys)) for x in (key, value))
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    out = ringattn.ring_attention(q, k, v, mask=mask, layout="contiguous", **options)
    return out[:, first : first + rows]


def _note(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    softcap: float | None,
    sinks: Tensor | None,
    seen: list[Seen],
) -> Tensor:
    """Note a call; what is returned depends on all of a row's query, key and value, and on no other row."""
    (_, heads, _, head_dim), (kv_heads, value_dim) = query.shape, (key.shape[1], value.shape[-1])
    seen.append(Seen(module, pattern, heads, kv_heads, head_dim, value_dim, softcap, sinks is not None))
    k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (key, value))
    return (v * (1 + torch.tanh((query * k).mean(-1, keepdim=True)))).transpose(1, 2).contiguous()


def mixed(seed: int, index: int) -> int:
    """A seed for each layer: the finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = (seed + 0x9E3779B97F4A7C15 * (index + 1)) % 2**64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return (x ^ (x >> 31)) >> 1


def text(value: Any) -> str:
    """A value in an error message: itself if short, else what it is."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return repr(value) if isinstance(value, bool | int | float | str | None) else f"a {type(value).__name__}"


def _who(module: nn.Module) -> str:
    return f"ringattn.hf attention in {type(module).__name__} {getattr(module, 'layer_idx', '?')}"


def _refused(module: nn.Module, name: str, value: Any, good: str) -> NotImplementedError:
    return NotImplementedError(f"{_who(module)}: {name} is {text(value)}; it must be {good}.")
