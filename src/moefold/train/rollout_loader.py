"""Batches of reinforcement learning: sample rollouts of prompts, score them, and pack them into training samples.

`RolloutLoader` takes the place of the data loader. All ranks sample their share of the groups; then every rank has all
rollouts, and computes the same advantages and the same packing, so the global batch does not depend on the mapping.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moefold.checkpoint.checkpoint_dir import CheckpointMeta, data_order_change
from moefold.checkpoint.save_load import load_entries
from moefold.comm.groups import ParallelGroups, current_world
from moefold.config.schema import Config
from moefold.data.prompts import PromptSource, open_prompts
from moefold.data.sample import Sample, stack_samples
from moefold.data.sampler import Sampler
from moefold.data.tokenizer import load_tokenizer
from moefold.errors import ConfigError
from moefold.inference.engine.engine import RolloutEngine
from moefold.inference.engine.requests import EngineSettings
from moefold.inference.rollouts import CollectedRollouts, RolloutCollector, RolloutKey, stop_rule
from moefold.inference.sampling import SamplingParams
from moefold.objectives.policy import PolicyGradientLoss
from moefold.parallel.batch import Batch
from moefold.parallel.parallel_model import ParallelModel
from moefold.parallel.rollout_replay import BatchRouting, PackedTokens, RolloutReplay
from moefold.parallel.select_ops import select_kernels, uses_c_kernels
from moefold.rl.plateau import Plateau
from moefold.rl.reward import FailedReward, Reward
from moefold.rl.rollout import (
    Group,
    Rollout,
    TrainingRollout,
    adjust_rewards,
    empty_sample,
    pack_rollouts,
    rollout_positions,
    weigh_rollouts,
)
from moefold.rl.statistics import RoundStatistics
from moefold.train.batch import BatchSharder
from moefold.train.data_loader import DataLoader
from moefold.train.log_probs import TrainerLogProbs
from moefold.train.reference import ReferenceModel
from moefold.train.rollout_model import RolloutModel
from moefold.validate.exactness import inexact_settings
from moefold.validate.replay import replays_routing

GREEDY = SamplingParams(temperature=0.0)
"""Sampling on held-out prompts."""


class PromptSampler(Sampler):
    """Numbers of the prompts of a run; the trainer counts prompts as samples."""

    has_annotations = True

    def __init__(self, prompts: PromptSource | None, seq_len: int) -> None:
        self.prompts = prompts
        self.seq_len = seq_len

    def __len__(self) -> int:
        """Return the number of different prompts."""
        return 0 if self.prompts is None else len(self.prompts)

    def annotated_sample(self, index: int) -> Sample:
        """Raise NotImplementedError: samples are packed rollouts, which a prompt alone does not determine."""
        raise NotImplementedError("prompts are no samples")

    def origin(self, index: int) -> str:
        """Return the location of a prompt."""
        return "" if self.prompts is None else self.prompts.prompt(index).location


@dataclass(frozen=True)
class FailedRewardEvent:
    """A group without rewards, as its reward function failed."""

    setting: ClassVar[str] = "reward.on_error"
    failed: FailedReward

    def describe(self) -> str:
        """Return a log message."""
        return f"{self.failed.describe()}; its group is left out"

    def to_record(self) -> dict[str, Any]:
        """Return the record for faults.jsonl."""
        return {
            "kind": "reward",
            "action": "drop",
            "what": self.failed.reason,
            "prompt": self.failed.prompt.text,
            "origin": self.failed.prompt.location,
        }


@dataclass(frozen=True)
class RoundStep:
    """One optimizer step of a round of rollouts."""

    groups: Sequence[Group]
    batch: Batch
    """This rank's shard of its rollouts."""
    routing: BatchRouting | None
    """Choices of experts to replay; None: the routers choose."""


