"""Cost model of one layer for one micro-batch, item by item in the order of execution.

Every method caches its results by the few integers it depends on, so that a search prices each part of a layer once.
Attention does not depend on the experts' degrees, and the experts depend on cp only through the tokens of a rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moefold.config.groups.dispatcher import DispatcherPart, SentTokens, Transfer
from moefold.config.groups.ffn import RoutedPart
from moefold.config.layers import Layer
from moefold.cost.flops import keys_per_token
from moefold.cost.hardware import Device
from moefold.cost.memoised import memoised
from moefold.planner.cost_model.attention_load import AttentionLoad, AttentionPeers, exchange_bytes
from moefold.planner.cost_model.collective import (
    GroupLimitedRouting,
    RankGroup,
    all_gather_s,
    all_to_all_s,
    exchange_s,
    larger,
    ranks_per_unit,
    seconds_of_groups,
)
from moefold.planner.cost_model.gemm import GemmCost, LinearTimes, sum_times
from moefold.planner.cost_model.workload import TrainingWorkload
from moefold.planner.mapping import ParallelMapping
from moefold.planner.model_spec import ModelSpec


class Launches(NamedTuple):
    """Kernels that the host launches for a part of a layer."""

    forward: float = 0.0
    backward: float = 0.0

    def plus(self, other: "Launches", times: float = 1) -> "Launches":
        """Return the sum with a multiple of the launches of another part."""
        return Launches(self.forward + times * other.forward, self.backward + times * other.backward)


KERNEL_COUNTS = {
    "mixer": Launches(16, 26),
    "dense": Launches(8, 14),
    "moe": Launches(44, 66),
    "shared_experts": Launches(6, 10),
}
"""Kernels of a part of a Megatron-like layer, forward and backward: norm, cast, GEMM and element-wise passes.
Source: counts of a profile (arXiv:2603.07685 sec. on CUDA graphs)."""

TRACED_KERNEL_COUNTS = KERNEL_COUNTS | {"mixer": Launches(13, 20), "moe": Launches(36, 55)}
"""Kernels of a part of moefold's layer: grouped GEMMs and Triton kernels compute all experts at once. Source:
tests/gpu_static/traces.json, 91 of an MoE layer with all-to-all on 8 ranks, 124 with attention."""

DROP_KERNELS = Launches(20, 34)
"""Further kernels of moefold's layers that drop tokens. Source: the same traces."""

UNPADDED_DROP_KERNELS = Launches(10, 3)
"""Further kernels of Megatron-Core where it drops tokens without padding (`TrainingWorkload.drops_unpadded`). Source: a
count in megatron-core 0.14.0, of the mask of kept tokens, their sum, and the masked indices and probabilities."""

FULL_SPEED_HEAD_SIZE = 128
"""Width of a head from which attention has its full rate. Smaller heads need as many exponentials. Source:
arXiv:2407.08608 fig. 5 and 6."""

MIN_ATTENTION_LENGTH = 256.0
"""Tokens of the shortest sequence whose rate depends on its length. Shorter ones have its rate. Not fitted."""

RING_KERNELS = 14.92
"""Kernels of one forward step of ring attention: sends, halves, attention, corrections. Source: fit on Qwen3-235B at
64K and 128K on H100 and GB300, and on the rows of arXiv:2504.14960 with cp. Range: 13 to 19, prior 16."""

SEGMENTS_PER_RANK = 2
"""Segments of a sample on a rank of context parallelism, in the zigzag order of ring attention."""
STATE_BYTES = 4
"""Bytes of an element of the states of linear attention."""

ROUTER_PEAK_SHARE = 0.1
"""Rate of the router's GEMM in float32 over the bf16 peak. Assumed, not fitted. Range: 0.07 (float32 of an H100 without
tensor cores) to 0.5 (TF32)."""

ROUTER_BYTES = 62.01
"""Bytes that the router's forward pass moves for each token and expert: scores, top-k, masks and counts in float32.
Source: fit, prior 60."""

UNFUSED_PERMUTE_PASSES = 1.41
"""Memory traffic of a permutation by separate kernels over the traffic of a fused one. Source: fit, prior 1.5."""

UNFUSED_CLAMP_FACTOR = 4.306
"""Passes of a clamped activation with biases in separate kernels over its passes in Megatron-Core of 2026. Source: fit,
prior 2, on GPT-OSS-120B on 64 B200, with 8,213 tokens/s in the container 25.11 and 13,722 in the next one."""

EXPERT_KERNELS = Launches(2, 4)
"""GEMMs of one expert, forward and backward. Each is a kernel without grouped GEMM."""
CAST_KERNELS = Launches(2, 3)
"""Kernels that cast the operands of one expert, forward and backward."""

