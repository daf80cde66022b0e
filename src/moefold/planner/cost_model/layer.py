"""Cost model of one layer for one micro-batch, item by item in the order of execution. Torch-free.

Every method caches its results by the few integers it depends on, so that a search prices each part of a layer once:
attention does not depend on the experts' degrees, and the experts depend on cp through the tokens of a rank alone.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from moefold.config.groups.attention import AttentionCore
from moefold.config.groups.dispatcher import SentTokens, Transfer
from moefold.config.groups.ffn import RoutedPart
from moefold.config.layers import Layer
from moefold.cost.flops import keys_per_token
from moefold.cost.hardware import Device
from moefold.cost.memoised import memoised
from moefold.planner.cost_model.attention_load import AttentionLoad, AttentionPeers, TokenWidths, exchange_bytes
from moefold.planner.cost_model.collective import (
    GroupLimitedRouting,
    RankGroup,
    all_gather_s,
    all_to_all_s,
    exchange_s,
    ranks_per_unit,
)
from moefold.planner.cost_model.gemm import GemmCost
from moefold.planner.cost_model.workload import TrainingWorkload
from moefold.planner.mapping import ParallelMapping
from moefold.planner.model_spec import ModelSpec

KERNEL_COUNTS = {"mixer": (16, 26), "dense": (8, 14), "moe": (44, 66), "shared_experts": (6, 10)}
"""Kernels of a part, forward and backward, as a profile counts them: norm, cast, GEMM and element-wise passes of a
Megatron-like layer (arXiv:2603.07685 sec. on CUDA graphs: a MoE layer launches many more than a dense one)."""

TRACED_KERNEL_COUNTS = {"mixer": (13, 20), "dense": (8, 14), "moe": (36, 55), "shared_experts": (6, 10)}
"""Launches of moefold's own layer, as tests/gpu_static/traces.json records them: 91 of an MoE layer with all-to-all on
8 ranks, 124 with attention. Grouped GEMMs and Triton kernels compute all experts at once."""

DROP_KERNELS = (20, 34)
"""Further launches of moefold's layers that drop tokens, from the same traces."""

FULL_SPEED_HEAD_SIZE = 128
"""Smaller heads are slower in proportion to their size: they need as many exponentials (arXiv:2407.08608 fig. 5 and
6)."""

MIN_ATTENTION_LENGTH = 256.0
"""Shorter sequences are as fast for each FLOP as sequences of this length."""

RING_KERNELS = 20.0
"""Kernel launches of one forward step of ring attention: sends, halves, attention, corrections. Fitted (16 to 22, prior
16) on Qwen3-235B at 64K and 128K on H100 and GB300 and the rows of arXiv:2504.14960 with cp."""

HIDDEN_RING_FRACTION = 0.7
"""Part of the attention core under which ring sends between nodes are hidden: a prior, which no row decides."""

SEGMENTS_PER_RANK = 2
"""Segments of a sample on a rank of context parallelism, in the zigzag order of ring attention."""
STATE_BYTES = 4
"""Bytes of a number of the states of linear attention."""

ROUTER_BYTES = 60.36
"""Forward memory traffic for each token and expert: scores, top-k, masks and counts in float32."""

UNFUSED_PERMUTE_PASSES = 1.561
"""Memory traffic of a permutation of separate kernels over the traffic of a fused one."""

UNFUSED_CLAMP_FACTOR = 4.021
"""Passes of a clamped activation with biases in separate kernels over its passes in Megatron-Core of 2026: GPT-OSS-120B
on 64 B200 was measured at 8,213 tokens/s in the container 25.11 and at 13,722 in the next one."""

EXPERT_KERNELS = (2, 4)
"""GEMMs of one expert, forward and backward; each is a kernel without grouped GEMM."""
CAST_KERNELS = (2, 3)
"""Kernels that cast the operands of one expert, forward and backward."""

RECURRENCE_BYTES = 122.8
"""Forward memory traffic of a recurrence for each token and row of the output projection: convolution, chunk states,
scan and gate, each a memory-bound kernel."""

SCAN_SHARE = 0.25
"""Share of the scan over the states in the time of a recurrence; 0.08 to 0.31 with torch operations (docs/log.md)."""

CONVOLUTION_BYTES = 16.0
"""Likewise of a gated short convolution: two products and the convolution each read and write values of 2 bytes."""

