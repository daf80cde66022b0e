"""Workload of a step, whatever its mapping: the batch, precision, routing and software.

It also has the load imbalance of recorded routing.
"""

from dataclasses import dataclass, field
from math import log, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from moefold.config.chosen import chosen_in
from moefold.config.groups.dispatcher import WirePart
from moefold.config.groups.optimizer import OptimizerPart
from moefold.config.model import ModelConfig
from moefold.config.sections.moe import MoEConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.cost.state_bytes import ITEM_BYTES
from moefold.errors import ConfigError
from moefold.message_text import Setting

if TYPE_CHECKING:
    from moefold.planner.lengths.balance import DocumentLoads

PRECISIONS = ("bf16", "fp8", "fp8-blockwise", "mxfp8", "nvfp4")
"""Precisions of the GEMMs. fp8 has one scale for a tensor. fp8-blockwise has one for 128 values of an activation and
for 128 x 128 of a weight. mxfp8 has one for 32 values, nvfp4 one for 16 values of 4 bits."""

EXPERT_SPREAD = 1.2
"""Coefficient of variation of the routed tokens of an expert, of one micro-batch and layer, in training. From the four
pairs of natural routing and forced balance in published/README.md, Qwen3-235B on 8 ranks, 16K to 128K tokens."""

CudaGraphs = Literal["none", "partial", "full"]
GRAPH_LAUNCHES: dict[CudaGraphs, tuple[float, float]] = {
    "none": (1.0, 1.0),
    "partial": (0.0, 1.0),
    "full": (0.0, 0.0),
}
"""Share of the kernels that the host launches, of the mixer and of the feed-forward block of a layer."""


