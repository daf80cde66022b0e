"""Cost of a token mixer, attention or a recurrence: projections, core, and the exchange of context parallelism."""

from functools import lru_cache, partial
from typing import NamedTuple

from moefold.config.layers import Layer
from moefold.cost.flops import keys_per_token
from moefold.cost.hardware import Device
from moefold.planner.cost_model.attention_load import AttentionLoad, exchange_bytes
from moefold.planner.cost_model.block import BACKWARD_PASSES, BlockCost, BlockTime, CostItem
from moefold.planner.cost_model.collective import RankGroup, all_gather_s, exchange_s, ranks_per_unit
from moefold.planner.cost_model.gemm import GemmCost, LinearTimes, sum_times
from moefold.planner.mapping import ParallelMapping

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


class MixerCost(BlockCost):
    """Cost of the attention block: norm, all-gather, projections, core, projection, reduce-scatter, residual."""

    def __init__(
        self, gemm: GemmCost, layer: Layer, mapping: ParallelMapping, load: AttentionLoad | None, *, is_moefold: bool
    ) -> None:
        super().__init__(gemm, layer.hidden_size, mapping)
        self.layer = layer
        self.core = layer.core
        self.mixer = projections_of(layer)
        self.load = load
        self.cp = mapping.cp
        # moefold's linear attention recomputes its core in the backward pass in any case.
        self.recomputes_core = is_moefold and layer.attention.is_recurrent

    def block_time(self) -> BlockTime:
        """Return the time of the block."""
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
