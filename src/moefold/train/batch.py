"""This rank's part of each global batch."""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moefold.config.schema import Config
from moefold.data import Split
from moefold.data.marked import SampleBatch
from moefold.parallel.accumulate import Batch
from moefold.parallel.collectives import all_reduce_sum
from moefold.parallel.groups import ParallelGroups

Weights = NDArray[np.float64]


class BatchLoader:
    """Cuts global batches by data-parallel rank and by context shard.

    Micro-batch j of the global batch is samples [j * B, (j + 1) * B); data-parallel rank d takes the j-th of its
    `num_micro_batches` from place d * num_micro_batches + j, so the batch is the same under every mapping.
    """

    def __init__(self, split: Split, cfg: Config, groups: ParallelGroups, positions: Tensor) -> None:
        self._split = split
        self._size = cfg.train.global_batch_size
        self._count = cfg.num_micro_batches * cfg.train.micro_batch_size
        self._first = groups.attn.dp.rank * self._count
        self._dp = groups.attn.dp
        self._depths = cfg.model.mtp_layers
        self._positions = positions.cpu().numpy()
        self._device = groups.device
        self._dtype = torch.float64 if cfg.run.dtype == "float64" else torch.float32

    def batch(self, first_sample: int) -> Batch:
        """This rank's part of the global batch that starts at sample `first_sample` of the run.

        Collective over dp where samples have marks: the mean is over the targets that count, on whichever rank.
        """
        (batch,) = self._weighted([self._part(first_sample, first_sample + self._size)], self._size)
        return batch

    def evaluation(self, num_samples: int) -> list[Batch]:
        """This rank's part of the first `num_samples` of the split, each taken once: of a smaller split, all.

        The weights of all batches and ranks sum to 1. A global batch that the samples do not fill goes on with samples
        that weigh nothing, so the mean does not depend on the size of the batch. Collective as `batch`.
        """
        # An empty split explains itself when it is asked for a sample.
        num_samples = max(1, min(num_samples, len(self._split)))
        parts = [self._part(first, num_samples) for first in range(0, num_samples, self._size)]
        return self._weighted(parts, num_samples)

    def _part(self, first_sample: int, end: int) -> tuple[SampleBatch, Weights]:
        """This rank's samples of one global batch, and the weights of their targets by depth: 0 from `end` on."""
        first = first_sample + self._first
        samples = self._split.batch(first, self._count)
        is_taken = np.arange(first, first + self._count) < end
        weights = np.stack([samples.target_weights(further) for further in range(1 + self._depths)], 1)
        return samples, weights * is_taken[:, None, None]

    def _weighted(self, parts: list[tuple[SampleBatch, Weights]], num_samples: int) -> list[Batch]:
        """Batches whose weights sum to 1 at each depth over all parts and ranks, or to 0 if no target counts."""
        totals = num_samples * (self._split.seq_len - np.arange(1.0 + self._depths))
        if self._split.is_marked:
            mine = np.sum([weights.sum((0, 2)) for _, weights in parts], 0)
            totals = all_reduce_sum(torch.from_numpy(mine).to(self._device), self._dp).cpu().numpy()
            totals[totals == 0] = 1.0
        return [self._batch(samples, weights / totals[:, None]) for samples, weights in parts]

    def _batch(self, samples: SampleBatch, weights: Weights) -> Batch:
        starts = samples.starts()
        batch = Batch(
            self._local(samples.inputs),
            self._local(samples.labels),
            self._local(weights[:, 0]).to(self._dtype),
            self._first + torch.arange(self._count, device=self._device),
            starts=None if starts is None else torch.from_numpy(starts).to(self._device),
        )
        if self._depths == 0:
            return batch
        further = self._local(samples.further_labels(self._depths)), self._local(weights[:, 1:]).to(self._dtype)
        return replace(batch, further_labels=further[0], further_weights=further[1])

    def _local(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values[..., self._positions])).to(self._device)
