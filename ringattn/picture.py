"""Pictures: of a plan (who computes which keys at which hop, and what travels), and of a timeline (who did what when)."""

from __future__ import annotations

from os import PathLike
from typing import Any

import numpy as np

from ringattn.layout import Layout, ranges
from ringattn.masks import Mask
from ringattn.plan import Plan, build_plan
from ringattn.timeline import Timeline, hop_name

__all__ = ["draw_schedule", "draw_timeline"]

INK, MUTED, LINE, EMPTY = "#0f172a", "#64748b", "#cbd5e1", "#f1f5f9"
HOP_COLOURS = ("#1e3a5f", "#2a9d8f", "#e9b44c", "#d1495b")  # between them for more hops
PIXELS = 1024  # of the attention matrix, each way


def draw_schedule(mask: Mask, layout: Layout, seqlen: int, world_size: int, path: str | PathLike[str]) -> None:
    """Draw the plans of all ranks into one PNG, from nothing but the plans.

    Left, the attention matrix in the order in which the ranks hold it: a row of squares is a rank's queries, a column
    of squares a rank's keys, and the colour of what is seen says at which hop it is computed. Right, a lane per rank:
    what it computes at each hop, and how many rows of K and V it sends meanwhile.

    `mask`: one that is the same for every batch row. `path`: the file, `.png` or what else matplotlib writes.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: the mask differs between batch rows, or no plan can be made.
    """
    if mask.batch is not None:
        raise ValueError(
            f"draw_schedule: mask is for a batch of {mask.batch}; it must be the same for every batch row."
        )
    new_figure = _figure("draw_schedule")
    plans = [build_plan(mask, layout, seqlen, world_size, rank) for rank in range(world_size)]
    offsets = [hop.offset for hop in plans[0].hops]
    colours = dict(zip(offsets, _colours(len(offsets)), strict=True))

    figure = new_figure(figsize=(14.2, 6.6), dpi=160, facecolor="white")
    figure.text(0.035, 0.945, _title(plans), fontsize=17, fontweight="bold", color=INK, va="center")
    figure.text(0.035, 0.893, _summary(plans), fontsize=11.5, color=MUTED, va="center")
    _draw_layout(figure.add_axes((0.075, 0.785, 0.355, 0.035)), plans)
    _draw_matrix(figure.add_axes((0.075, 0.045, 0.355, 0.678)), plans, colours)
    caption = "Bars: what a rank computes, in shares of the mean. Arrows: K and V that travel meanwhile"
    figure.text(0.5, 0.829, caption, fontsize=10.5, color=MUTED)
    _draw_lanes(figure.add_axes((0.5, 0.045, 0.475, 0.678)), plans, colours)
    figure.savefig(path)


def _figure(who: str) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{who}: matplotlib is not installed; pip install ringattn[bench]") from error
    return Figure


