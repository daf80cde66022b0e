"""What a run takes from its data at a time."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Sample:
    """The tokens of one sample, and where they stand in documents; S is train.seq_len."""

    tokens: NDArray[np.int64]
    """[S + 1]: inputs are the first S of them, labels the last S."""
    documents: NDArray[np.int32] | None = None
    """[S + 1]: neighbours with the same number are of one document; None: all of them are."""
    weights: NDArray[np.float32] | None = None
    """[S]: what each label counts in the loss, 0 or more; None: 1."""
