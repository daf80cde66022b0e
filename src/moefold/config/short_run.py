"""A recipe that is started for fewer steps than it was written for: its warm-up and decay shrink with the run."""

from collections.abc import Mapping, Sequence
from typing import Any

from moefold.config.keys import default_of

STEP_COUNT_KEYS = ("warmup_steps", "decay_steps")
"""Keys of [train] that count steps and must fit into run.steps."""


def shorten_lr_schedule(tree: Mapping[str, Any], recipe: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """Shrink warm-up and decay in proportion where run.steps of the command line leaves no room for the recipe's.

    They stay as they are where they fit, and where the command line sets one of them, which is refused if it does not.

    Args:
        tree: the sections of the recipe with the overrides in them; its [train] is changed.
        recipe: the sections of the recipe alone.
        overrides: the overrides.

    Returns:
        What was changed, in words.
    """
    typed = {word.partition("=")[0].strip() for word in overrides}
    if "run.steps" not in typed or typed & {f"train.{key}" for key in STEP_COUNT_KEYS}:
        return []
    steps, planned = _int_or_zero(tree, "run", "steps"), _int_or_zero(recipe, "run", "steps")
    given = {key: _int_or_zero(recipe, "train", key) for key in STEP_COUNT_KEYS}
    wanted = given["warmup_steps"] + given["decay_steps"]
    if not 0 < steps < wanted <= planned:
        return []
    notes = []
    for key, count in given.items():
        if count > 0:
            shorter = count * steps // planned
            tree["train"][key] = shorter
            notes.append(
                f"train.{key} is {shorter} instead of {count}: run.steps={steps} instead of the {planned} of the recipe"
            )
    return notes


def _int_or_zero(tree: Mapping[str, Any], section: str, key: str) -> int:
    """An integer of a tree that nothing has checked yet, or its default; 0 for anything else."""
    keys = tree.get(section, {})
    value = keys.get(key, default_of(section, key)) if isinstance(keys, dict) else 0
    return value if type(value) is int else 0
