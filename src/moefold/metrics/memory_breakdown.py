"""Memory breakdown: tensor bytes of every rank by part (`metrics.memory_every`). Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

STATES = ("weights", "gathered weights", "gradients", "optimizer", "buffers", "batch")
DELAYED_WGRAD = "postponed gradients"
"""Part name of tensors saved for a delayed weight-gradient pass."""
PIPELINE = "pipeline"
"""Part name of tensors that are sent to, or were received from, another pipeline rank."""
RELOADED = "brought back"
"""Part name of activations that `train.offload` has reloaded."""
ACTIVATIONS = (
    "embedding",
    "norms",
    "attention",
    "core attention",
    "residual stream",
    "dense MLP",
    "router",
    "dispatch buffers",
    "experts",
    "shared experts",
    "logits",
    DELAYED_WGRAD,
    PIPELINE,
    RELOADED,
)
NOT_ACTIVATIONS = (*STATES, "workspace", "other")
PARTS = (*STATES, *ACTIVATIONS, "workspace", "other")
"""All part names, in the order of tables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryByPart:
    """Tensor bytes by part: for each part that any rank has, a list with one number per rank."""

    peak_bytes: dict[str, list[int]]
    """Bytes at the rank's peak within the forward and backward passes; the sum over the parts is that peak."""
    current_bytes: dict[str, list[int]]
    """Bytes after the backward passes, with all gradients, before the optimizer update."""

    @classmethod
    def from_ranks(cls, ranks_bytes: Sequence[Sequence[float]]) -> Self:
        """Build the breakdown from the bytes of all ranks.

        Args:
            ranks_bytes: for each rank the bytes of `PARTS` at the peak, then the current bytes, [ranks, 2 * parts].
        """
        peak, current = (
            {part: [int(row[start + i]) for row in ranks_bytes] for i, part in enumerate(PARTS)}
            for start in (0, len(PARTS))
        )
        return cls(
            peak_bytes={part: sizes for part, sizes in peak.items() if any(sizes)},
            current_bytes={part: sizes for part, sizes in current.items() if any(sizes)},
        )
