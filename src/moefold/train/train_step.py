"""One optimizer step: forward, backward, gradient clipping, update, and the metrics reduced over all ranks."""

import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moefold.checkpoint.entries import checkpoint_state
from moefold.checkpoint.run_states import Record, RunStates
from moefold.comm.collectives import all_reduce_sum
from moefold.comm.groups import current_world
from moefold.config.chosen import chosen_in
from moefold.config.groups.optimizer import OptimizerPart
from moefold.config.schema import Config
from moefold.cost.adapter_spec import expert_names, is_adapter
from moefold.optim.build import build_optimizer
from moefold.optim.lr_schedule import learning_rate, schedule_settings
from moefold.optim.states import reset_moments, set_learning_rate, set_step_count
from moefold.parallel.batch import Batch
from moefold.parallel.expert_parallel import check_receive_loads
from moefold.parallel.fsdp_hooks import FSDPCommHooks, install_comm_hooks
from moefold.parallel.gradients import clip_gradients, needs_clip
from moefold.parallel.parallel_model import ParallelModel
from moefold.train.position import is_due
from moefold.train.step_guard import GRAD_NORM, SPIKE_METRICS, StepGuard
from moefold.train.step_meter import StepMeter, StepResult, StepTotals

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from moefold.config.groups.site_method import OwnedParameters
    from moefold.metrics.memory_tracker import MemoryTracker
    from moefold.optim.outer import OuterOptimizer
    from moefold.optim.states import StateStore
    from moefold.parallel.replica_check import ReplicaGradients
    from moefold.parallel.router_replay_io import RouterReplayBuffer
    from moefold.train.nonfinite import NonFiniteReport


StopFlags = Callable[[], Sequence[bool]]
STOP_POLL_EVERY = 8
"""Evaluation batches between two polls of the stop flags: each poll is an all-reduce that the host waits for."""


