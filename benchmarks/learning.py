"""Prove that the recipes of reinforcement learning and of offline alignment learn: several seeds, CPU time, plots.

    python benchmarks/learning.py {sort,countdown,offline,prorl} [--seeds 0 1 2] [--dir DIR] [section.key=value ...]
    python benchmarks/learning.py plot [--dir DIR]

Each experiment runs `moefold` commands one after the other on one thread, and appends lines to DIR/results.jsonl:
experiment, seed, stage, rewards of held-out problems, CPU seconds of the stage's training. A seed with a result is not
run again. Settings apply to the last training of an experiment. `plot` draws DIR/rl-sort.png, DIR/rl-countdown.png and
DIR/rl-prorl.png, and prints the results as a table.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECIPES = Path(__file__).parents[1] / "recipes"
HELD_OUT = 512
"""Held-out problems of each evaluation."""
TASKS = {"sort": ("sort", "8", "10"), "countdown": ("countdown", "3", "14")}
"""Task, size and maximum number of tokens of each reinforcement-learning recipe."""
SCORED_PROBLEMS = 2048
"""Problems with eight scored samples each, the data of offline alignment."""


@dataclass(frozen=True)
class Experiment:
    """One seed of an experiment, in a separate folder."""

    name: str
    seed: int
    folder: Path
    results: Path
    overrides: Sequence[str]

    def train(self, recipe: str, run: str, *overrides: str) -> float:
        """Train a recipe from its first step, replacing an interrupted run. Return CPU seconds."""
        shutil.rmtree(self.folder / run, ignore_errors=True)
        settings = (f"run.dir={self.folder / run}", f"run.seed={self.seed}", *overrides)
        return self._moefold("train", str(RECIPES / recipe), *settings)[1]

    def rollout(self, model: str, out: str, *options: str) -> dict[str, Any]:
        """Sample and score completions. Return the summary."""
        printed, _ = self._moefold(
            "rollout", str(self.folder / model), *options, "--out", str(self.folder / out), "--force"
        )
        summary: dict[str, Any] = json.loads(printed)
        return summary

    def evaluate(self, model: str, task: str, cpu_s: float, stage: str = "", want: str = "") -> None:
        """Record rewards of held-out problems: greedy, and pass@k of eight samples at temperature 1.

        `want` is the reward that the prompts ask for, instead of the `align.method.want` of the model.
        """
        name, size, max_tokens = TASKS[task]
        problems = ("--task", name, "--task-size", size, "--held-out", "--count", str(HELD_OUT))
        options = (*problems, "--max-tokens", max_tokens, *(("--want", want) if want else ()))
        greedy = self.rollout(model, "greedy.jsonl", *options, "--samples", "1", "--temperature", "0")
        sampled = self.rollout(model, "sampled.jsonl", *options, "--samples", "8")
        pass_at = sampled["pass_at"]
        self.record(
            stage or model, greedy=greedy["reward"], pass_at_1=pass_at["1"], pass_at_8=pass_at["8"], cpu_s=cpu_s
        )

    def record(self, stage: str, **values: float) -> None:
        """Append a result."""
        line = {"experiment": self.name, "seed": self.seed, "stage": stage}
        line |= {key: round(value, 4) for key, value in values.items()}
        with self.results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    def _moefold(self, *arguments: str) -> tuple[str, float]:
        """Run a command on one thread and return its standard output and its CPU seconds."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-m", "moefold", *arguments],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"moefold {' '.join(arguments)}\n{done.stderr[-2000:]}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return done.stdout, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def reinforce(task: str) -> Callable[[Experiment], None]:
    """Return the experiment of fine-tuning, then reinforcement learning on a task."""

    def run(experiment: Experiment) -> None:
        experiment.evaluate("sft", task, experiment.train(f"{task}-sft.toml", "sft"))
        init = f"checkpoint.init_from={experiment.folder / 'sft'}"
        experiment.evaluate("rl", task, experiment.train(f"{task}.toml", "rl", init, *experiment.overrides))

    return run


