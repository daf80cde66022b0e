"""Sampling of rounds of rollouts, by the ranks that train or by ranks that only sample."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moefold.config.schema import Config
from moefold.data.prompts import PromptSource
from moefold.data.sampler import next_indices
from moefold.data.tokenizer import Tokenizer
from moefold.inference.engine.engine import GenerationEngine
from moefold.inference.engine.requests import EngineSettings
from moefold.inference.rollouts import CollectedRollouts, CompletionEngine, RolloutCollector, RolloutKey, stop_rule
from moefold.inference.sampling import SamplingParams
from moefold.parallel.inference_model import InferenceModel
from moefold.parallel.parallel_model import ParallelModel
from moefold.rl.reward import FailedReward, Reward
from moefold.rl.rollout import Rollout, RolloutGroup, SampledRouting, adjust_rewards
from moefold.rl.rollout_table import Round, make_round
from moefold.rl.round_statistics import RoundStatistics

GREEDY = SamplingParams(temperature=0.0)
"""Sampling parameters for held-out prompts."""


@dataclass(frozen=True)
class PromptPosition:
    """The next prompt of a run, and the prompts to skip."""

    first: int
    skipped_ranges: tuple[range, ...] = ()


class RoundSampler:
    """Samples and scores rounds of rollouts by a model. It is collective over the ranks of its mapping.

    Args:
        records_routing: whether rounds contain the chosen experts, for routing replay.
        engine: samples in place of the model. None means our own engine samples with the model.
    """

    def __init__(
        self,
        cfg: Config,
        model: InferenceModel | ParallelModel,
        reward: Reward,
        tokenizer: Tokenizer,
        *,
        records_routing: bool = False,
        engine: CompletionEngine | None = None,
    ) -> None:
        self._cfg = cfg
        self._records_routing = records_routing
        self._sampling = SamplingParams(temperature=cfg.rollout.temperature, seed=cfg.run.seed)
        self._collector = RolloutCollector(
            engine
            or GenerationEngine(
                model, EngineSettings.of_recipe(cfg.rollout), self._sampling, records_routing=records_routing
            ),
            reward,
            tokenizer,
            model.groups,
            stop=stop_rule(cfg.data, cfg.reward, tokenizer),
            max_tokens=cfg.rollout.max_tokens,
        )

    def sample(
        self, prompts: PromptSource, position: PromptPosition, version: int, statistics: RoundStatistics
    ) -> Round:
        """Sample the groups of the next `rl.updates` steps. With rl.mixed_only, replace groups of equal rewards.

        Raises:
            RunError: a reward function failed.
        """
        rl = self._cfg.rl
        count = rl.updates * self._cfg.train.global_batch_size // rl.group_size
        kept: list[RolloutGroup] = []
        equal: list[RolloutGroup] = []
        numbers: list[int] = []
        failures: list[FailedReward] = []
        shard_of_prompt: dict[int, int] = {}
        expert_ids: dict[RolloutKey, NDArray[np.integer]] = {}
        for _ in range(rl.most_rounds if rl.mixed_only else 1):
            indices = next_indices(position.first, count - len(kept), position.skipped_ranges)
            position = replace(position, first=indices[-1] + 1)
            numbers += indices
            collected = self._collect(prompts, indices, rl.group_size, self._sampling)
            failures += collected.failures
            shard_of_prompt |= dict(zip(indices, collected.shards, strict=True))
            expert_ids |= collected.expert_ids
            statistics = statistics.add(collected.groups, collected.rollout_s, collected.reward_s)
            for group in collected.groups:
                (kept if group.is_mixed or not rl.mixed_only else equal).append(group)
            if len(kept) == count:
                break
        groups = kept + equal[: count - len(kept)]
        routing = SampledRouting(shard_of_prompt, expert_ids) if self._records_routing else None
        return make_round(
            groups, version=version, prompts=numbers, statistics=statistics, failures=failures, routing=routing
        )

    def evaluate(self, prompts: PromptSource) -> tuple[float | None, list[FailedReward]]:
        """Return the mean reward of greedy completions of held-out prompts (None without rewards), and the failures.

        Raises:
            RunError: a reward function failed.
        """
        indices = range(min(self._cfg.train.eval_samples, len(prompts)))
        collected = self._collect(prompts, indices, 1, GREEDY)
        scores = np.concatenate([group.scores for group in collected.groups])
        return (float(np.nanmean(scores)) if not np.isnan(scores).all() else None), collected.failures

    def completion_text(self, rollout: Rollout) -> str:
        """Return the text of a rollout, without the final stop token or stop text."""
        return self._collector.completion_text(rollout)

    def _collect(
        self, prompts: PromptSource, indices: Sequence[int], group_size: int, sampling: SamplingParams
    ) -> CollectedRollouts:
        """Sample and score completions of some prompts. It is collective."""
        rl = self._cfg.rl
        max_tokens = self._cfg.rollout.max_tokens
        return self._collector.collect(
            indices,
            prompts.prompt,
            group_size,
            sampling,
            lambda scores, rollouts: adjust_rewards(scores, rollouts, rl, max_tokens),
        )
