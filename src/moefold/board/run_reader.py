"""Data of one run for the board, read while the run continues.

`RunReader.read` reads the new contents of the files. The other methods answer from memory, with JSON values.
"""

import base64
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from moefold.board.expert_tail import ExpertCountsTail, StepRanges, TraceTail
from moefold.board.json_tail import JsonTail, NewestValues
from moefold.board.metric_table import MetricTable
from moefold.board.rollout_index import RolloutIndex, RolloutQuery
from moefold.board.run_finder import FoundRun
from moefold.bounded_read import MAX_CONFIG_BYTES, read_json
from moefold.config.keys.paths import flat_settings, key_types, sections
from moefold.config.sections.run import SETTINGS_FILE
from moefold.config.upgrade.recipe import upgraded
from moefold.host.folder_lock import is_in_use
from moefold.message_text import format_list
from moefold.metrics.definitions import charts_of
from moefold.metrics.expert_balance import shares_of
from moefold.metrics.expert_counts import Array
from moefold.metrics.reader import MAX_STEP, METRICS_FILE, finite_number, is_step
from moefold.metrics.writer import FAULTS_FILE, to_json_value
from moefold.topology.layout import DEGREES

MAX_LAYERS = 4096
MAX_LAYER_RANGES = 256
LAYER_FIELDS = ("load", "load_cv", "dead_experts", "dropped_fraction", "router_entropy")
"""Fields of `moe_layers` shown over the steps."""
MAX_FAULTS = 1000
"""Number of newest faults that are kept."""
MAX_FAULT_CHARS = 20_000
RECENT_STEPS = 100
"""Number of last steps whose slowest ranks are counted."""
SLOWEST_RANK = "rank_times.slowest_rank"
MAX_RANK = 1 << 24
MAX_SLOWEST_RANGES = 120
MAX_SLOWEST_RANKS = 32
"""Ranges of steps and ranks of the map of slowest ranks."""
MAX_LOG2_SHARE = 2.0
"""Limit of the colour scale: shares beyond 1/4 and 4 times the mean have the end colours."""


