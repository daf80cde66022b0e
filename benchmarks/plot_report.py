"""Plot a report that a benchmark wrote with --json.

`python -m benchmarks.plot_report --help` explains the options.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.program import check_picture, run_program
from benchmarks.report_plots import draw_report
from moefold.cli.command_parser import CommandParser
from moefold.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Plot a report and return 0, or 2 if the file is not a report."""
    return run_program(_run, _parser(), argv)


def _run(args: argparse.Namespace) -> int:
    try:
        report = json.loads(args.report.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{args.report}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{args.report} is no JSON") from None
    if not isinstance(report, dict):
        raise ConfigError(f"{args.report} is not a report of a benchmark")
    check_picture("FILE", args.picture, force=args.force)
    draw_report(report, Path(args.picture))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m benchmarks.plot_report", description="Plot a report that a benchmark wrote with --json."
    )
    parser.add_argument("report", type=Path, metavar="REPORT.json", help="a report written by --json")
    parser.add_argument("picture", metavar="FILE", help="the picture to write (.png, .svg or .pdf)")
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")
    return parser


if __name__ == "__main__":
    sys.exit(main())