def align_offline(experiment: Experiment) -> None:
    """Align a weak policy with its own scored samples by each method, and evaluate them."""
    folder = experiment.folder
    experiment.evaluate("sft", "sort", experiment.train("sort-sft.toml", "sft"))
    scored = ("--task", "sort", "--task-size", "8", "--max-tokens", "10", "--count", str(SCORED_PROBLEMS))
    experiment.rollout("sft", "scored.jsonl", *scored, "--samples", "8")
    init = f"checkpoint.init_from={folder / 'sft'}"
    common = (init, f"data.path={folder / 'scored.jsonl'}", *experiment.overrides)
    for stage, settings in {
        "filter": (),
        "weight": ("align.method=weight", "align.method.beta=0.2"),
        "condition": (
            "align.method=condition",
            "align.method.template={reward:.0f}:{prompt}",
            "run.steps=300",
        ),
    }.items():
        cpu_s = experiment.train("sort-align.toml", stage, *common, *settings)
        if stage != "condition":
            experiment.evaluate(stage, "sort", cpu_s)
            continue
        for wanted in ("1", "0"):
            experiment.evaluate(stage, "sort", cpu_s, f"condition, asked for {wanted}", wanted)
    pairs = _write_pairs(folder / "scored.jsonl", folder / "pairs.jsonl")
    preference = ("data.kind=preference", f"data.path={pairs}", "align.method=dpo")
    rates = ("train.optimizer=adamw", "train.lr=2e-4", "align.method.beta=1.0")
    cpu_s = experiment.train("sort-align.toml", "dpo", init, *preference, *rates, *experiment.overrides)
    experiment.evaluate("dpo", "sort", cpu_s)


def _write_pairs(source: Path, target: Path) -> Path:
    """Write pairs of a right and a wrong sample, as many for each problem as its samples allow."""
    by_prompt: dict[str, tuple[list[str], list[str]]] = {}
    for row in _rows(source):
        by_prompt.setdefault(row["prompt"], ([], []))[row["reward"] < 1].append(row["completion"])
    with target.open("w") as file:
        for prompt, (right, wrong) in by_prompt.items():
            for chosen, rejected in zip(right, wrong, strict=False):
                file.write(json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected}) + "\n")
    return target


def prolong(experiment: Experiment) -> None:
    """Compare GRPO with recipes/prorl.toml from one start, for four times the steps of recipes/countdown.toml."""
    experiment.evaluate("sft", "countdown", experiment.train("countdown-sft.toml", "sft"))
    common = (f"checkpoint.init_from={experiment.folder / 'sft'}", "run.steps=800", *experiment.overrides)
    for recipe in ("countdown", "prorl"):
        cpu_s = experiment.train(f"{recipe}.toml", recipe, *common)
        experiment.evaluate(recipe, "countdown", cpu_s)


EXPERIMENTS: Mapping[str, Callable[[Experiment], None]] = {
    "sort": reinforce("sort"),
    "countdown": reinforce("countdown"),
    "offline": align_offline,
    "prorl": prolong,
}
"""The experiments by name."""


def plot(folder: Path) -> None:
    """Draw the reward curves of all runs of reinforcement learning."""
    # Lazy import: the experiments do not need it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    for name, runs in {"sort": ("rl",), "countdown": ("rl",), "prorl": ("countdown", "prorl")}.items():
        files = [path for run in runs for path in sorted(folder.glob(f"{name}-*/{run}/metrics.jsonl"))]
        if not files:
            continue
        figure = Figure(figsize=(7, 3), dpi=90)
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, 2)
        for path in files:
            label = f"{path.parts[-2]} " * (len(runs) > 1) + f"seed {path.parts[-3].rpartition('-')[2]}"
            records = [record for record in _rows(path) if record.get("rl")]
            evaluated = [record for record in records if record["rl"]["eval_reward"] is not None]
            steps = [record["step"] for record in evaluated]
            axes[0].plot(steps, [record["rl"]["eval_reward"] for record in evaluated], marker=".", label=label)
            axes[1].plot([record["step"] for record in records], [record["rl"]["entropy"] for record in records])
        axes[0].set_ylabel("greedy reward, held-out")
        axes[1].set_ylabel("entropy, nats a token")
        for axis in axes:
            axis.set_xlabel("step")
            axis.grid(alpha=0.3)
        axes[0].legend(fontsize=8)
        figure.suptitle(f"recipes/{name}.toml", fontsize=10)
        figure.tight_layout()
        figure.savefig(folder / f"rl-{name}.png")


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> int:
    """Run an experiment for each seed, or draw its results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment", choices=(*EXPERIMENTS, "plot"))
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings of the last training")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds (default 0 1 2)")
    parser.add_argument("--dir", type=Path, default=Path("runs/learning"), help="folder (default runs/learning)")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    results = args.dir / "results.jsonl"
    results.touch()
    if args.experiment == "plot":
        plot(args.dir)
        for row in _rows(results):
            print(" | ".join(str(value) for value in row.values()))
        return 0
    for seed in args.seeds:
        if any((row["experiment"], row["seed"]) == (args.experiment, seed) for row in _rows(results)):
            continue
        folder = args.dir / f"{args.experiment}-{seed}"
        EXPERIMENTS[args.experiment](Experiment(args.experiment, seed, folder, results, args.overrides))
    return 0


if __name__ == "__main__":
    sys.exit(main())
