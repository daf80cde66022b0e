"""Measurements of a training step: the numbers of each rank, and one all-reduce of all of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from moefold.comm.collectives import all_reduce_sum
from moefold.comm.groups import Group
from moefold.config.chosen import chosen_in
from moefold.config.groups.context import ContextPart
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.train import TrainConfig
from moefold.host.memory import peak_resident_gib
from moefold.metrics.moe_metrics import MoELayerMetrics
from moefold.metrics.rank_times import COMM, COMPUTE, DATA, NUM_TIMES
from moefold.model.loss_metrics import MISMATCH
from moefold.parallel.gradients import local_norm_sq
from moefold.parallel.parallel_model import ParallelModel
from moefold.train.step_guard import Mismatch, StepDecision
from moefold.units import GIB

if TYPE_CHECKING:
    from moefold.config.groups.optimizer import ForwardPasses, ProjectedGradient
    from moefold.metrics.memory_tracker import MemoryTracker
    from moefold.metrics.replica_metrics import ReplicaMetrics
    from moefold.parallel.memory_tracking import MemoryByPart
    from moefold.parallel.replica_check import HostFact
    from moefold.train.attention_meter import AttentionMeter
    from moefold.train.nonfinite import NonFiniteReport


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Results of a step over the global batch, equal on all ranks. `metrics.definitions.STEP` defines the numbers."""

    loss: float
    aux_loss: float
    z_loss: float
    mtp_loss: float = 0.0
    indexer_loss: float = 0.0
    grad_norm: float
    projected_gradient: float | None = None
    lr: float
    expert_load: tuple[float, ...]
    dropped_fraction: float
    moe_layers: tuple[MoELayerMetrics, ...] = ()
    replicas: "ReplicaMetrics | None" = None
    offload: dict[str, float] | None = None
    memory_by_part: "MemoryByPart | None" = None
    attention: dict[str, float] = field(default_factory=dict)
    """Numbers of planned attention by name, see `AttentionMeter.metrics`, or empty without it."""
    expert_counts: np.ndarray
    """Routed tokens per expert of each MoE layer, before token drop, int64 [MoE layers, E]."""
    flags: tuple[int, ...]
    """For each flag given to `run`: the number of ranks that raised it."""
    peak_memory_gib: float
    """Largest peak memory over the ranks since they started, up to the gradients of this step."""
    rank_times: np.ndarray = field(default_factory=lambda: np.zeros((0, NUM_TIMES)))
    """Compute, data and communication time of each rank in seconds, float64 [ranks, 3]. See `metrics.rank_times`."""
    decision: StepDecision = StepDecision("update")
    """Decision of the guard: whether weights, moments and expert bias were updated."""
    nonfinite_report: "NonFiniteReport | None" = None
    """Ranks and parameters with non-finite values, or None after a finite step."""
    loss_terms: dict[str, float] = field(default_factory=dict)
    """The terms of the loss function by name."""
    loss_metrics: dict[str, float] = field(default_factory=dict)
    """The metrics of the loss function by name: logged, not minimised."""

    def numbers(self) -> dict[str, Any]:
        """Return the numbers by name that the table of metrics has."""
        from moefold.metrics.definitions import STEP

        own = {metric.name: getattr(self, metric.name) for metric in STEP if hasattr(self, metric.name)}
        return own | self.attention

    def guarded_metrics(self) -> dict[str, float]:
        """Return the values that must be finite, by their name in a message."""
        others = {"MTP loss": self.mtp_loss, "indexer loss": self.indexer_loss}
        losses = {"loss": self.loss, "balance loss": self.aux_loss, "z loss": self.z_loss}
        return losses | {name: value for name, value in others.items() if value} | {"gradient norm": self.grad_norm}

    def mismatch(self, limit: float | None) -> Mismatch | None:
        """Return the mismatch of sampler and training, or None without a limit or a trained token."""
        mean = self.loss_metrics.get(MISMATCH)
        return None if limit is None or mean is None else Mismatch(mean, limit)


