"""From a sample's global number to its tokens: order, epochs and batches, the same under every mapping."""

from abc import ABC, abstractmethod
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moefold.data.permutation import Permutation
from moefold.data.random_bits import combine
from moefold.data.sample import Sample
from moefold.data.split import Runs
from moefold.errors import ConfigError


class SampleSource(Protocol):
    """Numbered samples in the order of the data."""

    seq_len: int

    def __len__(self) -> int:
        """Samples in all."""
        ...

    def sample(self, number: int) -> NDArray[np.int64] | Sample:
        """One sample; of one that is all one document and counts in full, the tokens alone, [seq_len + 1]."""
        ...


class TokenStream(Protocol):
    """A long row of token ids that is read piece by piece."""

    def __len__(self) -> int:
        """Tokens in all."""
        ...

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens start .. stop-1, [stop - start]."""
        ...

    def begins(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Which of the tokens start .. stop-1 is the first of a document, [stop - start]."""
        ...


class PackedSamples:
    """Documents packed without padding: sample i is tokens[i*S : i*S + S + 1], S = seq_len.

    Neighbours share one token, so every token but the first of the stream is a label once.
    """

    def __init__(self, stream: TokenStream, seq_len: int, *, masks_documents: bool = False) -> None:
        """Cut a stream into samples; a tail shorter than seq_len is left out.

        Args:
            stream: the tokens.
            seq_len: S.
            masks_documents: number the documents of each sample, so that attention stays within them.
        """
        self.stream = stream
        self.seq_len = seq_len
        self._masks_documents = masks_documents

    def __len__(self) -> int:
        """Samples of the stream."""
        return max(0, (len(self.stream) - 1) // self.seq_len)

    def sample(self, number: int) -> NDArray[np.int64] | Sample:
        """Tokens of one sample, [seq_len + 1], with their documents if these are to be masked."""
        start = number * self.seq_len
        stop = start + self.seq_len + 1
        tokens = self.stream.read(start, stop)
        if not self._masks_documents:
            return tokens
        return Sample(tokens, np.cumsum(self.stream.begins(start, stop), dtype=np.int32))


class SampleRow(ABC):
    """Samples in the order in which a run visits them, without end: the same row under every mapping."""

    seq_len: int

    @abstractmethod
    def __len__(self) -> int:
        """Samples in an epoch."""

    @abstractmethod
    def read(self, index: int) -> Sample:
        """The sample that a run takes as its number `index` (0-based, no upper limit).

        Raises:
            ConfigError: there is no sample, or the data holds an id that the model has no row for.
        """

    def weight(self, index: int) -> float:
        """Sum of the weights of a sample's labels: how many of them count."""
        weights = self.read(index).weights
        return float(self.seq_len) if weights is None else float(weights.sum(dtype=np.float64))

    def state(self, index: int) -> Any:
        """What lets a later process reach sample `index` sooner, as JSON keeps it; None: nothing is needed."""
        return None

    def restore(self, state: Any) -> None:
        """Make use of a state that `state` gave; the samples are the same without."""
        return

    def sample(self, index: int) -> NDArray[np.int64]:
        """Tokens of the sample that a run takes as its number `index`, int64 [seq_len + 1]; errors as of `read`."""
        return self.read(index).tokens

    def batch(self, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Samples first .. first+count-1 of the run.

        Returns:
            (inputs, labels), both int64 [count, seq_len]; labels are the inputs shifted by one token.
        """
        tokens = np.empty((count, self.seq_len + 1), dtype=np.int64)
        for i in range(count):
            tokens[i] = self.sample(first + i)
        return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])


class Split(SampleRow):
    """The training or the validation samples, in the order in which a run visits them.

    Sample n has its meaning from n alone: epoch n // len(split), and a place in that epoch's order. A run's position is
    therefore the number of samples it has taken, whatever the mapping was.
    """

    def __init__(self, source: SampleSource, members: Runs, *, order_key: int | None) -> None:
        """Name the samples of one part.

        Args:
            source: all samples of the data.
            members: the sample numbers of this part.
            order_key: key of the shuffled order, another one for each epoch; None visits them in the order of the data.
        """
        self.seq_len = source.seq_len
        self._source = source
        self._members = members
        self._order_key = order_key
        self._epoch_order: tuple[int, Permutation] | None = None

    def __len__(self) -> int:
        """Samples in an epoch."""
        return len(self._members)

    def read(self, index: int) -> Sample:
        """The sample that a run takes as its number `index` (0-based, no upper limit).

        Raises:
            ConfigError: the split is empty, or the data holds an id that the model has no row for.
        """
        if index < 0:
            raise IndexError(f"sample index {index} must not be negative")
        if not len(self):
            raise ConfigError(
                "data.validation_fraction=0 holds no sample out; set it above 0, "
                "or train.eval_every=0 to train without evaluation"
            )
        epoch, place = divmod(index, len(self))
        sample = self._source.sample(self._members[self._place_in_order(epoch, place)])
        return sample if isinstance(sample, Sample) else Sample(sample)

    def _place_in_order(self, epoch: int, place: int) -> int:
        if self._order_key is None:
            return place
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            self._epoch_order = (epoch, Permutation(len(self), combine(self._order_key, epoch)))
        return self._epoch_order[1](place)
