"""The seam at which a step's expert choices are recorded and replayed; local, no communication."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class RouterOverride(Protocol):
    """Has the last word on which experts the tokens of a micro-batch go to, at training."""

    def apply(self, ids_TK: Tensor, sample_ids_B: Tensor) -> Tensor:
        """The experts to use, int64 [T, K].

        Args:
            ids_TK: what the router chose, int64 [T, K]; token s*B + b is position s of sample b.
            sample_ids_B: place of each sample of the micro-batch in the global batch, int64 [B].
        """
        ...


@dataclass
class ReplayedRouting:
    """The choices of one layer in one step, of this rank's tokens: replayed, recorded, or both.

    Both are stored by sample. So the order of micro-batches does not matter, and a recomputed forward pass finds the
    same choices and writes the same ones again.
    """

    first_sample: int
    """Place of this rank's first sample in the global batch."""
    replayed_NSK: Tensor | None = None
    """What to use instead of the router's choices, [N samples of this rank, S/(cp*tp), K]; None leaves them."""
    recorded_NSK: Tensor | None = None
    """Where to keep what is used, in the same order; None keeps nothing."""

    def apply(self, ids_TK: Tensor, sample_ids_B: Tensor) -> Tensor:
        """Replace the choices, then keep them."""
        rows_B = sample_ids_B - self.first_sample
        if self.replayed_NSK is not None:
            ids_TK = self.replayed_NSK[rows_B].transpose(0, 1).reshape(ids_TK.shape).to(ids_TK.dtype)
        if self.recorded_NSK is not None:
            ids_SBK = ids_TK.reshape(-1, len(sample_ids_B), ids_TK.shape[1])
            self.recorded_NSK[rows_B] = ids_SBK.transpose(0, 1).to(self.recorded_NSK.dtype)
        return ids_TK
