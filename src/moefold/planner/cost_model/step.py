"""The time of one optimizer step under a mapping, by part. Torch-free.

`CostModel` is made once for a model, a device and a workload; it prices each part once for the few integers that the part
depends on, so that a search of many thousand mappings adds up numbers it already has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moefold.config.schema import RECOMPUTE_PARTS
from moefold.cost.hardware import Device
from moefold.planner.cost_model.collective import RankGroup, all_gather_s, all_reduce_s, p2p_s
from moefold.planner.cost_model.layer import BlockTime, CostItem, DirectionCost, LayerCostModel
from moefold.planner.cost_model.muon import build_muon_cost
from moefold.planner.cost_model.workload import TrainingWorkload, bubble_s, elementwise_max
from moefold.planner.mapping import ParallelMapping
from moefold.planner.memory.activations import ActivationMemoryTable, MemoryStrategies, memory_strategy, minimal_config
from moefold.planner.memory.columns import build_columns
from moefold.planner.model_spec import ModelSpec, expert_parameters, layer_parameters, shared_parameters, train_flops
from moefold.planner.stages import ModelChunk, StageSplitter, chunks_of_rank, make_stage_splitter
from moefold.topology.schedule_tables import SCHEDULES

COMM_PARTS = ("tp_comm", "cp_comm", "etp_comm", "ep_comm", "pp_comm", "dp_comm")
LAYER_PARTS = ("attention", "dense_mlp", "experts", "shared_experts", "router", "permute")
COMPUTE_PARTS = (*LAYER_PARTS, "head", "recompute", "launch", "offload")
TIME_PARTS = (*COMPUTE_PARTS, *COMM_PARTS, "bubble", "optimizer")
"""Every second of a step belongs to one of them."""

HIDDEN_ALL_TO_ALL_FRACTION = 0.708
"""Part of the experts' exchange that overlap can hide, where there is compute enough; the rest starts and ends with
nothing to run beside it. arXiv:2603.07685: from 20-60 % of a step to under 5 % of it."""

HIDDEN_TP_FRACTION = 0.7
"""Part of tensor parallelism's collectives that overlap in pieces hides (`overlaps_tensor`)."""

HIDDEN_P2P_FRACTION = 0.8
"""Part of the sends between stages that interleaved schedules hide under other chunks."""

HIDDEN_DP_FRACTION = 0.9
"""Part of the gradients' and parameters' collectives that can run under the last backward and the first forward."""

GRADIENT_BYTES = 4
"""Gradients are summed in float32, or in float64 where that is the compute type."""

MUON_OWNER_BYTES_PER_PARAM = 52
"""Of the numbers that a rank works on for all: packed, unpacked and normalised there, scaled, and packed again."""

MEGATRON_OFFLOAD_BYTES_PER_PARAM = 6
"""Over the host's link for each parameter whose optimizer state lives there: gradient down, weight up."""

MOMENT_OFFLOAD_BYTES_PER_PARAM = 8
"""Each way over the host's link, both at once, for each parameter whose moments live there (docs/memory.md)."""

EXPOSED_OFFLOAD_FRACTION = 0.05
"""Part of carrying activations to the host and back that shows where work is enough to hide it: copies are launched,
and take bandwidth of the memory that kernels use. 0.2 to 0.3 % of it was measured on a CPU, whose memory was the disk's
cache (docs/memory.md); on GPUs nothing was."""

STEP_OVERHEAD_S = 0.01
"""Of each step, whatever its size: gradient norm across ranks, loss, data, host work between steps."""


Seconds = NDArray[np.float64]

RankContent = tuple[tuple[int, ...], bool, bool]
"""Layers of each kind on a pipeline rank, and whether it embeds and has the loss."""

_RankTime = tuple[float, float, float, tuple[float, ...]]
"""Forward, backward, weights' gradients, and parts."""


@dataclass(frozen=True, slots=True)
class LayerTime:
    """One layer of one micro-batch, exposed seconds only."""

    forward_s: float
    backward_s: float
    wgrad_s: float
    forward_ep_s: float
    backward_ep_s: float
    parts: tuple[float, ...]
    """By the order of PARTS."""