EXPERT_LAUNCH_SHARE = 0.2176
"""Host time of the launch of one expert's GEMM over the time of another launch: a C++ loop over several streams
launches them, and their gaps overlap. Source: fit, prior 0.2."""

RECURRENCE_BYTES = 116.8
"""Bytes that the forward pass of a recurrence moves for each token and row of the output projection: convolution, chunk
states, scan and gate, each a memory-bound kernel. Source: fit, prior 190."""

SCAN_SHARE = 0.25
"""Share of a scan of Dv columns in the time of a recurrence. Source: a further scan of D + Dv columns with torch
operations (docs/log.md#2026-11-26-leftovers-of-sparse-and-linear-attention). Range: 0.08 to 0.31."""

CONVOLUTION_BYTES = 16.0
"""Bytes that the forward pass of a gated short convolution moves for each token and row of the output projection.
Source: a count. Two products and the convolution each read and write values of 2 bytes."""

ATTENTION_BACKWARD_FLOP_RATIO = 2.5
"""FLOPs of the attention core's backward pass over its forward pass. Source: a count, five GEMMs for two."""

BACKWARD_PASSES = 1.6
"""Memory traffic of norms and residuals in the backward pass over their traffic in the forward pass. Not fitted."""

CLAMPED_SWIGLU_PASSES = 11.28
"""Memory passes of clamped SwiGLU with biases: add, clamp twice, gate and multiply are separate kernels. Source: fit,
prior 8."""


class Projections(NamedTuple):
    """Widths of the GEMMs of a layer's attention."""

    sharded_width: int
    """Columns of the projections into the heads, which tp shards."""
    output_width: int
    """Rows of the output projection, which tp shards."""
    latent_width: int
    """Columns of the down-projections to latents, which tp replicates."""
    latent_rank: int
    """Mean width of the latents that are projected up to the heads. 0: heads are projected from the hidden state."""
    index_params: int
    """Weights of the indexer, which tp replicates. Each rank projects its own tokens."""


@lru_cache(maxsize=1024)
def projections_of(layer: Layer) -> Projections:
    """Return the widths of the GEMMs of a layer's attention, from its parameters."""
    matrices = [weight for weight in layer.attention.params(layer.hidden_size) if weight.is_matrix]
    indexer = [weight for weight in matrices if weight.name.startswith("indexer.")]
    own = [weight for weight in matrices if weight not in indexer and not weight.name.startswith("conv")]
    into_heads = [weight for weight in own if weight.tp_dim == 0]
    sharded_width = sum(weight.shape[0] for weight in into_heads)
    latent_width = (
        0 if layer.attention.is_recurrent else sum(weight.shape[0] for weight in own if weight.tp_dim is None)
    )
    return Projections(
        sharded_width=sharded_width,
        output_width=sum(weight.shape[1] for weight in own if weight.tp_dim == 1),
        latent_width=latent_width,
        latent_rank=sum(weight.numel for weight in into_heads) // sharded_width if latent_width else 0,
        index_params=sum(weight.numel for weight in indexer),
    )


class CostItem(NamedTuple):
    """One timed operation of a layer."""

    part: str
    seconds: Any
    """A number, or an array of many mappings."""

    @property
    def is_comm(self) -> bool:
        """True for a collective, whose part is named after the axis of its ranks."""
        return self.part.endswith("_comm")


class DirectionCost(NamedTuple):
    """Seconds of one direction through a layer or one of its blocks, summed by kind."""

    compute_s: Any
    tp_s: Any
    """Tensor-parallel collectives."""
    all_to_all_s: Any
    """Expert all-to-all."""

    def __add__(self, other: "DirectionCost") -> "DirectionCost":  # type: ignore[override]
        # Unrolled for speed: a search adds up a hundred thousand of them.
        compute_s, tp_s, all_to_all_s = other
        return DirectionCost(self.compute_s + compute_s, self.tp_s + tp_s, self.all_to_all_s + all_to_all_s)


