"""One optimizer step: forward, backward, gradient clipping, update, and the metrics reduced over all ranks."""

import json
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from moefold.comm.collectives import all_reduce_sum
from moefold.comm.groups import Group
from moefold.config.chosen import chosen_in
from moefold.config.groups.context import ContextPart
from moefold.config.groups.optimizer import OptimizerPart
from moefold.config.schema import Config
from moefold.cost.adapter_spec import expert_names
from moefold.metrics.memory_breakdown import PARTS, MemoryByPart, peak_memory_gib
from moefold.metrics.rank_times import COMM, COMPUTE, DATA, NUM_TIMES
from moefold.metrics.step_metrics import MoELayerMetrics, OffloadMetrics, ReplicaMetrics
from moefold.model.loss_metrics import MISMATCH
from moefold.optim.build import build_optimizer
from moefold.optim.lr_schedule import learning_rate
from moefold.optim.states import named_moments, reset_moments, set_learning_rate, set_step_count
from moefold.parallel.batch import Batch
from moefold.parallel.expert_parallel import check_receive_loads, local_receive_load
from moefold.parallel.fsdp import FSDPCommHooks, install_comm_hooks, reshard_parameters
from moefold.parallel.gradients import clip_gradients, local_norm_sq, needs_clip
from moefold.parallel.parallel_model import ParallelModel
from moefold.train.step_guard import GRAD_NORM, SPIKE_METRICS, Mismatch, StepDecision, StepGuard

if TYPE_CHECKING:
    from moefold.metrics.memory_tracker import MemoryTracker
    from moefold.optim.forward_only import ProjectedGradient
    from moefold.optim.outer import OuterOptimizer
    from moefold.optim.owned_experts import OwnedExperts
    from moefold.optim.states import StateStore
    from moefold.parallel.replica_check import Divergence, HostFact, ReplicaCheck
    from moefold.parallel.router_replay_io import RouterReplayBuffer
    from moefold.train.attention_meter import AttentionMeter, AttentionMetrics
    from moefold.train.forward_passes import ForwardPasses
    from moefold.train.nonfinite import NonFiniteReport


StopFlags = Callable[[], Sequence[bool]]
STOP_POLL_EVERY = 8
"""Evaluation batches between two polls of the stop flags: each poll is an all-reduce that the host waits for."""


@dataclass(frozen=True)
class StepResult:
    """Metrics of one step over the whole global batch; equal on all ranks."""

    loss: float
    """Sum of the terms of the loss function: the language-model loss by default."""
    aux_loss: float
    """Summed over layers, multiplied by its coefficient; `z_loss` likewise."""
    z_loss: float
    mtp_loss: float
    """Mean over the MTP depths, multiplied by its coefficient; 0 without multi-token prediction."""
    indexer_loss: float
    """KL divergence of the indexers of sparse attention, summed over layers, multiplied by its coefficient; else 0."""
    grad_norm: float
    lr: float
    expert_load: tuple[float, ...]
    expert_counts: np.ndarray
    """Routed tokens per expert of each MoE layer, before token drop, int64 [MoE layers, E]."""
    dropped_fraction: float
    moe_layers: tuple[MoELayerMetrics, ...]
    flags: tuple[int, ...]
    """For each flag given to `run`: the number of ranks that raised it."""
    peak_memory_gib: float
    """Largest peak memory over the ranks since they started, up to the gradients of this step."""
    rank_times: np.ndarray = field(default_factory=lambda: np.zeros((0, NUM_TIMES)))
    """Compute, data and communication time of each rank in seconds, float64 [ranks, 3]; see `metrics.rank_times`."""
    decision: StepDecision = StepDecision("update")
    """Decision of the guard: whether weights, moments and expert bias were updated."""
    nonfinite_report: "NonFiniteReport | None" = None
    """Ranks and parameters where a non-finite step went wrong; else None."""
    replicas: ReplicaMetrics | None = None
    """Differences between replicas; None unless the step was checked."""
    memory_by_part: MemoryByPart | None = None
    """Memory of the forward and backward passes; None unless the step was measured."""
    offload: OffloadMetrics | None = None
    """Activation offload statistics; None without offload."""
    attention: "AttentionMetrics | None" = None
    """Work of planned attention; None without documents or with other attention."""
    projected_gradient: float | None = None
    """Gradient along the perturbation, rounded to a byte; None with gradients."""
    loss_terms: dict[str, float] = field(default_factory=dict)
    """The terms of the loss function by name."""
    loss_metrics: dict[str, float] = field(default_factory=dict)
    """The metrics of the loss function by name: logged, not minimised."""
    divergences: "tuple[Divergence, ...]" = ()
    """Values that differ between ranks although they should be equal, if the step was checked."""


