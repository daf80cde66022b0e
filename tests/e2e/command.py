"""Running the command line as a user does."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL = (
    "model.preset=tiny",
    "train.seq_len=64",
    "train.micro_batch_size=1",
    "train.global_batch_size=8",
    "train.lr=1e-2",
    "data.kind=synthetic",
    "run.dtype=float32",
    "run.device=cpu",
    "metrics.tensorboard=false",
)
"""Overrides that make a run of any mapping take seconds."""

FOLDED = ("parallel.world_size=8", "parallel.tp=2", "parallel.cp=2", "parallel.pp=2", "parallel.ep=4")


def command(words: Sequence[str]) -> list[str]:
    """The command line of `moefold WORDS`."""
    return [sys.executable, "-m", "moefold", *words]


def moefold(*words: str, cwd: Path | None = None, timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
    """Run `moefold WORDS` to its end."""
    return subprocess.run(
        command(words), capture_output=True, text=True, timeout=timeout_s, cwd=cwd or ROOT, check=False
    )


def train(run_dir: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Train a small recipe; fails with what it printed unless it exits 0."""
    recipe = run_dir.parent / "empty.toml"
    recipe.touch()
    done = moefold("train", str(recipe), *SMALL, f"run.dir={run_dir}", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def metrics(run_dir: Path) -> list[dict[str, object]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir: Path) -> list[float]:
    """The loss of each step."""
    return [float(str(record["loss"])) for record in metrics(run_dir)]


def start_and_signal(run_dir: Path, after_steps: int, number: signal.Signals, *words: str) -> tuple[int, str]:
    """Start a small run, send a signal to its whole process group after some steps; returns its status and output."""
    recipe = run_dir.parent / "empty.toml"
    recipe.touch()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command(["train", str(recipe), *SMALL, f"run.dir={run_dir}", *words]),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    file = run_dir / "metrics.jsonl"
    while not file.exists() or len(file.read_text().splitlines()) < after_steps:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.05)
    os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output
