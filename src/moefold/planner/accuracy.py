"""Accuracy of the planner: predicted against measured throughput, row by row of a table.

`predict_own_run` prices a run of moefold: as `moefold plan --explain` does for the axes of the row. Rows of other
software are priced by `benchmarks/published`, which a checkout has.
"""

import csv
import io
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median

from moefold.bounded_read import MAX_TABLE_BYTES, read_bytes
from moefold.errors import ConfigError
from moefold.planner.axis_words import parse_axes
from moefold.planner.cost_model.workload import PRECISIONS, TrainingWorkload
from moefold.planner.mapping import ParallelMapping
from moefold.planner.plan_request import PlanOptions, plan_request
from moefold.planner.planner import Planner
from moefold.planner.search.space import explain_illegal

_RUN_COLUMNS = ("source", "model", "gpu", "n_gpus", "precision", "seq_len", "gbs")
_MAPPING_COLUMNS = ("mbs", "tp", "etp", "cp", "ep", "pp", "vpp")
COLUMNS = (*_RUN_COLUMNS, *_MAPPING_COLUMNS, "metric", "value", "method", "note")
METRICS = ("mfu_pct", "tflops_per_gpu", "tokens_per_s_per_gpu")
OUT_OF_MEMORY = "OOM"
EMPTY_CELLS = ("", "-", "n/a", "na", "none")
OWN = "moefold"
"""First word of the method of a run of moefold."""


class SkipRowError(ValueError):
    """Reason why a row cannot be priced."""


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """One row of a table, as text."""

    cells: dict[str, str]

    def __getitem__(self, column: str) -> str:
        return self.cells[column].strip()

    def positive_int(self, column: str) -> int | None:
        """Return the integer of a cell, or None if it is empty."""
        text = self[column]
        if text.lower() in EMPTY_CELLS:
            return None
        if not text.isdecimal():
            raise SkipRowError(f"{column}={text!r} is not an integer")
        if int(text) < 1:
            raise SkipRowError(f"{column}={text} is below 1")
        return int(text)

    def check_metric(self) -> None:
        """Raise SkipRowError if the planner does not predict the metric."""
        if self["metric"] not in METRICS:
            raise SkipRowError(f"metric {self['metric']!r} is not known")

    @property
    def is_own(self) -> bool:
        """True for a run of moefold."""
        return [word.lower() for word in self.method_words[:1]] == [OWN]

    @property
    def method_words(self) -> list[str]:
        """The words of the method, between spaces or commas as in `parse_axes`."""
        return self["method"].replace(",", " ").split()