@dataclass(frozen=True)
class ReducedMetrics:
    """Result of the one all-reduce of a step, on the host; the same on every rank."""

    loss_terms: dict[str, float]
    """The terms of the loss function by name."""
    loss_metrics: dict[str, float]
    """The metrics of the loss function by name."""
    mtp_loss: float | None
    """None without multi-token prediction (MTP)."""
    indexer_loss: float
    """0 without sparse attention."""
    device_grad_norm: Tensor
    """Gradient norm, 0-dim on the device, so that clipping needs no host synchronisation."""
    grad_norm: float
    flags: tuple[int, ...]
    peak_memory_gib: float
    rank_times: Tensor
    """Compute, data and communication time of each rank in seconds, [ranks, 3]; zeros if nothing is timed."""
    layer_scalars: Tensor
    """Aux loss, z loss, routed tokens, dropped tokens and entropy of each MoE layer, [MoE layers, 5]."""
    expert_counts: Tensor
    """[MoE layers, E], like `thresholds` and `biases`."""
    thresholds: Tensor
    biases: Tensor
    offload: tuple[float, ...]
    """For `train.offload`: bytes offloaded and kept, seconds of copying and of waiting."""
    receive_loads: Tensor
    """Largest receive load of each rank, [ranks]; [0] if the dispatcher always has room."""
    memory: Tensor
    """Bytes by part at the peak and now, [ranks, 2 * parts]; [ranks, 0] if the step is not measured."""
    attention: "AttentionMetrics | None"
    projected: "ProjectedGradient | None"
    """None with gradients."""

    @property
    def loss(self) -> float:
        """The sum of the loss terms."""
        return sum(self.loss_terms.values())

    def guarded_metrics(self) -> dict[str, float]:
        """Return the values that must be finite, by their name in a message."""
        aux, z = self.layer_scalars[:, :2].sum(0).tolist()
        losses = {"loss": self.loss, "balance loss": aux, "z loss": z}
        if self.mtp_loss is not None:
            losses["MTP loss"] = self.mtp_loss
        if self.indexer_loss:
            losses["indexer loss"] = self.indexer_loss
        return {**losses, "gradient norm": self.grad_norm}

    def mismatch(self, limit: float | None) -> Mismatch | None:
        """Return the mismatch of sampler and training; None without a limit or a trained token."""
        mean = self.loss_metrics.get(MISMATCH)
        return None if limit is None or mean is None else Mismatch(mean, limit)


