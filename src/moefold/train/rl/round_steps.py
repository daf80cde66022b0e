"""Optimizer steps of a round of rollouts: the batches of this rank, and the model's settings for each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moefold.config.sections.rl import RLConfig
from moefold.config.sections.train import TrainConfig
from moefold.parallel.batch import Batch
from moefold.parallel.parallel_model import ParallelModel
from moefold.parallel.rollout_router_replay import BatchRouting, PackedTokens, RolloutReplay
from moefold.rl.rollout import RolloutGroup, SampledRouting, StepRows, rollout_positions, split_steps
from moefold.rl.rollout_table import Round
from moefold.train.batch_sharding import BatchBuilder
from moefold.train.rl.log_probs import LogProbCapture, label_log_probs


@dataclass(frozen=True)
class RoundStep:
    """One optimizer step of a round of rollouts."""

    groups: Sequence[RolloutGroup]
    """Groups of the step, or empty on a rank that received only its rows from the ranks that sample."""
    batch: Batch
    """This rank's shard of its rollouts."""
    metrics: dict[str, Any]
    routing: BatchRouting | None = None
    """Choices of experts to replay, or None if the routers choose."""


class RoundSteps:
    """Builds the steps of rounds, and prepares the model for each. It is collective.

    Args:
        pack: packs the rollouts of one step, and returns the rows of this rank.
        replay: replays the choices of experts, or None if the routers choose.
        capture: stores log-probabilities of the weights that sampled, or None if the loss reads none.
    """

    def __init__(
        self,
        train: TrainConfig,
        rl: RLConfig,
        model: ParallelModel,
        sharder: BatchBuilder,
        pack: Callable[[Sequence[RolloutGroup]], StepRows],
        replay: RolloutReplay | None,
        capture: LogProbCapture | None,
    ) -> None:
        self._seq_len = train.seq_len
        self._updates = rl.updates
        self._model = model
        self._sharder = sharder
        self._pack = pack
        self._replay = replay
        self._capture = capture
        self._dp = model.groups.attn.dp

    def build(self, one: Round, step: int, waited_s: float) -> list[RoundStep]:
        """Build the batches of a round.

        All batches are built now: later steps may need log-probabilities of the weights that sampled.
        """
        updates = self._updates
        groups = split_steps(one.groups, updates) if one.groups is not None else [()] * updates
        rows = one.steps
        metrics = one.metrics
        if rows is None:
            rows = tuple(self._pack(of_step) for of_step in groups)
            metrics = tuple(one.statistics.metrics(of_step) for of_step in groups)
        return [
            self._build_step(
                groups[number],
                rows[number],
                metrics[number] | {"staleness": step + number - one.version, "rollout_wait_s": waited_s},
                self._fetch_routing(one.routing, groups[number], rows[number]),
            )
            for number in range(updates)
        ]

    def begin(self, step: RoundStep) -> None:
        """Prepare the model for training on a step."""
        if self._replay is not None:
            assert step.routing is not None
            self._replay.use(step.routing)
        count = step.batch.num_micro_batches
        assert count is not None
        for layer in self._model.moe_layers().values():
            layer.losses.set_micro_batches(count * self._dp.size, count)
        for stage in self._model.stages:
            for indexer in stage.indexers().values():
                indexer.set_micro_batches(count * self._dp.size)

    def _build_step(
        self, groups: Sequence[RolloutGroup], rows: StepRows, metrics: dict[str, Any], routing: BatchRouting | None
    ) -> RoundStep:
        """Build the batch of one step of a round, before the first step is trained."""
        weights = rows.samples.weights
        assert weights is not None
        count = self._sharder.count_inputs(rows.samples)
        batch = self._sharder.build_batch(rows.samples, weights[:, None], rows.first, count)
        batch = replace(batch, num_micro_batches=rows.num_micro_batches)
        if self._capture is not None:
            if self._replay is not None and routing is not None:
                self._replay.use(routing, in_evaluation=True)
            trained = label_log_probs(self._model, self._capture, batch, "the weights that sampled")
            batch = replace(batch, columns=batch.columns | {"trainer_log_probs": trained})
        return RoundStep(groups, batch, metrics, routing)

    def _fetch_routing(
        self, sampled: SampledRouting | None, groups: Sequence[RolloutGroup], rows: StepRows
    ) -> BatchRouting | None:
        """Get the experts that were chosen for the rows of one step, or None without replay."""
        if self._replay is None:
            return None
        assert sampled is not None
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        num_samples = len(rows.samples.tokens) * self._dp.size
        rollout_NS, offset_NS = rollout_positions(rollouts, seq_len=self._seq_len, num_samples=num_samples)
        tokens = PackedTokens(
            rollout_NS=rollout_NS,
            offset_NS=offset_NS,
            last_R=np.array([rollout.num_tokens - 1 for rollout in rollouts]),
            shard_R=np.array([sampled.shard_of_prompt[rollout.prompt_number] for rollout in rollouts]),
        )
        keys = [(rollout.prompt_number, rollout.sample_number) for rollout in rollouts]
        own = {i: sampled.expert_ids[key] for i, key in enumerate(keys) if key in sampled.expert_ids}
        return self._replay.fetch(tokens, own)