def read_rows(path: Path) -> list[MeasuredRow]:
    """Read the rows of a table.

    Raises:
        ConfigError: the file cannot be read or lacks a column.
    """
    try:
        text = read_bytes(path, MAX_TABLE_BYTES).decode("utf-8")
        reader = csv.DictReader(io.StringIO(text, newline=""))
        lacking = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
        if lacking:
            raise ConfigError(f"{path}: lacks the columns {', '.join(lacking)}; see `moefold plan-accuracy --help`")
        return [MeasuredRow({column: line[column] or "" for column in COLUMNS}) for line in reader]
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read as CSV: {error}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Measurement and prediction of one row: a number, or OOM."""

    row: MeasuredRow
    measured: float | str
    predicted: float | str
    mapping: ParallelMapping
    workload: TrainingWorkload
    unseen_error_pct: float | None = None
    """Error under a fit without the configuration, or None if the row was not fitted."""

    @property
    def precision(self) -> str:
        """Precision of the GEMMs."""
        return self.workload.precision

    @property
    def error_pct(self) -> float | None:
        """Error of the prediction in percent of the measurement, or None if one of them is OOM."""
        if isinstance(self.measured, str) or isinstance(self.predicted, str):
            return None
        return (self.predicted / self.measured - 1) * 100


ErrorStatistics = dict[str, float]
"""Number of rows, and mean, median and bias of their errors in percent. A positive bias means too fast predictions."""


def error_statistics(errors: Sequence[float]) -> ErrorStatistics:
    """Return the statistics of at least one error."""
    sizes = [abs(error) for error in errors]
    return {
        "rows": len(sizes),
        "mean_abs_error_pct": sum(sizes) / len(sizes),
        "median_abs_error_pct": median(sizes),
        "bias_pct": sum(errors) / len(sizes),
    }


KINDS: dict[str, Callable[["Prediction"], bool]] = {
    "ZeRO-3": lambda p: p.mapping.zero == 3,
    "pipelines": lambda p: p.mapping.pp > 1,
    "context parallelism": lambda p: p.mapping.cp > 1,
    "no CUDA graphs": lambda p: p.workload.launched[0] > 0,
    "natural routing": lambda p: p.workload.expert_spread > 0,
}
"""Kinds of rows whose errors differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """Predictions of all rows of a table."""

    predictions: tuple[Prediction, ...]
    skipped: dict[str, int]
    """Number of skipped rows by reason."""

    @property
    def abs_errors_pct(self) -> list[float]:
        """Absolute errors of the rows with a number on both sides."""
        return [abs(p.error_pct) for p in self.predictions if p.error_pct is not None]

    @property
    def mean_abs_error_pct(self) -> float | None:
        """Mean absolute error over the rows with a number on both sides."""
        return mean_abs_error_pct(self.predictions)

    @property
    def by_gpu_precision(self) -> dict[str, dict[str, float | int | None]]:
        """Number of rows and mean absolute error for each device and precision."""
        groups: dict[str, list[Prediction]] = defaultdict(list)
        for prediction in self.predictions:
            groups[f"{prediction.row['gpu']} {prediction.precision}"].append(prediction)
        return {
            name: {"rows": len(group), "mean_abs_error_pct": mean_abs_error_pct(group)}
            for name, group in sorted(groups.items())
        }

    def errors_by_kind(self) -> dict[str, dict[str, ErrorStatistics | None]]:
        """Return the errors of all rows, of each GPU and of each of `KINDS`, "fitted" and "unseen".

        An unseen error is the error under a fit without the configuration. It is None if no row of a group was fitted,
        because then all its errors are unseen.
        """
        rows = [p for p in self.predictions if p.error_pct is not None]
        groups = {"all": rows}
        groups |= {gpu: [p for p in rows if p.row["gpu"] == gpu] for gpu in sorted({p.row["gpu"] for p in rows})}
        groups |= {name: [p for p in rows if is_kind(p)] for name, is_kind in KINDS.items()}
        found: dict[str, dict[str, ErrorStatistics | None]] = {}
        for name, group in groups.items():
            errors = [(p.error_pct, p.unseen_error_pct) for p in group if p.error_pct is not None]
            if errors:
                unseen = [seen if other is None else other for seen, other in errors]
                was_fitted = any(other is not None for _, other in errors)
                found[name] = {
                    "fitted": error_statistics([seen for seen, _ in errors]),
                    "unseen": error_statistics(unseen) if was_fitted else None,
                }
        return found

    @property
    def memory_mistakes(self) -> tuple[Prediction, ...]:
        """Rows that ran and are predicted not to fit, and the reverse."""
        return tuple(p for p in self.predictions if isinstance(p.measured, str) != isinstance(p.predicted, str))

    def as_dict(self) -> dict[str, object]:
        """Return the output of `moefold plan-accuracy --json`."""
        return {
            "rows": [
                {
                    **{column: p.row[column] for column in ("source", "model", "gpu", "metric")},
                    "measured": p.measured,
                    "predicted": p.predicted,
                    "error_pct": p.error_pct,
                }
                for p in self.predictions
            ],
            "mean_abs_error_pct": self.mean_abs_error_pct,
            "by_gpu_precision": self.by_gpu_precision,
            "by_kind": self.errors_by_kind(),
            "num_skipped": sum(self.skipped.values()),
            "skipped": self.skipped,
        }


