"""Options and report output that several benchmarks share."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moefold.bench.shape import BenchShape, bench_shapes
from moefold.errors import DEVICE_OPTION, ConfigError, reworded_errors
from moefold.host.output_file import PICTURE_SUFFIXES, check_output_path, check_writable, reject_existing
from moefold.terminal import print_escaped


def shape_from_args(args: argparse.Namespace) -> BenchShape:
    """Return the shape of --shape, after checking that the count options are positive.

    Raises:
        ConfigError: the shape is unknown, or a count is not positive.
    """
    check_output_options(args)
    for name in ("steps", "threads"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} {getattr(args, name)} must be at least 1")
    known = bench_shapes()
    if args.shape not in known:
        raise ConfigError(f"--shape {args.shape!r} is unknown; the shapes are {', '.join(known)}")
    return known[args.shape]


def device_type_from_args(args: argparse.Namespace) -> str:
    """Resolve --device, and check that the clock of --clock can time it. Imports torch."""
    from moefold.launch.ranks import choose_device

    with reworded_errors(*DEVICE_OPTION):
        device = choose_device(args.device, 1, None)
    if device == "cuda" and args.clock == "cpu":
        raise ConfigError("--clock cpu cannot time a GPU; leave it out, or set --device cpu")
    return device


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add --json, --picture and --force."""
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON; - prints it instead of the table")
    parser.add_argument("--picture", metavar="FILE", help="draw the report into FILE (.png, .svg or .pdf)")
    add_force(parser)


def add_force(parser: argparse.ArgumentParser) -> None:
    """Add --force."""
    parser.add_argument("--force", action="store_true", help="replace files that exist")


def check_output_options(args: argparse.Namespace) -> None:
    """Check that the output files can be written, before any measurement.

    Raises:
        ConfigError: a picture has another suffix, a folder is missing, a
            path is not writable, or a file exists and --force is not given.
    """
    for option, name in (("--json", args.json), ("--picture", args.picture)):
        if name is not None and (option, name) != ("--json", "-"):
            if option == "--picture":
                check_output_path(option, Path(name), PICTURE_SUFFIXES)
            check_writable(option, Path(name))
            reject_existing(option, Path(name), force=args.force)


def write_report(args: argparse.Namespace, report: Mapping[str, Any], table: str) -> None:
    """Print the table, and write the report where the options ask for it.

    Raises:
        ConfigError: a file cannot be written.
    """
    text = json.dumps(report)
    print_escaped(text if args.json == "-" else table, flush=True)
    if args.json not in (None, "-"):
        try:
            Path(args.json).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {args.json}: {error.strerror}") from None
    if args.picture is not None:
        from moefold.bench.plot import draw_report

        draw_report(report, Path(args.picture))
