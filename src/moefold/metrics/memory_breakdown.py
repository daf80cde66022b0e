"""What every rank had in memory in a measured step, by part (`metrics.memory_every`). Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

STATES = ("weights", "gathered weights", "gradients", "optimizer", "buffers", "batch")
DELAYED_WGRAD = "postponed gradients"
PIPELINE = "pipeline"
RELOADED = "brought back"
"""What a backward pass leaves for another one; what is sent; and what `train.offload` had outside of memory."""
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
NOT_ACTIVATIONS = (*STATES, "workspace", "pipeline buffers", "other")
PARTS = (*STATES, *ACTIVATIONS, "workspace", "pipeline buffers", "other")
"""Every name that memory has, in the order of tables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryByPart:
    """Bytes of tensors, a list of one number for each rank under each part that any rank has."""

    peak_bytes: dict[str, list[int]]
    """At the moment of the two passes at which the rank had most; the sum over the parts is its peak."""
    current_bytes: dict[str, list[int]]
    """Behind the two passes, with all gradients, before the update."""

    @classmethod
    def from_ranks(cls, ranks_bytes: Sequence[Sequence[float]]) -> Self:
        """Make it of what each rank says.

        Args:
            ranks_bytes: for each rank the bytes of `PARTS` at the peak, and behind them those now, [ranks, 2 * parts].
        """
        peak, current = (
            {part: [int(row[start + i]) for row in ranks_bytes] for i, part in enumerate(PARTS)}
            for start in (0, len(PARTS))
        )
        return cls(
            peak_bytes={part: sizes for part, sizes in peak.items() if any(sizes)},
            current_bytes={part: sizes for part, sizes in current.items() if any(sizes)},
        )
