"""`moefold layout`: which rank stands where in the two views, as a table, as JSON or as a picture."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from moefold.config.keys import DERIVED, nearest
from moefold.config.load import load_config
from moefold.errors import ConfigError
from moefold.parallel.layout import Layout, fold

FOLD_KEYS = ("world_size", "tp", "cp", "pp", "ep", "etp", "order", "moe_order")
NODE_KEY = "gpus_per_node"
LEGAL_KEYS = (*FOLD_KEYS, NODE_KEY)
DEFAULT_GPUS_PER_NODE = 8

EPILOG = f"""keys: {", ".join(LEGAL_KEYS)}
  degrees are 1 where they are left out, {NODE_KEY} is {DEFAULT_GPUS_PER_NODE}; dp and edp follow from world_size

examples:
  moefold layout world_size=8 tp=2 cp=2 pp=2 ep=4
  moefold layout recipes/quickstart.toml tp=4 --png layout.png
"""


def run(argv: list[str]) -> int:
    """Print the layout that the words describe.

    Raises:
        ConfigError: a word, a file or the folding is wrong.
    """
    arguments = _parser().parse_intermixed_args(argv)
    layout, gpus_per_node = read_layout(arguments.words)
    if arguments.png is not None:
        from moefold.cli.layout_picture import save_picture

        save_picture(layout, gpus_per_node, arguments.png)
        print(f"wrote {arguments.png}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(layout.as_dict))
    else:
        from rich.console import Console

        from moefold.cli.layout_table import print_layout

        print_layout(Console(), layout, gpus_per_node)
    return 0


def read_layout(words: Sequence[str]) -> tuple[Layout, int]:
    """Fold what the words say: `key=value` or `parallel.key=value`, after an optional recipe.

    Returns:
        The layout, and the ranks of one node.

    Raises:
        ConfigError: a word is unknown or of the wrong type, the recipe cannot be read, or the degrees do not fold.
    """
    recipe = Path(words[0]) if words and "=" not in words[0] else None
    gpus_per_node = DEFAULT_GPUS_PER_NODE
    overrides = []
    for word in words if recipe is None else words[1:]:
        key, value = _split(word)
        if key == NODE_KEY:
            gpus_per_node = _node_size(value)
        else:
            overrides.append(f"parallel.{key}={value}")
    parallel = load_config(recipe, overrides).parallel
    return fold(**{key: getattr(parallel, key) for key in FOLD_KEYS}), gpus_per_node


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moefold layout",
        description="Show which rank stands where in the attention view and in the MoE view.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "words", nargs="+", metavar="RECIPE.toml | key=value", help="a recipe, then keys that replace its own"
    )
    parser.add_argument("--json", action="store_true", help="print the rank groups of both views as one JSON object")
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="also draw the two views into FILE (.png, .svg or .pdf)"
    )
    return parser


def _split(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    key = name.strip().removeprefix("parallel.")
    legal = f"the keys are {', '.join(LEGAL_KEYS)}"
    if not equals:
        raise ConfigError(f"{word!r} must be key=value, such as tp=2 (a recipe stands first); {legal}")
    if f"parallel.{key}" in DERIVED:
        raise ConfigError(f"{word!r}: {DERIVED[f'parallel.{key}']}")
    if key not in LEGAL_KEYS:
        guess = nearest(key, LEGAL_KEYS, cutoff=0.5)
        raise ConfigError(f"{word!r} is no key of a layout{f'; did you mean {guess}?' if guess else ''}; {legal}")
    return key, value.strip()


def _node_size(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"{NODE_KEY}={text} must be an integer of at least 1; leave it out for {DEFAULT_GPUS_PER_NODE}"
        )
    return int(text)
