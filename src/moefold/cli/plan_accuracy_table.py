"""The table of `moefold plan-accuracy`."""

from rich.console import Console
from rich.table import Table

from moefold.plan.accuracy import Accuracy, Prediction


def print_accuracy(console: Console, accuracy: Accuracy) -> None:
    """Print each row, the means by device and precision, what was skipped, and the mistakes about memory."""
    for prediction in accuracy.predictions:
        console.print(_line(prediction), markup=False, highlight=False, soft_wrap=True)
    console.print(_groups(accuracy))
    mean = accuracy.mean_abs_error_pct
    console.print(f"mean absolute error {_percent(mean)} over {len(accuracy.predictions)} rows")
    console.print(f"skipped {sum(accuracy.skipped.values())} rows")
    for reason, count in accuracy.skipped.items():
        console.print(f"  {count:4d}  {reason}", markup=False)
    mistakes = accuracy.memory_mistakes
    console.print(f"rows whose memory is predicted wrongly: {len(mistakes)}")
    for prediction in mistakes:
        row = prediction.row
        console.print(f"  {row['source']} {row['model']} {row['gpu']} {row['method']}", markup=False)


def _line(prediction: Prediction) -> str:
    """One row on one line, however wide the terminal is."""
    row = prediction.row
    what = f"{row['gpu']:6} {prediction.precision:13} {row['model'][:26]:26} {row['method'][:22]:22} {_mapping(prediction):40}"
    values = f"{row['metric']:21} {_value(prediction.measured):>8} {_value(prediction.predicted):>8}"
    return f"{what} {values} {_percent(prediction.error_pct, sign=True):>9}"


def _groups(accuracy: Accuracy) -> Table:
    table = Table("gpu and precision", "rows", "mean absolute error")
    for name, group in accuracy.by_gpu_precision.items():
        mean = group["mean_abs_error_pct"]
        table.add_row(name, str(group["rows"]), _percent(mean))
    return table


def _mapping(prediction: Prediction) -> str:
    m = prediction.mapping
    return f"tp{m.tp} cp{m.cp} ep{m.ep} etp{m.etp} pp{m.pp} vpp{m.vpp} mbs{m.mbs}"


def _value(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _percent(value: float | None, *, sign: bool = False) -> str:
    return "" if value is None else f"{value:+.1f} %" if sign else f"{value:.1f} %"
