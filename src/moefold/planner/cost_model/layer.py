"""Seconds of one layer for one micro-batch, part by part in the order of execution. Torch-free.

Every method remembers its answers by the few integers it depends on, so that a search prices each part of a layer
once: attention knows nothing of the experts' degrees, the experts know nothing of cp but the tokens of a rank.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from moefold.cost.hardware import Device
from moefold.planner.cost_model.collective import (
    GroupLimitedRouting,
    RankGroup,
    all_gather_s,
    all_to_all_s,
    ranks_per_unit,
)
from moefold.planner.cost_model.gemm import GemmCost
from moefold.planner.cost_model.workload import TrainingWorkload
from moefold.planner.model_spec import FeedForward, ModelSpec, TokenMixer
from moefold.topology.dispatchers import dispatcher_spec

KERNEL_COUNTS = {"mixer": (16, 26), "dense": (8, 14), "moe": (44, 66), "shared_experts": (6, 10)}
"""Kernels of a part, forward and backward: counted in a profile's way, as norm, cast, product and element-wise passes
of a Megatron-like layer (arXiv:2603.07685 sec. on CUDA graphs: a MoE layer launches many more than a dense one)."""

RECURRENCE_BYTES = 128.0
"""Moved forward for each token and inner channel of a recurrence: convolution, chunk states, scan and gate, each a
kernel that is bound by memory."""

FULL_SPEED_HEAD_SIZE = 128
"""Narrower heads are slower by their width: the exponentials are as many (arXiv:2407.08608 fig. 5 and 6)."""

RING_KERNELS = 9.28
"""Launches of one step of a ring of keys and values, forward: sends, halves, attention, corrections."""

ROUTER_BYTES = 62.7
"""Moved for each token and expert by scores, top-k, masks and counts in float32, forward."""

EXPERT_KERNELS = (2, 4)
"""Products of one expert, forward and backward, each a kernel of its own where they do not share one."""
CAST_KERNELS = (2, 3)
"""Kernels that cast operands of one expert."""

ATTENTION_BACKWARD_FLOP_RATIO = 2.5
"""Operations of the attention core's backward pass over those of its forward pass: five products for two."""


@dataclass(frozen=True, slots=True)
class CostItem:
    """One thing that a layer does."""

    part: str
    seconds: float
    comm_axis: str = ""
    """The axis whose ranks talk; empty for compute."""


class DirectionCost(NamedTuple):
    """One way through a layer or a half of it, in sums."""

    compute_s: float
    tp_s: float
    """Collectives of tensor parallelism."""
    all_to_all_s: float
    """Of the experts."""

    def __add__(self, other: "DirectionCost") -> "DirectionCost":  # type: ignore[override]
        # Spelled out, as a search adds up a hundred thousand of them.
        compute_s, tensor_s, exchange_s = other
        return DirectionCost(self.compute_s + compute_s, self.tp_s + tensor_s, self.all_to_all_s + exchange_s)


@dataclass(frozen=True)
class BlockTime:
    """One half of a layer: mixer or feed-forward, in the order of execution."""

    forward: tuple[CostItem, ...] = ()
    backward: tuple[CostItem, ...] = ()
    wgrad_s: float = 0.0
    """Of the backward pass: the weights' gradients, which no other rank waits for."""
    forward_kernels: float = 0.0
    backward_kernels: float = 0.0
    host_syncs: float = 0.0
    """How often the host must wait for a number from the device, forward: it launches nothing ahead meanwhile."""
    recompute: tuple[tuple[str, float], ...] = ()
    """Seconds that running a part again adds to the backward pass. Additive over parts that do not contain each other;
    `expert_sizes` contains expert_activation and shared_experts, `layer` everything."""

    @cached_property
    def forward_cost(self) -> DirectionCost:
        """The sums of `forward`."""
        return _sum_direction(self.forward)

    @cached_property
    def backward_cost(self) -> DirectionCost:
        """The sums of `backward`."""
        return _sum_direction(self.backward)


def _sum_direction(items: tuple[CostItem, ...]) -> DirectionCost:
    exchange = sum(work.seconds for work in items if work.part == "ep_comm")
    tensor = sum(work.seconds for work in items if work.part == "tp_comm")
    return DirectionCost(
        sum(work.seconds for work in items if work.part not in ("ep_comm", "tp_comm")), tensor, exchange
    )


