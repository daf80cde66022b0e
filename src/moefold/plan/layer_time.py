"""Seconds of one layer for one micro-batch, part by part in the order of execution. Torch-free.

Every method remembers its answers by the few integers it depends on, so that a search prices each part of a layer
once: attention knows nothing of the experts' degrees, the experts know nothing of cp but the tokens of a rank.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from moefold.plan.collective import Group, Routing, exchange_s, gather_s, ranks_inside
from moefold.plan.device import Device
from moefold.plan.gemm import Products
from moefold.plan.shape import FeedForward, Mixer, ModelShape
from moefold.plan.workload import Workload

DEDUPLICATING = ("deepep", "hybridep")
"""Dispatchers that send a token once to each rank instead of once for each of its copies."""

KERNELS = {"mixer": (16, 26), "dense": (8, 14), "moe": (44, 66), "shared_experts": (6, 10)}
"""Kernels of a part, forward and backward: counted in a profile's way, as norm, cast, product and element-wise passes
of a Megatron-like layer (arXiv:2603.07685 sec. on CUDA graphs: a MoE layer launches many more than a dense one)."""

STATE_BYTES = 128.0
"""Moved forward for each token and inner channel of a recurrence: convolution, chunk states, scan and gate, each a
kernel that is bound by memory."""

WIDE_HEAD = 128
"""Narrower heads are slower by their width: the exponentials are as many (arXiv:2407.08608 fig. 5 and 6)."""

RING_KERNELS = 9.28
"""Launches of one step of a ring of keys and values, forward: sends, halves, attention, corrections."""

ROUTER_BYTES = 62.7
"""Moved for each token and expert by scores, top-k, masks and counts in float32, forward."""

EXPERT_KERNELS = (2, 4)
"""Products of one expert, forward and backward, each a kernel of its own where they do not share one."""
CAST_KERNELS = (2, 3)
"""Kernels that cast operands of one expert."""

CORE_BACKWARD = 2.5
"""Operations of the attention core's backward pass over those of its forward pass: five products for two."""


@dataclass(frozen=True, slots=True)
class Work:
    """One thing that a layer does."""

    part: str
    seconds: float
    link: str = ""
    """The axis whose ranks talk; empty for compute."""


class WaySums(NamedTuple):
    """One way through a layer or a half of it, in sums."""

    compute_s: float
    tensor_s: float
    """Collectives of tensor parallelism."""
    exchange_s: float
    """Of the experts."""

    def __add__(self, other: "WaySums") -> "WaySums":  # type: ignore[override]
        # Spelled out, as a search adds up a hundred thousand of them.
        compute_s, tensor_s, exchange_s = other
        return WaySums(self.compute_s + compute_s, self.tensor_s + tensor_s, self.exchange_s + exchange_s)


@dataclass(frozen=True)
class BlockTime:
    """One half of a layer: mixer or feed-forward, in the order of execution."""

    forward: tuple[Work, ...] = ()
    backward: tuple[Work, ...] = ()
    weight_s: float = 0.0
    """Of the backward pass: the weights' gradients, which no other rank waits for."""
    forward_kernels: float = 0.0
    backward_kernels: float = 0.0
    syncs: float = 0.0
    """How often the host must wait for a number from the device, forward: it launches nothing ahead meanwhile."""
    recompute: tuple[tuple[str, float], ...] = ()
    """Seconds that running a part again adds to the backward pass. Additive over parts that do not contain each other;
    `moe` contains expert_activation and shared_experts, `layer` everything."""

    @cached_property
    def ahead(self) -> WaySums:
        """The sums of `forward`."""
        return _sums(self.forward)

    @cached_property
    def behind(self) -> WaySums:
        """The sums of `backward`."""
        return _sums(self.backward)


def _sums(works: tuple[Work, ...]) -> WaySums:
    exchange = sum(work.seconds for work in works if work.part == "ep_comm")
    tensor = sum(work.seconds for work in works if work.part == "tp_comm")
    return WaySums(sum(work.seconds for work in works if work.part not in ("ep_comm", "tp_comm")), tensor, exchange)


