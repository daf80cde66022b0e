"""Writers of RUN_DIR/metrics.jsonl (one JSON object per step) and RUN_DIR/faults.jsonl (one per fault).

One rank writes metrics.jsonl and flushes it every step. faults.jsonl is append-only: unlike metrics.jsonl it is not
truncated by a rollback or a resume.
"""

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO, TypeVar

from moefold.config.sections.metrics import MetricsConfig
from moefold.errors import ConfigError
from moefold.metrics.reader import METRICS_FILE, NONFINITE, nonfinite_of, read_lines, read_records

if TYPE_CHECKING:
    from moefold.metrics.tracker import Tracker

logger = logging.getLogger(__name__)
EVAL_LOSS = "eval_loss"
Result = TypeVar("Result")


class AuxiliaryOutputs:
    """Metrics, faults, trackers and plots of a run. Training and checkpoints continue if these fail.

    A full disk, a deleted folder or an exception of a tracker must not lose the state of a run. The first failure of an
    output is reported in one line, and the output is not used again until the next start.
    """

    def __init__(self, report: Callable[[str], None] = logger.warning) -> None:
        self._report = report
        self._failed: set[str] = set()
        self.rejects_settings = False
        """True if a ConfigError is raised, so that the user can correct it: only before the first step."""

    def has_failed(self, name: str) -> bool:
        """Return whether an output has failed."""
        return name in self._failed

    def attempt(
        self, name: str, write: Callable[[], Result], errors: tuple[type[Exception], ...] = (Exception,)
    ) -> Result | None:
        """Call a function that writes to an output, unless that has failed before, and return its result, or None.

        Args:
            name: the output, for the message: a file of the run folder, or a tracker.
            write: must not communicate with other ranks, unless `errors` excludes errors of the communication.
            errors: the reported failures. Other failures are raised.
        """
        if name in self._failed:
            return None
        try:
            return write()
        except errors as error:
            if self.rejects_settings and isinstance(error, ConfigError):
                raise
            self._failed.add(name)
            self._report(
                f"warning: {name} cannot be written any more ({_one_line(error)}): the run goes on without it, and "
                "saves its checkpoints as ever; the next start writes it again"
            )
        return None