class LayerCostModel:
    """Prices the layers of one model on one device."""

    def __init__(self, model_spec: ModelSpec, device: Device, workload: TrainingWorkload) -> None:
        self.model_spec, self.device, self.workload = model_spec, device, workload
        self.gemm = GemmCost(device, workload)
        self._mixers: dict[tuple[int, ...], BlockTime] = {}
        self._feed_forwards: dict[tuple[int | float | str, ...], BlockTime] = {}

    def mixer(self, kind: int, tp: int, cp: int, mbs: int) -> BlockTime:
        """Attention or a recurrence, of one layer kind."""
        key = (kind, tp, cp, mbs)
        if key not in self._mixers:
            mixer = self.model_spec.kinds[kind].mixer
            self._mixers[key] = _MixerCost(self, mixer, tp, cp, mbs).block_time() if mixer else BlockTime()
        return self._mixers[key]

    def feed_forward(self, kind: int, tp: int, cp: int, mbs: int, ep: int, etp: int, dispatcher: str) -> BlockTime:
        """The dense product or the experts of one layer kind."""
        layer = self.model_spec.kinds[kind].feed_forward
        if layer is None:
            return BlockTime()
        is_moe = layer.kind == "moe"
        # Of cp nothing counts but the tokens of a rank, unless experts' ranks lie behind those of cp.
        inputs = (tp, cp, mbs) if self.workload.is_coupled else (tp, mbs / cp)
        key = (kind, *inputs, ep, etp, dispatcher) if is_moe else (kind, *inputs)
        if key not in self._feed_forwards:
            if is_moe:
                price = _MoECost(self, layer, (tp, cp, mbs), (ep, etp, dispatcher))
                self._feed_forwards[key] = price.block_time()
            else:
                self._feed_forwards[key] = _dense_block(self, layer.width, layer.num_matrices, tp, cp, mbs)
        return self._feed_forwards[key]

    def tokens(self, cp: int, mbs: int) -> float:
        """Tokens of a micro-batch on the ranks of one tp group."""
        return mbs * self.workload.seq_len / cp


