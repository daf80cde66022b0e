"""`moefold plan-accuracy`: compare the planner's predictions with a table of measurements."""

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from moefold.cli.command_parser import CommandParser
from moefold.planner.accuracy import Accuracy, Prediction, RowReader, predict_own_run, validate_predictions
from moefold.planner.mapping_families import STATED_ERROR

EPILOG = """the table is CSV with the columns
  source model gpu n_gpus precision seq_len gbs mbs tp etp cp ep pp vpp metric value method note
metric is mfu_pct, tflops_per_gpu or tokens_per_s_per_gpu; value a number or OOM; an empty cell means that the source
does not give it. Rows without a complete mapping are skipped and counted; the planner chooses the micro-batch size and
virtual stages that the source does not give.

The method of your own runs is the word moefold, then the axes without a column, as moefold plan --explain takes them:
zero=3 dispatcher=alltoall recompute=norms. They are priced as moefold plan does, with all of a GPU's memory. Other
methods are published measurements of other software. Only the package of a checkout (pip install -e .) prices them, by
benchmarks/published.

example:
  moefold plan-accuracy runs.csv --json
"""


def run(argv: list[str]) -> int:
    """Print the error of each row and the means."""
    arguments = _parser().parse_args(argv)

    accuracy = validate_predictions(arguments.table, row_reader(Path(__file__).parents[3]))
    if arguments.json:
        print(json.dumps(accuracy.as_dict()))
        return 0
    from moefold.console import PrintableConsole

    print_accuracy(PrintableConsole(), accuracy)
    return 0


def row_reader(root: Path) -> RowReader:
    """Return what prices a row. With a checkout as the `root` folder of the package, it prices other software too."""
    if not (root / "benchmarks" / "published" / "predictions.py").is_file():
        return predict_own_run
    sys.path.append(str(root))
    reader: RowReader = import_module("benchmarks.published.predictions").predict_row
    return reader


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("moefold plan-accuracy", "Compare the planner's predictions with measurements.", EPILOG)
    parser.add_argument("table", type=Path, metavar="FILE.csv", help="measured runs")
    parser.flag("--json", "print one JSON object")
    return parser


def print_accuracy(console: Console, accuracy: Accuracy) -> None:
    """Print each row, the means by device and precision, the skipped rows, and the wrong memory predictions."""
    for prediction in accuracy.predictions:
        console.print(_line(prediction), markup=False, highlight=False, soft_wrap=True)
    console.print(_groups(accuracy))
    console.print(_kinds(accuracy))
    errors = accuracy.abs_errors_pct
    if errors:
        console.print(
            f"mean absolute error {_percent(accuracy.mean_abs_error_pct)} over {len(errors)} rows, median "
            f"{_percent(median(errors))}, worst {_percent(max(errors))}"
        )
    console.print(f"skipped {sum(accuracy.skipped.values())} rows")
    for reason, count in accuracy.skipped.items():
        console.print(f"  {count:4d}  {reason}", markup=False)
    if any(prediction.row.is_own for prediction in accuracy.predictions):
        console.print(f"expected: {STATED_ERROR}", markup=False, highlight=False)
    mistakes = accuracy.memory_mistakes
    console.print(f"rows whose memory is predicted wrongly: {len(mistakes)}")
    for prediction in mistakes:
        row = prediction.row
        console.print(f"  {row['source']} {row['model']} {row['gpu']} {row['method']}", markup=False)


def _line(prediction: Prediction) -> str:
    """Format one row as one line, regardless of the terminal's width."""
    row = prediction.row
    case = (
        f"{row['gpu']:6} {prediction.precision:13} {row['model'][:26]:26} {row['method'][:22]:22} "
        f"{_mapping(prediction):40}"
    )
    values = f"{row['metric']:21} {_value(prediction.measured):>8} {_value(prediction.predicted):>8}"
    return f"{case} {values} {_percent(prediction.error_pct, sign=True):>9}"


def _groups(accuracy: Accuracy) -> Table:
    table = Table("gpu and precision", "rows", "mean absolute error")
    for name, group in accuracy.by_gpu_precision.items():
        table.add_row(name, str(group["rows"]), _percent(group["mean_abs_error_pct"]))
    return table


def _kinds(accuracy: Accuracy) -> Table:
    """Return the errors by GPU and kind of row. Unseen are the errors of fits without the row's configuration."""
    table = Table("rows", "", "mean", "median", "bias", "unseen: mean", "median", "bias")
    for name, groups in accuracy.errors_by_kind().items():
        fitted = groups["fitted"]
        assert fitted is not None
        cells = [
            _percent(group[key], sign=key == "bias_pct")
            for group in (fitted, groups["unseen"] or fitted)
            for key in ("mean_abs_error_pct", "median_abs_error_pct", "bias_pct")
        ]
        table.add_row(name, str(fitted["rows"]), *cells)
    return table


def _mapping(prediction: Prediction) -> str:
    m = prediction.mapping
    return f"tp{m.tp} cp{m.cp} ep{m.ep} etp{m.etp} pp{m.pp} vpp{m.vpp} mbs{m.mbs}"


def _value(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _percent(value: float | None, *, sign: bool = False) -> str:
    if value is None:
        return ""
    return f"{value:+.1f} %" if sign else f"{value:.1f} %"