@dataclass(frozen=True)
class StepTotals:
    """Sums over all ranks that an update needs, next to the result, the same on every rank."""

    result: StepResult
    """Result of the step, still without the decision and the report of the guard."""
    device_grad_norm: Tensor
    """Gradient norm, 0-dim on the device, so that clipping needs no host synchronisation."""
    expert_counts: Tensor
    """Routed tokens per expert, [MoE layers, E], like `thresholds`."""
    thresholds: Tensor
    receive_loads: Tensor
    """Largest receive load of each rank, [ranks], or [0] if the dispatcher always has room."""
    projected: "ProjectedGradient | None"
    """Gradient of forward passes (`OptimizerPart.passes`), or None with gradients."""


class StepMeter:
    """Measures the steps of a rank, and reduces the numbers of all ranks.

    Args:
        clipped: the parameters whose gradients count in the norm, by name.
        passes: forward passes of an optimizer without gradients, from `OptimizerPart.passes`, or None with gradients.
    """

    def __init__(
        self,
        model: ParallelModel,
        clipped: dict[str, nn.Parameter],
        passes: "ForwardPasses | None",
        parallel: ParallelConfig,
        train: TrainConfig,
    ) -> None:
        self.clipped = clipped
        self._passes = passes
        self._model = model
        self._routed = model.stages[0].config.routed
        self._moe_numbers = model.stages[0].config.moe_layer_numbers
        self._indexers = [indexer for stage in model.stages for indexer in stage.indexers().values()]
        self._loss_terms = model.stages[0].loss.terms
        self._loss_metrics = model.stages[-1].loss_metrics
        self._attention: AttentionMeter | None = None
        if chosen_in(parallel, ContextPart).is_planned:
            from moefold.train import attention_meter

            self._attention = attention_meter.AttentionMeter(model, parallel, train)
        self._duplicate_params = model.duplicate_params
        self._data_s = 0.0

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Load the next batch inside this context: the time counts as part of its step."""
        groups = self._model.groups
        groups.world.comm_timer.start()
        started_s = groups.recorder.clock()
        yield
        self._data_s = groups.recorder.clock() - started_s

    def begin_step(self) -> None:
        """Forget the numbers of earlier passes."""
        self._loss_metrics.reset()
        if self._attention is not None:
            self._attention.begin_step()
        for indexer in self._indexers:
            indexer.begin_step()

    def plan_facts(self) -> "list[HostFact]":
        """Return the facts of planned attention that the replica check compares."""
        return [] if self._attention is None else self._attention.host_facts()

    def own_loss(self, losses: Tensor) -> Tensor:
        """Sum the terms of the loss function, without the MTP loss, [1]."""
        return self._tp_dedup(losses[: len(self._loss_terms)].sum(0, keepdim=True))

    def _tp_dedup(self, loss: Tensor) -> Tensor:
        """Return the loss on TP rank 0 and zero elsewhere: all TP ranks compute the same token losses."""
        return loss if self._model.groups.attn.tp.rank == 0 else torch.zeros_like(loss)

    def reduce(
        self, loss: Tensor, step: int, flags: Sequence[bool], memory_tracker: "MemoryTracker | None", rate: float
    ) -> StepTotals:
        """Sum all numbers of a step over the ranks, in one all-reduce."""
        own = self._own_numbers(loss, flags, memory_tracker)
        device_sums = all_reduce_sum(own.packed(), self._model.groups.world)
        sums = own.unpack(device_sums.cpu())
        projected = None if self._passes is None else self._passes.project(sums.perturbed_losses, step)
        return StepTotals(
            self._result(sums, rate, projected),
            device_grad_norm=own.unpack(device_sums).squared_grad_norm.sqrt(),
            expert_counts=sums.expert_counts,
            thresholds=sums.thresholds,
            receive_loads=sums.receive_loads,
            projected=projected,
        )

    def _own_numbers(
        self, loss: Tensor, flags: Sequence[bool], memory_tracker: "MemoryTracker | None"
    ) -> "StepNumbers":
        world = self._model.groups.world
        device = loss.device
        indexer_losses = [indexer.loss_sum.to(device) for indexer in self._indexers]
        memory = torch.full((1,), peak_memory_gib(device.type), dtype=torch.float64, device=device)
        scalars, counts, thresholds, biases = self._local_router_stats(device).split([5, *[self._num_choices] * 3], 1)
        rank_times = _row_of_rank(self._times(device), world)
        offload = () if self._model.offload is None else astuple(self._model.offload.end_step())
        nothing = torch.zeros(0, dtype=torch.float64, device=device)
        by_part = nothing
        if memory_tracker is not None:
            from moefold.parallel.memory_tracking import bytes_by_part

            by_part = torch.tensor(bytes_by_part(memory_tracker), dtype=torch.float64, device=device)
        return StepNumbers(
            losses=self._tp_dedup(loss.detach()),
            indexer_loss=sum(indexer_losses, torch.zeros((), dtype=torch.float64, device=device)).view(1),
            metric_sums=self._tp_dedup(self._loss_metrics.sums(device)),
            metric_maxima=_row_of_rank(self._loss_metrics.maxima(device), world),
            squared_grad_norm=local_norm_sq(self.clipped, skip=self._duplicate_params),
            flags=torch.tensor(flags, device=device),
            memory=_row_of_rank(memory, world),
            layer_scalars=scalars,
            expert_counts=counts,
            thresholds=thresholds,
            biases=biases,
            rank_times=rank_times,
            offload=torch.tensor(offload, dtype=torch.float64, device=device),
            receive_loads=self._model.local_receive_load(),
            memory_by_part=_row_of_rank(by_part, world),
            perturbed_losses=loss.new_zeros(0) if self._passes is None else self._passes.local_losses(),
            attention=nothing if self._attention is None else self._attention.local_statistics(device),
        )

    def _result(self, sums: "StepNumbers", rate: float, projected: "ProjectedGradient | None") -> StepResult:
        """Return the metrics of a step from the sums over all ranks."""
        losses = sums.losses.tolist()
        num_terms = len(self._loss_terms)
        terms = dict(zip(self._loss_terms, losses[:num_terms], strict=True))
        aux, z, routed_tokens, dropped, _ = sums.layer_scalars.sum(0).tolist()
        layers = self._layer_metrics(sums.layer_scalars.tolist(), sums.expert_counts.tolist(), sums.biases.tolist())
        times = sums.rank_times
        return StepResult(
            loss=sum(terms.values()),
            loss_terms=terms,
            loss_metrics=self._loss_metrics.by_name(sums.metric_sums, sums.metric_maxima.amax(0)),
            aux_loss=aux,
            z_loss=z,
            mtp_loss=losses[num_terms] if len(losses) > num_terms else 0.0,
            indexer_loss=float(sums.indexer_loss),
            # The mean square of a projection is the squared norm.
            grad_norm=abs(projected.value) if projected else float(sums.squared_grad_norm.sqrt()),
            projected_gradient=None if projected is None else projected.rounded,
            lr=rate,
            expert_load=tuple(layer.load for layer in layers),
            expert_counts=sums.expert_counts.long().numpy(),
            dropped_fraction=dropped / routed_tokens if routed_tokens else 0.0,
            moe_layers=layers,
            flags=tuple(int(count) for count in sums.flags.tolist()),
            peak_memory_gib=float(sums.memory.max()),
            rank_times=times.numpy(),
            memory_by_part=_memory_by_part(sums.memory_by_part),
            offload=(offload_metrics(sums.offload.tolist(), len(times)) if sums.offload.numel() else None),
            attention={} if self._attention is None else self._attention.metrics(sums.attention),
        )

    def _times(self, device: torch.device) -> Tensor:
        """Return compute, data and communication time of this rank in seconds, [3], or zeros if nothing is timed."""
        times = torch.zeros(NUM_TIMES, dtype=torch.float64, device=device)
        total_s, waited_s = self._model.groups.world.comm_timer.read()
        if total_s:
            # Element by element: copying a list would synchronise the host with the device.
            times[COMPUTE] = total_s - waited_s
            times[DATA] = self._data_s
            times[COMM] = waited_s
        return times

    def _local_router_stats(self, device: torch.device) -> Tensor:
        """Return this rank's part of every MoE layer's router statistics, [MoE layers, 5 + 3 * E].

        The columns are five scalars, then counts, thresholds and biases.
        """
        rows = torch.zeros(len(self._moe_numbers), 5 + 3 * self._num_choices, dtype=torch.float64, device=device)
        for number, layer in self._model.moe_layers().items():
            stats = layer.stats
            bias_E = layer.router.expert_bias
            columns = [
                torch.stack(
                    [x.double() for x in (stats.aux, stats.z, stats.routed_tokens, stats.dropped, stats.entropy)]
                )
            ]
            columns += [stats.tokens_per_expert_E.double(), stats.thresholds_E]
            if bias_E is not None and self._model.groups.attn.stage.rank == 0:
                columns.append(bias_E.double())
            row = torch.cat(columns)
            rows[self._moe_numbers.index(number), : len(row)] = row
        return rows

    @property
    def _num_choices(self) -> int:
        """Number of experts that a router chooses, 0 in a model without routers."""
        return self._routed.num_choices if self._routed else 0

    def _layer_metrics(
        self, scalars: list[list[float]], counts: list[list[float]], biases: list[list[float]]
    ) -> tuple[MoELayerMetrics, ...]:
        part = self._routed
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
                bias=biases[i][: part.num_experts] if part.router.expert_bias else (),
            )
            for i, number in enumerate(self._moe_numbers)
        )


def _memory_by_part(ranks_bytes: Tensor) -> "MemoryByPart | None":
    if not ranks_bytes.numel():
        return None
    from moefold.parallel.memory_tracking import MemoryByPart

    return MemoryByPart.from_ranks(ranks_bytes.tolist())


def _row_of_rank(row: Tensor, group: Group) -> Tensor:
    """Return [ranks, ...] with this rank's row and zeros: the sum over the ranks has all rows."""
    rows = row.new_zeros(group.size, *row.shape)
    rows[group.rank] = row
    return rows


