"""Time of the GEMMs of `train.precision = "fp8-blockwise"` against bfloat16, by estimate. Torch-free.

Derived in docs/fp8.md, "When it pays". The rates are assumptions for an H100; nothing was measured.
"""

from dataclasses import dataclass

from moefold.config.schema import Config
from moefold.cost.expert_memory import ExpertMemory
from moefold.cost.saved_tensors import CUDA_KERNELS
from moefold.cost.unit_memory import caches_quantized_weights

BF16_FLOPS = 600e12
"""Assumed rate of grouped GEMMs in bfloat16."""
FP8_FLOPS = 700e12
"""Assumed rate of our FP8 kernels, which the L2 cache limits."""
MEMORY_BYTES_PER_S = 3.3e12
"""Assumed memory bandwidth of an H100."""
QUANTIZE_BYTES = 3
"""Bytes that quantising a value reads and writes: 2 and 1."""


@dataclass(frozen=True)
class Fp8Estimate:
    """The three GEMMs of one weight matrix in a micro-batch: forward, input gradient and weight gradient."""

    kind: str
    """What the matrix belongs to."""
    rows: float
    depth: int
    width: int
    values_per_row: float
    """Values quantised for each row, in all three GEMMs: operands that matrices share count in part."""
    micro_batches: int
    """Micro-batches that share the quantised weight, in two layouts."""

    @property
    def bf16_s(self) -> float:
        """Seconds in bfloat16."""
        return self._flops / BF16_FLOPS

    @property
    def fp8_s(self) -> float:
        """Seconds in FP8, with the quantisation of weights, activations and gradients."""
        return self._flops / FP8_FLOPS + self._weights_s + self.rows * self._row_s

    @property
    def break_even_rows(self) -> float:
        """Rows from which FP8 takes less time than bfloat16; infinity if it never does."""
        saved_per_row = 6 * self.depth * self.width * (1 / BF16_FLOPS - 1 / FP8_FLOPS)
        saved_per_row -= self._row_s
        return self._weights_s / saved_per_row if saved_per_row > 0 else float("inf")

    @property
    def message(self) -> str:
        """The estimate in one line for the log."""
        ratio = self.fp8_s / self.bf16_s
        change = f"{abs(ratio - 1):.0%} {'slower' if ratio > 1 else 'faster'} than bfloat16"
        limit = self.break_even_rows
        pays = "at no number of rows" if limit == float("inf") else f"from {limit:,.0f} rows on"
        return (
            f"by estimate {change} in the GEMMs of {self.kind} ({self.rows:,.0f} rows of a micro-batch by "
            f"[{self.depth}, {self.width}]; it pays {pays}, see docs/fp8.md)"
        )

    @property
    def _flops(self) -> float:
        return 6 * self.rows * self.depth * self.width

    @property
    def _weights_s(self) -> float:
        return 2 * QUANTIZE_BYTES * self.depth * self.width / self.micro_batches / MEMORY_BYTES_PER_S

    @property
    def _row_s(self) -> float:
        return QUANTIZE_BYTES * self.values_per_row / MEMORY_BYTES_PER_S


def estimate_fp8(cfg: Config) -> Fp8Estimate:
    """Estimate the GEMMs of a routed expert with balanced routing, or of a dense MLP in a model without experts."""
    model = cfg.model
    p = cfg.parallel
    is_shared = caches_quantized_weights(cfg.train, cfg.num_micro_batches, p.zero)
    micro_batches = cfg.num_micro_batches if is_shared else 1
    if not model.moe_layer_numbers:
        tokens = cfg.train.seq_len // p.cp * cfg.train.micro_batch_size
        hidden = model.hidden_size
        inner = model.decoder_layers[0].ffn.tp_unit[1] // p.tp
        return Fp8Estimate("a dense layer", tokens, hidden, inner, 2 * (hidden + inner), micro_batches)
    rows_of_rank = ExpertMemory(cfg, frozenset(), CUDA_KERNELS, 1.0).expert_tokens
    rows = rows_of_rank / (model.experts.num_experts // p.ep)
    hidden = model.experts.token_size(model.hidden_size)
    inner = model.experts.intermediate_size // p.etp
    # Tokens and the gradients of outputs twice each for three matrices; hidden values and the gradients of gate and up.
    return Fp8Estimate("an expert", rows, hidden, inner, (4 * hidden + 6 * inner) / 3, micro_batches)