class RolloutLoader(DataLoader):
    """Samples, scores and packs the rollouts of each step; the data loader of reinforcement learning."""

    def __init__(self, cfg: Config, groups: ParallelGroups, model: ParallelModel) -> None:
        """Fingerprint the prompt files; collective."""
        super().__init__(cfg, groups, model.positions)
        self._model = model
        self._tokenizer = load_tokenizer(cfg.data, vocab_size=cfg.model.vocab_size)
        end_id = self._tokenizer.separator_id
        assert end_id is not None, "checked before the run"
        self._end_id = end_id
        self._sampling = SamplingParams(temperature=cfg.rollout.temperature, seed=cfg.run.seed)
        self._reward = Reward(cfg)
        self._sampler = RolloutModel(cfg, groups, model)
        inexact = _inexact_settings(cfg, groups.device)
        # Ranks on other machines may have other kernels.
        is_exact = not any(current_world().all_gather_object(bool(inexact)))
        self._replays, replay_message = replays_routing(cfg, is_exact=is_exact)
        self._startup_message = "; ".join(filter(None, (exactness_message(inexact), replay_message)))
        self._collector = RolloutCollector(
            RolloutEngine(self._sampler.model, engine_settings(cfg), self._sampling, records_routing=self._replays),
            self._reward,
            self._tokenizer,
            self._sampler.groups,
            stop=stop_rule(cfg.data, self._tokenizer),
            max_tokens=cfg.rollout.max_tokens,
        )
        self._reference = ReferenceModel(cfg, groups) if cfg.rl.kl else None
        self._replay: RolloutReplay | None = None
        if self._replays:
            sampler = self._sampler.model
            stages = sampler.stages if isinstance(sampler, ParallelModel) else [sampler.stage]
            layers = [number for stage in stages for number in stage.moe_layers()]
            self._replay = RolloutReplay(model, self._sampler.groups, layers, cfg)
        self._expert_ids: dict[RolloutKey, NDArray[np.integer]] = {}
        self._shard_of_prompt: dict[int, int] = {}
        self._trainer: TrainerLogProbs | None = None
        if "trainer_log_probs" in policy_loss(cfg).columns:
            self._trainer = TrainerLogProbs(model, cfg.rollout.temperature)
        self._plateau = Plateau()
        self._pending: list[RoundStep] = []
        self._samples: Sequence[int] = ()
        self.round: Sequence[Group] = ()
        """Groups of the last step's batch."""
        self._statistics: RoundStatistics | None = None

    def open(self, meta: CheckpointMeta | None) -> None:
        """Open the prompts of a run, continuing those of a checkpoint if its prompts are the same.

        Raises:
            ConfigError: as `open_prompts`.
        """
        cfg = self._cfg
        self.message = self._startup_message
        if meta is not None and (change := data_order_change(meta, cfg, self.fingerprints)):
            self.message += f"; the prompts restart at the first: {change}"
        elif meta is not None:
            self._initial_fingerprints = meta.data_files
        self.reference = None
        prompts = open_prompts(cfg.data, self._tokenizer, seed=cfg.run.seed)
        self.train_sampler = PromptSampler(prompts.train, cfg.train.seq_len)
        self.validation_sampler = PromptSampler(prompts.validation, cfg.train.seq_len)
        self._prompts = prompts
        self.train_sharder = BatchSharder(self.train_sampler, cfg, self._groups, self._positions)

    def start(self) -> None:
        """Load the reference model of a new run; collective."""
        if self._reference is not None:
            self._load_reference()

    def restore(self, path: Path, meta: CheckpointMeta) -> None:
        """Forget rollouts that are not trained on yet, and load the reference model; collective.

        Raises:
            ConfigError: the weights of the reference model cannot be read.
        """
        self._pending = []
        self._plateau = Plateau.from_json(meta.rl)
        if self._reference is None:
            # Without a KL penalty the next checkpoint has no weights of a reset.
            self._plateau = replace(self._plateau, num_resets=0)
            return
        if self._plateau.num_resets:
            load_entries(path, self._reference.entries())
            self._reference.is_reset = True
            return
        if self._reference.is_reset:
            # A rollback to a checkpoint before the reset; random weights are drawn again.
            self._reference = ReferenceModel(self._cfg, self._groups)
        if meta.rl is None and self._cfg.rl.reference == "start":
            raise ConfigError(
                f"{path} is of a run without reinforcement learning, so rl.reference='start' is no longer at hand: "
                f"start a new run with checkpoint.init_from={str(path)!r}, or name the weights by rl.reference"
            )
        self._load_reference()

    def _load_reference(self) -> None:
        """Load the reference weights, of the checkpoint that this run started with; collective."""
        assert self._reference is not None
        source = self._reference.source
        folder = self._plateau.reference_folder if source == self._plateau.reference else ""
        if folder and not Path(folder).exists():
            raise ConfigError(
                f"{folder} is gone, which has the reference weights of this run; restore it, or name other weights by "
                "rl.reference"
            )
        self._plateau = replace(self._plateau, reference=source, reference_folder=self._reference.load(folder))

    def entries(self) -> dict[str, Tensor]:
        """Return the weights of the reference model after a reset; those before can be loaded again."""
        return self._reference.entries() if self._reference is not None and self._plateau.num_resets else {}

    def data_state(self) -> dict[str, Any]:
        """Return the fields of `TrainState` for a checkpoint."""
        return super().data_state() | {"rl": asdict(self._plateau)}

    def resets_reference(self, reward: float) -> bool:
        """Record a held-out reward; return whether to reset the reference model."""
        self._plateau = self._plateau.record(reward)
        patience = self._cfg.rl.reset_patience
        return patience > 0 and self._plateau.num_since_best >= patience

    def reset_reference(self) -> None:
        """Make the current policy the reference model; local, on every rank at the same step."""
        assert self._reference is not None, "checked before the run"
        self._reference.copy_from(self._model)
        self._plateau = replace(self._plateau, num_since_best=0, num_resets=self._plateau.num_resets + 1)

    @property
    def is_round_complete(self) -> bool:
        """Return whether all sampled rollouts were trained on; a run is saved and stopped only then."""
        return not self._pending

    def next_batch(self, first: int, skipped_ranges: Sequence[range]) -> tuple[Batch, Sequence[int]]:
        """Return this rank's shard of the next step's rollouts, and the numbers of the prompts; collective.

        Args:
            first: first prompt of the run that is not used yet.
            skipped_ranges: prompts to skip.

        Raises:
            RunError: a reward function failed.
        """
        if not self._pending:
            groups = self._next_round(first, skipped_ranges)
            per_step = len(groups) // self._cfg.rl.updates
            # All batches now: those of later steps may need log-probabilities of the weights that sampled.
            self._pending = [self._round_step(groups[i : i + per_step]) for i in range(0, len(groups), per_step)]
        step = self._pending.pop(0)
        self.round = step.groups
        return self._begin_step(step), self._samples

    def step_metrics(self) -> dict[str, Any] | None:
        """Return the metrics of the rollouts of the last batch."""
        assert self._statistics is not None
        return self._statistics.metrics(self.round)

    def evaluate_reward(self) -> float | None:
        """Return the mean reward of greedy completions of held-out prompts, None if none has one; collective.

        Raises:
            RunError: a reward function failed.
        """
        count = self._cfg.train.eval_samples
        assert self._prompts.validation is not None, "checked before the run"
        indices = range(min(count, len(self._prompts.validation)))
        self._sampler.update()
        found = self._collect(self._prompts.validation, indices, 1, GREEDY)
        scores = np.concatenate([group.scores for group in found.groups])
        return float(np.nanmean(scores)) if not np.isnan(scores).all() else None

    def completion_text(self, rollout: Rollout) -> str:
        """Return the text of a rollout, without what ended it."""
        return self._collector.completion_text(rollout)

    def close(self) -> None:
        """End the worker processes of the reward function."""
        self._reward.close()

    def _next_round(self, first: int, skipped_ranges: Sequence[range]) -> list[Group]:
        """Sample the groups of the next `rl.updates` steps; with rl.mixed_only, replace equal ones."""
        rl = self._cfg.rl
        count = rl.updates * self._cfg.train.global_batch_size // rl.group_size
        statistics = RoundStatistics(reshard_s=self._sampler.update())
        kept: list[Group] = []
        equal: list[Group] = []
        samples: list[int] = []
        self._expert_ids.clear()
        self._shard_of_prompt.clear()
        for _ in range(rl.most_rounds if rl.mixed_only else 1):
            indices = self.train_sampler.next_sample_indices(first, count - len(kept), skipped_ranges)
            first = indices[-1] + 1
            samples += indices
            found = self._collect(self._prompts.train, indices, rl.group_size, self._sampling)
            self._expert_ids |= found.expert_ids
            self._shard_of_prompt |= dict(zip(indices, found.shards, strict=True))
            statistics = statistics.add(found.groups, found.rollout_s, found.reward_s)
            for group in found.groups:
                (kept if group.is_mixed or not rl.mixed_only else equal).append(group)
            if len(kept) == count:
                break
        self._samples = samples
        self._statistics = statistics
        return kept + equal[: count - len(kept)]

    def _collect(
        self, prompts: PromptSource, indices: Sequence[int], group_size: int, sampling: SamplingParams
    ) -> CollectedRollouts:
        """Sample and score completions of some prompts; collective."""
        rl = self._cfg.rl
        max_tokens = self._cfg.rollout.max_tokens
        found = self._collector.collect(
            indices,
            prompts.prompt,
            group_size,
            sampling,
            lambda scores, rollouts: adjust_rewards(scores, rollouts, rl, max_tokens),
        )
        self.events += [FailedRewardEvent(failed) for failed in found.failures]
        return found

    def _round_step(self, groups: Sequence[Group]) -> RoundStep:
        """Build the batch of one step of a round, before the first of them is trained; collective."""
        rollouts = weigh_rollouts(groups, self._cfg.rl, self._cfg.rollout.max_tokens)
        batch, num_samples = self._to_batch(rollouts)
        routing = None
        if self._replay is not None:
            routing = self._replay.fetch(*self._routed_tokens([one.rollout for one in rollouts], num_samples))
            self._replay.use(routing, in_evaluation=True)
        if self._trainer is not None:
            trained = self._trainer.of_batch(batch)
            batch = replace(batch, columns=batch.columns | {"trainer_log_probs": trained})
        return RoundStep(groups, batch, routing)

    def _routed_tokens(
        self, rollouts: Sequence[Rollout], num_samples: int
    ) -> tuple[PackedTokens, dict[int, NDArray[np.integer]]]:
        """Return where the tokens of the packed samples come from, and the experts of the rollouts of this rank."""
        seq_len = self._cfg.train.seq_len
        rollout_NS, offset_NS = rollout_positions(rollouts, seq_len=seq_len, num_samples=num_samples)
        tokens = PackedTokens(
            rollout_NS=rollout_NS,
            offset_NS=offset_NS,
            last_R=np.array([rollout.num_tokens - 1 for rollout in rollouts]),
            shard_R=np.array([self._shard_of_prompt[rollout.prompt_number] for rollout in rollouts]),
        )
        keys = [(rollout.prompt_number, rollout.sample_number) for rollout in rollouts]
        return tokens, {i: self._expert_ids[key] for i, key in enumerate(keys) if key in self._expert_ids}

    def _begin_step(self, step: RoundStep) -> Batch:
        """Prepare the model for the next step; return its batch. Collective."""
        batch = step.batch
        if self._replay is not None:
            assert step.routing is not None
            self._replay.use(step.routing)
        count = batch.num_micro_batches
        assert count is not None
        for layer in self._model.moe_layers().values():
            layer.set_micro_batches(count * self._groups.attn.dp.size, count)
        if self._reference is not None:
            reference = self._reference.log_probs(batch)
            batch = replace(batch, columns=batch.columns | {"reference_log_probs": reference})
        return batch

    def _to_batch(self, rollouts: Sequence[TrainingRollout]) -> tuple[Batch, int]:
        """Pack the rollouts of one step into this rank's shard of a batch; the same packing under every mapping.

        Returns:
            The batch, and the samples of the global batch.
        """
        cfg = self._cfg
        seq_len = cfg.train.seq_len
        samples = pack_rollouts(rollouts, seq_len=seq_len, pad_id=self._end_id)
        ranks = self._groups.attn.dp
        micro_batch_size = cfg.train.micro_batch_size
        # A pipeline schedule has a fixed number of micro-batches.
        count = cfg.num_micro_batches if cfg.parallel.pp > 1 else -(-len(samples) // (micro_batch_size * ranks.size))
        per_rank = count * micro_batch_size
        samples += [empty_sample(seq_len, self._end_id)] * (per_rank * ranks.size - len(samples))
        first = ranks.rank * per_rank
        own = stack_samples(samples[first : first + per_rank], seq_len)
        assert own.weights is not None
        batch = self.train_sharder.build_batch(own, own.weights[:, None], first)
        return replace(batch, num_micro_batches=count), per_rank * ranks.size


def _inexact_settings(cfg: Config, device: torch.device) -> tuple[str, ...]:
    """Return the settings under which sampling differs from training on this machine."""
    has_c_kernels = device.type == "cpu" and uses_c_kernels(select_kernels(cfg, device))
    return inexact_settings(cfg, device.type, has_c_kernels=has_c_kernels)


def exactness_message(inexact: Sequence[str]) -> str:
    """Return a log message that names the settings under which sampling differs from training by rounding."""
    if not inexact:
        return "rollouts have the bits of training: the ratio of policy to sampler is 1"
    return f"rollouts differ from training by rounding: {'; '.join(inexact)}"


def policy_loss(cfg: Config) -> PolicyGradientLoss:
    """Return the loss of a recipe of reinforcement learning."""
    rl = cfg.rl
    return PolicyGradientLoss(
        objective=rl.objective,
        clip_low=rl.clip_low,
        clip_high=rl.clip_high,
        kl=rl.kl,
        kl_kind=rl.kl_kind,
        temperature=cfg.rollout.temperature,
        correction=rl.correction,
        correction_low=rl.correction_low,
        correction_high=rl.correction_high,
    )


def engine_settings(cfg: Config) -> EngineSettings:
    """Return the settings of the rollout engine."""
    rollout = cfg.rollout
    return EngineSettings(
        slots=rollout.slots, pass_tokens=rollout.pass_tokens, cache_gib=rollout.cache_gib, cache=rollout.cache
    )
