"""Alignment parts of a file: a selection by rewards, and a prompt with the reward that is asked for."""

from pathlib import Path

import pytest

from moefold.checkpoint.checkpoint_meta import CheckpointMeta, counted
from moefold.checkpoint.sample_order import data_order_change, sample_order
from moefold.config.schema import Config
from moefold.data.conversations.reward_prompt import RewardPrompt, stored_reward_prompt
from moefold.recipe import load_config

CODE = '''
from dataclasses import dataclass
from typing import Any, ClassVar
from moefold.config.groups.alignment import RewardPromptPart, RewardSelectionPart

@dataclass(frozen=True, kw_only=True)
class Best(RewardSelectionPart):
    """Keep the conversations with the best rewards."""

    interface: ClassVar[int] = 1
    reward: str = "score"
    want: int = 3

    def select(self, rewards: Any, members: Any) -> Any:
        return members[: self.want]

@dataclass(frozen=True, kw_only=True)
class Ask(RewardPromptPart):
    """Ask for a reward."""

    interface: ClassVar[int] = 1
    reward: str = "score"
    template: str = "{prompt} {reward}"
    want: float = 1.0
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return the file of both parts."""
    path = tmp_path / "align_parts.py"
    path.write_text(CODE)
    return path


def recipe(file: Path, kind: str, **settings: float) -> Config:
    """Return a recipe of fine-tuning with a part."""
    words = [f"align.method.{key}={value}" for key, value in settings.items()]
    return load_config(None, ["data.kind=sft", "data.path=rows.jsonl", f"align.method={file}:{kind}", *words])


def meta_of(cfg: Config) -> CheckpointMeta:
    """Return the metadata of a checkpoint of a recipe."""
    return CheckpointMeta(
        format=1, states=counted(step=1, samples=1, tokens=16), order=sample_order(cfg), model={}, parallel={}
    )


def test_a_part_inherits_the_settings_of_a_built_in_base(file):
    assert recipe(file, "Best").align.method.reward == "score"
    assert recipe(file, "Best", want=5).align.method.want == 5


def test_only_a_prompt_part_states_a_requested_reward(file):
    assert stored_reward_prompt(sample_order(recipe(file, "Ask", want=2.0)), "here") == RewardPrompt(
        "{prompt} {reward}", 2.0
    )
    assert stored_reward_prompt(sample_order(recipe(file, "Best")), "here") is None


def test_the_reward_that_is_asked_for_changes_no_sample(file):
    meta = meta_of(recipe(file, "Ask", want=2.0))
    assert data_order_change(meta, sample_order(recipe(file, "Ask", want=3.0))) == ""
    assert "align.method" in data_order_change(meta, sample_order(recipe(file, "Best")))
