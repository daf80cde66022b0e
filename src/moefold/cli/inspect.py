"""`moefold inspect`: show a run's load balance and rewards as text, JSON or a picture."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from moefold.cli.command_parser import CommandParser
from moefold.cli.screen import Column, numbers, print_columns
from moefold.errors import ConfigError
from moefold.host.output_file import check_writable, refuse_existing
from moefold.metrics.definitions import MISREAD, TABLES, definitions_text
from moefold.metrics.expert_balance import ExpertBalance, LayerSummary, read_balance, split_into_bins
from moefold.metrics.expert_counts import Array
from moefold.metrics.metric_curves import MetricCurve, read_metric_curves
from moefold.terminal import print_escaped, printable

EPILOG = """reads RUN/expert_counts.bin (metrics.expert_counts_every), else RUN/routing (moe.trace_every), else the
loads in RUN/metrics.jsonl, which do not identify the experts; works while the run goes on

example:
  moefold inspect runs/quickstart --picture balance.png

Every number of a run is defined in docs/metrics.md, which `moefold inspect --definitions` prints. Often misread:
"""


def run(argv: list[str]) -> int:
    """Show the load balance of a run."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.definitions:
        print_escaped(definitions_text(), end="")
        return 0
    if arguments.run is None:
        parser.error("the following arguments are required: RUN")
    if arguments.picture is not None:
        check_writable("--picture", arguments.picture)
        refuse_existing("--picture", arguments.picture, force=arguments.force)
    balance = read_balance(arguments.run)
    curves = read_metric_curves(arguments.run)
    if arguments.layer is not None and arguments.layer not in balance.layers:
        raise ConfigError(
            f"--layer {arguments.layer} is not an MoE layer of {str(arguments.run)!r}; "
            f"choose one of {', '.join(map(str, balance.layers))}"
        )
    if arguments.picture is not None:
        from moefold.cli.inspect_picture import save_picture

        save_picture(balance, arguments.picture, curves["rl"], curves["sites"])
        print_escaped(f"wrote {arguments.picture}", file=sys.stderr)
    if arguments.json:
        record: dict[str, Any] = {
            "run": str(balance.run_dir),
            "source": balance.source,
            "first_step": int(balance.steps[0]),
            "last_step": int(balance.steps[-1]),
            "recorded_steps": len(balance.steps),
            "cut_short": balance.cut_short,
            "num_experts": balance.num_experts,
            "layers": [asdict(summary) for summary in balance.summaries()],
        }
        record |= {key: {curve.name: curve.summary() for curve in group} for key, group in curves.items() if group}
        print(json.dumps(record))
    else:
        from moefold.console import PrintableConsole

        console = PrintableConsole(highlight=False)
        print_balance(console, balance, arguments.layer)
        for key, group in curves.items():
            print_curves(console, TABLES[key], group)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "moefold inspect",
        "Show how evenly the experts of a run were used: load of each layer and expert over time, dead "
        "experts, dropped tokens. Of reinforcement learning, also rewards, lengths, entropy and mismatch over time; of "
        "planned attention, the work of the busiest rank over the mean, and the rows and bytes sent; of a site, how "
        "much weights and routing differ between it and the other sites.",
        EPILOG + "".join(f"  {text}\n" for text in MISREAD),
    )
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help="the run.dir of a training run")
    parser.option("--layer", int, "N", "layer whose experts to show (default: the least even)")
    parser.flag("--json", "print one JSON object, all layers in numbers")
    parser.option("--picture", Path, "FILE", "also draw all layers (.png, .svg or .pdf)")
    parser.flag("--force", "replace files that exist")
    parser.flag("--definitions", "print what every reported number counts")
    return parser


BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = ".:-=+*#@"
"""The same eight levels for terminals without Unicode."""
MAX_COLUMNS = 72
MAX_EXPERTS = 48
MIN_ROW_COLUMNS = 24
"""Blocks are widened until a row has about this many columns."""
COLD = "blue"
EVEN = "green"
WARM = "yellow"
HOT = "red"


def print_balance(console: Console, balance: ExpertBalance, layer: int | None) -> None:
    """Print the numbers of each layer, the load of each layer over time, and the experts of one layer over time.

    Without a layer it is the least even one at the end of the run.
    """
    summaries = balance.summaries()
    steps = f"steps {balance.steps[0]} to {balance.steps[-1]}, {len(balance.steps)} recorded in {balance.source}"
    experts = f" of {balance.num_experts} experts" if balance.num_experts else ""
    layers = f"{len(balance.layers)} MoE layer{'s' if len(balance.layers) > 1 else ''}{experts}"
    console.print(Text(printable(f"{balance.run_dir}: {layers}"), style="bold"))
    console.print(Text(steps, style="dim"))
    if balance.cut_short:
        console.print(Text(f"{printable(balance.cut_short)}: the end is the end of the counts", style=WARM))
    console.print()
    print_columns(console, _numbers(summaries))
    columns = max(8, min(MAX_COLUMNS, console.width - 16))
    blocks = _blocks(console)
    _print_layers(console, balance, columns, blocks)
    if balance.counts is None:
        console.print(Text("which experts: not recorded; set metrics.expert_counts_every=1", style="dim"))
        return
    worst = max(range(len(summaries)), key=lambda i: summaries[i].load_end)
    _print_experts(console, balance, worst if layer is None else balance.layers.index(layer), columns, blocks)


