"""What a step has to do, whatever its mapping: the batch, the precision, the routing and the software."""

from dataclasses import dataclass
from typing import Any, Literal

from moefold.config.schema import Config
from moefold.metrics.state_memory import ITEM_BYTES

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
    """What the optimizer is; published steps are AdamW's."""

    has_bf16_moments: bool = False
    """Whether moments are bfloat16 between steps."""
    muon_groups: tuple[str, ...] = ()
    """Parts whose matrices are Muon's; empty for AdamW."""
    ns_steps: int = 5
    """Newton-Schulz steps of Muon."""


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
            cfg.train.muon_groups if cfg.train.optimizer == "muon" else (),
            cfg.train.muon_ns_steps,
        ),
        **software,
    )