ATTENTION_BACKWARD_FLOP_RATIO = 2.5
"""FLOPs of the attention core's backward pass over its forward pass: five GEMMs for two."""

CLAMPED_SWIGLU_PASSES = 11.28
"""Memory passes of clamped SwiGLU with biases: add, clamp twice, gate and multiply are separate kernels."""


class Projections(NamedTuple):
    """Widths of the GEMMs of a layer's attention."""

    sharded_width: int
    """Columns of the projections into the heads, which tp shards."""
    output_width: int
    """Rows of the output projection, which tp shards."""
    latent_width: int
    """Columns of the down-projections to latents, which tp replicates."""
    latent_rank: int
    """Mean width of the latents that are projected up to the heads; 0: heads are projected from the hidden state."""
    index_params: int
    """Weights of the indexer, which tp replicates; each rank projects its own tokens."""


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


@lru_cache(maxsize=1024)
def matrices_of_expert(part: RoutedPart) -> int:
    """Return the matrices of an expert: 3 with a gate (SwiGLU), 2 without."""
    return sum(weight.is_expert and weight.is_matrix for weight in part.params(1))


@lru_cache(maxsize=1024)
def active_parameters(layer: Layer, share: float) -> float:
    """Return the weights of a feed-forward network that a token is multiplied by, without the router's.

    Args:
        layer: a layer.
        share: share of the routed tokens that experts compute.
    """
    matrices = [weight for weight in layer.ffn.params(layer.hidden_size) if weight.is_matrix]
    found = float(sum(w.numel for w in matrices if w.part in ("dense_mlp", "shared_experts")))
    if routed := layer.ffn.routed:
        experts = sum(w.numel for w in matrices if w.is_expert) // routed.num_experts
        found += share * routed.mean_active * experts
    return found


@dataclass(frozen=True, slots=True)
class CostItem:
    """One timed operation of a layer."""

    part: str
    seconds: float

    @property
    def is_comm(self) -> bool:
        """True for a collective, whose part is named after the axis of its ranks."""
        return self.part.endswith("_comm")


class DirectionCost(NamedTuple):
    """Seconds of one direction through a layer or one of its blocks, summed by kind."""

    compute_s: float
    tp_s: float
    """Tensor-parallel collectives."""
    all_to_all_s: float
    """Expert all-to-all."""

    def __add__(self, other: "DirectionCost") -> "DirectionCost":  # type: ignore[override]
        # Unrolled for speed: a search adds up a hundred thousand of them.
        compute_s, tp_s, all_to_all_s = other
        return DirectionCost(self.compute_s + compute_s, self.tp_s + tp_s, self.all_to_all_s + all_to_all_s)


