"""`moefold bench plot`: draw a report."""

import argparse
import json
from pathlib import Path

from moefold.errors import ConfigError


def run(argv: list[str]) -> int:
    """Draw and return 0."""
    parser = argparse.ArgumentParser(
        prog="moefold bench plot", description="Draw a report that one of the benches has written with --json."
    )
    parser.add_argument("report", metavar="REPORT.json")
    parser.add_argument("picture", metavar="FILE.png")
    args = parser.parse_args(argv)
    try:
        report = json.loads(Path(args.report).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{args.report}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{args.report} is no JSON") from None
    if not isinstance(report, dict):
        raise ConfigError(f"{args.report} is no report of moefold bench")
    from moefold.bench.plot import draw_report

    draw_report(report, Path(args.picture))
    return 0
