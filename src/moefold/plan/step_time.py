"""The time of one optimizer step under a mapping, by part. Torch-free.

`Pricer` is made once for a model, a device and a workload; it prices each part once for the few integers that the part
depends on, so that a search of many thousand mappings adds up numbers it already has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moefold.config.schedules import SCHEDULES
from moefold.config.schema import RECOMPUTE_PARTS
from moefold.plan.collective import Group, all_reduce_s, gather_s, send_s
from moefold.plan.columns import columns_of
from moefold.plan.device import Device
from moefold.plan.flop_count import expert_parameters, layer_parameters, shared_parameters, train_flops
from moefold.plan.kept import KeptActivations, Savers, recipe_of, saver_of
from moefold.plan.layer_time import BlockTime, LayerTimes, WaySums, Work
from moefold.plan.mapping import Mapping
from moefold.plan.muon_time import muon_time
from moefold.plan.pipeline_time import bubble_s, larger
from moefold.plan.shape import ModelShape
from moefold.plan.stage_split import Chunk
from moefold.plan.stages import Split, chunks_of_rank, split_of
from moefold.plan.workload import Workload

COMMUNICATION = ("tp_comm", "cp_comm", "etp_comm", "ep_comm", "pp_comm", "dp_comm")
LAYER_WORK = ("attention", "dense_mlp", "experts", "shared_experts", "router", "permute")
COMPUTE = (*LAYER_WORK, "head", "recompute", "launch", "offload")
PARTS = (*COMPUTE, *COMMUNICATION, "bubble", "optimizer")
"""Every second of a step belongs to one of them."""

HIDDEN_EXCHANGE = 0.708
"""Part of the experts' exchange that overlap can hide, where there is compute enough; the rest starts and ends with
nothing to run beside it. arXiv:2603.07685: from 20-60 % of a step to under 5 % of it."""

HIDDEN_TENSOR = 0.7
"""Part of tensor parallelism's collectives that overlap in pieces hides (`overlaps_tensor`)."""

HIDDEN_SENDS = 0.8
"""Part of the sends between stages that interleaved schedules hide under other chunks."""

HIDDEN_GRADIENTS = 0.9
"""Part of the gradients' and parameters' collectives that can run under the last backward and the first forward."""

GRADIENT_BYTES = 4
"""Gradients are summed in float32, or in float64 where that is the compute type."""

OPTIMIZER_BYTES = 34
"""Moved by AdamW for each parameter: gradient 4 twice (norm, update), weight and both moments 4 each read and written,
and the bfloat16 copy written."""

NARROW_OPTIMIZER_BYTES = 118
"""The same with bfloat16 moments, which no fused kernel updates: each is widened, decayed, added to and rounded (26 and
6), the spread is made (24) and the weight moved (24), pass by pass (`train/adamw.py`), beside norm and copy."""

MUON_BYTES = 58
"""Of a rank's own numbers of Muon's matrices: norm 4, decayed weight 8, momentum 20, look-ahead 12, update 12,
copy 2."""

NARROW_MUON_BYTES = 68
"""The same with a bfloat16 momentum, which is widened and rounded."""

WHOLE_MATRIX_BYTES = 52
"""Of the numbers that a rank works on for all: packed, unpacked and normalised there, scaled, and packed again."""

OFFLOADED_BYTES = 6
"""Over the host's link for each parameter whose optimizer state lives there: gradient down, weight up."""

MOMENT_BYTES = 8
"""Each way over the host's link, both at once, for each parameter whose moments live there (docs/memory.md)."""

SHOWN_CARRYING = 0.05
"""Part of carrying activations to the host and back that shows where work is enough to hide it: copies are launched,
and take bandwidth of the memory that kernels use. 0.2 to 0.3 % of it was measured on a CPU, whose memory was the disk's
cache (docs/memory.md); on GPUs nothing was."""

STEP_S = 0.01
"""Of each step, whatever its size: gradient norm across ranks, loss, data, host work between steps."""


