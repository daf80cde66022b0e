"""Time of data parallelism: parameter all-gathers, gradient reductions, and the optimizer's update.

A matrix that the optimizer gathers for its update is full on one rank of its stage, its owner. The work is balanced
over the ranks, and a rank that holds the full matrix anyway is its owner.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from moefold.config.base.param_spec import ParamSpec
from moefold.config.base.part import Part
from moefold.config.groups.optimizer import StateSpec
from moefold.cost.hardware import Device
from moefold.cost.layer_spec import embedding_weight, head_weights, mtp_layer_weights
from moefold.cost.memoised import all_arguments, memoised
from moefold.cost.state_bytes import ITEM_BYTES
from moefold.planner.cost_model.collective import RankGroup, all_gather_s, all_reduce_s, all_to_all_s
from moefold.planner.cost_model.gemm import GemmCost
from moefold.planner.cost_model.workload import TrainingWorkload
from moefold.planner.mapping import OFFLOADED_OPTIMIZER, ParallelMapping
from moefold.planner.model_spec import ModelSpec, layer_parameters
from moefold.topology.schedules import schedule_named

MASTER_DTYPES = {"bfloat16": "float32", "float32": "float32", "float64": "float64"}
"""Dtype of weights, gradients and GEMMs of an update, by the compute type."""


class GatheredRankCost(NamedTuple):
    """Cost of the gathered matrices of one rank in one update."""

    num_local: float
    """Elements in the rank's shards."""
    local_bytes: float
    """Memory traffic on the shards."""
    owned_bytes: float
    """Memory traffic on the full matrices that the rank owns."""
    seconds: float
    """Seconds of the GEMMs and the all-to-alls."""


class GatheredMatrixCost:
    """Cost model of the matrices of one model that the optimizer gathers.

    Args:
        device: a device with a known rate for GEMMs in the dtype of the master weights.

    Raises:
        ConfigError: the rate of these GEMMs is unknown.
    """

    def __init__(self, model_spec: ModelSpec, device: Device, workload: TrainingWorkload) -> None:
        self._model_spec = model_spec
        self._model_config = model_spec.config
        self._device = device
        self._optimizer = workload.optimizer
        master = replace(workload, precision="bf16", dtype=MASTER_DTYPES[workload.dtype])
        self._gemm = GemmCost(device, master)
        self._value_bytes = master.value_bytes

    def rank_cost(self, mapping: ParallelMapping, counts: tuple[int, ...], has_loss: bool) -> GatheredRankCost:
        """Return the cost of a rank whose stages have `counts` layers of each kind."""
        ranks = mapping.world_size // mapping.pp
        layers = zip(counts, self._model_spec.kinds, strict=True)
        weights = [(count, weight) for count, layer in layers for weight in layer.params]
        if has_loss:
            # The projection of an MTP layer, which other layers do not have.
            mtp = mtp_layer_weights(self._model_config)
            weights += [(self._model_config.mtp_layers, weight) for weight in mtp if weight.part == "mtp"]
        num_local = local_bytes = owned_bytes = seconds = longest = 0.0
        moved = [0.0, 0.0]
        for count, weight in weights:
            if not (count and self._optimizer.gathers(weight)):
                continue
            numel, sent, returned = _shard_matrix(weight, mapping, ranks)
            work = self._optimizer.matrix_work(weight.shape[-2], weight.shape[-1])
            matrix_s = self._matrix_s(weight.shape[-2], weight.shape[-1])
            num_local += count * numel
            local_bytes += count * numel * self._optimizer.traffic(weight)
            owned_bytes += count * weight.numel * work.traffic
            moved = [moved[0] + count * sent, moved[1] + count * returned]
            seconds += count * matrix_s * (weight.shape[0] if weight.is_expert else 1)
            longest = max(longest, matrix_s)
        # A matrix has a single owner, so the longest matrix is a lower bound.
        seconds = max(seconds / ranks, longest)
        group = RankGroup(ranks, 1)
        for numel in filter(None, moved):
            seconds += all_to_all_s(self._device, group, numel * self._value_bytes / ranks)
        return GatheredRankCost(num_local, local_bytes, owned_bytes / ranks, seconds)

    @memoised(all_arguments)
    def _matrix_s(self, rows: int, columns: int) -> float:
        """Return the seconds of the GEMMs and the kernel launches of one matrix."""
        work = self._optimizer.matrix_work(rows, columns)
        launches = len(work.gemms) * work.rounds + work.num_other_kernels
        gemms_s: float = sum(self._gemm.matmul_s(*sizes) for sizes in work.gemms)
        return work.rounds * gemms_s + launches * self._device.kernel_gap_s


def _shard_matrix(weight: ParamSpec, mapping: ParallelMapping, num_ranks: int) -> tuple[float, float, float]:
    """Return the elements of a matrix on each rank, and the elements that all ranks send to its owner and get back."""
    local = weight.shard(mapping.tp, mapping.ep, mapping.etp)
    degree = 1
    if mapping.zero and mapping.world_size > 1:
        degree = mapping.edp if weight.is_expert else mapping.dp * mapping.cp
    is_whole = local.shape[-2:] == weight.shape[-2:] and (
        degree == 1 or (weight.is_expert and local.dp_shards(degree).total_rows == local.shape[0])
    )
    num_local = local.numel / degree
    replicas = num_ranks * num_local / weight.numel
    # A rank that holds the full matrix is its owner: nothing is sent, and the other replicas receive the update.
    return num_local, 0.0 if is_whole else weight.numel, (replicas - is_whole) * weight.numel


