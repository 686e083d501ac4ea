"""What model families do that no keyword of an attention call says: data, by class.

A family needs an entry only where it deviates. Everything else is found by the trial of `attach`.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["QUERY_SCALES", "RECURRENT"]

# Classes of modules that carry something from token to token outside of attention. The trial finds them too; this is for
# the sake of the message.
RECURRENT = re.compile(
    "Mamba|SSM|R[Ww][Kk][Vv]|Recurrent|Rglru|LSTM|LinearAttention|DeltaNet|Lightning|ShortConv|Retention|Kda|Indexer"
)


def _llama4(module: Any, query: Tensor, places: Tensor) -> Tensor:
    """Llama 4 scales queries of layers without RoPE by their place, which it takes to be 0, 1, ... on every rank.

    The factor is at least 1, so that it can be taken back: query `[B, H, S, D]`, places int64 `[B or 1, S]`.
    """
    if not module.attn_temperature_tuning or module.use_rope:
        return query

    def scale(place: Tensor) -> Tensor:
        return torch.log1p(torch.floor((place.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0

    factor = scale(places) / scale(torch.arange(places.shape[1], device=places.device))
    return (query * factor[:, None, :, None]).to(query.dtype)


# (module, query [B, H, S, D], places of the rows in their documents [B or 1, S]) -> query, by the class of an attention module.
QUERY_SCALES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {"Llama4TextAttention": _llama4}