Seconds = NDArray[np.float64]

RankContent = tuple[tuple[int, ...], bool, bool]
"""Layers of each kind on a pipeline rank, and whether it embeds and has the loss."""

_RankTime = tuple[float, float, float, tuple[float, ...]]
"""Forward, backward, weights' gradients, and parts."""


@dataclass(frozen=True, slots=True)
class LayerSum:
    """One layer of one micro-batch, exposed seconds only."""

    forward_s: float
    backward_s: float
    weight_s: float
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


class ReplicaTime(NamedTuple):
    """Seconds of data parallelism's collectives, each once, and of the optimizer."""

    gathers_s: float
    """Of all parameters."""
    gradients_s: float
    """Of their sums."""
    optimizer_s: float
    experts_s: float
    """Of `gathers_s`: the experts'."""


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
        return sum(self.parts[name] for name in COMMUNICATION)

    @property
    def binding(self) -> str:
        """The part that takes the most time."""
        return max(self.parts, key=self.parts.__getitem__)


class Pricer:
    """Prices mappings of one model on one device for one workload.

    Args:
        shape: the model.
        device: one of its GPUs.
        workload: the batch, and what the software can do.
        kept: what layers keep, which is what offloading carries; None: by a recipe with nothing but the model.
        split: which stage holds what; None: balanced by operations.
    """

    def __init__(
        self,
        shape: ModelShape,
        device: Device,
        workload: Workload,
        kept: KeptActivations | None = None,
        split: Split | None = None,
    ) -> None:
        self.shape, self.device, self.workload = shape, device, workload
        self.split = split or split_of(shape, workload.seq_len)
        self.kept = kept or KeptActivations(shape, workload, recipe_of(shape, workload), columns_of(shape))
        self.times = LayerTimes(shape, device, workload)
        self._muon = muon_time(shape, device, workload)
        self._layers: dict[tuple[object, ...], LayerSum] = {}
        self._ends: dict[tuple[int, int, int], tuple[float, float]] = {}
        self._plain: dict[tuple[int, int, int, int], tuple[float, float]] = {}
        self._replicas: dict[tuple[float, ...], ReplicaTime] = {}
        self._fullest: dict[tuple[int, ...], tuple[float, float]] = {}
        self._ranks: dict[tuple[int, int, bool], tuple[RankContent, ...]] = {}

    @cached_property
    def flops_per_token(self) -> float:
        """Of a training step, in the workload's convention."""
        w = self.workload
        return train_flops(self.shape, w.seq_len, causal=w.causal, mtp=w.with_mtp and w.counts_mtp)

    def step_time(self, mapping: Mapping) -> StepTime:
        """Price one mapping, which must divide the model and the batch."""
        n = mapping.num_micro_batches(self.workload.global_batch_size)
        layers = tuple(self.layer(kind, mapping) for kind in range(len(self.shape.kinds)))
        slowest, mean = self._rank_times(mapping, layers)
        forward, backward, weight, parts = slowest
        sends, send_back = self.sends(mapping, mapping.vpp, n)
        bubble = bubble_s(
            mean[0] + send_back,
            mean[1] + send_back,
            mean[2],
            pp=mapping.pp,
            vpp=mapping.vpp,
            n=n,
            schedule=mapping.schedule,
        )
        replicas = self.replicas(mapping)
        dp_comm = self.shown_replicas_s(mapping, replicas, forward, backward, n)
        seconds = dict(zip(PARTS, (part * n for part in parts), strict=True))
        seconds["pp_comm"] += sends
        seconds["dp_comm"] += dp_comm
        seconds["bubble"] += bubble
        seconds["optimizer"] += replicas.optimizer_s + STEP_S
        return self._finish(seconds, n, mapping.world_size)

    def layer(self, kind: int, m: Mapping) -> LayerSum:
        """One layer of a micro-batch with what recomputation, launches and exposed communication add."""
        key = (kind, m.tp, m.cp, m.mbs, m.ep, m.etp, m.dispatcher, m.recompute, m.overlap, m.offload)
        if key not in self._layers:
            mixer = self.times.mixer(kind, m.tp, m.cp, m.mbs)
            feed_forward = self.times.feed_forward(kind, m.tp, m.cp, m.mbs, m.ep, m.etp, m.dispatcher)
            away = float(self._carried_bytes(kind, m, Savers((saver_of(m),)))[0]) if m.offload else 0.0
            self._layers[key] = self._sum(mixer, feed_forward, m, away)
        return self._layers[key]

    def _sum(self, mixer: BlockTime, feed_forward: BlockTime, m: Mapping, away_bytes: float) -> LayerSum:
        seconds = dict.fromkeys(PARTS, 0.0)
        ahead = self._direction(mixer.forward + feed_forward.forward, m, seconds)
        behind = self._direction(feed_forward.backward + mixer.backward, m, seconds)
        again = float(_recomputed(mixer, feed_forward, (m.recompute,))[0])
        seconds["recompute"] += again
        waits = self._launch_waits(mixer, feed_forward, (sum(ahead), sum(behind) + again))
        seconds["launch"] += sum(waits)
        carried = [self.carried_s(away_bytes, busy) for busy in (sum(ahead) + waits[0], sum(behind) + again + waits[1])]
        seconds["offload"] += sum(carried)
        return LayerSum(
            forward_s=sum(ahead) + waits[0] + carried[0],
            backward_s=sum(behind) + again + waits[1] + carried[1],
            weight_s=mixer.weight_s + feed_forward.weight_s,
            forward_ep_s=ahead[1],
            backward_ep_s=behind[1],
            parts=tuple(seconds.values()),
        )

    def least_layer_s(self, kind: int, tp: int, cp: int, mbs: int) -> float:
        """Seconds that a layer takes at least for one micro-batch, forward and backward, however its experts are cut.

        The products of the experts run at the speed of large ones, and nothing of them travels.
        """
        mixer, layer = self.times.mixer(kind, tp, cp, mbs), self.shape.kinds[kind].feed_forward
        seconds = sum(work.seconds for work in (*mixer.forward, *mixer.backward) if work.part != "tp_comm")
        if layer is None:
            return seconds
        products, w = self.times.products, self.workload
        factor = min(1.0, w.capacity_factor) if w.capacity_factor else 1.0
        flops = float(shared_parameters(layer, self.shape.hidden_size))
        flops += factor * w.load * layer.top_k * expert_parameters(layer, self.shape.hidden_size)
        rate = products.rate * max(1.0, self.device.grouped_fraction)
        return seconds + 6.0 * flops * self.times.tokens(cp, mbs) / tp / rate

    def plain_layer(self, kind: int, m: Mapping) -> tuple[float, float]:
        """Seconds of one layer forward and backward, as `layer` has them where nothing saves activations."""
        layer = self.shape.kinds[kind].feed_forward
        # Without experts nothing of their degrees counts, and a search asks for each of these.
        key = (kind, m.tp, m.cp, m.mbs)
        if layer is not None and layer.kind == "moe":
            return self._plain_layer(kind, m)
        if key not in self._plain:
            self._plain[key] = self._plain_layer(kind, m)
        return self._plain[key]

    def _plain_layer(self, kind: int, m: Mapping) -> tuple[float, float]:
        mixer = self.times.mixer(kind, m.tp, m.cp, m.mbs)
        feed_forward = self.times.feed_forward(kind, m.tp, m.cp, m.mbs, m.ep, m.etp, m.dispatcher)
        ahead = self._shown_s(mixer.ahead + feed_forward.ahead, m)
        behind = self._shown_s(mixer.behind + feed_forward.behind, m)
        waits = self._launch_waits(mixer, feed_forward, (ahead, behind))
        return ahead + waits[0], behind + waits[1]

    def _shown_s(self, way: WaySums, m: Mapping) -> float:
        """Seconds of one way through a layer."""
        compute = way.compute_s + way.tensor_s * (1 - HIDDEN_TENSOR if self.workload.overlaps_tensor else 1.0)
        hidden = min(HIDDEN_EXCHANGE * way.exchange_s, compute) if m.overlap else 0.0
        return compute + way.exchange_s - hidden

    def saved_layers(self, kind: int, m: Mapping, savers: Savers) -> tuple[Seconds, Seconds]:
        """Seconds of one layer forward and backward with each of some savers, of which `m` has none; [savers] each."""
        mixer = self.times.mixer(kind, m.tp, m.cp, m.mbs)
        feed_forward = self.times.feed_forward(kind, m.tp, m.cp, m.mbs, m.ep, m.etp, m.dispatcher)
        parts = dict.fromkeys(PARTS, 0.0)
        ahead = sum(self._direction(mixer.forward + feed_forward.forward, m, parts))
        behind = sum(self._direction(feed_forward.backward + mixer.backward, m, parts))
        again = behind + _recomputed(mixer, feed_forward, savers.recomputes)[savers.which_recompute]
        waits = self._launch_waits(mixer, feed_forward, (ahead, again))
        away = self._carried_bytes(kind, m, savers)
        forward, backward = np.full(len(savers), ahead) + waits[0], again + waits[1]
        return forward + self.carried_s(away, forward), backward + self.carried_s(away, backward)

    def _carried_bytes(self, kind: int, m: Mapping, savers: Savers) -> Seconds:
        """Bytes of one layer that go to the host and back with each of some savers, [savers]."""
        if self.workload.is_megatron:
            # Published steps do not say in which types they offload; theirs are taken to hide it.
            return np.zeros(len(savers))
        return self.kept.away_bytes(m, savers)[:, kind]

    def carried_s(self, away_bytes: Any, busy_s: Any) -> Any:
        """Seconds of a layer, one way, that activations on their way to or from the host are longer than its work.

        What they take of memory and of the host's time beside it is a part of their way.
        """
        seconds = away_bytes / self.device.host_bytes_per_s
        return larger(SHOWN_CARRYING * seconds, seconds - busy_s)

    def _direction(self, works: tuple[Work, ...], m: Mapping, seconds: dict[str, float]) -> tuple[float, float]:
        """Add the works up by part; returns the time without the experts' exchange, and what of that shows."""
        compute = exchange = 0.0
        shown = 1 - HIDDEN_TENSOR if self.workload.overlaps_tensor else 1.0
        for work in works:
            if work.part == "ep_comm":
                exchange += work.seconds
                continue
            spent = shown * work.seconds if work.part == "tp_comm" else work.seconds
            compute += spent
            seconds[work.part] += spent
        if m.overlap:
            hidden = min(HIDDEN_EXCHANGE * exchange, compute)
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
            larger(launched * device.kernel_gap_s, launched * device.host_launch_s - seconds)
            for launched, seconds in zip((ahead, behind), busy, strict=True)
        ]
        return waits[0] + feed_forward.syncs * device.sync_s, waits[1]

    def ends(self, tp: int, cp: int, mbs: int) -> tuple[float, float]:
        """Output head and loss of one micro-batch, forward and backward, on the last stage."""
        key = (tp, cp, mbs)
        if key not in self._ends:
            shape, products, tokens = self.shape, self.times.products, self.times.tokens(cp, mbs)
            width = shape.vocab_size // tp
            gather = gather_s(self.device, Group(tp, 1), tokens * shape.hidden_size * self.workload.value_bytes)
            logits = products.pass_s(tokens * width * 4)
            ahead = products.product_s(tokens, width, shape.hidden_size) + 2.5 * logits + gather
            behind = products.product_s(tokens, shape.hidden_size, width) + 1.5 * logits + gather
            behind += products.weight_gradient_s(tokens, width, shape.hidden_size)
            times = 1 + (shape.mtp_layers if self.workload.with_mtp else 0)
            self._ends[key] = (times * ahead, times * behind)
        return self._ends[key]

    def stage_times(self, mapping: Mapping) -> tuple[StageTime, ...]:
        """Every chunk of the pipeline, in the order of the model."""
        layers = tuple(self.layer(kind, mapping) for kind in range(len(self.shape.kinds)))
        ends = self.ends(mapping.tp, mapping.cp, mapping.mbs)
        p2p = self._send(mapping) if mapping.pp > 1 else 0.0
        stages = []
        for chunk in self.split(mapping.pp * mapping.vpp):
            held = list(zip(chunk.counts, layers, strict=True))
            weight = sum(count * layer.weight_s for count, layer in held)
            stages.append(
                StageTime(
                    forward_s=sum(count * layer.forward_s for count, layer in held) + chunk.has_loss * ends[0],
                    backward_input_s=sum(count * (layer.backward_s - layer.weight_s) for count, layer in held)
                    + chunk.has_loss * ends[1],
                    backward_weight_s=weight,
                    forward_ep_s=sum(count * layer.forward_ep_s for count, layer in held),
                    backward_ep_s=sum(count * layer.backward_ep_s for count, layer in held),
                    p2p_s=p2p,
                )
            )
        return tuple(stages)

    def _rank_times(self, m: Mapping, layers: tuple[LayerSum, ...]) -> tuple[_RankTime, tuple[float, float, float]]:
        """The busiest pipeline rank, and the mean over all of them, of one micro-batch."""
        head = self.ends(m.tp, m.cp, m.mbs)
        ranks = self.contents_of_ranks(m.pp, m.vpp, m.schedule)
        slowest, worst = ranks[0], -1.0
        total = [0.0, 0.0, 0.0]
        for rank in ranks:
            forward = backward = weight = 0.0
            for count, layer in zip(rank[0], layers, strict=True):
                forward += count * layer.forward_s
                backward += count * layer.backward_s
                weight += count * layer.weight_s
            if rank[2]:
                forward, backward = forward + head[0], backward + head[1]
            total = [total[0] + forward, total[1] + backward, total[2] + weight]
            if forward + backward > worst:
                slowest, worst, times = rank, forward + backward, (forward, backward, weight)
        parts = [
            sum(c * layer.parts[i] for c, layer in zip(slowest[0], layers, strict=True)) for i in range(len(PARTS))
        ]
        if slowest[2]:
            parts[PARTS.index("head")] += sum(head)
        pp = len(ranks)
        return (*times, tuple(parts)), (total[0] / pp, total[1] / pp, total[2] / pp)

    def contents_of_ranks(self, pp: int, vpp: int, schedule: str) -> tuple[RankContent, ...]:
        """Layers of each kind on each pipeline rank, and whether it embeds and has the loss."""
        is_v = pp > 1 and SCHEDULES[schedule].placement == "v"
        key = (pp, vpp, is_v)
        if key not in self._ranks:
            chunks = self.split(pp * vpp)
            placed = chunks_of_rank(chunks, schedule, pp, vpp)
            self._ranks[key] = tuple(_rank_content(tuple(chunks[i] for i in stages)) for stages in placed)
        return self._ranks[key]

    def _send(self, m: Mapping) -> float:
        tokens = self.times.tokens(m.cp, m.mbs) / m.tp
        return send_s(self.device, m.world_size // m.pp, tokens * self.shape.hidden_size * self.workload.value_bytes)

    def sends(self, m: Mapping, vpp: Any, n: int) -> tuple[Any, Any]:
        """Seconds of exposed sends of a step, and of one way through a rank's chunks; `vpp` is one number or many."""
        if m.pp == 1:
            return 0.0 * vpp, 0.0 * vpp
        one = self._send(m)
        shown = 1 - HIDDEN_SENDS * (vpp > 1)
        return 2 * n * vpp * one * shown, vpp * one

    def replicas(self, m: Mapping) -> ReplicaTime:
        """What data parallelism and the optimizer take."""
        return self._replicas_of(m, self.parameters(m))

    def least_replicas(self, m: Mapping, parameters: Sequence[float]) -> ReplicaTime:
        """The same at least, whatever the pipeline, of ranks that have so many `parameters` or more."""
        found = self._replicas_of(m, parameters)
        # What Muon has to do follows the layers of the stages.
        return found._replace(optimizer_s=0.0) if self._muon else found

    def _replicas_of(self, m: Mapping, parameters: Sequence[float]) -> ReplicaTime:
        dense, experts = parameters
        away = "optimizer" in m.offload
        key: tuple[float, ...] = (dense, experts, m.dp * m.cp, m.tp, m.edp, m.etp * m.ep, m.zero, away)
        if self._muon:
            key = (*key, m.ep, m.pp, m.vpp, SCHEDULES[m.schedule].placement == "v")
        if key not in self._replicas:
            self._replicas[key] = self._price_replicas(m, dense, experts)
        return self._replicas[key]

    def _price_replicas(self, m: Mapping, dense: float, experts: float) -> ReplicaTime:
        device = self.device
        dense_group, expert_group = Group(m.dp * m.cp, m.tp), Group(m.edp, m.etp * m.ep)
        value = self.workload.value_bytes
        of_experts = gather_s(device, expert_group, experts * value)
        gathers = gather_s(device, dense_group, dense * value) + of_experts
        wide = max(1.0, value / GRADIENT_BYTES)
        size = wide * (self.workload.reduce_bytes if m.zero == 3 else GRADIENT_BYTES)
        gradients = gather_s(device, dense_group, dense * size) + gather_s(device, expert_group, experts * size)
        owned = dense / dense_group.size + experts / expert_group.size
        if m.zero == 0:
            gathers, of_experts, owned = 0.0, 0.0, dense + experts
            gradients = all_reduce_s(device, dense_group, dense * wide * GRADIENT_BYTES)
            gradients += all_reduce_s(device, expert_group, experts * wide * GRADIENT_BYTES)
        optimizer = self._update_s(m, owned, wide)
        if "optimizer" in m.offload and self.workload.is_megatron:
            optimizer += owned * OFFLOADED_BYTES / device.host_bytes_per_s
        elif "optimizer" in m.offload:
            narrow = 0.5 if self.workload.update.narrow_moments else 1.0
            optimizer = max(optimizer, owned * narrow * MOMENT_BYTES / device.host_bytes_per_s)
        return ReplicaTime(gathers, gradients, optimizer, of_experts)

    def _update_s(self, m: Mapping, owned: float, wide: float) -> float:
        """Seconds of the update of the fullest rank, where its states are on the device."""
        update, passes = self.workload.update, self.times.products.pass_s
        adamw = NARROW_OPTIMIZER_BYTES if update.narrow_moments else OPTIMIZER_BYTES
        if self._muon is None:
            return passes(owned * wide * adamw)
        muon, found = NARROW_MUON_BYTES if update.narrow_moments else MUON_BYTES, 0.0
        for counts, _, has_loss in dict.fromkeys(self.contents_of_ranks(m.pp, m.vpp, m.schedule)):
            share = self._muon.share(m, counts, has_loss)
            moved = max(0.0, owned - share.held) * adamw + share.held * muon + share.worked * WHOLE_MATRIX_BYTES
            found = max(found, share.seconds + passes(wide * moved))
        return found

    def parameters(self, m: Mapping) -> tuple[float, float]:
        """Parameters of the fullest rank: outside the experts, and of them."""
        key = (m.tp, m.ep * m.etp, m.pp, m.vpp, SCHEDULES[m.schedule].placement == "v")
        if key not in self._fullest:
            self._fullest[key] = self._count_parameters(m)
        return self._fullest[key]

    def _count_parameters(self, m: Mapping) -> tuple[float, float]:
        sizes = [layer_parameters(self.shape, kind) for kind in range(len(self.shape.kinds))]
        ends = self.shape.vocab_size * self.shape.hidden_size
        fullest = (0.0, 0.0)
        for counts, has_embedding, has_loss in self.contents_of_ranks(m.pp, m.vpp, m.schedule):
            dense = sum(count * size[0] for count, size in zip(counts, sizes, strict=True))
            experts = sum(count * size[1] for count, size in zip(counts, sizes, strict=True))
            dense += ends * (has_embedding + has_loss)
            fullest = max(fullest, (dense / m.tp, experts / (m.ep * m.etp)), key=sum)
        return fullest

    def shown_replicas_s(self, m: Mapping, comm: ReplicaTime, forward: Any, backward: Any, n: int) -> Any:
        """Seconds of a step in which data parallelism's collectives run beside nothing.

        Args:
            m: the mapping.
            comm: what they take by themselves.
            forward: seconds of one micro-batch on the rank.
            backward: the same backward.
            n: micro-batches.
        """
        gathers, gradients = comm.gathers_s, comm.gradients_s
        if m.overlap and not self.workload.is_megatron:
            # Two micro-batches at a time need all parameters before the first pass (docs/pipeline.md).
            forward = 0.0
        if not self.workload.overlaps_gathers:
            forwards, backwards = gathers, (gathers if m.zero == 3 else 0.0) + gradients
        else:
            late = comm.experts_s if self._asks_late(m) else 0.0
            forwards = late + _shown(gathers - late, forward)
            backwards = _shown(gradients + (gathers if m.zero == 3 else 0.0), backward)
        return (n if m.zero == 3 else 1) * forwards + (n if m.zero > 1 else 1) * backwards

    def _asks_late(self, m: Mapping) -> bool:
        """Whether the gather of a layer's experts starts when the layer before and attention are over.

        With a pipeline torch's schedules gather the weights of a stage before it runs.
        """
        w = self.workload
        waits = not w.capacity_factor and m.ep * m.etp > 1
        return waits and m.pp == 1 and not w.prefetches_experts

    def _finish(self, seconds: dict[str, float], n: int, world_size: int) -> StepTime:
        total = sum(seconds.values())
        w = self.workload
        tokens = w.global_batch_size * w.seq_len / world_size / total
        flops = tokens * self.flops_per_token
        return StepTime(
            total_s=total,
            parts=seconds,
            num_micro_batches=n,
            tokens_per_s_per_gpu=tokens,
            flops_per_token=self.flops_per_token,
            tflops_per_gpu=flops / 1e12,
            mfu=flops / self.device.peak("bf16"),
        )


def _shown(comm: float, compute: Any) -> Any:
    """What of a collective shows beside so much compute, a number or many."""
    return larger((1 - HIDDEN_GRADIENTS) * comm, comm - compute)


def _recomputed(mixer: BlockTime, feed_forward: BlockTime, sets: tuple[tuple[str, ...], ...]) -> Seconds:
    """Seconds that each of some sets of parts takes to run again, [sets]."""
    shares, seconds = _shares_again(sets), np.zeros(len(sets))
    for part, again in (*mixer.recompute, *feed_forward.recompute):
        seconds += again * shares[part]
    return seconds + sum(work.seconds for work in (*mixer.forward, *feed_forward.forward)) * shares["layer"]


@lru_cache(maxsize=256)
def _shares_again(sets: tuple[tuple[str, ...], ...]) -> dict[str, Seconds]:
    """For each part whether each set runs it again by itself, 1 or 0: no larger part of the set contains it."""
    found = {}
    for part in RECOMPUTE_PARTS:
        larger_ones = {"layer", *(("moe",) if part in ("expert_activation", "shared_experts") else ())} - {part}
        found[part] = np.array([float(part in parts and not larger_ones & set(parts)) for parts in sets])
    return found


def _rank_content(chunks: tuple[Chunk, ...]) -> tuple[tuple[int, ...], bool, bool]:
    counts = tuple(sum(column) for column in zip(*(chunk.counts for chunk in chunks), strict=True))
    return counts, any(c.has_embedding for c in chunks), any(c.has_loss for c in chunks)
