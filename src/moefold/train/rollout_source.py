"""Sources of the rounds of rollouts of a run: the ranks that train, in turn with training."""

from collections import deque
from dataclasses import replace
from typing import Protocol

from moefold.rl.statistics import RoundStatistics
from moefold.rl.table import Round
from moefold.train.rollout_model import RolloutModel
from moefold.train.round_sampler import PromptPosition, PromptSampler, RoundSampler


class RolloutSource(Protocol):
    """Rounds of rollouts, which arrive in the order in which they are ordered; collective over the training ranks."""

    @property
    def num_ordered(self) -> int:
        """Rounds that are ordered and not received."""
        ...

    def order(self, count: int, version: int, restart: PromptPosition | None) -> None:
        """Order rounds that the current weights sample.

        Args:
            count: number of rounds.
            version: optimizer steps of the run that have made the weights.
            restart: the prompts to begin with; None: those after the last ordered round.
        """
        ...

    def receive(self) -> Round:
        """Return the next ordered round.

        Raises:
            RunError: a reward function failed.
        """
        ...

    def finish(self) -> None:
        """End the ranks that only sample, after the training loop."""
        ...


class LocalRollouts:
    """Samples on the ranks that train, at once.

    Args:
        sampler: samples rounds by the model of `model`.
        model: gets the current weights.
        prompts: the prompts of the run.
    """

    def __init__(self, sampler: RoundSampler, model: RolloutModel, prompts: PromptSampler) -> None:
        self._sampler = sampler
        self._model = model
        self._prompts = prompts
        self._rounds: deque[Round] = deque()
        self._position = PromptPosition(0)

    @property
    def num_ordered(self) -> int:
        """Rounds that are sampled and not received."""
        return len(self._rounds)

    def order(self, count: int, version: int, restart: PromptPosition | None) -> None:
        """Sample rounds by the current weights, see `RolloutSource.order`; collective.

        Raises:
            RunError: a reward function failed.
        """
        self._position = restart or self._position
        statistics = RoundStatistics(reshard_s=self._model.update())
        for _ in range(count):
            one = self._sampler.sample(self._prompts, self._position, version, statistics)
            self._position = replace(self._position, first=one.prompts[-1] + 1)
            self._rounds.append(one)
            statistics = RoundStatistics()

    def receive(self) -> Round:
        """Return the next round."""
        return self._rounds.popleft()

    def finish(self) -> None:
        """Do nothing: there are no other ranks."""
