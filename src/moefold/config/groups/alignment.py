"""Methods of offline alignment: losses on pairs of completions, and uses of rewards of conversations."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from moefold.config.base.field import Bound
from moefold.config.base.part import Part, UnusedKeys
from moefold.message_text import Problem

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PairScores:
    """Scores of the sequences of a micro-batch by pair, [B, K / 2] each.

    A score is the log-probability of a sequence. The log-probability under the reference is subtracted if the method
    has a reference. The score is divided by the number of tokens if the method is per token.
    """

    first: "Tensor"
    """Scores of the chosen completions, or of the completions with a label."""
    second: "Tensor"
    """Scores of the rejected completions, or of the completions of another prompt."""
    is_pair: "Tensor"
    """Slots with a pair, bool."""
    is_desirable: "Tensor | None"
    """Labels of completions, for a method that is `labelled`."""
    record_mean: Callable[[str, "Tensor", "Tensor"], None]
    """Record the values of a metric of `mean_metrics` in the slots of a mask, bool."""


@dataclass(frozen=True)
class OraclePairs:
    """Scores of a row of preference data next to one pair, in float64, for the oracle."""

    first: "Tensor"
    seconds: Sequence["Tensor"]
    """Scores of the second sequences of all pairs of the row."""
    pair: int
    columns: Mapping[str, "Tensor"]
    """Columns of the row."""


class PreferenceFormula(NamedTuple):
    """A preference loss in float64."""

    loss: Callable[[OraclePairs], "Tensor"]
    has_reference: bool = True
    is_per_token: bool = False


@dataclass(frozen=True, kw_only=True)
class AlignmentPart(Part):
    """Use of rewards or preferences."""

    group: ClassVar[str] = "alignment"
    key: ClassVar[str] = "align.method"
    is_for_training: ClassVar[bool] = True
    data_kind: ClassVar[str] = ""
    """Required `data.kind`. Empty: any kind except preferences."""
    changes_training: ClassVar[bool] = True
    """True if rewards or preferences change the data or the loss."""
    has_reference: ClassVar[bool] = False
    """True if completions are compared with the initial weights."""
    selects_rows: ClassVar[bool] = False
    """True if the method chooses or weighs conversations (`select`)."""

    @property
    def preference(self) -> "PreferencePart | None":
        """Loss of pairs of completions."""
        return None

    @property
    def reward_column(self) -> str:
        """Column with the reward of a row. Empty: no rewards are read."""
        return ""

    @property
    def prompt_template(self) -> str:
        """Text with the reward that replaces the last message before the answer. Empty: it stays."""
        return ""

    def select(self, rewards: Any, members: Any) -> Any:
        """Return the conversations of the training data with their weights, `data.sft.ScaledMembers`.

        Args:
            rewards: the rewards of all conversations, `data.scored_conversations.Rewards`.
            members: numbers of the conversations to select from.
        """
        raise AssertionError("selects_rows")


@dataclass(frozen=True, kw_only=True)
class RewardPart(AlignmentPart):
    """Use of conversations with a reward in each row."""

    changes_maths: ClassVar[bool] = False
    data_kind: ClassVar[str] = "sft"
    reward: Annotated[str, Bound("must name a column", bool)] = "reward"
    """Column with the reward of a row."""

    @property
    def reward_column(self) -> str:
        """Setting `reward`."""
        return self.reward


@dataclass(frozen=True, kw_only=True)
class RewardPromptPart(RewardPart):
    """Prompts that contain the reward of their answers, in training and in inference."""

    template: str = "{prompt} <reward>{reward:.2f}</reward>"
    """Text that replaces the last message before the answer."""
    want: Annotated[float, Bound("must be a finite number", math.isfinite)] = 1.0
    """Reward that prompts ask for after training: generate --chat, serve, rollout and lm-eval write it into the prompt
    by the template. Their option --want takes another one."""

    @property
    def prompt_template(self) -> str:
        """Setting `template`."""
        return self.template

    def check(self) -> Iterator[Problem]:
        """Yield the problems of the template."""
        yield from template_problems(self.template)


@dataclass(frozen=True, kw_only=True)
class RewardSelectionPart(RewardPart):
    """Selection or weighting of conversations by their rewards."""

    selects_rows: ClassVar[bool] = True

    def select(self, rewards: Any, members: Any) -> Any:
        """Return the conversations to train on, chosen by their rewards and groups."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class PreferencePart(AlignmentPart):
    """Loss of pairs of completions."""

    data_kind: ClassVar[str] = "preference"
    has_reference: ClassVar[bool] = True
    is_per_token: ClassVar[bool] = False
    """True if scores are divided by the number of tokens."""
    labelled: ClassVar[bool] = False
    """True if a row is one completion with a label. Its second sequence is the completion of another prompt."""
    mean_metrics: ClassVar[tuple[str, ...]] = ("chosen_reward", "rejected_reward", "margin", "accuracy")
    """Recorded metrics, which are means over pairs."""

    @property
    def preference(self) -> "PreferencePart":
        """The part with the pair loss: this part."""
        return self

    def pair_loss(self, scores: PairScores) -> "Tensor":
        """Return the loss of each pair, [B, K / 2], and record the metrics."""
        raise NotImplementedError

    def unused_keys(self) -> Iterator[UnusedKeys]:
        """Yield the key of the loss for other data."""
        yield UnusedKeys("train.loss", f"{self.key}={self.kind!r} has its own loss", f"choose {self.key}='none'")

    def formula(self) -> PreferenceFormula | None:
        """Return the loss of one pair, or None if it has no formula."""
        return None


