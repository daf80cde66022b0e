"""Expert choices that replace the router's, or record them."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class RouterOverride(Protocol):
    """Override of the router's expert choices in training."""

    in_evaluation: bool
    """True if the override also applies to forward passes in evaluation mode."""

    @property
    def only_records(self) -> bool:
        """True if the override changes no choice."""

    def apply(self, ids_TK: Tensor, sample_ids_B: Tensor) -> Tensor:
        """Return the experts to use, int64 [T, K].

        Args:
            ids_TK: choices of the router, int64 [T, K]. Token s*B + b is position s of sample b.
            sample_ids_B: index of each sample of the micro-batch in the global batch, int64 [B].
        """


@dataclass
class ReplayedRouting:
    """Expert choices of one layer in one step for this rank's tokens: replayed, recorded, or both.

    Both are stored by sample, so the order of micro-batches does not matter, and a recomputed forward pass reads and
    writes the same choices again.
    """

    first_sample: int
    """Index of this rank's first sample in the global batch."""
    replayed_NSK: Tensor | None = None
    """Choices that replace the router's, [N samples of this rank, S/(cp*tp), K], or None if there is no replay."""
    recorded_NSK: Tensor | None = None
    """Buffer for the choices in use, in the same layout, or None if there is no recording."""
    is_replayed_NS: Tensor | None = None
    """Tokens whose choices are replaced, bool [N, S/(cp*tp)]. None means all. The router chooses for all other tokens.
    """
    in_evaluation: bool = False

    @property
    def only_records(self) -> bool:
        """True if no choice is replaced."""
        return self.replayed_NSK is None

    def apply(self, ids_TK: Tensor, sample_ids_B: Tensor) -> Tensor:
        """Replace the choices, then record them."""
        rows_B = sample_ids_B - self.first_sample
        if self.replayed_NSK is not None:
            replayed_TK = self.replayed_NSK[rows_B].transpose(0, 1).reshape(ids_TK.shape).to(ids_TK.dtype)
            if self.is_replayed_NS is None:
                ids_TK = replayed_TK
            else:
                is_replayed_T1 = self.is_replayed_NS[rows_B].transpose(0, 1).reshape(-1, 1)
                ids_TK = replayed_TK.where(is_replayed_T1, ids_TK)
        if self.recorded_NSK is not None:
            ids_SBK = ids_TK.reshape(-1, len(sample_ids_B), ids_TK.shape[1])
            self.recorded_NSK[rows_B] = ids_SBK.transpose(0, 1).to(self.recorded_NSK.dtype)
        return ids_TK