@dataclass(frozen=True, slots=True)
class StageTime:
    """One model chunk of one micro-batch."""

    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    forward_ep_s: float
    """Of `forward_s`: the experts' exchange."""
    backward_ep_s: float
    p2p_s: float
    """To the next chunk, or back."""


class DataParallelCost(NamedTuple):
    """Seconds of data parallelism's collectives, each once, and of the optimizer."""

    all_gathers_s: float
    """Of all parameters."""
    gradients_s: float
    """Of their sums."""
    optimizer_s: float
    expert_all_gathers_s: float
    """Of `all_gathers_s`: the experts'."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """What a step takes, and where the time goes."""

    total_s: float
    parts: dict[str, float]
    """Seconds by part, of the busiest pipeline rank; they add up to `total_s`."""
    num_micro_batches: int
    tokens_per_s_per_gpu: float
    flops_per_token: float
    tflops_per_gpu: float
    mfu: float

    @property
    def exposed_s(self) -> float:
        """Communication that nothing runs beside."""
        return sum(self.parts[name] for name in COMM_PARTS)

    @property
    def bottleneck(self) -> str:
        """The part that takes the most time."""
        return max(self.parts, key=self.parts.__getitem__)


class CostModel:
    """Prices mappings of one model on one device for one workload.

    Args:
        model_spec: the model.
        device: one of its GPUs.
        workload: the batch, and what the software can do.
        activation_memory: what layers keep, which is what offloading carries; None: by a recipe with nothing but the model.
        split: which stage holds what; None: balanced by operations.
    """

    def __init__(
        self,
        model_spec: ModelSpec,
        device: Device,
        workload: TrainingWorkload,
        activation_memory: ActivationMemoryTable | None = None,
        split: StageSplitter | None = None,
    ) -> None:
        self.model_spec, self.device, self.workload = model_spec, device, workload
        self.split = split or make_stage_splitter(model_spec, workload.seq_len)
        self.activation_memory = activation_memory or ActivationMemoryTable(
            model_spec, workload, minimal_config(model_spec, workload), build_columns(model_spec)
        )
        self.layer_costs = LayerCostModel(model_spec, device, workload)
        self._muon_cost = build_muon_cost(model_spec, device, workload)
        self._layer_times: dict[tuple[object, ...], LayerTime] = {}
        self._head_and_loss: dict[tuple[int, int, int], tuple[float, float]] = {}
        self._plain_layers: dict[tuple[int, int, int, int], tuple[float, float]] = {}
        self._data_parallel_costs: dict[tuple[float, ...], DataParallelCost] = {}
        self._max_parameters: dict[tuple[int, ...], tuple[float, float]] = {}
        self._rank_contents: dict[tuple[int, int, bool], tuple[RankContent, ...]] = {}

    @cached_property
    def flops_per_token(self) -> float:
        """Of a training step, in the workload's convention."""
        w = self.workload
        return train_flops(
            self.model_spec, w.seq_len, causal=w.counts_causal_attention, mtp=w.runs_mtp and w.counts_mtp
        )

    def step_time(self, mapping: ParallelMapping) -> StepTime:
        """Price one mapping, which must divide the model and the batch."""
        n = mapping.num_micro_batches(self.workload.global_batch_size)
        layers = tuple(self.layer_time(kind, mapping) for kind in range(len(self.model_spec.kinds)))
        slowest, mean = self._rank_times(mapping, layers)
        forward, backward, weight, parts = slowest
        sends, send_back = self.exposed_p2p_s(mapping, mapping.vpp, n)
        bubble = bubble_s(
            mean[0] + send_back,
            mean[1] + send_back,
            mean[2],
            pp=mapping.pp,
            vpp=mapping.vpp,
            num_micro_batches=n,
            schedule=mapping.schedule,
        )
        replicas = self.data_parallel_cost(mapping)
        dp_comm = self.exposed_data_parallel_s(mapping, replicas, forward, backward, n)
        seconds = dict(zip(TIME_PARTS, (part * n for part in parts), strict=True))
        seconds["pp_comm"] += sends
        seconds["dp_comm"] += dp_comm
        seconds["bubble"] += bubble
        seconds["optimizer"] += replicas.optimizer_s + STEP_OVERHEAD_S
        return self._build_step_time(seconds, n, mapping.world_size)

    def layer_time(self, kind: int, mapping: ParallelMapping) -> LayerTime:
        """One layer of a micro-batch with what recomputation, launches and exposed communication add."""
        key = (
            kind,
            mapping.tp,
            mapping.cp,
            mapping.mbs,
            mapping.ep,
            mapping.etp,
            mapping.dispatcher,
            mapping.recompute,
            mapping.overlap,
            mapping.offload,
        )
        if key not in self._layer_times:
            mixer = self.layer_costs.mixer(kind, mapping.tp, mapping.cp, mapping.mbs)
            feed_forward = self.layer_costs.feed_forward(
                kind, mapping.tp, mapping.cp, mapping.mbs, mapping.ep, mapping.etp, mapping.dispatcher
            )
            away = (
                float(self._offloaded_bytes(kind, mapping, MemoryStrategies((memory_strategy(mapping),)))[0])
                if mapping.offload
                else 0.0
            )
            self._layer_times[key] = self._sum_layer(mixer, feed_forward, mapping, away)
        return self._layer_times[key]

    def _sum_layer(
        self, mixer: BlockTime, feed_forward: BlockTime, mapping: ParallelMapping, offloaded_bytes: float
    ) -> LayerTime:
        seconds = dict.fromkeys(TIME_PARTS, 0.0)
        ahead = self._add_direction(mixer.forward + feed_forward.forward, mapping, seconds)
        behind = self._add_direction(feed_forward.backward + mixer.backward, mapping, seconds)
        again = float(_recompute_s(mixer, feed_forward, (mapping.recompute,))[0])
        seconds["recompute"] += again
        waits = self._launch_waits(mixer, feed_forward, (sum(ahead), sum(behind) + again))
        seconds["launch"] += sum(waits)
        carried = [
            self.exposed_offload_s(offloaded_bytes, busy)
            for busy in (sum(ahead) + waits[0], sum(behind) + again + waits[1])
        ]
        seconds["offload"] += sum(carried)
        return LayerTime(
            forward_s=sum(ahead) + waits[0] + carried[0],
            backward_s=sum(behind) + again + waits[1] + carried[1],
            wgrad_s=mixer.wgrad_s + feed_forward.wgrad_s,
            forward_ep_s=ahead[1],
            backward_ep_s=behind[1],
            parts=tuple(seconds.values()),
        )

    def lower_bound_layer_s(self, kind: int, tp: int, cp: int, mbs: int) -> float:
        """Seconds that a layer takes at least for one micro-batch, forward and backward, however its experts are cut.

        The products of the experts run at the speed of large ones, and nothing of them travels.
        """
        mixer, layer = self.layer_costs.mixer(kind, tp, cp, mbs), self.model_spec.kinds[kind].feed_forward
        seconds = sum(work.seconds for work in (*mixer.forward, *mixer.backward) if work.part != "tp_comm")
        if layer is None:
            return seconds
        products, w = self.layer_costs.gemm, self.workload
        factor = min(1.0, w.capacity_factor) if w.capacity_factor else 1.0
        flops = float(shared_parameters(layer, self.model_spec.hidden_size))
        flops += factor * w.effective_imbalance * layer.top_k * expert_parameters(layer, self.model_spec.hidden_size)
        rate = products.flops_per_s * max(1.0, self.device.grouped_fraction)
        return seconds + 6.0 * flops * self.layer_costs.tokens(cp, mbs) / tp / rate

    def plain_layer(self, kind: int, mapping: ParallelMapping) -> tuple[float, float]:
        """Seconds of one layer forward and backward, as `layer_time` has them where nothing saves activations."""
        layer = self.model_spec.kinds[kind].feed_forward
        # Without experts nothing of their degrees counts, and a search asks for each of these.
        key = (kind, mapping.tp, mapping.cp, mapping.mbs)
        if layer is not None and layer.kind == "moe":
            return self._plain_layer(kind, mapping)
        if key not in self._plain_layers:
            self._plain_layers[key] = self._plain_layer(kind, mapping)
        return self._plain_layers[key]

    def _plain_layer(self, kind: int, mapping: ParallelMapping) -> tuple[float, float]:
        mixer = self.layer_costs.mixer(kind, mapping.tp, mapping.cp, mapping.mbs)
        feed_forward = self.layer_costs.feed_forward(
            kind, mapping.tp, mapping.cp, mapping.mbs, mapping.ep, mapping.etp, mapping.dispatcher
        )
        ahead = self._exposed_direction_s(mixer.forward_cost + feed_forward.forward_cost, mapping)
        behind = self._exposed_direction_s(mixer.backward_cost + feed_forward.backward_cost, mapping)
        waits = self._launch_waits(mixer, feed_forward, (ahead, behind))
        return ahead + waits[0], behind + waits[1]

    def _exposed_direction_s(self, cost: DirectionCost, mapping: ParallelMapping) -> float:
        """Seconds of one way through a layer."""
        compute = cost.compute_s + cost.tp_s * (1 - HIDDEN_TP_FRACTION if self.workload.overlaps_tp_comm else 1.0)
        hidden = min(HIDDEN_ALL_TO_ALL_FRACTION * cost.all_to_all_s, compute) if mapping.overlap else 0.0
        return compute + cost.all_to_all_s - hidden

    def layers_with_strategies(
        self, kind: int, mapping: ParallelMapping, strategies: MemoryStrategies
    ) -> tuple[Seconds, Seconds]:
        """Seconds of one layer forward and backward with each of some savers, of which `mapping` has none; [savers] each."""
        mixer = self.layer_costs.mixer(kind, mapping.tp, mapping.cp, mapping.mbs)
        feed_forward = self.layer_costs.feed_forward(
            kind, mapping.tp, mapping.cp, mapping.mbs, mapping.ep, mapping.etp, mapping.dispatcher
        )
        parts = dict.fromkeys(TIME_PARTS, 0.0)
        ahead = sum(self._add_direction(mixer.forward + feed_forward.forward, mapping, parts))
        behind = sum(self._add_direction(feed_forward.backward + mixer.backward, mapping, parts))
        again = behind + _recompute_s(mixer, feed_forward, strategies.recompute_sets)[strategies.recompute_set_indices]
        waits = self._launch_waits(mixer, feed_forward, (ahead, again))
        away = self._offloaded_bytes(kind, mapping, strategies)
        forward, backward = np.full(len(strategies), ahead) + waits[0], again + waits[1]
        return forward + self.exposed_offload_s(away, forward), backward + self.exposed_offload_s(away, backward)

    def _offloaded_bytes(self, kind: int, mapping: ParallelMapping, strategies: MemoryStrategies) -> Seconds:
        """Bytes of one layer that go to the host and back with each of some savers, [savers]."""
        if self.workload.is_megatron:
            # Published steps do not say in which types they offload; theirs are taken to hide it.
            return np.zeros(len(strategies))
        return self.activation_memory.offloaded_bytes(mapping, strategies)[:, kind]

    def exposed_offload_s(self, offloaded_bytes: Any, busy_s: Any) -> Any:
        """Seconds of a layer, one way, that activations on their way to or from the host are longer than its work.

        What they take of memory and of the host's time beside it is a part of their way.
        """
        seconds = offloaded_bytes / self.device.host_bytes_per_s
        return elementwise_max(EXPOSED_OFFLOAD_FRACTION * seconds, seconds - busy_s)

    def _add_direction(
        self, items: tuple[CostItem, ...], mapping: ParallelMapping, seconds: dict[str, float]
    ) -> tuple[float, float]:
        """Add the works up by part; returns the time without the experts' exchange, and what of that shows."""
        compute = exchange = 0.0
        shown = 1 - HIDDEN_TP_FRACTION if self.workload.overlaps_tp_comm else 1.0
        for work in items:
            if work.part == "ep_comm":
                exchange += work.seconds
                continue
            spent = shown * work.seconds if work.part == "tp_comm" else work.seconds
            compute += spent
            seconds[work.part] += spent
        if mapping.overlap:
            hidden = min(HIDDEN_ALL_TO_ALL_FRACTION * exchange, compute)
            exchange -= hidden
        seconds["ep_comm"] += exchange
        return compute, exchange

    def _launch_waits(self, mixer: BlockTime, feed_forward: BlockTime, busy: tuple[Any, Any]) -> tuple[Any, Any]:
        """Seconds of a layer, forward and backward, that go between its kernels, or by which the host is late."""
        graphs, device = self.workload.cuda_graphs, self.device
        if graphs == "full":
            return 0.0, 0.0
        shown = 0.0 if graphs == "partial" else 1.0
        ahead = shown * mixer.forward_kernels + feed_forward.forward_kernels
        behind = shown * mixer.backward_kernels + feed_forward.backward_kernels
        waits = [
            elementwise_max(launched * device.kernel_gap_s, launched * device.host_launch_s - seconds)
            for launched, seconds in zip((ahead, behind), busy, strict=True)
        ]
        return waits[0] + feed_forward.host_syncs * device.sync_s, waits[1]

    def head_and_loss_s(self, tp: int, cp: int, mbs: int) -> tuple[float, float]:
        """Output head and loss of one micro-batch, forward and backward, on the last stage."""
        key = (tp, cp, mbs)
        if key not in self._head_and_loss:
            shape, products, tokens = self.model_spec, self.layer_costs.gemm, self.layer_costs.tokens(cp, mbs)
            width = shape.vocab_size // tp
            gather = all_gather_s(self.device, RankGroup(tp, 1), tokens * shape.hidden_size * self.workload.value_bytes)
            logits = products.memory_bound_s(tokens * width * 4)
            ahead = products.matmul_s(tokens, width, shape.hidden_size) + 2.5 * logits + gather
            behind = products.matmul_s(tokens, shape.hidden_size, width) + 1.5 * logits + gather
            behind += products.wgrad_s(tokens, width, shape.hidden_size)
            times = 1 + (shape.mtp_layers if self.workload.runs_mtp else 0)
            self._head_and_loss[key] = (times * ahead, times * behind)
        return self._head_and_loss[key]

    def stage_times(self, mapping: ParallelMapping) -> tuple[StageTime, ...]:
        """Every chunk of the pipeline, in the order of the model."""
        layers = tuple(self.layer_time(kind, mapping) for kind in range(len(self.model_spec.kinds)))
        ends = self.head_and_loss_s(mapping.tp, mapping.cp, mapping.mbs)
        p2p = self._p2p_s(mapping) if mapping.pp > 1 else 0.0
        stages = []
        for chunk in self.split(mapping.pp * mapping.vpp):
            held = list(zip(chunk.kind_counts, layers, strict=True))
            weight = sum(count * layer.wgrad_s for count, layer in held)
            stages.append(
                StageTime(
                    forward_s=sum(count * layer.forward_s for count, layer in held) + chunk.has_loss * ends[0],
                    backward_input_s=sum(count * (layer.backward_s - layer.wgrad_s) for count, layer in held)
                    + chunk.has_loss * ends[1],
                    backward_weight_s=weight,
                    forward_ep_s=sum(count * layer.forward_ep_s for count, layer in held),
                    backward_ep_s=sum(count * layer.backward_ep_s for count, layer in held),
                    p2p_s=p2p,
                )
            )
        return tuple(stages)

    def _rank_times(
        self, mapping: ParallelMapping, layers: tuple[LayerTime, ...]
    ) -> tuple[_RankTime, tuple[float, float, float]]:
        """The busiest pipeline rank, and the mean over all of them, of one micro-batch."""
        head = self.head_and_loss_s(mapping.tp, mapping.cp, mapping.mbs)
        ranks = self.rank_contents(mapping.pp, mapping.vpp, mapping.schedule)
        slowest, worst = ranks[0], -1.0
        total = [0.0, 0.0, 0.0]
        for rank in ranks:
            forward = backward = weight = 0.0
            for count, layer in zip(rank[0], layers, strict=True):
                forward += count * layer.forward_s
                backward += count * layer.backward_s
                weight += count * layer.wgrad_s
            if rank[2]:
                forward, backward = forward + head[0], backward + head[1]
            total = [total[0] + forward, total[1] + backward, total[2] + weight]
            if forward + backward > worst:
                slowest, worst, times = rank, forward + backward, (forward, backward, weight)
        parts = [
            sum(c * layer.parts[i] for c, layer in zip(slowest[0], layers, strict=True)) for i in range(len(TIME_PARTS))
        ]
        if slowest[2]:
            parts[TIME_PARTS.index("head")] += sum(head)
        pp = len(ranks)
        return (*times, tuple(parts)), (total[0] / pp, total[1] / pp, total[2] / pp)

    def rank_contents(self, pp: int, vpp: int, schedule: str) -> tuple[RankContent, ...]:
        """Layers of each kind on each pipeline rank, and whether it embeds and has the loss."""
        is_v = pp > 1 and SCHEDULES[schedule].placement == "v"
        key = (pp, vpp, is_v)
        if key not in self._rank_contents:
            chunks = self.split(pp * vpp)
            placed = chunks_of_rank(chunks, schedule, pp, vpp)
            self._rank_contents[key] = tuple(_rank_content(tuple(chunks[i] for i in stages)) for stages in placed)
        return self._rank_contents[key]

    def _p2p_s(self, mapping: ParallelMapping) -> float:
        tokens = self.layer_costs.tokens(mapping.cp, mapping.mbs) / mapping.tp
        return p2p_s(
            self.device,
            mapping.world_size // mapping.pp,
            tokens * self.model_spec.hidden_size * self.workload.value_bytes,
        )

    def exposed_p2p_s(self, mapping: ParallelMapping, vpp: Any, num_micro_batches: int) -> tuple[Any, Any]:
        """Seconds of exposed sends of a step, and of one way through a rank's chunks; `vpp` is one number or many."""
        if mapping.pp == 1:
            return 0.0 * vpp, 0.0 * vpp
        one = self._p2p_s(mapping)
        shown = 1 - HIDDEN_P2P_FRACTION * (vpp > 1)
        return 2 * num_micro_batches * vpp * one * shown, vpp * one

    def data_parallel_cost(self, mapping: ParallelMapping) -> DataParallelCost:
        """What data parallelism and the optimizer take."""
        return self._cached_data_parallel_cost(mapping, self.max_parameters(mapping))

    def lower_bound_data_parallel_cost(self, mapping: ParallelMapping, parameters: Sequence[float]) -> DataParallelCost:
        """The same at least, whatever the pipeline, of ranks that have so many `max_parameters` or more."""
        found = self._cached_data_parallel_cost(mapping, parameters)
        # What Muon has to do follows the layers of the stages.
        return found._replace(optimizer_s=0.0) if self._muon_cost else found

    def _cached_data_parallel_cost(self, mapping: ParallelMapping, parameters: Sequence[float]) -> DataParallelCost:
        dense, experts = parameters
        away = "optimizer" in mapping.offload
        key: tuple[float, ...] = (
            dense,
            experts,
            mapping.dp * mapping.cp,
            mapping.tp,
            mapping.edp,
            mapping.etp * mapping.ep,
            mapping.zero,
            away,
        )
        if self._muon_cost:
            key = (*key, mapping.ep, mapping.pp, mapping.vpp, SCHEDULES[mapping.schedule].placement == "v")
        if key not in self._data_parallel_costs:
            self._data_parallel_costs[key] = self._price_data_parallel(mapping, dense, experts)
        return self._data_parallel_costs[key]

    def _price_data_parallel(self, mapping: ParallelMapping, dense: float, experts: float) -> DataParallelCost:
        device = self.device
        dense_group, expert_group = (
            RankGroup(mapping.dp * mapping.cp, mapping.tp),
            RankGroup(mapping.edp, mapping.etp * mapping.ep),
        )
        value = self.workload.value_bytes
        of_experts = all_gather_s(device, expert_group, experts * value)
        gathers = all_gather_s(device, dense_group, dense * value) + of_experts
        wide = max(1.0, value / GRADIENT_BYTES)
        size = wide * (self.workload.reduce_bytes if mapping.zero == 3 else GRADIENT_BYTES)
        gradients = all_gather_s(device, dense_group, dense * size) + all_gather_s(device, expert_group, experts * size)
        owned = dense / dense_group.size + experts / expert_group.size
        if mapping.zero == 0:
            gathers, of_experts, owned = 0.0, 0.0, dense + experts
            gradients = all_reduce_s(device, dense_group, dense * wide * GRADIENT_BYTES)
            gradients += all_reduce_s(device, expert_group, experts * wide * GRADIENT_BYTES)
        optimizer = self._update_s(mapping, owned, wide)
        if "optimizer" in mapping.offload and self.workload.is_megatron:
            optimizer += owned * MEGATRON_OFFLOAD_BYTES_PER_PARAM / device.host_bytes_per_s
        elif "optimizer" in mapping.offload:
            narrow = 0.5 if self.workload.update.has_bf16_moments else 1.0
            optimizer = max(optimizer, owned * narrow * MOMENT_OFFLOAD_BYTES_PER_PARAM / device.host_bytes_per_s)
        return DataParallelCost(gathers, gradients, optimizer, of_experts)

    def _update_s(self, mapping: ParallelMapping, num_owned: float, dtype_factor: float) -> float:
        """Seconds of the update of the fullest rank, where its states are on the device."""
        update, passes = self.workload.update, self.layer_costs.gemm.memory_bound_s
        spec = update.optimizer
        bytes_moved = spec.bf16_update_bytes if update.has_bf16_moments else spec.update_bytes
        if self._muon_cost is None:
            return passes(num_owned * dtype_factor * bytes_moved)
        matrix_bytes = spec.bf16_matrix_update_bytes if update.has_bf16_moments else spec.matrix_update_bytes
        found = 0.0
        for counts, _, has_loss in dict.fromkeys(self.rank_contents(mapping.pp, mapping.vpp, mapping.schedule)):
            share = self._muon_cost.rank_cost(mapping, counts, has_loss)
            moved = (
                max(0.0, num_owned - share.num_local) * bytes_moved
                + share.num_local * matrix_bytes
                + share.num_owned * MUON_OWNER_BYTES_PER_PARAM
            )
            found = max(found, share.seconds + passes(dtype_factor * moved))
        return found

    def max_parameters(self, mapping: ParallelMapping) -> tuple[float, float]:
        """Parameters of the fullest rank: outside the experts, and of them."""
        key = (
            mapping.tp,
            mapping.ep * mapping.etp,
            mapping.pp,
            mapping.vpp,
            SCHEDULES[mapping.schedule].placement == "v",
        )
        if key not in self._max_parameters:
            self._max_parameters[key] = self._count_max_parameters(mapping)
        return self._max_parameters[key]

    def _count_max_parameters(self, mapping: ParallelMapping) -> tuple[float, float]:
        sizes = [layer_parameters(self.model_spec, kind) for kind in range(len(self.model_spec.kinds))]
        ends = self.model_spec.vocab_size * self.model_spec.hidden_size
        fullest = (0.0, 0.0)
        for counts, has_embedding, has_loss in self.rank_contents(mapping.pp, mapping.vpp, mapping.schedule):
            dense = sum(count * size[0] for count, size in zip(counts, sizes, strict=True))
            experts = sum(count * size[1] for count, size in zip(counts, sizes, strict=True))
            dense += ends * (has_embedding + has_loss)
            fullest = max(fullest, (dense / mapping.tp, experts / (mapping.ep * mapping.etp)), key=sum)
        return fullest

    def exposed_data_parallel_s(
        self, mapping: ParallelMapping, comm: DataParallelCost, forward: Any, backward: Any, num_micro_batches: int
    ) -> Any:
        """Seconds of a step in which data parallelism's collectives run beside nothing.

        Args:
            mapping: the mapping.
            comm: what they take by themselves.
            forward: seconds of one micro-batch on the rank.
            backward: the same backward.
            num_micro_batches: micro-batches.
        """
        gathers, gradients = comm.all_gathers_s, comm.gradients_s
        if mapping.overlap and not self.workload.is_megatron:
            # Two micro-batches at a time need all parameters before the first pass (docs/pipeline.md).
            forward = 0.0
        if not self.workload.overlaps_dp_comm:
            forwards, backwards = gathers, (gathers if mapping.zero == 3 else 0.0) + gradients
        else:
            late = comm.expert_all_gathers_s if self._gathers_experts_late(mapping) else 0.0
            forwards = late + _exposed_comm_s(gathers - late, forward)
            backwards = _exposed_comm_s(gradients + (gathers if mapping.zero == 3 else 0.0), backward)
        return (num_micro_batches if mapping.zero == 3 else 1) * forwards + (
            num_micro_batches if mapping.zero > 1 else 1
        ) * backwards

    def _gathers_experts_late(self, mapping: ParallelMapping) -> bool:
        """Whether the gather of a layer's experts starts when the layer before and attention are over.

        With a pipeline torch's schedules gather the weights of a stage before it runs.
        """
        w = self.workload
        waits = not w.capacity_factor and mapping.ep * mapping.etp > 1
        return waits and mapping.pp == 1 and not w.prefetches_expert_weights

    def _build_step_time(self, seconds: dict[str, float], num_micro_batches: int, world_size: int) -> StepTime:
        total = sum(seconds.values())
        w = self.workload
        tokens = w.global_batch_size * w.seq_len / world_size / total
        flops = tokens * self.flops_per_token
        return StepTime(
            total_s=total,
            parts=seconds,
            num_micro_batches=num_micro_batches,
            tokens_per_s_per_gpu=tokens,
            flops_per_token=self.flops_per_token,
            tflops_per_gpu=flops / 1e12,
            mfu=flops / self.device.peak("bf16"),
        )


