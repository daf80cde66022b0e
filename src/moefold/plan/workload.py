"""What a step has to do, whatever its mapping: the batch, the precision, the routing and the software."""

from dataclasses import dataclass
from typing import Literal

PRECISIONS = ("bf16", "fp8", "fp8-blockwise", "mxfp8", "nvfp4")
"""Of the matrix products. fp8 has one scale for a tensor, fp8-blockwise one for 128 values of an activation and for
128 x 128 of a weight, mxfp8 one for 32 values, nvfp4 one for 16 values of 4 bits."""

NATURAL_IMBALANCE = 1.26
"""Copies that reach the busiest expert-parallel rank over the mean, under a router that was trained with a balancing
loss. Fitted on Qwen3-235B with natural routing and forced balance (published/README.md, 16K to 128K tokens)."""

DISPATCH_BYTES = {"dtype": 2.0, "fp8-blockwise": 1 + 4 / 128}
"""Of a value on its way to experts, by `moe.dispatch_precision`: bfloat16, or 8 bits and a float32 scale for 128."""

CudaGraphs = Literal["none", "partial", "full"]


@dataclass(frozen=True, slots=True)
class StateTypes:
    """Bytes of the states of a parameter."""

    master: int
    """Of a master weight; 0 where the bfloat16 weight is the only one."""
    gradient: int
    moment: int
    """Of each of two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One optimizer step."""

    seq_len: int
    """Tokens of a sample."""
    global_batch_size: int
    """Samples of a step."""
    precision: str = "bf16"
    """One of PRECISIONS."""
    capacity_factor: float = 0.0
    """0: dropless. Else every expert takes at most so many times its even share of copies."""
    imbalance: float = 1.0
    """Copies of the busiest expert-parallel rank over the mean: 1 for forced balance, else NATURAL_IMBALANCE."""
    dispatch_precision: str = "dtype"
    """One of DISPATCH_BYTES: of the rows that experts are sent. Results and gradients travel in bfloat16."""
    cuda_graphs: CudaGraphs = "none"
    """What is captured and so costs no launches: nothing, all but the experts and their exchange, or the whole step."""
    fused_experts: bool = False
    """Whether grouped products of mxfp8 quantise, apply SwiGLU and permute in their own kernels (CuTe DSL kernels of
    2026 on Blackwell), instead of in passes over memory of their own. Other activations and precisions have none."""
    causal: bool = False
    """The FLOP count of the MFU takes half of the attention core, as its mask leaves, instead of all of it. The time
    is that of a causal kernel either way."""
    coupled: bool = False
    """The experts' ranks lie within data parallelism, as before MoE Parallel Folding: ep neighbours are tp*cp apart."""
    overlaps_gathers: bool = True
    """Whether the gathers of ZeRO-3 run under the compute of the layer before. One hardware queue for all kernels, as
    tensor parallelism of Megatron-Core asks for (CUDA_DEVICE_MAX_CONNECTIONS=1), runs them one after the other."""
    shards_over_dp_alone: bool = False
    """ZeRO shards over dp, with copies over cp, as FSDP of the time of arXiv:2504.14960 did (its table 3 prints OOM for
    465B parameters on 256 GPUs with cp=8)."""
    states: "StateTypes | None" = None
    """Types of master weights, gradients and moments; None: those of the recipe."""
    is_megatron: bool = False
    """The software is Megatron-Core with Transformer Engine, on which most published steps were measured, and not
    moefold or another on torch's FSDP and pipelines: its kernels keep less, its pipelines free what was sent,
    expert_activation runs no product again, and an offloaded optimizer updates on the host."""
    overlaps_tensor: bool = False
    """Whether gathers and scatters of tensor parallelism run in pieces under their products."""
    reduce_bytes: float = 4.0
    """Of each gradient that ZeRO-3 sums over ranks; 2 where it does so in bfloat16."""
    with_mtp: bool = True
    """Whether layers of multi-token prediction run, where the model has them."""

    @property
    def load(self) -> float:
        """Copies that the busiest expert-parallel rank works on, over the mean."""
        return min(self.imbalance, self.capacity_factor) if self.capacity_factor else self.imbalance

    @property
    def is_low_precision(self) -> bool:
        """Whether products run below 16 bits."""
        return self.precision != "bf16"