@dataclass(frozen=True, slots=True)
class BytesPerParam:
    """Bytes of the states of a parameter."""

    master: int
    """Master weight, or 0 where the bfloat16 weight is the only one."""
    gradient: int
    moment: int
    """Each of the two moments: 2, or the bytes of the gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingWorkload:
    """One optimizer step."""

    seq_len: int
    """Tokens of a sample."""
    global_batch_size: int
    """Samples of a step."""
    precision: str = "bf16"
    """One of PRECISIONS. bf16 stands for GEMMs in the compute type, whatever it is."""
    dtype: str = "bfloat16"
    """The compute type: of activations, of communicated values, and of GEMMs that are not in a lower precision."""
    capacity_factor: float = 0.0
    """0: dropless. Otherwise the maximum of an expert's routed tokens over its even share."""
    imbalance: float = 1.0
    """Routed tokens of the busiest expert-parallel rank over the mean: 1 for forced balance, otherwise
    as `--imbalance` says."""
    routing: "RecordedRouting | None" = None
    """Routing of a run, whose imbalance at each ep takes the place of `imbalance`."""
    expert_spread: float = 0.0
    """Coefficient of variation of an expert's load, which decides `imbalance_at`. 0: `imbalance` decides it."""
    wire: WirePart = field(default_factory=lambda: chosen_in(MoEConfig(), WirePart))
    """Number format of the dispatched tokens. Results and gradients are sent in the compute type."""
    cuda_graphs: CudaGraphs = "none"
    """Scope of the CUDA graphs, which cost no launches: nothing, all but the experts and their all-to-all, or the whole
    step."""
    has_tuned_host: bool = False
    """True if the hosts are tuned as in published runs of the GPUs' vendor: their launches are faster than the device's
    `host_launch_s`, which is the time of other runs."""
    fused_experts: bool = False
    """True if grouped GEMMs of mxfp8 fuse quantisation, SwiGLU and permutation (CuTe DSL kernels of 2026 on Blackwell),
    instead of separate memory-bound passes. Other activations and precisions have no such kernels."""
    drops_unpadded: bool = False
    """True if Megatron-Core drops tokens without padding experts to their capacity, its default: the host waits for the
    number of kept tokens. NVIDIA's recipes pad (`MegatronTokenDropCallback` of nemo-toolkit 2.5.3)."""
    unfused_clamp: bool = False
    """True if separate kernels compute a clamped activation with biases, as Megatron-Core did up to 2025."""
    counts_causal_attention: bool = False
    """True if the FLOP count of the MFU has the half of the attention core that the causal mask leaves, instead of all
    of it. The time is always the time of a causal kernel."""
    counts_mtp: bool = True
    """True if the FLOP count of the MFU includes the MTP layers that run, because they are real work. Some sources
    leave them out."""
    is_coupled: bool = False
    """True if the experts' ranks lie within data parallelism, as before folding: ep neighbours are tp*cp apart."""
    overlaps_dp_comm: bool = True
    """True if parameter all-gathers and gradient reductions overlap with compute. One hardware queue for all kernels,
    which tensor parallelism of Megatron-Core requires (CUDA_DEVICE_MAX_CONNECTIONS=1), serialises them. The sends of
    ring attention are launched before the kernels that hide them, and overlap in any case."""
    shards_over_dp_only: bool = False
    """True if ZeRO shards over dp and replicates over cp, as FSDP did at the time of arXiv:2504.14960 (its table 3
    prints OOM for 465B parameters on 256 GPUs with cp=8)."""
    state_bytes: "BytesPerParam | None" = None
    """Types of master weights, gradients and moments. None: the recipe's types."""
    optimizer: OptimizerPart = field(default_factory=lambda: chosen_in(TrainConfig(), OptimizerPart))
    """AdamW with float32 moments, unless given: published steps use it, and it is the default of a recipe."""
    is_megatron: bool = False
    """True for Megatron-Core with Transformer Engine, the software of most published steps. False for moefold and other
    software on torch's FSDP and pipelines. Megatron-Core's kernels save less, expert_activation recomputes no GEMM, and
    an offloaded optimizer updates on the host."""
    overlaps_tp_comm: bool = False
    """True if the tensor-parallel all-gathers and reduce-scatters overlap with their GEMMs in chunks."""
    reduce_bytes: float = 4.0
    """Bytes of each gradient that ZeRO-3 reduces, 2 for bfloat16."""
    runs_mtp: bool = True
    """True if MTP layers run, where the model has them."""
    attention: "DocumentLoads | None" = None
    """Attention work where samples hold documents of given lengths. None: a sample is one document."""

    @property
    def launched(self) -> tuple[float, float]:
        """Share of the kernels that the host launches, of the mixer and of the feed-forward block of a layer."""
        return GRAPH_LAUNCHES[self.cuda_graphs]

    def max_over_mean(self, ep: int) -> float:
        """Return the routed tokens that the busiest of `ep` ranks computes over the mean, as given or recorded."""
        found = self.imbalance if self.routing is None else max(1.0, self.routing.imbalance(ep))
        return min(found, self.capacity_factor) if self.capacity_factor else found

    def imbalance_at(self, ep: int, num_experts: int) -> float:
        """Return the routed tokens that the busiest of `ep` ranks computes, over the mean: at most all of them.

        With `expert_spread`, the load of a rank is the mean load of its experts, so it varies less with more experts.
        The maximum of ep normal numbers lies about sqrt(2 ln ep) standard deviations above their mean.
        """
        if not self.expert_spread:
            return min(self.max_over_mean(ep), float(ep))
        found = 1.0 + self.expert_spread * sqrt(2.0 * log(ep) * ep / max(ep, num_experts)) if ep > 1 else 1.0
        return min(found, self.capacity_factor) if self.capacity_factor else found

    @property
    def value_bytes(self) -> int:
        """Bytes of an activation value."""
        return ITEM_BYTES[self.dtype]

    @property
    def gemm_precision(self) -> str:
        """The precision of the GEMMs, for display."""
        is_wide = self.dtype != "bfloat16" and not self.is_low_precision
        return self.dtype if is_wide else self.precision

    @property
    def flop_description(self) -> str:
        """Description of the FLOPs that the MFU counts."""
        attention = "half of" if self.counts_causal_attention else "all of"
        return f"{attention} the attention matrix" + ("" if self.counts_mtp else " and no multi-token prediction")

    @property
    def is_low_precision(self) -> bool:
        """True if GEMMs run below 16 bits."""
        return self.precision != "bf16"