def _exposed_comm_s(comm: float, compute: Any) -> Any:
    """What of a collective shows beside so much compute, a number or many."""
    return elementwise_max((1 - HIDDEN_DP_FRACTION) * comm, comm - compute)


def _recompute_s(mixer: BlockTime, feed_forward: BlockTime, sets: tuple[tuple[str, ...], ...]) -> Seconds:
    """Seconds that each of some sets of parts takes to run again, [sets]."""
    shares, seconds = _recompute_shares(sets), np.zeros(len(sets))
    for part, again in (*mixer.recompute, *feed_forward.recompute):
        seconds += again * shares[part]
    return seconds + sum(work.seconds for work in (*mixer.forward, *feed_forward.forward)) * shares["layer"]


@lru_cache(maxsize=256)
def _recompute_shares(sets: tuple[tuple[str, ...], ...]) -> dict[str, Seconds]:
    """For each part whether each set runs it again by itself, 1 or 0: no larger part of the set contains it."""
    found = {}
    for part in RECOMPUTE_PARTS:
        larger_ones = {"layer", *(("moe",) if part in ("expert_activation", "shared_experts") else ())} - {part}
        found[part] = np.array([float(part in parts and not larger_ones & set(parts)) for parts in sets])
    return found


def _rank_content(chunks: tuple[ModelChunk, ...]) -> tuple[tuple[int, ...], bool, bool]:
    counts = tuple(sum(column) for column in zip(*(chunk.kind_counts for chunk in chunks), strict=True))
    return counts, any(c.has_embedding for c in chunks), any(c.has_loss for c in chunks)