class RunReader:
    """Thread-safe reader of the files of one run."""

    def __init__(self, run: FoundRun) -> None:
        self.run = run
        self._lock = threading.RLock()
        self._metrics = JsonTail(run.path / METRICS_FILE)
        self._faults_tail = JsonTail(run.path / FAULTS_FILE)
        self._counts = ExpertCountsTail(run.path)
        self._trace = TraceTail(run.path)
        self._rollouts = RolloutIndex(run.path)
        self._newest = NewestValues(run.path / METRICS_FILE)
        self._is_gone = False
        self._settings: dict[str, Any] = {}
        self._settings_stamp: tuple[int, int] | None = None
        self._settings_problem = ""
        self._metrics_generation = 0
        self._faults_generation = 0
        self._clear_faults()
        self._clear_metrics()

    def _clear_metrics(self) -> None:
        self._table = MetricTable()
        self._layers: tuple[int, ...] = ()
        self._layer_ranges: StepRanges | None = None
        self._memory: dict[str, Any] | None = None
        self._rank_times: tuple[int, dict[str, Any]] | None = None
        self._num_invalid_steps = 0

    def _clear_faults(self) -> None:
        self._faults: deque[dict[str, Any]] = deque(maxlen=MAX_FAULTS)
        self._num_faults = 0

    def read(self) -> None:
        """Read the new lines and records of the files since the last call, up to a limit of bytes per file."""
        with self._lock:
            self.peek()
            if self._is_gone:
                return
            self._read_metrics()
            self._counts.read()
            if self._counts.ranges is None:
                self._trace.read()
            self._rollouts.read()

    def peek(self) -> None:
        """Read the settings, the faults and the last lines of the metrics, for the row of the run.

        The row does not depend on other reads. If the folder is deleted, the data read so far is kept.
        """
        with self._lock:
            self._is_gone = not os.path.isdir(self.run.path)
            if self._is_gone:
                return
            self._read_settings()
            self._read_faults()
            self._newest.read()

    def _row_values(self) -> dict[str, float | None | str]:
        """Return the newest values for the row of the run, or None if there is no value, "nan": not finite."""
        values: dict[str, float | None | str] = {}
        for name in ("loss", "eval_loss", "rl.reward", "tokens_per_s"):
            newest = self._newest.value(name)
            pair = None if newest is None else (newest.step, newest.value)
            if pair is None and name == "eval_loss":
                # The newest evaluation may precede the last lines.
                latest = self._table.latest(name)
                pair = latest if latest is not None and latest[0] <= self._newest.step else None
            value = None if pair is None else pair[1]
            values[name.rpartition(".")[2]] = "nan" if value is not None and np.isnan(value) else value
        return values

    def summary(self) -> dict[str, Any]:
        """Return name, state, progress and newest numbers of the run, and the version of the read data.

        `version` changes when any other answer may have changed.
        """
        with self._lock:
            settings = self._settings
            steps = settings.get("run.steps")
            modified_s = _modified_s(self.run.path / METRICS_FILE)
            return {
                "key": self.run.key,
                "name": self.run.name,
                "path": str(self.run.path),
                "state": self._state(),
                "step": self._newest.step,
                "steps": steps if type(steps) is int else None,
                "modified_s": modified_s,
                "age_s": None if modified_s is None else max(0.0, time.time() - modified_s),
                **self._row_values(),
                "mapping": _mapping(settings),
                "num_faults": self._num_faults,
                "num_rollouts": len(self._rollouts),
                "problems": self._problems(),
                "read": min(self._metrics.read_fraction, self._rollouts.tail.read_fraction),
                "has_more": any(
                    tail.has_more for tail in (self._metrics, self._rollouts.tail, self._faults_tail, self._trace)
                ),
                "version": self._version(),
            }

    def series(
        self, first: int = 0, last: int = MAX_STEP, max_points: int = 600, weights: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Return every metric between two steps as `ShownCurve`, null for a gap. See `MetricTable.curve`."""
        with self._lock:
            series = {}
            for name in self._table.names:
                curve = self._table.curve(name, first, last, max_points, weights)
                # asdict would copy each list.
                series[name] = {field.name: getattr(curve, field.name) for field in fields(curve)}
            return {"series": series, "charts": charts_of(series), "axes": self._axes(max_points)}

    def experts(self) -> dict[str, Any]:
        """Return the balance of layers over steps, and of experts if the run counts their tokens.

        `shares` has a byte for each range of steps, layer and expert, in base64. 0 stands for no token, 1 to 255 for
        the logarithm of its tokens over the mean, from 1/4 to 4.
        """
        with self._lock:
            answer: dict[str, Any] = {"layers": None, "experts": None}
            ranges = self._layer_ranges
            if ranges is not None and len(ranges):
                means = ranges.means()
                fields = {name: _nullable(means[:, i]) for i, name in enumerate(LAYER_FIELDS)}
                answer["layers"] = {"numbers": list(self._layers), "steps": ranges.steps.tolist(), **fields}
            tail = self._counts if self._counts.ranges is not None else self._trace
            counts = tail.ranges
            if counts is not None:
                levels = share_levels(shares_of(counts.means()))
                answer["experts"] = {
                    "numbers": list(tail.layers),
                    "num_experts": counts.shape[1],
                    "steps": counts.steps.tolist(),
                    "is_sampled": tail.is_sampled,
                    "max_log2_share": MAX_LOG2_SHARE,
                    "shares": base64.b64encode(levels.tobytes()).decode("ascii"),
                }
            return answer

    def memory(self) -> dict[str, Any]:
        """Return the newest memory of every rank by part. The parts are null if the run did not measure them."""
        with self._lock:
            return {"memory": self._memory, "every": self._settings.get("metrics.memory_every")}

    def ranks(self) -> dict[str, Any]:
        """Return the newest times of ranks, how often each was the slowest, and the reported stragglers."""
        with self._lock:
            steps = ranks = np.array([], dtype=np.int64)
            if SLOWEST_RANK in self._table.names:
                steps, values = self._table.column(SLOWEST_RANK)
                is_rank = np.abs(values) <= MAX_RANK
                steps = steps[is_rank]
                ranks = values[is_rank].astype(np.int64)
            recent = Counter(ranks[-RECENT_STEPS:].tolist())
            return {
                "times": None if self._rank_times is None else _newest_times(*self._rank_times),
                "steps": recent.total(),
                "slowest": [{"rank": rank, "steps": count} for rank, count in recent.most_common(MAX_SLOWEST_RANKS)],
                "slowest_over_steps": slowest_over_steps(steps, ranks) if len(steps) else None,
                "stragglers": [fault for fault in self._faults if fault.get("kind") == "straggler"],
            }

    def faults(self) -> dict[str, Any]:
        """Return the newest faults, oldest first, and the number of all faults."""
        with self._lock:
            return {"faults": list(self._faults), "total": self._num_faults}

    def rollouts(self, query: RolloutQuery) -> dict[str, Any]:
        """Return the rollouts of a query."""
        with self._lock:
            return asdict(self._rollouts.find(query))

    def recipe(self) -> dict[str, Any]:
        """Return every setting of the run as "section.key"."""
        with self._lock:
            return {"settings": self._settings}

    def _version(self) -> str:
        numbers = (
            self._metrics.generation,
            self._metrics.offset,
            self._faults_tail.generation,
            self._faults_tail.offset,
            self._counts.generation,
            self._trace.generation,
            self._trace.last_step,
            self._rollouts.tail.generation,
            self._rollouts.tail.offset,
            *(self._settings_stamp or ()),
        )
        return ".".join(map(str, numbers))

    def _problems(self) -> list[str]:
        if self._is_gone:
            return ["the folder is gone: this is what was read of it"]
        problems = [*self._metrics.problems, *self._faults_tail.problems, *self._rollouts.tail.problems]
        problems += [text for text in (self._settings_problem, self._counts.problem, self._trace.problem) if text]
        if self._newest.is_cut and not is_in_use(self.run.path):
            problems.append(f"{METRICS_FILE}: the last line is not complete; it is left out")
        if self._num_invalid_steps:
            problems.append(f"{METRICS_FILE}: {self._num_invalid_steps} lines have no step number")
        if self._table.left_out:
            problems.append(f"{METRICS_FILE}: metrics beyond the first {len(self._table.names)} are left out")
        if not self._newest.step and not problems:
            problems.append("no step yet")
        return problems

    def _state(self) -> str:
        """Return the state: "running" if a job holds the lock of the folder, "finished", "stopped" or "gone"."""
        if self._is_gone:
            return "gone"
        if is_in_use(self.run.path):
            return "running"
        steps = self._settings.get("run.steps")
        return "finished" if type(steps) is int and self._newest.step >= steps else "stopped"

    def _read_settings(self) -> None:
        path = self.run.path / SETTINGS_FILE
        try:
            status = path.stat()
        except OSError:
            self._settings_problem = f"{SETTINGS_FILE} is missing"
            return
        stamp = (status.st_mtime_ns, status.st_size)
        if stamp == self._settings_stamp:
            return
        try:
            tree = read_json(path, MAX_CONFIG_BYTES)
        except (OSError, ValueError) as error:
            self._settings_problem = f"{SETTINGS_FILE} cannot be read: {error}"
            return
        if not isinstance(tree, dict) or not all(isinstance(keys, dict) for keys in tree.values()):
            self._settings_problem = f"{SETTINGS_FILE} cannot be read: it is not an object of sections"
            return
        tree, _ = upgraded(tree)
        values = {f"{section}.{key}": value for section, keys in tree.items() for key, value in keys.items()}
        self._settings_stamp = stamp
        self._settings_problem = _version_problem(values)
        self._settings = to_json_value(flat_settings(values))

    def _read_metrics(self) -> None:
        lines = self._metrics.read()
        if self._metrics.generation != self._metrics_generation:
            self._metrics_generation = self._metrics.generation
            self._clear_metrics()
        for line in lines:
            step = line.record.get("step")
            if not is_step(step):
                self._num_invalid_steps += 1
                continue
            self._table.append(step, line.record)
            self._add_layers(step, line.record)
            self._add_ranks(step, line.record)

    def _add_layers(self, step: int, record: Mapping[str, Any]) -> None:
        layers = record.get("moe_layers")
        if not isinstance(layers, list) or not 0 < len(layers) <= MAX_LAYERS:
            return
        if not all(isinstance(layer, dict) for layer in layers):
            return
        numbers = tuple(layer.get("layer") for layer in layers)
        if not all(type(number) is int for number in numbers):
            return
        try:
            # None, for a value that was not finite, becomes NaN.
            values = np.array([[layer.get(field) for layer in layers] for field in LAYER_FIELDS], dtype=np.float64)
        except (TypeError, ValueError, OverflowError):
            return
        if self._layer_ranges is None or numbers != self._layers:
            self._layers = numbers
            self._layer_ranges = StepRanges((len(LAYER_FIELDS), len(numbers)), MAX_LAYER_RANGES)
        self._layer_ranges.append(step, values)

    def _add_ranks(self, step: int, record: Mapping[str, Any]) -> None:
        memory = record.get("memory_by_part")
        if isinstance(memory, dict):
            self._memory = {"step": step} | {
                name: _part_bytes(memory.get(name)) for name in ("peak_bytes", "current_bytes")
            }
        times = record.get("rank_times")
        if isinstance(times, dict):
            self._rank_times = (step, times)

    def _read_faults(self) -> None:
        lines = self._faults_tail.read()
        if self._faults_tail.generation != self._faults_generation:
            self._faults_generation = self._faults_tail.generation
            self._clear_faults()
        for line in lines:
            self._num_faults += 1
            if line.length <= MAX_FAULT_CHARS:
                self._faults.append(to_json_value(line.record))
            else:
                kept_fields = {key: line.record.get(key) for key in ("time_s", "step", "kind", "action")}
                self._faults.append(
                    to_json_value(kept_fields) | {"left_out": f"{line.length:,} bytes; see {FAULTS_FILE}"}
                )

    def _axes(self, max_points: int) -> dict[str, Any]:
        """Return tokens and seconds of training at some steps, to draw metrics over them."""
        axes: dict[str, Any] = {}
        for name, metric in (("tokens", "tokens"), ("time_s", "step_time_s")):
            if metric not in self._table.names:
                continue
            steps, values = self._table.column(metric)
            numbers = np.nan_to_num(values)
            if name == "time_s":
                numbers = np.cumsum(numbers)
            kept_rows = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), max_points)).astype(np.int64))
            axes[name] = {"steps": steps[kept_rows].tolist(), "values": numbers[kept_rows].tolist()}
        return axes


def _newest_times(step: int, times: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {name: finite_number(value) for name, value in times.items()}
    return {"step": step} | {name: value for name, value in numbers.items() if not np.isnan(value)}


def slowest_over_steps(steps: Array, ranks: Array) -> dict[str, Any]:
    """Return the shares [ranges][ranks] of the steps for which each rank was the slowest."""
    unique, counts = np.unique(ranks, return_counts=True)
    shown_ranks = np.sort(unique[np.argsort(-counts, kind="stable")[:MAX_SLOWEST_RANKS]])
    edges = np.unique(np.linspace(0, len(steps), min(len(steps), MAX_SLOWEST_RANGES) + 1).astype(np.int64))
    is_slowest = ranks[:, None] == shown_ranks
    shares = np.add.reduceat(is_slowest, edges[:-1], axis=0, dtype=np.float64) / np.diff(edges)[:, None]
    return {
        "ranks": shown_ranks.tolist(),
        "left_out": len(unique) - len(shown_ranks),
        "steps": np.stack([steps[edges[:-1]], steps[edges[1:] - 1]], axis=1).tolist(),
        "shares": _nullable(shares),
    }


def _version_problem(settings: Mapping[str, Any]) -> str:
    """Return the differences of a run's keys from the keys of this version of moefold, or empty if there are none."""
    all_keys = {f"{section}.{key}" for section in sections() for key in key_types(section)}
    differences = [
        f"{words} {format_list(sorted(keys))}"
        for words, keys in (("it has no", all_keys - set(settings)), ("it has", set(settings) - all_keys))
        if keys
    ]
    return f"{SETTINGS_FILE} is of another version of moefold: {'; '.join(differences)}" if differences else ""


def share_levels(shares: Array) -> Array:
    """Return shares of experts as bytes: 0 for 0, else 1 to 255 on the scale of log2 from -2 to 2."""
    positive = shares > 0
    log2 = np.log2(shares, out=np.zeros_like(shares), where=positive)
    scaled = (np.clip(log2, -MAX_LOG2_SHARE, MAX_LOG2_SHARE) + MAX_LOG2_SHARE) / (2 * MAX_LOG2_SHARE)
    return np.where(positive, 1 + np.rint(scaled * 254), 0).astype(np.uint8)


def _nullable(values: Array) -> list[list[float | None]]:
    """Return a matrix with four digits for JSON, None for NaN."""
    return [[None if np.isnan(value) else float(f"{value:.4g}") for value in row] for row in values.tolist()]


def _part_bytes(value: Any) -> dict[str, list[float]]:
    """Return the bytes of each part and rank, only for lists of numbers."""
    if not isinstance(value, dict):
        return {}
    return {
        str(part): [0.0 if np.isnan(number := finite_number(size)) else number for size in sizes]
        for part, sizes in value.items()
        if isinstance(sizes, list)
    }


def _mapping(settings: Mapping[str, Any]) -> str:
    """Return the parallel degrees above 1 as a short text: "8 ranks: tp2 cp2 pp2 ep4"."""
    world_size = settings.get("parallel.world_size")
    if type(world_size) is not int:
        return ""
    degrees = {axis: settings.get(f"parallel.{axis}") for axis in DEGREES}
    text = " ".join(f"{axis}{degree}" for axis, degree in degrees.items() if type(degree) is int and degree > 1)
    ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
    return f"{ranks}: {text}" if text else ranks


def _modified_s(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
