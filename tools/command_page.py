"""Reference of all commands, read from their argument parsers: `python -m tools.command_page > docs/commands.md`."""

import argparse
import re
import textwrap
from collections.abc import Iterator
from itertools import groupby

from moefold.cli.command_parser import CommandParser
from moefold.cli.main import COMMANDS, command_parser
from moefold.terminal import print_escaped

HEAD = """# Every command

<!-- From the parsers in src/moefold/cli by `python -m tools.command_page > docs/commands.md`. -->
<!-- not run: tests/cli/test_examples.py parses the examples of every help text -->

`moefold COMMAND --help` prints the same in a terminal. Exit status: 0 success; 1 the run failed, or the answer is no;
2 a setting cannot work, with one message; 3 `verify` cannot judge the recipe; 130 interrupted.
"""


def command_parsers() -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Yield the words, summary and argument parser of each command, in the order of `moefold --help`.

    The subcommands of `moefold checkpoint` follow it.
    """
    for name, summary in COMMANDS.items():
        parser = command_parser(name)
        yield name, summary, parser
        for action in parser._actions:
            for word, subparser in _subparsers(action).items():
                yield f"{name} {word}", "", subparser


def commands_page() -> str:
    """Return the text of the page `docs/commands.md`."""
    lines = [HEAD, "| command | purpose |", "| --- | --- |"]
    lines += [f"| [`moefold {name}`](#moefold-{name}) | {_cell(summary)} |" for name, summary in COMMANDS.items()]
    lines.append("")
    for name, _, parser in command_parsers():
        lines += [f"{'##' if name in COMMANDS else '###'} moefold {name}", ""]
        lines += [*_blocks(parser.description or ""), "```text", _usage(name, parser), "```", ""]
        rows = [row for action in parser._actions for row in _rows(action)]
        if rows:
            lines += ["| argument | meaning |", "| --- | --- |", *rows, ""]
        lines += _blocks(parser.epilog or "")
    return "\n".join(lines).rstrip("\n") + "\n"


def _usage(name: str, parser: argparse.ArgumentParser) -> str:
    """Return the command with its positional arguments and required options, on one line."""
    if isinstance(parser, CommandParser) and parser.usage:
        return parser.usage
    words = [f"moefold {name}"]
    for action in parser._actions:
        if not action.option_strings:
            words.append(_positional(action))
        elif action.required:
            words.append(f"{action.option_strings[-1]} {_value(action)}")
    has_options = any(action.option_strings and not action.required for action in parser._actions[1:])
    return " ".join([*words, "[OPTIONS]"] if has_options else words)


def _subparsers(action: argparse.Action) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of the subcommands that an argument takes, if it takes any."""
    words = action.choices if isinstance(action.choices, dict) else {}
    return {word: parser for word, parser in words.items() if isinstance(parser, argparse.ArgumentParser)}


def _positional(action: argparse.Action) -> str:
    """Return a positional argument as a usage line shows it."""
    name = _value(action) or action.dest
    if action.nargs == "?":
        return f"[{name}]"
    if action.nargs == "*":
        return name if name.startswith("[") else f"[{name} ...]"
    return f"{name} ..." if action.nargs in ("+", argparse.PARSER) else name


def _value(action: argparse.Action) -> str:
    """Return the placeholder of an argument's value, "" for a switch."""
    if action.nargs == 0:
        return ""
    if isinstance(action.metavar, tuple):
        return " ".join(action.metavar)
    if action.metavar:
        return action.metavar
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.dest.upper() if action.option_strings else action.dest


def _rows(action: argparse.Action) -> Iterator[str]:
    if action.dest == "help" or action.help == argparse.SUPPRESS:
        return
    if words := _subparsers(action):
        for word, parser in words.items():
            yield f"| `{word}` | {_cell(parser.description or '')} |"
        return
    value = _value(action)
    names = [f"{option} {value}".strip() for option in action.option_strings] or [value]
    text = (action.help or "") % {**vars(action), "default": action.default} if action.help else ""
    yield f"| {', '.join(f'`{_in_code(name)}`' for name in names)} | {_cell(text)} |"


def _in_code(text: str) -> str:
    return text.replace("|", "\\|")


def _cell(text: str) -> str:
    return _escaped(" ".join(text.split())).replace("|", "\\|")


def _escaped(text: str) -> str:
    """Escape emphasis, tags and links of Markdown in a text, except inside backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*<_\[])", r"\\\1", part) for part in parts)


def _blocks(text: str) -> list[str]:
    """Return a help text as Markdown: paragraphs, and indented lines as blocks of code."""
    lines: list[str] = []
    for is_code, group in groupby(filter(None, text.splitlines()), key=lambda line: line.startswith("  ")):
        found = list(group)
        if not is_code:
            lines += [*_wrapped(_escaped(" ".join(found))), ""]
        else:
            code = [line.removeprefix("  ") for line in found]
            is_shell = all(re.match(r"(\S+ .*\| )?moefold \S+(?!.*\S {2,}\S)", line) for line in code)
            lines += ["```sh" if is_shell else "```text", *code, "```", ""]
    return lines


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    print_escaped(commands_page(), end="")