class TrainingStep:
    """Runs optimizer steps on a parallel model. `guard` decides whether a step is applied.

    `outer` is the outer optimizer of a run with sites, else None. `router_replay` records and replays the routing if
    the recipe asks for it. `moment_updates` counts the updates since the optimizer moments were zero. `meter` measures
    the steps.
    """

    def __init__(self, model: ParallelModel, cfg: Config) -> None:
        self._cfg = cfg
        self.model = model
        state_store: StateStore | None = None
        if cfg.train.offload_optimizer != "none":
            from moefold.parallel.offload import open_state_store

            state_store = open_state_store(cfg.train, model.groups.device)
        self._owned: OwnedParameters | None = None
        if cfg.sites.owns_experts:
            names = expert_names(cfg.model, cfg.lora)
            count, number = cfg.sites.count, cfg.sites.number
            self._owned = cfg.sites.part.own_parameters(model.trained_parameters, names, count, number)
        self.optimizer = build_optimizer(
            self.optimized, cfg.run, cfg.model, cfg.train, cfg.lora, model.groups.attn.stage, state_store
        )
        self.outer: OuterOptimizer | None = None
        if cfg.sites.is_active:
            from moefold.train.sites.outer_state import make_outer_optimizer

            self.outer = make_outer_optimizer(model, cfg.model, cfg.lora, cfg.sites, self.optimizer, state_store)
        part = chosen_in(cfg.train, OptimizerPart)
        self._passes = None if part.needs_gradients else part.passes(model, self.optimizer)
        self.moment_updates = 0
        self.guard = StepGuard(cfg.faults, (GRAD_NORM,) if cfg.is_rl else SPIKE_METRICS)
        self.router_replay: RouterReplayBuffer | None = None
        if cfg.moe.trace_every or cfg.moe.replay:
            from moefold.parallel import router_replay_io

            self.router_replay = router_replay_io.RouterReplayBuffer(model, cfg.model, cfg.parallel, cfg.moe, cfg.train)
        self._fsdp_hooks: FSDPCommHooks | None = None
        self._replica_gradients: ReplicaGradients | None = None
        if cfg.parallel.world_size > 1:
            model.groups.world.comm_timer.is_on = cfg.faults.straggler_factor > 0
            self._fsdp_hooks = install_comm_hooks(model.stages, model.groups, cfg.parallel.zero)
            if cfg.faults.replica_check_every:
                from moefold.parallel import replica_check

                samples = replica_check.samples_by_replica(cfg.parallel, cfg.train)
                self._replica_gradients = replica_check.ReplicaGradients(model, self._fsdp_hooks, samples)
        self.meter = StepMeter(model, self.parameters | self.optimized, self._passes, cfg.parallel, cfg.train)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of the model for checkpoints, by name."""
        return self.model.named_parameters

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers of the model for checkpoints, by name."""
        return self.model.named_buffers

    def add_states(self, states: RunStates) -> None:
        """Register the states of the step that a resumed run needs."""
        cfg = self._cfg
        states.add("weights", self)
        states.add("guard", self.guard)
        states.add("schedule", Record(lambda: schedule_settings(cfg.run, cfg.train)))
        if self.outer is not None:
            from moefold.topology.fragments import RoundCalendar
            from moefold.train.sites.outer_state import OuterState

            due = RoundCalendar(cfg.run, cfg.model, cfg.sites).fragments_due
            # Without its own state it starts from the loaded weights.
            states.add("sites", OuterState(self.outer, due), after=("weights",))

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates of the moments."""
        return {"moment_updates": self.moment_updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the number of updates of the moments. {} stands for a new optimizer."""
        self.restore_moment_updates(state_dict.get("moment_updates", 0))

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's shards of weights, buffers and moments."""
        return checkpoint_state(*self._stored(), self.optimizer, self.optimized)

    def load_tensors(self, path: Path | None) -> None:
        """Load weights, buffers and moments from a checkpoint. It is collective. A new run has its initial weights."""
        if path is not None:
            from moefold.checkpoint.load import load_checkpoint

            load_checkpoint(path, *self._stored(), self.optimizer, self.optimized)

    def _stored(self) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
        """Return the parameters and buffers that checkpoints contain: only adapters if nothing else is trained.

        The buffers of frozen weights, such as the biases of experts, do not change.
        """
        if not self._cfg.trains_adapters_only:
            return self.parameters, self.buffers
        return {name: p for name, p in self.parameters.items() if is_adapter(name)}, {}

    @property
    def optimized(self) -> dict[str, nn.Parameter]:
        """The parameters of the optimizer: no frozen weights, and only the site's own experts if sites own them."""
        return self.model.trained_parameters if self._owned is None else dict(self._owned.parameters)

    @property
    def shared_weights(self) -> Sequence[Tensor]:
        """Return the gathered weights that are in memory of several ranks."""
        return [] if self._fsdp_hooks is None else self._fsdp_hooks.gathered

    def run(self, batch: Batch, step: int) -> StepResult:
        """Train on this rank's shard of a global batch, see `run_polled`. No stop flag is polled."""
        return self.run_polled(batch, step, tuple)

    def run_polled(self, batch: Batch, step: int, flags: StopFlags) -> StepResult:
        """Train on this rank's shard of a global batch.

        Collective: every rank calls it with its shard of the same batch. The times of the ranks are measured only if
        the batch was loaded inside `meter.loading()`.

        Args:
            step: number of this step, 1-based.
            flags: returns the stop flags of this rank. Polled once the gradients are ready, and summed over all ranks.
        """
        self.begin_step(step, batch)
        replicas = self._replica_gradients if is_due(self._cfg.faults.replica_check_every, step) else None
        if replicas is not None:
            replicas.enable()
        loss, memory_tracker = self._tracked_forward_backward(batch, step)
        if self._owned is not None:
            self._owned.take_gradients()
        recorder = self.model.groups.recorder
        recorder.set_phase("reducing the metrics")
        rate = learning_rate(self._cfg.train, self._cfg.run.steps, step)
        totals = self.meter.reduce(loss, step, flags(), memory_tracker, rate)
        result = totals.result
        check_receive_loads(totals.receive_loads, self.model.dispatcher, f"step {step}")
        metrics = None if replicas is None else replicas.metrics(self.meter.own_loss(loss.detach())[0])
        decision = self.guard.decide(result.guarded_metrics(), result.mismatch(batch.mismatch_limit))
        recorder.set_phase("optimizer")
        nonfinite_report: NonFiniteReport | None = None
        if decision.updates:
            set_learning_rate(self.optimizer, rate)
            self.moment_updates += self._update_weights(totals)
            if not self.model.stages[0].freezes_weights:
                self._update_routers(totals.expert_counts, totals.thresholds)
        elif self._passes is not None:
            self._passes.restore()
        if decision.reason == "nonfinite":
            nonfinite_report = self._locate_nonfinite(batch, step, loss)
        self._zero_gradients()
        if is_due(self._cfg.train.reset_moments_every, step):
            self.reset_moments()
        return replace(result, decision=decision, nonfinite_report=nonfinite_report, replicas=metrics)

    def _zero_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self._owned is not None:
            self._owned.drop_gradients()

    def reset_moments(self) -> None:
        """Zero the optimizer moments between two steps: the next update is the same as with a new optimizer.

        Every rank must call it at the same step, or replicas diverge.
        """
        reset_moments(self.optimizer)
        self.moment_updates = 0

    def restore_moment_updates(self, count: int) -> None:
        """Set the number of updates that the moments have seen. Loading the moments does not change it."""
        set_step_count(self.optimizer, count)
        self.moment_updates = count

    def _update_weights(self, totals: StepTotals) -> int:
        """Update the weights, and return the number of updates of the moments, 0 if the optimizer has made none."""
        if self._passes is not None:
            assert totals.projected is not None
            self._passes.update(totals.projected.rounded)
            return 1
        if needs_clip(totals.result.grad_norm, self._cfg.train.clip_grad):
            clip_gradients(self.meter.clipped, totals.device_grad_norm, self._cfg.train.clip_grad)
        return int(self.optimizer.step() is not False)

    def _tracked_forward_backward(self, batch: Batch, step: int) -> "tuple[Tensor, MemoryTracker | None]":
        """Run forward and backward, with a memory tracker if the recipe measures this step."""
        if not is_due(self._cfg.metrics.memory_every, step):
            return self.forward_backward(batch, step), None
        with self.track_memory(batch) as memory_tracker:
            return self.forward_backward(batch, step), memory_tracker

    def track_memory(self, batch: Batch) -> "AbstractContextManager[MemoryTracker]":
        """Track the memory of the passes inside the context, with all tensors that the step holds."""
        from moefold.parallel.memory_tracking import track_memory

        outer_states = [] if self.outer is None else self.outer.states_on_device()
        shared_memory = [] if self._fsdp_hooks is None else self._fsdp_hooks.shared_memory()
        tensors = batch.tensors(), outer_states, shared_memory, self.shared_weights
        return track_memory(self.model, self.optimizer, *tensors)

    def forward_backward(self, batch: Batch, step: int) -> Tensor:
        """Accumulate the gradients of a batch, or run only forward passes, and return this rank's loss terms."""
        if self._passes is not None:
            return self._passes.run(batch, step, self.begin_step)
        return self.model.forward_backward(batch)

    def _locate_nonfinite(self, batch: Batch, step: int, loss: Tensor) -> "NonFiniteReport":
        """Locate the NaN/Inf: rerun the step and check each rank's values before reduction. It is collective."""
        from moefold.train.nonfinite import NonFiniteReport, RankNonFinite, is_finite, nonfinite_parameters

        device = self.model.groups.device
        has_bad_loss = not is_finite(loss)
        bad_parameters = nonfinite_parameters(self.parameters)
        self._zero_gradients()
        self.begin_step(step, batch)
        if self._fsdp_hooks is not None:
            self._fsdp_hooks.enable()
        rerun_loss = self.forward_backward(batch, step)
        if self._passes is not None:
            self._passes.restore()
        has_bad_gradient = self._fsdp_hooks is not None and not self._fsdp_hooks.are_local_grads_finite(device)
        is_bad_again = has_bad_gradient or not is_finite(rerun_loss) or bool(nonfinite_parameters(self.parameters))
        world = current_world()
        finding = RankNonFinite(
            rank=world.rank,
            host=socket.gethostname(),
            has_bad_loss=has_bad_loss,
            bad_parameters=bad_parameters,
            has_bad_gradient=has_bad_gradient,
            is_bad_on_rerun=is_bad_again,
            samples=batch.placed_samples(),
        )
        return NonFiniteReport(tuple(world.all_gather_object(finding)))

    def begin_step(self, step: int, batch: Batch) -> None:
        """Prepare the routers for step `step` with a batch. Forward passes up to the next call belong to that step.

        Raises:
            ConfigError: the trace to replay lacks the step.
        """
        self.meter.begin_step()
        for layer in self.model.moe_layers().values():
            layer.begin_step(step)
        if self.router_replay is not None:
            self.router_replay.begin_step(step, batch)

    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Return the sum of the loss terms over the validation batches. It is collective."""
        loss, _ = self.evaluate_or_stop(batches, None)
        assert loss is not None
        return loss

    def evaluate_or_stop(
        self, batches: Sequence[Batch], flags: StopFlags | None
    ) -> tuple[float | None, tuple[int, ...]]:
        """Compute the loss as `evaluate` does, unless a rank raises a stop flag. It is collective.

        Args:
            flags: returns the stop flags of this rank, polled before every `STOP_POLL_EVERY`-th batch. None means no
            polls.

        Returns:
            The loss, or None if the evaluation was interrupted, and the number of ranks that raised each flag.
        """
        losses: list[Tensor] = []
        raised: tuple[int, ...] = ()
        self.model.groups.recorder.set_phase("evaluation")
        with self.model.evaluating("the validation"):
            for i, batch in enumerate(batches):
                if flags is not None and i % STOP_POLL_EVERY == 0:
                    raised = self._count_flags(flags())
                if any(raised):
                    break
                losses.append(self.model.runner.evaluate(batch))
        if any(raised):
            return None, raised
        total = torch.stack([self.meter.own_loss(loss) for loss in losses]).sum(0)
        return float(all_reduce_sum(total.double(), self.model.groups.world)), raised

    def _count_flags(self, flags: Sequence[bool]) -> tuple[int, ...]:
        """Return how many ranks raise each flag, by an all-reduce over the world."""
        groups = self.model.groups
        raised = torch.tensor(flags, dtype=torch.float32, device=groups.device)
        return tuple(int(count) for count in all_reduce_sum(raised, groups.world).tolist())

    def _update_routers(self, counts: Tensor, thresholds: Tensor) -> None:
        """Pass the totals of the global batch to the routers of every MoE layer, [MoE layers, E]."""
        for number, layer in self.model.moe_layers().items():
            i = self._cfg.model.moe_layer_numbers.index(number)
            layer.end_step(counts[i], thresholds[i])
