"""Run the programs of benchmarks: exit status, options of output, and the report that they write."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report_plots import draw_report
from moefold.cli import bench
from moefold.cli.bench import add_output_options
from moefold.errors import ConfigError
from moefold.host.output_file import PICTURE_SUFFIXES, check_output_path, refuse_existing


def run_program(
    run: Callable[[argparse.Namespace], int], parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> int:
    """Run a program with arguments (None: the process's) and return its exit status, 2 for wrong options."""
    args = parser.parse_args(argv)
    try:
        return run(args)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def check_counts(args: argparse.Namespace, *names: str) -> None:
    """Check that options are positive.

    Raises:
        ConfigError: an option is not positive.
    """
    for name in names:
        value = getattr(args, name.replace("-", "_"))
        if value < 1:
            raise ConfigError(f"--{name} {value} must be at least 1")


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """Add --json, --force and --picture."""
    add_output_options(parser)
    add_picture(parser)


def add_picture(parser: argparse.ArgumentParser) -> None:
    """Add --picture."""
    parser.add_argument("--picture", metavar="FILE", help="draw the report into FILE (.png, .svg or .pdf)")


def check_picture(option: str, name: str | None, *, force: bool) -> None:
    """Check that a picture can be written.

    Raises:
        ConfigError: another suffix, a path that is not writable, or a file that exists.
    """
    if name is not None:
        check_output_path(option, Path(name), PICTURE_SUFFIXES)
        refuse_existing(option, Path(name), force=force)


def check_report_options(args: argparse.Namespace) -> None:
    """Check that the files of a report can be written, before any measurement.

    Raises:
        ConfigError: a file cannot be written, or exists and --force is not given.
    """
    bench.check_output_options(args)
    check_picture("--picture", args.picture, force=args.force)


def write_report(args: argparse.Namespace, report: Mapping[str, Any], table: str) -> None:
    """Print the table, and write the files that the options ask for.

    Raises:
        ConfigError: a file cannot be written.
    """
    bench.write_report(args, report, table)
    if args.picture is not None:
        draw_report(report, Path(args.picture))
