"""Ring attention in the models of Hugging Face transformers.

Importing this package registers the attention and the mask function under the name "ringattn". A model loaded with
`attn_implementation="ringattn"` has plain attention in one process, with a cache too. `attach` makes it take the whole
batch on every rank of a group, compute on this rank's rows, and return this rank's rows; `check` says what each layer
does, or why it is refused.

Nothing is patched and nothing is global: a forward pre-hook makes all that needs the whole sequence (positions,
documents, padding, shifted labels) before it takes this rank's rows, and hands what attention needs to every layer as
one keyword argument, `ring`. Keyword arguments are captured by activation checkpointing, so a recomputed layer is told
the same thing.
"""

from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

import ringattn
from ringattn.hf.attention import NAME, Group, RingContext, attention
from ringattn.hf.check import check
from ringattn.hf.model import attach
from ringattn.hf.pattern import ask
from ringattn.layout import Layout

__all__ = ["RingContext", "attach", "check", "gather"]

AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, ask)


def gather(x: Tensor, group: Group, layout: Layout, seqlen: int, dim: int = 1) -> Tensor:
    """The whole of `x`, of which each rank of `group` holds its rows along `dim`.

    Logits `[B, S, V]` become `[B, N, V]`; `seqlen` is N, the global tokens. Differentiable, as `ringattn.unshard` is.
    """
    return ringattn.unshard(x, layout, group, dim=dim, seqlen=seqlen)
