"""Batch sharding: this rank's data-parallel and context-parallel shard of each global batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moefold.comm.collectives import all_reduce_sum
from moefold.comm.groups import ParallelGroups
from moefold.comm.host_copy import copy_to_device
from moefold.config.groups.context import BatchShape
from moefold.data.sample import SampleBatch
from moefold.data.sampler import Sampler
from moefold.errors import ConfigError
from moefold.ops.documents import DocumentBounds
from moefold.parallel.batch import Batch

if TYPE_CHECKING:
    from moefold.train.batch_placement import MicroBatchSetPlacer


TargetWeights = NDArray[np.float64]
WeightedSamples = tuple[SampleBatch, TargetWeights]
"""Samples of one rank, and the weights of their targets, [count, 1 + mtp_layers, S]."""


@dataclass(frozen=True)
class InputCount:
    """Inputs of a global batch over all data-parallel ranks."""

    num_tokens: int
    """Tokens of the data, including prompts and masked turns, without padding."""
    num_inputs: int
    """Positions of the batch, padding included."""

    @property
    def token_weight(self) -> float | None:
        """Share of each token in the auxiliary losses of the routers: 1 / tokens, or None if there is no padding.

        All ranks get the same value, including ranks without padding.
        """
        return None if self.num_tokens == self.num_inputs else 1.0 / max(1, self.num_tokens)


class BatchBuilder:
    """Builds the batches of this rank from its samples."""

    def __init__(self, shape: BatchShape, groups: ParallelGroups, positions: Tensor) -> None:
        self.global_batch_size = shape.global_batch_size
        self._samples_per_rank = shape.samples_per_rank
        self._micro_batch_size = shape.micro_batch_size
        self._mtp_layers = shape.mtp_layers
        self._dp_group = groups.attn.dp
        self._placer: MicroBatchSetPlacer | None = None
        plan = shape.context.plan
        if plan.balances_compute_ranks or plan.moves_tokens:
            from moefold.train import batch_placement

            self._placer = batch_placement.MicroBatchSetPlacer(shape, groups)
        self._first_in_batch = self._dp_group.rank * self._samples_per_rank
        self._positions = positions.cpu().numpy()
        self._device = groups.device
        self._dtype = torch.float64 if shape.is_float64 else torch.float32

    @property
    def own_samples(self) -> range:
        """Indices in a global batch of the samples of this data-parallel rank, without padding."""
        end = self._first_in_batch + self._samples_per_rank
        return range(min(self._first_in_batch, self.global_batch_size), min(end, self.global_batch_size))

    def count_inputs(self, samples: SampleBatch) -> InputCount:
        """Count the inputs of a global batch for `build_batch`. It is collective over dp.

        Args:
            samples: the samples of this rank, the same number as on each other rank.
        """
        is_token = samples.is_token()
        num_tokens = self._sum_over_ranks(np.array([float(is_token.sum())]))
        return InputCount(int(num_tokens[0]), is_token.size * self._dp_group.size)

    def _sum_over_ranks(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sum over the data-parallel ranks. It is collective over dp."""
        return all_reduce_sum(torch.from_numpy(values).to(self._device), self._dp_group).cpu().numpy()

    def build_batch(
        self, samples: SampleBatch, weights: TargetWeights, first_in_batch: int, count: InputCount
    ) -> Batch:
        """Build a batch of this rank's samples, whose weights are final.

        Collective over dp if `parallel.context` moves tokens.

        Args:
            samples: the samples of this rank, a multiple of the micro-batch size.
            weights: the share of each target in the loss, see `WeightedSamples`.
            first_in_batch: index of the first of the samples in the global batch.
            count: inputs of the global batch, or of all batches of an evaluation.

        Raises:
            ConfigError: `parallel.context` moves tokens of documents, and the samples have none.
        """
        per_token = {"tokens": samples.inputs, "labels": samples.labels, "weights": weights[:, 0]}
        per_token |= samples.token_columns
        if (token_weight := count.token_weight) is not None:
            per_token["token_weights"] = samples.is_token() * token_weight
        if self._mtp_layers:
            per_token |= {"mtp_labels": self._mtp_targets(samples.labels), "mtp_weights": weights[:, 1:]}
        starts = samples.document_starts()
        bounds: tuple[DocumentBounds, ...] = ()
        if starts is not None:
            firsts = range(0, len(starts), self._micro_batch_size)
            bounds = tuple(DocumentBounds.of_positions(starts[i : i + self._micro_batch_size]) for i in firsts)
        if self._placer is not None and self._placer.moves_tokens:
            if starts is None:
                # `validate/unused.py` refuses the key in a recipe. A Config made in Python has no given keys.
                raise ConfigError(
                    f"parallel.context.placement={self._placer.kind!r} places documents, and the samples have none; "
                    "set data.document_end or data.document_index, or choose placement='samples'"
                )
            assert not samples.sample_columns, "a placement is refused for data with columns of samples"
            columns, bounds = self._placer.move_tokens(per_token | {"document_starts": starts}, bounds)
        else:
            columns = {name: values[..., self._positions] for name, values in per_token.items()}
            columns |= samples.sample_columns
            if starts is not None:
                columns["document_starts"] = starts
        columns["sample_ids"] = first_in_batch + np.arange(len(samples.tokens))
        tensors = {name: self._to_tensor(values) for name, values in columns.items()}
        return Batch(tensors.pop("tokens"), tensors, bounds, count.num_tokens)

    def _mtp_targets(self, labels: np.ndarray) -> np.ndarray:
        """Return the MTP targets: tokens 2, 3, ... positions ahead, [count, mtp_layers, S]. 0 past the end of a sample.

        They are taken from the full sample, so no communication with the ranks of later positions is needed.
        """
        ahead = np.zeros((len(labels), self._mtp_layers, labels.shape[1]), dtype=labels.dtype)
        for depth in range(1, 1 + self._mtp_layers):
            ahead[:, depth - 1, :-depth] = labels[:, depth:]
        return ahead

    def _to_tensor(self, values: np.ndarray) -> Tensor:
        """Copy to the device without waiting. Floating-point values get the type of the loss."""
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        return copy_to_device(tensor.to(self._dtype) if tensor.is_floating_point() else tensor, self._device)