@dataclass(frozen=True)
class BlockTime:
    """One block of a layer (mixer or feed-forward), in the order of execution."""

    forward: tuple[CostItem, ...] = ()
    backward: tuple[CostItem, ...] = ()
    wgrad_s: float = 0.0
    """Part of the backward pass: weight gradients, on which no other rank waits."""
    forward_kernels: float = 0.0
    backward_kernels: float = 0.0
    expert_kernels: tuple[float, float] = (0.0, 0.0)
    """Launches of single experts' kernels, forward and backward."""
    host_syncs: float = 0.0
    """Number of forward device-to-host syncs; the host launches nothing ahead during one."""
    recompute: tuple[tuple[str, float], ...] = ()
    """Seconds that recomputing a part adds to the backward pass. Additive over parts that do not contain each other;
    `moe`
    contains expert_activation and shared_experts, `layer` everything."""

    @cached_property
    def forward_cost(self) -> DirectionCost:
        """Sums of `forward`."""
        return _sum_direction(self.forward)

    @cached_property
    def backward_cost(self) -> DirectionCost:
        """Sums of `backward`."""
        return _sum_direction(self.backward)


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

    @memoised(lambda self, kind, m, peers=None: (kind, m.tp, m.cp, m.mbs, peers))
    def mixer(self, kind: int, mapping: ParallelMapping, peers: AttentionPeers | None = None) -> BlockTime:
        """Return the time of the token mixer (attention or a recurrence) of one layer kind.

        With documents (`TrainingWorkload.attention`), `peers` are the ranks that wait for each other; None gives the
        mean work to each rank.
        """
        layer = self.model_spec.kinds[kind]
        if not projections_of(layer).output_width:
            return BlockTime()
        return _MixerCost(self, layer, mapping, self._attention_load(layer, peers)).block_time()

    def _attention_load(self, layer: Layer, peers: AttentionPeers | None) -> AttentionLoad | None:
        """Return the attention work where samples hold documents; None: a sample is one document."""
        loads = self.workload.attention
        if loads is None or layer.attention.is_recurrent:
            return None
        return loads.mean_load(layer.window) if peers is None else loads.load(peers, layer.window)

    def _feed_forward_key(self, kind: int, m: ParallelMapping) -> tuple[object, ...]:
        # cp counts only through the tokens of a rank, unless the ranks of cp lie between the ranks of ep.
        cp = m.cp if self.workload.is_coupled else 1
        experts = (m.ep, m.etp, m.dispatcher) if self.model_spec.kinds[kind].ffn.is_routed else ()
        return (kind, m.tp, m.mbs / m.cp, cp, *experts)

    @memoised(_feed_forward_key)
    def feed_forward(self, kind: int, mapping: ParallelMapping) -> BlockTime:
        """Return the time of the dense MLP or the MoE block of one layer kind."""
        part = self.model_spec.kinds[kind].ffn
        if part.routed:
            return _MoECost(self, part.routed, mapping).block_time()
        return _dense_block(self, part.tp_unit[1], mapping) if part.tp_unit[1] else BlockTime()

    def kernel_counts(self, block: str) -> tuple[float, float]:
        """Return the launches of a block, forward and backward: of a Megatron-like layer, or traced in moefold's."""
        return (KERNEL_COUNTS if self.workload.is_megatron else TRACED_KERNEL_COUNTS)[block]

    def tokens(self, mapping: ParallelMapping) -> float:
        """Return the tokens of a micro-batch on the ranks of one tp group."""
        return mapping.mbs * self.workload.seq_len / mapping.cp

    def tp_gather(self, mapping: ParallelMapping) -> CostItem:
        """Return the time of an all-gather, or a reduce-scatter, of hidden states over tp."""
        num_bytes = self.tokens(mapping) * self.model_spec.hidden_size * self.gemm.value_bytes
        return CostItem("tp_comm", all_gather_s(self.device, RankGroup(mapping.tp, 1), num_bytes))