class LayerTimes:
    """Prices the layers of one model on one device."""

    def __init__(self, shape: ModelShape, device: Device, workload: Workload) -> None:
        self.shape, self.device, self.workload = shape, device, workload
        self.products = Products(device, workload)
        self._mixers: dict[tuple[int, ...], BlockTime] = {}
        self._forwards: dict[tuple[int | float | str, ...], BlockTime] = {}

    def mixer(self, kind: int, tp: int, cp: int, mbs: int) -> BlockTime:
        """Attention or a recurrence, of one layer kind."""
        key = (kind, tp, cp, mbs)
        if key not in self._mixers:
            mixer = self.shape.kinds[kind].mixer
            self._mixers[key] = _MixerPrice(self, mixer, tp, cp, mbs).block() if mixer else BlockTime()
        return self._mixers[key]

    def feed_forward(self, kind: int, tp: int, cp: int, mbs: int, ep: int, etp: int, dispatcher: str) -> BlockTime:
        """The dense product or the experts of one layer kind."""
        layer = self.shape.kinds[kind].feed_forward
        if layer is None:
            return BlockTime()
        is_moe = layer.kind == "moe"
        # Of cp nothing counts but the tokens of a rank, unless experts' ranks lie behind those of cp.
        inputs = (tp, cp, mbs) if self.workload.coupled else (tp, mbs / cp)
        key = (kind, *inputs, ep, etp, dispatcher) if is_moe else (kind, *inputs)
        if key not in self._forwards:
            if is_moe:
                price = _ExpertPrice(self, layer, (tp, cp, mbs), (ep, etp, dispatcher))
                self._forwards[key] = price.block()
            else:
                self._forwards[key] = _dense_block(self, layer.width, layer.matrices, tp, cp, mbs)
        return self._forwards[key]

    def tokens(self, cp: int, mbs: int) -> float:
        """Tokens of a micro-batch on the ranks of one tp group."""
        return mbs * self.workload.seq_len / cp


