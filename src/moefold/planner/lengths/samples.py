"""Samples of documents: a seeded stream of documents cut into samples of S tokens, or the samples of a run.

The stream is as in pretraining: documents follow each other, and the end of a sample cuts the document that it falls
into. The rest of that document begins the next sample, as a separate document.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moefold.config.sections.data import DataConfig
from moefold.config.sections.rl import RLConfig
from moefold.errors import ConfigError
from moefold.message_text import Setting
from moefold.planner.lengths.distribution import LengthDistribution, Lengths, load_distribution

if TYPE_CHECKING:
    from moefold.data.sample import Sample

DRAWN_AT_ONCE = 4096
MAX_RUN_SAMPLES = 1024
"""Maximum number of samples of a run whose documents are measured. They are its first samples."""


SampleLengths = tuple[int, ...]
"""Lengths of the documents of a sample, in their order. They add up to S."""


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
        """Return the document lengths of some samples of `seq_len` tokens. Equal arguments give equal samples."""
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
    """Samples whose document lengths were read from data. They are drawn with replacement."""

    name: str
    source: str
    samples: tuple[SampleLengths, ...]
    """At least one sample, all with the same number of tokens."""

    def draw(self, seq_len: int, count: int, seed: int) -> list[SampleLengths]:
        """Return the document lengths of some samples, as `StreamedSamples.draw`. All have `seq_len` tokens."""
        assert sum(self.samples[0]) == seq_len, (sum(self.samples[0]), seq_len)
        generator = np.random.RandomState(seed)
        return [self.samples[i] for i in generator.randint(len(self.samples), size=count).tolist()]


DocumentSamples = StreamedSamples | RecordedSamples
"""A source of samples. Only the lengths of the documents count."""


def effective_length(samples: list[SampleLengths]) -> float:
    """Return the effective length of documents, sum(l**2) / sum(l): the keys of a token without the causal mask.

    A sample of one document has its own length.
    """
    lengths = np.concatenate([np.array(sample, dtype=np.float64) for sample in samples])
    return float((lengths**2).sum() / lengths.sum())


def open_document_samples(name: str, seq_len: int) -> DocumentSamples:
    """Open the documents of `--lengths NAME|FILE|RUN` for samples of `seq_len` tokens.

    Raises:
        ConfigError: there is no such histogram, file or run, or the run has no documents or other samples.
    """
    folder = Path(name)
    if name and folder.is_dir():
        return _samples_of_run(folder, seq_len)
    return StreamedSamples(load_distribution(name))


def check_documents(data: DataConfig, rl: RLConfig, name: str) -> None:
    """Check that the samples of a recipe hold documents, so that their lengths count.

    Raises:
        ConfigError: the samples do not hold documents, or they are rollouts.
    """
    if rl.is_on:
        raise ConfigError(
            f"{Setting('--lengths', name)} has no effect on reinforcement learning, whose samples are rollouts; leave "
            "it out"
        )
    if not data.may_have_documents:
        raise ConfigError(
            f"{Setting('--lengths', name)} has no effect on a recipe without documents, in which a sample is one "
            f"document (data.kind={data.kind!r}, data.document_end=-1); set data.document_end or data.document_index, "
            f"or leave {Setting('--lengths')} out"
        )


def describe_cuts(samples: DocumentSamples, seq_len: int) -> str:
    """Describe how many documents are longer than a sample, or return "" if none is."""
    if not isinstance(samples, StreamedSamples):
        return ""
    fractions = (np.arange(100_000) + 0.5) / 100_000
    share = float((samples.distribution.quantile(fractions) > seq_len).mean())
    if not share:
        return ""
    return f"{share:.2%} of the documents are longer than a sample of {seq_len:,} tokens and are cut at its end"


def _samples_of_run(folder: Path, seq_len: int) -> RecordedSamples:
    """Read the document lengths of the first samples that a run trains on."""
    # Lazy imports: the data pipeline takes longer to import than a plan without documents needs.
    from moefold.convert.run_config import config_of_run
    from moefold.data.dataset import DataRequest

    cfg = config_of_run("--lengths", folder)
    check_documents(cfg.data, cfg.rl, str(folder))
    if cfg.train.seq_len != seq_len:
        raise ConfigError(
            f"{Setting('--lengths', str(folder))} is a run with samples of {cfg.train.seq_len} tokens, and "
            f"{Setting('--seq-len')} is {seq_len}; its documents were cut at the ends of its samples: choose the same "
            "length, or name a file of lengths"
        )
    data = DataRequest.of(cfg).open().train
    indices = data.next_sample_indices(0, min(len(data), MAX_RUN_SAMPLES))
    found = [_document_lengths(data.annotated_sample(index), seq_len) for index in indices]
    return RecordedSamples(str(folder), f"the first {len(found):,} samples of the run", tuple(found))


def _document_lengths(sample: "Sample", seq_len: int) -> SampleLengths:
    """Return the lengths of the documents of a sample as attention sees them, so also of its padding."""
    from moefold.data.sample import stack_samples

    starts = stack_samples([sample], seq_len).document_starts()
    assert starts is not None, "stacked samples have documents"
    bounds = np.flatnonzero(starts[0] == np.arange(seq_len))
    return tuple(np.diff([*bounds.tolist(), seq_len]).tolist())