class _MixerCost:
    """Cost of the attention block: norm, all-gather, projections, core, projection, reduce-scatter, residual."""

    def __init__(
        self, layer_costs: LayerCostModel, layer: Layer, mapping: ParallelMapping, load: AttentionLoad | None
    ) -> None:
        self.layer_costs = layer_costs
        self.layer = layer
        self.mixer = projections_of(layer)
        self.load = load
        self.tp = mapping.tp
        self.cp = mapping.cp
        self.mbs = mapping.mbs
        self.tokens = layer_costs.tokens(mapping)
        self.hidden = layer_costs.model_spec.hidden_size
        self.gather = layer_costs.tp_gather(mapping)

    def block_time(self) -> BlockTime:
        costs = self.layer_costs
        mixer = self.mixer
        hidden = self.hidden
        tokens = self.tokens
        tp = self.tp
        gemm = costs.gemm
        gather = self.gather
        project, project_back, weights = self._projections_s()
        heads = tokens * (mixer.sharded_width + mixer.output_width) / tp * gemm.value_bytes
        stream_bytes = tokens / tp * hidden * gemm.value_bytes
        # Norm and residual move 5 hidden widths; RoPE and head norms read and write all heads.
        passes = gemm.memory_bound_s(5 * stream_bytes + 2 * heads)
        core, core_back = self._core_s()
        if self.layer.attention.is_recurrent:
            ring, ring_back = self._state_exchange_s(self.layer.core)
        elif self.load is not None and self.load.is_planned:
            ring, ring_back = self._exchange_s(self.layer.core, self.load)
        else:
            ring, ring_back = self._exposed_ring_s(self.layer.core, core, core_back)
        part = "attention"
        forward = (
            CostItem(part, passes),
            gather,
            CostItem(part, project + core),
            CostItem("cp_comm", ring),
            gather,
        )
        backward = (
            gather,
            CostItem(part, project_back + weights + core_back + 1.6 * passes),
            CostItem("cp_comm", ring_back),
            gather,
        )
        forward_kernels, backward_kernels = costs.kernel_counts("mixer")
        core_again = 0.0 if self._recomputes_core else core
        recompute = [("norms", gemm.memory_bound_s(2 * stream_bytes)), ("core_attention", core_again)]
        if mixer.latent_rank:
            up = gemm.matmul_s(tokens, mixer.sharded_width // tp, mixer.latent_rank)
            own = self.layer.attention.own_recompute_parts
            recompute += [(part, up + gemm.memory_bound_s(heads)) for part in own]
        return BlockTime(forward, backward, weights, forward_kernels, backward_kernels, recompute=tuple(recompute))

    @property
    def _recomputes_core(self) -> bool:
        """Return whether the backward pass recomputes the core in any case: moefold's linear attention does."""
        is_own = self.layer_costs.model_spec.is_trainable and not self.layer_costs.workload.is_megatron
        return is_own and self.layer.attention.is_recurrent

    def _projections_s(self) -> tuple[float, float, float]:
        """Return the seconds of the projections: forward, input gradients and weight gradients."""
        gemm = self.layer_costs.gemm
        mixer = self.mixer
        tokens = self.tokens
        tp = self.tp
        hidden = self.hidden
        width = mixer.sharded_width // tp
        out = mixer.output_width // tp
        depth = mixer.latent_rank or hidden
        forward_s = gemm.matmul_s(tokens, width, depth) + gemm.matmul_s(tokens, hidden, out)
        backward_s = gemm.matmul_s(tokens, depth, width) + gemm.matmul_s(tokens, out, hidden)
        weights = gemm.wgrad_s(tokens, width, depth) + gemm.wgrad_s(tokens, hidden, out)
        if mixer.latent_width:
            local = tokens / tp
            forward_s += gemm.matmul_s(local, mixer.latent_width, hidden)
            backward_s += gemm.matmul_s(local, hidden, mixer.latent_width)
            weights += gemm.wgrad_s(local, mixer.latent_width, hidden)
        if mixer.index_params:
            rows = mixer.index_params // hidden
            forward_s += gemm.matmul_s(tokens / tp, rows, hidden)
            weights += gemm.wgrad_s(tokens / tp, rows, hidden)
        forward_s += gemm.quantize_s(tokens * (depth + out))
        backward_s += gemm.quantize_s(tokens * (width + hidden / tp))
        return forward_s, backward_s, weights

    def _core_s(self) -> tuple[float, float]:
        """Return the seconds of the attention core, forward and backward."""
        layer = self.layer
        core = layer.core
        device = self.layer_costs.device
        seq_len = self.layer_costs.workload.seq_len
        if layer.attention.is_recurrent:
            core_bytes = RECURRENCE_BYTES if core.state_flops else CONVOLUTION_BYTES
            seconds = self.layer_costs.gemm.memory_bound_s(core_bytes * self.mixer.output_width * self.tokens / self.tp)
            if self.cp > 1 and core.state_size:
                # A scan over [D, D + Dv] of each head, with D more columns than its Dv.
                seconds *= 1.0 + SCAN_SHARE * (1 + core.transition_size / core.state_size)
            return seconds, (3 if self._recomputes_core else 2) * seconds
        if self.load is None:
            keys = mean_keys = keys_per_token(layer.window, seq_len, causal=True, chunk_size=layer.chunk)
            # A step of ring attention has the queries of a rank and half of the keys of another, or half and all
            # (arXiv:2310.03294). No mask hides any: at least as many keys for each query as in a sequence of S / cp.
            chunk = seq_len / self.cp
        else:
            keys = self.load.keys
            mean_keys = self.load.mean_keys
            chunk = self.load.kernel_rows
        if core.selected:
            return self._sparse_core_s(core, keys)
        flops = 2.0 * keys * (core.key_width + core.value_width) * core.heads / self.tp * self.tokens
        head = (core.key_width + core.value_width) / 2
        return attention_core_s(device, self.layer_costs.workload.dtype, flops, min(2 * mean_keys, chunk), head)

    def _exchange_s(self, core: AttentionCore, load: AttentionLoad) -> tuple[float, float]:
        """Return the seconds of the rows that planned attention sends, forward and backward."""
        if load.exchange_ranks == 1:
            return 0.0, 0.0
        group = RankGroup(load.exchange_ranks, self.tp)
        sent = self._exchanged_bytes(core, load.sent_queries, load.sent_keys)
        remote = self._exchanged_bytes(core, load.remote_queries, load.remote_keys)
        device = self.layer_costs.device
        return exchange_s(device, group, sent[0], remote[0]), exchange_s(device, group, sent[1], remote[1])

    def _exchanged_bytes(self, core: AttentionCore, queries: float, keys: float) -> tuple[float, float]:
        """Return the bytes of these rows for each token of a rank, forward and backward."""
        heads = core.heads / self.tp
        kv_heads = core.kv_heads / min(self.tp, core.kv_heads)
        widths = TokenWidths(
            query=heads * core.key_width,
            output=heads * core.value_width,
            keys_and_values=kv_heads * (core.key_width + core.value_width),
        )
        rows = self.tokens * queries, self.tokens * keys
        return exchange_bytes(*rows, widths, self.layer_costs.workload.value_bytes)

    def _sparse_core_s(self, core: AttentionCore, keys: float) -> tuple[float, float]:
        """Return the seconds of the indexer's scores, and of attention over copies of the selected keys."""
        costs = self.layer_costs
        selected = min(keys, core.selected)
        width = core.key_width + core.value_width
        flops = 2.0 * selected * width * core.heads / self.tp * self.tokens
        scores = core.index_flops * keys / self.tp * self.tokens
        forward_s, backward_s = attention_core_s(costs.device, costs.workload.dtype, flops, selected, width / 2)
        scores_s = attention_core_s(costs.device, costs.workload.dtype, scores, keys, width / 2)[0] if scores else 0.0
        heads = max(1.0, core.kv_heads / self.tp)
        # Copies of the selected keys and values in float32 are written and read; their gradients also are added.
        copies_s = costs.gemm.memory_bound_s(2 * 4 * self.tokens * selected * heads * core.key_value_width)
        return forward_s + scores_s + copies_s, backward_s + 3 * copies_s

    def _exposed_ring_s(self, core: AttentionCore, core_s: float, core_back_s: float) -> tuple[float, float]:
        """Return the exposed seconds of ring attention's KV sends, forward and backward."""
        device = self.layer_costs.device
        cp = self.cp
        if cp == 1:
            return 0.0, 0.0
        group = RankGroup(cp, self.tp)
        link = next(link for link in device.links if ranks_per_unit(group, link) == cp)
        kv_heads = core.kv_heads / min(self.tp, core.kv_heads)
        kv_bytes = self.tokens * (kv_heads * core.key_value_width + core.index_width)
        kv_bytes *= self.layer_costs.workload.value_bytes
        step = link.latency_s + kv_bytes / (link.bytes_per_s * link.fraction)
        forward_s = (cp - 1) * step
        backward_s = 2 * (cp - 1) * step
        launches = cp * RING_KERNELS * device.kernel_gap_s
        # Partial outputs are corrected in float32: read, scaled, added, written.
        merge = cp * self.layer_costs.gemm.memory_bound_s(12 * self.tokens * core.heads * core.value_width / self.tp)
        # The keys of sparse attention are gathered before any is selected.
        is_exposed = core.selected or not self.layer_costs.workload.overlaps_dp_comm
        overlap = 0.0 if is_exposed else (cp - 1) / cp
        if link is not device.links[0]:
            # Sends between nodes share the cards with the sends of other ranks, and kernels with the copies.
            overlap *= HIDDEN_RING_FRACTION
        hidden = core_s * overlap, core_back_s * overlap
        return max(step, forward_s - hidden[0]) + launches + merge, max(step, backward_s - hidden[1]) + 2 * (
            launches + merge
        )

    def _state_exchange_s(self, core: AttentionCore) -> tuple[float, float]:
        """Return the seconds of the all-gathers of states and of the convolutions' tokens, forward and backward.

        Each rank has two segments of each sample, as in ring attention. The backward pass recomputes the forward pass
        with its all-gathers, and reduce-scatters their gradients.
        """
        if self.cp == 1:
            return 0.0, 0.0
        group = RankGroup(self.cp, self.tp)
        segments = SEGMENTS_PER_RANK * self.cp * self.mbs / self.tp
        # A segment changes the states of all heads by [D, D + Dv] of each head.
        states = core.transition_size + core.state_size
        tokens = (core.conv_kernel - 1) * core.conv_width
        sent = segments * states * STATE_BYTES, segments * tokens * self.layer_costs.workload.value_bytes
        seconds = sum((all_gather_s(self.layer_costs.device, group, size) for size in sent if size), 0.0)
        return seconds, 2 * seconds


def attention_core_s(device: Device, dtype: str, flops: float, length: float, head_size: float) -> tuple[float, float]:
    """Return the seconds of fused causal attention, forward and backward.

    Args:
        device: the device.
        dtype: compute type.
        flops: FLOPs of the forward pass, counting the causal half.
        length: tokens of a sequence, or of the part of it that one kernel computes.
        head_size: mean of the head sizes of keys and values.
    """
    length = max(length, MIN_ATTENTION_LENGTH)
    speed = min(1.0, head_size / FULL_SPEED_HEAD_SIZE) / device.dtype_slowdown(dtype)
    forward_flops_per_s = speed * device.attention_forward_flops * length / (length + device.attention_forward_half)
    backward_flops_per_s = speed * device.attention_backward_flops * length / (length + device.attention_backward_half)
    return flops / forward_flops_per_s, ATTENTION_BACKWARD_FLOP_RATIO * flops / backward_flops_per_s


def _dense_block(layer_costs: LayerCostModel, width: int, mapping: ParallelMapping) -> BlockTime:
    """Return the time of a dense MLP with its norm and residual."""
    gemm = layer_costs.gemm
    hidden = layer_costs.model_spec.hidden_size
    tp = mapping.tp
    tokens = layer_costs.tokens(mapping)
    gather = layer_costs.tp_gather(mapping)
    forward_s, backward_s, weights = swiglu_mlp_s(gemm, tokens, hidden, width // tp, 3)
    passes = gemm.memory_bound_s(5 * tokens / tp * hidden * gemm.value_bytes)
    forward = (CostItem("dense_mlp", passes), gather, CostItem("dense_mlp", forward_s), gather)
    backward = (gather, CostItem("dense_mlp", backward_s + weights + 1.6 * passes), gather)
    recompute = (
        ("norms", gemm.memory_bound_s(2 * tokens / tp * hidden * gemm.value_bytes)),
        ("dense_mlp", forward_s + 2 * gather.seconds),
    )
    return BlockTime(forward, backward, weights, *layer_costs.kernel_counts("dense"), recompute=recompute)


@lru_cache(maxsize=16384)
def swiglu_mlp_s(
    gemm: GemmCost,
    num_tokens: float,
    hidden: int,
    width: int,
    num_matrices: int,
    groups: int = 0,
    activation_passes: float = 1.0,
) -> tuple[float, float, float]:
    """Return the seconds of an MLP with its activation: forward, input gradients, weight gradients."""
    inner = (num_matrices - 1) * width
    fuses = groups > 0 and activation_passes == 1.0 and num_matrices == 3 and gemm.fuses_grouped_gemm
    n = max(1, groups)
    forward_s = gemm.matmul_s(num_tokens, inner, hidden, groups=n, fused=fuses)
    forward_s += gemm.matmul_s(num_tokens, hidden, width, groups=n, fused=fuses)
    backward_s = gemm.matmul_s(num_tokens, hidden, inner, groups=n, fused=fuses)
    backward_s += gemm.matmul_s(num_tokens, width, hidden, groups=n, fused=fuses)
    weights = gemm.wgrad_s(num_tokens, inner, hidden, groups=n, fused=fuses)
    weights += gemm.wgrad_s(num_tokens, hidden, width, groups=n, fused=fuses)
    forward_s += gemm.quantize_s(num_tokens * (hidden + width), fused=fuses)
    backward_s += gemm.quantize_s(num_tokens * (hidden + inner), fused=fuses)
    if not fuses:
        forward_s += activation_passes * gemm.memory_bound_s(num_tokens * (inner + width) * gemm.value_bytes)
        backward_s += activation_passes * gemm.memory_bound_s(num_tokens * (2 * inner + width) * gemm.value_bytes)
    return forward_s, backward_s, weights


class _MoECost:
    """Cost of a MoE block: norm, router, permutation, dispatch, experts, combine, and the shared expert."""

    def __init__(self, layer_costs: LayerCostModel, part: RoutedPart, mapping: ParallelMapping) -> None:
        self.layer_costs = layer_costs
        self.mapping = mapping
        self.part = part
        self.num_matrices = matrices_of_expert(part)
        self.top_k = part.mean_active
        """Experts of a token that compute, on average."""
        self.tp = mapping.tp
        self.ep = mapping.ep
        self.etp = mapping.etp
        self.tokens = layer_costs.tokens(mapping)
        self.local_tokens = self.tokens / self.tp
        self.expert_hidden_size = part.token_size(layer_costs.model_spec.hidden_size)
        factor = layer_costs.workload.capacity_factor
        self.routed_tokens = self.local_tokens * self.top_k * (min(1.0, factor) if factor else 1.0)

    def block_time(self) -> BlockTime:
        costs = self.layer_costs
        part = self.part
        gemm = self.layer_costs.gemm
        hidden = costs.model_spec.hidden_size
        load = costs.workload.imbalance_at(self.ep, part.num_experts)
        routed_tokens = self.routed_tokens * load * self.etp
        local_experts = max(1, part.num_experts // self.ep)
        experts, experts_back, weights = swiglu_mlp_s(
            gemm,
            routed_tokens,
            self.expert_hidden_size,
            max(1, part.intermediate_size // self.etp),
            self.num_matrices,
            local_experts,
            self._activation_passes,
        )
        dispatch = self._ep_comm(routed_tokens, costs.workload.dispatch_bytes)
        comm = self._ep_comm(routed_tokens, gemm.value_bytes)
        router = self._router_s()
        permute = self._permute_s(routed_tokens, local_experts)
        passes = gemm.memory_bound_s(5 * self.local_tokens * hidden * gemm.value_bytes)
        forward = [
            CostItem("router", router + passes),
            CostItem("permute", permute),
            *dispatch,
            CostItem("experts", experts),
        ]
        forward += [*reversed(comm), CostItem("permute", permute)]
        backward = [CostItem("permute", permute), *comm, CostItem("experts", experts_back + weights), *reversed(comm)]
        backward += [CostItem("permute", permute), CostItem("router", 2 * router + 1.6 * passes)]
        forward_kernels, backward_kernels = self._kernel_counts()
        inner = self.num_matrices * max(1, part.intermediate_size // self.etp)
        recompute = [("norms", gemm.memory_bound_s(2 * self.local_tokens * hidden * gemm.value_bytes))]
        activation = gemm.memory_bound_s(routed_tokens * inner * gemm.value_bytes)
        if not costs.workload.is_megatron:
            # The outputs of the two inner projections are not saved either, so these GEMMs are recomputed.
            width = (self.num_matrices - 1) * max(1, part.intermediate_size // self.etp)
            activation += gemm.matmul_s(routed_tokens, width, self.expert_hidden_size, groups=local_experts)
        recompute.append(("expert_activation", activation))
        if part.shared_width:
            shared_forward, shared_backward, shared_weights = self._shared_expert()
            forward += shared_forward
            backward += shared_backward
            weights += shared_weights
            forward_kernels = forward_kernels + costs.kernel_counts("shared_experts")[0]
            backward_kernels = backward_kernels + costs.kernel_counts("shared_experts")[1]
            recompute.append(("shared_experts", sum(work.seconds for work in shared_forward)))
        recompute.append(("moe", sum(work.seconds for work in forward)))
        syncs = 0.0 if costs.workload.capacity_factor else 1.0
        return BlockTime(
            tuple(forward),
            tuple(backward),
            weights,
            forward_kernels,
            backward_kernels,
            self._expert_kernel_counts(local_experts),
            syncs,
            tuple(recompute),
        )

    @property
    def _activation_passes(self) -> float:
        """Memory passes of the experts' activation; a clamped one with biases took more before it was fused."""
        if self._has_fused_activation:
            return 1.0
        return CLAMPED_SWIGLU_PASSES * (UNFUSED_CLAMP_FACTOR if self.layer_costs.workload.unfused_clamp else 1.0)

    @property
    def _has_fused_activation(self) -> bool:
        return self.part.activation.is_swiglu and not self.part.bias

    @property
    def _fuses_experts(self) -> bool:
        return self._has_fused_activation and self.num_matrices == 3 and self.layer_costs.gemm.fuses_grouped_gemm

    def _kernel_counts(self) -> tuple[float, float]:
        """Return the kernel launches of the block, forward and backward, less `_expert_kernel_counts`."""
        forward_kernels, backward_kernels = self.layer_costs.kernel_counts("moe")
        if self._fuses_experts:
            return forward_kernels / 2, backward_kernels / 2
        if self.layer_costs.workload.capacity_factor and not self.layer_costs.workload.is_megatron:
            return forward_kernels + DROP_KERNELS[0], backward_kernels + DROP_KERNELS[1]
        return forward_kernels, backward_kernels

    def _expert_kernel_counts(self, local_experts: int) -> tuple[float, float]:
        """Return the launches of single experts' kernels; moefold and fused experts have one for all of them."""
        if self._fuses_experts or not self.layer_costs.workload.is_megatron:
            return 0.0, 0.0
        cast = self.layer_costs.gemm.quantize_bytes > 0
        per_expert = (EXPERT_KERNELS[0] + cast * CAST_KERNELS[0], EXPERT_KERNELS[1] + cast * CAST_KERNELS[1])
        return local_experts * per_expert[0], local_experts * per_expert[1]

    def _router_s(self) -> float:
        """Return the seconds of the router: logits in float32, scores, top-k and counts.

        They read [T, H] once and [T, E] several times.
        """
        hidden = self.layer_costs.model_spec.hidden_size
        experts = self.part.num_choices
        flops = 2.0 * self.local_tokens * hidden * experts
        rate = self.layer_costs.device.peak("bf16") * 0.1
        return flops / rate + self.layer_costs.gemm.memory_bound_s(
            self.local_tokens * (6 * hidden + ROUTER_BYTES * experts)
        )

    def _permute_s(self, routed_tokens: float, local_experts: int) -> float:
        """Return the seconds of the permutation on one side: expand the tokens, and sort received tokens by expert.

        Routed tokens arrive in the order of their senders, and are sorted after the etp group has gathered them: a rank
        with
        one expert, or with all of them, has nothing to sort (`AllToAllMetadata.order`; Megatron-Core's dispatcher does
        the
        same).
        """
        gemm = self.layer_costs.gemm
        if self._fuses_experts:
            return gemm.memory_bound_s(
                (self.local_tokens + routed_tokens / self.etp) * self.expert_hidden_size * gemm.value_bytes
            )
        is_sorted = local_experts == 1 or self.ep * self.etp == 1
        sorting = 0.0 if is_sorted else 2 * routed_tokens
        passes = UNFUSED_PERMUTE_PASSES if self._permutes_unfused else 1.0
        return passes * gemm.memory_bound_s(
            (self.local_tokens + self.routed_tokens + sorting) * self.expert_hidden_size * gemm.value_bytes
        )

    @property
    def _permutes_unfused(self) -> bool:
        """Return whether separate kernels permute; DeepEP, HybridEP and moefold have fused ones."""
        return self.layer_costs.workload.is_megatron and not self.mapping.dispatcher.kernel_package

    def _ep_comm(self, routed_tokens: float, value_bytes: float) -> tuple[CostItem, ...]:
        """Return the dispatch collectives of one direction, of rows of `value_bytes` a number."""
        row_bytes = self.expert_hidden_size * value_bytes
        sent = SentTokens(self.local_tokens, self.routed_tokens, routed_tokens, row_bytes, self.ep, self.etp)
        return tuple(map(self._transfer, self.mapping.dispatcher.traffic(sent)))

    def _transfer(self, transfer: Transfer) -> CostItem:
        """Return the time of a collective; ranks of ep wait for the busiest of them."""
        costs = self.layer_costs
        group, imbalance = {
            "ep": (RankGroup(self.ep, self.ep_stride), costs.workload.imbalance_at(self.ep, self.part.num_experts)),
            "etp": (RankGroup(self.etp, 1), 1.0),
        }[transfer.axis]
        if transfer.gathers:
            seconds = all_gather_s(costs.device, group, transfer.num_bytes)
        else:
            routing = GroupLimitedRouting(self.top_k, self.part.router.num_groups, self.part.router.top_groups)
            once = routing if transfer.sends_once else None
            seconds = all_to_all_s(costs.device, group, transfer.num_bytes, routing=once)
        return CostItem(f"{transfer.axis}_comm", seconds * imbalance)

    @property
    def ep_stride(self) -> int:
        """Distance of ep neighbours: etp if folded; if coupled, the ranks of tp and cp lie between them."""
        return self.tp * self.mapping.cp if self.layer_costs.workload.is_coupled else self.etp

    def _shared_expert(self) -> tuple[list[CostItem], list[CostItem], float]:
        gemm = self.layer_costs.gemm
        hidden = self.layer_costs.model_spec.hidden_size
        width = max(1, self.part.shared_width // self.tp)
        forward_s, backward_s, weights = swiglu_mlp_s(gemm, self.tokens, hidden, width, self.num_matrices)
        gather = self.layer_costs.tp_gather(self.mapping)
        part = "shared_experts"
        return (
            [gather, CostItem(part, forward_s), gather],
            [gather, CostItem(part, backward_s + weights), gather],
            weights,
        )
