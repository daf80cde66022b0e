"""`moefold import`: convert a Hugging Face folder to a checkpoint to train from."""

import argparse

from moefold.cli.command_parser import CommandParser, add_part_option, report_on_local_rank0
from moefold.cli.conversion_run import conversion_job, conversion_summary, training_command
from moefold.cli.inference_options import add_ignore_key_option
from moefold.convert.adapters.peft_config import check_adapters
from moefold.convert.families.known_keys import KeyReport
from moefold.convert.preflight import check_import, check_out, weights_path
from moefold.data.input_paths import ADAPTER_CONFIG_FILE
from moefold.errors import ConfigError
from moefold.remote_path import to_path
from moefold.terminal import print_escaped


def run(argv: list[str]) -> int:
    """Run `moefold import` and return the exit status."""
    args = _parser().parse_args(argv)
    out = to_path(args.out)
    with report_on_local_rank0() as rank_env:
        folder = weights_path(args.folder)
        has_adapters = (folder / ADAPTER_CONFIG_FILE).is_file()
        if args.base is not None and not has_adapters and folder.is_dir():
            raise ConfigError(f"--base names the base weights of adapters, and {args.folder!r} has none; leave it out")
        if has_adapters:
            _check_adapter_options(args)
            check_out(out, rank_env)
            base = None if args.base is None else weights_path(args.base)
            reports = check_adapters(folder, base, args.ignore_key)
        else:
            reports = check_import(
                folder, out, rank_env, needs_tokenizer=not args.no_tokenizer, ignored_keys=args.ignore_key
            )
    with conversion_job("import") as (world, advance):
        # torch takes seconds to import: a wrong argument is reported without it.
        from moefold.convert.import_folder import ImportOptions, import_folder

        if has_adapters:
            from moefold.convert.adapters.peft import import_adapters

            conversion = import_adapters(folder, out, world, base, ignored_keys=args.ignore_key, on_bytes=advance)
        else:
            options = ImportOptions(args.check, not args.no_tokenizer, args.without_mtp, tuple(args.ignore_key))
            conversion = import_folder(folder, out, world, options, on_bytes=advance)
        if world.is_rank0:
            print_escaped(conversion_summary(conversion, out, args.check))
            for report in reports:
                print_escaped(_key_lines(report) if args.report else report.note())
            print_escaped(training_command(out))
    return 0


def _key_lines(report: KeyReport) -> str:
    """Return the text that lists the keys of a file by kind."""
    kinds = (("read", report.read), ("constant", report.constant), ("ignored", report.ignored))
    return "\n".join(f"{report.file}, {kind}: {', '.join(keys) or 'none'}" for kind, keys in kinds)


def _check_adapter_options(args: argparse.Namespace) -> None:
    """Refuse options without effect on a folder of PEFT."""
    for option in ("check", "no_tokenizer", "without_mtp"):
        if getattr(args, option):
            raise ConfigError(
                f"--{option.replace('_', '-')} has no effect on adapters, and {args.folder!r} has adapters"
            )


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "moefold import",
        "Convert a Hugging Face folder (config.json and safetensors files) to a checkpoint. OUT receives "
        "the weights in their own dtype, recipe.toml to train from them, and hf/ with the tokenizer and a manifest. "
        "A folder of PEFT (adapter_config.json and adapter_model.safetensors) becomes a checkpoint with adapters.",
        "Under torchrun the ranks share the work. One tensor at a time is in memory, never the model.",
    )
    parser.add_argument("folder", metavar="HF_DIR", help="the folder to read")
    parser.add_argument("out", metavar="OUT", help="the checkpoint to write; must not exist")
    parser.flag("--check", "read the result again and compare every byte")
    parser.option("--base", str, "DIR", "base weights of adapters (default: as in adapter_config.json)")
    parser.flag("--no-tokenizer", "accept a folder without tokenizer.json")
    parser.flag("--without-mtp", "leave out multi-token prediction (MTP) layers")
    parser.flag("--report", "list the keys of the folder's JSON files: read, constant (without effect), and ignored")
    add_ignore_key_option(parser)
    add_part_option(parser)
    return parser
