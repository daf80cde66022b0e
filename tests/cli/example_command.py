"""Example commands of the documentation and of the help texts, and the check that they can be run."""

import argparse
import re
import shlex
from pathlib import Path

from moefold.cli.main import COMMANDS, command_parser
from moefold.config.keys.paths import key_types, sections
from moefold.config.load import config_from_dict
from moefold.config.overrides import apply_overrides
from moefold.recipe import load_config
from moefold.validate.config import check_config

ROOT = Path(__file__).parents[2]
OVERRIDE = re.compile(r"[a-z]+\.[a-z_]+=.*")


def commands_of(text: str) -> list[str]:
    """The lines of a text that are commands of moefold, continued lines joined."""
    lines = re.sub(r" *\\\n *", " ", text).splitlines()
    return [line.strip() for line in lines if line.strip().startswith("moefold ")]


def code_blocks(markdown: str, language: str) -> list[str]:
    """The blocks of code of a page, word for word."""
    return re.findall(rf"^```{language}\n(.*?)^```$", markdown, re.MULTILINE | re.DOTALL)


def assert_command(line: str) -> None:
    """Parse a command as moefold does, and check that its recipe exists and knows its keys. Fails otherwise."""
    _, name, *words = shlex.split(line, comments=True)
    assert name in COMMANDS, line
    parser = command_parser(name)
    if parser.add_help:
        parse(parser, words, line)
    # `moefold recipe upgrade --word` takes a key of an earlier version.
    overrides = [word for word in words if OVERRIDE.fullmatch(word) and "--word" not in words]
    tree: dict[str, dict[str, object]] = {}
    apply_overrides(tree, overrides)
    for section, keys in tree.items():
        assert section in sections(), line
        assert set(keys) <= set(key_types(section)), line
    config_from_dict(tree)
    for word in words:
        # A recipe that `moefold init` has written is the repository's.
        recipe = ROOT / word if word.startswith("recipes/") else ROOT / "recipes" / word
        if word.startswith("recipes/"):
            assert recipe.is_file(), line
        if word.endswith(".toml") and recipe.is_file():
            cfg = load_config(recipe, overrides)
            if name in ("train", "memory", "verify"):
                check_config(cfg)


def parse(parser: argparse.ArgumentParser, words: list[str], line: str) -> None:
    has_actions = any(isinstance(action, argparse._SubParsersAction) for action in parser._actions)
    try:
        parser.parse_args(words) if has_actions else parser.parse_intermixed_args(words)
    except SystemExit:
        raise AssertionError(f"refused: {line}") from None
