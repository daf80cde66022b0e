"""Samples of two rollouts and padding."""

import numpy as np

from moefold.data.sample import Sample
from moefold.data.sampler import Sampler

S = 16
VOCAB = 33
"""Two tp ranks do not divide it."""


class PackedRollouts(Sampler):
    """Two rollouts and padding in each sample, of lengths and numbers that depend on the sample."""

    seq_len = S
    has_annotations = True

    def __len__(self) -> int:
        return 64

    def annotated_sample(self, index: int) -> Sample:
        """Return sample `index`. Log-probabilities are near an untrained model's, on both sides of the clips."""
        rng = np.random.default_rng(index)
        ends = np.sort(rng.choice(np.arange(4, S), 2, replace=False))
        documents = np.searchsorted(ends, np.arange(S + 1), side="right")
        starts = np.concatenate(([0], ends))
        # The first two tokens of a rollout are its prompt; the last document is padding.
        is_sampled = (np.arange(1, S + 1) - starts[documents[1:]] >= 2) & (documents[1:] < 2)
        return Sample(
            rng.integers(VOCAB, size=S + 1),
            documents.astype(np.int32),
            is_sampled * rng.uniform(0.5, 1.5, S),
            token_columns={
                "advantages": rng.normal(size=S),
                "sequence_ids": np.where(is_sampled, documents[1:], -1).astype(np.int64),
                **{f"{name}_log_probs": rng.normal(-3.5, 0.8, S) for name in ("old", "trainer", "reference")},
            },
        )
