"""Batches of reinforcement learning: sample rollouts of prompts, score them, and pack them into training samples.

`RolloutLoader` takes the place of the data loader. All ranks sample their share of the groups; then every rank has all
rollouts, and computes the same advantages and the same packing, so the global batch does not depend on the mapping.
With `rl.staleness` rounds are sampled ahead and wait in a `RolloutTable`; with `rollout.ranks` other ranks sample them
meanwhile, and each rank receives the rows that it trains on.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from moefold.checkpoint.checkpoint_meta import CheckpointMeta
from moefold.checkpoint.resume import moved_data_message, relocated
from moefold.checkpoint.save_load import load_entries
from moefold.comm.groups import ParallelGroups, current_world
from moefold.comm.trainer_sampler_link import JobLink
from moefold.config.rl import RLConfig
from moefold.config.schema import Config
from moefold.cost.shard_boxes import WeightSharding
from moefold.data.prompts import open_prompts
from moefold.data.tokenizer import load_tokenizer
from moefold.errors import ConfigError
from moefold.parallel.batch import Batch
from moefold.parallel.kernels.select import select_kernels, uses_c_kernels
from moefold.parallel.paged_decoder import decoding_notice
from moefold.parallel.parallel_model import ParallelModel
from moefold.parallel.rollout_replay import BatchRouting, PackedTokens, RolloutReplay
from moefold.rl.plateau import Plateau
from moefold.rl.reward import FailedReward, Reward, check_columns
from moefold.rl.rollout import Rollout, RolloutGroup, SampledRouting, rollout_positions
from moefold.rl.rollout_table import (
    TABLE_KEY,
    TABLE_PREFIX,
    RolloutTable,
    Round,
    check_headers,
    empty_arrays,
    restore_table,
    table_headers,
)
from moefold.rl.step_rows import StepRows, pack_step, split_steps
from moefold.topology.rollout_mapping import rollout_config
from moefold.train.data_loader import DataLoader, Position
from moefold.train.log_probs import TrainerLogProbs
from moefold.train.reference import ReferenceModel
from moefold.train.remote_rollouts import RemoteRollouts, SamplingStart
from moefold.train.rollout_sampler import PromptPosition, PromptSampler, RoundSampler
from moefold.train.rollout_source import LocalRollouts, RolloutModel, RolloutSource
from moefold.validate.exactness import inexact_settings, mismatch_limit, replays_routing


@dataclass(frozen=True)
class FailedRewardEvent:
    """Event of a group without rewards, because its reward function failed."""

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
            "function": self.failed.function,
            "what": self.failed.reason,
            "prompt": self.failed.prompt.text,
            "origin": self.failed.prompt.location,
        }


@dataclass(frozen=True)
class RoundStep:
    """One optimizer step of a round of rollouts."""

    groups: Sequence[RolloutGroup]
    """Groups of the step; empty on a rank that received only its rows from the ranks that sample."""
    batch: Batch
    """This rank's shard of its rollouts."""
    metrics: dict[str, Any]
    routing: BatchRouting | None = None
    """Choices of experts to replay; None: the routers choose."""


