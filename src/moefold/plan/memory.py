"""A first estimate of one rank's memory under a mapping. Torch-free."""

from dataclasses import dataclass

from moefold.plan.device import GIB, Device
from moefold.plan.flop_count import layer_parameters
from moefold.plan.mapping import Mapping
from moefold.plan.shape import BYTES, FeedForward, Mixer, ModelShape
from moefold.plan.stage_split import split_stages
from moefold.plan.workload import Workload

OVERHEAD_GIB = 3.0
"""CUDA context, NCCL buffers and what the allocator cannot fill."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes of the fullest rank, by part."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    dispatch: float
    logits: float
    workspace: float
    capacity: float

    @property
    def total(self) -> float:
        """All parts."""
        parts = (self.weights, self.gradients, self.optimizer, self.activations)
        return sum(parts) + self.dispatch + self.logits + self.workspace

    @property
    def fits(self) -> bool:
        """Whether the device has so much."""
        return self.total <= self.capacity


def memory_bytes(shape: ModelShape, mapping: Mapping, workload: Workload, device: Device) -> MemoryEstimate:
    """Estimate the fullest rank of a mapping."""
    m = mapping
    dense, experts, layers = held_by_first_rank(shape, m, workload)
    shards, expert_shards = m.dp * m.cp, m.edp
    if workload.shards_over_dp_alone:
        shards, expert_shards = m.dp, max(1, m.edp // m.cp)
    weights, gradients, optimizer = (
        _state(size, dense, experts, m.zero >= level, (shards, expert_shards))
        for size, level in ((BYTES, 3), (workload.gradient_bytes, 2), (workload.optimizer_bytes, 1))
    )
    if "optimizer" in m.offload:
        optimizer = 0.0
    tokens = m.mbs * workload.seq_len / m.cp
    flights = in_flight(m, workload)
    per_kind = [layer_bytes(shape, kind, m, workload) for kind in range(len(shape.kinds))]
    activations = flights * tokens * sum(count * size for count, size in zip(layers, per_kind, strict=True))
    if "activations" in m.offload:
        activations *= 0.5
    largest = max(
        size[0] / m.tp + size[1] / (m.ep * m.etp)
        for size in (layer_parameters(shape, kind) for kind in range(len(shape.kinds)))
    )
    copies = max(_rows(kind.feed_forward, workload) for kind in shape.kinds)
    workspace = OVERHEAD_GIB * GIB + (3 * largest * BYTES if m.zero == 3 else 0.0)
    last = m.pp == 1
    return MemoryEstimate(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        dispatch=2 * tokens / m.tp * copies * shape.hidden_size * BYTES,
        logits=tokens * shape.vocab_size / m.tp * 4 if last else 0.0,
        workspace=workspace,
        capacity=device.memory_bytes,
    )


def _state(size: float, dense: float, experts: float, sharded: bool, shards: tuple[int, int]) -> float:
    return size * (dense / shards[0] + experts / shards[1]) if sharded else size * (dense + experts)


def held_by_first_rank(shape: ModelShape, m: Mapping, workload: Workload) -> tuple[float, float, list[int]]:
    """Parameters of the first pipeline rank, outside the experts and of them, and its layers of each kind."""
    chunks = split_stages(shape, m.pp * m.vpp, workload.seq_len)[:: m.pp]
    counts = [sum(column) for column in zip(*(chunk.counts for chunk in chunks), strict=True)]
    dense = experts = 0.0
    for kind, count in enumerate(counts):
        own, routed = layer_parameters(shape, kind)
        dense, experts = dense + count * own, experts + count * routed
    ends = shape.vocab_size * shape.hidden_size * (2 if m.pp == 1 and not shape.tie_embeddings else 1)
    return (dense + ends) / m.tp, experts / (m.ep * m.etp), counts


def in_flight(m: Mapping, workload: Workload) -> float:
    """Micro-batches whose activations the first rank holds, in units of all its layers (arXiv:2104.04473)."""
    n = m.num_micro_batches(workload.global_batch_size)
    if m.schedule == "gpipe":
        return n
    return min(n, m.pp * (1 + (m.pp - 1) / (m.pp * m.vpp)) if m.vpp > 1 else m.pp)


def layer_bytes(shape: ModelShape, kind: int, m: Mapping, workload: Workload) -> float:
    """Activations of one layer that wait for the backward pass, bytes for each token of the rank's tp group."""
    layer, h = shape.kinds[kind], shape.hidden_size
    if "layer" in m.recompute:
        return h * BYTES / m.tp
    kept = 0.0
    norm = 0 if "norms" in m.recompute else h * BYTES
    if layer.mixer:
        kept += (h * BYTES + norm) / m.tp + _mixer_bytes(layer.mixer, m) / m.tp
    if layer.feed_forward:
        kept += (h * BYTES + norm) / m.tp + _feed_forward_bytes(layer.feed_forward, h, m, workload)
    return kept


def _mixer_bytes(mixer: Mixer, m: Mapping) -> float:
    heads = mixer.sharded_width if "mla_up" not in m.recompute or mixer.kind != "mla" else 0
    core = 0 if "core_attention" in m.recompute else mixer.output_width
    return (heads + mixer.latent_width * m.tp + core) * BYTES


def _feed_forward_bytes(layer: FeedForward, h: int, m: Mapping, workload: Workload) -> float:
    if layer.kind == "dense":
        return 0.0 if "dense_mlp" in m.recompute else layer.matrices * layer.width * BYTES / m.tp
    shared = 0 if "shared_experts" in m.recompute else layer.matrices * layer.shared_width
    if "moe" in m.recompute:
        return shared * BYTES / m.tp
    rows = _rows(layer, workload) * m.etp
    inner = (layer.matrices - ("expert_activation" in m.recompute)) * layer.width / m.etp
    return (shared + rows * (inner + (layer.expert_input or h))) * BYTES / m.tp


def _rows(layer: FeedForward | None, workload: Workload) -> float:
    """Copies for each token of a rank that its experts receive."""
    if layer is None or layer.kind != "moe":
        return 0.0
    factor = workload.capacity_factor
    return layer.top_k * workload.load * (min(1.0, factor) if factor else 1.0)
