"""This rank's part of each global batch."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moefold.comm.collectives import all_reduce_sum
from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.data import Sampler
from moefold.data.sample import SampleBatch
from moefold.parallel.grad_accumulation import Batch

TargetWeights = NDArray[np.float64]
WeightedSamples = tuple[SampleBatch, TargetWeights]
"""Samples of one rank, and the weights of their targets, [count, 1 + mtp_layers, S]."""


class BatchSharder:
    """Cuts global batches by data-parallel rank and by context shard.

    Micro-batch j of the global batch is samples [j * B, (j + 1) * B); data-parallel rank d takes the j-th of its
    `num_micro_batches` from place d * num_micro_batches + j, so the batch is the same under every mapping.
    """

    def __init__(self, sampler: Sampler, cfg: Config, groups: ParallelGroups, positions: Tensor) -> None:
        self._sampler = sampler
        self._global_batch_size = cfg.train.global_batch_size
        self._samples_per_rank = cfg.num_micro_batches * cfg.train.micro_batch_size
        self._first_in_batch = groups.attn.dp.rank * self._samples_per_rank
        self._mtp_layers = cfg.model.mtp_layers
        self._dp_group = groups.attn.dp
        self._positions = positions.cpu().numpy()
        self._device = groups.device
        self._dtype = torch.float64 if cfg.run.dtype == "float64" else torch.float32

    def batch(self, first_sample: int) -> Batch:
        """As `to_batch`, of the global batch that starts at sample `first_sample` of the run."""
        return self.to_batch(self.read(range(first_sample, first_sample + self._global_batch_size)))

    def read(self, samples: Sequence[int]) -> WeightedSamples:
        """This rank's samples of a global batch, and the weights of their targets.

        Args:
            samples: the global batch, by the numbers of the run.
        """
        return self._read_weighted_samples(samples, self._global_batch_size)

    def to_batch(self, samples: WeightedSamples) -> Batch:
        """This rank's part of a global batch, from what it has read.

        Collective over dp where samples have marks: the mean is over the targets that count, on whichever rank.
        """
        (batch,) = self._normalize_weights([samples], self._global_batch_size)
        return batch

    def eval_batches(self, num_samples: int) -> list[Batch]:
        """This rank's part of the first `num_samples` of the split, each taken once: of a smaller split, all.

        The weights of all batches and ranks sum to 1. Collective as `to_batch`.
        """
        return self.to_eval_batches(*self.read_eval_samples(num_samples))

    def read_eval_samples(self, num_samples: int) -> tuple[list[WeightedSamples], int]:
        """This rank's samples of an evaluation, and of how many samples all ranks' are.

        A global batch that the samples do not fill goes on with samples that weigh nothing, so the mean does not depend
        on the size of the batch. Samples that are lost are passed over.
        """
        # An empty split explains itself when it is asked for a sample.
        num_samples = max(1, min(num_samples, len(self._sampler) - self._sampler.num_dropped))
        parts: list[WeightedSamples] = []
        first = 0
        for taken in range(0, num_samples, self._global_batch_size):
            samples = self._sampler.next_sample_indices(first, self._global_batch_size)
            parts.append(self._read_weighted_samples(samples, num_samples - taken))
            first = samples[-1] + 1
        return parts, num_samples

    def to_eval_batches(self, parts: list[WeightedSamples], num_samples: int) -> list[Batch]:
        """The batches of an evaluation; collective as `to_batch`."""
        return self._normalize_weights(parts, num_samples)

    def _read_weighted_samples(self, samples: Sequence[int], num_taken: int) -> WeightedSamples:
        """This rank's samples of one global batch, and the weights of their targets: 0 for all but the first ones."""
        mine = self._sampler.batch_at(samples[self._first_in_batch : self._first_in_batch + self._samples_per_rank])
        is_taken = np.arange(self._first_in_batch, self._first_in_batch + self._samples_per_rank) < num_taken
        return mine, self._target_weights(mine) * is_taken[:, None, None]

    def _target_weights(self, samples: SampleBatch) -> TargetWeights:
        """What each target counts, [count, 1 + mtp_layers, S]: the next token, the one behind it, and so on.

        A target counts as much at every depth, but only where it is of the document of the token that predicts it.
        """
        next_ = samples.target_weights()
        if next_ is None:
            next_ = np.ones(samples.inputs.shape)
        starts = samples.document_starts()
        length = self._sampler.seq_len
        weights = np.zeros((len(next_), 1 + self._mtp_layers, length))
        weights[:, 0] = next_
        for depth in range(1, 1 + self._mtp_layers):
            weights[:, depth, :-depth] = next_[:, depth:]
            if starts is not None:
                weights[:, depth, :-depth] *= starts[:, :-depth] == starts[:, depth:]
        return weights

    def _normalize_weights(self, parts: list[WeightedSamples], num_samples: int) -> list[Batch]:
        """Batches whose weights sum to 1 at each depth over all parts and ranks, or to 0 if no target counts."""
        length = self._sampler.seq_len
        totals = np.array([float(num_samples * (length - depth)) for depth in range(1 + self._mtp_layers)])
        if self._sampler.has_annotations:
            mine = torch.from_numpy(np.sum([weights.sum((0, 2)) for _, weights in parts], 0)).to(self._device)
            totals = all_reduce_sum(mine, self._dp_group).cpu().numpy()
            totals[totals == 0] = 1.0
        return [self._build_batch(samples, weights / totals[:, None]) for samples, weights in parts]

    def _build_batch(self, samples: SampleBatch, weights: TargetWeights) -> Batch:
        starts = samples.document_starts()
        return Batch(
            self._local_sequence(samples.inputs),
            self._local_sequence(samples.labels),
            self._local_sequence(weights[:, 0]).to(self._dtype),
            self._first_in_batch + torch.arange(self._samples_per_rank, device=self._device),
            None if self._mtp_layers == 0 else self._local_sequence(self._mtp_targets(samples.labels)),
            None if self._mtp_layers == 0 else self._local_sequence(weights[:, 1:]).to(self._dtype),
            None if starts is None else torch.from_numpy(starts).to(self._device),
        )

    def _mtp_targets(self, labels: np.ndarray) -> np.ndarray:
        """The tokens 2, 3, ... places ahead of each position, [count, mtp_layers, S]; behind the sample's end, 0.

        They come from the sample itself, so that a rank needs nothing of those that hold the positions behind its own.
        """
        ahead = np.zeros((len(labels), self._mtp_layers, self._sampler.seq_len), dtype=labels.dtype)
        for depth in range(1, 1 + self._mtp_layers):
            ahead[:, depth - 1, :-depth] = labels[:, depth:]
        return ahead

    def _local_sequence(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values[..., self._positions])).to(self._device)
