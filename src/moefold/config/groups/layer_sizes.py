"""Sizes of one micro-batch on one rank, from which the parts of a layer count the memory that they need."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from moefold.config.groups.block import NormPart, ResidualPart
from moefold.config.sections.moe import MoEConfig
from moefold.config.sections.parallel import ParallelConfig


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
    limit it. Otherwise they are padded."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerSizes:
    """Sizes and kernels of one micro-batch on one rank, on which its memory depends."""

    hidden_size: int
    """Width of the residual stream, H."""
    has_windows: bool
    """Any layer limits the context of a query."""
    block_norm: NormPart
    """Norm of the residual stream."""
    residual: ResidualPart
    """Place of the norms of a block."""
    parallel: ParallelConfig
    shards_heads: bool
    """Context parallelism shards heads."""
    moe: MoEConfig
    seq_len: int
    """Tokens of a sample, S."""
    micro_batch_size: int
    """Samples of a micro-batch, B."""
    quantizes_gemms: bool
    """GEMMs are computed in low precision."""
    recompute: frozenset[str]
    """Parts that are recomputed."""
    kernels: KernelProfile
    """Kernel profile of the device."""
    kernel_choice: str
    """`run.kernels`."""
    item_bytes: int
    """Bytes of an element in the compute type."""
    imbalance: float
    """Routed tokens of the busiest rank over the mean of all ranks."""

    @cached_property
    def high_precision_bytes(self) -> int:
        """Bytes of an element in float32, or in the compute type if that is wider."""
        return max(4, self.item_bytes)

    @cached_property
    def gathered_tokens(self) -> int:
        """Tokens inside the sub-layers, N."""
        return self.seq_len // self.parallel.cp * self.micro_batch_size

    @cached_property
    def tokens(self) -> int:
        """Tokens between the sub-layers, T."""
        return self.gathered_tokens // self.parallel.tp

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one hidden state of every token between the sub-layers."""
        return self.tokens * self.hidden_size * self.item_bytes

    @property
    def has_c_recurrence(self) -> bool:
        """Return whether linear attention is computed in C, given a compiler."""
        is_supported = self.item_bytes < 8 and not self.quantizes_gemms
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

    def hidden_norm(self) -> int:
        """Return the bytes that a norm of the residual stream saves besides its input and output.

        LayerNorm saves two numbers per token.
        """
        return self.norm(self.tokens, self.hidden_size) * self.block_norm.saved_numbers

    def norm_with_output(self, *, saves_output: bool, part: str = "") -> Counter[str]:
        """Return the bytes of a norm of the residual stream with its output, or with the output gathered over tp.

        A norm of the block's output saves its input, which nothing else saves.
        """
        saved = Counter[str]()
        if self.residual.norms_output:
            saved["norms"] += self.hidden_norm() + self.hidden_bytes
        if "norms" not in self.recompute and self.residual.norms_input:
            saved["norms"] += self.hidden_norm()
            saved["norms"] += self.hidden_bytes if saves_output else 0
        if self.parallel.tp > 1 and part:
            saved[part] += self.gathered_bytes(self.hidden_size)
        return saved

    def core_attention(self, heads: int, value_width: int) -> Counter[str]:
        """Return the bytes of the output of this rank's heads, and of the logarithms of their softmax sums."""
        # Ulysses saves the output twice: all tokens of some heads, and some tokens of all heads.
        copies = 2 if self.parallel.cp > 1 and self.shards_heads else 1
        output = self.gathered_bytes(heads * value_width) * copies
        is_recomputed = "core_attention" in self.recompute
        log_sum = 0 if is_recomputed else self.gathered_tokens * heads * self.high_precision_bytes
        return Counter({"core attention": output + log_sum})

    def swiglu(self, width: int) -> int:
        """Return the bytes that a SwiGLU saves: gate, its SiLU, up and their product."""
        num_saved = 3 if self.kernels.fused_swiglu else 4
        return num_saved * self.gathered_bytes(width) // self.parallel.tp

    def swiglu_wgrad(self, width: int) -> int:
        """Return the bytes of the GEMM inputs and output gradients of a SwiGLU."""
        return self.gathered_bytes(2 * self.hidden_size + 3 * width // self.parallel.tp)
