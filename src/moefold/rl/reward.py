"""Reward of rollouts: a built-in verifier, or a Python function of the user in worker processes."""

import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from moefold.config.base.limits import MAX_NUMBER
from moefold.config.sections.data import DataConfig
from moefold.config.sections.faults import FaultsConfig
from moefold.config.sections.rl import RewardConfig
from moefold.data.prompts import Prompt
from moefold.errors import ConfigError, RunError
from moefold.message_text import Problem, Setting
from moefold.rl.reward_pool import RewardError, RewardPool, RewardTimeoutError
from moefold.rl.verifiers import REQUIRED_COLUMNS, TASK_VERIFIERS, VERIFIERS, column_problem

SCORING_FRACTION = 0.9
"""Fraction of faults.timeout_s, the wait of the other ranks, for scoring the prompts of a rank."""


@dataclass(frozen=True, slots=True)
class FailedReward:
    """Prompt whose reward function failed."""

    prompt: Prompt
    function: str
    """Name in reward.use, or the verifier of the task."""
    reason: str
    details: str
    """Traceback of the function, or empty if there is none."""

    def describe(self) -> str:
        """Return one line for the log."""
        return (
            f"the reward function {self.function} {self.reason}, for the prompt {self.prompt.text!r} "
            f"({self.prompt.location})"
        )


@dataclass(frozen=True, slots=True)
class Scores:
    """Rewards of the completions of one prompt."""

    total: NDArray[np.float64]
    """Weighted sum over the functions that returned a number, [completions]. NaN means no function with a weight did.
    """
    by_function: Mapping[str, NDArray[np.float64]]
    """Results of each of several functions, [completions], by its name in metrics, or NaN for None."""


def reward_names(data: DataConfig, reward: RewardConfig) -> tuple[str, ...]:
    """Return the functions of reward.use, or the verifier of the task."""
    return reward.functions or ((TASK_VERIFIERS[data.task],) if data.kind == "task" else ())


def short_names(names: Sequence[str]) -> list[str]:
    """Return the names of reward functions in metrics, without their file unless two files have the same name."""
    short = [name.rpartition(":")[2] for name in names]
    return [short_name if short.count(short_name) == 1 else name for short_name, name in zip(short, names, strict=True)]


def weighted_sum(scores: Sequence[NDArray[np.float64]], weights: Sequence[float]) -> NDArray[np.float64]:
    """Return the weighted sum of scores without NaN, [completions], or NaN if all scores with a weight are NaN."""
    # A function of weight 0 is only reported: its score alone does not give a rollout a reward.
    counts = np.array(weights) != 0
    scores_FG = np.stack(scores)[counts]
    total_G = np.nansum(scores_FG * np.array(weights)[counts, None], axis=0)
    return np.where(np.isnan(scores_FG).all(axis=0), math.nan, total_G)