@dataclass(frozen=True)
class BlockTime:
    """One block of a layer (mixer or feed-forward), in the order of execution. Seconds are numbers, or arrays."""

    forward: tuple[CostItem, ...] = ()
    backward: tuple[CostItem, ...] = ()
    wgrad_s: Any = 0.0
    """Part of the backward pass: weight gradients. No other rank waits for them."""
    kernels: Launches = Launches()
    host_syncs: float = 0.0
    """Number of forward device-to-host syncs. The host launches nothing ahead during one."""
    recompute: tuple[tuple[str, Any], ...] = ()
    """Seconds that recomputing a part adds to the backward pass. Additive over parts that do not contain each other.
    `moe` contains expert_activation and shared_experts, `layer` everything."""

    @cached_property
    def forward_cost(self) -> DirectionCost:
        """Sums of `forward`."""
        return _sum_direction(self.forward)

    @cached_property
    def backward_cost(self) -> DirectionCost:
        """Sums of `backward`."""
        return _sum_direction(self.backward)

    @property
    def sums(self) -> NDArray[np.float64]:
        """The sums of both directions, the kernels and the syncs, [9] or [9, mappings]."""
        values = (*self.forward_cost, *self.backward_cost, *self.kernels, self.host_syncs)
        return np.array(np.broadcast_arrays(*values), dtype=float)

    def at(self, place: int) -> "BlockTime":
        """Return the block of one of many mappings."""

        def number(value: Any) -> Any:
            return float(value[place]) if isinstance(value, np.ndarray) else value

        return BlockTime(
            tuple(CostItem(part, number(seconds)) for part, seconds in self.forward),
            tuple(CostItem(part, number(seconds)) for part, seconds in self.backward),
            number(self.wgrad_s),
            self.kernels,
            self.host_syncs,
            tuple((part, number(seconds)) for part, seconds in self.recompute),
        )


def block_of_sums(rows: NDArray[np.float64]) -> BlockTime:
    """Return many blocks as one, from `BlockTime.sums` of each, [9, mappings]. It cannot be recomputed."""
    forward, backward = (
        tuple(map(CostItem, ("attention", "tp_comm", "ep_comm"), sums)) for sums in (rows[:3], rows[3:6])
    )
    return BlockTime(forward, backward, kernels=Launches(rows[6], rows[7]), host_syncs=rows[8])


def _sum_direction(items: tuple[CostItem, ...]) -> DirectionCost:
    all_to_all = sum(work.seconds for work in items if work.part == "ep_comm")
    tensor = sum(work.seconds for work in items if work.part == "tp_comm")
    return DirectionCost(
        sum(work.seconds for work in items if work.part not in ("ep_comm", "tp_comm")), tensor, all_to_all
    )


class LayerCostModel:
    """Cost model of the layers of one model on one device."""

    def __init__(self, model_spec: ModelSpec, device: Device, workload: TrainingWorkload) -> None:
        self.model_spec = model_spec
        self.device = device
        self.workload = workload
        self.gemm = GemmCost(device, workload)
        self._networks: dict[tuple[int, int, int, DispatcherPart], BlockTime] = {}
        """MoE blocks of a kind with `_token_places`, by ep, etp and dispatcher."""
        self._token_places: dict[tuple[float, ...], int] = {}

    @memoised(lambda self, kind, m, peers=None: (kind, m.tp, m.cp, m.mbs, peers))
    def mixer(self, kind: int, mapping: ParallelMapping, peers: AttentionPeers | None = None) -> BlockTime:
        """Return the time of the token mixer (attention or a recurrence) of one layer kind.

        With documents (`TrainingWorkload.attention`), `peers` are the ranks that wait for each other. None gives the
        mean work to each rank.
        """
        layer = self.model_spec.kinds[kind]
        if not projections_of(layer).output_width:
            return BlockTime()
        loads = self.workload.attention
        load = None
        if loads is not None and not layer.attention.is_recurrent:
            load = loads.mean_load(layer.window) if peers is None else loads.load(peers, layer.window)
        return _MixerCost(self, layer, mapping, load).block_time()

    def token_key(self, m: ParallelMapping) -> tuple[float, ...]:
        """Return the values that decide the tokens of a feed-forward network and the places of its ranks."""
        # cp matters only by the tokens of a rank, unless the ranks of cp lie between the ranks of ep.
        return m.tp, m.mbs / m.cp, m.cp if self.workload.is_coupled else 1

    def _feed_forward_key(self, kind: int, m: ParallelMapping) -> tuple[object, ...]:
        experts = (m.ep, m.etp, m.dispatcher) if self.model_spec.kinds[kind].ffn.is_routed else ()
        return (kind, *self.token_key(m), *experts)

    @memoised(_feed_forward_key)
    def feed_forward(self, kind: int, mapping: ParallelMapping) -> BlockTime:
        """Return the time of the dense MLP or the MoE block of one layer kind."""
        part = self.model_spec.kinds[kind].ffn
        if part.routed:
            known = self._networks.get((kind, mapping.ep, mapping.etp, mapping.dispatcher))
            place = self._token_places.get(self.token_key(mapping))
            if known is not None and place is not None:
                return known.at(place)
            return _MoECost(self, part.routed, mapping, mapping.ep, mapping.etp).block_time(mapping.dispatcher)
        return _DenseCost(self, mapping).block_time(part.tp_unit[1]) if part.tp_unit[1] else BlockTime()

    def network_sums(
        self,
        kind: int,
        mappings: Sequence[ParallelMapping],
        degrees: Sequence[tuple[int, int, Sequence[DispatcherPart]]],
    ) -> dict[DispatcherPart, NDArray[np.float64]]:
        """Return `BlockTime.sums` of the networks of a kind for each dispatcher, [9, degrees, mappings].

        Args:
            mappings: mappings with all distinct `token_key`. Their expert degrees do not count.
            degrees: ep and etp, with the dispatchers to price.
        """
        part = self.model_spec.kinds[kind].ffn
        dispatchers = dict.fromkeys(one for _, _, own in degrees for one in own)
        if not part.routed:
            rows = np.array([self.feed_forward(kind, m).sums for m in mappings]).T
            return dict.fromkeys(dispatchers, np.repeat(rows[:, None], len(degrees), axis=1))
        self._token_places = {self.token_key(m): i for i, m in enumerate(mappings)}
        tp, cp, mbs = np.array([(m.tp, m.cp, m.mbs) for m in mappings]).T
        found = {one: np.full((9, len(degrees), len(mappings)), np.nan) for one in dispatchers}
        many = ParallelMapping(tp=tp, cp=cp, mbs=mbs)
        block = _BlockCost(self, many)
        for i, (ep, etp, own) in enumerate(degrees):
            cost = _MoECost(self, part.routed, many, ep, etp, block)
            for one in own:
                network = self._networks[kind, ep, etp, one] = cost.block_time(one)
                found[one][:, i] = network.sums
        return found

    def tokens(self, mapping: ParallelMapping) -> Any:
        """Return the tokens of a micro-batch on the ranks of one tp group."""
        return mapping.mbs * self.workload.seq_len / mapping.cp

    def tp_gather(self, mapping: ParallelMapping) -> CostItem:
        """Return the time of an all-gather, or a reduce-scatter, of hidden states over tp."""
        num_bytes = self.tokens(mapping) * self.model_spec.config.hidden_size * self.gemm.value_bytes
        price = partial(all_gather_s, self.device)
        return CostItem("tp_comm", seconds_of_groups(price, RankGroup(mapping.tp, 1), num_bytes))


