"""Table of the rollouts that wait for training, with its form in a checkpoint.

A row is one rollout, with the key (round, prompt, sample). Its columns are tokens, log-probabilities, score and reward.
A round has the rollouts of `rl.updates` optimizer steps. Rounds are trained on in the order of their addition. The
table follows the table of AsyncFlow (arXiv:2507.01663).
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moefold.config.sections.rl import RLConfig
from moefold.config.sections.train import TrainConfig
from moefold.data.prompts import Prompt
from moefold.errors import ConfigError
from moefold.rl.reward import FailedReward
from moefold.rl.rollout import Rollout, RolloutGroup, SampledRouting, StepRows
from moefold.rl.round_statistics import RoundStatistics

Arrays = dict[str, NDArray[Any]]
FINISH_REASONS = ("eos", "length", "stop")
"""Codes of the column of finish reasons."""
ROW_COLUMNS = ("round", "prompt_number", "sample_number", "tokens", "finish_reason")
"""Columns of the array "rows". The arrays "tokens" and "log_probs" have the tokens of all rows, concatenated."""
FUNCTIONS = "reward_functions"
"""Key of a header: names of the reward functions, if there are several."""
PARTS = "parts."
"""Prefix of the array of results of several reward functions, [rollouts, functions], by the number of the round."""
TABLE_KEY = "rollouts"
"""Key of the headers in the state of reinforcement learning of a checkpoint."""
TABLE_PREFIX = "rollouts."
"""Prefix of the columns in a checkpoint."""
COUNTS = ("num_groups", "num_mixed", "num_tokens", "num_dropped")
"""Fields of `RoundStatistics` that do not depend on the mapping, unlike seconds."""


@dataclass(frozen=True, slots=True)
class Round:
    """The rollouts of a round, all sampled by one version of the weights."""

    version: int
    """Optimizer steps of the run up to the weights that sampled."""
    prompts: tuple[int, ...]
    """Numbers of the sampled prompts, including replaced groups, ascending."""
    num_groups: int
    num_rollouts: int
    num_tokens: int
    """Sampled tokens of the rollouts that are trained on."""
    statistics: RoundStatistics
    failures: tuple[FailedReward, ...] = ()
    groups: tuple[RolloutGroup, ...] | None = None
    """Groups of the round, or None on a rank that only received its rows from the ranks that sample."""
    steps: tuple[StepRows, ...] | None = None
    """Rows of this rank, by step, or None if they are made from the groups."""
    metrics: tuple[dict[str, Any], ...] = ()
    """Metrics of the rollouts of each step, if there are `steps`."""
    routing: SampledRouting | None = None
    """Choices for routing replay. Not in checkpoints, because rounds with it are trained on immediately."""
    functions: tuple[str, ...] = ()
    """Names of the reward functions, if there are several."""

    def header(self) -> dict[str, Any]:
        """Return the JSON values of a checkpoint, equal on every rank."""
        counts = {f"sampled_{name}": getattr(self.statistics, name) for name in COUNTS}
        functions = {FUNCTIONS: list(self.functions)} if self.functions else {}
        return {
            "version": self.version,
            "prompts": list(self.prompts),
            "rollouts": self.num_rollouts,
            "groups": self.num_groups,
            "tokens": self.num_tokens,
            **functions,
            **counts,
        }


def make_round(
    groups: Sequence[RolloutGroup],
    *,
    version: int,
    prompts: Sequence[int],
    statistics: RoundStatistics,
    failures: Sequence[FailedReward] = (),
    routing: SampledRouting | None = None,
) -> Round:
    """Make a round of the groups of all its steps."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return Round(
        version=version,
        prompts=tuple(prompts),
        num_groups=len(groups),
        num_rollouts=len(rollouts),
        num_tokens=sum(len(rollout.tokens) for rollout in rollouts),
        statistics=statistics,
        failures=tuple(failures),
        groups=tuple(groups),
        routing=routing,
        functions=tuple(groups[0].by_function),
    )


