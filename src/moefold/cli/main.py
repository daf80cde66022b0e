"""The command line: finds the sub-command, runs it, and turns user errors into one message.

Each sub-command is a module `moefold.cli.<name>` with `run(argv) -> int`, imported only when it is called, so that no
command pays for another one's imports.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from moefold import __version__
from moefold.cli.command_parser import CommandParser
from moefold.config.suggestions import closest_match
from moefold.errors import ConfigError, RunError
from moefold.terminal import escape_log_lines, print_escaped

COMMANDS = {
    "init": "write a recipe that comes with moefold, to train from and to change",
    "train": "train a model from a recipe; starts the ranks itself on one machine",
    "plan": "rank all legal mappings of a model on some GPUs by predicted step time",
    "layout": "show how attention and experts fold over the same ranks",
    "simulate": "play a step of a recipe out on paper: numbers, a trace, a picture",
    "plan-accuracy": "compare the planner's predictions with published measurements",
    "memory": "show what a step has in memory on each rank, measured or by formula",
    "verify": "prove on CPU that a recipe's mapping computes what one process computes",
    "checkpoint": "list, show, verify, compare and remove checkpoints",
    "tokenize": "turn text, JSON lines or parquet into token files",
    "inspect": "show how evenly the experts of a run were used",
    "eval": "mean cross-entropy of a model over a file of tokens or text",
    "generate": "continue a text with a model",
    "lm-eval": "run the tasks of lm-eval on a model",
    "import": "make a checkpoint of a Hugging Face folder",
    "export": "make a Hugging Face folder of a checkpoint",
    "upcycle": "make a model with experts of a dense one",
    "doctor": "show versions, devices, memory, kernels and optional packages of this machine",
    "bench": "measure the training step against a plain implementation",
}

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status.

    0: done. 1: the command ran and its answer is no, or its run went wrong. 2: the user's settings cannot work.
    130: interrupted.

    Args:
        argv: the words after `moefold`; None takes them from the process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    escape_log_lines()
    try:
        status = _dispatch(words)
        sys.stdout.flush()
    except ConfigError as error:
        print_escaped(f"moefold: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except RunError as error:
        print_escaped(f"moefold: error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except BrokenPipeError:
        # The reader is gone (`moefold layout ... | head`); the interpreter must not complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (MemoryError, RuntimeError, ValueError, OSError) as error:
        # Errors of memory of any library; all others are bugs of ours.
        from moefold.launch.exit import oom_message

        if not (text := oom_message(error)):
            raise
        print_escaped(f"moefold: error: {text}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("moefold: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return status


def _dispatch(argv: list[str]) -> int:
    if not argv:
        _parser().print_help(sys.stderr)
        return EXIT_USER_ERROR
    name = _listed_name(argv[0])
    if not name.startswith("-") and name not in COMMANDS:
        guess = closest_match(name, COMMANDS)
        hint = f"did you mean {guess!r}?" if guess else f"the commands are {', '.join(COMMANDS)}"
        raise ConfigError(f"unknown command {name!r}; {hint}")
    try:
        if name.startswith("-"):
            _parser().parse_args(argv)
            return EXIT_USER_ERROR
        return int(importlib.import_module(f"moefold.cli.{name.replace('-', '_')}").run(argv[1:]))
    except SystemExit as leave:
        # argparse ends so, after its help (0) and after its own message on a wrong word (2).
        return leave.code if isinstance(leave.code, int) else 0 if leave.code is None else EXIT_USER_ERROR


def _listed_name(name: str) -> str:
    """Return a command as it is listed: `lm_eval`, the name that it had, and others with underscores are known too."""
    hyphened = name.replace("_", "-")
    return hyphened if hyphened in COMMANDS else name


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    parser = CommandParser(
        prog="moefold",
        usage="moefold [-h] [--version] COMMAND ...",
        description="Train Mixture-of-Experts language models with MoE Parallel Folding, on a laptop or a cluster.",
        epilog="commands:\n"
        + "\n".join(f"  {name:{width}}  {words}" for name, words in COMMANDS.items())
        + "\n\n`moefold COMMAND --help` explains one command; `moefold train --keys` lists every key of a recipe.",
    )
    parser.add_argument("--version", action="version", version=f"moefold {__version__}")
    return parser
