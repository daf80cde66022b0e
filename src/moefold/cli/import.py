"""`moefold import`: a Hugging Face folder made a checkpoint to train from."""

import argparse
from pathlib import Path

from moefold.cli.command_parser import CommandParser, report_on_local_rank0
from moefold.cli.conversion_options import conversion_job, conversion_summary, training_command
from moefold.convert.early_check import check_import
from moefold.host.rank_env import read_rank_env
from moefold.terminal import print_escaped


def run(argv: list[str]) -> int:
    """Import; returns the exit status."""
    args = _parser().parse_args(argv)
    folder, out = Path(args.folder), Path(args.out)
    place = read_rank_env()
    with report_on_local_rank0(place):
        check_import(folder, out, place, needs_tokenizer=not args.no_tokenizer)
    with conversion_job("import") as (crew, advance):
        # torch takes seconds to import: a wrong word is answered without it.
        from moefold.convert.import_folder import ImportOptions, import_folder

        wish = ImportOptions(args.check, not args.no_tokenizer, args.without_mtp)
        done = import_folder(folder, out, crew, wish, on_bytes=advance)
        if crew.is_rank0:
            print_escaped(conversion_summary(done, out, args.check))
            print_escaped(training_command(out))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="moefold import",
        description="Make a checkpoint of a Hugging Face folder (config.json and safetensors files). OUT holds the "
        "weights in their own type, recipe.toml to train from them, and hf/ with the tokenizer and a manifest.",
        epilog="Under torchrun the ranks share the work. In memory is one tensor at a time, never the model.",
    )
    parser.add_argument("folder", metavar="HF_DIR", help="the folder to read")
    parser.add_argument("out", metavar="OUT", help="the checkpoint to write; must not exist")
    parser.add_argument("--check", action="store_true", help="read the result again and compare every byte")
    parser.add_argument("--no-tokenizer", action="store_true", help="accept a folder without tokenizer.json")
    parser.add_argument("--without-mtp", action="store_true", help="leave layers of multi-token prediction out")
    return parser