HIDDEN_DP_FRACTION = 0.9
"""Part of the gradient reductions and parameter all-gathers that the last backward and the first forward can hide."""

EXPOSED_ZERO3_FRACTION = 0.1399
"""Part of the ZeRO-3 all-gathers and reduce-scatters of each micro-batch that compute does not hide even where there is
enough of it. They share multiprocessors, memory and NVLink or network cards with the kernels and the expert all-to-all.
A prefetch of one layer does not hide a gather that is longer than the layer before."""

COPY_BYTES = (4, 8)
"""Memory traffic of FSDP2 for each gathered parameter (copied out of the flat buffer) and each reduced gradient (cast
and copied into one). Megatron's buffers need no copies."""

GRADIENT_BYTES = 4
"""Type in which gradients are reduced: float32, or float64 if that is the compute type."""

RankContent = tuple[tuple[int, ...], bool, bool]
"""Layers of each kind on a pipeline rank, and whether the rank has the embedding and the loss."""


class DataParallelCost(NamedTuple):
    """Seconds of each data-parallel collective, once, and of the optimizer update."""

    all_gathers_s: float
    """All-gather of all parameters."""
    gradients_s: float
    """Reduction of all gradients."""
    optimizer_s: float
    gather_copies_s: float = 0.0
    """Copies around an all-gather of all parameters, which no other kernel hides."""
    reduce_copies_s: float = 0.0
    """Copies around a reduction of all gradients."""


