"""`moefold bench plot`: plot a report."""

import argparse
from pathlib import Path

from moefold.bounded_read import MAX_REPORT_BYTES, read_json
from moefold.cli.bench_output import add_force
from moefold.cli.command_parser import CommandParser
from moefold.errors import ConfigError
from moefold.host.output_file import PICTURE_SUFFIXES, check_output_path, reject_existing


def run(argv: list[str]) -> int:
    """Plot a report and return 0."""
    args = _parser().parse_args(argv)
    try:
        report = read_json(Path(args.report), MAX_REPORT_BYTES)
    except OSError as error:
        raise ConfigError(f"{args.report}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{args.report} is no JSON") from None
    if not isinstance(report, dict):
        raise ConfigError(f"{args.report} is no report of moefold bench")
    check_output_path("FILE", Path(args.picture), PICTURE_SUFFIXES)
    reject_existing("FILE", Path(args.picture), force=args.force)
    from moefold.bench.plot import draw_report

    draw_report(report, Path(args.picture))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="moefold bench plot", description="Plot a report that a benchmark wrote with --json.")
    parser.add_argument("report", metavar="REPORT.json", help="a report written by --json")
    parser.add_argument("picture", metavar="FILE", help="the picture to write (.png, .svg or .pdf)")
    add_force(parser)
    return parser
