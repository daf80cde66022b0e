"""What a step has to do, whatever its mapping: the batch, the precision, the routing and the software.

How uneven the recorded routing of a real run loads the ranks of ep. numpy alone.

Length of a step's pipeline in closed form, by schedule. Torch-free; the simulator plays the same schedules out.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from moefold.config.schema import Config, ModelConfig
from moefold.cost.optimizers import ADAMW, OptimizerSpec, optimizer_of
from moefold.cost.state_memory import ITEM_BYTES
from moefold.data.routing_trace import RoutingTrace
from moefold.errors import ConfigError

PRECISIONS = ("bf16", "fp8", "fp8-blockwise", "mxfp8", "nvfp4")
"""Of the matrix products. fp8 has one scale for a tensor, fp8-blockwise one for 128 values of an activation and for
128 x 128 of a weight, mxfp8 one for 32 values, nvfp4 one for 16 values of 4 bits."""

NATURAL_IMBALANCE = 1.26
"""Copies that reach the busiest expert-parallel rank over the mean, under a router that was trained with a balancing
loss. Fitted on Qwen3-235B with natural routing and forced balance (published/README.md, 16K to 128K tokens)."""

FP8_DISPATCH_BYTES_PER_VALUE = {"fp8-blockwise": 1 + 4 / 128}
"""Of a value on its way to experts, by `moe.dispatch_precision`, where it is not of the compute type: 8 bits, and a
float32 scale for 128."""

CudaGraphs = Literal["none", "partial", "full"]


@dataclass(frozen=True, slots=True)
class BytesPerParam:
    """Bytes of the states of a parameter."""

    master: int
    """Of a master weight; 0 where the bfloat16 weight is the only one."""
    gradient: int
    moment: int
    """Of each of two."""


@dataclass(frozen=True, slots=True)
class OptimizerUpdate:
    """The optimizer; published steps are AdamW's."""

    has_bf16_moments: bool = False
    """Whether moments are bfloat16 between steps."""
    muon_groups: tuple[str, ...] = ()
    """Parts whose matrices are Muon's; empty for AdamW."""
    ns_steps: int = 5
    """Newton-Schulz steps of Muon."""
    optimizer: OptimizerSpec = ADAMW
    """Bytes that an update moves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingWorkload:
    """One optimizer step."""

    seq_len: int
    """Tokens of a sample."""
    global_batch_size: int
    """Samples of a step."""
    precision: str = "bf16"
    """One of PRECISIONS; bf16 stands for products in the compute type, whatever it is."""
    dtype: str = "bfloat16"
    """The compute type: of activations and of what travels, and of products that are no narrower."""
    capacity_factor: float = 0.0
    """0: dropless. Else every expert takes at most so many times its even share of copies."""
    imbalance: float = 1.0
    """Copies of the busiest expert-parallel rank over the mean: 1 for forced balance, else NATURAL_IMBALANCE."""
    dispatch_precision: str = "dtype"
    """`moe.dispatch_precision`: of the rows that experts are sent. Results and gradients travel in the compute type."""
    cuda_graphs: CudaGraphs = "none"
    """What is captured and so costs no launches: nothing, all but the experts and their exchange, or the whole step."""
    fused_experts: bool = False
    """Whether grouped products of mxfp8 quantise, apply SwiGLU and permute in their own kernels (CuTe DSL kernels of
    2026 on Blackwell), instead of in passes over memory of their own. Other activations and precisions have none."""
    counts_causal_attention: bool = False
    """The FLOP count of the MFU takes half of the attention core, as its mask leaves, instead of all of it. The time
    is that of a causal kernel either way."""
    counts_mtp: bool = True
    """The FLOP count of the MFU has the layers of multi-token prediction that run, as they are work that is done; some
    count the model alone that is used later."""
    is_coupled: bool = False
    """The experts' ranks lie within data parallelism, as before MoE Parallel Folding: ep neighbours are tp*cp apart."""
    overlaps_dp_comm: bool = True
    """Whether gathers of parameters and sums of gradients run under compute. One hardware queue for all kernels, as
    tensor parallelism of Megatron-Core asks for (CUDA_DEVICE_MAX_CONNECTIONS=1), runs them one after the other."""
    prefetches_expert_weights: bool = True
    """Whether the weights of a layer's experts are gathered a layer ahead. moefold leaves that to FSDP2, which starts
    the gather when the host comes to the experts: a host that has waited for the counts of an exchange comes late, and
    the gather runs in the open (torchtitan prefetches explicitly for this reason)."""
    shards_over_dp_only: bool = False
    """ZeRO shards over dp, with copies over cp, as FSDP of the time of arXiv:2504.14960 did (its table 3 prints OOM for
    465B parameters on 256 GPUs with cp=8)."""
    state_bytes: "BytesPerParam | None" = None
    """Types of master weights, gradients and moments; None: those of the recipe."""
    update: OptimizerUpdate = OptimizerUpdate()
    """The optimizer."""
    is_megatron: bool = False
    """The software is Megatron-Core with Transformer Engine, on which most published steps were measured, and not
    moefold or another on torch's FSDP and pipelines: its kernels keep less, its pipelines free what was sent,
    expert_activation runs no product again, and an offloaded optimizer updates on the host."""
    overlaps_tp_comm: bool = False
    """Whether gathers and scatters of tensor parallelism run in pieces under their products."""
    reduce_bytes: float = 4.0
    """Of each gradient that ZeRO-3 sums over ranks; 2 where it does so in bfloat16."""
    runs_mtp: bool = True
    """Whether layers of multi-token prediction run, where the model has them."""

    @property
    def effective_imbalance(self) -> float:
        """Copies that the busiest expert-parallel rank works on, over the mean."""
        return min(self.imbalance, self.capacity_factor) if self.capacity_factor else self.imbalance

    @property
    def value_bytes(self) -> int:
        """Of an activation."""
        return ITEM_BYTES[self.dtype]

    @property
    def dispatch_bytes(self) -> float:
        """Of a value on its way to experts."""
        return FP8_DISPATCH_BYTES_PER_VALUE.get(self.dispatch_precision, float(self.value_bytes))

    @property
    def gemm_precision(self) -> str:
        """The precision of the products, as a reader is told it."""
        is_wide = self.dtype != "bfloat16" and not self.is_low_precision
        return self.dtype if is_wide else self.precision

    @property
    def flop_description(self) -> str:
        """What the FLOP count of the MFU has, in words."""
        attention = "half of" if self.counts_causal_attention else "all of"
        return f"{attention} the attention matrix" + ("" if self.counts_mtp else " and no multi-token prediction")

    @property
    def is_low_precision(self) -> bool:
        """Whether products run below 16 bits."""
        return self.precision != "bf16"


