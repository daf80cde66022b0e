"""Jobs whose ranks are killed at a chosen point of a step, and their records."""

import os
import signal
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import moefold
from moefold.config.schema import Config
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.faults import FaultsConfig
from moefold.config.sections.run import RunConfig
from moefold.errors import RunError
from moefold.train.callbacks.callback import Callback, FinishedStep, TrainingContext
from tests.e2e.forked import PRELOAD
from tests.verify.recipes import tiny


@dataclass(frozen=True)
class Kill:
    """A signal of a rank to itself, as soon as its flight recorder has an event."""

    rank: int
    """Its number at the start of the job."""
    step: int
    """Step of the event; -1: any."""
    event: str
    """Start of the name of a phase or of a collective."""
    number: signal.Signals = signal.SIGKILL


class Killer(Callback):
    """Kills ranks, and writes down the samples of each step.

    Args:
        kills: the signals.
        folder: for the samples, one file for each process.
    """

    def __init__(self, kills: Sequence[Kill], folder: Path) -> None:
        self._kills = kills
        self._folder = folder
        self._job_rank = -1
        self._models: list[weakref.ref[Any]] = []

    def on_start(self, context: TrainingContext) -> None:
        alive = [model for model in self._models if model() is not None]
        self._models.append(weakref.ref(context.training.model.stages[0]))
        if self._job_rank >= 0:
            (self._folder / f"{self._job_rank}.models").write_text(f"{len(alive)} of {len(self._models) - 1}")
            return
        self._job_rank = context.groups.rank
        recorder: Any = context.groups.recorder
        for name in ("set_phase", "record_collective"):
            self._watch(recorder, name)

    def _watch(self, recorder: Any, name: str) -> None:
        record = getattr(recorder, name)

        def record_or_die(event: str, *args: Any) -> None:
            record(event, *args)
            for kill in self._kills:
                is_it = kill.rank == self._job_rank and kill.step in (-1, recorder.step)
                if is_it and event.startswith(kill.event):
                    os.kill(os.getpid(), kill.number)

        setattr(recorder, name, record_or_die)

    def after_step(self, context: TrainingContext, step: FinishedStep) -> None:
        if context.is_first_rank:
            with (self._folder / f"{self._job_rank}.steps").open("a") as file:
                file.write(f"{time.time()} {step.number} {context.position.samples} {context.groups.attn.dp.size}\n")


def recipe(
    run_dir: Path,
    *,
    steps: int = 6,
    faults: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
    **sections: Any,
) -> Config:
    """A tiny recipe in float64 that saves. Its reference has one rank."""
    train = {"lr_schedule": "constant", "global_batch_size": 8} | sections.pop("train", {})
    cfg = tiny(train=train, **sections)
    settings = {"timeout_s": 30.0} | ({} if cfg.parallel.world_size == 1 else {"on_loss": "regroup"}) | (faults or {})
    return replace(
        cfg,
        run=RunConfig(dir=str(run_dir), seed=3, steps=steps, device="cpu", dtype="float64"),
        checkpoint=CheckpointConfig(**{"every": 2, "keep": 0} | (checkpoint or {})),
        faults=FaultsConfig(**settings),
    )


@dataclass(frozen=True)
class Done:
    """How a job ended."""

    status: int
    folder: Path
    output: str
    errors: str

    @property
    def checkpoint(self) -> Path:
        """The last checkpoint."""
        return sorted((self.folder / "checkpoints").glob("step-*"))[-1]

    def steps(self) -> list[tuple[int, int, int]]:
        """Each step that was trained, in the order of time: its number, the samples read with it, dp."""
        lines = [line for file in self.folder.glob("*.steps") for line in file.read_text().splitlines()]
        return [tuple(map(int, line.split()[1:])) for line in sorted(lines, key=lambda line: float(line.split()[0]))]  # type: ignore[misc]

    def models_left(self) -> set[str]:
        """How many of the models before a regroup are still in memory."""
        return {file.read_text() for file in self.folder.glob("*.models")}


def train(cfg: Config, kills: Sequence[Kill] = ()) -> Done:
    """Train as a program does, which starts the ranks itself, in a process of its own."""
    folder = Path(cfg.run.dir)
    folder.mkdir(parents=True)
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=_train, args=(cfg, kills, folder))
    process.start()
    process.join(150)
    is_hanging = process.exitcode is None
    if is_hanging:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    output, errors = ((folder / name).read_text() for name in ("stdout", "stderr"))
    assert not is_hanging, output + errors
    assert process.exitcode is not None
    return Done(process.exitcode, folder, output, errors)


def _train(cfg: Config, kills: Sequence[Kill], folder: Path) -> None:
    os.setsid()
    os.environ["OMP_NUM_THREADS"] = "1"
    for stream, name in ((sys.stdout, "stdout"), (sys.stderr, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream.fileno())
    try:
        status = moefold.train_model(cfg, callbacks=[Killer(kills, folder)]).status
    except RunError as error:
        print(f"RunError: {error}", file=sys.stderr)
        status = 1
    sys.exit(status)
