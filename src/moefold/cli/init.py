"""`moefold init`: write a recipe that ships with moefold into a folder, as a starting point."""

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterable
from pathlib import Path

from moefold.cli.command_parser import CommandParser
from moefold.config.shipped_recipes import TEMPLATES, shipped_files
from moefold.errors import ConfigError
from moefold.message_text import closest_match, format_list
from moefold.terminal import print_escaped

DEFAULT_RECIPE = "quickstart"
LIST_WIDTH = 80
"""Width of `moefold init --list` in columns."""
PLANNED = re.compile(r"-\d+xh100$")
"""End of the name of a recipe with the mapping planned for a number of H100."""

EPILOG = """examples:
  moefold init
  moefold init sft
  moefold init single experiments
  moefold init pretrain/qwen3-30b-a3b-64xh100
  moefold init --list
"""


def run(argv: list[str]) -> int:
    """Write a recipe and the files that it reads into a folder."""
    arguments = _parser().parse_args(argv)
    shipped = shipped_files()
    if arguments.list:
        if arguments.words:
            raise ConfigError(f"--list lists all recipes, so {arguments.words[0]!r} has no effect; leave it out")
        print_escaped("\n".join(_list_recipes({name: _first_sentence(files[0]) for name, files in shipped.items()})))
        return 0
    if len(arguments.words) > 2:
        raise ConfigError(f"{arguments.words[2]!r} is one argument too many: moefold init [NAME] [DIR]")
    name, folder = _parse_name_and_folder(arguments.words, set(shipped))
    targets = {source: folder / source.name for source in shipped[name]}
    _check_targets(targets.values(), force=arguments.force)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for source, target in targets.items():
            shutil.copyfile(source, target)
            print_escaped(f"wrote {target}")
    except OSError as error:
        raise ConfigError(f"DIR={str(folder)!r} cannot be written: {error.strerror}; choose another") from None
    first = targets[shipped[name][0]]
    print_escaped(f"next: edit it, then sbatch {first}" if name in TEMPLATES else f"next: moefold train {first}")
    return 0


def _parse_name_and_folder(words: list[str], names: set[str]) -> tuple[str, Path]:
    """Parse the arguments NAME, NAME DIR, or a DIR that exists, and return the recipe's name and the folder."""
    name, folder = [*(words or [DEFAULT_RECIPE]), "."][:2]
    if name in names:
        return name, Path(folder)
    if len(words) == 1 and Path(name).is_dir():
        return DEFAULT_RECIPE, Path(name)
    matches = [recipe for recipe in sorted(names) if name.lower() in recipe]
    guess = _closest_recipe(name, names)
    hint = f"did you mean {guess!r}?" if guess else "`moefold init --list` shows the recipes"
    if len(matches) > 1:
        hint = f"these match: {', '.join(matches)}"
    fault = "is not a recipe that comes with moefold"
    if len(words) == 1:
        fault += ", and there is no such folder"
    raise ConfigError(f"{name!r} {fault}; {hint} (moefold init NAME DIR)")


def _closest_recipe(word: str, names: set[str]) -> str | None:
    """Return the recipe with the most similar name, with or without its folder, or None if no name is close."""
    by_file = {name.rpartition("/")[2]: name for name in sorted(names)}
    guess = closest_match(word, names)
    return guess if guess is not None else by_file.get(closest_match(word, by_file) or "")


def _list_recipes(sentences: dict[str, str]) -> list[str]:
    """List recipes, described by a sentence each, by folder in lines of `LIST_WIDTH`. Planned variants share a line."""
    lines = []
    for folder in sorted({name.rpartition("/")[0] for name in sentences}):
        names = [name for name in sentences if name.rpartition("/")[0] == folder]
        planned = {
            name: [
                int(match[1]) for recipe in names if (match := re.fullmatch(rf"{re.escape(name)}-(\d+)xh100", recipe))
            ]
            for name in names
            if not PLANNED.search(name)
        }
        plain = {name.rpartition("/")[2]: sorted(counts) for name, counts in planned.items()}
        width = max(map(len, plain))
        counts_width = max(len(_join(counts)) for counts in plain.values())
        if folder:
            lines += ["", f"{folder}/NAME for any number of GPUs, {folder}/NAME-64xh100 planned for 64:"]
        for name, counts in plain.items():
            head = f"  {name:{width}}  " + (f"{_join(counts):{counts_width}}  " if counts_width else "")
            sentence = sentences[f"{folder}/{name}" if folder else name]
            lines.append(head + _shorten(sentence, LIST_WIDTH - len(head)))
    return lines


def _join(counts: list[int]) -> str:
    return ", ".join(map(str, counts))


def _shorten(sentence: str, width: int) -> str:
    """Shorten a sentence to `width` characters: after its last part that fits, or else after a word."""
    if len(sentence) <= width:
        return sentence
    ends = [match.start() for match in re.finditer(r" \(|[,:;] ", sentence) if width / 2 < match.start() <= width]
    sentences = [sentence[:end] for end in ends if sentence.count("(", 0, end) == sentence.count(")", 0, end)]
    return sentences[-1] if sentences else textwrap.shorten(sentence, width, placeholder=" ...")


def _check_targets(targets: Iterable[Path], *, force: bool) -> None:
    """Refuse files that exist, unless --force is given."""
    existing = [str(path) for path in targets if path.exists()]
    if existing and not force:
        raise ConfigError(
            f"{format_list(existing)} exists already; add --force to replace it, or name another folder: NAME DIR"
        )


def _first_sentence(file: Path) -> str:
    """Return the first sentence of the comment at the head of a file."""
    lines = [line.removeprefix("#").strip() for line in file.read_text(encoding="utf-8").splitlines()]
    text = " ".join(line for line in lines[: lines.index("") if "" in lines else None] if not line.startswith("!"))
    return text.partition(". ")[0].removesuffix(".")


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "moefold init", "Write a recipe that comes with moefold, and the files that it reads, into a folder.", EPILOG
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="[NAME] [DIR]",
        help=f"recipe ({DEFAULT_RECIPE}) and folder (the current one); a folder that exists gets {DEFAULT_RECIPE}",
    )
    parser.flag("--list", "list the recipes, with a sentence on each")
    parser.flag("--force", "replace files that exist")
    return parser
