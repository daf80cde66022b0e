"""Cost model of one optimizer step: seconds under a mapping, by part.

`CostModel` is built once for a model, a device and a workload. It caches each part by the few integers that the part
depends on, so that a search over thousands of mappings adds up known numbers. Pipelines (a schedule with its virtual
stages) and memory strategies (parts to recompute or offload) are priced many at a time, on arrays of
[pipelines, strategies].
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moefold.config.base.param_spec import shard_rows
from moefold.config.base.part import Part
from moefold.cost.hardware import Device
from moefold.cost.memoised import all_arguments, memoised
from moefold.cost.recompute_parts import containing_part, recompute_parts
from moefold.planner.cost_model.attention_load import AttentionPeers, attention_peers
from moefold.planner.cost_model.block import BlockTime, DirectionCost, micro_batch_tokens, tp_gather
from moefold.planner.cost_model.bubble import bubble_s
from moefold.planner.cost_model.collective import p2p_s
from moefold.planner.cost_model.data_parallel import DataParallelCostModel, RankContent
from moefold.planner.cost_model.layer import LayerCostModel
from moefold.planner.cost_model.workload import TrainingWorkload
from moefold.planner.mapping import ParallelMapping, PipelineVariant
from moefold.planner.memory.activations import ActivationMemoryTable, MemoryStrategies, memory_strategy, minimal_config
from moefold.planner.model_spec import ModelSpec, train_flops
from moefold.planner.stage_splitter import RecipeStageSplitter, StageSplitter, placed_ranks, stages_by_rank
from moefold.topology.schedules import schedule_named

COMM_PARTS = ("tp_comm", "cp_comm", "etp_comm", "ep_comm", "pp_comm", "dp_comm")
LAYER_PARTS = ("attention", "dense_mlp", "experts", "shared_experts", "router", "permute")
COMPUTE_PARTS = (*LAYER_PARTS, "head", "recompute", "launch", "offload")
TIME_CATEGORIES = (*COMPUTE_PARTS, *COMM_PARTS, "bubble", "optimizer")
"""Parts of a step. Every second belongs to one of them."""

HIDDEN_ALL_TO_ALL_FRACTION = 0.588
"""Part of the expert all-to-all that overlap can hide if there is enough compute. The first and last all-to-all have no
compute to run under. arXiv:2603.07685: from 20-60 % of a step to under 5 % of it."""

HIDDEN_TP_FRACTION = 0.7
"""Part of the tensor-parallel collectives that chunked overlap hides (`overlaps_tp_comm`)."""

HIDDEN_P2P_FRACTION = 0.8
"""Part of the p2p sends between stages that interleaved schedules hide under other chunks."""


TUNED_HOST_FRACTION = 0.6653
"""Host time of a launch in runs that the vendor of the GPUs tuned (`TrainingWorkload.has_tuned_host`) over other runs.
Fitted on third parties' Qwen3-30B on 8 B200 and Qwen3-235B on 256 H800, and on the vendor's runs of both models."""

CHUNK_CALL_S = 0.0001031
"""Host work of the schedule for each pass of a micro-batch through a chunk, which the device waits for: sends and
receives are posted, and the next chunk is called."""

HOST_DEVICE_NORM = 4
"""Exponent of the norm that joins the seconds of host and device. If infinite, they never wait for each other."""

GRAPH_GAP_SHARE = 0.4799
"""Gap between two kernels of a CUDA graph over `Device.kernel_gap_s`."""

EXPOSED_OFFLOAD_FRACTION = 0.05
"""Part of activation offload that stays exposed where there is enough compute to hide it: copies are launched, and use
memory bandwidth that kernels need. A CPU exposed 0.2 to 0.3 % of it, with the disk's cache as host memory
(docs/memory.md). No GPU has been measured."""

STEP_OVERHEAD_S = 0.01
"""Constant part of each step: gradient norm across ranks, loss, data, host work between steps."""


Seconds = NDArray[np.float64]
LayerCounts = NDArray[np.float64]
"""Layers of each kind and, last, 1 with the loss."""


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Exposed seconds of one layer for one micro-batch under some memory strategies."""

    forward_s: Seconds
    """Shape [strategies], also for `backward_s`."""
    backward_s: Seconds
    wgrad_s: float
    parts: dict[str, Any]
    """Seconds by one of TIME_CATEGORIES: a number, or [strategies]."""

    def part_s(self, part: str) -> float:
        """Return the seconds of a part with the first strategy."""
        return float(np.ravel(self.parts[part])[0])


