"""`moefold completion`: print a script that completes commands, options and recipe keys in a shell."""

import argparse
import re
import shlex
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import shtab

from moefold.cli.command_parser import CommandParser
from moefold.cli.main import COMMANDS, command_parser
from moefold.config.keys.paths import choices_of, key_types, kind_settings, sections
from moefold.config.presets import preset_names
from moefold.config.shipped_recipes import shipped_files
from moefold.terminal import print_escaped

SHELLS = ("bash", "zsh", "fish")
_OVERRIDE = re.compile(r"key=value|KEY=N")
_RECIPE = re.compile(r"\.toml$")
_PATH = re.compile(r"CKPT|DENSE|DIR|FILE|FOLDER|INPUT|MODEL|OTHER|OUT|PATH|REPORT|RUN")
"""Metavars of arguments that are overrides, recipes, and files or folders."""

EPILOG = """bash: add to ~/.bashrc
  eval "$(moefold completion bash)"
zsh: add to ~/.zshrc, after compinit
  eval "$(moefold completion zsh)"
fish: add to ~/.config/fish/config.fish
  source (moefold completion fish | psub)
The script has the keys of this version: print it again after an upgrade.
"""

_BASH_END = "\ncomplete -o bashdefault -F _moefold_complete moefold\n"
_FISH_PATHS = "  __fish_complete_path (commandline -ct)\n"


def run(argv: list[str]) -> int:
    """Print the script."""
    shell = _parser().parse_args(argv).shell
    script: str = shtab.complete(_all_parsers(), shell, preamble=_overrides_function(shell))
    # shtab lets zsh complete such arguments only once.
    script = re.sub(r'"\(\*\)::?(.*:_moefold_overrides)"', r'"*:\1"', script)
    print_escaped(script + (_BASH_END if shell == "bash" else ""))
    return 0


def _all_parsers() -> argparse.ArgumentParser:
    """Return a parser of all commands, whose arguments have their completions."""
    parser = CommandParser(prog="moefold")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, summary in COMMANDS.items():
        of_command = command_parser(name)
        parents = [of_command] if of_command.add_help else []
        _mark_arguments(parents)
        commands.add_parser(name, help=summary, description=summary, parents=parents, add_help=not parents)
    return parser


def _mark_arguments(parsers: Sequence[argparse.ArgumentParser]) -> None:
    """Set the completion of each argument of some parsers and of their actions."""
    for parser in parsers:
        for action in parser._actions:
            if isinstance(action.choices, dict):
                choices = action.choices
                if nested := [choice for choice in choices.values() if isinstance(choice, argparse.ArgumentParser)]:
                    _mark_arguments(nested)
                    continue
                # shtab also takes any other dict for parsers.
                action.choices = list(choices)
            if completion := _completion(parser.prog, action):
                action.complete = completion  # type: ignore[attr-defined]


def _completion(prog: str, action: argparse.Action) -> dict[str, Any] | None:
    """Return the completion of an argument in shtab's form, or None if it has none, or has choices."""
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    if _OVERRIDE.search(metavar):
        return {"bash": "_moefold_overrides", "zsh": "_moefold_overrides", "fish": "(_moefold_overrides)"}
    if _RECIPE.search(metavar):
        return dict(shtab.glob("*.toml"))
    if prog == "moefold init" and not action.option_strings:
        return _words("_moefold_recipes", sorted(shipped_files()))
    if prog == "moefold plan" and action.dest == "model":
        return _words("_moefold_presets", list(preset_names()))
    if action.nargs != 0 and not action.choices and (action.type is Path or _PATH.search(metavar)):
        return dict(shtab.FILE)
    return None


def _words(function: str, words: list[str]) -> dict[str, Any]:
    """Return a completion by words, or by files if no word fits."""
    quoted_words = " ".join(map(shlex.quote, words))
    return {
        "bash": function,
        "zsh": function,
        "fish": f"({function})",
        "preamble": {
            "bash": f'\n{function}() {{\n  compgen -W {shlex.quote(quoted_words)} -- "$1"\n  compgen -f -- "$1"\n}}\n',
            "zsh": f"\n{function}() {{\n  compadd -- {quoted_words}\n  _files\n}}\n",
            "fish": f"\nfunction {function}\n  printf '%s\\n' {quoted_words}\n{_FISH_PATHS}end\n",
        },
    }


def _overrides_function(shell: str) -> str:
    """Return the function that completes `section.key=value` in a shell."""
    keys = [f"{section}.{key}=" for section in sections() for key in key_types(section)]
    keys += [f"{path}=" for path in kind_settings()]
    # In bash, = ends a word: a completion after it is a value of the key in front of it.
    template = (files("moefold.cli") / "completion_scripts" / f"overrides.{shell}").read_text(encoding="utf-8")
    values = "\n".join(_value_case(shell, key, words) for key, words in _key_values())
    joined_keys = " ".join(keys)
    return template.replace("@KEYS@", shlex.quote(joined_keys) if shell == "bash" else joined_keys).replace(
        "@VALUES@", values
    )


def _value_case(shell: str, key: str, words: list[str]) -> str:
    """Return the case of a key in the function of a shell: the possible words of its value."""
    quoted_words = " ".join(map(shlex.quote, words))
    if shell == "bash":
        return f'    {key}) compgen -W {shlex.quote(quoted_words)} -- "$word" ;;'
    if shell == "zsh":
        return f"      {key}) compadd -- {' '.join(shlex.quote(f'{key}={word}') for word in words)} ;;"
    return f"    case '{key}=*'\n      printf '%s\\n' {' '.join(shlex.quote(f'{key}={word}') for word in words)}"


def _key_values() -> Iterator[tuple[str, list[str]]]:
    """Yield the keys with a fixed set of values, and the values."""
    for section in sections():
        for key, hint in key_types(section).items():
            if hint is bool:
                yield f"{section}.{key}", ["true", "false"]
            elif choices := choices_of(section, key):
                yield f"{section}.{key}", [str(value) for value in choices]
    yield "model.preset", list(preset_names())


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "moefold completion",
        "Print a script that completes commands, options, recipe keys and their values in a shell.",
        EPILOG,
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    return parser