class RolloutTable:
    """Rounds of rollouts that wait for training, oldest first, at most `rl.staleness / rl.updates` + 1 rounds."""

    def __init__(self, rounds: Iterable[Round] = ()) -> None:
        self._rounds = deque(rounds)

    def __len__(self) -> int:
        return len(self._rounds)

    @property
    def next_prompt(self) -> int | None:
        """Number of the prompt after the prompts of the last round, or None without a round."""
        return self._rounds[-1].prompts[-1] + 1 if self._rounds else None

    def add(self, round_: Round) -> None:
        """Add the next round."""
        self._rounds.append(round_)

    def pop(self) -> Round:
        """Remove the oldest round and return it, for training."""
        return self._rounds.popleft()

    def drop(self, skipped: Sequence[range]) -> int:
        """Remove the rounds that have prompts to skip, and return their number."""
        kept_rounds = [r for r in self._rounds if not any(prompt in span for span in skipped for prompt in r.prompts)]
        num_dropped = len(self._rounds) - len(kept_rounds)
        self._rounds = deque(kept_rounds)
        return num_dropped

    def drop_older(self, step: int, staleness: int, updates: int) -> int:
        """Remove the first round that exceeds a staleness, and all later rounds. Return their number.

        `step` counts the optimizer steps of the run before training on the oldest round.
        """
        num_kept = 0
        for round_ in self._rounds:
            if round_.version < max(0, step + num_kept * updates - staleness):
                break
            num_kept += 1
        num_dropped = len(self._rounds) - num_kept
        self._rounds = deque(list(self._rounds)[:num_kept])
        return num_dropped

    def headers(self) -> list[dict[str, Any]]:
        """Return the JSON values of all rounds, for a checkpoint."""
        return [round_.header() for round_ in self._rounds]

    def arrays(self) -> Arrays:
        """Return the columns of all rows, for a checkpoint, or empty without a row.

        All rounds must have their groups.
        """
        rows = []
        scores: list[NDArray[np.float64]] = []
        rewards: list[NDArray[np.float64]] = []
        rollouts: list[Rollout] = []
        arrays: Arrays = {}
        for number, round_ in enumerate(self._rounds):
            assert round_.groups is not None
            if round_.functions:
                group_parts = [np.stack(list(group.by_function.values()), axis=1) for group in round_.groups]
                arrays[f"{PARTS}{number}"] = np.concatenate(group_parts)
            for group in round_.groups:
                scores.append(group.scores)
                rewards.append(group.rewards)
                for rollout in group.rollouts:
                    rollouts.append(rollout)
                    reason = FINISH_REASONS.index(rollout.finish_reason)
                    key = (number, rollout.prompt_number, rollout.sample_number)
                    rows.append((*key, len(rollout.tokens), reason))
        if not rows:
            return {}
        return {
            "rows": np.array(rows, dtype=np.int64),
            "tokens": np.concatenate([rollout.tokens for rollout in rollouts]),
            "log_probs": np.concatenate([rollout.log_probs for rollout in rollouts]),
            "scores": np.concatenate(scores),
            "rewards": np.concatenate(rewards),
            **arrays,
        }


def empty_arrays(headers: Sequence[Mapping[str, Any]]) -> Arrays:
    """Return empty arrays with the sizes of `RolloutTable.arrays` for these headers, for reading."""
    num_rows = sum(header["rollouts"] for header in headers)
    num_tokens = sum(header["tokens"] for header in headers)
    if not num_rows:
        return {}
    return {
        "rows": np.zeros((num_rows, len(ROW_COLUMNS)), dtype=np.int64),
        "tokens": np.zeros(num_tokens, dtype=np.int64),
        "log_probs": np.zeros(num_tokens),
        "scores": np.zeros(num_rows),
        "rewards": np.zeros(num_rows),
        **{
            f"{PARTS}{number}": np.zeros((header["rollouts"], len(header[FUNCTIONS])))
            for number, header in enumerate(headers)
            if FUNCTIONS in header
        },
    }