def mean_abs_error_pct(predictions: Sequence[Prediction]) -> float | None:
    """Return the mean of the absolute errors, or None if there are none."""
    errors = [abs(p.error_pct) for p in predictions if p.error_pct is not None]
    return sum(errors) / len(errors) if errors else None


RowReader = Callable[[MeasuredRow], Prediction]
"""Prices one row, or raises SkipRowError."""


def validate_predictions(path: Path, predict_row: RowReader) -> Accuracy:
    """Predict every row of a table that can be priced.

    Raises:
        ConfigError: the file cannot be read or lacks a column.
    """
    predictions = []
    skipped = Counter[str]()
    for row in read_rows(path):
        try:
            predictions.append(predict_row(row))
        except SkipRowError as reason:
            skipped[str(reason)] += 1
    return Accuracy(predictions=tuple(predictions), skipped=dict(skipped.most_common()))


def predict_own_run(row: MeasuredRow) -> Prediction:
    """Predict a run of moefold. The planner chooses the axes that the row does not give, as in `--explain`.

    Raises:
        SkipRowError: other software ran, or the run cannot be planned.
    """
    if not row.is_own:
        raise SkipRowError(
            f"method {row['method']!r} is not {OWN}: other software is priced by the same command of a checkout "
            "(pip install -e .)"
        )
    row.check_metric()
    measured = parse_measured(row["value"])
    given = {axis: row.positive_int(axis) for axis in _MAPPING_COLUMNS}
    if lacking := [axis for axis in ("tp", "cp", "ep", "pp") if given[axis] is None]:
        raise SkipRowError(f"incomplete mapping: {', '.join(lacking)} not given")
    given["etp"] = given["etp"] or 1
    sizes = {column: row.positive_int(column) for column in ("n_gpus", "seq_len", "gbs")}
    if lacking := [column for column, size in sizes.items() if size is None]:
        raise SkipRowError(f"incomplete run: {', '.join(lacking)} not given")
    precision = row["precision"].lower()
    if precision not in PRECISIONS:
        raise SkipRowError(f"precision {row['precision']!r} is not known")
    gpu = row["gpu"]
    words = [f"{axis}={degree}" for axis, degree in given.items() if degree] + row.method_words[1:]
    try:
        options = PlanOptions(
            num_gpus=sizes["n_gpus"],
            seq_len=sizes["seq_len"],
            global_batch_size=sizes["gbs"],
            precision=precision,
            fix=parse_axes(words, "method"),
            memory_reserve=0.0,
        )
        request = plan_request(row["model"], gpu if gpu.endswith(".toml") else gpu.lower(), options)
        planner = Planner(request)
        if not planner.num_folds:
            raise SkipRowError(f"illegal: {explain_illegal(planner.space.constraints, request.restriction)}")
        plan = planner.top_plans(1)[0]
    except ConfigError as error:
        raise SkipRowError(str(error)) from None
    throughput = {
        "mfu_pct": 100 * plan.time.mfu,
        "tflops_per_gpu": plan.time.tflops_per_gpu,
        "tokens_per_s_per_gpu": plan.time.tokens_per_s_per_gpu,
    }
    predicted = throughput[row["metric"]] if plan.memory.fits else OUT_OF_MEMORY
    return Prediction(row=row, measured=measured, predicted=predicted, mapping=plan.mapping, workload=request.workload)


def parse_measured(text: str) -> float | str:
    """Return the throughput of a cell, or OOM.

    Raises:
        SkipRowError: it is neither.
    """
    if text.upper() == OUT_OF_MEMORY:
        return OUT_OF_MEMORY
    try:
        number = float(text)
    except ValueError:
        raise SkipRowError(f"value {text!r} is not a number") from None
    if not 0 < number < inf:
        raise SkipRowError(f"value {text!r} is not a throughput: it must be a number above 0, or {OUT_OF_MEMORY}")
    return number
