"""Sizes of one micro-batch on one rank, and the memory of a block that depends on them. Torch-free."""

from collections.abc import Callable
from dataclasses import dataclass

from moefold.config.schema import Config
from moefold.cost.expert_memory import ExpertMemory
from moefold.cost.saved_tensors import BytesByPart, KernelProfile
from moefold.cost.unit_memory import compute_dtype_bytes


class BlockSizes:
    """Sizes of one micro-batch on one rank, on which the saved tensors of a block depend.

    Args:
        cfg: a recipe that `check_config` passed.
        recompute: parts that are recomputed.
        kernels: kernel profile of the device.
        imbalance: routed tokens of the busiest rank over the mean of all ranks.
    """

    def __init__(self, cfg: Config, recompute: frozenset[str], kernels: KernelProfile, imbalance: float) -> None:
        p = cfg.parallel
        train = cfg.train
        self.cfg = cfg
        self.recompute = recompute
        self.kernels = kernels
        self.imbalance = imbalance
        self.item_bytes = compute_dtype_bytes(cfg)
        self.high_precision_bytes = max(4, self.item_bytes)
        self.gathered_tokens = train.seq_len // p.cp * train.micro_batch_size
        self.tokens = self.gathered_tokens // p.tp
        self.experts = ExpertMemory(cfg, recompute, kernels, imbalance)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one hidden state of every token between the sub-layers."""
        return self.tokens * self.cfg.model.hidden_size * self.item_bytes

    @property
    def heads(self) -> int:
        """Query heads of this rank."""
        return self.cfg.model.num_attention_heads // self.cfg.parallel.tp

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
        return self.norm(self.tokens, self.cfg.model.hidden_size) * (2 if self.cfg.model.norm == "layernorm" else 1)

    def norm_with_output(self, *, saves_output: bool, part: str = "") -> BytesByPart:
        """Return the bytes of a norm of the residual stream with its output, or with the output gathered over tp.

        A norm of the block's output saves its input, which nothing else saves.
        """
        saved = BytesByPart()
        hidden = self.cfg.model.hidden_size
        placement = self.cfg.model.norm_placement
        if placement != "pre":
            saved["norms"] += self.hidden_norm() + self.hidden_bytes
        if "norms" not in self.recompute and placement != "post":
            saved["norms"] += self.hidden_norm()
            saved["norms"] += self.hidden_bytes if saves_output else 0
        if self.cfg.parallel.tp > 1 and part:
            saved[part] += self.gathered_bytes(hidden)
        return saved

    def swiglu(self, width: int) -> int:
        """Return the bytes that a SwiGLU saves: gate, its SiLU, up and their product."""
        num_saved = 3 if self.kernels.fused_swiglu else 4
        return num_saved * self.gathered_bytes(width) // self.cfg.parallel.tp

    def swiglu_wgrad(self, width: int) -> int:
        """Return the bytes of the GEMM inputs and output gradients of a SwiGLU."""
        return self.gathered_bytes(2 * self.cfg.model.hidden_size + 3 * width // self.cfg.parallel.tp)


def _nothing(sizes: BlockSizes) -> BytesByPart:
    return BytesByPart()


@dataclass(frozen=True, kw_only=True)
class BlockMemory:
    """Activation bytes of one kind of attention, or of feed-forward network."""

    saved: Callable[[BlockSizes], BytesByPart]
    """Saved for backward, without the input."""
    delayed_wgrad: Callable[[BlockSizes], BytesByPart]
    """GEMM inputs and output gradients, which a split backward pass holds."""
    concurrent_wgrad: Callable[[BlockSizes], BytesByPart] = _nothing
    """Delayed weight-gradient bytes that exist while the saved tensors do."""
    transient: Callable[[BlockSizes], BytesByPart] = _nothing
    """Peak of temporary bytes while the block runs or is recomputed."""
    saved_if_recomputed: Callable[[BlockSizes], BytesByPart] = _nothing
    """Saved even if the whole layer is recomputed."""