class DataParallelCostModel:
    """Cost model of the data-parallel collectives and the optimizer update of one model.

    Args:
        rank_contents: returns the contents of each pipeline rank from pp, vpp and the schedule.
    """

    def __init__(
        self,
        model_spec: ModelSpec,
        device: Device,
        workload: TrainingWorkload,
        gemm: GemmCost,
        rank_contents: Callable[[int, int, str | Part], tuple[RankContent, ...]],
    ) -> None:
        self.model_spec = model_spec
        self.device = device
        self.workload = workload
        self.gemm = gemm
        self.rank_contents = rank_contents
        model = model_spec.config
        ends = [(1, (embedding_weight(model),)), (1, head_weights(model)), (model.mtp_layers, mtp_layer_weights(model))]
        layers = [(count, model_spec.kinds[kind].params) for kind, count in Counter(model_spec.layers).items()]
        weights = [(count, weight) for count, unit in (*ends, *layers) for weight in unit]
        optimizer = workload.optimizer
        others = [(count * weight.numel, weight) for count, weight in weights if not optimizer.gathers(weight)]
        self._gathered_cost = None
        if any(count and optimizer.gathers(weight) for count, weight in weights):
            self._gathered_cost = GatheredMatrixCost(model_spec, device, workload)
        self._update_bytes = _mean(others, optimizer.traffic)
        self._moment_bytes = _mean(others, lambda weight: _moment_bytes(optimizer.states(weight)))
        """Bytes of the states of a number, with float32 master weights."""

    def _cost_key(self, m: ParallelMapping) -> tuple[object, ...]:
        groups = m.dp * m.cp, m.tp, m.edp, m.etp * m.ep
        # The owners of gathered matrices depend on all stages, other updates only on the fullest rank.
        stages = (m.ep, m.pp, m.vpp, _placement(m)) if self._gathered_cost else ()
        return (*self.max_parameters(m), *groups, m.zero, OFFLOADED_OPTIMIZER in m.offload, *stages)

    @memoised(_cost_key)
    def cost(self, mapping: ParallelMapping) -> DataParallelCost:
        """Return the seconds of the data-parallel collectives and of the optimizer update."""
        device = self.device
        dense, experts = self.max_parameters(mapping)
        dense_group = RankGroup(mapping.dp * mapping.cp, mapping.tp)
        expert_group = RankGroup(mapping.edp, mapping.etp * mapping.ep)
        value = self.workload.value_bytes
        all_gathers = all_gather_s(device, dense_group, dense * value)
        all_gathers += all_gather_s(device, expert_group, experts * value)
        dtype_factor = max(1.0, value / GRADIENT_BYTES)
        size = dtype_factor * (self.workload.reduce_bytes if mapping.zero == 3 else GRADIENT_BYTES)
        gradients = all_gather_s(device, dense_group, dense * size) + all_gather_s(device, expert_group, experts * size)
        owned = dense / dense_group.size + experts / expert_group.size
        if mapping.zero == 0:
            all_gathers = 0.0
            owned = dense + experts
            gradients = all_reduce_s(device, dense_group, dense * dtype_factor * GRADIENT_BYTES)
            gradients += all_reduce_s(device, expert_group, experts * dtype_factor * GRADIENT_BYTES)
        optimizer = self._update_s(mapping, owned, dtype_factor)
        if OFFLOADED_OPTIMIZER in mapping.offload and not self.workload.is_megatron:
            # Both directions at once (docs/memory.md). Megatron-Core updates on the host.
            optimizer = max(optimizer, owned * self._moment_bytes / device.host_bytes_per_s)
        copies = [0.0, 0.0]
        if mapping.zero == 3 and not self.workload.is_megatron:
            moved = dense * (dense_group.size > 1) + experts * (expert_group.size > 1)
            copies = [self.gemm.memory_bound_s(moved * size) for size in COPY_BYTES]
        return DataParallelCost(all_gathers, gradients, optimizer, *copies)

    def _update_s(self, mapping: ParallelMapping, num_owned: float, dtype_factor: float) -> float:
        """Return the seconds of the optimizer update on the fullest rank, with its states on the device."""
        passes = self.gemm.memory_bound_s
        if self._gathered_cost is None:
            return float(passes(num_owned * dtype_factor * self._update_bytes))
        found = 0.0
        for counts, _, has_loss in dict.fromkeys(self.rank_contents(mapping.pp, mapping.vpp, mapping.schedule)):
            share = self._gathered_cost.rank_cost(mapping, counts, has_loss)
            others = max(0.0, num_owned - share.num_local) * self._update_bytes
            moved = others + share.local_bytes + share.owned_bytes
            found = max(found, share.seconds + passes(dtype_factor * moved))
        return found

    @memoised(lambda self, m: (m.tp, m.ep * m.etp, m.pp, m.vpp, _placement(m)))
    def max_parameters(self, mapping: ParallelMapping) -> tuple[float, float]:
        """Return the parameters of the fullest rank: outside the experts, and of the experts."""
        sizes = [layer_parameters(layer) for layer in self.model_spec.kinds]
        ends = self.model_spec.config.vocab_size * self.model_spec.config.hidden_size
        fullest = (0.0, 0.0)
        for counts, has_embedding, has_loss in self.rank_contents(mapping.pp, mapping.vpp, mapping.schedule):
            dense = sum(count * size[0] for count, size in zip(counts, sizes, strict=True))
            experts = sum(count * size[1] for count, size in zip(counts, sizes, strict=True))
            dense += ends * (has_embedding + has_loss)
            fullest = max(fullest, (dense / mapping.tp, experts / (mapping.ep * mapping.etp)), key=sum)
        return fullest

    def exposed_s(
        self, mapping: ParallelMapping, comm: DataParallelCost, forward_s: Any, backward_s: Any, num_micro_batches: int
    ) -> Any:
        """Return the exposed seconds of the data-parallel collectives in one step."""
        all_gathers = comm.all_gathers_s
        gradients = comm.gradients_s
        if mapping.overlap and not self.workload.is_megatron:
            # Two micro-batches at a time need all parameters before the first pass (docs/pipeline.md).
            forward_s = 0.0
        if not self.workload.overlaps_dp_comm:
            forwards = all_gathers
            backwards = (all_gathers if mapping.zero == 3 else 0.0) + gradients
        elif mapping.zero == 3:
            # The first all-gather of a pass and the last reduction have nothing to run under.
            layers = max(1.0, len(self.model_spec.layers) / mapping.pp)
            forwards = all_gathers / layers + self._exposed_zero3_s(all_gathers, forward_s) + comm.gather_copies_s
            backwards = gradients / layers + self._exposed_zero3_s(gradients + all_gathers, backward_s)
            backwards = backwards + comm.gather_copies_s + comm.reduce_copies_s
        else:
            forwards = _exposed_comm_s(all_gathers, forward_s)
            backwards = _exposed_comm_s(gradients, backward_s)
        return (num_micro_batches if mapping.zero == 3 else 1) * forwards + (
            num_micro_batches if mapping.zero > 1 else 1
        ) * backwards

    def _exposed_zero3_s(self, comm: float, compute: Any) -> Any:
        """Return the exposed seconds of the collectives of one micro-batch under ZeRO-3."""
        measured = self.device.exposed_zero3_fraction
        exposed = EXPOSED_ZERO3_FRACTION if measured is None else measured
        return np.maximum(exposed * comm, comm - (1 - exposed) * compute)


def _placement(mapping: ParallelMapping) -> str:
    return schedule_named(mapping.schedule).placement


def _mean(weights: Sequence[tuple[int, ParamSpec]], value: Callable[[ParamSpec], float]) -> float:
    """Return the mean of a value over the elements of weights, each with their number, or 0 without a weight."""
    total = sum(numel for numel, _ in weights)
    return sum(numel * value(weight) for numel, weight in weights) / total if total else 0.0


def _moment_bytes(states: Sequence[StateSpec]) -> int:
    return sum(ITEM_BYTES[state.dtype or "float32"] for state in states if not (state.is_count or state.is_kept))


def _exposed_comm_s(comm: float, compute: Any) -> Any:
    """Return the exposed seconds of a collective that overlaps with `compute` seconds, a number or an array."""
    return np.maximum((1 - HIDDEN_DP_FRACTION) * comm, comm - compute)
