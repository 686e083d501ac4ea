"""Tables and pictures out of the CSV of a bench.

    python -m bench.plot FILE.csv [--where threads=1 dtype=bf16 ...] [--png FILE.png]

prints a markdown table, and draws speed against length: one panel per mask and head dim (across) and per direction and
dtype (down), one line per contender, with p20 to p80 as a band.
"""

import argparse
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.harness import Row, read

__all__ = ["picture", "table"]

ACROSS = ("head_dim", "mask")
DOWN = ("dtype", "direction")
CASE = ("direction", "mask", "dtype", "head_dim", "v_head_dim", "heads", "kv_heads", "batch", "seqlen", "threads")
PEAK = "matrix product"


def key(row: Row, names: Iterable[str]) -> tuple[Any, ...]:
    return tuple(getattr(row, name) for name in names)


def distinct(values: Iterable[Any]) -> list[Any]:
    """In the order in which they first come."""
    return list(dict.fromkeys(values))


def unit_of(rows: Iterable[Row]) -> tuple[str, float]:
    """The unit in which to show speeds, and how many of it a TFLOP/s is."""
    return ("TFLOP/s", 1.0) if max((row.tflops or 0.0 for row in rows), default=0.0) > 10 else ("GFLOP/s", 1e3)


# ---- tables


def table(rows: Sequence[Row]) -> str:
    """A markdown table: a line per case, a column per contender with its speed and its ratio to the fastest peer.

    The floors are the milliseconds that the case would take at the measured arithmetic peak and bandwidth.
    """
    names = distinct(row.contender for row in rows)
    unit, scale = unit_of(rows)
    varying = [name for name in CASE if len({getattr(row, name) for row in rows}) > 1]
    head = [*varying, *(f"{name}, {unit}" for name in (*names, PEAK)), "floors, ms"]
    lines = [head, ["---"] * len(head)]
    for case in distinct(key(row, CASE) for row in rows):
        of_case = {row.contender: row for row in rows if key(row, CASE) == case}
        first = next(iter(of_case.values()))
        timed = next((row for row in of_case.values() if row.median_ms is not None), None)
        peak = f"{timed.matmul_tflops * scale:.3g}" if timed else ""
        floors = f"{timed.arithmetic_floor_ms:.3g}, {timed.bytes_floor_ms:.3g}" if timed else ""
        figures = [cell(of_case[name], scale) if name in of_case else "" for name in names]
        lines.append([*(str(getattr(first, name)) for name in varying), *figures, peak, floors])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "".join(footnotes(rows))


def cell(row: Row, scale: float) -> str:
    if row.tflops is None:
        return "-"
    return f"{row.tflops * scale:.3g}" + (f" ({row.ratio:.2f}x)" if row.ratio is not None else "")


def footnotes(rows: Sequence[Row]) -> Iterable[str]:
    """Why a figure is missing, once for each contender and reason."""
    missing = [row for row in rows if row.reason]
    if missing:
        yield "\n\nNot run:\n"
    for (contender, reason), group in itertools.groupby(sorted(missing, key=same_reason), same_reason):
        yield f"\n* {contender}, {len(list(group))} cases: {reason}"


def same_reason(row: Row) -> tuple[str, str]:
    return row.contender, row.reason


# ---- pictures


def picture(rows: Sequence[Row], path: Path, across: Sequence[str] = ACROSS, down: Sequence[str] = DOWN) -> None:
    """Speed against length as a PNG; `across` and `down` name the columns of the CSV that make the panels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    timed = [row for row in rows if row.tflops is not None]
    columns, lines = (distinct(key(row, names) for row in timed) for names in (across, down))
    unit, scale = unit_of(timed)
    colours = {name: f"C{i}" for i, name in enumerate(distinct(row.contender for row in timed))}
    figure, axes = plt.subplots(
        len(lines),
        len(columns),
        figsize=(1.2 + 2.9 * len(columns), 1.4 + 2.3 * len(lines)),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for (i, line), (j, column) in itertools.product(enumerate(lines), enumerate(columns)):
        axis = axes[i][j]
        inside = [row for row in timed if key(row, down) == line and key(row, across) == column]
        axis.set_visible(bool(inside))
        panel(axis, inside, colours, scale)
        if i == 0:
            axis.set_title(", ".join(map(label, across, column)))
        if j == 0:
            axis.set_ylabel(f"{', '.join(map(label, down, line))}\n{unit}")
        if i == len(lines) - 1:
            axis.set_xlabel("tokens")
    seqlens = sorted({row.seqlen for row in timed})
    axes[0][0].set_xscale("log", base=2)  # of all panels
    axes[0][0].set_xticks(seqlens, [short(n) for n in seqlens])
    axes[0][0].minorticks_off()
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        axis.set_ylim(bottom=0)  # once all panels of a row, which share it, are drawn
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(6, 2 * len(columns)), frameon=False
    )
    figure.suptitle(caption(timed), fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def panel(axis: Any, rows: Sequence[Row], colours: dict[str, str], scale: float) -> None:
    """One line per contender, and the speed of the matrix product that was timed with them."""
    for name, colour in colours.items():
        own = sorted((row for row in rows if row.contender == name), key=lambda row: row.seqlen)
        if not own:
            continue
        seqlens = [row.seqlen for row in own]
        axis.plot(
            seqlens, [row.tflops * scale for row in own], "o-", color=colour, markersize=3.5, linewidth=1.4, label=name
        )
        slow, fast = ([row.gflop / getattr(row, p) * scale for row in own] for p in ("p80_ms", "p20_ms"))
        axis.fill_between(seqlens, slow, fast, color=colour, alpha=0.18, linewidth=0)
    peaks: dict[int, list[float]] = {}
    for row in rows:
        peaks.setdefault(row.seqlen, []).append((row.matmul_tflops or 0.0) * scale)
    seqlens = sorted(peaks)
    axis.plot(seqlens, [max(peaks[n]) for n in seqlens], "_--", color="0.45", markersize=14, linewidth=1.0, label=PEAK)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def label(name: str, value: Any) -> str:
    return f"D {value}" if name == "head_dim" else str(value)


def short(n: int) -> str:
    return f"{n >> 10}k" if n % 1024 == 0 else str(n)


def caption(rows: Sequence[Row]) -> str:
    """The conditions, on two lines."""
    threads = distinct(row.threads for row in rows if row.threads)
    heads = distinct(f"{row.heads}:{row.kv_heads}" for row in rows)
    parts = [f"heads {', '.join(heads)}", f"torch {rows[0].torch}", f"commit {rows[0].commit}"]
    if threads:
        parts.insert(0, f"threads {', '.join(map(str, threads))}")
    return "\n".join([rows[0].device, ", ".join(parts)])


# ---- command line


def matches(row: Row, condition: str) -> bool:
    name, _, value = condition.partition("=")
    return str(getattr(row, name)) == value


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Tables and pictures out of the CSV of a bench.")
    parser.add_argument("csv", type=Path)
    parser.add_argument("--where", nargs="*", default=[], metavar="COLUMN=VALUE", help="only rows with these values")
    parser.add_argument("--png", type=Path, help="also draw a picture")
    args = parser.parse_args(argv)
    rows = [row for row in read(args.csv) if all(matches(row, condition) for condition in args.where)]
    print(table(rows))
    if args.png:
        picture(rows, args.png)


if __name__ == "__main__":
    main()
