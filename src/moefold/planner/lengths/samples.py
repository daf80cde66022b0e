"""Samples of documents: a seeded stream of documents cut into samples of S tokens, or the samples of a run.

The stream is as in pretraining: documents follow each other, and the end of a sample cuts the document that it falls
into. The rest of that document begins the next sample, as a separate document.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from moefold.planner.lengths.distribution import LengthDistribution, Lengths

DRAWN_AT_ONCE = 4096

SampleLengths = tuple[int, ...]
"""Lengths of the documents of a sample, in their order; they add up to S."""


@dataclass(frozen=True)
class StreamedSamples:
    """Documents drawn from a distribution, one after the other, and cut into samples."""

    distribution: LengthDistribution

    @property
    def name(self) -> str:
        """Name for display."""
        return self.distribution.name

    @property
    def source(self) -> str:
        """Origin of the lengths."""
        return self.distribution.source

    def draw(self, seq_len: int, count: int, seed: int) -> list[SampleLengths]:
        """Return the document lengths of some samples of `seq_len` tokens; equal arguments give equal samples."""
        # NumPy promises that this generator's numbers stay the same in all versions (NEP 19).
        generator = np.random.RandomState(seed)
        end = seq_len * count
        drawn: list[Lengths] = []
        total = 0
        while total < end:
            drawn.append(self.distribution.quantile(generator.random_sample(DRAWN_AT_ONCE)))
            total += int(drawn[-1].sum())
        ends = np.cumsum(np.concatenate(drawn))
        bounds = np.union1d(ends[ends < end], np.arange(seq_len, end + 1, seq_len))
        lengths = np.diff(bounds, prepend=0)
        last_of_sample = np.searchsorted(bounds, np.arange(seq_len, end + 1, seq_len))
        cuts = [0, *(last_of_sample + 1).tolist()]
        return [tuple(lengths[start:stop].tolist()) for start, stop in pairwise(cuts)]


@dataclass(frozen=True)
class RecordedSamples:
    """Samples whose document lengths were read from data; they are drawn with replacement."""

    name: str
    source: str
    samples: tuple[SampleLengths, ...]
    """At least one sample, all with the same number of tokens."""

    def draw(self, seq_len: int, count: int, seed: int) -> list[SampleLengths]:
        """Return the document lengths of some samples, as `StreamedSamples.draw`; all have `seq_len` tokens."""
        assert sum(self.samples[0]) == seq_len, (sum(self.samples[0]), seq_len)
        generator = np.random.RandomState(seed)
        return [self.samples[i] for i in generator.randint(len(self.samples), size=count).tolist()]


DocumentSamples = StreamedSamples | RecordedSamples
"""A source of samples; only the lengths of the documents count."""


def effective_length(samples: list[SampleLengths]) -> float:
    """Return the effective length of documents, sum(l**2) / sum(l): the keys of a token without the causal mask.

    A sample of one document has its own length.
    """
    lengths = np.concatenate([np.array(sample, dtype=np.float64) for sample in samples])
    return float((lengths**2).sum() / lengths.sum())