def draw_timeline(timeline: Timeline, path: str | PathLike[str], title: str = "Timeline") -> None:
    """Draw a timeline into one PNG: a lane per rank with what it computes and waits for, and under it the messages it sends.

    Messages are there where the network is simulated. `path`: the file, `.png` or what else matplotlib writes.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: there is nothing in the timeline.
    """
    from_figure = _figure("draw_timeline")
    spans = timeline.spans
    if not spans:
        raise ValueError("draw_timeline: the timeline is empty; make an attention call where it records.")
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    ranks = sorted({span.rank for span in spans})
    offsets = sorted({abs(span.offset) for span in spans})
    colours = dict(zip(offsets, _colours(len(offsets)), strict=True))
    has_transfers = any(span.what == "transfer" for span in spans)
    first, scale, unit = min(span.start for span in spans), *_unit(timeline.seconds)

    figure = from_figure(
        figsize=(14.2, 1.9 + (0.62 if has_transfers else 0.42) * len(ranks)), dpi=160, facecolor="white"
    )
    tall = figure.get_figheight()
    figure.text(0.035, 1 - 0.32 / tall, title, fontsize=15, fontweight="bold", color=INK, va="center")
    figure.text(0.035, 1 - 0.66 / tall, _shares(timeline, len(ranks)), fontsize=11, color=MUTED, va="center")
    axes = figure.add_axes((0.075, 0.5 / tall, 0.9, 1 - 1.75 / tall))
    bars: dict[tuple[str, int], list[np.ndarray]] = {}
    for span in spans:
        if span.what in LOOKS:
            top, height = LOOKS[span.what]
            left, right = (span.start - first) * scale, (span.end - first) * scale
            up, down = ranks.index(span.rank) + top, ranks.index(span.rank) + top + height
            corners = np.array([(left, up), (right, up), (right, down), (left, down)])
            bars.setdefault((span.what, span.offset), []).append(corners)
    for (what, offset), corners_of in bars.items():
        axes.add_collection(PolyCollection(corners_of, **_look(what, offset, colours)))
    axes.set_xlim(0, timeline.seconds * scale)
    axes.set_ylim(len(ranks), 0)
    axes.set_yticks([lane + 0.3 for lane in range(len(ranks))], [f"rank {rank}" for rank in ranks], color=INK)
    axes.set_xlabel(unit, color=MUTED, labelpad=1)
    axes.tick_params(length=0, labelsize=10, colors=MUTED)
    for spine in axes.spines.values():
        spine.set_visible(False)
    shown = offsets if len(offsets) <= 9 else [*offsets[:4], *offsets[-4:]]
    legend = [Patch(facecolor=colours[offset], label=hop_name(offset)) for offset in shown]
    legend.append(Patch(**WAIT, label="waiting"))
    if has_transfers:
        legend.append(Patch(facecolor=MUTED, label="thin: K and V sent"))
        legend.append(Patch(facecolor=MUTED, alpha=0.55, label="pale: gradients sent"))
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1.0), "borderaxespad": 0.2, "handlelength": 1}
    axes.legend(
        handles=legend, ncols=len(legend), frameon=False, fontsize=9, labelcolor=INK, columnspacing=1.2, **place
    )
    figure.savefig(path)


WAIT = {"facecolor": EMPTY, "edgecolor": "#94a3b8", "hatch": "/////", "linewidth": 0}
LOOKS = {"compute": (0.08, 0.46), "wait": (0.08, 0.46), "transfer": (0.6, 0.2)}  # top and height in the lane


def _look(what: str, offset: int, colours: dict[int, Any]) -> dict[str, Any]:
    if what == "wait":
        return WAIT
    is_pale = what == "transfer" and offset < 0
    look = {"facecolor": colours[abs(offset)], "edgecolor": "white", "linewidth": 0.4}
    return look | {"alpha": 0.55 if is_pale else 1.0}


