"""Batches of reinforcement learning: sample rollouts of prompts, score them, and pack them into training samples.

All ranks sample their share of the groups. Then every rank has all rollouts, and computes the same advantages and the
same packing, so the global batch does not depend on the mapping.
With `rl.staleness` rounds are sampled ahead and wait in a `RoundQueue`. With `rollout.ranks` other ranks sample them
meanwhile, and each rank receives the rows that it trains on.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from moefold.checkpoint.checkpoint_meta import CheckpointMeta
from moefold.checkpoint.sample_order import sample_order
from moefold.comm.trainer_sampler_link import JobLink
from moefold.config.schema import Config
from moefold.data.prompts import PromptSource, open_prompts
from moefold.data.tokenizer import load_tokenizer
from moefold.objectives.recipe_loss import loss_columns
from moefold.parallel.batch import Batch
from moefold.parallel.parallel_model import ParallelModel
from moefold.rl.reward import FailedReward, Reward, check_columns
from moefold.rl.rollout import Rollout, RolloutGroup, StepPacking
from moefold.rl.rollout_table import TABLE_KEY
from moefold.train.batch_sharding import BatchBuilder
from moefold.train.data_files import RunDataFiles
from moefold.train.position import Position
from moefold.train.rl.kl_reference import KLReference, ReferenceModel
from moefold.train.rl.log_probs import LogProbCapture
from moefold.train.rl.mismatch import mismatch_limit
from moefold.train.rl.remote_rollouts import RemoteRollouts, SamplingStart
from moefold.train.rl.rollout_source import LocalRollouts, LocalSampling, RolloutSource
from moefold.train.rl.round_queue import RoundQueue
from moefold.train.rl.round_steps import RoundStep, RoundSteps
from moefold.train.step_data import DataEvent


def failed_reward_event(failed: FailedReward) -> DataEvent:
    """Return the event of a group without rewards, because its reward function failed."""
    record = {
        "kind": "reward",
        "action": "drop",
        "function": failed.function,
        "what": failed.reason,
        "prompt": failed.prompt.text,
        "origin": failed.prompt.location,
    }
    return DataEvent("reward.on_error", f"{failed.describe()}; its group is left out", record)


class PromptCatalog:
    """Numbers of the prompts of a run, `SampleCatalog`. The trainer counts prompts as samples."""

    has_annotations = True
    fill_fraction = 1.0

    def __init__(self, prompts: PromptSource | None) -> None:
        self._prompts = prompts

    def __len__(self) -> int:
        """Return the number of different prompts."""
        return 0 if self._prompts is None else len(self._prompts)

    def origin(self, index: int) -> str:
        """Return the location of a prompt."""
        return "" if self._prompts is None else self._prompts.prompt(index).location


class RolloutLoader:
    """`StepData` of reinforcement learning: samples, scores and packs the rollouts of each step."""

    train_sampler: PromptCatalog
    """The training prompts, set by `open`, like `validation_sampler` and `queue`."""
    validation_sampler: PromptCatalog
    queue: RoundQueue
    metrics: dict[str, Any]
    """Metrics of the rollouts of the last batch."""
    round: Sequence[RolloutGroup]
    """Groups of the last step's batch. With rollout.ranks they are on the first rank only."""

    def __init__(
        self, cfg: Config, model: ParallelModel, reward: Reward, position: Position, link: JobLink | None
    ) -> None:
        """Fingerprint the prompt files. It is collective."""
        self._cfg = cfg
        self._position = position
        self.files = RunDataFiles(sample_order(cfg), cfg.data, position)
        self.events: list[DataEvent] = []
        self._model = model
        self._capture: LogProbCapture | None = None
        if "trainer_log_probs" in loss_columns(model.stages[0].loss):
            self._capture = LogProbCapture(cfg.rollout.temperature, tuple(model.stages[-1].loss.terms))
        self._link = link
        self._tokenizer = load_tokenizer(cfg.data, vocab_size=cfg.model.vocab_size)
        self.sampling = LocalSampling(cfg, model, reward, self._tokenizer)
        self.kl_reference = KLReference(cfg.rl, model, partial(ReferenceModel, cfg, model.groups))
        self.train_sharder = BatchBuilder(cfg.batch_shape, model.groups, model.positions)
        self._loaded: dict[str, Any] | None = None
        self._pending: list[RoundStep] = []
        self._samples: Sequence[int] = ()
        self._step = 0

    def open(self, meta: CheckpointMeta | None) -> None:
        """Open the prompts of a run, continuing a checkpoint's prompts if they are the same.

        Raises:
            ConfigError: as `open_prompts`.
        """
        cfg = self._cfg
        self._messages = [self.sampling.message]
        if meta is not None and (change := self.files.decide_restart(meta)):
            self._messages.append(f"the prompts restart at the first: {change}")
        elif meta is not None:
            self._messages.append(self.files.resume(meta)[1])
        prompts = open_prompts(cfg.data, self._tokenizer, seed=cfg.run.seed, check=check_columns(cfg.data, cfg.reward))
        self._prompts = prompts
        self.train_sampler = PromptCatalog(prompts.train)
        self.validation_sampler = PromptCatalog(prompts.validation)
        end_id = self._tokenizer.separator_id
        assert end_id is not None, "checked before the run"
        packing = StepPacking(cfg.parallel, cfg.train, cfg.rl, cfg.rollout, end_id)
        self._steps = RoundSteps(
            cfg.train,
            cfg.rl,
            self._model,
            self.train_sharder,
            partial(packing.rows, dp_rank=self._model.groups.attn.dp.rank),
            self.sampling.replay,
            self._capture,
        )
        self.queue = RoundQueue(cfg.run, cfg.train, cfg.rl, self._open_source(prompts.train))

    def _open_source(self, prompts: PromptSource) -> RolloutSource:
        """Return the source of the rounds: this rank, or the ranks of rollout.ranks."""
        if self._link is None:
            return LocalRollouts(self.sampling.sampler, self.sampling.model.update, prompts)
        return RemoteRollouts(self._cfg, self._model, self._link, SamplingStart(self.files.fingerprints))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the headers of the rollouts and the state of the reference model, for `load_tensors`."""
        self._pending = []
        self._step = self._position.step
        self._loaded = state_dict.get("rl")
        self.kl_reference.load_state_dict(self._loaded)

    def load_tensors(self, path: Path | None) -> None:
        """Load the rollouts that are not trained on yet, and the reference model. It is collective.

        Raises:
            ConfigError: the weights of the reference model cannot be read, or the rollouts are of other batches.
        """
        if path is not None:
            state = None if self._position.restarts_data else self._loaded
            self._messages.append(self.queue.restore(path, state, self._step, self._prompts.train.prompt))
        self.kl_reference.load_tensors(path, is_of_rl=self._loaded is not None)

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights of the reference model after a reset, and on the first rank the rows of the rollouts."""
        return self.kl_reference.tensors() | (self.queue.tensors() if self._model.groups.rank == 0 else {})

    def state_dict(self) -> dict[str, Any]:
        """Return the files, the state of the reference model, and the headers of the rollouts."""
        headers = self.queue.headers()
        table = {TABLE_KEY: headers} if headers else {}
        files = {"data_files": dict(self.files.initial), "data_tokens": {}, "data_lost": {}, "stream": None}
        return files | {"rl": self.kl_reference.state_dict() | table}

    def next_batch(self, first: int, skipped_ranges: Sequence[range]) -> tuple[Batch, Sequence[int]]:
        """Return this rank's shard of the next step's rollouts, and the numbers of the prompts. See `StepData`.

        Raises:
            RunError: a reward function failed.
        """
        begins_round = not self._pending
        if begins_round:
            one, waited_s = self.queue.next_round(self._step, first, skipped_ranges)
            self._samples = one.prompts
            self.events += map(failed_reward_event, one.failures)
            self._pending = self._steps.build(one, self._step, waited_s)
        step = self._pending.pop(0)
        self._step += 1
        self.round = step.groups
        self.metrics = step.metrics
        self._steps.begin(step)
        columns = step.batch.columns | self.kl_reference.columns(step.batch)
        limit = self._mismatch_limit(is_stale=step.metrics["staleness"] > 0) if begins_round else None
        return replace(step.batch, columns=columns, mismatch_limit=limit), self._samples

    def _mismatch_limit(self, *, is_stale: bool) -> float:
        """Return the mismatch limit of the first batch of a round. The weights of later ones have changed."""
        cfg = self._cfg
        return mismatch_limit(cfg.run, cfg.moe, cfg.rl, is_exact=self.sampling.is_exact, is_stale=is_stale)

    @property
    def is_round_complete(self) -> bool:
        """Return whether all sampled rollouts were trained on. A run is saved and stopped only then."""
        return not self._pending

    @property
    def message(self) -> str:
        """Notes on exact sampling and on what a resumed run lacks, for the start of the run."""
        return "; ".join(filter(None, self._messages))

    def eval_batches(self, num_samples: int | None = None) -> list[Batch]:
        """Return no batches: held-out prompts have no targets, see `evaluate_reward`."""
        return []

    def evaluate_reward(self) -> float | None:
        """Return the mean reward of greedy completions of held-out prompts, or None without rewards. It is collective.

        Raises:
            RunError: a reward function failed.
        """
        assert self._prompts.validation is not None, "checked before the run"
        reward, failures = self.sampling.evaluate(self._prompts.validation)
        self.events += map(failed_reward_event, failures)
        return reward

    def completion_text(self, rollout: Rollout) -> str:
        """Return the text of a rollout, without the final stop token or stop text."""
        return self.sampling.evaluator.completion_text(rollout)
