"""`moefold upcycle`: turn a dense model into a model with experts, to continue training."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from moefold.cli.command_parser import CommandParser, add_part_option, report_on_local_rank0
from moefold.cli.conversion_run import conversion_job, conversion_summary, training_command
from moefold.cli.inference_options import add_ignore_key_option, report_skipped_for
from moefold.config.base.layer_words import spell_layers
from moefold.config.base.part import keys_of
from moefold.config.load import config_from_dict
from moefold.config.model import ModelConfig
from moefold.config.overrides import apply_overrides
from moefold.config.sections.checkpoint import UpcycleConfig
from moefold.config.tables.part_class import import_part_files
from moefold.convert.preflight import (
    check_out,
    dense_unsupported_reason,
    preserves_outputs,
    read_model,
    resolve_weights_folder,
    upcycle_unsupported_reason,
    weights_path,
)
from moefold.errors import ConfigError
from moefold.remote_path import to_path
from moefold.terminal import print_escaped
from moefold.validate.config import check_config
from moefold.validate.unused import check_unused_keys


def run(argv: list[str]) -> int:
    """Run `moefold upcycle` and return the exit status."""
    args = _parser().parse_intermixed_args(argv)
    out = to_path(args.out)
    with report_on_local_rank0() as rank_env:
        dense = weights_path(args.dense)
        model, upcycle = upcycled_model(dense, args.overrides, args.granularity, args.ignore_key)
        check_out(out, rank_env)
    with conversion_job("upcycle") as (world, advance):
        if world.is_rank0:
            report_skipped_for(dense, resolve_weights_folder(dense))
        # torch takes seconds to import: a wrong argument is reported without it.
        from moefold.convert.init_from import upcycle_folder

        conversion = upcycle_folder(dense, out, model, upcycle, args.seed, world, on_bytes=advance)
        if world.is_rank0:
            print_escaped(conversion_summary(conversion, out, False))
            starts_equal = preserves_outputs(model, upcycle)
            equal = "computes at first what the dense model does" if starts_equal else "does not start equal"
            moe = model.experts
            print_escaped(f"{moe.num_experts} experts, top {moe.top_k}, of width {moe.intermediate_size}: {equal}")
            print_escaped(training_command(out))
    return 0


def upcycled_model(
    dense: Path, overrides: list[str], granularity: int | None, ignored_keys: Sequence[str] = ()
) -> tuple[ModelConfig, UpcycleConfig]:
    """Return the model config and the upcycling config, from the dense model and the overrides of the command.

    `ignored_keys` are keys of a Hugging Face folder that may have any value.
    """
    for word in overrides:
        if not word.startswith(("model.", "checkpoint.upcycle.")):
            raise ConfigError(f"{word!r} is not a key of [model] or [checkpoint.upcycle], as model.ffn.moe.top_k=2 is")
    keys = frozenset(word.partition("=")[0] for word in overrides)
    if "model.preset" in keys:
        raise ConfigError("model.preset has no effect on moefold upcycle: the sizes come from DENSE; leave it out")
    if "checkpoint.upcycle.dense" in keys:
        raise ConfigError("checkpoint.upcycle.dense is DENSE for moefold upcycle; leave it out")
    dense_model = read_model(dense, ignored_keys)
    slices = 1 if granularity is None else granularity
    if reason := dense_unsupported_reason(dense_model):
        raise ConfigError(f"{str(dense)!r}: {reason}")
    dense_width = dense_model.ffn.dense.intermediate_size
    if slices < 1 or dense_width % slices:
        raise ConfigError(f"--granularity {slices} must divide the width {dense_width} of {str(dense)!r}")
    width = dense_width // slices
    layers = spell_layers([words._replace(ffn="moe") for words in dense_model.layer_words])
    copied = {**keys_of(dense_model), "layers": layers}
    copied["ffn"] = {"dense": copied["ffn"]["dense"], "moe": {"intermediate_size": width}}
    # Precedence: given overrides, then the dense model's keys, then the defaults.
    tree = {"model": copied, "checkpoint": {"upcycle": {"dense": str(dense)}}}
    for message in apply_overrides(tree, overrides):
        print_escaped(message, file=sys.stderr)
    import_part_files(tree)
    cfg = config_from_dict(tree)
    check_unused_keys(keys, cfg)
    model = cfg.model
    upcycle = cfg.checkpoint.upcycle
    assert upcycle is not None, "the tree has it"
    if granularity is not None and model.ffn.moe.intermediate_size != width:
        raise ConfigError(
            f"model.ffn.moe.intermediate_size={model.ffn.moe.intermediate_size} is not the width {width} that "
            f"--granularity {slices} gives; leave one of the two out"
        )
    check_config(cfg)
    if reason := upcycle_unsupported_reason(dense_model, model):
        raise ConfigError(f"{str(dense)!r}: {reason}")
    return replace(model, preset=""), upcycle


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "moefold upcycle",
        "Turn a dense model into a model with experts: each expert is a copy of the feed-forward layer, "
        "or, with --granularity G, one of G slices of it, and the router begins with whole copies "
        "(arXiv:2410.07524). OUT is a checkpoint with recipe.toml. To do so at the start of a run, set "
        "checkpoint.upcycle.",
        "example:\n  moefold upcycle llama OUT model.ffn.moe.num_experts=16 --granularity 2",
    )
    parser.add_argument("dense", metavar="DENSE", help="a Hugging Face folder, checkpoint or run of a dense model")
    parser.add_argument("out", metavar="OUT", help="the checkpoint to write; must not exist")
    parser.settings("model.ffn.moe.top_k=2, checkpoint.upcycle.noise=0.1")
    parser.option("--granularity", int, None, "slices of a copy (default 1); num_experts counts slices")
    parser.option("--seed", 0, None, "seed of the router weights and of the noise (default 0)")
    add_ignore_key_option(parser)
    add_part_option(parser)
    return parser
