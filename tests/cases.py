"""The masks, layouts and inputs that the tests of the core share."""

import torch

import ringattn as ra
from ringattn.layout import Layout
from ringattn.masks import Mask

SEQLEN = 17


def masks(n: int = SEQLEN) -> dict[str, Mask]:
    """One mask or more of every kind, and compositions, for a sequence of `n` >= 12 tokens."""
    rows = torch.arange(n)
    gap = ra.Bounds(torch.where(rows % 4 == 1, 0, rows // 2), torch.where(rows % 4 == 1, 0, rows // 2 + 3))
    return {
        "full": ra.Full(),
        "causal": ra.Causal(),
        "window": ra.Window(3),
        "window of one": ra.Window(0),
        "window both sides": ra.Window(2, 4),
        "window unbounded left": ra.Window(None, 2),
        "documents": ra.Documents((0, 3, 3, 10, n)),
        "documents not causal": ra.Documents((0, 5, n), causal=False),
        "chunked": ra.Chunked(5),
        "chunked with offset": ra.Chunked(5, 2),
        "prefix": ra.PrefixLM(6),
        "spans": ra.Spans(((2, 5), (9, 12))),
        "bounds": ra.Bounds(rows // 2, rows + 2),
        "bounds with rows that see nothing": gap,
        "bounds that see nothing": ra.Bounds(rows, rows),
        "rows": ra.Rows(ra.Causal(), ra.Window(2)),
        "and": ra.Documents((0, 7, n)) & ra.Window(4, 1),
        "or": ra.Causal() & (ra.Window(2) | ra.PrefixLM(3)),
        "or of three": ra.Window(1) | ra.Chunked(4) | ra.Bounds(rows // 3 * 2, rows // 3 * 3),
        "or with gaps": gap | ra.Window(1),
        "rows of compositions": ra.Rows(ra.Window(1) | ra.PrefixLM(2), ra.Full()) & ra.Causal(),
    }


def layouts(n: int = SEQLEN) -> dict[str, Layout]:
    """Every named layout, and a layout value."""
    return {**{name: name for name in ra.layouts()}, "per_document": ra.per_document((0, 3, 10, n))}
