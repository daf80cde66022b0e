"""Command-line entry point: find the subcommand, run it, and turn user errors into one message.

Each subcommand is a module `moefold.cli.<name>` with `run(argv) -> int`. A module is imported only when its command
is called, so a command never pays for the imports of another command. All of them raise ConfigError for what the
user can mend.
"""

import argparse
import errno
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from moefold import __version__
from moefold.cli.command_parser import CommandParser
from moefold.errors import EXIT_FAILED, EXIT_USER_ERROR, ConfigError, NoFormulaError, RunError
from moefold.message_text import closest_match
from moefold.terminal import escape_log_lines, print_escaped

COMMANDS = {
    "init": "write a recipe that comes with moefold, to train from and to change",
    "recipe": "bring recipes of earlier versions into the format of this one",
    "train": "train a model from a recipe; starts the ranks itself on one machine",
    "meet": "serve the meeting point of the sites of a run",
    "template": "print a job file for SLURM, Kubernetes, SkyPilot or Ray",
    "plan": "rank all legal mappings of a model on some GPUs by predicted step time",
    "layout": "show how attention and experts fold over the same ranks",
    "simulate": "simulate one step of a recipe: numbers, a trace, a picture",
    "plan-accuracy": "compare the planner's predictions with published measurements",
    "memory": "show the memory of a step on each rank, measured or by formula",
    "verify": "prove on CPU that a recipe's mapping computes what one process computes",
    "checkpoint": "list, show, verify, compare and remove checkpoints",
    "tokenize": "turn text, JSON lines or parquet into token files",
    "inspect": "show how evenly the experts of a run were used",
    "board": "show runs side by side in a browser, live or as a static export",
    "eval": "mean cross-entropy of a model over a file of tokens or text",
    "generate": "continue a text with a model",
    "rollout": "sample completions of prompts, score them, and write them",
    "serve": "serve a model over HTTP with the OpenAI API",
    "lm-eval": "run the tasks of lm-eval on a model",
    "import": "convert a Hugging Face folder to a checkpoint",
    "export": "convert a checkpoint to a Hugging Face folder",
    "push": "upload a model to the Hugging Face hub",
    "upcycle": "turn a dense model into a model with experts",
    "merge": "average the weights of checkpoints",
    "doctor": "show versions, devices, memory, kernels and optional packages of this machine",
    "completion": "print a script that completes commands and recipe keys in a shell",
    "probe": "measure this machine and write a device file for the planner",
    "bench": "measure the training step next to the rates of the machine",
}
REPLACED_COMMANDS = {"lengths": "moefold simulate RECIPE --lengths NAME"}
"""Commands of earlier versions, and the commands that replace them."""

EXIT_CANNOT_JUDGE = 3
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status.

    0: success. 1: the command ran and its answer is no, or its run failed. 2: the user's settings cannot work.
    3: `verify` cannot judge the recipe. 130: interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    escape_log_lines()
    try:
        status = _dispatch(arguments)
        sys.stdout.flush()
    except ConfigError as error:
        print_escaped(f"moefold: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except NoFormulaError as error:
        print_escaped(f"moefold: cannot judge: {error}", file=sys.stderr)
        return EXIT_CANNOT_JUDGE
    except RunError as error:
        print_escaped(f"moefold: error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except BrokenPipeError:
        # The reader has closed the pipe (`moefold layout ... | head`); silence the interpreter's flush at exit.
        _discard_stdout()
        return EXIT_BROKEN_PIPE
    except Exception as error:
        if reason := _stdout_failure(error):
            _discard_stdout()
            print_escaped(f"moefold: error: standard output cannot be written: {reason}", file=sys.stderr)
            return EXIT_FAILED
        if isinstance(error.__cause__, ConfigError | RunError):
            # The error of a rank that the command has started.
            print_escaped(f"moefold: error: {error.__cause__}", file=sys.stderr)
            return EXIT_USER_ERROR if isinstance(error.__cause__, ConfigError) else EXIT_FAILED
        # Report errors of external parts, and out-of-memory errors of any library. Others are bugs of moefold.
        from moefold.config.base.part_failures import failure_of_part
        from moefold.launch.exit import oom_message

        if not (text := failure_of_part(error) or oom_message(error)):
            raise
        print_escaped(f"moefold: error: {text}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("moefold: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return status


def _stdout_failure(error: Exception) -> str:
    """Return why standard output cannot be written (a full disk, a lost terminal), or "" for any other error."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EIO) or error.filename is not None:
        return ""
    try:
        # The error does not name its file: try whether standard output takes a character.
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError as again:
        return again.strerror or str(again)
    return ""


def _discard_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(argv: list[str]) -> int:
    if not argv:
        _parser().print_help(sys.stderr)
        return EXIT_USER_ERROR
    name = _listed_name(argv[0])
    if not name.startswith("-") and name not in COMMANDS:
        if name in REPLACED_COMMANDS:
            raise ConfigError(f"moefold {name} is {REPLACED_COMMANDS[name]} now")
        guess = closest_match(name, COMMANDS)
        hint = f"did you mean {guess!r}?" if guess else f"the commands are {', '.join(COMMANDS)}"
        raise ConfigError(f"unknown command {name!r}; {hint}")
    try:
        if name.startswith("-"):
            _parser().parse_args(argv)
            return EXIT_USER_ERROR
        return int(_module(name).run(argv[1:]))
    except SystemExit as stop:
        # argparse exits after its help (0) and after its own error message (2).
        if stop.code is None:
            return 0
        return stop.code if isinstance(stop.code, int) else EXIT_USER_ERROR


def command_parser(name: str) -> CommandParser:
    """Return the parser of a command. The parser of lm-eval has its help alone: lm_eval parses its arguments."""
    parser: CommandParser = _module(name)._parser()
    return parser


def _module(name: str) -> ModuleType:
    module = f"moefold.cli.{name.replace('-', '_')}"
    if module not in sys.modules:
        # An import makes 100,000 objects that all stay: collections would take a tenth of its time, and later ones too.
        gc.disable()
        try:
            importlib.import_module(module)
        finally:
            gc.freeze()
            gc.enable()
    return sys.modules[module]


def _listed_name(name: str) -> str:
    """Return the listed spelling of a command: `lm_eval` (a former name) and other underscores become hyphens."""
    hyphened = name.replace("_", "-")
    return hyphened if hyphened in COMMANDS else name


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    parser = CommandParser(
        prog="moefold",
        usage="moefold [-h] [--version] COMMAND ...",
        description="Train Mixture-of-Experts language models with MoE Parallel Folding, on a laptop or a cluster.",
        epilog="commands:\n"
        + "\n".join(f"  {name:{width}}  {summary}" for name, summary in COMMANDS.items())
        + "\n\n`moefold COMMAND --help` explains one command; `moefold train --keys` lists every key of a recipe.",
    )
    parser.add_argument("--version", action="version", version=f"moefold {__version__}")
    return parser
