"""What layouts cost and how long the plan takes: no attention is computed, and numbers of tiles and rows are exact.

python -m bench.plan [--seqlen 131072] [--world-size 8] [--packings 100]

Of packings a row holds the mean over seeds, and the worst balance, lock-step balance and inflation.
"""

import argparse
import csv
import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from bench.harness import commit, device_name, slug
from ringattn import balance, balanced, build_plan, choose_layout, cost, plan
from ringattn.layout import Layout, layouts
from ringattn.masks import Causal, Documents, Mask, Window

PLAN_CACHES = (plan.bounds_of, plan._ring, build_plan)
RESULTS = Path(__file__).parent / "results"
ROUNDS = 9


def packing(seed: int, seqlen: int) -> Documents:
    """Causal documents of log-normal lengths (mu 7, sigma 1.5), the last one cut where the sequence ends."""
    rng = np.random.default_rng(seed)
    ends = [0]
    while ends[-1] < seqlen:
        ends.append(min(seqlen, ends[-1] + max(1, int(rng.lognormal(7, 1.5)))))
    return Documents(tuple(ends))


MADE: dict[str, Callable[[Mask, int, int], Layout]] = {"balanced": balanced, "auto": choose_layout}


@dataclasses.dataclass(frozen=True)
class Row:
    """One layout under one kind of mask: a line of the CSV. Times are CPU time of one thread, medians, of masks not seen before."""

    device: str
    commit: str
    mask: str
    masks: int  # over how many the row is taken
    seqlen: int
    world_size: int
    layout: str
    chosen: str
    layout_ms: float
    plan_ms: float
    balance: float
    worst_balance: float
    lockstep_balance: float
    worst_lockstep_balance: float
    inflation: float
    worst_inflation: float
    hops: float
    rows_per_token: float  # rows of K and V that all ranks send in a forward pass, over seqlen


def forget() -> None:
    """Make the next plan start from nothing but the positions of a layout."""
    for remembered in (*PLAN_CACHES, balance._balanced, choose_layout):
        remembered.cache_clear()


def timed(call: Callable[[], object]) -> float:
    """Milliseconds of CPU time."""
    start = time.process_time()
    call()
    return (time.process_time() - start) * 1e3


def measure(name: str, masks: list[Mask], layout_name: str, seqlen: int, world_size: int) -> Row:
    """The costs of every mask, and the times of the first few."""
    make = MADE.get(layout_name, lambda *_: layout_name)
    costs, layout_ms, plan_ms, chosen = [], [], [], set()
    for i in range(max(len(masks), ROUNDS)):
        mask = masks[i % len(masks)]
        forget()
        layout_ms.append(timed(lambda mask=mask: make(mask, seqlen, world_size)))
        layout = make(mask, seqlen, world_size)
        forget()
        plan_ms.append(timed(lambda mask=mask, layout=layout: build_plan(mask, layout, seqlen, world_size, 0)))
        if i < len(masks):
            costs.append(cost(mask, layout, seqlen, world_size))
            chosen.add(layout if isinstance(layout, str) else layout.title)

    def over(statistic: Callable[[list[float]], float], field: str) -> float:
        return statistic([getattr(each, field) for each in costs])

    return Row(
        *(device_name(torch.device("cpu")), commit(), name, len(masks), seqlen, world_size),
        *(layout_name, " ".join(sorted(chosen)), statistics.median(layout_ms), statistics.median(plan_ms)),
        *(
            over(pick, field)
            for field in ("balance", "lockstep_balance", "inflation")
            for pick in (statistics.mean, max)
        ),
        statistics.mean(len(each.hop_tiles) for each in costs),
        statistics.mean(each.rows / seqlen for each in costs),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, default=131072)
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--packings", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(1)
    kinds: dict[str, list[Mask]] = {
        "causal": [Causal()],
        "window 4096": [Window(4096)],
        "packings": [packing(seed, args.seqlen) for seed in range(args.packings)],
    }
    names = ["contiguous", "zigzag", "striped", *MADE]
    assert set(layouts()) < set(names)
    rows = []
    print(f"{'mask':<12} {'layout':<11} layout ms  plan ms  busiest  lock-step  inflation   hops  rows/token")
    for kind, masks in kinds.items():
        for name in names:
            row = measure(kind, masks, name, args.seqlen, args.world_size)
            rows.append(row)
            print(
                f"{kind:<12} {name:<11} {row.layout_ms:>9.2f} {row.plan_ms:>8.2f} {row.balance:>8.3f} {row.lockstep_balance:>10.3f} "
                f"{row.inflation:>10.3f} {row.hops:>6.1f} {row.rows_per_token:>11.3f}"
            )
    path = RESULTS / f"plan_{slug(rows[0].device)}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in dataclasses.fields(Row))
        writer.writerows([f"{x:.6g}" if isinstance(x, float) else x for x in dataclasses.astuple(row)] for row in rows)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