class _BlockCost:
    """Sizes and times that all blocks of a layer have."""

    def __init__(self, costs: LayerCostModel, mapping: ParallelMapping) -> None:
        self.gemm = costs.gemm
        self.device = costs.device
        self.workload = costs.workload
        self.mapping = mapping
        self.tp = mapping.tp
        self.hidden = costs.model_spec.config.hidden_size
        self.tokens = costs.tokens(mapping)
        self.local_tokens = self.tokens / self.tp
        self.gather = costs.tp_gather(mapping)
        stream_s = self.gemm.memory_bound_s(self.local_tokens * self.hidden * self.gemm.value_bytes)
        self.passes_s = 5 * stream_s
        """Norm and residual move 5 hidden widths."""
        self.norm_again = ("norms", 2 * stream_s)

    def kernel_counts(self, block: str) -> Launches:
        """Return the launches of a block: of a Megatron-like layer, or traced in moefold's."""
        return (KERNEL_COUNTS if self.workload.is_megatron else TRACED_KERNEL_COUNTS)[block]


class _MixerCost(_BlockCost):
    """Cost of the attention block: norm, all-gather, projections, core, projection, reduce-scatter, residual."""

    def __init__(
        self, costs: LayerCostModel, layer: Layer, mapping: ParallelMapping, load: AttentionLoad | None
    ) -> None:
        super().__init__(costs, mapping)
        self.layer = layer
        self.core = layer.core
        self.mixer = projections_of(layer)
        self.load = load
        self.cp = mapping.cp
        # moefold's linear attention recomputes its core in the backward pass in any case.
        is_own = costs.model_spec.is_trainable and not self.workload.is_megatron
        self.recomputes_core = is_own and layer.attention.is_recurrent

    def block_time(self) -> BlockTime:
        gemm = self.gemm
        mixer = self.mixer
        project_s, project_back_s, weights_s = self._projections_s()
        # RoPE and head norms read and write all heads.
        heads_s = gemm.memory_bound_s(
            self.tokens * (mixer.sharded_width + mixer.output_width) / self.tp * gemm.value_bytes
        )
        passes_s = self.passes_s + 2 * heads_s
        core_s, core_back_s = self._core_s()
        comm_s, comm_back_s = self._cp_comm_s(core_s, core_back_s)
        forward = (
            CostItem("attention", passes_s),
            self.gather,
            CostItem("attention", project_s + core_s),
            CostItem("cp_comm", comm_s),
            self.gather,
        )
        backward = (
            self.gather,
            CostItem("attention", project_back_s + weights_s + core_back_s + BACKWARD_PASSES * passes_s),
            CostItem("cp_comm", comm_back_s),
            self.gather,
        )
        recompute = [self.norm_again, ("core_attention", 0.0 if self.recomputes_core else core_s)]
        if mixer.latent_rank:
            up_s = gemm.matmul_s(self.tokens, mixer.sharded_width // self.tp, mixer.latent_rank)
            recompute += [(part, up_s + heads_s) for part in self.layer.attention.own_recompute_parts]
        return BlockTime(forward, backward, weights_s, self.kernel_counts("mixer"), recompute=tuple(recompute))

    def _projections_s(self) -> LinearTimes:
        gemm = self.gemm
        mixer = self.mixer
        width = mixer.sharded_width // self.tp
        out = mixer.output_width // self.tp
        depth = mixer.latent_rank or self.hidden
        times = [gemm.linear_s(self.tokens, depth, width), gemm.linear_s(self.tokens, out, self.hidden)]
        if mixer.latent_width:
            times.append(gemm.linear_s(self.local_tokens, self.hidden, mixer.latent_width))
        if mixer.index_params:
            # The indexer has no gradient of its input.
            forward_s, _, weights_s = gemm.linear_s(self.local_tokens, self.hidden, mixer.index_params // self.hidden)
            times.append((forward_s, 0.0, weights_s))
        cast_s = gemm.quantize_s(self.tokens * (depth + out))
        cast_back_s = gemm.quantize_s(self.tokens * (width + self.hidden / self.tp))
        return sum_times(*times, (cast_s, cast_back_s, 0.0))

    def _core_s(self) -> tuple[float, float]:
        """Return the seconds of the attention core, forward and backward."""
        core = self.core
        if self.layer.attention.is_recurrent:
            core_bytes = RECURRENCE_BYTES if core.state_flops else CONVOLUTION_BYTES
            seconds = self.gemm.memory_bound_s(core_bytes * self.mixer.output_width * self.local_tokens)
            if self.cp > 1 and core.state_size:
                # A scan over [D, D + Dv] of each head, with D more columns than its Dv.
                seconds *= 1.0 + SCAN_SHARE * (1 + core.transition_size / core.state_size)
            return seconds, (3 if self.recomputes_core else 2) * seconds
        if self.load is None:
            seq_len = self.workload.seq_len
            keys = mean_keys = keys_per_token(self.layer.window, seq_len, causal=True, chunk_size=self.layer.chunk)
            # A step of ring attention has the queries of a rank and half of the keys of another, or half and all
            # (arXiv:2310.03294). No mask hides any: each query has at least as many keys as in a sequence of S / cp.
            rows = seq_len / self.cp
        else:
            keys = self.load.keys
            mean_keys = self.load.mean_keys
            rows = self.load.kernel_rows
        if core.selected:
            return self._sparse_core_s(keys)
        return self._attention_s(keys, min(2 * mean_keys, rows))

    def _attention_s(self, keys: float, length: float) -> tuple[float, float]:
        """Return the seconds of softmax attention to some keys a token, forward and backward."""
        width = self.core.key_width + self.core.value_width
        flops = 2.0 * keys * width * self.core.heads * self.local_tokens
        return attention_core_s(self.device, self.workload.dtype, flops, length, width / 2)

    def _sparse_core_s(self, keys: float) -> tuple[float, float]:
        """Return the seconds of the indexer's scores, and of attention over copies of the selected keys."""
        core = self.core
        selected = min(keys, core.selected)
        forward_s, backward_s = self._attention_s(selected, selected)
        scores = core.index_flops * keys * self.local_tokens
        head = (core.key_width + core.value_width) / 2
        scores_s, _ = attention_core_s(self.device, self.workload.dtype, scores, keys, head)
        heads = max(1.0, core.kv_heads / self.tp)
        # Copies of the selected keys and values in float32 are written and read. Their gradients are also added.
        copies_s = self.gemm.memory_bound_s(2 * 4 * self.tokens * selected * heads * core.key_value_width)
        return forward_s + scores_s + copies_s, backward_s + 3 * copies_s

    def _cp_comm_s(self, core_s: float, core_back_s: float) -> tuple[float, float]:
        """Return the exposed seconds of context parallelism, forward and backward."""
        if self.load is not None and self.load.is_planned:
            return self._exchange_s(self.load)
        if self.cp == 1:
            return 0.0, 0.0
        return self._state_exchange_s() if self.layer.attention.is_recurrent else self._ring_s(core_s, core_back_s)

    @property
    def _kv_heads(self) -> float:
        """Heads of keys and values on a rank. tp replicates them where it has more ranks."""
        return self.core.kv_heads / min(self.tp, self.core.kv_heads)

    def _exchange_s(self, load: AttentionLoad) -> tuple[float, float]:
        """Return the seconds of the rows that planned attention sends, forward and backward."""
        if load.exchange_ranks == 1:
            return 0.0, 0.0
        width = self.core.key_width + self.core.value_width
        bytes_of = partial(
            exchange_bytes,
            query_width=self.core.heads / self.tp * width,
            kv_width=self._kv_heads * width,
            value_bytes=self.workload.value_bytes,
        )
        of_all = bytes_of(load.sent_queries, load.sent_keys)
        ways = zip(of_all, bytes_of(load.remote_queries, load.remote_keys), strict=True)
        group = RankGroup(load.exchange_ranks, self.tp)
        forward_s, backward_s = (
            exchange_s(self.device, group, self.tokens * sent, self.tokens * remote) for sent, remote in ways
        )
        return forward_s, backward_s

    def _ring_s(self, core_s: float, core_back_s: float) -> tuple[float, float]:
        """Return the exposed seconds of ring attention's KV sends, launches and corrections."""
        core = self.core
        cp = self.cp
        group = RankGroup(cp, self.tp)
        link = next(link for link in self.device.links if ranks_per_unit(group, link) == cp)
        kv_width = self._kv_heads * core.key_value_width + core.index_width
        step_s = link.latency_s + self.tokens * kv_width * self.workload.value_bytes / link.reached_bytes_per_s
        launches_s = cp * RING_KERNELS * self.device.kernel_gap_s
        # Partial outputs are corrected in float32: read, scaled, added, written.
        merge_s = cp * self.gemm.memory_bound_s(12 * self.local_tokens * core.heads * core.value_width)
        # The keys of sparse attention are gathered before any is selected.
        overlap = 0.0 if core.selected else (cp - 1) / cp
        forward_s, backward_s = (
            max(step_s, passes * (cp - 1) * step_s - overlap * hidden_s) + passes * (launches_s + merge_s)
            for passes, hidden_s in ((1, core_s), (2, core_back_s))
        )
        return forward_s, backward_s

    def _state_exchange_s(self) -> tuple[float, float]:
        """Return the seconds of the all-gathers of states and of the convolutions' tokens, forward and backward.

        Each rank has two segments of each sample, as in ring attention. The backward pass recomputes the forward pass
        with its all-gathers, and reduce-scatters their gradients.
        """
        core = self.core
        segments = SEGMENTS_PER_RANK * self.cp * self.mapping.mbs / self.tp
        # A segment changes the states of all heads by [D, D + Dv] of each head.
        states = segments * (core.transition_size + core.state_size) * STATE_BYTES
        tokens = segments * (core.conv_kernel - 1) * core.conv_width * self.workload.value_bytes
        group = RankGroup(self.cp, self.tp)
        seconds = sum((all_gather_s(self.device, group, size) for size in (states, tokens) if size), 0.0)
        return seconds, 2 * seconds


def attention_core_s(device: Device, dtype: str, flops: float, length: float, head_size: float) -> tuple[float, float]:
    """Return the seconds of fused causal attention, forward and backward.

    Args:
        flops: FLOPs of the forward pass, counting the causal half.
        length: tokens of a sequence, or of the part of it that one kernel computes.
        head_size: mean of the head sizes of keys and values.
    """
    length = max(length, MIN_ATTENTION_LENGTH)
    speed = min(1.0, head_size / FULL_SPEED_HEAD_SIZE) / device.dtype_slowdown(dtype)
    forward_flops_per_s = speed * device.attention_forward_flops * length / (length + device.attention_forward_half)
    backward_flops_per_s = speed * device.attention_backward_flops * length / (length + device.attention_backward_half)
    return flops / forward_flops_per_s, ATTENTION_BACKWARD_FLOP_RATIO * flops / backward_flops_per_s


class _DenseCost(_BlockCost):
    """Cost of a dense MLP with its norm and residual."""

    def block_time(self, width: int) -> BlockTime:
        forward_s, backward_s, weights_s = swiglu_mlp_s(self.gemm, self.tokens, self.hidden, width // self.tp, 3)
        part = "dense_mlp"
        return BlockTime(
            (CostItem(part, self.passes_s), self.gather, CostItem(part, forward_s), self.gather),
            (self.gather, CostItem(part, backward_s + weights_s + BACKWARD_PASSES * self.passes_s), self.gather),
            weights_s,
            self.kernel_counts("dense"),
            recompute=(self.norm_again, (part, forward_s + 2 * self.gather.seconds)),
        )


def swiglu_mlp_s(
    gemm: GemmCost,
    num_tokens: Any,
    hidden: int,
    width: Any,
    num_matrices: int,
    groups: int = 0,
    activation_passes: float = 1.0,
) -> LinearTimes:
    """Return the seconds of an MLP with its activation."""
    inner = (num_matrices - 1) * width
    fuses = groups > 0 and activation_passes == 1.0 and num_matrices == 3 and gemm.fuses_grouped_gemm
    times = [
        gemm.linear_s(num_tokens, inputs, outputs, groups=max(1, groups), fused=fuses)
        for inputs, outputs in ((hidden, inner), (width, hidden))
    ]
    if not fuses:
        casts = num_tokens * (hidden + width), num_tokens * (hidden + inner)
        moved = num_tokens * (inner + width), num_tokens * (2 * inner + width)
        rest_s, rest_back_s = (
            gemm.quantize_s(cast) + activation_passes * gemm.memory_bound_s(numbers * gemm.value_bytes)
            for cast, numbers in zip(casts, moved, strict=True)
        )
        times.append((rest_s, rest_back_s, 0.0))
    return sum_times(*times)


class _MoECost(_BlockCost):
    """Cost of a MoE block: norm, router, permutation, dispatch, experts, combine, and the shared expert.

    Args:
        mapping: a mapping, or many with arrays of tp, cp and mbs. Its expert degrees do not count.
        block: the sizes and times of the mapping, if they are known.
    """

    def __init__(
        self,
        costs: LayerCostModel,
        part: RoutedPart,
        mapping: ParallelMapping,
        ep: int,
        etp: int,
        block: _BlockCost | None = None,
    ) -> None:
        self.__dict__.update(vars(block or _BlockCost(costs, mapping)))
        self.part = part
        self.num_matrices = sum(weight.is_expert and weight.is_matrix for weight in part.params(1))
        """3 with a gate (SwiGLU), 2 without."""
        self.top_k = part.mean_active
        """Experts of a token that compute, on average."""
        self.ep = ep
        self.etp = etp
        self.local_experts = max(1, part.num_experts // self.ep)
        self.width = max(1, part.intermediate_size // self.etp)
        self.expert_hidden_size = part.token_size(self.hidden)
        self.imbalance = self.workload.imbalance_at(self.ep, part.num_experts)
        factor = self.workload.capacity_factor
        self.routed_tokens = self.local_tokens * self.top_k * (min(1.0, factor) if factor else 1.0)
        self.expert_tokens = self.routed_tokens * self.imbalance * self.etp
        self.has_fused_activation = part.activation.is_swiglu and not part.bias
        self.fuses_experts = self.has_fused_activation and self.num_matrices == 3 and self.gemm.fuses_grouped_gemm

    @cached_property
    def _experts_s(self) -> LinearTimes:
        """The seconds of the routed experts."""
        clamp_factor = UNFUSED_CLAMP_FACTOR if self.workload.unfused_clamp else 1.0
        return swiglu_mlp_s(
            self.gemm,
            self.expert_tokens,
            self.expert_hidden_size,
            self.width,
            self.num_matrices,
            self.local_experts,
            1.0 if self.has_fused_activation else CLAMPED_SWIGLU_PASSES * clamp_factor,
        )

    def block_time(self, dispatcher: DispatcherPart) -> BlockTime:
        gemm = self.gemm
        experts_s, experts_back_s, weights_s = self._experts_s
        comm = self._ep_comm(dispatcher, gemm.value_bytes)
        router_s = self._router_s()
        permute = CostItem("permute", self._permute_s(dispatcher))
        forward = [
            CostItem("router", router_s + self.passes_s),
            permute,
            *self._ep_comm(dispatcher, self.workload.wire.value_bytes(gemm.value_bytes)),
            CostItem("experts", experts_s),
            *reversed(comm),
            permute,
        ]
        backward = [
            permute,
            *comm,
            CostItem("experts", experts_back_s + weights_s),
            *reversed(comm),
            permute,
            CostItem("router", 2 * router_s + BACKWARD_PASSES * self.passes_s),
        ]
        kernels = self._kernel_counts()
        recompute = [self.norm_again, ("expert_activation", self._activation_again_s())]
        if self.part.shared_width:
            width = larger(1, self.part.shared_width // self.tp)
            shared_s, shared_back_s, wgrad_s = swiglu_mlp_s(gemm, self.tokens, self.hidden, width, self.num_matrices)
            shared = [self.gather, CostItem("shared_experts", shared_s), self.gather]
            forward += shared
            backward += [self.gather, CostItem("shared_experts", shared_back_s + wgrad_s), self.gather]
            weights_s = weights_s + wgrad_s
            kernels = kernels.plus(self.kernel_counts("shared_experts"))
            recompute.append(("shared_experts", sum(work.seconds for work in shared)))
        recompute.append(("moe", sum(work.seconds for work in forward)))
        drops = self.workload.capacity_factor > 0
        has_full_graphs = not any(self.workload.launched)
        if self.workload.is_megatron and has_full_graphs and not drops:
            forward.append(self._stash())
            backward.insert(0, self._stash())
        syncs = 1.0 if self.workload.drops_unpadded or not drops else 0.0
        return BlockTime(tuple(forward), tuple(backward), weights_s, kernels, syncs, tuple(recompute))

    def _stash(self) -> CostItem:
        """Return the copy of the experts' saved tensors, which Megatron-Core keeps out of the buffers of a full graph.

        These buffers have room for the most tokens that a rank may get. The operands of both GEMMs are saved in their
        precision, the activation's inputs in the compute type.
        """
        gemm = self.gemm
        operands = gemm.element_bytes * (self.expert_hidden_size + self.width)
        saved = operands + gemm.value_bytes * (self.num_matrices - 1) * self.width
        return CostItem("permute", gemm.memory_bound_s(2 * self.expert_tokens * saved))

    def _activation_again_s(self) -> Any:
        """Return the seconds of recomputing the experts' activation."""
        gemm = self.gemm
        seconds = gemm.memory_bound_s(self.expert_tokens * self.num_matrices * self.width * gemm.value_bytes)
        if self.workload.is_megatron:
            return seconds
        # The outputs of the two inner projections are not saved either, so these GEMMs are recomputed.
        inner = (self.num_matrices - 1) * self.width
        return seconds + gemm.matmul_s(self.expert_tokens, inner, self.expert_hidden_size, groups=self.local_experts)

    def _kernel_counts(self) -> Launches:
        """Return the kernel launches of the block.

        moefold and fused experts have one kernel for all experts. Other software has kernels for each expert.
        """
        kernels = self.kernel_counts("moe")
        if self.fuses_experts:
            return Launches(kernels.forward / 2, kernels.backward / 2)
        if not self.workload.is_megatron:
            return kernels.plus(DROP_KERNELS) if self.workload.capacity_factor > 0 else kernels
        if self.workload.drops_unpadded:
            kernels = kernels.plus(UNPADDED_DROP_KERNELS)
        of_expert = EXPERT_KERNELS.plus(CAST_KERNELS) if self.gemm.quantize_bytes > 0 else EXPERT_KERNELS
        return kernels.plus(of_expert, EXPERT_LAUNCH_SHARE * self.local_experts)

    def _router_s(self) -> Any:
        """Return the seconds of the router: logits in float32, scores, top-k and counts.

        They read [T, H] once and [T, E] several times.
        """
        experts = self.part.num_choices
        flops = 2.0 * self.local_tokens * self.hidden * experts
        rate = self.device.peak("bf16") * ROUTER_PEAK_SHARE
        moved = self.local_tokens * (6 * self.hidden + ROUTER_BYTES * experts)
        return flops / rate + self.gemm.memory_bound_s(moved)

    def _permute_s(self, dispatcher: DispatcherPart) -> Any:
        """Return the seconds of the permutation on one side: expand the tokens, and sort received tokens by expert.

        Routed tokens arrive in the order of their senders, and are sorted after the etp group has gathered them. A rank
        with one expert, or with all of them, has nothing to sort (`AllToAllMetadata.expert_order`, as in
        Megatron-Core). DeepEP, HybridEP and moefold have fused kernels, Megatron's all-to-all separate ones.
        """
        passes = 1.0
        if self.fuses_experts:
            moved = self.expert_tokens / self.etp
        else:
            is_sorted = self.local_experts == 1 or self.ep * self.etp == 1
            moved = self.routed_tokens + (0.0 if is_sorted else 2 * self.expert_tokens)
            if self.workload.is_megatron and not dispatcher.kernel_package:
                passes = UNFUSED_PERMUTE_PASSES
        token_bytes = self.expert_hidden_size * self.gemm.value_bytes
        return passes * self.gemm.memory_bound_s((self.local_tokens + moved) * token_bytes)

    def _ep_comm(self, dispatcher: DispatcherPart, value_bytes: float) -> tuple[CostItem, ...]:
        """Return the dispatch collectives of one direction, for rows of numbers of `value_bytes`."""
        row_bytes = self.expert_hidden_size * value_bytes
        sent = SentTokens(self.local_tokens, self.routed_tokens, self.expert_tokens, row_bytes, self.ep, self.etp)
        return tuple(map(self._transfer, dispatcher.traffic(sent)))

    def _transfer(self, transfer: Transfer) -> CostItem:
        """Return the time of a collective. Ranks of ep wait for the busiest of them."""
        # If coupled, the ranks of tp and cp lie between neighbours of ep.
        stride = self.tp * self.mapping.cp if self.workload.is_coupled else self.etp
        group, imbalance = {
            "ep": (RankGroup(self.ep, stride), self.imbalance),
            "etp": (RankGroup(self.etp, 1), 1.0),
        }[transfer.axis]
        price: Callable[..., Any] = all_gather_s
        if not transfer.gathers:
            routing = GroupLimitedRouting(self.top_k, self.part.router.num_groups, self.part.router.top_groups)
            price = partial(all_to_all_s, routing=routing if transfer.sends_once else None)
        seconds = seconds_of_groups(partial(price, self.device), group, transfer.num_bytes)
        return CostItem(f"{transfer.axis}_comm", seconds * imbalance)