def _unit(seconds: float) -> tuple[float, str]:
    return (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")


def _shares(timeline: Timeline, ranks: int) -> str:
    """How long it took, and what of the ranks' time went where."""
    total, (scale, unit) = timeline.seconds, _unit(timeline.seconds)
    work = sum(span.seconds for span in timeline if span.what == "compute")
    exposed = sum(timeline.exposed().values())
    share = 100 / max(total * ranks, 1e-30)
    return f"{total * scale:,.4g} {unit}   ·   computing {work * share:.1f}%   ·   exposed communication {exposed * share:.1f}%"


def _colours(number: int) -> list[Any]:
    from matplotlib.colors import LinearSegmentedColormap

    if number <= len(HOP_COLOURS):
        return list(HOP_COLOURS[:number])
    ramp = LinearSegmentedColormap.from_list("hops", HOP_COLOURS)
    return [ramp(i / (number - 1)) for i in range(number)]


def _name(plan: Plan) -> str:
    text = repr(plan.mask).removesuffix("()")
    return text if len(text) <= 40 else type(plan.mask).__name__


def _title(plans: list[Plan]) -> str:
    plan = plans[0]
    layout = plan.layout if isinstance(plan.layout, str) else plan.layout.title
    return f"{_name(plan)} mask, {layout} layout: {plan.seqlen:,} tokens over {plan.world_size} ranks"


def _summary(plans: list[Plan]) -> str:
    areas = [plan.area for plan in plans]
    rows = sum(hop.send_rows for plan in plans for hop in plan.hops)
    relayed = (len(plans) - 1) * plans[0].seqlen
    parts = [
        f"{sum(areas):,} pairs seen",
        f"busiest rank {max(areas) * len(areas) / max(1, sum(areas)):.2f} x the mean",
    ]
    if relayed:
        parts.append(f"{rows:,} rows of K and V travel, {rows / relayed:.0%} of what a relaying ring moves")
    return "   ·   ".join(parts)


def _starts(plans: list[Plan]) -> np.ndarray:
    """Where each rank's rows begin when all are put one after the other, and the end: int64 `[W + 1]`."""
    return np.concatenate([[0], np.cumsum([len(plan.positions) for plan in plans])])


def raster(plans: list[Plan], pixels: int = PIXELS) -> np.ndarray:
    """The attention matrix in rank order, int16 `[n, n]`: the hop's offset where a row sees a key, -1 elsewhere.

    A pixel is one (query, key) pair: every pair of a sequence of at most `pixels` tokens, evenly spaced ones of others.
    """
    seqlen, starts = plans[0].seqlen, _starts(plans)
    shown = np.arange(seqlen) if seqlen <= pixels else ((np.arange(pixels) + 0.5) * seqlen / pixels).astype(np.int64)
    image = np.full((len(shown), len(shown)), -1, dtype=np.int16)
    for plan in plans:
        queries = np.flatnonzero((starts[plan.rank] <= shown) & (shown < starts[plan.rank + 1]))
        rows = shown[queries] - starts[plan.rank]
        for hop in plan.hops:
            source = (plan.rank - hop.offset) % plan.world_size
            keys = np.flatnonzero((starts[source] <= shown) & (shown < starts[source + 1]))
            at_hand = _at_hand(hop, shown[keys] - starts[source])
            for block in hop.blocks:
                lo, hi = (bound.numpy()[rows][:, None] + block.keys.start for bound in (block.lo, block.hi))
                is_seen = (lo <= at_hand) & (at_hand < hi)
                view = image[np.ix_(queries, keys)]
                view[is_seen] = hop.offset
                image[np.ix_(queries, keys)] = view
    return image


def _at_hand(hop: Any, rows: np.ndarray) -> np.ndarray:
    """Where the sender's local rows are among the received ones, -1 for those that did not travel."""
    if hop.offset == 0:
        return rows
    at = np.full(len(rows), -1, dtype=np.int64)
    before = 0
    for part in hop.recv:
        inside = (part.start <= rows) & (rows < part.stop)
        at[inside] = before + rows[inside] - part.start
        before += len(part)
    return at


def _bare(axes: Any) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


def _draw_layout(axes: Any, plans: list[Plan]) -> None:
    """The sequence as a strip, each piece with the rank that holds it."""
    from matplotlib.patches import Rectangle

    plan = plans[0]
    pieces = [
        (part, other.rank) for other in plans for part in ranges(plan.layout, plan.seqlen, plan.world_size, other.rank)
    ]
    end = plan.seqlen
    is_striped = any(part.step > 1 for part, _ in pieces)
    if is_striped:  # its first few tokens
        end = min(plan.seqlen, 4 * plan.world_size)
        pieces = [
            (range(i, i + 1), rank) for part, rank in pieces for i in part[: len(range(part.start, end, part.step))]
        ]
    for part, rank in pieces:
        shade = 0.93 - 0.33 * rank / max(1, plan.world_size - 1)
        axes.add_patch(Rectangle((part.start, 0), len(part), 1, facecolor=str(shade), edgecolor="white", linewidth=1.2))
        if len(part) * 40 >= end and plan.world_size <= 32:
            axes.text(part.start + len(part) / 2, 0.46, str(rank), ha="center", va="center", fontsize=10, color=INK)
    axes.set_xlim(0, end)
    axes.set_ylim(0, 1)
    _bare(axes)
    what = f"its first {end} tokens" if is_striped else "from first to last token"
    axes.set_title(f"Which rank holds what of the sequence, {what}", fontsize=10.5, color=MUTED, loc="left", pad=4)


def _draw_matrix(axes: Any, plans: list[Plan], colours: dict[int, Any]) -> None:
    """Queries down, keys across, both in rank order; coloured by hop."""
    from matplotlib.colors import to_rgb

    image = raster(plans)
    colour_of = np.array([to_rgb(EMPTY), *([to_rgb("white")] * max(1, plans[0].world_size))])
    for offset, colour in colours.items():
        colour_of[offset + 1] = to_rgb(colour)
    seqlen, starts = plans[0].seqlen, _starts(plans)
    axes.imshow(
        colour_of[image + 1], extent=(0, seqlen, seqlen, 0), interpolation="antialiased", aspect="auto", zorder=1
    )
    for start in starts[1:-1]:
        axes.axhline(start, color="white", linewidth=2.5, zorder=2)
        axes.axvline(start, color="white", linewidth=2.5, zorder=2)
    _bare(axes)
    middles = (starts[:-1] + starts[1:]) / 2
    axes.set_xticks(middles, [str(plan.rank) for plan in plans], fontsize=11, color=INK)
    axes.set_yticks(middles, [str(plan.rank) for plan in plans], fontsize=11, color=INK)
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("keys of rank", fontsize=11, color=MUTED, labelpad=3)
    axes.set_ylabel("queries of rank", fontsize=11, color=MUTED)


def _draw_lanes(axes: Any, plans: list[Plan], colours: dict[int, Any]) -> None:
    """A lane per rank, a column per hop: a bar as long as what is computed, and an arrow for what travels meanwhile."""
    from matplotlib.patches import Rectangle

    world_size, hops = len(plans), len(colours)
    areas = [[sum(block.area for block in hop.blocks) for hop in plan.hops] for plan in plans]
    largest, mean = max(1, *(area for row in areas for area in row)), max(1, sum(map(sum, areas)) / world_size)
    is_readable = world_size <= 8 and hops <= 8
    size = 10.5 if world_size <= 4 and hops <= 4 else 9 if hops <= 5 else 7
    for column, offset in enumerate(colours):
        if is_readable:
            label = {"fontsize": size + 2, "fontweight": "bold", "va": "bottom"}
            axes.annotate(f"hop {column}", (column, 0), (0, 19), textcoords="offset points", color=INK, **label)
            title = "own keys" if offset == 0 else f"keys of rank r \N{MINUS SIGN} {offset}"
            axes.annotate(title, (column, 0), (0, 6), textcoords="offset points", fontsize=size - 0.5, color=MUTED)
    for plan, row in zip(plans, areas, strict=True):
        y = float(plan.rank)
        axes.text(-0.08, y + 0.32, f"rank {plan.rank}", ha="right", va="center", fontsize=min(size + 1, 11), color=INK)
        axes.axhline(y, color=LINE, linewidth=0.8, zorder=0)
        for column, (hop, area) in enumerate(zip(plan.hops, row, strict=True)):
            width = 0.92 * area / largest
            axes.add_patch(Rectangle((column, y + 0.14), width, 0.34, facecolor=colours[hop.offset], linewidth=0))
            if is_readable:
                is_inside = width > 0.3
                share = f"{area / mean:.0%}" if area else "nothing to do"
                x, colour = (0.03, "white") if is_inside else (width + 0.03 * bool(area), MUTED)
                axes.text(column + x, y + 0.315, share, va="center", fontsize=size, color=colour)
            if column + 1 == hops or plan.hops[column + 1].send_rows == 0:
                continue
            coming = plan.hops[column + 1]
            arrow = {"arrowstyle": "-|>,head_width=0.22,head_length=0.45", "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0}
            arrow |= {"color": colours[coming.offset]}
            axes.annotate("", (column + 0.98, y + 0.6), (column, y + 0.6), arrowprops=arrow)
            if is_readable:
                label = f"{coming.send_rows:,} rows to rank {(plan.rank + coming.offset) % world_size}"
                axes.text(column, y + 0.8, label, fontsize=size - 1, va="center", color=MUTED)
    axes.set_xlim(-0.02, max(hops, 2))
    axes.set_ylim(max(world_size, 3), 0)
    _bare(axes)