def parse_threshold(threshold: float | str) -> tuple[str, float]:
    """Return the kind of a threshold, "value", "quantile" or "best", and its number.

    Raises:
        ValueError: the text is not a threshold.
    """
    if threshold == "best":
        return "best", 0.0
    if isinstance(threshold, str) and threshold.startswith("q"):
        quantile = float(threshold[1:])
        if not 0 <= quantile <= 1:
            raise ValueError(threshold)
        return "quantile", quantile
    # A number in quotes is accepted.
    number = float(threshold)
    if not math.isfinite(number):
        raise ValueError(threshold)
    return "value", number


def is_threshold(threshold: float | str) -> bool:
    """Return whether `parse_threshold` reads a threshold."""
    try:
        parse_threshold(threshold)
    except ValueError:
        return False
    return True


def template_problems(template: str) -> Iterator[Problem]:
    """Yield the missing field of a template, and fields that cannot be filled in."""
    key = f"{AlignmentPart.key}.template"
    try:
        fields = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
        if missing := [name for name in ("prompt", "reward") if name not in fields]:
            way_out = "write both {prompt} and {reward}, or {reward:.2f} for 2 digits"
            yield Problem(key, template, f"lacks {{{missing[0]}}}", way_out)
        elif extra := sorted(fields - {"prompt", "reward"}):
            yield Problem(key, template, f"has the field {{{extra[0]}}}", "only {prompt} and {reward} are filled in")
        else:
            fill_template(template, "", 0.0)
    except (ValueError, IndexError, KeyError, AttributeError) as error:
        way_out = "write a brace of the text twice, as {{ or }}"
        yield Problem(key, template, f"cannot be filled in ({error})", way_out)


def fill_template(template: str, prompt: str, reward: float) -> str:
    """Return a prompt with its reward."""
    return template.format(prompt=prompt, reward=reward)


def record_pair_rewards(scores: PairScores, beta: float) -> None:
    """Record the implicit rewards of both completions, their difference, and the share of positive differences."""
    difference = scores.first - scores.second
    scores.record_mean("chosen_reward", beta * scores.first, scores.is_pair)
    scores.record_mean("rejected_reward", beta * scores.second, scores.is_pair)
    scores.record_mean("margin", beta * difference, scores.is_pair)
    scores.record_mean("accuracy", (difference > 0).double(), scores.is_pair)
