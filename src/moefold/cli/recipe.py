"""`moefold recipe`: convert recipes of earlier versions to the present format."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from moefold.bounded_read import MAX_RECIPE_BYTES, read_text
from moefold.cli.command_parser import CommandParser
from moefold.config.recipe_file import read_recipe
from moefold.config.upgrade.refusals import upgraded_word
from moefold.config.upgrade.text import upgrade_text
from moefold.errors import ConfigError
from moefold.terminal import print_escaped

EPILOG = """examples:
  moefold recipe upgrade my.toml other.toml

`upgrade` changes files in place: keys that have moved stand in the table of their part, and all other lines and
comments stay. --word prints one setting of a command line in its new form, and changes no file: train.min_lr=1e-5
becomes train.lr_schedule.min_lr=1e-5.
"""


def run(argv: list[str]) -> int:
    """Upgrade recipes in place, or print a setting in its new form."""
    arguments = _parser().parse_intermixed_args(argv)
    if arguments.word:
        if len(arguments.files) > 1:
            raise ConfigError("--word takes one recipe, whose parts decide about the new form")
        tree = read_recipe(arguments.files[0]) if arguments.files else {}
        print_escaped(upgraded_word(arguments.word, tree))
        return 0
    if not arguments.files:
        raise ConfigError("moefold recipe upgrade needs a FILE, or --word KEY=VALUE")
    _upgrade(arguments.files)
    return 0


def _upgrade(files: Sequence[Path]) -> None:
    upgrades = []
    for path in files:
        read_recipe(path)
        before = read_text(path, MAX_RECIPE_BYTES)
        upgrades.append((path, before, *upgrade_text(before, f"recipe {str(path)!r}")))
    for path, before, text, left_out in upgrades:
        if text == before:
            print_escaped(f"{path}: nothing to change")
            continue
        try:
            newline = "\r\n" if b"\r\n" in path.read_bytes() else "\n"
            path.write_text(text, encoding="utf-8", newline=newline)
        except OSError as error:
            raise ConfigError(f"recipe {str(path)!r} cannot be written: {error.strerror}") from None
        print_escaped(f"upgraded {path}")
        if left_out:
            print_escaped(f"  left out, as no part of the recipe reads it: {', '.join(left_out)}")


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("moefold recipe", "Bring recipes of earlier versions into the format of this one.", EPILOG)
    parser.add_argument("action", choices=["upgrade"], help="what to do")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="recipes, changed in place")
    parser.option("--word", "", "KEY=VALUE", "print one setting in its new form instead")
    return parser