class MetricsWriter:
    """Writer that appends each step to RUN_DIR/metrics.jsonl and logs it to the trackers, on one rank only.

    Opening removes `removed_lines` lines: lines after `resume_step`, whose steps a killed run repeats after its last
    checkpoint, and a line that the kill truncated.

    Args:
        run_dir: folder of the run. It is created if missing.
        resume_step: step of the checkpoint that the run continues from. 0 for a new run.
        config: the resolved recipe, for trackers that show it.
        outputs: reports an output that fails and disables it.
    """

    def __init__(
        self,
        run_dir: Path,
        metrics: MetricsConfig,
        *,
        resume_step: int = 0,
        config: Mapping[str, Any] | None = None,
        outputs: AuxiliaryOutputs | None = None,
    ) -> None:
        self._outputs = outputs = AuxiliaryOutputs() if outputs is None else outputs
        self._path = run_dir / METRICS_FILE
        self.removed_lines = 0
        self._file: TextIO | None = None
        outputs.attempt(METRICS_FILE, lambda: self._open(resume_step))
        self._trackers: dict[str, Tracker] = {}
        if metrics.tensorboard or metrics.wandb:
            from moefold.metrics.tracker import tracker_starters

            starters = tracker_starters(run_dir, metrics, resume_step=resume_step, config=config or {})
            started = {name: outputs.attempt(name, start) for name, start in starters.items()}
            self._trackers = {name: tracker for name, tracker in started.items() if tracker is not None}

    def write(self, values: Mapping[str, Any]) -> None:
        """Append one step, flush to the operating system, and log it to the trackers."""
        self._outputs.attempt(METRICS_FILE, lambda: self._append(values))
        self._track(lambda tracker: tracker.log(values))

    def lacks_evaluation(self, step: int) -> bool:
        """Return whether the file has a step without its evaluation loss."""
        return bool(self._outputs.attempt(METRICS_FILE, lambda: self._lacks_evaluation(step)))

    def _lacks_evaluation(self, step: int) -> bool:
        records = [record for record in read_records(self._path.parent) if record["step"] == step]
        return bool(records) and records[-1].get(EVAL_LOSS) is None and EVAL_LOSS not in nonfinite_of(records[-1])

    def has_step(self, step: int) -> bool:
        """Return whether the file has a line of a step."""
        records = self._outputs.attempt(METRICS_FILE, lambda: read_records(self._path.parent))
        return any(record["step"] == step for record in records or ())

    def add_evaluation(self, step: int, eval_loss: float) -> None:
        """Write the evaluation loss into the line of a step, or as the first line, and log it to the trackers."""
        self._outputs.attempt(METRICS_FILE, lambda: self._add_evaluation(step, eval_loss))
        self._track(lambda tracker: tracker.log_evaluation(step, eval_loss))

    def add_held_out_reward(self, step: int, reward: float) -> None:
        """Write the mean reward of held-out prompts into the line of a step."""
        self._outputs.attempt(METRICS_FILE, lambda: self._add_held_out_reward(step, reward))

    def _open(self, resume_step: int) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.removed_lines = truncate_metrics(self._path, resume_step)
        self._file = self._path.open("a", encoding="utf-8")

    def _append(self, values: Mapping[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(to_record(values), allow_nan=False) + "\n")
        self._file.flush()

    def _track(self, log: "Callable[[Tracker], None]") -> None:
        for name, tracker in self._trackers.items():
            self._outputs.attempt(name, partial(log, tracker))

    def _add_evaluation(self, step: int, eval_loss: float) -> None:
        def add(record: dict[str, Any]) -> None:
            is_finite = math.isfinite(eval_loss)
            record[EVAL_LOSS] = eval_loss if is_finite else None
            if not is_finite:
                record[NONFINITE] = nonfinite_of(record) | {EVAL_LOSS: str(eval_loss)}

        self._change_line(step, add, [json.dumps(to_record({"step": step, EVAL_LOSS: eval_loss})) + "\n"])

    def _add_held_out_reward(self, step: int, reward: float) -> None:
        def add(record: dict[str, Any]) -> None:
            record["rl"] = {**(record.get("rl") or {}), "eval_reward": reward}

        self._change_line(step, add, [])

    def _change_line(self, step: int, change: "Callable[[dict[str, Any]], None]", first_lines: list[str]) -> None:
        """Change the line of a step. A file without lines gets `first_lines`."""
        lines = []
        for line, record in read_lines(self._path):
            if record is not None and record["step"] == step:
                change(record)
                line = json.dumps(record, allow_nan=False)
            lines.append(line + "\n")
        assert self._file is not None
        self._file.close()
        _write_atomically(self._path, lines or first_lines)
        self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Close the file and finish the trackers, except a failed tracker, which may hang."""
        if self._file is not None and self._outputs.has_failed(METRICS_FILE):
            # Closing would write the rest of the buffer again.
            with contextlib.suppress(OSError):
                self._file.close()
        elif self._file is not None:
            self._outputs.attempt(METRICS_FILE, self._file.close)
        self._track(lambda tracker: tracker.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def to_record(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record in metrics.jsonl of the numbers of a step.

    JSON has no NaN and no infinity, so such a value is written as null. The key `nonfinite`, present only then, names
    each value: `{"loss": null, ..., "nonfinite": {"loss": "nan", "expert_load[2]": "inf"}}`.
    """
    nonfinite: dict[str, str] = {}
    record = {name: _to_plain(value, name, nonfinite) for name, value in values.items()}
    return record | {NONFINITE: nonfinite} if nonfinite else record


def _to_plain(value: Any, name: str, nonfinite: dict[str, str]) -> Any:
    """Return a JSON-serialisable value. Record NaN and infinities in `nonfinite` under their full names."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {key: _to_plain(inner, f"{name}.{key}", nonfinite) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(inner, f"{name}[{i}]", nonfinite) for i, inner in enumerate(value)]
    if value is None or isinstance(value, str) or math.isfinite(value):
        return value
    nonfinite[name] = str(float(value))
    return None


def truncate_metrics(path: Path, last_step: int) -> int:
    """Remove steps after `last_step` and invalid lines from a metrics file, atomically, and return their number."""
    kept_lines: list[str] = []
    removed = 0
    for line, record in read_lines(path):
        if record is not None and record["step"] <= last_step:
            kept_lines.append(line + "\n")
        else:
            removed += 1
    if removed or _ends_mid_line(path):
        _write_atomically(path, kept_lines)
    return removed


def _write_atomically(path: Path, lines: Sequence[str]) -> None:
    draft = path.with_name(path.name + ".tmp")
    with draft.open("w", encoding="utf-8") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _ends_mid_line(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


FAULTS_FILE = "faults.jsonl"
"""Name of the fault log in the run folder. It is absent before the first fault."""
ROLLOUTS_FILE = "rollouts.jsonl"
"""Name of the file of rollouts in the run folder: one JSON object per rollout."""
MISMATCH_FILE = "mismatch.jsonl"
"""Name of the file of the rollouts that ended a run because the sampler did not match training."""


def log_fault(run_dir: Path, record: Mapping[str, Any]) -> None:
    """Append one fault, with the time in seconds since 1970. NaN and infinities are written as strings."""
    line = json.dumps({"time_s": round(time.time(), 3), **{key: to_json_value(value) for key, value in record.items()}})
    with (run_dir / FAULTS_FILE).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def to_json_value(value: Any) -> Any:
    """Return a JSON value with NaN and infinities as strings, because JSON lacks them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: to_json_value(inner) for key, inner in value.items()}
    return [to_json_value(inner) for inner in value] if isinstance(value, list | tuple) else value


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