class _MixerPrice:
    """Attention of one layer: norm, gather, projections, core, projection, scatter, residual."""

    def __init__(self, times: LayerTimes, mixer: Mixer, tp: int, cp: int, mbs: int) -> None:
        self.times, self.mixer, self.tp, self.cp, self.mbs = times, mixer, tp, cp, mbs
        self.tokens = times.tokens(cp, mbs)
        self.hidden = times.shape.hidden_size

    def block(self) -> BlockTime:
        times, mixer, hidden, tokens, tp = self.times, self.mixer, self.hidden, self.tokens, self.tp
        products = times.products
        gather = gather_s(times.device, Group(tp, 1), tokens * hidden * products.value_bytes)
        project, project_back, weights = self._projections()
        heads = tokens * (mixer.sharded_width + mixer.output_width) / tp * products.value_bytes
        thin = tokens / tp * hidden * products.value_bytes
        # Norm and residual move 5 widths of the stream, rotation and head norms read and write what the heads have.
        passes = products.pass_s(5 * thin + 2 * heads)
        core, core_back = self._core()
        ring, ring_back = self._ring(core, core_back)
        part = "attention"
        forward = (
            Work(part, passes),
            Work("tp_comm", gather, "tp"),
            Work(part, project + core),
            Work("cp_comm", ring, "cp"),
            Work("tp_comm", gather, "tp"),
        )
        backward = (
            Work("tp_comm", gather, "tp"),
            Work(part, project_back + weights + core_back + 1.6 * passes),
            Work("cp_comm", ring_back, "cp"),
            Work("tp_comm", gather, "tp"),
        )
        ahead, behind = KERNELS["mixer"]
        again = [("norms", products.pass_s(2 * thin)), ("core_attention", core)]
        if mixer.latent_rank:
            up = products.product_s(tokens, mixer.sharded_width // tp, mixer.latent_rank)
            again.append(("mla_up", up + products.pass_s(heads)))
        return BlockTime(forward, backward, weights, ahead, behind, 0.0, tuple(again))

    def _projections(self) -> tuple[float, float, float]:
        """Seconds of the projections forward, of their inputs' gradients and of their weights' gradients."""
        products, mixer, tokens, tp, hidden = self.times.products, self.mixer, self.tokens, self.tp, self.hidden
        width, out = mixer.sharded_width // tp, mixer.output_width // tp
        depth = mixer.latent_rank or hidden
        ahead = products.product_s(tokens, width, depth) + products.product_s(tokens, hidden, out)
        behind = products.product_s(tokens, depth, width) + products.product_s(tokens, out, hidden)
        weights = products.weight_gradient_s(tokens, width, depth) + products.weight_gradient_s(tokens, hidden, out)
        if mixer.latent_width:
            local = tokens / tp
            ahead += products.product_s(local, mixer.latent_width, hidden)
            behind += products.product_s(local, hidden, mixer.latent_width)
            weights += products.weight_gradient_s(local, mixer.latent_width, hidden)
        ahead += products.quantize_s(tokens * (depth + out))
        behind += products.quantize_s(tokens * (width + hidden / tp))
        return ahead, behind, weights

    def _core(self) -> tuple[float, float]:
        """Seconds of the attention core, forward and backward."""
        mixer, device, seq_len = self.mixer, self.times.device, self.times.workload.seq_len
        if not mixer.heads:
            seconds = self.times.products.pass_s(STATE_BYTES * mixer.output_width * self.tokens / self.tp)
            return seconds, 2 * seconds
        window = mixer.window
        keys = window - window * window / (2 * seq_len) if 0 < window < seq_len else seq_len / 2
        flops = 2.0 * keys * (mixer.head_size + mixer.value_size) * mixer.heads / self.tp * self.tokens
        # A ring works on pairs of half pieces, so that causal ranks have equal work (arXiv:2310.03294).
        piece = seq_len / self.cp / 2 if self.cp > 1 else float(seq_len)
        length = max(min(2 * keys, piece), 256.0)
        head = (mixer.head_size + mixer.value_size) / 2
        narrow = min(1.0, head / WIDE_HEAD) / device.slowdown(self.times.workload.dtype)
        ahead = narrow * device.attention_forward_flops * length / (length + device.attention_forward_half)
        behind = narrow * device.attention_backward_flops * length / (length + device.attention_backward_half)
        return flops / ahead, CORE_BACKWARD * flops / behind

    def _ring(self, core: float, core_back: float) -> tuple[float, float]:
        """Seconds that the exchange of keys and values is longer than the core, under which it runs."""
        mixer, device, cp = self.mixer, self.times.device, self.cp
        if cp == 1 or not mixer.heads:
            return 0.0, 0.0
        group = Group(cp, self.tp)
        link = next(link for link in device.links if ranks_inside(group, link) == cp)
        piece = self.tokens * mixer.key_heads / min(self.tp, mixer.key_heads)
        piece *= (mixer.head_size + mixer.value_size) * self.times.workload.value_bytes
        step = link.latency_s + piece / (link.bytes_per_s * link.fraction)
        ahead, behind = (cp - 1) * step, 2 * (cp - 1) * step
        launches = cp * RING_KERNELS * device.kernel_gap_s
        # Partial outputs are corrected in float32: read, scaled, added, written.
        merge = cp * self.times.products.pass_s(12 * self.tokens * mixer.heads * mixer.value_size / self.tp)
        hidden = core * (cp - 1) / cp, core_back * (cp - 1) / cp
        return max(step, ahead - hidden[0]) + launches + merge, max(step, behind - hidden[1]) + 2 * (launches + merge)


def _dense_block(times: LayerTimes, width: int, matrices: int, tp: int, cp: int, mbs: int) -> BlockTime:
    """A dense feed-forward, with its norm and residual."""
    products, hidden = times.products, times.shape.hidden_size
    tokens = times.tokens(cp, mbs)
    gather = gather_s(times.device, Group(tp, 1), tokens * hidden * products.value_bytes)
    ahead, behind, weights = _swiglu(products, tokens, hidden, width // tp, matrices)
    passes = products.pass_s(5 * tokens / tp * hidden * products.value_bytes)
    comm = Work("tp_comm", gather, "tp")
    forward = (Work("dense_mlp", passes), comm, Work("dense_mlp", ahead), comm)
    backward = (comm, Work("dense_mlp", behind + weights + 1.6 * passes), comm)
    again = (
        ("norms", products.pass_s(2 * tokens / tp * hidden * products.value_bytes)),
        ("dense_mlp", ahead + 2 * gather),
    )
    return BlockTime(forward, backward, weights, *KERNELS["dense"], 0.0, again)


@lru_cache(maxsize=16384)
def _swiglu(
    products: Products, rows: float, hidden: int, width: int, matrices: int, groups: int = 0, passes: float = 1.0
) -> tuple[float, float, float]:
    """Seconds of an inner product pair with its activation: forward, inputs' gradients, weights' gradients."""
    inner = (matrices - 1) * width
    fuses = groups > 0 and passes == 1.0 and matrices == 3 and products.fuses
    n = max(1, groups)
    ahead = products.product_s(rows, inner, hidden, groups=n, fused=fuses)
    ahead += products.product_s(rows, hidden, width, groups=n, fused=fuses)
    behind = products.product_s(rows, hidden, inner, groups=n, fused=fuses)
    behind += products.product_s(rows, width, hidden, groups=n, fused=fuses)
    weights = products.weight_gradient_s(rows, inner, hidden, groups=n, fused=fuses)
    weights += products.weight_gradient_s(rows, hidden, width, groups=n, fused=fuses)
    ahead += products.quantize_s(rows * (hidden + width), fused=fuses)
    behind += products.quantize_s(rows * (hidden + inner), fused=fuses)
    if not fuses:
        ahead += passes * products.pass_s(rows * (inner + width) * products.value_bytes)
        behind += passes * products.pass_s(rows * (2 * inner + width) * products.value_bytes)
    return ahead, behind, weights


class _ExpertPrice:
    """A MoE layer: norm, router, permutation, dispatch, experts, combine, and the shared expert beside it."""

    def __init__(
        self, times: LayerTimes, layer: FeedForward, dense: tuple[int, int, int], moe: tuple[int, int, str]
    ) -> None:
        self.times, self.layer = times, layer
        self.tp, self.cp, self.mbs = dense
        self.ep, self.etp, self.dispatcher = moe
        self.tokens = times.tokens(self.cp, self.mbs)
        self.local = self.tokens / self.tp
        self.width = layer.expert_input or times.shape.hidden_size
        factor = times.workload.capacity_factor
        self.copies = self.local * layer.top_k * (min(1.0, factor) if factor else 1.0)

    def block(self) -> BlockTime:
        times, layer, products = self.times, self.layer, self.times.products
        hidden = times.shape.hidden_size
        load = times.workload.load
        rows = self.copies * load * self.etp
        local_experts = max(1, layer.num_experts // self.ep)
        experts, experts_back, weights = _swiglu(
            products, rows, self.width, max(1, layer.width // self.etp), layer.matrices, local_experts, layer.passes
        )
        there = self._talk(rows, times.workload.dispatch_bytes)
        talk = self._talk(rows, products.value_bytes)
        router = self._router()
        permute = self._permute(rows, local_experts)
        passes = products.pass_s(5 * self.local * hidden * products.value_bytes)
        forward = [Work("router", router + passes), Work("permute", permute), *there, Work("experts", experts)]
        forward += [*reversed(talk), Work("permute", permute)]
        backward = [Work("permute", permute), *talk, Work("experts", experts_back + weights), *reversed(talk)]
        backward += [Work("permute", permute), Work("router", 2 * router + 1.6 * passes)]
        ahead, behind = self._kernels(local_experts)
        inner = layer.matrices * max(1, layer.width // self.etp)
        again = [("norms", products.pass_s(2 * self.local * hidden * products.value_bytes))]
        activation = products.pass_s(rows * inner * products.value_bytes)
        if not times.workload.is_megatron:
            # The two inner projections are not kept either, and run again.
            width = (layer.matrices - 1) * max(1, layer.width // self.etp)
            activation += products.product_s(rows, width, self.width, groups=local_experts)
        again.append(("expert_activation", activation))
        if layer.shared_width:
            beside, beside_back, beside_weights = self._shared()
            forward += beside
            backward += beside_back
            weights += beside_weights
            ahead, behind = ahead + KERNELS["shared_experts"][0], behind + KERNELS["shared_experts"][1]
            again.append(("shared_experts", sum(work.seconds for work in beside)))
        again.append(("moe", sum(work.seconds for work in forward)))
        syncs = 0.0 if times.workload.capacity_factor else 1.0
        return BlockTime(tuple(forward), tuple(backward), weights, ahead, behind, syncs, tuple(again))

    @property
    def _fuses(self) -> bool:
        return self.layer.passes == 1.0 and self.layer.matrices == 3 and self.times.products.fuses

    def _kernels(self, local_experts: int) -> tuple[float, float]:
        """Launches, forward and backward. Products of several experts share a kernel in bfloat16 and where fused."""
        ahead, behind = KERNELS["moe"]
        if self._fuses:
            return ahead / 2, behind / 2
        cast = self.times.products.quantize_bytes > 0
        each = (EXPERT_KERNELS[0] + cast * CAST_KERNELS[0], EXPERT_KERNELS[1] + cast * CAST_KERNELS[1])
        return ahead + local_experts * each[0], behind + local_experts * each[1]

    def _router(self) -> float:
        """Logits in float32, scores, top-k and the counts: passes over [T, H] once and over [T, E] several times."""
        hidden, experts = self.times.shape.hidden_size, self.layer.num_experts
        flops = 2.0 * self.local * hidden * experts
        rate = self.times.device.peak("bf16") * 0.1
        return flops / rate + self.times.products.pass_s(self.local * (6 * hidden + ROUTER_BYTES * experts))

    def _permute(self, rows: float, local_experts: int) -> float:
        """One side's copies: read each token and write its copies, and sort what arrived by expert.

        Copies arrive in the order of their senders, and are sorted once the etp group has gathered them: a rank with
        one expert, or with all of them, has nothing to sort (`AllToAllPlan.order`; Megatron-Core's dispatcher does the
        same).
        """
        products = self.times.products
        if self._fuses:
            return products.pass_s((self.local + rows / self.etp) * self.width * products.value_bytes)
        is_sorted = local_experts == 1 or self.ep * self.etp == 1
        sorting = 0.0 if is_sorted else 2 * rows
        return products.pass_s((self.local + self.copies + sorting) * self.width * products.value_bytes)

    def _talk(self, rows: float, value_bytes: float) -> tuple[Work, Work]:
        """The exchanges of one way, of which the experts get so many rows."""
        dispatch = self._dispatch(value_bytes) * self.times.workload.load
        gather = gather_s(self.times.device, Group(self.etp, 1), rows * self.width * value_bytes)
        return Work("ep_comm", dispatch, "ep"), Work("etp_comm", gather, "etp")

    def _dispatch(self, value_bytes: float) -> float:
        """The exchange of one way over the ep group."""
        layer, device = self.layer, self.times.device
        sent = self.copies * self.width * value_bytes
        group = Group(self.ep, self.ep_stride)
        if self.dispatcher == "allgather":
            return gather_s(device, group, self.local * self.ep * self.width * value_bytes)
        routing = Routing(layer.top_k, layer.num_groups, layer.top_groups)
        return exchange_s(device, group, sent, routing=routing if self.dispatcher in DEDUPLICATING else None)

    @property
    def ep_stride(self) -> int:
        """Folded, ep neighbours are etp apart; coupled, the ranks of tp and cp lie between them."""
        return self.tp * self.cp if self.times.workload.coupled else self.etp

    def _shared(self) -> tuple[list[Work], list[Work], float]:
        products, hidden = self.times.products, self.times.shape.hidden_size
        width = max(1, self.layer.shared_width // self.tp)
        ahead, behind, weights = _swiglu(products, self.tokens, hidden, width, self.layer.matrices)
        gather = Work(
            "tp_comm", gather_s(self.times.device, Group(self.tp, 1), self.tokens * hidden * products.value_bytes), "tp"
        )
        part = "shared_experts"
        return [gather, Work(part, ahead), gather], [gather, Work(part, behind + weights), gather], weights
