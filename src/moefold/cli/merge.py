"""`moefold merge`: average the weights of checkpoints."""

import argparse

from moefold.checkpoint.find_checkpoint import locate_checkpoint
from moefold.cli.command_parser import CommandParser, add_part_option, report_on_local_rank0
from moefold.cli.conversion_run import conversion_job, conversion_summary, training_command
from moefold.cli.inference_options import report_skipped_for
from moefold.convert.preflight import check_merge
from moefold.remote_path import to_path
from moefold.terminal import print_escaped


def run(argv: list[str]) -> int:
    """Run `moefold merge` and return the exit status."""
    args = _parser().parse_args(argv)
    out = to_path(args.out)
    with report_on_local_rank0() as rank_env:
        paths = [to_path(name) for name in args.checkpoints]
        weights = check_merge(paths, args.weights, out, rank_env)
    with conversion_job("merge") as (world, advance):
        # torch takes seconds to import: a wrong argument is reported without it.
        from moefold.convert.merge import merge_checkpoints

        # Rank 0 chooses the checkpoints for all ranks: a run may save another checkpoint meanwhile.
        checkpoints = world.all_gather_object([locate_checkpoint(path) for path in paths])[0]
        if world.is_rank0:
            for path, checkpoint in zip(paths, checkpoints, strict=True):
                report_skipped_for(path, checkpoint)
        conversion = merge_checkpoints(checkpoints, weights, out, world, on_bytes=advance)
        if world.is_rank0:
            print_escaped(conversion_summary(conversion, out, False))
            print_escaped(training_command(out))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "moefold merge",
        "Write the weighted mean of the weights of checkpoints (arXiv:2203.05482). The checkpoints may "
        "come from any mappings, but must be of one model and trained from the same weights: experts and hidden "
        "dimensions of independent initialisations are in unrelated orders, and such checkpoints are refused. OUT "
        "receives the weights without optimizer moments, and recipe.toml to train from them.",
        "Under torchrun the ranks share the work. A part of one tensor at a time is in memory, never a model."
        "\n\nexample:\n  moefold merge runs/math runs/code --weights 1 3 --out merged",
    )
    parser.add_argument(
        "checkpoints",
        nargs="+",
        metavar="CKPT",
        help="a checkpoint (runs/x/checkpoints/step-000100), a run: its newest one, or RUN/best",
    )
    parser.add_argument(
        "--weights",
        action="extend",
        nargs="+",
        type=float,
        default=[],
        metavar="W",
        help="weight of each, above 0 (default: all equal)",
    )
    parser.add_argument("--out", required=True, metavar="OUT", help="the checkpoint to write; must not exist")
    add_part_option(parser)
    return parser