def workload_from_config(cfg: Config, precision: str, **software: Any) -> TrainingWorkload:
    """One step of a recipe.

    Args:
        cfg: the recipe.
        precision: of its products, one of PRECISIONS.
        software: what else is known: further fields of a workload.
    """
    return TrainingWorkload(
        seq_len=cfg.train.seq_len,
        global_batch_size=cfg.train.global_batch_size,
        precision=precision,
        dtype=cfg.run.dtype,
        capacity_factor=cfg.moe.capacity_factor,
        dispatch_precision=cfg.moe.dispatch_precision,
        prefetches_expert_weights=False,
        update=OptimizerUpdate(
            cfg.train.moment_dtype == "bfloat16",
            optimizer_of(cfg).matrix_groups(cfg.train),
            cfg.train.muon_ns_steps,
            optimizer_of(cfg),
        ),
        **software,
    )


class RecordedRouting:
    """The recorded choices of a run, as loads of expert-parallel ranks.

    Args:
        folder: a run with `moe.trace_every`, or its folder `routing`.
        model: whose mappings are priced; it has the experts of the trace.

    Raises:
        ConfigError: there is no trace, it holds no step, or it is of another model.
    """

    def __init__(self, folder: Path, model: ModelConfig) -> None:
        self._trace = RoutingTrace(folder, "--trace")
        shape = self._trace.shape
        if (shape.num_experts, shape.top_k) != (model.num_experts, model.top_k):
            raise ConfigError(
                f"--trace={str(folder)!r} was traced with model.num_experts={shape.num_experts} and model.top_k="
                f"{shape.top_k}, and the model has {model.num_experts} and {model.top_k}; name a trace of this model"
            )
        if not self._trace.steps:
            raise ConfigError(f"--trace={str(folder)!r} holds no step; run with moe.trace_every at least once")
        self.num_steps = len(self._trace.steps)
        self._imbalance_by_ep: dict[int, float] = {}

    def imbalance(self, ep: int) -> float:
        """Copies of the busiest ep rank over the mean, averaged over steps, layers and exchanges.

        One exchange is of ep samples, or of the whole batch where it has fewer: a sample for each rank, as with
        micro-batches of one and attention that is not cut.
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
                some = shape.check_expert_indices(choices[first : first + samples], step, "--trace")
                copies = np.bincount(some.ravel(), minlength=shape.num_experts)
                loads = copies.reshape(ep, -1).sum(1)
                ratios.append(loads.max() / loads.mean())
        return float(np.mean(ratios))


def bubble_s(
    forward_s: Any, backward_s: Any, wgrad_s: Any, *, pp: int, vpp: Any, num_micro_batches: int, schedule: str
) -> Any:
    """Idle seconds of a rank in one step.

    Args:
        forward_s: a number, or an array as all that is measured may be: one micro-batch through all chunks of one rank.
        backward_s: the same backward, weights' gradients included.
        wgrad_s: the part of `backward_s` that makes weights' gradients.
        pp: pipeline ranks.
        vpp: chunks on each rank.
        num_micro_batches: micro-batches of a step. With fewer than pp no schedule keeps all ranks busy: one goes from rank to rank.
        schedule: as in a recipe; "1f1b" with vpp of 2 or more is the interleaved form (arXiv:2104.04473).

    Returns:
        gpipe and 1f1b: (pp-1)(f+b). interleaved: the same over vpp, and (pp-n)(f+b) while a chunk waits for the last
        rank of the chunk before. zero-bubble (ZB-H1, arXiv:2401.10241) fills a rank's wait with weights' gradients of
        the micro-batches behind it: (pp-1)(f + b - 2w) over vpp, at least a third of interleaved's; with fewer than pp
        micro-batches either (pp-n)w more, or what one after the other takes through all chunks. zbv: half as long a way
        in and out again, with 2*pp-1 micro-batches or more. dualpipev: (pp-1)(f + 2b - 3w)/2. docs/pipeline.md has the
        same in parts of a chunk, measured.
    """
    if pp == 1:
        return 0.0
    both = forward_s + backward_s
    if schedule == "zero-bubble":
        few, without = min(num_micro_batches, pp), both - wgrad_s
        in_turn = pp * without + ((few - 1) * without + wgrad_s) / vpp - few * both
        filled = (pp - 1) * elementwise_max(both - 2 * wgrad_s, both / 3) / vpp + (pp - few) * wgrad_s
        return elementwise_max(in_turn, filled)
    if schedule == "zbv":
        alone = (pp - 1) * (both - wgrad_s)
        filled = elementwise_max(alone - (min(num_micro_batches, pp) - 1) * wgrad_s, (pp - 1) * both / 3)
        share = min(1.0, (num_micro_batches - 1) / (2 * pp - 2))
        return (1 - share) * alone + share * filled / 2
    if schedule == "dualpipev":
        return (pp - 1) * elementwise_max(forward_s + 2 * backward_s - 3 * wgrad_s, 0.0) / 2
    if schedule == "gpipe" or num_micro_batches >= pp:
        return (pp - 1) * both / vpp
    return both * ((pp - num_micro_batches) + (num_micro_batches - 1) / vpp)


def elementwise_max(left: Any, right: Any) -> Any:
    """The larger of two numbers, or of each pair of two arrays."""
    return (
        np.maximum(left, right) if isinstance(left, np.ndarray) or isinstance(right, np.ndarray) else max(left, right)
    )
