"""Callback that ends a run whose data-parallel replicas have diverged, before a checkpoint hides it."""

import hashlib
import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from moefold.comm.groups import current_world
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.faults import FaultsConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.run import RunConfig
from moefold.errors import RunError
from moefold.message_text import format_list
from moefold.optim.states import named_moments
from moefold.parallel.replica_check import Divergence, HostFact, ReplicaCheck
from moefold.train.callbacks.callback import CallbackStage, FinishedStep, StageCallback, TrainingContext
from moefold.train.position import is_due, is_save_due


class ReplicaComparison(StageCallback):
    """Callback that compares replicas every faults.replica_check_every steps and before each save."""

    stage = CallbackStage.CHECK

    def __init__(
        self,
        run: RunConfig,
        parallel: ParallelConfig,
        faults: FaultsConfig,
        checkpoint: CheckpointConfig,
        drain: Callable[[], None],
    ) -> None:
        self._seed = run.seed
        self._zero = parallel.zero
        self._every = faults.replica_check_every
        self._checkpoint = checkpoint
        self._drain = drain
        self._check: ReplicaCheck | None = None
        self._checked_step: int | None = None

    state_name = "replica_check"

    def state_dict(self) -> dict[str, Any]:
        """Return the last step whose replicas were compared, or empty before the first comparison."""
        return {} if self._checked_step is None else {"checked_step": self._checked_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the step of a checkpoint."""
        self._checked_step = state_dict.get("checked_step")

    def on_start(self, context: TrainingContext) -> None:
        """Find the replicated state."""
        training = context.training
        moments = named_moments(training.optimizer, training.optimized)
        self._check = ReplicaCheck(training.model, moments, self._zero)

    def after_step(self, context: TrainingContext, step: FinishedStep) -> None:
        """Compare the replicas if it is due. It is collective.

        Raises:
            RunError: the replicas have diverged.
        """
        # Loading a checkpoint makes all replicas equal, so weights that have diverged would go unnoticed.
        is_saved = is_save_due(self._checkpoint, step.number, is_last=step.is_last, is_stopped=bool(step.signals))
        if not (is_saved or is_due(self._every, step.number)):
            return
        assert self._check is not None
        context.groups.recorder.set_phase("comparing replicas")
        divergences = self._check.find_divergences(step.batch, host_facts(context, step, self._seed))
        if divergences:
            self._raise(divergences, context, step)
        self._checked_step = step.number

    def _raise(self, divergences: Sequence[Divergence], context: TrainingContext, step: FinishedStep) -> None:
        """End the run before it saves a checkpoint. It is collective."""
        if context.log is not None:
            context.log.log_fault(
                {"step": step.number, "kind": "divergence"} | {"found": list(map(asdict, divergences))}
            )
        self._drain()
        hosts = current_world().all_gather_object(socket.gethostname())
        odd_ranks = sorted({rank for divergence in divergences for rank in divergence.ranks})
        last = "it is unknown since when, as no check came before: resume from a checkpoint that you trust"
        if self._checked_step is not None:
            last = f"all were alike at the check of step {self._checked_step}: resume from a checkpoint up to there"
        raise RunError(
            f"step {step.number}: replicas have diverged: "
            f"{format_list([divergence.describe() for divergence in divergences])}; look at "
            f"{format_list([f'rank {rank} ({hosts[rank]})' for rank in odd_ranks])}; {last} (checkpoint.resume=PATH)"
        )


def host_facts(context: TrainingContext, step: FinishedStep, seed: int) -> list[HostFact]:
    """Return the host state (RNG, positions) after a step, compared across ranks by the replica check."""
    routers = [layer.router.step for layer in context.training.model.moe_layers().values()]
    device = context.groups.device
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    digests = [hashlib.sha256(state.numpy().tobytes()).hexdigest() for state in states]
    data = context.data.state_dict()
    stream = data.pop("stream")
    guard = json.dumps(context.training.guard.state_dict())
    return [
        HostFact("the position of the run", f"step {step.number}, rate {step.result.lr!r}, {guard}", ("world",)),
        HostFact("the random number generators", f"{seed} {routers} {digests}", ("stage",)),
        HostFact("the data position", json.dumps([context.position.state_dict(), data]), ("world",)),
        # Data-parallel ranks read different samples, so their streams may be at different blocks.
        HostFact("the stream position", json.dumps(stream), ("tp", "cp", "pp")),
        *context.training.meter.plan_facts(),
    ]
