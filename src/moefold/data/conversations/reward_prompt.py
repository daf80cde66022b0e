"""Prompts that ask for a reward: generation with a model of align.method="condition" (arXiv:2308.12050)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moefold.config.groups.alignment import fill_template, template_problems
from moefold.errors import ConfigError
from moefold.message_text import Setting

LEFT_OUT = "none"
"""Value of --want that leaves prompts unchanged."""


@dataclass(frozen=True, slots=True)
class RewardPrompt:
    """Template of a run with align.method="condition", and the wanted reward."""

    template: str
    """Value of align.method.template."""
    reward: float

    def fill(self, prompt: str) -> str:
        """Return a prompt with the reward, as in training."""
        return fill_template(self.template, prompt, self.reward)

    def fill_message(self, messages: Sequence[Mapping[str, Any]], number: int) -> list[dict[str, Any]]:
        """Return messages with the reward written into one of them, if its number exists and it is a text."""
        filled = [dict(message) for message in messages]
        if number >= 0 and isinstance(content := filled[number].get("content"), str):
            filled[number]["content"] = self.fill(content)
        return filled


def stored_reward_prompt(order: Mapping[str, Any], location: str) -> RewardPrompt | None:
    """Return the reward prompt from `CheckpointMeta.order`, or None if its run had another method, or an older version.

    Raises:
        ConfigError: the values are damaged.
    """
    method = order.get("align.method")
    # A part without a wanted reward may have one of the two keys.
    if not isinstance(method, dict) or not {"template", "want"} <= method.keys():
        return None
    template = method["template"]
    want = method["want"]
    is_number = isinstance(want, int | float) and not isinstance(want, bool) and math.isfinite(want)
    if not isinstance(template, str) or not is_number:
        raise ConfigError(
            f"{location}: align.method.template={template!r} and align.method.want={want!r} are damaged; copy it again"
        )
    if faults := list(template_problems(template)):
        raise ConfigError(f"{location}: {faults[0]}")
    return RewardPrompt(template, float(want))


def override_want(stored: RewardPrompt | None, option: str) -> RewardPrompt | None:
    """Return the reward prompt after an option: a number, "none" for no prompt, or "" for the one that is stored.

    Raises:
        ConfigError: the option is not a number, or the model was not trained with a reward in its prompts.
    """
    if not option:
        return stored
    if stored is None:
        raise ConfigError(
            f"{Setting('--want', option):s} has no effect: MODEL was not trained with align.method='condition'; leave "
            "it out"
        )
    if option == LEFT_OUT:
        return None
    try:
        reward = float(option)
    except ValueError:
        reward = math.nan
    if not math.isfinite(reward):
        raise ConfigError(
            f"{Setting('--want', option):s} must be a finite number, the reward to ask for, or {LEFT_OUT!r}"
        )
    return RewardPrompt(stored.template, reward)
