"""`moefold inspect`: show the load balance of a run's experts in the terminal, as JSON or as a picture."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from moefold.cli.command_parser import CommandParser
from moefold.errors import ConfigError
from moefold.host.output_file import check_writable, reject_existing
from moefold.terminal import print_escaped

EPILOG = """reads RUN/expert_counts.bin (metrics.expert_counts_every), else RUN/routing (moe.trace_every), else the
loads in RUN/metrics.jsonl, which do not identify the experts; works while the run goes on

example:
  moefold inspect runs/quickstart --png balance.png
"""


def run(argv: list[str]) -> int:
    """Show the load balance of a run.

    Raises:
        ConfigError: the folder is not a run with experts, or the layer does not exist.
    """
    arguments = _parser().parse_args(argv)
    if arguments.png is not None:
        check_writable("--png", arguments.png)
        reject_existing("--png", arguments.png, force=arguments.force)
    # numpy takes a tenth of a second to import, which --help does not need.
    from moefold.metrics.expert_balance import read_balance

    balance = read_balance(arguments.run)
    if arguments.layer is not None and arguments.layer not in balance.layers:
        raise ConfigError(
            f"--layer {arguments.layer} is no MoE layer of {str(arguments.run)!r}; "
            f"choose one of {', '.join(map(str, balance.layers))}"
        )
    if arguments.png is not None:
        from moefold.cli.inspect_picture import save_picture

        save_picture(balance, arguments.png)
        print_escaped(f"wrote {arguments.png}", file=sys.stderr)
    if arguments.json:
        record = {
            "run": str(balance.run_dir),
            "source": balance.source,
            "first_step": int(balance.steps[0]),
            "last_step": int(balance.steps[-1]),
            "recorded_steps": len(balance.steps),
            "cut_short": balance.cut_short,
            "num_experts": balance.num_experts,
            "layers": [asdict(summary) for summary in balance.summaries()],
        }
        print(json.dumps(record))
    else:
        from moefold.cli.inspect_table import print_balance
        from moefold.console import PrintableConsole

        print_balance(PrintableConsole(highlight=False), balance, arguments.layer)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="moefold inspect",
        description="Show how evenly the experts of a run were used: load of each layer and expert over time, dead "
        "experts, dropped tokens.",
        epilog=EPILOG,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run.dir of a training run")
    parser.add_argument("--layer", type=int, metavar="N", help="layer whose experts to show (default: the least even)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, all layers in numbers")
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw all layers into FILE (.png, .svg or .pdf)")
    parser.add_argument("--force", action="store_true", help="replace files that exist")
    return parser
