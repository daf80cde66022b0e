"""This rank's part of each global batch."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moefold.config.schema import Config
from moefold.data import SampleRow
from moefold.data.marked import SampleBatch
from moefold.parallel.accumulate import Batch
from moefold.parallel.collectives import all_reduce_sum
from moefold.parallel.groups import ParallelGroups

Weights = NDArray[np.float64]
Part = tuple[SampleBatch, Weights]
"""Samples of one rank, and the weights of their targets, [count, 1 + mtp_layers, S]."""


class BatchLoader:
    """Cuts global batches by data-parallel rank and by context shard.

    Micro-batch j of the global batch is samples [j * B, (j + 1) * B); data-parallel rank d takes the j-th of its
    `num_micro_batches` from place d * num_micro_batches + j, so the batch is the same under every mapping.
    """

    def __init__(self, split: SampleRow, cfg: Config, groups: ParallelGroups, positions: Tensor) -> None:
        self._split = split
        self._size = cfg.train.global_batch_size
        self._count = cfg.num_micro_batches * cfg.train.micro_batch_size
        self._first = groups.attn.dp.rank * self._count
        self._depths = cfg.model.mtp_layers
        self._dp = groups.attn.dp
        self._positions = positions.cpu().numpy()
        self._device = groups.device
        self._dtype = torch.float64 if cfg.run.dtype == "float64" else torch.float32

    def batch(self, first_sample: int) -> Batch:
        """As `batch_of`, of the global batch that starts at sample `first_sample` of the run."""
        return self.batch_of(self.read(range(first_sample, first_sample + self._size)))

    def read(self, samples: Sequence[int]) -> Part:
        """This rank's samples of a global batch, and the weights of their targets.

        Args:
            samples: the global batch, by the numbers of the run.
        """
        return self._part(samples, self._size)

    def batch_of(self, part: Part) -> Batch:
        """This rank's part of a global batch, from what it has read.

        Collective over dp where samples have marks: the mean is over the targets that count, on whichever rank.
        """
        (batch,) = self._weighted([part], self._size)
        return batch

    def evaluation(self, num_samples: int) -> list[Batch]:
        """This rank's part of the first `num_samples` of the split, each taken once: of a smaller split, all.

        The weights of all batches and ranks sum to 1. Collective as `batch_of`.
        """
        return self.evaluation_of(*self.read_evaluation(num_samples))

    def read_evaluation(self, num_samples: int) -> tuple[list[Part], int]:
        """This rank's samples of an evaluation, and of how many samples all ranks' are.

        A global batch that the samples do not fill goes on with samples that weigh nothing, so the mean does not depend
        on the size of the batch. Samples that are lost are passed over.
        """
        # An empty split explains itself when it is asked for a sample.
        num_samples = max(1, min(num_samples, len(self._split) - self._split.num_lost))
        parts: list[Part] = []
        first = 0
        for taken in range(0, num_samples, self._size):
            samples = self._split.next_samples(first, self._size)
            parts.append(self._part(samples, num_samples - taken))
            first = samples[-1] + 1
        return parts, num_samples

    def evaluation_of(self, parts: list[Part], num_samples: int) -> list[Batch]:
        """The batches of an evaluation; collective as `batch_of`."""
        return self._weighted(parts, num_samples)

    def _part(self, samples: Sequence[int], num_taken: int) -> Part:
        """This rank's samples of one global batch, and the weights of their targets: 0 for all but the first ones."""
        mine = self._split.rows(samples[self._first : self._first + self._count])
        is_taken = np.arange(self._first, self._first + self._count) < num_taken
        return mine, self._target_weights(mine) * is_taken[:, None, None]

    def _target_weights(self, samples: SampleBatch) -> Weights:
        """What each target counts, [count, 1 + mtp_layers, S]: the next token, the one behind it, and so on.

        A target counts as much at every depth, but only where it is of the document of the token that predicts it.
        """
        next_ = samples.target_weights()
        if next_ is None:
            next_ = np.ones(samples.inputs.shape)
        starts, length = samples.starts(), self._split.seq_len
        weights = np.zeros((len(next_), 1 + self._depths, length))
        weights[:, 0] = next_
        for depth in range(1, 1 + self._depths):
            weights[:, depth, :-depth] = next_[:, depth:]
            if starts is not None:
                weights[:, depth, :-depth] *= starts[:, :-depth] == starts[:, depth:]
        return weights

    def _weighted(self, parts: list[Part], num_samples: int) -> list[Batch]:
        """Batches whose weights sum to 1 at each depth over all parts and ranks, or to 0 if no target counts."""
        length = self._split.seq_len
        totals = np.array([float(num_samples * (length - depth)) for depth in range(1 + self._depths)])
        if self._split.is_marked:
            mine = torch.from_numpy(np.sum([weights.sum((0, 2)) for _, weights in parts], 0)).to(self._device)
            totals = all_reduce_sum(mine, self._dp).cpu().numpy()
            totals[totals == 0] = 1.0
        return [self._batch(samples, weights / totals[:, None]) for samples, weights in parts]

    def _batch(self, samples: SampleBatch, weights: Weights) -> Batch:
        starts = samples.starts()
        return Batch(
            self._local(samples.inputs),
            self._local(samples.labels),
            self._local(weights[:, 0]).to(self._dtype),
            self._first + torch.arange(self._count, device=self._device),
            None if self._depths == 0 else self._local(self._ahead(samples.labels)),
            None if self._depths == 0 else self._local(weights[:, 1:]).to(self._dtype),
            None if starts is None else torch.from_numpy(starts).to(self._device),
        )

    def _ahead(self, labels: np.ndarray) -> np.ndarray:
        """The tokens 2, 3, ... places ahead of each position, [count, mtp_layers, S]; behind the sample's end, 0.

        They come from the sample itself, so that a rank needs nothing of those that hold the positions behind its own.
        """
        ahead = np.zeros((len(labels), self._depths, self._split.seq_len), dtype=labels.dtype)
        for depth in range(1, 1 + self._depths):
            ahead[:, depth - 1, :-depth] = labels[:, depth:]
        return ahead

    def _local(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values[..., self._positions])).to(self._device)