class StepNumbers(NamedTuple):
    """Numbers of a step that one all-reduce sums: of one rank, or their sums. Shapes are equal on every rank."""

    losses: Tensor
    """Terms of the loss, then of multi-token prediction."""
    indexer_loss: Tensor
    metric_sums: Tensor
    """Metrics of the loss, like `metric_maxima`, which has a row for each rank."""
    metric_maxima: Tensor
    squared_grad_norm: Tensor
    flags: Tensor
    memory: Tensor
    """GiB, a row for each rank."""
    layer_scalars: Tensor
    """Five numbers of each MoE layer, see `_local_router_stats`, like the next three."""
    expert_counts: Tensor
    thresholds: Tensor
    biases: Tensor
    rank_times: Tensor
    """A row for each rank."""
    offload: Tensor
    receive_loads: Tensor
    memory_by_part: Tensor
    """A row for each rank."""
    perturbed_losses: Tensor
    """Losses of the forward passes of an optimizer without gradients."""
    attention: Tensor

    def packed(self) -> Tensor:
        """Return all numbers in one flat tensor, in float64."""
        return torch.cat([numbers.flatten().double() for numbers in self])

    def unpack(self, sums: Tensor) -> "StepNumbers":
        """Split a flat tensor, which may be on another device, into numbers of the same shapes."""
        parts = sums.split([numbers.numel() for numbers in self])
        return StepNumbers(*(part.view(numbers.shape) for part, numbers in zip(parts, self, strict=True)))


def offload_metrics(sums: Sequence[float], num_ranks: int) -> dict[str, float]:
    """Compute `metrics.definitions.OFFLOAD` from sums over ranks: bytes stored and kept, transfer and wait seconds."""
    stored_bytes, kept_bytes, io_s, waited_s = sums
    return {
        "stored_gib": stored_bytes / GIB,
        "kept_gib": kept_bytes / GIB,
        "io_s": io_s / num_ranks,
        "waited_s": waited_s / num_ranks,
    }


def peak_memory_gib(device_type: str) -> float:
    """Return the peak memory of this process in GiB, since it started.

    On CUDA this is the peak of allocated tensor bytes, which the recipe's sizes determine. The unused blocks of the
    caching allocator, the CUDA context and NCCL's buffers need additional memory, so leave a reserve. On a CPU it is
    the peak resident set, because torch has no CPU tensor statistics.
    """
    return float(torch.cuda.max_memory_allocated()) / GIB if device_type == "cuda" else peak_resident_gib()