def _numbers(summaries: Sequence[LayerSummary]) -> list[Column]:
    dead = [None if layer.dead_experts is None else len(layer.dead_experts) for layer in summaries]
    cells: dict[str, list[str | Text]] = {
        "layer": [str(layer.layer) for layer in summaries],
        "load start": [f"{layer.load_start:.2f}" for layer in summaries],
        "end": [Text(f"{layer.load_end:.2f}", style=_load_color(layer.load_end)) for layer in summaries],
        "worst": [f"{layer.load_worst:.2f}" for layer in summaries],
        "at step": [str(layer.worst_step) for layer in summaries],
        "cv": [_format_optional(layer.load_cv, "{:.3f}") for layer in summaries],
        "dead": [Text("-" if count is None else str(count), style=HOT if count else "") for count in dead],
        "dropped": [_format_optional(layer.dropped_fraction, "{:.1%}") for layer in summaries],
        "entropy": [_format_optional(layer.router_entropy, "{:.3f}") for layer in summaries],
    }
    return [numbers(name, column) for name, column in cells.items()]


def _format_optional(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _print_layers(console: Console, balance: ExpertBalance, columns: int, blocks: str) -> None:
    edges = split_into_bins(len(balance.steps), columns)
    rows = np.stack([balance.load[a:b].mean(0) for a, b in edges])
    console.print()
    console.print(Text("load of the busiest expert over time", style="bold"))
    console.print(_legend(edges, blocks, "even", "3x the mean or more"))
    for i, number in enumerate(balance.layers):
        console.print(_heat_row(f"layer {number}", rows[:, i], blocks, lambda load: (load - 1) / 2))


def _print_experts(console: Console, balance: ExpertBalance, index: int, columns: int, blocks: str) -> None:
    shares = balance.shares(columns)[:, index]
    edges = split_into_bins(len(balance.steps), columns)
    console.print()
    title = f"experts of layer {balance.layers[index]} over time"
    console.print(Text(title, style="bold"))
    console.print(_legend(edges, blocks, "few", "2x the mean or more, x none"))
    shown_experts, left_out = _extremes(shares[-1])
    for expert in shown_experts:
        console.print(
            _heat_row(f"expert {expert}", shares[:, expert], blocks, lambda share: share / 2, marks_zero=True)
        )
    if left_out:
        console.print(Text(f"{left_out} experts between the busiest and the idlest left out", style="dim"))


def print_curves(console: Console, title: str, curves: Sequence[MetricCurve]) -> None:
    """Print the numbers and the course of each curve, or nothing without curves."""
    if not curves:
        return
    summaries = [curve.summary() for curve in curves]
    columns = [Column(name=title, cells=[curve.title for curve in curves])]
    for name in ("start", "end", "min", "max"):
        columns.append(numbers(name, [f"{summary[name]:.4g}" for summary in summaries]))
    console.print()
    print_columns(console, columns)
    console.print()
    blocks = _blocks(console)
    console.print(Text(f"{blocks[0]} lowest, {blocks[-1]} highest of each curve", style="dim"))
    for curve in curves:
        _, values = curve.binned(max(8, min(MAX_COLUMNS, console.width - 20)))
        low = float(values.min())
        span = float(values.max()) - low or 1.0
        levels = ((values - low) / span * len(blocks)).astype(int).clip(0, len(blocks) - 1)
        width = max(1, MIN_ROW_COLUMNS // len(values))
        row = "".join(blocks[level] * width for level in levels.tolist())
        console.print(Text(f"{curve.title:>16}  {row}", no_wrap=True, overflow="crop"))


def _blocks(console: Console) -> str:
    return BLOCKS if "utf" in console.encoding.lower() else ASCII_BLOCKS


def _extremes(last_E: Array) -> tuple[list[int], int]:
    """Return the experts to show, ascending, and the number left out: all, or the busiest and the least busy ones."""
    if len(last_E) <= MAX_EXPERTS:
        return list(range(len(last_E))), 0
    order = np.argsort(last_E, kind="stable").tolist()
    half = MAX_EXPERTS // 2
    return sorted(order[:half] + order[-half:]), len(order) - MAX_EXPERTS


def _heat_row(
    label: str, values: Array, blocks: str, height: Callable[[float], float], *, marks_zero: bool = False
) -> Text:
    """Return a line with one block per bin, widened if there are few. `height` maps a value to [0, 1]."""
    text = Text(f"{label:>12}  ", no_wrap=True, overflow="crop")
    width = max(1, MIN_ROW_COLUMNS // len(values))
    for value in values.tolist():
        if np.isnan(value):
            text.append("?" * width, style="dim")
        elif marks_zero and value == 0:
            text.append("x" * width, style=f"bold {HOT}")
        else:
            level = min(len(blocks) - 1, max(0, int(height(value) * len(blocks))))
            text.append(blocks[level] * width, style=COLD if marks_zero and value < 0.5 else _load_color(value))
    return text


def _legend(edges: Sequence[tuple[int, int]], blocks: str, low: str, high: str) -> Text:
    width = max(b - a for a, b in edges)
    unit = f"each {width} recorded step{'s' if width > 1 else ''}"
    return Text(f"{blocks[0]} {low}, {blocks[-1]} {high}; {unit}", style="dim")


def _load_color(load: float) -> str:
    """Return the colour of a max/mean load."""
    if load < 1.5:
        return EVEN
    return WARM if load < 2.5 else HOT
