"""Running the command line as a user does."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from moefold.cli.main import main
from tests.e2e.forked import interrupt_forked, run_forked

ROOT = Path(__file__).parents[2]
SMALL = (
    "model.preset=tiny",
    "train.seq_len=32",
    "train.micro_batch_size=1",
    "train.global_batch_size=2",
    "train.lr=3e-3",
    "train.lr_schedule=constant",
    "data.kind=synthetic",
    "run.steps=20",
    "run.dtype=float32",
    "run.device=cpu",
    "checkpoint.every=0",
    "checkpoint.at_end=false",
)
"""Overrides that make a run of any mapping take seconds, and save nothing."""

FOLDED = ("parallel.world_size=8", "parallel.tp=2", "parallel.cp=2", "parallel.pp=2", "parallel.ep=4")
"""Eight ranks: attention as tp2 x cp2 x pp2, experts as ep4 x etp1 x pp2."""

FOUR = ("parallel.world_size=4", "parallel.cp=2", "parallel.ep=2", "parallel.etp=2", "parallel.zero=3")
TWO = ("parallel.world_size=2", "parallel.tp=2", "parallel.ep=2")


def environment() -> dict[str, str]:
    """One thread for each rank, as on a machine with few cores it must be. Prints arrive as they are written."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def run(words: Sequence[str], timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    return subprocess.run(
        words, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, check=False, env=environment()
    )


def moefold(*words: str, timeout_s: float = 240.0, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run `moefold WORDS` to its end in a folder, in a process that has torch in memory from its start."""
    return run_forked(words, timeout_s, cwd, environment())


def here(capsys: pytest.CaptureFixture[str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run `moefold WORDS` in this process: its ranks come from the fork server of the session, which starts once."""
    status = main(words)
    return subprocess.CompletedProcess(words, status, *capsys.readouterr())


def fresh(*words: str, timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
    """Run `moefold WORDS` to its end as a shell would, in an interpreter of its own."""
    return run([sys.executable, "-m", "moefold", *words], timeout_s)


def small(run_dir: Path, *words: str) -> list[str]:
    """The words of a small run: an empty recipe and overrides. The last override of a key counts.

    It saves where `words` set checkpoint.every, and then at its end too.
    """
    recipe = run_dir.parent / "empty.toml"
    recipe.touch()
    saves = any(word.startswith("checkpoint.every=") for word in words)
    small = [word for word in SMALL if not (saves and word.startswith("checkpoint."))]
    overrides = dict(word.split("=", 1) for word in (*small, f"run.dir={run_dir}", *words))
    return ["train", str(recipe), *(f"{key}={value}" for key, value in overrides.items())]


def train(
    run_dir: Path, *words: str, command: Callable[..., subprocess.CompletedProcess[str]] = moefold
) -> subprocess.CompletedProcess[str]:
    """Train a small recipe. Fails with its output unless it exits 0."""
    done = command(*small(run_dir, *words))
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def metrics(run_dir: Path) -> list[dict[str, object]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir: Path) -> list[float]:
    """The loss of each step."""
    return [float(str(record["loss"])) for record in metrics(run_dir)]


def checkpoints(run_dir: Path) -> list[str]:
    """List a run's folder of checkpoints, half-written ones included."""
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def interrupted(
    run_dir: Path, after_steps: int, interrupt: Callable[[int], None], *words: str
) -> subprocess.CompletedProcess[str]:
    """Start a small run, call `interrupt` with its process id once it has written some steps, and wait for its end."""
    file = run_dir / "metrics.jsonl"

    def has_trained(_: int) -> bool:
        return file.exists() and len(file.read_text().splitlines()) >= after_steps

    return interrupt_forked(small(run_dir, *words), has_trained, interrupt, ROOT, environment())[0]


def child_ids(process_id: int) -> list[int]:
    """Process ids of the ranks of a run, in rank order."""
    listed = subprocess.run(["pgrep", "-P", str(process_id)], capture_output=True, text=True, check=True)
    return sorted(int(word) for word in listed.stdout.split())


def processes_of(session: int) -> list[int]:
    """The processes of a session that have not ended."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(int(folder.name))
    return found


def wait_until_gone(session: int) -> None:
    """Fail if a process of a session does not end."""
    deadline = time.monotonic() + 60
    while left := processes_of(session):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