class BatchSharder(BatchBuilder):
    """Shards global batches over data-parallel ranks and context-parallel ranks.

    Micro-batch j of the global batch is samples [j * B, (j + 1) * B). The j-th micro-batch of data-parallel rank d is
    number d * num_micro_batches + j, so the batch is the same under every mapping. If the number of micro-batches is
    not a multiple of dp, the last ranks have micro-batches of padding. They are copies of the last sample with weight
    0, which are not routed and not counted.
    """

    def __init__(self, sampler: Sampler, shape: BatchShape, groups: ParallelGroups, positions: Tensor) -> None:
        super().__init__(shape, groups, positions)
        self._padded_batch_size = self._samples_per_rank * shape.dp
        self._sampler = sampler
        self._vocab_size = shape.vocab_size

    def batch(self, first_sample: int) -> Batch:
        """Return this rank's shard of the global batch that starts at sample `first_sample` of the run."""
        return self.to_batch(self.read(range(first_sample, first_sample + self.global_batch_size)))

    def read(self, samples: Sequence[int]) -> WeightedSamples:
        """Read this rank's samples of a global batch, and compute the weights of their targets."""
        return self._read_weighted_samples(samples, self.global_batch_size)

    def to_batch(self, samples: WeightedSamples) -> Batch:
        """Build this rank's shard of a global batch from the samples that `read` returned.

        Collective over dp if samples are annotated: the mean is over the counted targets of all ranks.
        """
        (batch,) = self.to_eval_batches([samples], self.global_batch_size)
        return batch

    def read_eval_samples(self, num_samples: int) -> tuple[list[WeightedSamples], int]:
        """Read this rank's samples of the first `num_samples` of the split. Return them with the number over all ranks.

        The last global batch is filled up with samples of weight 0, so the mean does not depend on the batch size. Lost
        samples are skipped.
        """
        # An empty split raises its own error when a sample is requested.
        num_samples = max(1, min(num_samples, len(self._sampler) - self._sampler.num_dropped))
        weighted: list[WeightedSamples] = []
        first = 0
        for start in range(0, num_samples, self.global_batch_size):
            samples = self._sampler.next_sample_indices(first, self.global_batch_size)
            weighted.append(self._read_weighted_samples(samples, num_samples - start))
            first = samples[-1] + 1
        return weighted, num_samples

    def _read_weighted_samples(self, samples: Sequence[int], num_taken: int) -> WeightedSamples:
        """Read this rank's samples of one global batch. Samples after the first `num_taken` of the batch weigh 0."""
        local = list(samples[self._first_in_batch : self._first_in_batch + self._samples_per_rank])
        samples_of_rank = self._sampler.batch_at(local + [samples[-1]] * (self._samples_per_rank - len(local)))
        self._check_ids(samples_of_rank.tokens)
        is_taken = self._first_in_batch + np.arange(self._samples_per_rank) < min(num_taken, self.global_batch_size)
        if num_taken < self._padded_batch_size:
            samples_of_rank = samples_of_rank.pad_out(~is_taken)
        return samples_of_rank, self._target_weights(samples_of_rank) * is_taken[:, None, None]

    def _check_ids(self, tokens: np.ndarray) -> None:
        """Check that ids are in the vocabulary. A sharded embedding would return zeros for other ids.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        if tokens.min() < 0 or tokens.max() >= self._vocab_size:
            raise ValueError(f"samples hold ids {tokens.min()} to {tokens.max()}; model.vocab_size={self._vocab_size}")

    def _target_weights(self, samples: SampleBatch) -> TargetWeights:
        """Return the loss weight of each target, [count, 1 + mtp_layers, S]: the next token, then the MTP targets.

        A target has the same weight at every depth, but 0 if the predicting token is in another document.
        """
        next_ = samples.target_weights()
        if next_ is None:
            next_ = np.ones(samples.inputs.shape)
        starts = samples.document_starts()
        weights = np.zeros((len(next_), 1 + self._mtp_layers, self._sampler.seq_len))
        weights[:, 0] = next_
        for depth in range(1, 1 + self._mtp_layers):
            weights[:, depth, :-depth] = next_[:, depth:]
            if starts is not None:
                weights[:, depth, :-depth] *= starts[:, :-depth] == starts[:, depth:]
        return weights

    def to_eval_batches(self, weighted: list[WeightedSamples], num_samples: int) -> list[Batch]:
        """Build batches whose weights sum to 1 at each depth over all parts and ranks, or to 0 if no target counts.

        Collective as `to_batch`.
        """
        length = self._sampler.seq_len
        totals = np.array([float(num_samples * (length - depth)) for depth in range(1 + self._mtp_layers)])
        num_tokens = num_samples * length
        if self._sampler.has_annotations:
            rank_tokens = sum(int(samples.is_token().sum()) for samples, _ in weighted)
            rank_totals = np.append(np.sum([weights.sum((0, 2)) for _, weights in weighted], 0), rank_tokens)
            all_totals = self._sum_over_ranks(rank_totals)
            num_tokens = int(all_totals[-1])
            totals = np.where(all_totals[:-1] == 0, 1.0, all_totals[:-1])
        count = InputCount(num_tokens, len(weighted) * self._padded_batch_size * length)
        batches = [
            self.build_batch(samples, _scale_weights(samples, weights / totals[:, None]), self._first_in_batch, count)
            for samples, weights in weighted
        ]
        return batches if self._placer is None else [self._placer.add_placement(batch) for batch in batches]


def _scale_weights(samples: SampleBatch, weights: TargetWeights) -> TargetWeights:
    """Multiply the weight of each target by its scale, at every depth."""
    if samples.weight_scale is None:
        return weights
    scaled = weights.copy()
    for depth in range(weights.shape[1]):
        scaled[:, depth, : weights.shape[2] - depth] *= samples.weight_scale[:, depth:]
    return scaled
