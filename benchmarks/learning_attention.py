"""Compare the held-out loss of models of equal size with full, linear and sparse attention, trained on the same tokens.

    python benchmarks/learning_attention.py [--steps 400] [--seeds 0 1 2] [--variants NAME ...] [--dir DIR]
    python benchmarks/learning_attention.py --picture PICTURE [--dir DIR]

Each run is `moefold train` in its own process on one thread: the quickstart's model on python-docs (bytes), with the
learning rates of recipes/single.toml. Runs of one seed read the same samples in the same order. Sparse attention
selects keys from the first step on, without a dense warm-up. Results are appended to DIR/results.jsonl; a run that is
there already is not repeated. Without --picture, the command ends with the table of all results; `--picture` draws the
held-out loss by step.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from moefold.config.load import config_from_dict
from moefold.config.overrides import apply_overrides
from moefold.config.schema import Config
from moefold.cost.flops import count_parameters

COMMON = (
    "model.preset=quickstart",
    "data.kind=python-docs",
    "run.device=cpu",
    "run.dtype=float32",
    "train.seq_len=512",
    "train.micro_batch_size=4",
    "train.global_batch_size=4",
    "train.lr=2e-3",
    "train.lr_schedule.min_lr=2e-4",
    "train.warmup_steps=20",
    "train.eval_samples=128",
    "checkpoint.resume=never",
)
HYBRID = ("model.layers=3 linear, full", "model.linear_attention.num_key_heads=2")
VARIANTS = {
    "full attention": (),
    "Gated DeltaNet hybrid": (
        *HYBRID,
        "model.linear_attention=gated_deltanet",
        "model.linear_attention.num_value_heads=4",
        "model.linear_attention.key_head_dim=24",
        "model.linear_attention.value_head_dim=22",
    ),
    "KDA hybrid": (
        *HYBRID,
        "model.linear_attention=kda",
        "model.linear_attention.num_value_heads=2",
        "model.linear_attention.key_head_dim=32",
        "model.linear_attention.value_head_dim=34",
    ),
    "sparse, 64 of 512 keys": (
        "model.attention.indexer.top_k=64",
        "model.attention.indexer.num_heads=2",
        "model.attention.indexer.head_dim=16",
    ),
}
"""Overrides of each variant. The first one is the reference. Parameters of the others are within 1 % of it."""
MAX_SIZE_DIFFERENCE = 0.01
"""Largest relative difference of the numbers of parameters."""


def main() -> int:
    """Train the runs that are missing and print the table, or draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of each run (default 400)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds (default 0 1 2)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="variants (all)")
    parser.add_argument("--dir", type=Path, default=Path("runs/learning-attention"), help="folder of the runs")
    parser.add_argument("--picture", type=Path, metavar="PICTURE", help="draw the results, and train nothing")
    args = parser.parse_args()
    results = args.dir / "results.jsonl"
    if args.picture:
        _draw(_rows(results), args.picture)
        return 0
    args.dir.mkdir(parents=True, exist_ok=True)
    results.touch()
    sizes = {name: count_parameters(_config(name).model).total for name in VARIANTS}
    reference = next(iter(sizes.values()))
    for name, size in sizes.items():
        assert abs(size / reference - 1) < MAX_SIZE_DIFFERENCE, (name, size, reference)
    for seed in args.seeds:
        for name in args.variants:
            seed_rows = [row for row in _rows(results) if (row["variant"], row["seed"]) == (name, seed)]
            if any(row["steps"] == args.steps for row in seed_rows):
                continue
            losses, cpu_s = _train(name, seed, args.steps, args.dir)
            row = {"variant": name, "seed": seed, "steps": args.steps, "parameters": sizes[name], "cpu_s": round(cpu_s)}
            with results.open("a") as file:
                file.write(json.dumps(row | {"losses": losses}) + "\n")
            print(f"{name}, seed {seed}: {losses[-1][1]:.4f} ({cpu_s:.0f} s of CPU time)", flush=True)
    _print_table([row for row in _rows(results) if row["steps"] == args.steps])
    return 0


def _config(name: str, *overrides: str) -> Config:
    tree: dict[str, Any] = {}
    apply_overrides(tree, [*COMMON, *VARIANTS[name], *overrides])
    return config_from_dict(tree)


def _train(name: str, seed: int, steps: int, folder: Path) -> tuple[list[tuple[int, float]], float]:
    """Train one run and return its held-out losses by step, and its CPU seconds."""
    run = folder / f"{name.replace(' ', '-').lower()}-{seed}"
    shutil.rmtree(run, ignore_errors=True)
    recipe = folder / "empty.toml"
    recipe.touch()
    settings = (
        f"run.dir={run}",
        f"run.seed={seed}",
        f"run.steps={steps}",
        f"train.eval_every={max(1, steps // 4)}",
        f"checkpoint.every={steps}",
    )
    before = _cpu_seconds()
    command = [sys.executable, "-m", "moefold", "train", str(recipe), *COMMON, *VARIANTS[name], *settings]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    lines = _rows(run / "metrics.jsonl")
    losses = [(line["step"], line["eval_loss"]) for line in lines if line.get("eval_loss") is not None]
    return losses, _cpu_seconds() - before


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _by_variant(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each variant, in the order of `VARIANTS`."""
    variants: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for name in VARIANTS:
        for row in rows:
            if row["variant"] == name:
                variants[name].append(row)
    return variants


def _print_table(rows: list[dict[str, Any]]) -> None:
    """Print the held-out loss of each variant, its mean, and the ratio to the reference over the seeds of both."""
    reference: dict[int, float] = {}
    seeds = sorted({row["seed"] for row in rows})
    print(f"| attention | parameters | {' | '.join(f'seed {seed}' for seed in seeds)} | mean | ratio |")
    print(f"| --- | --- | {'--- | ' * len(seeds)}--- | --- |")
    for name, runs in _by_variant(rows).items():
        final = {row["seed"]: row["losses"][-1][1] for row in runs}
        mean = fmean(final.values())
        reference = reference or final
        common = final.keys() & reference.keys()
        ratio = (
            sum(final[seed] for seed in common) / sum(reference[seed] for seed in common) if common else float("nan")
        )
        cells = " | ".join(f"{final[seed]:.4f}" if seed in final else "" for seed in seeds)
        print(f"| {name} | {runs[0]['parameters']:,} | {cells} | {mean:.4f} | {ratio:.3f} |")


def _draw(rows: list[dict[str, Any]], picture: Path) -> None:
    """Draw the held-out loss by step: a line for each seed."""
    # Lazy import: training does not need it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for index, (name, runs) in enumerate(_by_variant(rows).items()):
        for row in runs:
            steps, losses = zip(*row["losses"], strict=True)
            label = name if row is runs[0] else None
            axes.plot(steps, losses, color=f"C{index}", linewidth=1, alpha=0.8, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("held-out loss, nats a byte")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(picture)


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    sys.exit(main())
