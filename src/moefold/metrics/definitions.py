"""Definitions of every reported number, from `definitions.toml`, and places where it is shown.

metrics.jsonl, the line of a step, the trackers, `moefold inspect`, the board and the page docs/metrics.md (`python -m
tools.metrics_page > docs/metrics.md`) read this table.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Literal

from moefold.errors import ConfigError, RunError
from moefold.metrics.reader import NONFINITE
from moefold.package_table import package_table
from moefold.units import format_count


@dataclass(frozen=True, slots=True)
class Metric:
    """Definition of a number."""

    name: str
    """Key of a record. "*" stands for any key."""
    unit: str
    """Unit, or empty for a ratio, a label or a number without a unit."""
    counts: str
    elsewhere: str = ""
    """Name and, if different, definition in Megatron-LM, torchtitan, transformers, TRL or vLLM. It may be empty."""
    reduce: Literal["", "sum", "mean", "max", "min"] = ""
    """Reduction of the values of all ranks. Empty means every rank has the same value, or it is already reduced."""


@dataclass(frozen=True, slots=True)
class MetricGroup:
    """Numbers that are reported together."""

    title: str
    intro: str
    prefix: str
    """Path of the record of the numbers, with a dot at its end: "rl.", or empty for the record itself."""
    metrics: tuple[Metric, ...]


COUNTS = frozenset({"steps", "tokens", "rows", "bytes", "experts", "groups", "rounds", "sites"})
"""Units of whole numbers."""
_TABLE = package_table("metrics/definitions.toml")
MISREAD: tuple[str, ...] = tuple(_TABLE["misread"])
"""Definitions that differ from what a reader may expect. The page and the help of `moefold inspect` begin with them."""


def number_of(values: Mapping[str, Any], path: str) -> float | None:
    """Return a number of a step by its path, "rl.reward", for a list the maximum, with NaN. None if absent."""
    value: Any = values
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, list | tuple):
        return max(value, key=lambda value: (math.isnan(value), value), default=None)
    return None if value is None else float(value)


def _loss(loss: float) -> str:
    """Return a loss in seven columns, with four decimals, or two from 100 on."""
    return f"{loss:7.2f}" if abs(loss) >= 100 else f"{loss:7.4f}"


def _norm(norm: float) -> str:
    """Return a norm in six columns."""
    if norm < 10:
        return f"{norm:6.3f}"
    return f"{norm:6.1f}" if norm < 1000 else f"{norm:6.0e}"


@dataclass(frozen=True, slots=True)
class LineColumn:
    """Column of the line of a step."""

    rank: int
    """Columns of a higher rank are dropped first if a line is too short."""
    name: str
    unit: str
    counts: str
    path: str
    """Path of the number. Empty means the line itself has the text."""
    form: Callable[[float], str]
    width: int
    """Width of a blank column."""
    when: Callable[[Mapping[str, Any], bool], Any] = lambda values, is_gpu: True
    """Returns whether a step shows the column."""

    def text(self, values: Mapping[str, Any], *, is_gpu: bool) -> str:
        """Return the text of a step, or empty without a value."""
        value = number_of(values, self.path)
        return self.form(value) if value is not None and self.when(values, is_gpu) else ""


def _on_pairs(values: Mapping[str, Any], is_gpu: bool) -> bool:
    """Return whether the loss compares completions. A loss of a program may also have one of the metrics."""
    return (values["loss_metrics"] or {}).keys() >= {"accuracy", "margin"}


LINE = (
    LineColumn(0, "step", "steps", "`step` and the last one, `run.steps`", "", str, 0),
    LineColumn(0, "loss", "nats", "`loss`", "loss", lambda loss: f"loss {_loss(loss)}", 12),
    LineColumn(
        14, "indexer", "nats", "`indexer_loss`, if it is not 0", "indexer_loss", lambda loss: f"indexer {_loss(loss)}",
        15, lambda values, is_gpu: values["indexer_loss"],
    ),
    LineColumn(1, "eval", "nats", "the last `eval_loss`", "eval_loss", lambda loss: f"eval {_loss(loss)}", 12),
    LineColumn(2, "reward", "", "`rl.reward`", "rl.reward", "reward {:7.3f}".format, 14),
    LineColumn(
        3, "acc", "", "of preferences: `loss_metrics.accuracy`", "loss_metrics.accuracy", "acc {:6.1%}".format, 10,
        _on_pairs,
    ),
    LineColumn(
        4, "margin", "nats", "of preferences: `loss_metrics.margin`", "loss_metrics.margin", "margin {:8.4f}".format,
        15, _on_pairs,
    ),
    LineColumn(11, "lr", "", "`lr`", "lr", "lr {:8.2e}".format, 11),
    LineColumn(5, "grad norm", "", "`grad_norm`", "grad_norm", lambda norm: f"grad norm {_norm(norm)}", 16),
    LineColumn(
        6, "tokens/s", "tokens/s", "`tokens_per_s`; of all ranks", "tokens_per_s",
        lambda rate: f"{format_count(rate):>5} tokens/s", 14,
    ),
    LineColumn(
        7, "TFLOP/s", "TFLOP/s", "on a GPU of unknown peak: `tflops_per_rank`", "tflops_per_rank",
        "{:4.0f} TFLOP/s".format, 12, lambda values, is_gpu: is_gpu and values["mfu"] is None,
    ),
    LineColumn(8, "MFU", "", "on a GPU: `mfu`", "mfu", "MFU {:6.1%}".format, 10, lambda values, is_gpu: is_gpu),
    LineColumn(
        9, "GiB", "GiB", "on a GPU: `memory_gib`", "memory_gib", "{:5.1f} GiB".format, 9, lambda values, is_gpu: is_gpu
    ),
    LineColumn(12, "load", "", "largest of `expert_load`", "expert_load", "load {:5.2f}x".format, 11),
    LineColumn(
        13, "dropped", "", "`dropped_fraction`, if it is not 0", "dropped_fraction", "dropped {:6.1%}".format, 14,
        lambda values, is_gpu: values["dropped_fraction"] > 0,
    ),
    LineColumn(
        10, "left", "time",
        "mean wall time of the last 50 steps, evaluation and saving included, x the steps to come", "", str, 12,
    ),
)  # fmt: skip
"""Columns of the line of a step, from left to right."""
_LINE_METRICS = tuple(Metric(column.name, column.unit, column.counts) for column in LINE)
GROUPS = tuple(
    MetricGroup(
        group["title"],
        group["intro"],
        group["prefix"],
        (*(_LINE_METRICS if group["prefix"] == "log." else ()), *(Metric(*row) for row in group["metrics"])),
    )
    for group in _TABLE["groups"]
)
STEP = GROUPS[0].metrics


@dataclass(frozen=True, slots=True)
class DisplayPlaces:
    """Places where a number is shown in addition to metrics.jsonl, the line of a step and the page."""

    chart: str = ""
    """Group of the number's chart on the board. Empty means no chart."""
    title: str = ""
    """Title of the chart and in `moefold inspect`. Empty means the number's name."""
    curve: str = ""
    """Curve in trackers. Empty means no curve, or `TRACKED` names the record."""
    table: str = ""
    """Table in `moefold inspect`, a key of `TABLES`. Empty means no table."""