def is_mixed(rewards_PG: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return whether each group has two different rewards, [P]. Only such groups have a gradient. NaN: no reward."""
    low = np.min(np.where(np.isnan(rewards_PG), np.inf, rewards_PG), axis=1)
    high = np.max(np.where(np.isnan(rewards_PG), -np.inf, rewards_PG), axis=1)
    mixed: NDArray[np.bool_] = high > low
    return mixed


def length_penalty(lengths: NDArray[np.int64], start: int, max_tokens: int) -> NDArray[np.float64]:
    """Return DAPO's soft overlong punishment: 0 up to `start` tokens, -1 at max_tokens (arXiv:2503.14476 sec. 3.4).

    The start is rl.length_penalty_from, below max_tokens. 0: no punishment.
    """
    if start == 0:
        return np.zeros(lengths.shape)
    return -np.clip((lengths - start) / (max_tokens - start), 0.0, 1.0)


def split_reference(reference: str) -> tuple[Path, str] | None:
    """Split FILE.py:FUNCTION, and return None for a name of another form."""
    path, colon, function = reference.rpartition(":")
    return (Path(path), function) if colon and path.endswith(".py") and function.isidentifier() else None


class Reward:
    """Context manager that computes the rewards of completions, for sections of a recipe that `check_reward` passed."""

    def __init__(self, data: DataConfig, faults: FaultsConfig, reward: RewardConfig, *, num_ranks: int) -> None:
        self._names = reward_names(data, reward)
        self._weights = reward.weights or (1.0,) * len(self._names)
        self._on_error = reward.on_error
        self._pools: dict[str, RewardPool] = {}
        self._failures: list[FailedReward] = []
        self._reward = reward
        self._faults = faults
        # No other rank waits for a single rank.
        self._limit_s = SCORING_FRACTION * faults.timeout_s if num_ranks > 1 else None
        for name in self._names:
            if name in VERIFIERS:
                continue
            reference = split_reference(name)
            assert reference is not None
            self._pools[name] = RewardPool(*reference, workers=reward.workers, timeout_s=reward.timeout_s)

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Sequence[str]],
        ids: Sequence[Sequence[Sequence[int]]],
        on_scored: Callable[[], None] | None = None,
    ) -> list[Scores]:
        """Return the scores of the completions of each prompt, given their texts and tokens.

        Raises:
            RunError: the function failed and reward.on_error is "stop", or the other ranks would give up before all
                prompts are scored.
        """
        calls = [
            reward_arguments(prompt, texts, tokens)
            for prompt, texts, tokens in zip(prompts, completions, ids, strict=True)
        ]
        # The pools work at the same time: results are read as they arrive.
        results = [self._call_all(name, calls) for name in self._names]
        scores: list[Scores] = []
        num_timeouts = 0
        try:
            for prompt, texts, *prompt_results in zip(prompts, completions, *results, strict=True):
                num_timeouts += any(isinstance(result, RewardTimeoutError) for result in prompt_results)
                scores.append(self._checked(prompt, prompt_results, len(texts)))
                if on_scored is not None:
                    on_scored()
        except TimeoutError:
            raise RunError(self._slowness(len(scores), len(prompts), num_timeouts)) from None
        return scores

    def pop_failures(self) -> list[FailedReward]:
        """Return the failures since the last call."""
        failures = self._failures
        self._failures = []
        return failures

    def close(self) -> None:
        """End the worker processes."""
        for pool in self._pools.values():
            pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _slowness(self, num_scored: int, num_prompts: int, num_timeouts: int) -> str:
        reward = self._reward
        return (
            f"the reward function has scored {num_scored} of the {num_prompts} prompts of a rank after "
            f"{self._limit_s:g} s, of which {num_timeouts} timed out; the other ranks wait for faults.timeout_s="
            f"{self._faults.timeout_s:g} s: make it faster, lower reward.timeout_s={reward.timeout_s:g}, or raise "
            f"reward.workers={reward.workers} or faults.timeout_s"
        )

    def _call_all(self, name: str, calls: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Any] | RewardError]:
        """Start the calls of one function, and return an iterator of the results."""
        if name in self._pools:
            return self._pools[name].call_all(calls, self._limit_s)
        return iter([list(VERIFIERS[name](**arguments)) for arguments in calls])

    def _checked(self, prompt: Prompt, results: Sequence[Sequence[Any] | RewardError], count: int) -> Scores:
        """Return the scores of one prompt, all NaN if a function failed and failures are dropped."""
        scores: list[NDArray[np.float64]] = []
        for name, result in zip(self._names, results, strict=True):
            reason = str(result) if isinstance(result, RewardError) else _problem(result, count)
            if not reason:
                assert not isinstance(result, RewardError)
                scores.append(np.array([math.nan if score is None else float(score) for score in result]))
                continue
            details = result.details if isinstance(result, RewardError) else ""
            failed = FailedReward(prompt, name, reason, details)
            if self._on_error == "stop":
                trace = f"\n{details.rstrip()}" if details else ""
                drop = str(Setting("reward.on_error", "drop"))
                raise RunError(f"{failed.describe()}; fix it{drop and f', or set {drop}'}{trace}")
            self._failures.append(failed)
            scores = [np.full(count, math.nan)] * len(self._names)
            break
        by_name = dict(zip(short_names(self._names), scores, strict=True)) if len(scores) > 1 else {}
        return Scores(weighted_sum(scores, self._weights), by_name)


def reward_arguments(prompt: Prompt, texts: Sequence[str], ids: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the keyword arguments of a reward function for the completions of one prompt, like TRL.

    Columns are repeated for each completion. Completions of a conversation are messages of the assistant.
    """
    is_chat = not isinstance(prompt.source, str)
    completions = [[{"role": "assistant", "content": text}] if is_chat else text for text in texts]
    columns: Mapping[str, Any] = {name: [value] * len(texts) for name, value in prompt.columns.items()}
    return {
        "prompts": [prompt.source] * len(texts),
        "completions": completions,
        "completion_ids": [list(tokens) for tokens in ids],
        **columns,
    }


def _problem(scores: Sequence[Any], count: int) -> str:
    """Return the fault of the returned scores, or empty if they are valid."""
    if len(scores) != count:
        return f"returned {len(scores)} rewards for {count} completions"
    for score in scores:
        if score is not None and not _is_finite(score):
            return f"returned {reprlib.repr(score)}, which is not a finite number"
        if score is not None and abs(score) > MAX_NUMBER:
            return f"returned {score:g}, and rewards are at most {MAX_NUMBER:.0e}"
    return ""


def _is_finite(score: Any) -> bool:
    try:
        return isinstance(score, int | float) and math.isfinite(score)
    except OverflowError:  # an integer beyond the largest float
        return False


def check_reward(data: DataConfig, reward: RewardConfig, prompts: Sequence[Prompt]) -> None:
    """Check the reward functions of a recipe. A Python function is called once with two completions.

    A verifier needs its columns in each of the prompts, at least one.

    Raises:
        ConfigError: the function does not exist, a column that it reads is missing or useless, or the call fails.
    """
    names = reward_names(data, reward)
    if not names:
        rule = f"must name the reward of data.kind={data.kind!r}: one of {', '.join(VERIFIERS)}, or FILE.py:FUNCTION"
        raise ConfigError(Problem("reward.use", "", rule))
    for name in names:
        _check_function(name, prompts, reward.timeout_s)


def check_columns(data: DataConfig, reward: RewardConfig) -> Callable[[Prompt], None]:
    """Return a function that raises ConfigError for a prompt without the columns that verifiers read."""
    verifiers = [name for name in reward_names(data, reward) if name in VERIFIERS]

    def check(prompt: Prompt) -> None:
        for name in verifiers:
            _check_columns(name, prompt)

    return check


def _check_function(name: str, prompts: Sequence[Prompt], timeout_s: float) -> None:
    if name in VERIFIERS:
        for prompt in prompts:
            _check_columns(name, prompt)
        return
    reference = split_reference(name)
    if reference is None:
        rule = f"must be one of {', '.join(VERIFIERS)}, or FILE.py:FUNCTION, such as reward.py:reward"
        raise ConfigError(Problem("reward.use", name, rule))
    if not reference[0].is_file():
        raise ConfigError(Problem("reward.use", name, f": {str(reference[0])!r} does not exist", "name a Python file"))
    with RewardPool(*reference, workers=1, timeout_s=timeout_s) as pool:
        (result,) = pool.call_all([reward_arguments(prompts[0], ["", ""], [[], []])])
    reason = str(result) if isinstance(result, RewardError) else _problem(result, 2)
    if reason:
        raise ConfigError(
            f"{Setting('reward.use', name)} was tried with two empty completions, and {reason}; the signature is "
            "f(prompts, completions, **columns) -> list of one number or None for each completion"
        )


def _check_columns(name: str, prompt: Prompt) -> None:
    for column in REQUIRED_COLUMNS[name]:
        if column not in prompt.columns:
            raise ConfigError(
                f"{Setting('reward.use', name)} reads the column {column!r}, and {prompt.location} has the columns "
                f"{sorted(prompt.columns)}; add it, or choose another reward"
            )
        value = prompt.columns[column]
        if rule := column_problem(name, column, value):
            raise ConfigError(
                f"{prompt.location}: the column {column!r} {rule} for {Setting('reward.use', name)}, and is "
                f"{reprlib.repr(value)}; fix it, or choose another reward"
            )
