"""What all benches do with their reports: print, write, draw. Torch-free."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moefold.errors import ConfigError


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add --json and --plot."""
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON; - prints it instead of the table")
    parser.add_argument("--plot", metavar="FILE.png", help="draw it")


def write_report(args: argparse.Namespace, report: Mapping[str, Any], table: str) -> None:
    """Print the table, or do with the report what the options say.

    Raises:
        ConfigError: a file cannot be written.
    """
    text = json.dumps(report)
    print(text if args.json == "-" else table, flush=True)
    if args.json not in (None, "-"):
        try:
            Path(args.json).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {args.json}: {error.strerror}") from None
    if args.plot is not None:
        from moefold.bench.plot import draw_report

        draw_report(report, Path(args.plot))
