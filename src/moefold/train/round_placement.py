"""Placement of the tokens of each round: which tokens this rank holds, and what attention knows of the other ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moefold.comm.collectives import all_gather_objects
from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.ops.documents import DocumentBounds
from moefold.parallel.batch import Batch
from moefold.topology.token_placement import Placement, RoundShape, document_bounds, place

DocumentStarts = NDArray[np.int64]
"""Position at which the document of each token begins, [samples, S]."""


class RoundPlacer:
    """Places the tokens of the rounds of a batch on the dp x cp ranks; the same on every rank.

    Args:
        cfg: the recipe.
        groups: the process groups of this rank.
    """

    def __init__(self, cfg: Config, groups: ParallelGroups) -> None:
        p = cfg.parallel
        is_planned = p.context == "planned" and p.dp * p.cp > 1
        self._shares_bounds = is_planned and p.attention_hosts == "balanced"
        self._kind = p.placement
        self._block = p.attention_block
        self._dp_group = groups.attn.dp
        self._rank = groups.attn.dp.rank * p.cp + groups.attn.cp.rank
        self._shape = RoundShape(
            dp=p.dp, cp=p.cp, micro_batch_size=cfg.train.micro_batch_size, seq_len=cfg.train.seq_len
        )
        self.moves_tokens = is_planned and p.placement != "samples"
        """Whether ranks hold other tokens than parts of their own samples. Every rank then reads the global batch."""

    def add_placement(self, batch: Batch) -> Batch:
        """Return the batch with placements, or unchanged if none is needed or it has no documents; collective over dp.

        The ranks tell each other the bounds of their documents: a few integers for each sample.
        """
        if self.moves_tokens or not self._shares_bounds or not batch.document_bounds:
            return batch
        of_rank = [bounds.of_samples for bounds in batch.document_bounds]
        rounds = zip(*all_gather_objects(of_rank, self._dp_group), strict=True)
        placed = tuple(
            replace(bounds, placement=self._place([sample for samples in round_ for sample in samples]))
            for bounds, round_ in zip(batch.document_bounds, rounds, strict=True)
        )
        return replace(batch, document_bounds=placed)

    def slots(self, starts: DocumentStarts) -> "TokenSlots":
        """Return the tokens of this rank; no communication.

        Args:
            starts: of all samples of the global batch.
        """
        bounds = [DocumentBounds.of_positions(starts[samples]) for samples in self._samples_of_rounds(len(starts))]
        placed = [replace(one, placement=self._place(one.of_samples)) for one in bounds]
        return TokenSlots(self._rank, self._shape, self._samples_of_rounds(len(starts)), placed)

    def _place(self, of_samples: Sequence[tuple[int, ...]]) -> Placement:
        """Place the tokens of a round, given the bounds of the documents of all its samples."""
        return place(self._kind, self._shape, document_bounds(self._shape, of_samples), self._block)

    def _samples_of_rounds(self, num_samples: int) -> NDArray[np.int64]:
        """Return the samples of each round, [rounds, dp*B]: the j-th micro-batches of all data-parallel ranks."""
        shape = self._shape
        samples = np.arange(num_samples).reshape(shape.dp, -1, shape.micro_batch_size)
        return samples.transpose(1, 0, 2).reshape(-1, shape.num_samples)


class TokenSlots:
    """Tokens of one rank in the rounds of a batch: the way from columns of samples to columns of slots.

    The C = B * S/cp slots of a round have the shape of a micro-batch, [B, S/cp]: a row holds any tokens, and is no
    sample. Columns that say which they are come along: "sample_ids" and "positions".

    Args:
        rank: member of dp x cp, see `token_placement`.
        shape: ranks and tokens of a round.
        samples_RN: samples of the global batch in each round, [rounds, dp*B].
        bounds: of the documents of each round, with their placement.
    """

    def __init__(
        self, rank: int, shape: RoundShape, samples_RN: NDArray[np.int64], bounds: Sequence[DocumentBounds]
    ) -> None:
        self.bounds = tuple(bounds)
        self._rows_per_round = shape.micro_batch_size
        samples: list[NDArray[np.int64]] = []
        positions: list[NDArray[np.int64]] = []
        for samples_N, of_round in zip(samples_RN, bounds, strict=True):
            assert of_round.placement is not None
            sample, position = np.divmod(of_round.placement.slots(rank), shape.seq_len)
            samples.append(samples_N[sample])
            positions.append(position)
        self._samples = np.stack(samples)
        self._positions = np.stack(positions)

    def select(self, columns: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return the columns of this rank's slots, [rounds*B, ..., S/cp].

        Args:
            columns: of the global batch, [samples, ..., S].
        """
        places = {"sample_ids": self._samples, "positions": self._positions}
        return {name: self._as_rows(values) for name, values in places.items()} | {
            name: self._as_rows(np.moveaxis(values, -1, 1)[self._samples, self._positions])
            for name, values in columns.items()
        }

    def _as_rows(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return [rounds, C, ...] as [rounds*B, ..., S/cp]."""
        shape = (len(values) * self._rows_per_round, -1, *values.shape[2:])
        return np.moveaxis(values.reshape(shape), 1, -1)