def restore_table(
    headers: Sequence[Mapping[str, Any]], arrays: Arrays, open_prompt: Callable[[int], Prompt], group_size: int
) -> RolloutTable:
    """Return the table of a checkpoint, from the headers of the rounds and the arrays of the rows."""
    table = RolloutTable()
    row = token = 0
    for number, header in enumerate(headers):
        groups = []
        first = row
        last = row + header["rollouts"]
        functions = header.get(FUNCTIONS, ())
        while row < last:
            rollouts = []
            for i in range(row, row + group_size):
                _, prompt_number, sample_number, num_tokens, reason = arrays["rows"][i].tolist()
                prompt = open_prompt(prompt_number)
                tokens = slice(token, token + num_tokens)
                token = tokens.stop
                rollouts.append(
                    Rollout(
                        prompt_number=prompt_number,
                        sample_number=sample_number,
                        prompt_ids=np.array(prompt.ids, dtype=np.int64),
                        tokens=arrays["tokens"][tokens],
                        log_probs=arrays["log_probs"][tokens],
                        finish_reason=FINISH_REASONS[reason],
                    )
                )
            rows_of_table = slice(row, row + group_size)
            rows_of_round = slice(row - first, rows_of_table.stop - first)
            parts = {name: arrays[f"{PARTS}{number}"][rows_of_round, k] for k, name in enumerate(functions)}
            scores = arrays["scores"][rows_of_table]
            groups.append(RolloutGroup(prompt, tuple(rollouts), scores, arrays["rewards"][rows_of_table], parts))
            row = rows_of_table.stop
        statistics = RoundStatistics(**{name: header[f"sampled_{name}"] for name in COUNTS})
        table.add(make_round(groups, version=header["version"], prompts=header["prompts"], statistics=statistics))
    return table


def table_headers(state: object) -> list[dict[str, Any]]:
    """Return the headers in the state of reinforcement learning of a checkpoint, or empty for None."""
    headers = state.get(TABLE_KEY, []) if isinstance(state, dict) else []
    names = {"version", "prompts", "rollouts", "groups", "tokens", *(f"sampled_{name}" for name in COUNTS)}
    for header in headers if isinstance(headers, list) else [headers]:
        if not isinstance(header, dict) or header.keys() - {FUNCTIONS} != names:
            raise TypeError(f"{TABLE_KEY} is {header!r}")
        numbers = [value for name, value in header.items() if name not in ("prompts", FUNCTIONS)]
        prompts = header["prompts"]
        functions = header.get(FUNCTIONS, [""])
        if not isinstance(functions, list) or not functions or not all(isinstance(name, str) for name in functions):
            raise TypeError(f"{TABLE_KEY} is {header!r}")
        if not isinstance(prompts, list) or not prompts or header["groups"] == 0:
            raise TypeError(f"{TABLE_KEY} is {header!r}")
        if any(type(number) is not int or number < 0 for number in (*numbers, *prompts)):
            raise TypeError(f"{TABLE_KEY} is {header!r}")
    return list(headers)


def check_headers(headers: Sequence[Mapping[str, Any]], train: TrainConfig, rl: RLConfig) -> None:
    """Raise ConfigError if the rounds of a checkpoint have another number of rollouts or of groups than a recipe."""
    needed = rl.updates * train.global_batch_size
    for header in headers:
        size = header["rollouts"] // header["groups"]
        if header["rollouts"] != needed or size != rl.group_size:
            raise ConfigError(
                f"the checkpoint has rollouts that are not trained on yet (rl.staleness), {header['rollouts']} a round "
                f"in groups of {size}, and the recipe needs {needed} in groups of {rl.group_size}: set "
                "train.global_batch_size, rl.group_size and rl.updates as they were, or start a new run with its "
                "weights by checkpoint.init_from"
            )
