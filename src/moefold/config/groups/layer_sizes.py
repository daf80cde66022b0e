"""Sizes of one micro-batch on one rank, from which the parts of a layer count the memory that they need."""

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from moefold.config.moe import MoEConfig
from moefold.config.parallel import ParallelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelProfile:
    """Properties of a device's kernels that decide which tensors they save for backward."""

    device_type: str
    """Device of the kernels."""
    grouped_experts: bool
    """Grouped GEMM: the experts of a rank run together, else one after another. Either way two inner widths are saved,
    the gate and up projections: the backward pass recomputes the activation."""
    fused_swiglu: bool = False
    """Fused SwiGLU (gate, SiLU and product), which saves its two inputs: three inner widths in all, or two if
    expert_activation (only that kernel) is recomputed."""
    experts_apply_probs: bool = False
    """The experts' kernels apply the routing probabilities to the hidden values, if the recipe runs them."""
    tiled_loss: bool = False
    """Besides the saved tensors of the loss, only the logits of a tile of tokens are in memory, unless its GEMM's
    weight gradient is delayed."""
    caches_quantized_weights: bool = False
    """The GEMMs of `fp8-blockwise` keep quantised weights for a step, see `state_bytes.caches_quantized_weights`."""
    narrow_values: bool = False
    """Attention takes values with fewer dims than the keys, if no blocks of context parallelism, documents or windows
    limit it; else they are padded."""


class ModelSizes(Protocol):
    """Values of `ModelConfig` that formulas of parts read. It has parts, so they cannot import its type."""

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream, H."""

    @property
    def has_windows(self) -> bool:
        """Return whether any layer limits the context of a query."""


class SampleSizes(Protocol):
    """Values of `TrainConfig` that formulas of parts read."""

    @property
    def seq_len(self) -> int:
        """Tokens of a sample, S."""

    @property
    def micro_batch_size(self) -> int:
        """Samples of a micro-batch, B."""

    @property
    def quantizes_gemms(self) -> bool:
        """Return whether GEMMs are computed in low precision."""


class DispatcherSizes(Protocol):
    """Values of the dispatcher that the formulas of routed experts read."""

    @property
    def moves_experts(self) -> bool:
        """Return whether weights of experts are sent between ranks."""


class ExpertSizes(Protocol):
    """Rows and buffers of routed experts that their formulas read: `cost.expert_memory.ExpertMemory`."""

    @property
    def dispatcher(self) -> DispatcherSizes:
        """Dispatcher of the recipe."""

    @property
    def expert_tokens(self) -> int:
        """Routed tokens that the experts of this rank process, R, on the busiest rank."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's hidden state."""

    @property
    def applies_probs(self) -> bool:
        """Return whether the experts apply the routing probabilities."""

    def saved(self) -> Counter[str]:
        """Return all bytes saved for backward."""

    def permute_indices(self) -> Counter[str]:
        """Return the bytes of the permutation indices."""

    def expert_transient(self) -> Counter[str]:
        """Return the temporary bytes of one looped expert, or of all grouped ones."""

    def combine_buffer(self) -> Counter[str]:
        """Return the bytes of the combine."""

    def allgather_combine_buffer(self) -> Counter[str]:
        """Return the bytes of sums for tokens of other ranks."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerSizes(ABC):
    """Sizes and kernels of one micro-batch on one rank, on which its memory depends."""

    model: ModelSizes
    parallel: ParallelConfig
    train: SampleSizes
    moe: MoEConfig
    recompute: frozenset[str]
    """Parts that are recomputed."""
    kernels: KernelProfile
    """Kernel profile of the device."""
    kernel_choice: str
    """`run.kernels`."""
    item_bytes: int
    """Bytes of a number in the compute type."""
    imbalance: float
    """Routed tokens of the busiest rank over the mean of all ranks."""

    @cached_property
    def high_precision_bytes(self) -> int:
        """Bytes of a number in float32, or in the compute type if that is wider."""
        return max(4, self.item_bytes)

    @cached_property
    def gathered_tokens(self) -> int:
        """Tokens inside the sub-layers, N."""
        return self.train.seq_len // self.parallel.cp * self.train.micro_batch_size

    @cached_property
    def tokens(self) -> int:
        """Tokens between the sub-layers, T."""
        return self.gathered_tokens // self.parallel.tp

    @cached_property
    def experts(self) -> ExpertSizes:
        """Memory of the routed experts."""
        raise NotImplementedError

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one hidden state of every token between the sub-layers."""
        return self.tokens * self.model.hidden_size * self.item_bytes

    @property
    def has_c_recurrence(self) -> bool:
        """Return whether linear attention is computed in C, given a compiler."""
        is_supported = self.item_bytes < 8 and not self.train.quantizes_gemms
        return self.kernels.device_type == "cpu" and self.kernel_choice in ("auto", "c") and is_supported

    def gathered_bytes(self, width: int) -> int:
        """Return the bytes of values of a width for every token inside the sub-layers."""
        return self.gathered_tokens * self.item_bytes * width

    def norm(self, tokens: int, width: int, *, full_width: bool = False) -> int:
        """Return the bytes that a norm saves besides its input and output: one number per token.

        A norm over all heads together consists of single operations: it also saves the normalised values, and in
        bfloat16 these and its input in float32.
        """
        if not full_width:
            return tokens * self.high_precision_bytes
        return tokens * (
            width * self.high_precision_bytes * (1 if self.item_bytes == self.high_precision_bytes else 2)
            + self.high_precision_bytes
        )

    @abstractmethod
    def norm_with_output(self, *, saves_output: bool, part: str = "") -> Counter[str]:
        """Return the bytes of a norm of the residual stream with its output, or with the output gathered over tp.

        A norm of the block's output saves its input, which nothing else saves.
        """

    @abstractmethod
    def core_attention(self, heads: int, value_width: int) -> Counter[str]:
        """Return the bytes of the output of this rank's heads, and of the logarithms of their softmax sums."""

    def swiglu(self, width: int) -> int:
        """Return the bytes that a SwiGLU saves: gate, its SiLU, up and their product."""
        num_saved = 3 if self.kernels.fused_swiglu else 4
        return num_saved * self.gathered_bytes(width) // self.parallel.tp

    def swiglu_wgrad(self, width: int) -> int:
        """Return the bytes of the GEMM inputs and output gradients of a SwiGLU."""
        return self.gathered_bytes(2 * self.model.hidden_size + 3 * width // self.parallel.tp)
