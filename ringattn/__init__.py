"""Exact attention over a sequence split across ranks.

Each rank holds some rows of the sequence and folds every key/value block that they may see into their running softmax, while the
next block is already travelling. Start at `ring_attention`; for Hugging Face models `import ringattn.hf`.
"""

from ringattn.api import ring_attention, shard, unshard
from ringattn.balance import balanced, choose_layout
from ringattn.kernels import backends
from ringattn.layout import layouts, per_document
from ringattn.masks import Bounds, Causal, Chunked, Documents, Full, Mask, PrefixLM, Rows, Spans, Window
from ringattn.merge import merge
from ringattn.network import Network
from ringattn.plan import Cost, Plan, build_plan, cost
from ringattn.roofline import Roofline, Sizes, critical_path, roofline
from ringattn.timeline import Span, Timeline, trace

__version__ = "0.1.0"

__all__ = [
    "Bounds",
    "Causal",
    "Chunked",
    "Cost",
    "Documents",
    "Full",
    "Mask",
    "Network",
    "Plan",
    "PrefixLM",
    "Roofline",
    "Rows",
    "Sizes",
    "Span",
    "Spans",
    "Timeline",
    "Window",
    "__version__",
    "backends",
    "balanced",
    "build_plan",
    "choose_layout",
    "cost",
    "critical_path",
    "layouts",
    "merge",
    "per_document",
    "ring_attention",
    "roofline",
    "shard",
    "trace",
    "unshard",
]