def workload_from_config(
    run: RunConfig, moe: MoEConfig, train: TrainConfig, precision: str, **software: Any
) -> TrainingWorkload:
    """Build the workload of a recipe.

    Args:
        precision: precision of its GEMMs, one of PRECISIONS.
        software: other fields of the workload.

    Raises:
        ConfigError: the optimizer has no backward pass.
    """
    optimizer = chosen_in(train, OptimizerPart)
    if not optimizer.needs_gradients:
        raise ConfigError(
            f"train.optimizer={optimizer.kind!r} has no backward pass, and the planner prices steps with one; "
            "plan the mapping with train.optimizer='adamw', or give it in [parallel] (moefold memory counts its bytes)"
        )
    return TrainingWorkload(
        seq_len=train.seq_len,
        global_batch_size=train.global_batch_size,
        precision=precision,
        dtype=run.dtype,
        capacity_factor=moe.capacity_factor,
        wire=chosen_in(moe, WirePart),
        optimizer=optimizer,
        **software,
    )


class RecordedRouting:
    """Recorded routing of a run, as load imbalance of expert-parallel ranks.

    Args:
        folder: a run with `moe.trace_every`, or its folder `routing`.
        model: the model that is priced. It has the experts of the trace.

    Raises:
        ConfigError: there is no trace, it holds no step, or it is of another model.
    """

    def __init__(self, folder: Path, model: ModelConfig) -> None:
        # Lazy import: few plans have a trace.
        from moefold.data.routing_trace import RoutingTrace

        self._trace = RoutingTrace(folder, "--trace")
        shape = self._trace.shape
        theirs = (shape.num_routed_experts, shape.zero_experts, shape.top_k)
        part = model.routed
        ours = (part.num_experts, part.zero_experts, part.top_k) if part else (0, 0, 0)
        if theirs != ours:
            raise ConfigError(
                f"{Setting('--trace')}={str(folder)!r} was traced with model.ffn.moe.num_experts={theirs[0]}, "
                f"zero_experts={theirs[1]} and top_k={theirs[2]}, and the model has {ours[0]}, {ours[1]} and "
                f"{ours[2]}; name a trace of it"
            )
        if not self._trace.steps:
            raise ConfigError(
                f"{Setting('--trace')}={str(folder)!r} holds no step; run with moe.trace_every at least once"
            )
        self.num_steps = len(self._trace.steps)
        self._num_experts = ours[0]
        self._imbalance_by_ep: dict[int, float] = {}

    def imbalance(self, ep: int) -> float:
        """Return the routed tokens of the busiest ep rank over the mean, averaged over steps, layers and all-to-alls.

        One all-to-all has ep samples, or the whole batch if it has fewer: one sample for each rank, as with
        micro-batches of one sample and attention that is not sharded.
        """
        if ep not in self._imbalance_by_ep:
            steps = [self._step_imbalance(step, ep) for step in self._trace.steps]
            self._imbalance_by_ep[ep] = float(np.mean(steps))
        return self._imbalance_by_ep[ep]

    def _step_imbalance(self, step: int, ep: int) -> float:
        shape = self._trace.shape
        samples = min(ep, shape.global_batch_size)
        ratios = []
        for choices in self._trace.step(step):
            for first in range(0, shape.global_batch_size - samples + 1, samples):
                expert_indices = shape.check_expert_indices(choices[first : first + samples], step, "--trace")
                routed_tokens = np.bincount(expert_indices.ravel(), minlength=shape.num_experts)
                # Zero-computation experts are last, and on no rank.
                loads = routed_tokens[: self._num_experts].reshape(ep, -1).sum(1)
                ratios.append(loads.max() / loads.mean())
        return float(np.mean(ratios))
