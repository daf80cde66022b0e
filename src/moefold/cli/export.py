"""`moefold export`: a checkpoint made a Hugging Face folder."""

import argparse
import re
from pathlib import Path

from moefold.checkpoint.checkpoint_dir import locate_checkpoint
from moefold.cli.command_parser import CommandParser, report_on_local_rank0
from moefold.cli.conversion_options import conversion_job, conversion_summary
from moefold.cli.inference_options import report_skipped_for
from moefold.convert.early_check import check_export
from moefold.convert.families import FAMILIES
from moefold.errors import ConfigError
from moefold.host.rank_env import read_rank_env
from moefold.terminal import print_escaped

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def run(argv: list[str]) -> int:
    """Export; returns the exit status."""
    args = _parser().parse_args(argv)
    shard_bytes = None if args.shard_size is None else _parse_size(args.shard_size)
    out = Path(args.out)
    place = read_rank_env()
    with report_on_local_rank0(place):
        check_export(Path(args.checkpoint), out, place)
    with conversion_job("export") as (crew, advance):
        # torch takes seconds to import: a wrong word is answered without it.
        from moefold.convert.export_folder import ExportOptions, export_folder

        wish = ExportOptions(
            dtype=args.dtype,
            family=args.family,
            shard_bytes=shard_bytes,
            check=args.check,
            leaves_out_mtp=args.without_mtp,
            mtp_inside=args.mtp_inside,
            verify=not args.no_verify,
        )
        # The first process decides: a run may save one more meanwhile.
        checkpoint = crew.all_gather_object(locate_checkpoint(Path(args.checkpoint)))[0]
        if crew.is_rank0:
            report_skipped_for(Path(args.checkpoint), checkpoint)
        done = export_folder(checkpoint, out, crew, wish, on_bytes=advance)
        if crew.is_rank0:
            print_escaped(conversion_summary(done, out, args.check))
    return 0


def _parse_size(text: str) -> int:
    found = re.fullmatch(r"(\d+)\s*(|KB|MB|GB)", text)
    if found is None:
        raise ConfigError(f"--shard-size {text} must be a number of bytes, or with KB, MB or GB: 5GB; 0 for one file")
    return int(found[1]) * UNITS[found[2]]


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="moefold export",
        description="Make a Hugging Face folder of a checkpoint: config.json, safetensors files, the tokenizer that "
        "the model was trained with, and moefold-manifest.json with shapes, types and SHA-256 hashes.",
        epilog="Under torchrun the ranks share the work. In memory is one parameter at a time, never the model.",
    )
    parser.add_argument(
        "checkpoint", metavar="CKPT", help="a checkpoint (runs/x/checkpoints/step-000100), or a run: its newest"
    )
    parser.add_argument("out", metavar="HF_DIR", help="the folder to write; must not exist")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="type of the tensors; auto: imported weights keep theirs, trained ones have the run's run.dtype",
    )
    parser.add_argument(
        "--family",
        choices=("auto", *FAMILIES),
        default="auto",
        metavar="NAME",
        help=f"{', '.join(FAMILIES)}, or auto: the family that the weights came from, else the first that computes the "
        "same (default auto)",
    )
    parser.add_argument("--shard-size", metavar="SIZE", help="largest file, such as 500MB; 0: one file (default 5GB)")
    parser.add_argument(
        "--no-verify", action="store_true", help="do not compare the checkpoint with its hashes first, only sizes"
    )
    parser.add_argument("--check", action="store_true", help="read the result again and compare every byte")
    further = parser.add_mutually_exclusive_group()
    further.add_argument("--without-mtp", action="store_true", help="leave layers of multi-token prediction out")
    further.add_argument(
        "--mtp-inside",
        action="store_true",
        help="write them among the other layers, as DeepSeek does; transformers reports them as unexpected unless the "
        "only one is layer 61, so they have files of their own else",
    )
    return parser
