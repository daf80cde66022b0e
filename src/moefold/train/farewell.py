"""The last lines of a run's log: how it ended, where its model is, and what to type next. Torch-free."""

import shlex
from pathlib import Path
from signal import Signals

from moefold.checkpoint.folder import checkpoint_folder, complete_checkpoints, step_of
from moefold.config.schema import Config
from moefold.launch.status import SIGNAL_STATUS

EXAMPLE_PROMPTS = {"python-docs": "The for statement", "text": "The", "huggingface": "The", "sft": "Hello"}
"""Text to continue, for the kinds of data whose models read text."""


def closing_lines(cfg: Config, status: int, step: int) -> list[str]:
    """Return the lines with which a run ends.

    Args:
        cfg: the recipe.
        status: 0, or 128 and the number of the signal that stopped the run.
        step: the last step that was done.
    """
    complete = complete_checkpoints(checkpoint_folder(cfg))
    newest = complete[-1] if complete else None
    if status:
        where = f"step {step} of {cfg.run.steps}{', before its evaluation' if step == cfg.run.steps else ''}"
        return [
            f"stopped by {Signals(status - SIGNAL_STATUS).name} after {where}; {_describe_last_save(cfg, newest, step)}"
        ]
    done = f"done: {step} steps, in {cfg.run.dir}; "
    if newest is None:
        return [done + f"no model was saved, as {_why_not_saved(cfg)}; set checkpoint.at_end=true to save one"]
    if step_of(newest) < step:
        done += f"not saved since step {step_of(newest)}, as {_why_not_saved(cfg)}; "
    return [f"{done}model in {newest}", *next_commands(cfg)]


def next_commands(cfg: Config) -> list[str]:
    """Return what a user may type once the model of a run is there."""
    run_dir, steps = shlex.quote(cfg.run.dir), cfg.run.steps
    prompt = EXAMPLE_PROMPTS.get(cfg.data.kind)
    use = f"moefold generate {run_dir} {shlex.quote(prompt)}" if prompt else f"moefold checkpoint show {run_dir}"
    return [f"next: {use}", f"or train on: the same command with run.steps={2 * steps}"]


def _describe_last_save(cfg: Config, newest: Path | None, step: int) -> str:
    if newest is None:
        return f"nothing was saved, as {_why_not_saved(cfg)}"
    behind = f", which lacks the last {step - step_of(newest)} steps" if step_of(newest) < step else ""
    return f"saved in {newest}{behind}; the same command goes on from there"


def _why_not_saved(cfg: Config) -> str:
    every = cfg.checkpoint.every
    return f"checkpoint.every={every} and checkpoint.at_end={str(cfg.checkpoint.at_end).lower()} say"