class PassTimes(NamedTuple):
    """Seconds of the micro-batches under some pipelines and strategies, without data parallelism and the optimizer."""

    seconds: Seconds
    """Step seconds of the busiest pipeline rank: micro-batches, sends and the bubble, [pipelines, strategies]."""
    forward_s: Seconds
    """Seconds of one micro-batch on that rank, [pipelines, strategies], also for `backward_s`."""
    backward_s: Seconds
    sends_s: Seconds
    """Exposed step seconds of sends, [pipelines, 1]."""
    bubble_s: Seconds
    """Step seconds of the bubble, [pipelines, strategies]."""
    contents: LayerCounts
    """Layers on that rank, [pipelines, strategies, kinds + 1]."""


class _PipelineTable(NamedTuple):
    """The layers on the ranks of some pipelines."""

    contents: LayerCounts
    """Layers of each kind and, last, 1 with the loss, [pipelines, contents, kinds + 1]."""
    shares: Seconds
    """The share of the ranks that have them, [pipelines, 1, contents]."""
    vpp: NDArray[np.intp]
    """Virtual stages, [pipelines, 1]."""
    schedules: list[tuple[str | Part, slice]]
    """Runs of pipelines with the same schedule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Predicted time of a step, by part, and the throughput that follows."""

    total_s: float
    parts: dict[str, float]
    """Seconds by part on the busiest pipeline rank. They add up to `total_s`."""
    num_micro_batches: int
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    mfu: float

    @property
    def bottleneck(self) -> str:
        """The part that takes the most time."""
        return max(self.parts, key=self.parts.__getitem__)