class _MixerCost:
    """Attention of one layer: norm, gather, projections, core, projection, scatter, residual."""

    def __init__(self, layer_costs: LayerCostModel, mixer: TokenMixer, tp: int, cp: int, mbs: int) -> None:
        self.layer_costs, self.mixer, self.tp, self.cp, self.mbs = layer_costs, mixer, tp, cp, mbs
        self.tokens = layer_costs.tokens(cp, mbs)
        self.hidden = layer_costs.model_spec.hidden_size

    def block_time(self) -> BlockTime:
        times, mixer, hidden, tokens, tp = self.layer_costs, self.mixer, self.hidden, self.tokens, self.tp
        products = times.gemm
        gather = all_gather_s(times.device, RankGroup(tp, 1), tokens * hidden * products.value_bytes)
        project, project_back, weights = self._projections()
        heads = tokens * (mixer.sharded_width + mixer.output_width) / tp * products.value_bytes
        thin = tokens / tp * hidden * products.value_bytes
        # Norm and residual move 5 widths of the stream, rotation and head norms read and write what the heads have.
        passes = products.memory_bound_s(5 * thin + 2 * heads)
        core, core_back = self._core()
        ring, ring_back = self._ring(core, core_back)
        part = "attention"
        forward = (
            CostItem(part, passes),
            CostItem("tp_comm", gather, "tp"),
            CostItem(part, project + core),
            CostItem("cp_comm", ring, "cp"),
            CostItem("tp_comm", gather, "tp"),
        )
        backward = (
            CostItem("tp_comm", gather, "tp"),
            CostItem(part, project_back + weights + core_back + 1.6 * passes),
            CostItem("cp_comm", ring_back, "cp"),
            CostItem("tp_comm", gather, "tp"),
        )
        ahead, behind = KERNEL_COUNTS["mixer"]
        again = [("norms", products.memory_bound_s(2 * thin)), ("core_attention", core)]
        if mixer.latent_rank:
            up = products.matmul_s(tokens, mixer.sharded_width // tp, mixer.latent_rank)
            again.append(("mla_up", up + products.memory_bound_s(heads)))
        return BlockTime(forward, backward, weights, ahead, behind, 0.0, tuple(again))

    def _projections(self) -> tuple[float, float, float]:
        """Seconds of the projections forward, of their inputs' gradients and of their weights' gradients."""
        products, mixer, tokens, tp, hidden = self.layer_costs.gemm, self.mixer, self.tokens, self.tp, self.hidden
        width, out = mixer.sharded_width // tp, mixer.output_width // tp
        depth = mixer.latent_rank or hidden
        ahead = products.matmul_s(tokens, width, depth) + products.matmul_s(tokens, hidden, out)
        behind = products.matmul_s(tokens, depth, width) + products.matmul_s(tokens, out, hidden)
        weights = products.wgrad_s(tokens, width, depth) + products.wgrad_s(tokens, hidden, out)
        if mixer.latent_width:
            local = tokens / tp
            ahead += products.matmul_s(local, mixer.latent_width, hidden)
            behind += products.matmul_s(local, hidden, mixer.latent_width)
            weights += products.wgrad_s(local, mixer.latent_width, hidden)
        ahead += products.quantize_s(tokens * (depth + out))
        behind += products.quantize_s(tokens * (width + hidden / tp))
        return ahead, behind, weights

    def _core(self) -> tuple[float, float]:
        """Seconds of the attention core, forward and backward."""
        mixer, device, seq_len = self.mixer, self.layer_costs.device, self.layer_costs.workload.seq_len
        if not mixer.num_heads:
            seconds = self.layer_costs.gemm.memory_bound_s(
                RECURRENCE_BYTES * mixer.output_width * self.tokens / self.tp
            )
            return seconds, 2 * seconds
        window = mixer.window
        keys = window - window * window / (2 * seq_len) if 0 < window < seq_len else seq_len / 2
        flops = 2.0 * keys * (mixer.head_size + mixer.value_head_size) * mixer.num_heads / self.tp * self.tokens
        # A ring works on pairs of half pieces, so that causal ranks have equal work (arXiv:2310.03294).
        piece = seq_len / self.cp / 2 if self.cp > 1 else float(seq_len)
        length = max(min(2 * keys, piece), 256.0)
        head = (mixer.head_size + mixer.value_head_size) / 2
        narrow = min(1.0, head / FULL_SPEED_HEAD_SIZE) / device.dtype_slowdown(self.layer_costs.workload.dtype)
        ahead = narrow * device.attention_forward_flops * length / (length + device.attention_forward_half)
        behind = narrow * device.attention_backward_flops * length / (length + device.attention_backward_half)
        return flops / ahead, ATTENTION_BACKWARD_FLOP_RATIO * flops / behind

    def _ring(self, core_forward_s: float, core_backward_s: float) -> tuple[float, float]:
        """Seconds that the exchange of keys and values is longer than the core, under which it runs."""
        mixer, device, cp = self.mixer, self.layer_costs.device, self.cp
        if cp == 1 or not mixer.num_heads:
            return 0.0, 0.0
        group = RankGroup(cp, self.tp)
        link = next(link for link in device.links if ranks_per_unit(group, link) == cp)
        piece = self.tokens * mixer.num_kv_heads / min(self.tp, mixer.num_kv_heads)
        piece *= (mixer.head_size + mixer.value_head_size) * self.layer_costs.workload.value_bytes
        step = link.latency_s + piece / (link.bytes_per_s * link.fraction)
        ahead, behind = (cp - 1) * step, 2 * (cp - 1) * step
        launches = cp * RING_KERNELS * device.kernel_gap_s
        # Partial outputs are corrected in float32: read, scaled, added, written.
        merge = cp * self.layer_costs.gemm.memory_bound_s(
            12 * self.tokens * mixer.num_heads * mixer.value_head_size / self.tp
        )
        hidden = core_forward_s * (cp - 1) / cp, core_backward_s * (cp - 1) / cp
        return max(step, ahead - hidden[0]) + launches + merge, max(step, behind - hidden[1]) + 2 * (launches + merge)


def _dense_block(layer_costs: LayerCostModel, width: int, num_matrices: int, tp: int, cp: int, mbs: int) -> BlockTime:
    """A dense feed-forward, with its norm and residual."""
    products, hidden = layer_costs.gemm, layer_costs.model_spec.hidden_size
    tokens = layer_costs.tokens(cp, mbs)
    gather = all_gather_s(layer_costs.device, RankGroup(tp, 1), tokens * hidden * products.value_bytes)
    ahead, behind, weights = _swiglu(products, tokens, hidden, width // tp, num_matrices)
    passes = products.memory_bound_s(5 * tokens / tp * hidden * products.value_bytes)
    comm = CostItem("tp_comm", gather, "tp")
    forward = (CostItem("dense_mlp", passes), comm, CostItem("dense_mlp", ahead), comm)
    backward = (comm, CostItem("dense_mlp", behind + weights + 1.6 * passes), comm)
    again = (
        ("norms", products.memory_bound_s(2 * tokens / tp * hidden * products.value_bytes)),
        ("dense_mlp", ahead + 2 * gather),
    )
    return BlockTime(forward, backward, weights, *KERNEL_COUNTS["dense"], 0.0, again)


@lru_cache(maxsize=16384)
def _swiglu(
    gemm: GemmCost,
    num_tokens: float,
    hidden: int,
    width: int,
    num_matrices: int,
    groups: int = 0,
    activation_passes: float = 1.0,
) -> tuple[float, float, float]:
    """Seconds of an inner product pair with its activation: forward, inputs' gradients, weights' gradients."""
    inner = (num_matrices - 1) * width
    fuses = groups > 0 and activation_passes == 1.0 and num_matrices == 3 and gemm.fuses_grouped_gemm
    n = max(1, groups)
    ahead = gemm.matmul_s(num_tokens, inner, hidden, groups=n, fused=fuses)
    ahead += gemm.matmul_s(num_tokens, hidden, width, groups=n, fused=fuses)
    behind = gemm.matmul_s(num_tokens, hidden, inner, groups=n, fused=fuses)
    behind += gemm.matmul_s(num_tokens, width, hidden, groups=n, fused=fuses)
    weights = gemm.wgrad_s(num_tokens, inner, hidden, groups=n, fused=fuses)
    weights += gemm.wgrad_s(num_tokens, hidden, width, groups=n, fused=fuses)
    ahead += gemm.quantize_s(num_tokens * (hidden + width), fused=fuses)
    behind += gemm.quantize_s(num_tokens * (hidden + inner), fused=fuses)
    if not fuses:
        ahead += activation_passes * gemm.memory_bound_s(num_tokens * (inner + width) * gemm.value_bytes)
        behind += activation_passes * gemm.memory_bound_s(num_tokens * (2 * inner + width) * gemm.value_bytes)
    return ahead, behind, weights


class _MoECost:
    """A MoE layer: norm, router, permutation, dispatch, experts, combine, and the shared expert beside it."""

    def __init__(
        self,
        layer_costs: LayerCostModel,
        layer: FeedForward,
        attention_sizes: tuple[int, int, int],
        expert_sizes: tuple[int, int, str],
    ) -> None:
        self.layer_costs, self.layer = layer_costs, layer
        self.tp, self.cp, self.mbs = attention_sizes
        self.ep, self.etp, dispatcher = expert_sizes
        self.spec = dispatcher_spec(dispatcher)
        self.tokens = layer_costs.tokens(self.cp, self.mbs)
        self.local_tokens = self.tokens / self.tp
        self.expert_hidden_size = layer.expert_hidden_size or layer_costs.model_spec.hidden_size
        factor = layer_costs.workload.capacity_factor
        self.routed_tokens = self.local_tokens * layer.top_k * (min(1.0, factor) if factor else 1.0)

    def block_time(self) -> BlockTime:
        times, layer, products = self.layer_costs, self.layer, self.layer_costs.gemm
        hidden = times.model_spec.hidden_size
        load = times.workload.effective_imbalance
        rows = self.routed_tokens * load * self.etp
        local_experts = max(1, layer.num_experts // self.ep)
        experts, experts_back, weights = _swiglu(
            products,
            rows,
            self.expert_hidden_size,
            max(1, layer.width // self.etp),
            layer.num_matrices,
            local_experts,
            layer.activation_passes,
        )
        there = self._ep_comm(rows, times.workload.dispatch_bytes)
        talk = self._ep_comm(rows, products.value_bytes)
        router = self._router()
        permute = self._permute(rows, local_experts)
        passes = products.memory_bound_s(5 * self.local_tokens * hidden * products.value_bytes)
        forward = [
            CostItem("router", router + passes),
            CostItem("permute", permute),
            *there,
            CostItem("experts", experts),
        ]
        forward += [*reversed(talk), CostItem("permute", permute)]
        backward = [CostItem("permute", permute), *talk, CostItem("experts", experts_back + weights), *reversed(talk)]
        backward += [CostItem("permute", permute), CostItem("router", 2 * router + 1.6 * passes)]
        ahead, behind = self._kernel_counts(local_experts)
        inner = layer.num_matrices * max(1, layer.width // self.etp)
        again = [("norms", products.memory_bound_s(2 * self.local_tokens * hidden * products.value_bytes))]
        activation = products.memory_bound_s(rows * inner * products.value_bytes)
        if not times.workload.is_megatron:
            # The two inner projections are not kept either, and run again.
            width = (layer.num_matrices - 1) * max(1, layer.width // self.etp)
            activation += products.matmul_s(rows, width, self.expert_hidden_size, groups=local_experts)
        again.append(("expert_activation", activation))
        if layer.shared_width:
            beside, beside_back, beside_weights = self._shared_expert()
            forward += beside
            backward += beside_back
            weights += beside_weights
            ahead, behind = ahead + KERNEL_COUNTS["shared_experts"][0], behind + KERNEL_COUNTS["shared_experts"][1]
            again.append(("shared_experts", sum(work.seconds for work in beside)))
        again.append(("moe", sum(work.seconds for work in forward)))
        syncs = 0.0 if times.workload.capacity_factor else 1.0
        return BlockTime(tuple(forward), tuple(backward), weights, ahead, behind, syncs, tuple(again))

    @property
    def _fuses_experts(self) -> bool:
        return (
            self.layer.activation_passes == 1.0
            and self.layer.num_matrices == 3
            and self.layer_costs.gemm.fuses_grouped_gemm
        )

    def _kernel_counts(self, local_experts: int) -> tuple[float, float]:
        """Launches, forward and backward. Products of several experts share a kernel in bfloat16 and where fused."""
        ahead, behind = KERNEL_COUNTS["moe"]
        if self._fuses_experts:
            return ahead / 2, behind / 2
        cast = self.layer_costs.gemm.quantize_bytes > 0
        each = (EXPERT_KERNELS[0] + cast * CAST_KERNELS[0], EXPERT_KERNELS[1] + cast * CAST_KERNELS[1])
        return ahead + local_experts * each[0], behind + local_experts * each[1]

    def _router(self) -> float:
        """Logits in float32, scores, top-k and the counts: passes over [T, H] once and over [T, E] several times."""
        hidden, experts = self.layer_costs.model_spec.hidden_size, self.layer.num_experts
        flops = 2.0 * self.local_tokens * hidden * experts
        rate = self.layer_costs.device.peak("bf16") * 0.1
        return flops / rate + self.layer_costs.gemm.memory_bound_s(
            self.local_tokens * (6 * hidden + ROUTER_BYTES * experts)
        )

    def _permute(self, routed_tokens: float, local_experts: int) -> float:
        """One side's copies: read each token and write its copies, and sort what arrived by expert.

        Copies arrive in the order of their senders, and are sorted once the etp group has gathered them: a rank with
        one expert, or with all of them, has nothing to sort (`AllToAllMetadata.order`; Megatron-Core's dispatcher does the
        same).
        """
        products = self.layer_costs.gemm
        if self._fuses_experts:
            return products.memory_bound_s(
                (self.local_tokens + routed_tokens / self.etp) * self.expert_hidden_size * products.value_bytes
            )
        is_sorted = local_experts == 1 or self.ep * self.etp == 1
        sorting = 0.0 if is_sorted else 2 * routed_tokens
        return products.memory_bound_s(
            (self.local_tokens + self.routed_tokens + sorting) * self.expert_hidden_size * products.value_bytes
        )

    def _ep_comm(self, routed_tokens: float, value_bytes: float) -> tuple[CostItem, CostItem]:
        """The exchanges of one way, of which the experts get so many rows."""
        dispatch = self._dispatch(value_bytes) * self.layer_costs.workload.effective_imbalance
        gather = all_gather_s(
            self.layer_costs.device, RankGroup(self.etp, 1), routed_tokens * self.expert_hidden_size * value_bytes
        )
        return CostItem("ep_comm", dispatch, "ep"), CostItem("etp_comm", gather, "etp")

    def _dispatch(self, value_bytes: float) -> float:
        """The exchange of one way over the ep group."""
        layer, device = self.layer, self.layer_costs.device
        sent = self.routed_tokens * self.expert_hidden_size * value_bytes
        group = RankGroup(self.ep, self.ep_stride)
        if self.spec.gathers_tokens:
            return all_gather_s(device, group, self.local_tokens * self.ep * self.expert_hidden_size * value_bytes)
        routing = GroupLimitedRouting(layer.top_k, layer.num_groups, layer.top_groups)
        return all_to_all_s(device, group, sent, routing=routing if self.spec.deduplicates else None)

    @property
    def ep_stride(self) -> int:
        """Folded, ep neighbours are etp apart; coupled, the ranks of tp and cp lie between them."""
        return self.tp * self.cp if self.layer_costs.workload.is_coupled else self.etp

    def _shared_expert(self) -> tuple[list[CostItem], list[CostItem], float]:
        products, hidden = self.layer_costs.gemm, self.layer_costs.model_spec.hidden_size
        width = max(1, self.layer.shared_width // self.tp)
        ahead, behind, weights = _swiglu(products, self.tokens, hidden, width, self.layer.num_matrices)
        gather = CostItem(
            "tp_comm",
            all_gather_s(self.layer_costs.device, RankGroup(self.tp, 1), self.tokens * hidden * products.value_bytes),
            "tp",
        )
        part = "shared_experts"
        return [gather, CostItem(part, ahead), gather], [gather, CostItem(part, behind + weights), gather], weights
