"""The same training, three times: one process with plain attention, dp_shard=2 x cp=2, and cp=2 x tp=2.

    python examples/demo.py

Trains a small Llama on the sources of Python's standard library, on four processes per mesh (four GPUs where there are
as many, CPU otherwise), compares losses and gradient norms step by step, and writes `demo/loss.png` and
`demo/schedule.png`.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

import ringattn
from ringattn.picture import draw_schedule
from train_nd import build_model, get_batch, load_tokens, parse_args

OUT = Path("demo")
STEPS = 12
COMPARED_STEPS = 3
TOLERANCE = 1e-4
SHARED = ["--sequence-length", "4096", "--num-steps", str(STEPS), "--learning-rate", "2e-3", "--layout", "zigzag"]
# Two sequences per step in every run: one on each of two data parallel ranks, or both on the only one.
MESHES = {
    "dp_shard=2 x cp=2": ["--dp-shard-size", "2", "--cp-size", "2", "--batch-size", "1"],
    "cp=2 x tp=2": ["--cp-size", "2", "--tp-size", "2", "--batch-size", "2"],
}


def train_one_process(device: str) -> list[dict]:
    """The first steps with plain attention in this process: nothing of ringattn or ndwrap runs here."""
    args = parse_args([*SHARED, "--batch-size", "2"])
    tokens = load_tokens()
    model = build_model(args).to(device)
    model.set_attn_implementation("sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    model.train()
    rows = []
    steps = tqdm(range(COMPARED_STEPS), desc="one process", ncols=120)
    for step in steps:
        batch = get_batch(tokens, step, 0, 1, args.batch_size, args.sequence_length, args.seed).to(device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        rows.append({"step": step + 1, "loss": loss.item(), "grad_norm": grad_norm.item()})
        steps.set_postfix_str(f"loss {rows[-1]['loss']:.4f}, gradient norm {rows[-1]['grad_norm']:.3f}")
    return rows


def train_mesh(mesh: list[str], device: str, log: Path) -> list[dict]:
    """Four processes of `train_nd.py`; their output goes to the terminal, and a failure ends this script."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    script = [str(Path(__file__).with_name("train_nd.py")), *SHARED, *mesh, "--device", device, "--log-path", str(log)]
    done = subprocess.run(["env", "OMP_NUM_THREADS=1", *torchrun, *script])
    if done.returncode != 0:
        sys.exit(f"demo: {' '.join(script)} ended with exit code {done.returncode}; its output is above.")
    return [json.loads(line) for line in log.read_text().splitlines()]


def draw_losses(runs: dict[str, list[dict]], path: Path) -> None:
    """Loss against step, one curve per run; the single process as open circles on top."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    styles = [
        {"color": "#111827", "marker": "o", "mfc": "none", "linestyle": "none", "markersize": 11, "zorder": 3},
        {"color": "#2563eb", "linewidth": 4, "alpha": 0.45},
        {"color": "#ea580c", "linewidth": 1.6, "linestyle": (0, (4, 2))},
    ]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for (name, rows), style in zip(runs.items(), styles, strict=True):
        axes.plot([row["step"] for row in rows], [row["loss"] for row in rows], label=name, **style)
    axes.set_title("One training, three ways to split it", loc="left", fontweight="bold")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def main() -> None:
    start = time.perf_counter()
    OUT.mkdir(exist_ok=True)
    device = "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= 4 else "cpu"
    print(f"Two sequences of 4,096 bytes of Python per step, a Llama of 2 layers, on {device}.", flush=True)

    print(f"\n1/3  One process, plain attention, the first {COMPARED_STEPS} steps", flush=True)
    runs = {"one process": train_one_process(device)}
    for number, (name, mesh) in enumerate(MESHES.items(), 2):
        print(f"\n{number}/3  Four processes, {name}, ring attention over cp, {STEPS} steps", flush=True)
        runs[name] = train_mesh(mesh, device, OUT / f"{name.replace(' ', '_').replace('=', '')}.jsonl")

    draw_losses(runs, OUT / "loss.png")
    draw_schedule(ringattn.Causal(), "zigzag", 4096, 4, OUT / "schedule.png")

    worst = 0.0
    print(f"\n{'step':>4}  {'':<13}" + "".join(f"{name:>19}" for name in runs) + f"{'relative differences':>26}")
    for step in range(COMPARED_STEPS):
        for key, label in (("loss", "loss"), ("grad_norm", "gradient norm")):
            reference, *others = (rows[step][key] for rows in runs.values())
            differences = [abs(other - reference) / abs(reference) for other in others]
            worst = max([worst, *differences], key=lambda x: (x != x, x))  # a NaN is the worst of all
            values = "".join(f"{value:>19.7f}" for value in (reference, *others))
            print(f"{step + 1:>4}  {label:<13}{values}" + "".join(f"{difference:>13.1e}" for difference in differences))
    schedule = f"{OUT / 'schedule.png'} (the schedule of four context parallel ranks)"
    print(f"\nWrote {OUT / 'loss.png'} and {schedule}; {time.perf_counter() - start:.0f} s.")
    print(f"parity: largest relative difference {worst:.1e}")
    sys.exit(0 if worst <= TOLERANCE else 1)


if __name__ == "__main__":
    main()