TABLES = {
    "rl": "reinforcement learning",
    "preferences": "preferences",
    "attention": "attention",
    "sites": "rounds of sites",
}
"""Titles of the tables of `moefold inspect` by their keys in `--json`."""
TRACKED = {"loss_terms": "train/loss_terms", "loss_metrics": "train/loss_metrics", "rl": "rl"}
"""Records whose numbers are all curves of trackers, and the prefix of the curves' names."""
CHARTS = {
    "rl": "Reinforcement learning", "loss_terms": "Parts of the loss", "loss_metrics": "Parts of the loss",
    "rank_times": "Memory and ranks", "offload": "Memory and ranks", "replicas": "Replicas", "sites": "Sites",
}  # fmt: skip
"""Groups of the charts of records whose numbers are not in `SHOWN`."""
SHOWN = MappingProxyType({path: DisplayPlaces(**places) for path, places in _TABLE["shown"].items()})
"""Places of the numbers of a step, by path, in the order of the charts. Others have a chart under their name."""
LAYER_CURVES: Mapping[str, str] = MappingProxyType(_TABLE["layer_curves"])
"""Curves of the numbers of an MoE layer in trackers."""
_UNITS = {"_per_s": "/s", "_s": ", s", "_gib": ", GiB", "_bytes": ", bytes"}
"""Units at the ends of names."""


def title_of(path: str) -> str:
    """Return the title of a number in a chart or a table."""
    word = path.partition(".")[2] or path
    ending = next((ending for ending in _UNITS if word.endswith(ending)), "")
    title = SHOWN[path].title if path in SHOWN else ""
    return title or word.removesuffix(ending).replace("_", " ") + _UNITS.get(ending, "")