class RolloutLoader(DataLoader):
    """Samples, scores and packs the rollouts of each step; the data loader of reinforcement learning."""

    def __init__(
        self,
        cfg: Config,
        groups: ParallelGroups,
        model: ParallelModel,
        columns: Sequence[str],
        link: JobLink | None = None,
        position: Position | None = None,
    ) -> None:
        """Fingerprint the prompt files; collective.

        Args:
            cfg: the recipe.
            groups: the process groups of training.
            model: the model in training.
            columns: the columns of a batch that the loss reads.
            link: link to the ranks of rollout.ranks; None without them.
            position: progress of the run; None for a new run.
        """
        super().__init__(cfg, groups, model.positions, position=position)
        self._model = model
        self._tokenizer = load_tokenizer(cfg.data, vocab_size=cfg.model.vocab_size)
        end_id = self._tokenizer.separator_id
        assert end_id is not None, "checked before the run"
        self._end_id = end_id
        self._reward = Reward(cfg.data, cfg.faults, cfg.reward, num_ranks=cfg.num_job_ranks)
        self._link = link
        self._rollout_model = RolloutModel(cfg, groups, model)
        sampling = self._rollout_model
        device = groups.device
        has_c_kernels = device.type == "cpu" and uses_c_kernels(select_kernels(cfg, device))
        inexact = inexact_settings(cfg, device.type, has_c_kernels=has_c_kernels)
        # Ranks on other machines may have other kernels.
        is_exact = not any(current_world().all_gather_object(bool(inexact)))
        replays, replay_message = replays_routing(cfg.model, cfg.moe, cfg.rl, is_exact=is_exact)
        self._is_exact = is_exact
        self._begins_round = False
        decoding = "" if cfg.rollout.uses_server else decoding_notice(sampling.model, cfg.rollout.cache)
        self._startup_message = "; ".join(filter(None, (exactness_message(cfg.rl, inexact), replay_message, decoding)))
        self._replay: RolloutReplay | None = None
        if replays:
            stages = sampling.model.stages if isinstance(sampling.model, ParallelModel) else [sampling.model.stage]
            layers = [number for stage in stages for number in stage.moe_layers()]
            self._replay = RolloutReplay(model, sampling.groups, layers, cfg.model)
        self._sampler = RoundSampler(
            cfg,
            sampling.model,
            sampling.groups,
            self._reward,
            self._tokenizer,
            records_routing=replays,
            engine=sampling.engine(records_routing=replays),
        )
        self._evaluator = self._sampler
        if cfg.rl.staleness and sampling.model is not model:
            # The second model has older weights by then, or is on other ranks.
            self._evaluator = RoundSampler(cfg, model, groups, self._reward, self._tokenizer)
        self._source: RolloutSource | None = None
        self._table = RolloutTable()
        self._reference = ReferenceModel(cfg, groups) if cfg.rl.kl else None
        self._trainer: TrainerLogProbs | None = None
        if "trainer_log_probs" in columns:
            self._trainer = TrainerLogProbs(model, cfg.rollout.temperature)
        self._plateau = Plateau()
        self._loaded: dict[str, Any] | None = None
        self._pending: list[RoundStep] = []
        self._samples: Sequence[int] = ()
        self._step = 0
        self._restarts = True
        self._metrics: dict[str, Any] = {}
        self.round: Sequence[RolloutGroup] = ()
        """Groups of the last step's batch; with rollout.ranks on the first rank only."""

    def open(self, meta: CheckpointMeta | None) -> None:
        """Open the prompts of a run, continuing a checkpoint's prompts if they are the same.

        Raises:
            ConfigError: as `open_prompts`.
        """
        cfg = self._cfg
        self.message = self._startup_message
        if meta is not None and (change := self.decide_restart(meta)):
            self.message += f"; the prompts restart at the first: {change}"
        elif meta is not None:
            self._initial_fingerprints = relocated(meta, self.order, self.fingerprints).data_files
            self.message = "; ".join(filter(None, [self.message, moved_data_message(meta, self.order)]))
        self.reference = None
        prompts = open_prompts(cfg.data, self._tokenizer, seed=cfg.run.seed, check=check_columns(cfg.data, cfg.reward))
        self.train_sampler = PromptSampler(prompts.train, cfg.train.seq_len)
        self.validation_sampler = PromptSampler(prompts.validation, cfg.train.seq_len)
        self._prompts = prompts
        self.train_sharder = self.sharder(self.train_sampler)
        if self._link is None:
            self._source = LocalRollouts(self._sampler, self._rollout_model.update, self.train_sampler)
        else:
            start = SamplingStart(self.fingerprints)
            source = WeightSharding.from_config(cfg, for_training=True)
            target = WeightSharding.from_config(rollout_config(cfg), for_training=False)
            self._source = RemoteRollouts(source, target, self._groups, self._model, self._link, start)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the headers of the rollouts and the state of the reference model, for `load_tensors`."""
        super().load_state_dict(state_dict)
        self._pending = []
        self._step = self._position.step
        self._loaded = state_dict.get("rl")
        self._plateau = Plateau.from_json(self._loaded)

    def load_tensors(self, path: Path | None) -> None:
        """Load the rollouts that are not trained on yet, and the reference model; collective.

        Raises:
            ConfigError: the weights of the reference model cannot be read, or the rollouts are of other batches.
        """
        if path is None:
            if self._reference is not None:
                self._load_reference()
            return
        self._restore_table(path)
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
        if self._loaded is None and self._cfg.rl.reference == "start":
            raise ConfigError(
                f"{path} is of a run without reinforcement learning, so rl.reference='start' is no longer at hand: "
                f"start a new run with checkpoint.init_from={str(path)!r}, or name the weights by rl.reference"
            )
        self._load_reference()

    def _load_reference(self) -> None:
        """Load the reference weights of the checkpoint that this run started with; collective."""
        assert self._reference is not None
        source = self._reference.source
        folder = self._plateau.reference_folder if source == self._plateau.reference else ""
        if folder and not Path(folder).exists():
            raise ConfigError(
                f"{folder} is gone, which has the reference weights of this run; restore it, or name other weights by "
                "rl.reference"
            )
        self._plateau = replace(self._plateau, reference=source, reference_folder=self._reference.load(folder))

    def _restore_table(self, path: Path) -> None:
        """Load the rounds of a checkpoint, if it has the prompts of this run; collective."""
        assert self._source is not None
        while self._source.num_ordered:
            # After a rollback: they were sampled with weights that are gone.
            self._source.receive()
        self._restarts = True
        self._table = RolloutTable()
        headers = table_headers(self._loaded)
        if not headers or self._position.restarts_data:
            return
        check_headers(headers, self._cfg.train, self._cfg.rl)
        arrays = empty_arrays(headers)
        load_entries(path, {f"{TABLE_PREFIX}{name}": torch.from_numpy(values) for name, values in arrays.items()})
        self._table = restore_table(headers, arrays, self._prompts.train.prompt, self._cfg.rl.group_size)
        rl = self._cfg.rl
        if num_dropped := self._table.drop_older(self._step, rl.staleness, rl.updates):
            self.message += (
                f"; {num_dropped} round{'s' * (num_dropped > 1)} of rollouts in the checkpoint, of older weights than "
                f"rl.staleness={rl.staleness} allows, are sampled again"
            )

    def prepare_save(self) -> None:
        """Wait for the ordered rounds, which a checkpoint must have; collective."""
        assert self._source is not None
        while self._source.num_ordered:
            self._table.add(self._source.receive())

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights of the reference model after a reset, and on the first rank the rows of the table.

        The reference weights before a reset can be loaded again.
        """
        found = self._reference.entries() if self._reference is not None and self._plateau.num_resets else {}
        if self._groups.rank == 0:
            arrays = self._table.arrays()
            found |= {f"{TABLE_PREFIX}{name}": torch.from_numpy(values) for name, values in arrays.items()}
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the files, the state of the reference model, and the headers of the rollouts."""
        headers = self._table.headers()
        table = {TABLE_KEY: headers} if headers else {}
        return super().state_dict() | {"rl": asdict(self._plateau) | table}

    def resets_reference(self, reward: float) -> bool:
        """Record a held-out reward and return whether to reset the reference model."""
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
        """Return whether all sampled rollouts were trained on. A run is saved and stopped only then."""
        return not self._pending

    def next_batch(self, first: int, skipped_ranges: Sequence[range]) -> tuple[Batch, Sequence[int]]:
        """Return this rank's shard of the next step's rollouts, and the numbers of the prompts; collective.

        Args:
            first: first prompt of the run that is not used yet.
            skipped_ranges: prompts to skip.

        Raises:
            RunError: a reward function failed.
        """
        self._begins_round = not self._pending
        if self._begins_round:
            self._pending = self._next_round(first, skipped_ranges)
        step = self._pending.pop(0)
        self._step += 1
        self.round = step.groups
        self._metrics = step.metrics
        return self._begin_step(step), self._samples

    def step_metrics(self) -> dict[str, Any] | None:
        """Return the metrics of the rollouts of the last batch."""
        return dict(self._metrics)

    @property
    def mismatch_limit(self) -> float | None:
        """Return the mismatch limit of the first batch of a round; None for later batches."""
        if not self._begins_round:
            return None
        return mismatch_limit(
            self._cfg.run, self._cfg.moe, self._cfg.rl, is_exact=self._is_exact, is_stale=self._metrics["staleness"] > 0
        )

    def evaluate_reward(self) -> float | None:
        """Return the mean reward of greedy completions of held-out prompts; None without rewards. Collective.

        Raises:
            RunError: a reward function failed.
        """
        assert self._prompts.validation is not None, "checked before the run"
        if self._evaluator is self._sampler:
            self._rollout_model.update()
        reward, failures = self._evaluator.evaluate(self._prompts.validation)
        self.events += [FailedRewardEvent(failed) for failed in failures]
        return reward

    def completion_text(self, rollout: Rollout) -> str:
        """Return the text of a rollout, without the final stop token or stop text."""
        return self._evaluator.completion_text(rollout)

    def finish(self) -> None:
        """End the ranks that only sample, after the last step."""
        if self._source is not None:
            self._source.finish()

    def close(self) -> None:
        """End the worker processes of the reward function."""
        self._reward.close()

    def _next_round(self, first: int, skipped_ranges: Sequence[range]) -> list[RoundStep]:
        """Order the rounds that the current weights sample, and return the steps of the oldest round; collective."""
        source = self._source
        assert source is not None
        rl = self._cfg.rl
        self._table.drop(skipped_ranges)
        wanted = min(rl.staleness, self._cfg.run.steps - self._step - rl.updates) // rl.updates + 1
        missing = wanted - len(self._table) - source.num_ordered
        if missing > 0:
            next_prompt = self._table.next_prompt
            position = PromptPosition(first if next_prompt is None else next_prompt, tuple(skipped_ranges))
            source.order(missing, self._step, position if self._restarts else None)
            self._restarts = False
        started_s = time.perf_counter()
        one = self._table.pop() if len(self._table) else source.receive()
        waited_s = time.perf_counter() - started_s
        self._samples = one.prompts
        self.events += [FailedRewardEvent(failed) for failed in one.failures]
        return self._round_steps(one, waited_s)

    def _fetch_routing(
        self, sampled: SampledRouting | None, groups: Sequence[RolloutGroup], rows: StepRows
    ) -> BatchRouting | None:
        """Get the experts that were chosen for the rows of one step; None without replay. Collective."""
        if self._replay is None:
            return None
        assert sampled is not None
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        num_samples = len(rows.samples.tokens) * self._groups.attn.dp.size
        rollout_NS, offset_NS = rollout_positions(rollouts, seq_len=self._cfg.train.seq_len, num_samples=num_samples)
        tokens = PackedTokens(
            rollout_NS=rollout_NS,
            offset_NS=offset_NS,
            last_R=np.array([rollout.num_tokens - 1 for rollout in rollouts]),
            shard_R=np.array([sampled.shard_of_prompt[rollout.prompt_number] for rollout in rollouts]),
        )
        keys = [(rollout.prompt_number, rollout.sample_number) for rollout in rollouts]
        own = {i: sampled.expert_ids[key] for i, key in enumerate(keys) if key in sampled.expert_ids}
        return self._replay.fetch(tokens, own)

    def _round_steps(self, one: Round, waited_s: float) -> list[RoundStep]:
        """Build the batches of a round.

        All batches are built now: later steps may need log-probabilities of the weights that sampled. Collective.
        """
        updates = self._cfg.rl.updates
        groups = split_steps(one.groups, updates) if one.groups is not None else [()] * updates
        rows = one.steps
        metrics = one.metrics
        if rows is None:
            dp_rank = self._groups.attn.dp.rank
            rows = tuple(
                pack_step(
                    of_step, self._cfg.parallel, self._cfg.train, self._cfg.rl, self._cfg.rollout, self._end_id, dp_rank
                )
                for of_step in groups
            )
            metrics = tuple(one.statistics.metrics(of_step) for of_step in groups)
        return [
            self._round_step(
                groups[number],
                rows[number],
                metrics[number] | {"staleness": self._step + number - one.version, "rollout_wait_s": waited_s},
                self._fetch_routing(one.routing, groups[number], rows[number]),
            )
            for number in range(updates)
        ]

    def _round_step(
        self, groups: Sequence[RolloutGroup], rows: StepRows, metrics: dict[str, Any], routing: BatchRouting | None
    ) -> RoundStep:
        """Build the batch of one step of a round, before the first step is trained; collective."""
        weights = rows.samples.weights
        assert weights is not None
        count = self.train_sharder.count_inputs(rows.samples)
        batch = self.train_sharder.build_batch(rows.samples, weights[:, None], rows.first, count)
        batch = replace(batch, num_micro_batches=rows.num_micro_batches)
        if self._trainer is not None:
            if self._replay is not None and routing is not None:
                self._replay.use(routing, in_evaluation=True)
            trained = self._trainer.of_batch(batch)
            batch = replace(batch, columns=batch.columns | {"trainer_log_probs": trained})
        return RoundStep(groups, batch, metrics, routing)

    def _begin_step(self, step: RoundStep) -> Batch:
        """Prepare the model for the next step and return its batch. Collective."""
        batch = step.batch
        if self._replay is not None:
            assert step.routing is not None
            self._replay.use(step.routing)
        count = batch.num_micro_batches
        assert count is not None
        for layer in self._model.moe_layers().values():
            layer.set_micro_batches(count * self._groups.attn.dp.size, count)
        for stage in self._model.stages:
            for indexer in stage.indexers().values():
                indexer.set_micro_batches(count * self._groups.attn.dp.size)
        if self._reference is not None:
            reference = self._reference.log_probs(batch)
            batch = replace(batch, columns=batch.columns | {"reference_log_probs": reference})
        return batch


def exactness_message(rl: RLConfig, inexact: Sequence[str]) -> str:
    """Return a log message that names the settings under which sampling differs from training by rounding."""
    staleness = rl.staleness
    if staleness:
        return f"rollouts are sampled by the weights of {staleness} optimizer step{'s' * (staleness > 1)} before"
    if not inexact:
        return "rollouts have the bits of training: the ratio of policy to sampler is 1"
    return f"rollouts differ from training by rounding: {'; '.join(inexact)}"