class CostModel:
    """Cost model of the mappings of one model on one device for one workload.

    Args:
        activation_memory: bytes that layers save for backward, which offload moves. None: a recipe with only the model
            gives them.
        split: the layers of each stage. None: balanced by FLOPs.
    """

    def __init__(
        self,
        model_spec: ModelSpec,
        device: Device,
        workload: TrainingWorkload,
        activation_memory: ActivationMemoryTable | None = None,
        split: StageSplitter | None = None,
    ) -> None:
        self.model_spec = model_spec
        self.device = device
        self.workload = workload
        cfg = minimal_config(model_spec, workload)
        self.split = split or RecipeStageSplitter(cfg, model_spec, as_megatron=workload.is_megatron)
        self.activation_memory = activation_memory or ActivationMemoryTable(model_spec, workload, cfg)
        self.layer_costs = LayerCostModel(model_spec, device, workload)
        self.data_parallel = DataParallelCostModel(
            model_spec, device, workload, self.layer_costs.gemm, self.rank_contents
        )
        self.kind_counts = [model_spec.layers.count(kind) for kind in range(len(model_spec.kinds))]

    @cached_property
    def flops_per_token(self) -> float:
        """Training FLOPs for each token, in the workload's convention.

        Where samples hold documents, attention counts as in samples of their effective length.
        """
        w = self.workload
        # A causal query sees half of its sample on average.
        seq_len = w.seq_len if w.attention is None else round(2 * w.attention.mean_load(0).mean_keys)
        return train_flops(self.model_spec, seq_len, causal=w.counts_causal_attention, mtp=w.runs_mtp and w.counts_mtp)

    def step_time(self, mapping: ParallelMapping) -> StepTime:
        """Compute the time of a step under one mapping, which must divide the model and the batch."""
        n = mapping.num_micro_batches(self.workload.global_batch_size)
        own = MemoryStrategies((memory_strategy(mapping),))
        passes = self.pass_times(mapping, (PipelineVariant(mapping.schedule, mapping.vpp),), own)
        *counts, has_loss = passes.contents[0, 0].tolist()
        layers = [self.layer_time(kind, mapping, own) for kind in range(len(counts))]
        seconds = {
            part: n * sum(count * layer.part_s(part) for count, layer in zip(counts, layers, strict=True))
            for part in TIME_CATEGORIES
        }
        data_parallel = self.data_parallel.cost(mapping)
        posted = 2 * n * mapping.vpp * CHUNK_CALL_S if mapping.pp > 1 else 0.0
        seconds["head"] += n * has_loss * sum(self.head_and_loss_s(mapping))
        seconds["launch"] += posted
        seconds["pp_comm"] += float(passes.sends_s[0, 0]) - posted
        busy = float(passes.forward_s[0, 0]), float(passes.backward_s[0, 0])
        seconds["dp_comm"] += float(self.data_parallel.exposed_s(mapping, data_parallel, *busy, n))
        seconds["bubble"] += float(passes.bubble_s[0, 0])
        seconds["optimizer"] += data_parallel.optimizer_s + STEP_OVERHEAD_S
        total = sum(seconds.values())
        w = self.workload
        tokens = w.global_batch_size * w.seq_len / mapping.world_size / total
        flops = tokens * self.flops_per_token
        return StepTime(
            total_s=total,
            parts=seconds,
            num_micro_batches=n,
            tokens_per_s_per_gpu=tokens,
            tflops_per_gpu=flops / 1e12,
            mfu=flops / self.device.peak("bf16"),
        )

    def pass_times(
        self,
        mapping: ParallelMapping,
        pipelines: tuple[PipelineVariant, ...],
        strategies: MemoryStrategies | None = None,
    ) -> PassTimes:
        """Compute the times of pipelines under memory strategies.

        Args:
            mapping: the mapping. Its pipeline, recomputation and offload do not count.
            pipelines: pipelines that are legal with it.
            strategies: None recomputes and offloads nothing, which is a lower bound.
        """
        n = mapping.num_micro_batches(self.workload.global_batch_size)
        kinds = range(len(self.kind_counts))
        if strategies is None:
            layers = list(np.array([self.plain_layer_s(kind, mapping) for kind in kinds]).T[:, :, None])
        else:
            times = [self.layer_time(kind, mapping, strategies) for kind in kinds]
            layers = [np.array([layer.forward_s for layer in times]), np.array([layer.backward_s for layer in times])]
            layers.append(np.array([[layer.wgrad_s] for layer in times]))
        return self.passes(mapping.pp, n, pipelines, layers, self.head_and_loss_s(mapping), self.p2p_s(mapping))

    def passes(
        self,
        pp: int,
        num_micro_batches: int,
        pipelines: tuple[PipelineVariant, ...],
        layers: Sequence[Seconds],
        head: Sequence[Any] | Seconds,
        send_s: Any,
    ) -> PassTimes:
        """Compute the times of pipelines with layers, head and loss that take some seconds, as numbers or arrays.

        Args:
            layers: seconds of a layer of each kind forward, backward and of its weight gradients, [kinds, strategies],
                or of many mappings in place of the strategies.
            head: seconds of head and loss, forward and backward.
            send_s: seconds of one send to the next stage.
        """
        n = num_micro_batches
        *_, wgrad_s = layers
        table = self._pipeline_table(pp, pipelines)
        contents = table.contents
        shares = table.shares
        # Seconds of each content, [pipelines, contents, strategies].
        forward, backward = (
            contents[:, :, :-1] @ layers[direction] + contents[:, :, -1:] * head[direction] for direction in range(2)
        )
        busiest = (forward + backward).argmax(axis=1)
        of_pipelines = np.arange(len(pipelines))[:, None]
        at = of_pipelines, busiest, np.arange(busiest.shape[1])
        forward_s = forward[at]
        backward_s = backward[at]
        weight = (shares @ (contents[:, :, :-1] @ wgrad_s))[:, 0]
        mean_forward, mean_backward = ((shares @ ranks)[:, 0] for ranks in (forward, backward))
        sends, send_back = _exposed_p2p_s(pp, send_s, table.vpp, n)
        bubble = _bubbles((mean_forward + send_back, mean_backward + send_back, weight), pp, n, table)
        return PassTimes(
            seconds=n * (forward_s + backward_s) + sends + bubble,
            forward_s=forward_s,
            backward_s=backward_s,
            sends_s=sends,
            bubble_s=bubble,
            contents=contents[of_pipelines, busiest],
        )

    def step_s(self, passes: PassTimes, mapping: ParallelMapping, place: int) -> Seconds:
        """Return the seconds of a step with one of some pipelines, [strategies].

        Args:
            mapping: a mapping with this pipeline, its ZeRO stage and the placement of its moments.
            place: index of the pipeline.
        """
        comm = self.data_parallel.cost(mapping)
        n = mapping.num_micro_batches(self.workload.global_batch_size)
        exposed_s = self.data_parallel.exposed_s(mapping, comm, passes.forward_s[place], passes.backward_s[place], n)
        seconds: Seconds = passes.seconds[place] + exposed_s + comm.optimizer_s + STEP_OVERHEAD_S
        return seconds

    def model_s(self, mapping: ParallelMapping, strategies: MemoryStrategies | None = None) -> Any:
        """Return the seconds of all layers, the head and the loss for one micro-batch, forward and backward.

        Without strategies it is a number, and nothing is recomputed or offloaded. With them it is [strategies].
        """
        total: Any = sum(self.head_and_loss_s(mapping))
        for kind, count in enumerate(self.kind_counts):
            if strategies is None:
                total += count * sum(self.plain_layer_s(kind, mapping)[:2])
            else:
                layer = self.layer_time(kind, mapping, strategies)
                total = total + count * (layer.forward_s + layer.backward_s)
        return total

    @memoised(all_arguments)
    def _pipeline_table(self, pp: int, pipelines: tuple[PipelineVariant, ...]) -> "_PipelineTable":
        """Return the contents of the ranks of some pipelines. Ranks with equal layers are merged."""
        found = [
            Counter((*layers, has_loss) for layers, _, has_loss in self.rank_contents(pp, p.vpp, p.schedule))
            for p in pipelines
        ]
        # Padding: contents that no rank has.
        most = max(map(len, found))
        counts = np.zeros((len(found), most, len(self.kind_counts) + 1))
        shares = np.zeros((len(found), 1, most))
        for i, contents in enumerate(found):
            counts[i, : len(contents)] = list(contents)
            shares[i, 0, : len(contents)] = [number / pp for number in contents.values()]
        schedules = []
        for schedule, own in groupby(range(len(pipelines)), lambda i: pipelines[i].schedule):
            places = list(own)
            schedules.append((schedule, slice(places[0], places[-1] + 1)))
        return _PipelineTable(counts, shares, np.array([[pipeline.vpp] for pipeline in pipelines]), schedules)

    def _layer_key(self, kind: int, m: ParallelMapping) -> tuple[object, ...]:
        """Return the values that decide the time of a layer. Without experts, their degrees are not among them."""
        experts = (m.ep, m.etp, m.dispatcher, m.overlap) if self.model_spec.kinds[kind].ffn.is_routed else ()
        return (kind, m.tp, m.cp, m.mbs, self.attention_peers(m), *experts)

    @memoised(lambda self, kind, m, strategies=None: (*self._layer_key(kind, m), strategies or memory_strategy(m)))
    def layer_time(self, kind: int, mapping: ParallelMapping, strategies: MemoryStrategies | None = None) -> LayerTime:
        """Compute the time of one layer for a micro-batch, with launches and exposed communication.

        Args:
            strategies: memory strategies. None: the mapping's own.
        """
        strategies = strategies or MemoryStrategies((memory_strategy(mapping),))
        mixer, feed_forward = blocks = self.blocks(kind, mapping)
        forward = self._exposed_direction_s(mixer.forward_cost + feed_forward.forward_cost, mapping.overlap)
        backward = self._exposed_direction_s(mixer.backward_cost + feed_forward.backward_cost, mapping.overlap)
        seconds: dict[str, Any] = dict.fromkeys(TIME_CATEGORIES, 0.0)
        for item in (*mixer.forward, *mixer.backward, *feed_forward.forward, *feed_forward.backward):
            seconds[item.part] += item.seconds
        seconds["tp_comm"] *= self._exposed_tp_fraction
        seconds["ep_comm"] = forward[1] + backward[1]
        recompute_s = _recompute_s(mixer, feed_forward, strategies)
        busy = sum(forward), sum(backward) + recompute_s
        launch_s = self._launch_gaps_s(blocks, busy, strategies)
        busy = busy[0] + launch_s[0], busy[1] + launch_s[1]
        # Published steps do not give the dtypes that they offload. Their offload is assumed hidden.
        offloaded: Any = 0.0
        if strategies.offloads and not self.workload.is_megatron:
            offloaded = self.activation_memory.offloaded_bytes(mapping, strategies)[:, kind]
        offload_s = [self.exposed_offload_s(offloaded, busy_s) for busy_s in busy]
        seconds |= {"recompute": recompute_s, "launch": sum(launch_s), "offload": sum(offload_s)}
        return LayerTime(
            forward_s=busy[0] + offload_s[0],
            backward_s=busy[1] + offload_s[1],
            wgrad_s=mixer.wgrad_s + feed_forward.wgrad_s,
            parts=seconds,
        )

    def blocks(self, kind: int, mapping: ParallelMapping) -> tuple[BlockTime, BlockTime]:
        """Return the times of the token mixer and of the feed-forward network of one layer kind."""
        mixer = self.layer_costs.mixer(kind, mapping, self.attention_peers(mapping))
        return mixer, self.layer_costs.feed_forward(kind, mapping)

    def attention_peers(self, mapping: ParallelMapping) -> AttentionPeers | None:
        """Return the ranks that wait for each other's attention, or None if samples hold no documents."""
        w = self.workload
        if w.attention is None:
            return None
        return attention_peers(
            mapping,
            w.global_batch_size,
            is_coupled=w.is_coupled,
            has_experts=self.model_spec.config.routed is not None,
            gpus_per_node=self.device.links[0].gpus,
        )

    @cached_property
    def lower_bounds(self) -> "CostModel":
        """A cost model with a lower bound for the attention of documents, without plans of rounds, or this model."""
        w = self.workload
        if w.attention is None:
            return self
        bounded = replace(w, attention=replace(w.attention, is_lower_bound=True))
        return CostModel(self.model_spec, self.device, bounded, self.activation_memory, self.split)

    @memoised(_layer_key)
    def plain_layer_s(self, kind: int, mapping: ParallelMapping) -> tuple[float, float, float]:
        """Return the seconds of one layer without recomputation and offload: forward, backward, weight gradients."""
        mixer, feed_forward = blocks = self.blocks(kind, mapping)
        return *self.plain_s(blocks, overlap=mapping.overlap), mixer.wgrad_s + feed_forward.wgrad_s

    def plain_s(self, blocks: tuple[BlockTime, BlockTime], *, overlap: bool) -> tuple[Any, Any]:
        """Return the seconds of layers with a token mixer and a feed-forward network, forward and backward.

        Args:
            blocks: the two blocks, also of many layers as arrays.
            overlap: whether the all-to-all overlaps with another micro-batch.
        """
        mixer, feed_forward = blocks
        forward_s = sum(self._exposed_direction_s(mixer.forward_cost + feed_forward.forward_cost, overlap))
        backward_s = sum(self._exposed_direction_s(mixer.backward_cost + feed_forward.backward_cost, overlap))
        launch_s = self._launch_gaps_s(blocks, (forward_s, backward_s))
        return forward_s + launch_s[0], backward_s + launch_s[1]

    @property
    def _exposed_tp_fraction(self) -> float:
        return 1 - HIDDEN_TP_FRACTION if self.workload.overlaps_tp_comm else 1.0

    def _exposed_direction_s(self, cost: DirectionCost, overlap: bool) -> tuple[Any, Any]:
        """Return the seconds of one direction through a layer, all but the all-to-all and its exposed seconds."""
        compute = cost.compute_s + cost.tp_s * self._exposed_tp_fraction
        hidden = np.minimum(HIDDEN_ALL_TO_ALL_FRACTION * cost.all_to_all_s, compute) if overlap else 0.0
        return compute, cost.all_to_all_s - hidden

    def exposed_offload_s(self, offloaded_bytes: Any, busy_s: Any) -> Any:
        """Return the exposed seconds of activation offload of a layer in one direction, where `busy_s` hides the rest.

        Even hidden copies cost memory bandwidth and host time: a part of their duration, by the device or by
        `EXPOSED_OFFLOAD_FRACTION`.
        """
        seconds = offloaded_bytes / self.device.host_bytes_per_s
        measured = self.device.exposed_offload_fraction
        exposed = EXPOSED_OFFLOAD_FRACTION if measured is None else measured
        return np.maximum(exposed * seconds, seconds - busy_s)

    def _launch_gaps_s(
        self, blocks: tuple[BlockTime, BlockTime], busy: tuple[Any, Any], strategies: MemoryStrategies | None = None
    ) -> tuple[Any, Any]:
        """Return the seconds of a layer beyond its kernels, forward and backward: [strategies], or a number.

        Host and device run concurrently, so a layer takes the longer of two times: the host's launches, and its kernels
        with the gaps between them. After a wait of the host the device idles until the next kernel. A recomputed layer
        launches, and waits, once more.
        """
        device = self.device
        repeats_by_direction: tuple[Any, Any] = (0.0, 0.0) if strategies is None else _recomputed_launches(strategies)
        launched = self.workload.launched
        host_launch_s = device.host_launch_s * (TUNED_HOST_FRACTION if self.workload.has_tuned_host else 1.0)
        waits = []
        for direction, seconds in enumerate(busy):
            gaps: Any = 0.0
            host: Any = 0.0
            for block, share, repeats in zip(blocks, launched, repeats_by_direction, strict=True):
                kernels = block.kernels[direction] + direction * repeats * block.kernels[0]
                gaps = gaps + kernels * (1.0 if share else GRAPH_GAP_SHARE)
                host = host + kernels * share
            # With equal segments a layer would take the longer of both times. They differ, so it takes a little more.
            device_s = seconds + gaps * device.kernel_gap_s
            joined = (device_s**HOST_DEVICE_NORM + (host * host_launch_s) ** HOST_DEVICE_NORM) ** (1 / HOST_DEVICE_NORM)
            waits.append(joined - seconds)
        syncs = blocks[1].host_syncs * device.sync_s * launched[1]
        return waits[0] + syncs, waits[1] + repeats_by_direction[1] * syncs

    @memoised(lambda self, m: (m.tp, m.cp, m.mbs))
    def head_and_loss_s(self, mapping: ParallelMapping) -> tuple[float, float]:
        """Return the seconds of output head and loss of one micro-batch, forward and backward, on the last stage."""
        model = self.model_spec.config
        gemm = self.layer_costs.gemm
        tokens = micro_batch_tokens(self.workload, mapping)
        _, width = shard_rows(model.vocab_size, mapping.tp, 0)
        gather = tp_gather(gemm, model.hidden_size, mapping).seconds
        logits = gemm.memory_bound_s(tokens * width * 4)
        forward_s, backward_s, weights_s = gemm.linear_s(tokens, model.hidden_size, width)
        repeats = 1 + (model.mtp_layers if self.workload.runs_mtp else 0)
        return (
            repeats * (forward_s + 2.5 * logits + gather),
            repeats * (backward_s + weights_s + 1.5 * logits + gather),
        )

    @memoised(lambda self, pp, vpp, schedule: (pp, vpp, schedule_named(schedule).placement))
    def rank_contents(self, pp: int, vpp: int, schedule: str | Part) -> tuple[RankContent, ...]:
        """Return the layers of each kind on each pipeline rank, and whether the rank has the embedding and the loss."""
        ranks = placed_ranks(schedule, pp, vpp)
        chunks = self.split(ranks)
        found = []
        for stages in stages_by_rank(ranks):
            own = [chunks[i] for i in stages]
            counts = tuple(map(sum, zip(*(chunk.kind_counts for chunk in own), strict=True)))
            found.append((counts, any(chunk.has_embedding for chunk in own), any(chunk.has_loss for chunk in own)))
        return tuple(found)

    def p2p_s(self, mapping: ParallelMapping) -> float:
        """Return the seconds of one send of hidden states to the next stage, or of their gradients back."""
        if mapping.pp == 1:
            return 0.0
        tokens = micro_batch_tokens(self.workload, mapping) / mapping.tp
        num_bytes = tokens * self.model_spec.config.hidden_size * self.workload.value_bytes
        return p2p_s(self.device, mapping.world_size // mapping.pp, num_bytes)


def _exposed_p2p_s(pp: int, send_s: Any, vpp: Any, num_micro_batches: int) -> tuple[Any, Any]:
    """Return the exposed p2p seconds of a step, and of one pass through a rank's chunks."""
    if pp == 1:
        return 0.0 * vpp, 0.0 * vpp
    exposed_fraction = 1 - HIDDEN_P2P_FRACTION * (vpp > 1)
    return 2 * num_micro_batches * vpp * (send_s * exposed_fraction + CHUNK_CALL_S), vpp * send_s


def _recompute_s(mixer: BlockTime, feed_forward: BlockTime, strategies: MemoryStrategies) -> Seconds:
    """Return the seconds that recomputation takes, [strategies]."""
    shares = _recompute_shares(strategies.recompute_sets)
    seconds = np.zeros(len(strategies.recompute_sets))
    for part, part_s in (*mixer.recompute, *feed_forward.recompute):
        seconds += part_s * shares[part]
    seconds += sum(item.seconds for item in (*mixer.forward, *feed_forward.forward)) * shares["layer"]
    return seconds[strategies.recompute_set_indices]


@lru_cache(maxsize=256)
def _recomputed_launches(strategies: MemoryStrategies) -> tuple[Seconds, Seconds]:
    """Return which part of the launches of the mixer, and of the feed-forward network, is repeated, [strategies]."""
    layer = np.array([float("layer" in parts) for parts, _ in strategies])
    return layer, np.array([float("layer" in parts or "moe" in parts) for parts, _ in strategies])


@lru_cache(maxsize=256)
def _recompute_shares(sets: tuple[tuple[str, ...], ...]) -> dict[str, Seconds]:
    """Return for each part whether each set recomputes it, 1 or 0, and 0 if a larger part of the set contains it."""
    return {
        part: np.array([float(part in parts and not containing_part(part, parts)) for parts in sets])
        for part in recompute_parts()
    }


def _bubbles(mean: tuple[Seconds, Seconds, Seconds], pp: int, num_micro_batches: int, table: _PipelineTable) -> Seconds:
    """Return the idle seconds of a rank in a step, [pipelines, strategies]."""
    found = np.zeros_like(mean[0])
    if pp == 1:
        return found
    for schedule, places in table.schedules:
        forward, backward, weight = (seconds[places] for seconds in mean)
        vpp = table.vpp[places]
        found[places] = bubble_s(
            forward, backward, weight, pp=pp, vpp=vpp, num_micro_batches=num_micro_batches, schedule=schedule
        )
    return found
