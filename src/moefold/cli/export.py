"""`moefold export`: convert a checkpoint to a Hugging Face folder."""

import argparse
import re

from moefold.checkpoint.checkpoint_meta import read_meta
from moefold.checkpoint.find_checkpoint import locate_checkpoint
from moefold.cli.command_parser import CommandParser, add_part_option, report_on_local_rank0
from moefold.cli.conversion_run import conversion_job, conversion_summary
from moefold.cli.inference_options import report_skipped_for
from moefold.convert.families.families import FAMILIES
from moefold.convert.preflight import check_export, weights_path
from moefold.errors import ConfigError
from moefold.remote_path import to_path
from moefold.terminal import print_escaped

BYTES_PER_UNIT = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def run(argv: list[str]) -> int:
    """Run `moefold export` and return the exit status."""
    args = _parser().parse_args(argv)
    shard_bytes = None if args.shard_size is None else _parse_size(args.shard_size)
    out = to_path(args.out)
    with report_on_local_rank0() as rank_env:
        checkpoint = weights_path(args.checkpoint)
        check_export(checkpoint, out, rank_env)
        has_adapters = bool(read_meta(locate_checkpoint(checkpoint)).lora)
        _check_adapter_options(args, has_adapters=has_adapters)
    with conversion_job("export") as (world, advance):
        # torch takes seconds to import: a wrong argument is reported without it.
        from moefold.convert.export_folder import ExportOptions, export_folder

        options = ExportOptions(
            dtype=args.dtype,
            family=args.family,
            shard_bytes=shard_bytes,
            check=args.check,
            leaves_out_mtp=args.without_mtp,
            mtp_inside=args.mtp_inside,
            quantize=args.quantize,
            base=None if args.base is None else weights_path(args.base),
            verify=not args.no_verify,
        )
        # Rank 0 chooses the checkpoint for all ranks: a run may save another checkpoint meanwhile.
        checkpoint_path = world.all_gather_object(locate_checkpoint(checkpoint))[0]
        if world.is_rank0:
            report_skipped_for(checkpoint, checkpoint_path)
        if has_adapters and not args.merge:
            from moefold.convert.adapters.peft import export_adapters

            conversion = export_adapters(checkpoint_path, out, world, dtype=args.dtype, on_bytes=advance)
        else:
            conversion = export_folder(checkpoint_path, out, world, options, on_bytes=advance)
        if world.is_rank0:
            print_escaped(conversion_summary(conversion, out, args.check))
    return 0


def _check_adapter_options(args: argparse.Namespace, *, has_adapters: bool) -> None:
    """Refuse options without effect on this checkpoint."""
    if not has_adapters:
        for option in ("merge", "base"):
            if getattr(args, option):
                raise ConfigError(f"--{option} has no effect: {args.checkpoint!r} has all weights; leave it out")
        return
    if args.merge:
        return
    for option, default in ADAPTER_EXPORT_DEFAULTS.items():
        if getattr(args, option) != default:
            name = f"--{option.replace('_', '-')}"
            raise ConfigError(
                f"{name} has no effect on adapters, which {args.checkpoint!r} has alone; leave it out, or add --merge "
                "to write the merged weights"
            )


ADAPTER_EXPORT_DEFAULTS = {
    "quantize": "none",
    "family": "auto",
    "shard_size": None,
    "check": False,
    "without_mtp": False,
    "mtp_inside": False,
    "base": None,
}
"""Options without effect if adapters are written in PEFT's format, with their defaults."""


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*(|KB|MB|GB)", text)
    if match is None:
        raise ConfigError(f"--shard-size {text} must be a number of bytes, or with KB, MB or GB: 5GB; 0 for one file")
    return int(match[1]) * BYTES_PER_UNIT[match[2]]


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "moefold export",
        "Convert a checkpoint to a Hugging Face folder: config.json, safetensors files, the tokenizer that "
        "the model was trained with, and moefold-manifest.json with shapes, types and SHA-256 hashes. A checkpoint of "
        "a run with lora.rank becomes a folder of PEFT: adapter_config.json and adapter_model.safetensors.",
        "Under torchrun the ranks share the work. One parameter at a time is in memory, never the model.",
    )
    parser.add_argument(
        "checkpoint",
        metavar="CKPT",
        help="a checkpoint (runs/x/checkpoints/step-000100), a run: its newest one, or RUN/best",
    )
    parser.add_argument("out", metavar="HF_DIR", help="the folder to write; must not exist")
    parser.option(
        "--dtype",
        "auto",
        None,
        "dtype of the tensors; auto: imported weights keep theirs, trained weights get run.dtype of the run",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    parser.option(
        "--quantize",
        "none",
        None,
        "fp8: matrices of attention and feed-forward networks, in blocks of 128 x 128 with a scale each; mxfp4: "
        "the experts of gpt-oss (default none)",
        choices=("none", "fp8", "mxfp4"),
    )
    parser.option(
        "--family",
        "auto",
        "NAME",
        f"{', '.join(FAMILIES)}, or auto: the family of the imported weights, else the first one that computes "
        "the same (default auto)",
        choices=("auto", *FAMILIES),
    )
    parser.flag("--merge", "merge the adapters of a run with lora.rank into its base weights")
    parser.option(
        "--base", str, "DIR", "base weights of the adapters, if they have moved (default: as in the checkpoint)"
    )
    parser.option("--shard-size", str, "SIZE", "largest file, such as 500MB; 0: one file (default 5GB)")
    parser.flag("--no-verify", "check only the sizes of the checkpoint's files, not their hashes")
    parser.flag("--check", "read the result again and compare every byte")
    mtp_group = parser.add_mutually_exclusive_group()
    mtp_group.add_argument("--without-mtp", action="store_true", help="leave out multi-token prediction (MTP) layers")
    mtp_group.add_argument(
        "--mtp-inside",
        action="store_true",
        help="write MTP layers among the other layers, as DeepSeek does; by default they have files of their own, "
        "because transformers reports them as unexpected unless the only one is layer 61",
    )
    add_part_option(parser)
    return parser
