"""Compare the held-out loss of two sites with data parallelism (DP) of the joined batch, at equal tokens, on a CPU.

    python benchmarks/sites.py run [--schedule constant] [--seeds 0 1 2] [--rows REGEX] [--dir DIR]
    python benchmarks/sites.py table [--schedule constant] [--dir DIR]

Preset `tiny`, python-docs, 128 tokens, 300 steps, float32: DP has 32 samples a step, a site 16. Each row of `ROWS` is
one `moefold train`. `run` appends a line for each finished run to DIR/results.jsonl, and does not repeat a run that is
there. `table` prints the losses of all seeds, and their cost up to the target of AlgoPerf (arXiv:2306.07179: here the
mean final loss of DP plus 5 %). It also says whether the learning gate passes for `GATE`, and for `SCALED` with the
learning rate times the square root of 2. The gate: at most 5 % above DP, half of the gap between a single site and DP
closed, and at most a thirtieth of DP's bytes.

Seconds follow from a formula: a step takes half the median time of a step of DP on one rank, and the link has 20 Mbit/s
and 50 ms, without overlap.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEPS = 300
COMMON = (
    "run.device=cpu",
    "run.dtype=float32",
    f"run.steps={STEPS}",
    "model.preset=tiny",
    "train.seq_len=128",
    "train.micro_batch_size=8",
    "train.global_batch_size=16",
    "train.lr=3e-3",
    "train.warmup_steps=20",
    "data.kind=python-docs",
    "train.eval_every=20",
    "train.eval_samples=128",
    "checkpoint.every=0",
    "checkpoint.at_end=false",
)
DP, ALONE = "DP", "one site alone"
GATE = "mean, every=10, int8"
SCALED = "mean, every=10, int8, lr 4.2e-3"
MEAN = ("sites.count=2", "sites.every=10")
INT8 = (*MEAN, "sites.precision=int8")
ROWS: dict[str, tuple[str, ...]] = {
    DP: ("train.global_batch_size=32",),
    "DP, lr 4.2e-3": ("train.global_batch_size=32", "train.lr=4.2e-3"),
    "DP, lr 6e-3": ("train.global_batch_size=32", "train.lr=6e-3"),
    ALONE: (),
    "one site alone, lr 4.2e-3": ("train.lr=4.2e-3",),
    "one site alone, lr 6e-3": ("train.lr=6e-3",),
    "mean, every=10": MEAN,
    GATE: INT8,
    "mean, every=10, fp4": (*MEAN, "sites.precision=fp4"),
    "mean, every=5, int8": (*INT8, "sites.every=5"),
    SCALED: (*INT8, "train.lr=4.2e-3"),
    "mean, every=10, int8, lr 6e-3": (*INT8, "train.lr=6e-3"),
    "mean, every=10, int8, sites.lr=1.4": (*INT8, "sites.lr=1.4"),
    "mean, every=10, int8, moments=average": (*INT8, "sites.moments=average"),
    "mean, every=10, int8, moments=reset": (*INT8, "sites.moments=reset"),
    "mean, every=10, int8, residual 1": (*INT8, "sites.residual=1.0"),
    "mean, every=30": ("sites.count=2", "sites.every=30"),
    "streaming, every=30, overlap=5": (
        "sites.count=2",
        "sites.every=30",
        "sites.method=streaming",
        "sites.fragment_layers=1",
        "sites.overlap=5",
        "sites.lr=0.7",
        "sites.momentum=0.5",
    ),
    "top 512 of 4096, 2 bits": (*MEAN, "sites.method=sparseloco", "sites.method.density=0.125"),
    "top 64 of 4096, 2 bits": (*MEAN, "sites.method=sparseloco"),
    "DiLoCo, every=10, lr 0.7, momentum 0.5": (*MEAN, "sites.lr=0.7", "sites.momentum=0.5"),
    "CO2, every=10": (*MEAN, "sites.method=co2"),
}
LINK_BYTES_PER_S = 20e6 / 8
LINK_LATENCY_S = 0.05
PARAMETER_BYTES = 4


@dataclass(frozen=True)
class Run:
    """One finished run: losses by step, bytes that a rank has sent up to these steps, seconds of a step."""

    losses: Mapping[int, float]
    sent_bytes: Mapping[int, int]
    step_s: float
    num_rounds: Mapping[int, int]


def train(row: str, schedule: str, seed: int) -> dict[str, Any]:
    """Train a row and return its line of the results."""
    with tempfile.TemporaryDirectory() as temporary:
        recipe = Path(temporary) / "empty.toml"
        recipe.touch()
        run_dir = Path(temporary) / "run"
        keys = dict(word.split("=", 1) for word in (*COMMON, *ROWS[row]))
        keys |= {"train.lr_schedule": schedule, "run.seed": str(seed), "run.dir": str(run_dir)}
        words = [f"{key}={value}" for key, value in keys.items()]
        done = subprocess.run(
            [sys.executable, "-m", "moefold", "train", str(recipe), *words],
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{row}, seed {seed}: {done.stderr[-2000:]}")
        folder = run_dir / "site-0" if "sites.count" in keys else run_dir
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        shutil.rmtree(run_dir)
    return {"row": row, "schedule": schedule, "seed": seed, **_measures(records)}


def _measures(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    losses, sent, rounds = {}, {}, {}
    num_bytes = num_rounds = 0
    for record in records:
        round_ = record.get("sites")
        if round_:
            if round_["skipped"]:
                raise RuntimeError(f"step {record['step']}: a round was skipped: {round_['skipped']}")
            num_bytes += round_["sent_bytes"]
            num_rounds += 1
        if record.get("eval_loss") is not None:
            losses[record["step"]] = record["eval_loss"]
            sent[record["step"]] = num_bytes
            rounds[record["step"]] = num_rounds
    step_s = statistics.median(record["step_time_s"] for record in records)
    return {"losses": losses, "sent_bytes": sent, "rounds": rounds, "step_s": step_s}


def read(folder: Path, schedule: str) -> dict[str, dict[int, Run]]:
    """Return the finished runs by row and seed."""
    table: dict[str, dict[int, Run]] = {}
    path = folder / "results.jsonl"
    for text in path.read_text().splitlines() if path.exists() else ():
        line = json.loads(text)
        if line["schedule"] == schedule:
            numbers = ({int(step): value for step, value in line[key].items()} for key in ("losses", "sent_bytes"))
            rounds = {int(step): value for step, value in line["rounds"].items()}
            table.setdefault(line["row"], {})[line["seed"]] = Run(*numbers, line["step_s"], rounds)
    return table


def num_parameters() -> int:
    """Return the parameters of the model."""
    from moefold.cost.flops import count_parameters
    from moefold.recipe import load_config

    with tempfile.TemporaryDirectory() as temporary:
        recipe = Path(temporary) / "empty.toml"
        recipe.touch()
        return count_parameters(load_config(recipe, [*COMMON]).model).total


def print_table(runs: Mapping[str, Mapping[int, Run]]) -> None:
    """Print a row for each setting, and whether the learning gate passes."""
    step_bytes = PARAMETER_BYTES * num_parameters()
    dp = {seed: run.losses[STEPS] for seed, run in runs[DP].items()}
    alone = {seed: run.losses[STEPS] for seed, run in runs.get(ALONE, {}).items()}
    target = 1.05 * statistics.mean(dp.values())
    step_s = statistics.median(run.step_s for run in runs[DP].values()) / 2
    print(f"target: {target:.3f}; DP sends {step_bytes * STEPS / 1e6:.0f} MB, as a ring of two in float32")
    print("| | loss by seed | above DP | gap closed | MB | of DP | steps, MB, s to the target |\n|" + " --- |" * 7)
    for row, by_seed in runs.items():
        finals = {seed: run.losses[STEPS] for seed, run in sorted(by_seed.items())}
        above = [finals[seed] / dp[seed] - 1 for seed in finals if seed in dp]
        closed = [
            (alone[seed] - finals[seed]) / (alone[seed] - dp[seed]) for seed in finals if seed in dp and seed in alone
        ]
        is_dp = row.startswith("DP")
        total = step_bytes * STEPS if is_dp else statistics.mean(run.sent_bytes[STEPS] for run in by_seed.values())
        share = total / (step_bytes * STEPS)
        cells = (
            row,
            ", ".join(f"{loss:.3f}" for loss in finals.values()),
            ", ".join(f"{100 * value:+.1f}" for value in above) + " %",
            ", ".join(f"{100 * value:.0f}" for value in closed) + " %",
            f"{total / 1e6:.1f}",
            f"1/{1 / share:.0f}" if share else "0",
            _to_target(by_seed, target, step_s, step_bytes if is_dp else 0),
        )
        print(f"| {' | '.join(cells)} |")
        if row in (GATE, SCALED):
            is_learnt = all(value <= 0.05 for value in above) and all(value >= 0.5 for value in closed)
            print(f"^ learning gate: {'passes' if is_learnt and share <= 1 / 30 else 'FAILS'} on {len(above)} seeds")


def _to_target(by_seed: Mapping[int, Run], target: float, step_s: float, step_bytes: int) -> str:
    """Return mean steps, MB and seconds to the target, or how many seeds reach it.

    Args:
        by_seed: the runs.
        target: held-out loss.
        step_s: seconds of a step of a site, and of a rank of DP.
        step_bytes: bytes that a rank of DP sends in a step; 0: a run of sites.
    """
    reached = [
        (run, min(step for step, loss in run.losses.items() if loss <= target))
        for run in by_seed.values()
        if min(run.losses.values()) <= target
    ]
    if len(reached) < len(by_seed):
        return f"{len(reached)} of {len(by_seed)} seeds"
    steps = statistics.mean(step for _, step in reached)
    sent = statistics.mean(step_bytes * step or run.sent_bytes[step] for run, step in reached)
    messages = steps if step_bytes else statistics.mean(run.num_rounds[step] for run, step in reached)
    seconds = steps * step_s + sent / LINK_BYTES_PER_S + messages * LINK_LATENCY_S
    return f"{steps:.0f}, {sent / 1e6:.1f}, {seconds:.0f}"


def main() -> None:
    """Train the missing runs, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "table"])
    parser.add_argument("--schedule", choices=["constant", "cosine"], default="constant", help="train.lr_schedule")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="values of run.seed")
    parser.add_argument("--rows", default="", metavar="REGEX", help="train only rows whose name matches")
    parser.add_argument("--dir", type=Path, default=Path("site-runs"), help="folder of the results")
    args = parser.parse_args()
    if args.action == "table":
        print_table(read(args.dir, args.schedule))
        return
    args.dir.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        for row in ROWS:
            if re.search(args.rows, row) and seed not in read(args.dir, args.schedule).get(row, {}):
                line = train(row, args.schedule, seed)
                with (args.dir / "results.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(f"{row}, seed {seed}: {line['losses'][STEPS]:.4f}", flush=True)


if __name__ == "__main__":
    main()
