"""Prompts that name the reward of their answer (arXiv:2308.12050)."""

from dataclasses import dataclass

from moefold.config.groups.alignment import RewardPromptPart


@dataclass(frozen=True, kw_only=True)
class RewardCondition(RewardPromptPart):
    """The reward is written into the prompt."""
