"""Rounds of rollouts on their way from a source to training: those that are ordered, and those that wait."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moefold.checkpoint.load import load_entries
from moefold.config.sections.rl import RLConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.data.prompts import Prompt
from moefold.rl.rollout_table import (
    TABLE_PREFIX,
    RolloutTable,
    Round,
    check_headers,
    empty_arrays,
    restore_table,
    table_headers,
)
from moefold.train.rl.rollout_sampler import PromptPosition
from moefold.train.rl.rollout_source import RolloutSource


class RoundQueue:
    """Orders rounds of a source as far ahead as `rl.staleness` allows, and keeps those that wait in a `RolloutTable`.

    All ranks call its methods at the same steps. Those that receive rounds are collective.
    """

    def __init__(self, run: RunConfig, train: TrainConfig, rl: RLConfig, source: RolloutSource) -> None:
        self._num_steps = run.steps
        self._train = train
        self._rl = rl
        self._source = source
        self._table = RolloutTable()
        self._restarts = True

    def next_round(self, step: int, first: int, skipped_ranges: Sequence[range]) -> tuple[Round, float]:
        """Order the rounds that the current weights sample, and return the oldest round, and the seconds of the wait.

        Args:
            skipped_ranges: prompts to skip.

        Raises:
            RunError: a reward function failed.
        """
        self._table.drop(skipped_ranges)
        missing = 1 + self._num_ahead(step + self._rl.updates) - len(self._table) - self._source.num_ordered
        if missing > 0:
            next_prompt = self._table.next_prompt
            position = PromptPosition(first if next_prompt is None else next_prompt, tuple(skipped_ranges))
            self._source.order(missing, step, position if self._restarts else None)
            self._restarts = False
        started_s = time.perf_counter()
        one = self._table.pop() if len(self._table) else self._source.receive()
        return one, time.perf_counter() - started_s

    def _num_ahead(self, step: int) -> int:
        """Return how many rounds are sampled ahead when a run has trained on all rounds before `step`.

        A run samples no rounds beyond its last step.
        """
        return min(self._rl.staleness, self._num_steps - step) // self._rl.updates

    def receive_ordered(self) -> None:
        """Wait for the ordered rounds, which a checkpoint must have."""
        while self._source.num_ordered:
            self._table.add(self._source.receive())

    def finish(self) -> None:
        """End the ranks that only sample, after the last step."""
        self._source.finish()

    def headers(self) -> list[dict[str, Any]]:
        """Return the headers of the rounds that wait, for a checkpoint."""
        return self._table.headers()

    def tensors(self) -> dict[str, Tensor]:
        """Return the rows of the rounds that wait, for a checkpoint."""
        return _entries(self._table.arrays())

    def restore(self, path: Path, state: dict[str, Any] | None, step: int, open_prompt: Callable[[int], Prompt]) -> str:
        """Take the rounds of a checkpoint in place of all others, and return a message about old or missing rounds.

        Args:
            state: its state of reinforcement learning, or None if it has no rounds for this run.

        Raises:
            ConfigError: the rounds are of other batches.
        """
        rl = self._rl
        while self._source.num_ordered:
            # After a rollback: they were sampled with weights that are gone.
            self._source.receive()
        self._restarts = True
        self._table = RolloutTable()
        num_dropped = 0
        if headers := table_headers(state):
            check_headers(headers, self._train, rl)
            arrays = empty_arrays(headers)
            load_entries(path, _entries(arrays))
            self._table = restore_table(headers, arrays, open_prompt, rl.group_size)
            num_dropped = self._table.drop_older(step, rl.staleness, rl.updates)
        if num_dropped:
            return (
                f"{num_dropped} round{'s' * (num_dropped > 1)} of rollouts in the checkpoint, of older weights than "
                f"rl.staleness={rl.staleness} allows, are sampled again"
            )
        wanted = self._num_ahead(step)
        if state is None or not step or len(self._table) >= wanted:
            return ""
        return (
            f"the checkpoint has {len(self._table)} of the {wanted} rounds of rollouts that a run of "
            f"{self._num_steps} steps with rl.staleness={rl.staleness} has sampled by step {step}: its weights sample "
            "the others, so this run differs from an uninterrupted one"
        )


def _entries(arrays: dict[str, Any]) -> dict[str, Tensor]:
    """Return the columns of a table by their names in a checkpoint, as views."""
    return {f"{TABLE_PREFIX}{name}": torch.from_numpy(values) for name, values in arrays.items()}
