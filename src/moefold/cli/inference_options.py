"""Options and notices of the commands that run a finished model."""

from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from moefold.checkpoint.find_checkpoint import skipped_checkpoints
from moefold.cli.command_parser import CommandParser
from moefold.config.keys.paths import choices_of
from moefold.inference.notices import report_notices

Options = TypeVar("Options")


def add_inference_options(parser: CommandParser) -> None:
    """Add the options that evaluation and generation share."""
    parser.option(
        "--dtype", "auto", None, "float32, bfloat16, float64, or auto: the dtype of the stored weights (auto)"
    )
    parser.option("--device", "auto", None, "cpu, cuda, or auto: cuda if available (auto)")
    add_ignore_key_option(parser)


def add_ignore_key_option(parser: CommandParser) -> None:
    """Add the option of commands that read a Hugging Face folder."""
    parser.repeated(
        "--ignore-key",
        "KEY",
        "key of the folder's JSON files that may have any value, though moefold does not know it; may be repeated",
    )


def add_generation_options(parser: CommandParser) -> None:
    """Add the options of commands that generate."""
    parser.option(
        "--kernels",
        "auto",
        None,
        "run.kernels of a recipe; auto on a CPU: C wherever it is faster there (auto)",
        choices=choices_of("run", "kernels"),
    )
    parser.option(
        "--experts",
        "exchange",
        None,
        "how data-parallel ranks reach experts of other ranks: exchange tokens in step, or fetch: read the "
        "weights of their peers from shared memory (exchange)",
        choices=("exchange", "fetch"),
    )


def read_options(kind: type[Options], arguments: Namespace, **others: Any) -> Options:
    """Return a dataclass whose fields are arguments of the command, except for `others`."""
    names = [field.name for field in fields(kind) if field.name not in others]  # type: ignore[arg-type]
    return kind(**{name: getattr(arguments, name) for name in names}, **others)


def report_skipped_for(requested: Path, opened: Path) -> None:
    """Report the checkpoints skipped between the path that the user gave and the checkpoint found for it."""
    skipped = skipped_checkpoints(requested, opened)
    report_notices([f"skipped a damaged checkpoint, {description}" for description in skipped])