class TrainingStep:
    """Runs optimizer steps on a parallel model; `guard` decides whether a step is applied.

    `parameters` and `buffers` are the model state for checkpoints; `optimized` are the parameters of the optimizer,
    which differ from `parameters` where weights are frozen or sites own experts; `outer` is the outer optimizer of a
    run with sites, else None; `router_replay` records and replays the routing if the recipe asks for it;
    `moment_updates` counts the updates since the optimizer moments were zero.
    """

    def __init__(self, model: ParallelModel, cfg: Config) -> None:
        self.model = model
        self.parameters = model.named_parameters
        self.buffers = model.named_buffers
        state_store: StateStore | None = None
        if cfg.train.offload_optimizer != "none":
            from moefold.parallel.offload import open_state_store

            state_store = open_state_store(cfg.train, model.groups.device)
        self.optimized = model.trained_parameters
        self._owned: OwnedExperts | None = None
        if cfg.sites.owns_experts:
            from moefold.optim import owned_experts

            self._owned = owned_experts.OwnedExperts(self.optimized, expert_names(cfg.model, cfg.lora), cfg.sites)
            self.optimized = self._owned.parameters
        self._clipped = {**self.parameters, **self.optimized}
        self.optimizer = build_optimizer(
            self.optimized, cfg.run, cfg.model, cfg.train, cfg.lora, model.groups.attn.stage, state_store
        )
        self.outer: OuterOptimizer | None = None
        if cfg.sites.is_active:
            from moefold.train.outer_state import make_outer_optimizer

            self.outer = make_outer_optimizer(model, cfg.model, cfg.lora, cfg.sites, self.optimizer, state_store)
        self._passes: ForwardPasses | None = None
        if not chosen_in(cfg.train, OptimizerPart).needs_gradients:
            from moefold.train import forward_passes

            self._passes = forward_passes.ForwardPasses(model, self.optimizer)
        self.moment_updates = 0
        self.guard = StepGuard(cfg.faults, (GRAD_NORM,) if cfg.is_rl else SPIKE_METRICS)
        self.router_replay: RouterReplayBuffer | None = None
        if cfg.moe.trace_every or cfg.moe.replay:
            from moefold.parallel import router_replay_io

            self.router_replay = router_replay_io.RouterReplayBuffer(model, cfg.model, cfg.parallel, cfg.moe, cfg.train)
        self._comm_timer = model.groups.world.comm_timer
        self._fsdp_hooks: FSDPCommHooks | None = None
        self._replica_checker: ReplicaCheck | None = None
        faults = cfg.faults
        zero = cfg.parallel.zero
        if cfg.parallel.world_size > 1:
            self._comm_timer.is_on = faults.straggler_factor > 0
            self._fsdp_hooks = install_comm_hooks(model.stages, model.groups, zero)
            if faults.replica_check_every:
                from moefold.parallel import replica_check

                self._replica_checker = replica_check.ReplicaCheck(
                    model,
                    named_moments(self.optimizer, self.optimized),
                    zero,
                    self._fsdp_hooks,
                    replica_check.samples_by_replica(cfg.parallel, cfg.train),
                )
        self._cfg = cfg
        self._moe_numbers = cfg.model.moe_layer_numbers
        self._indexers = [indexer for stage in model.stages for indexer in stage.indexers().values()]
        groups = model.groups
        self._loss_terms = model.stages[0].loss.terms
        self._loss_metrics = model.stages[-1].loss_metrics
        self.attention_meter: AttentionMeter | None = None
        if chosen_in(cfg.parallel, ContextPart).is_planned:
            from moefold.train import attention_meter

            self.attention_meter = attention_meter.AttentionMeter(model, cfg.parallel, cfg.train)
        self._duplicate_params = model.duplicate_params
        self._is_first_in_tp = groups.attn.tp.rank == 0
        self._is_first_in_stage = groups.attn.stage.rank == 0

    @property
    def shared_memory(self) -> list[Tensor]:
        """Return the memory of exchanges between the ranks of one machine."""
        return [] if self._fsdp_hooks is None else self._fsdp_hooks.shared_memory()

    @property
    def shared_weights(self) -> Sequence[Tensor]:
        """Return the gathered weights that are in memory of several ranks."""
        return [] if self._fsdp_hooks is None else self._fsdp_hooks.gathered

    @property
    def outer_states(self) -> list[Tensor]:
        """The states of the outer optimizer that are on the device; empty without one."""
        return [] if self.outer is None else self.outer.states_on_device()

    def start_clock(self) -> None:
        """Start timing the next step now rather than at the call of `run`."""
        self._comm_timer.start()

    def run(
        self,
        batch: Batch,
        step: int,
        flags: StopFlags = lambda: (),
        data_s: float = 0.0,
        host_facts: "Callable[[], Sequence[HostFact]]" = tuple,
        mismatch_limit: float | None = None,
    ) -> StepResult:
        """Train on this rank's shard of a global batch.

        Collective: every rank calls it with its shard of the same batch.

        Args:
            batch: this rank's shard.
            step: number of this step, 1-based.
            flags: returns the stop flags of this rank; polled once the gradients are ready, and summed over all ranks.
            data_s: time that this rank took to load the batch.
            host_facts: returns further host values for the replica check to compare.
            mismatch_limit: limit on the mismatch of sampler and training; None: it is not judged.
        """
        self.start_clock()
        self.begin_step(step, batch)
        replica_check = (
            None
            if self._replica_checker is None or step % self._cfg.faults.replica_check_every
            else self._replica_checker
        )
        if replica_check is not None:
            replica_check.enable()
        loss, memory_tracker = self._tracked_forward_backward(batch, step)
        if self._owned is not None:
            self._owned.take_gradients()
        recorder = self.model.groups.recorder
        recorder.set_phase("reducing the metrics")
        totals = self._all_reduce_metrics(loss, step, flags(), data_s, memory_tracker)
        check_receive_loads(totals.receive_loads, self._cfg.parallel, self._cfg.moe, f"step {step}")
        metrics = (
            None if replica_check is None else replica_check.metrics(self._tp_dedup(self._sum_terms(loss.detach()))[0])
        )
        decision = self.guard.decide(totals.guarded_metrics(), totals.mismatch(mismatch_limit))
        recorder.set_phase("optimizer")
        rate = learning_rate(self._cfg.train, self._cfg.run.steps, step)
        nonfinite_report: NonFiniteReport | None = None
        if decision.updates:
            set_learning_rate(self.optimizer, rate)
            self.moment_updates += self._update_weights(totals)
            if not self._cfg.freezes_weights:
                self._update_routers(totals.expert_counts, totals.thresholds)
        elif self._passes is not None:
            self._passes.restore()
        if decision.reason == "nonfinite":
            nonfinite_report = self._locate_nonfinite(batch, step, loss)
        self._zero_gradients()
        every = self._cfg.train.reset_moments_every
        if every and step % every == 0:
            self.reset_moments()
        result = self._result(totals, rate, decision, nonfinite_report)
        if replica_check is None:
            return result
        return replace(result, replicas=metrics, divergences=self.divergences(batch, step, rate, host_facts()))

    def _zero_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self._owned is not None:
            self._owned.drop_gradients()

    def reset_moments(self) -> None:
        """Zero the optimizer moments between two steps: the next update is the same as with a new optimizer; local.

        Every rank must call it at the same step, or replicas diverge.
        """
        reset_moments(self.optimizer)
        self.moment_updates = 0

    def restore_moment_updates(self, count: int) -> None:
        """Set the number of updates that the moments have seen, after moments were loaded."""
        set_step_count(self.optimizer, count)
        self.moment_updates = count

    def _update_weights(self, totals: ReducedMetrics) -> int:
        """Update the weights; return the number of updates of the moments: 0 where the optimizer has made none."""
        if self._passes is not None:
            assert totals.projected is not None
            self._passes.update(totals.projected.rounded)
            return 1
        if needs_clip(totals.grad_norm, self._cfg.train.clip_grad):
            clip_gradients(self._clipped, totals.device_grad_norm, self._cfg.train.clip_grad)
        return int(self.optimizer.step() is not False)

    @property
    def checks_replicas(self) -> bool:
        """True if the recipe asks for replica checks and there are several ranks."""
        return self._replica_checker is not None

    def divergences(
        self, batch: Batch, step: int, rate: float, host_facts: "Sequence[HostFact]"
    ) -> "tuple[Divergence, ...]":
        """Return the values that differ between ranks after a step although they should be equal; collective.

        Empty unless the recipe asks for replica checks.

        Args:
            batch: this rank's shard of the step's batch.
            step: number of the step.
            rate: learning rate of the step.
            host_facts: further host values to compare.
        """
        if self._replica_checker is None:
            return ()
        from moefold.parallel.replica_check import HostFact

        position = f"step {step}, rate {rate!r}, {json.dumps(self.guard.state())}"
        return self._replica_checker.find_divergences(
            batch, (HostFact("the position of the run", position, ("world",)), *host_facts)
        )

    def _tracked_forward_backward(self, batch: Batch, step: int) -> "tuple[Tensor, MemoryTracker | None]":
        """Run forward and backward, with a memory tracker if the recipe measures this step."""
        every = self._cfg.metrics.memory_every
        if not every or step % every:
            return self.forward_backward(batch, step), None
        from moefold.parallel.memory_tracking import track_memory

        tracked = batch.tensors(), self.outer_states, self.shared_memory, self.shared_weights
        with track_memory(self.model, self.optimizer, *tracked) as memory_tracker:
            return self.forward_backward(batch, step), memory_tracker

    def forward_backward(self, batch: Batch, step: int) -> Tensor:
        """Accumulate the gradients of a batch, or run forward passes alone; return this rank's loss terms."""
        if self._passes is not None:
            return self._passes.run(batch, step, self.begin_step)
        return self.model.forward_backward(batch)

    def _locate_nonfinite(self, batch: Batch, step: int, loss: Tensor) -> "NonFiniteReport":
        """Locate the NaN/Inf, then rerun the step and check each rank's contribution before reduction; collective."""
        from moefold.train.nonfinite import gather_findings, is_finite, nonfinite_parameters

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
        return gather_findings(has_bad_loss, bad_parameters, has_bad_gradient, is_bad_again, batch.placed_samples())

    def begin_step(self, step: int, batch: Batch) -> None:
        """Prepare the routers for step `step` with a batch; forward passes up to the next call belong to that step.

        Raises:
            ConfigError: the trace to replay lacks the step.
        """
        self._loss_metrics.reset()
        if self.attention_meter is not None:
            self.attention_meter.begin_step()
        for layer in self.model.moe_layers().values():
            layer.begin_step(step)
        for indexer in self._indexers:
            indexer.begin_step()
        if self.router_replay is not None:
            self.router_replay.begin_step(step, batch)

    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Return the sum of the loss terms over the validation batches; collective."""
        loss, _ = self.evaluate_or_stop(batches, None)
        assert loss is not None
        return loss

    def evaluate_or_stop(
        self, batches: Sequence[Batch], flags: StopFlags | None
    ) -> tuple[float | None, tuple[int, ...]]:
        """Compute the loss as `evaluate` does, unless a rank raises a stop flag; collective.

        Args:
            batches: this rank's shards.
            flags: returns the stop flags of this rank, polled before every `STOP_POLL_EVERY`-th batch; None: no polls.

        Returns:
            The loss, or None if the evaluation was interrupted; and the number of ranks that raised each flag.
        """
        self.model.train(False)
        losses: list[Tensor] = []
        raised: tuple[int, ...] = ()
        with self.model.cast_copies.fresh():
            for i, batch in enumerate(batches):
                if flags is not None and i % STOP_POLL_EVERY == 0:
                    raised = self._count_flags(flags())
                if any(raised):
                    break
                losses.append(self._sum_terms(self.model.runner.evaluate(batch)))
        reshard_parameters(self.model.stages)
        self.model.train(True)
        if any(raised):
            return None, raised
        loads = local_receive_load(self.model, self._cfg.parallel, self._cfg.moe)
        if loads.numel():
            loads = all_reduce_sum(loads, self.model.groups.world)
        check_receive_loads(loads.cpu(), self._cfg.parallel, self._cfg.moe, "the validation")
        total = torch.stack(losses).sum(0)
        return float(all_reduce_sum(self._tp_dedup(total.double()), self.model.groups.world)), raised

    def _count_flags(self, flags: Sequence[bool]) -> tuple[int, ...]:
        """Return how many ranks raise each flag; all-reduce over the world."""
        groups = self.model.groups
        raised = torch.tensor(flags, dtype=torch.float32, device=groups.device)
        return tuple(int(count) for count in all_reduce_sum(raised, groups.world).tolist())

    def _sum_terms(self, losses: Tensor) -> Tensor:
        """Sum the terms of the loss function, without the MTP loss; [1]."""
        return losses[: len(self._loss_terms)].sum(0, keepdim=True)

    def _tp_dedup(self, loss: Tensor) -> Tensor:
        """Return the loss on TP rank 0 and zero elsewhere: all TP ranks compute the same token losses."""
        return loss if self._is_first_in_tp else torch.zeros_like(loss)

    def _all_reduce_metrics(
        self, loss: Tensor, step: int, flags: Sequence[bool], data_s: float, memory_tracker: "MemoryTracker | None"
    ) -> ReducedMetrics:
        """Sum all metrics over the ranks, in one all-reduce."""
        world = self.model.groups.world
        device = loss.device
        packer = MetricPacker()
        packer.add("losses", self._tp_dedup(loss.detach()))
        indexer_losses = [indexer.loss_sum.to(device) for indexer in self._indexers]
        packer.add("indexer loss", sum(indexer_losses, torch.zeros((), dtype=torch.float64, device=device)).view(1))
        packer.add("loss metric sums", self._tp_dedup(self._loss_metrics.sums(device)))
        own_maxima = self._loss_metrics.maxima(device)
        maxima = own_maxima.new_zeros(world.size, len(own_maxima))
        maxima[world.rank] = own_maxima
        packer.add("loss metric maxima", maxima)
        packer.add("squared grad norm", local_norm_sq(self._clipped, skip=self._duplicate_params))
        packer.add("flags", torch.tensor(flags, device=device))
        # One slot per rank, so that a sum over ranks can yield the maximum.
        memory = torch.zeros(world.size, dtype=torch.float64, device=device)
        memory[world.rank] = peak_memory_gib(device.type)
        packer.add("memory", memory)
        num_experts = self._num_choices
        router_stats = self._local_router_stats(device).split([5, *[num_experts] * 3], 1)
        for name, stats in zip(("layer scalars", "expert counts", "thresholds", "biases"), router_stats, strict=True):
            packer.add(name, stats)
        total_s, waited_s = self._comm_timer.read()
        times = torch.zeros(world.size, NUM_TIMES, dtype=torch.float64, device=device)
        if total_s:
            # Element by element: copying a list would synchronise the host with the device.
            times[world.rank, COMPUTE] = total_s - waited_s
            times[world.rank, DATA] = data_s
            times[world.rank, COMM] = waited_s
        packer.add("rank times", times)
        packer.add("offload", self._offload_metrics(device))
        packer.add("receive loads", local_receive_load(self.model, self._cfg.parallel, self._cfg.moe))
        by_part = torch.zeros(world.size, 2 * len(PARTS) if memory_tracker else 0, dtype=torch.float64, device=device)
        if memory_tracker is not None:
            from moefold.parallel.memory_tracking import bytes_by_part

            by_part[world.rank] = torch.tensor(bytes_by_part(memory_tracker), dtype=torch.float64, device=device)
        packer.add("memory by part", by_part)
        packer.add("perturbed losses", loss.new_zeros(0) if self._passes is None else self._passes.local_losses())
        meter = self.attention_meter
        packer.add("attention", loss.new_zeros(0) if meter is None else meter.local_statistics(device))
        sums = packer.all_reduce(world)
        totals = packer.unpack(sums.cpu())
        losses = totals["losses"].tolist()
        num_terms = len(self._loss_terms)
        projected = None if self._passes is None else self._passes.project(totals["perturbed losses"], step)
        return ReducedMetrics(
            loss_terms=dict(zip(self._loss_terms, losses[:num_terms], strict=True)),
            loss_metrics=self._loss_metrics.by_name(totals["loss metric sums"], totals["loss metric maxima"].amax(0)),
            mtp_loss=losses[num_terms] if len(losses) > num_terms else None,
            indexer_loss=float(totals["indexer loss"]),
            device_grad_norm=packer.unpack(sums)["squared grad norm"].sqrt(),
            # The mean square of a projection is the squared norm.
            grad_norm=abs(projected.value) if projected else float(totals["squared grad norm"].sqrt()),
            projected=projected,
            flags=tuple(int(count) for count in totals["flags"].tolist()),
            peak_memory_gib=float(totals["memory"].max()),
            rank_times=totals["rank times"],
            layer_scalars=totals["layer scalars"],
            expert_counts=totals["expert counts"],
            thresholds=totals["thresholds"],
            biases=totals["biases"],
            offload=tuple(totals["offload"].tolist()),
            receive_loads=totals["receive loads"],
            memory=totals["memory by part"],
            attention=None if meter is None else meter.metrics(totals["attention"]),
        )

    def _result(
        self, totals: ReducedMetrics, rate: float, decision: StepDecision, nonfinite_report: "NonFiniteReport | None"
    ) -> StepResult:
        aux, z, routed_tokens, dropped, _ = totals.layer_scalars.sum(0).tolist()
        layers = self._layer_metrics(
            totals.layer_scalars.tolist(), totals.expert_counts.tolist(), totals.biases.tolist()
        )
        return StepResult(
            loss=totals.loss,
            loss_terms=totals.loss_terms,
            loss_metrics=totals.loss_metrics,
            aux_loss=aux,
            z_loss=z,
            mtp_loss=totals.mtp_loss or 0.0,
            indexer_loss=totals.indexer_loss,
            grad_norm=totals.grad_norm,
            projected_gradient=None if totals.projected is None else totals.projected.rounded,
            lr=rate,
            expert_load=tuple(layer.load for layer in layers),
            expert_counts=totals.expert_counts.long().numpy(),
            dropped_fraction=dropped / routed_tokens if routed_tokens else 0.0,
            moe_layers=layers,
            flags=totals.flags,
            peak_memory_gib=totals.peak_memory_gib,
            rank_times=totals.rank_times.numpy(),
            memory_by_part=MemoryByPart.from_ranks(totals.memory.tolist()) if totals.memory.numel() else None,
            offload=OffloadMetrics.from_sums(totals.offload, len(totals.rank_times)) if totals.offload else None,
            attention=totals.attention,
            decision=decision,
            nonfinite_report=nonfinite_report,
        )

    def _offload_metrics(self, device: torch.device) -> Tensor:
        """Return the activation-offload statistics of this rank, [4], or [0] without offload."""
        numbers = () if self.model.offload is None else astuple(self.model.offload.end_step())
        return torch.tensor(numbers, dtype=torch.float64, device=device)

    def _local_router_stats(self, device: torch.device) -> Tensor:
        """Return this rank's part of every MoE layer's router statistics, [MoE layers, 5 + 3 * E].

        The columns are five scalars, then counts, thresholds and biases.
        """
        num_experts = self._num_choices
        rows = torch.zeros(len(self._moe_numbers), 5 + 3 * num_experts, dtype=torch.float64, device=device)
        for number, layer in self.model.moe_layers().items():
            stats = layer.stats
            bias_E = layer.router.expert_bias
            parts = [
                torch.stack(
                    [x.double() for x in (stats.aux, stats.z, stats.routed_tokens, stats.dropped, stats.entropy)]
                )
            ]
            parts += [stats.tokens_per_expert_E.double(), stats.thresholds_E]
            if bias_E is not None and self._is_first_in_stage:
                parts.append(bias_E.double())
            row = torch.cat(parts)
            rows[self._moe_numbers.index(number), : len(row)] = row
        return rows

    @property
    def _num_choices(self) -> int:
        """Choices of a router; 0 in a model without one."""
        routed = self._cfg.model.routed
        return routed.num_choices if routed else 0

    def _update_routers(self, counts: Tensor, thresholds: Tensor) -> None:
        """Pass the totals of the global batch to the routers of every MoE layer, [MoE layers, E]."""
        for number, layer in self.model.moe_layers().items():
            i = self._moe_numbers.index(number)
            layer.end_step(counts[i], thresholds[i])

    def _layer_metrics(
        self, scalars: list[list[float]], counts: list[list[float]], biases: list[list[float]]
    ) -> tuple[MoELayerMetrics, ...]:
        part = self._cfg.model.routed
        if part is None:
            return ()
        return tuple(
            MoELayerMetrics.from_totals(
                number,
                counts=counts[i][: part.num_experts],
                zero_counts=counts[i][part.num_experts :],
                dropped=scalars[i][3],
                entropy=scalars[i][4],
                top_k=part.top_k,
                losses=(scalars[i][0], scalars[i][1]),
                bias=biases[i][: part.num_experts] if part.expert_bias else (),
            )
            for i, number in enumerate(self._moe_numbers)
        )


class MetricPacker:
    """Named tensors that one all-reduce sums over the ranks, in float64."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Add this rank's summand; the same names and shapes on every rank."""
        self._tensors[name] = tensor

    def all_reduce(self, group: Group) -> Tensor:
        """Sum all tensors over the members; the sums in one flat tensor, which `unpack` splits. Collective."""
        return all_reduce_sum(torch.cat([tensor.flatten().double() for tensor in self._tensors.values()]), group)

    def unpack(self, sums: Tensor) -> dict[str, Tensor]:
        """Split the flat tensor, or a copy of it on the host, by name and shape."""
        parts = sums.split([tensor.numel() for tensor in self._tensors.values()])
        return {
            name: part.view(tensor.shape) for (name, tensor), part in zip(self._tensors.items(), parts, strict=True)
        }