def charts_of(paths: Iterable[str]) -> list[tuple[int, str, str, str]]:
    """Return place, path, group and title of the charts of some numbers, even if the table lacks a number."""
    places = {path: place for place, path in enumerate(SHOWN)}
    charts = []
    for path in paths:
        group = SHOWN[path].chart if path in SHOWN else CHARTS.get(path.partition(".")[0], "Others")
        if group:
            charts.append((places.get(path, len(places)), path, group, title_of(path)))
    return sorted(charts)


def _propagating_nan(extreme: Callable[[list[float]], float]) -> Callable[[list[float]], float]:
    """Return max or min, or NaN if a value is NaN: with max and min alone, the result depends on the order."""
    return lambda values: math.nan if any(map(math.isnan, values)) else extreme(values)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "": itemgetter(0), "sum": sum, "mean": _mean, "max": _propagating_nan(max), "min": _propagating_nan(min)
}  # fmt: skip


def check_metrics(metrics: Sequence[Metric]) -> None:
    """Check the metrics that the callbacks of a program declare.

    Raises:
        ConfigError: an entry is not a `Metric`, a name has another form or is taken, or a reduction does not exist.
    """
    used_names = {metric.name for metric in STEP}
    for metric in metrics:
        if not isinstance(metric, Metric):
            raise ConfigError(
                f"`metrics` of a callback holds {metric!r:.60}, which is not a moefold.Metric; `metrics` has the "
                "definitions of what `measure` returns, so give an attribute of another kind another name"
            )
        if not metric.name.isidentifier():
            raise ConfigError(
                f"the metric {metric.name!r} of a callback must have a name of letters, digits and _, such as "
                "dead_weights"
            )
        if metric.name in used_names:
            raise ConfigError(f"the metric {metric.name!r} of a callback exists already; give it another name")
        if metric.reduce not in REDUCTIONS:
            raise ConfigError(
                f"the metric {metric.name!r} of a callback has reduce={metric.reduce!r}, which must be one of "
                f"{', '.join(map(repr, REDUCTIONS))}"
            )
        used_names.add(metric.name)


def measured(metrics: Sequence[Metric], values: Any, callback: str) -> dict[str, float | None]:
    """Return the result of a callback's `measure` as Python numbers. Refuse values without a definition.

    Args:
        values: values of this rank by name. A number may be a tensor or an array of one element.
        callback: name of its class, for messages.
    """
    if not isinstance(values, Mapping):
        raise RunError(
            f"`measure` of the callback {callback} returned {values!r:.60}; return a dict of numbers by name"
        )
    if unknown := sorted(map(str, values.keys() - {metric.name for metric in metrics})):
        raise RunError(
            f"the metric {unknown[0]!r}, which `measure` of the callback {callback} returned, has no definition; "
            "declare it in `metrics` of the callback, as Metric(name, unit, definition, reduce=...)"
        )
    return {name: None if value is None else _as_number(name, value, callback) for name, value in values.items()}


def _as_number(name: str, value: Any, callback: str) -> float:
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    raise RunError(
        f"the metric {name!r}, which `measure` of the callback {callback} returned, is {value!r:.60}, no number; "
        "return a float, or None for no value"
    )


def reduced(metrics: Sequence[Metric], ranks: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Reduce the values of all ranks by the rules of their definitions. None is ignored, NaN makes the result NaN."""
    values: dict[str, float | None] = {}
    for metric in metrics:
        rank_values = [value for rank in ranks if (value := rank.get(metric.name)) is not None]
        values[metric.name] = REDUCTIONS[metric.reduce](rank_values) if rank_values else None
    return values


def step_values(values: Mapping[str, Any], further: Sequence[Metric] = ()) -> dict[str, Any]:
    """Return the numbers of a step in the order of the table. Refuse a number without a definition."""
    names = [metric.name for metric in (*STEP, *further) if metric.name != NONFINITE]
    if unknown := sorted(values.keys() - set(names)):
        raise RunError(f"the metric {unknown[0]!r} has no definition; add it to metrics/definitions.toml")
    return {name: values.get(name) for name in names}


def definitions_text() -> str:
    """Return all definitions, formatted for a terminal."""
    lines = ["Often misread:", "", *(f"  {text}" for text in MISREAD), ""]
    for group in GROUPS:
        lines += [group.title, ""]
        for metric in group.metrics:
            unit = f"  ({metric.unit})" if metric.unit else ""
            elsewhere = f"; elsewhere: {metric.elsewhere}" if metric.elsewhere else ""
            lines += [f"  {metric.name}{unit}", f"      {metric.counts}{elsewhere}"]
        lines.append("")
    return "\n".join(lines)
