"""`moefold plan-accuracy`: the planner's predictions against a table of published measurements."""

import argparse
import json
from pathlib import Path

from moefold.cli.command_parser import CommandParser

EPILOG = """the table is CSV with the columns
  source model gpu n_gpus precision seq_len gbs mbs tp etp cp ep pp vpp metric value method note
metric is mfu_pct, tflops_per_gpu or tokens_per_s_per_gpu; value a number or OOM; an empty cell is not printed by the
source. Rows without a complete mapping are skipped and counted; micro-batch size and virtual stages that are not
printed are the planner's choice.

example:
  moefold plan-accuracy published.csv --json
"""


def run(argv: list[str]) -> int:
    """Print the error of each row and the means.

    Raises:
        ConfigError: the table cannot be read.
    """
    arguments = _parser().parse_args(argv)
    from moefold.plan.accuracy import validate_predictions

    accuracy = validate_predictions(arguments.table)
    if arguments.json:
        print(json.dumps(accuracy.as_dict()))
        return 0
    from moefold.cli.plan_accuracy_table import print_accuracy
    from moefold.console import PrintableConsole

    print_accuracy(PrintableConsole(), accuracy)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="moefold plan-accuracy",
        description="Compare what the planner predicts with published measurements.",
        epilog=EPILOG,
    )
    parser.add_argument("table", type=Path, metavar="FILE.csv", help="published measurements")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
