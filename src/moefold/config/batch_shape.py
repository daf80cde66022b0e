"""Sizes of the batches of a run."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moefold.config.groups.context import ContextPart


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Sizes of a global batch, and the ranks that share it."""

    global_batch_size: int
    micro_batch_size: int
    num_micro_batches: int
    """Micro-batches of a data-parallel rank, including micro-batches of only padding."""
    seq_len: int
    vocab_size: int
    mtp_layers: int
    """Layers of multi-token prediction, each with targets of its own."""
    dp: int
    cp: int
    context: "ContextPart"
    is_float64: bool

    @property
    def samples_per_rank(self) -> int:
        """Samples of a data-parallel rank, padding included."""
        return self.num_micro_batches * self.micro_batch_size
