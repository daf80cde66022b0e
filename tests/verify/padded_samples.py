"""Samples with prompts and padding."""

import numpy as np

from moefold.data.dataset import ProgramData
from moefold.data.sample import Sample
from moefold.data.sampler import Sampler

S = 16


class PaddedSamples(Sampler):
    """Samples with prompts, which are routed, and padding, which is not.

    One of every four has no padding, and one is all padding.
    """

    seq_len = S
    has_annotations = True

    def __len__(self) -> int:
        return 64

    def annotated_sample(self, index: int) -> Sample:
        random = np.random.default_rng(index)
        length = (S + 1, 0, 6, 13)[index % 4]
        tokens = random.integers(32, size=S + 1)
        documents = (np.arange(S + 1) >= min(4, length)).astype(np.int32) + (np.arange(S + 1) >= length)
        weights = np.where(np.arange(1, S + 1) % 4 < 2, 0.0, random.uniform(size=S))
        return Sample(tokens, documents, weights, is_padding=np.arange(S + 1) >= length)


DATA = ProgramData(PaddedSamples(), PaddedSamples())
