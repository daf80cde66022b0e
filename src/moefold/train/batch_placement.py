"""Placement of the tokens of each micro-batch set: the ranks that hold them, and what attention must know of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moefold.comm.collectives import all_gather_objects, all_to_all
from moefold.comm.groups import Group, ParallelGroups
from moefold.config.groups.context import BatchShape
from moefold.ops.documents import DocumentBounds
from moefold.parallel.batch import Batch
from moefold.topology.token_placement import (
    Integers,
    MicroBatchSetShape,
    Placement,
    document_bounds,
    place_tokens,
    repeat_indices,
)

Columns = Mapping[str, NDArray[Any]]
"""Columns of tokens by name, [samples, ..., S] each."""


class MicroBatchSetPlacer:
    """Places the tokens of a batch's micro-batch sets on the dp x cp ranks. All ranks compute the same placement."""

    def __init__(self, shape: BatchShape, groups: ParallelGroups) -> None:
        plan = shape.context.plan
        self._shares_work = plan.balances_compute_ranks and shape.dp * shape.cp > 1
        self.kind = plan.placement
        self._block = plan.block
        self._groups = groups
        self._shape = MicroBatchSetShape(
            dp=shape.dp, cp=shape.cp, micro_batch_size=shape.micro_batch_size, seq_len=shape.seq_len
        )
        self.moves_tokens = plan.moves_tokens and shape.dp * shape.cp > 1
        """True if ranks hold tokens other than the usual parts of their samples."""

    def add_placement(self, batch: Batch) -> Batch:
        """Return the batch with placements if ranks share attention work. It is collective over dp."""
        if self.moves_tokens or not self._shares_work or not batch.document_bounds:
            return batch
        return replace(batch, document_bounds=self._place_sets(batch.document_bounds))

    def move_tokens(
        self, columns: Columns, bounds: Sequence[DocumentBounds]
    ) -> tuple[dict[str, NDArray[Any]], tuple[DocumentBounds, ...]]:
        """Send the tokens of this data-parallel rank's samples to the ranks of their slots. It is collective over dp.

        Args:
            columns: columns of this rank's samples, equal on its cp ranks.
            bounds: bounds of the documents of its micro-batches.

        Returns:
            The columns of this rank's slots, [samples, ..., S/cp], and the bounds with the placement of each
            micro-batch set. A row holds any tokens of its micro-batch set, and is not a sample. The columns have the
            names in `columns`, and "token_samples" and "positions", which give the sample and position of the token in
            each slot.
        """
        placed = self._place_sets(bounds)
        placements = [micro_batch.placement for micro_batch in placed if micro_batch.placement is not None]
        exchange = SlotExchange(placements, self._groups.attn.dp, self._groups.attn.cp.rank)
        names = list(columns)
        rows = [np.moveaxis(columns[name], -1, 1) for name in names]
        shapes = [values.shape[2:] for values in rows]
        tokens = np.concatenate([values.reshape(values.shape[0] * values.shape[1], -1) for values in rows], 1)
        slots = exchange.send(tokens.astype(np.float64), self._groups.device)
        widths = [int(np.prod(shape)) for shape in shapes]
        blocks = np.split(slots, np.cumsum(widths)[:-1], axis=1)
        placed_columns = {
            name: block.astype(columns[name].dtype).reshape(len(slots), *shape)
            for name, block, shape in zip(names, blocks, shapes, strict=True)
        }
        placed_columns |= {"token_samples": exchange.samples, "positions": exchange.positions}
        num_samples = len(columns[names[0]])
        # [sets * C, ...] -> [samples, ..., S/cp].
        return {
            name: np.moveaxis(values.reshape(num_samples, -1, *values.shape[1:]), 1, -1)
            for name, values in placed_columns.items()
        }, placed

    def _place_sets(self, bounds: Sequence[DocumentBounds]) -> tuple[DocumentBounds, ...]:
        """Return the bounds with the placement of each micro-batch set. It is collective over dp.

        The ranks exchange the bounds of their documents: a few integers for each sample.
        """
        local = [micro_batch.of_samples for micro_batch in bounds]
        sets = zip(*all_gather_objects(local, self._groups.attn.dp), strict=True)
        return tuple(
            replace(micro_batch, placement=self._place([sample for samples in own for sample in samples]))
            for micro_batch, own in zip(bounds, sets, strict=True)
        )

    def _place(self, samples: Sequence[tuple[int, ...]]) -> Placement:
        """Place the tokens of a micro-batch set, given the bounds of the documents of all its samples."""
        return place_tokens(self.kind, self._shape, document_bounds(self._shape, samples), self._block)


class SlotExchange:
    """All-to-all over dp that brings the tokens of a batch from the ranks that read them to the ranks of their slots.

    The cp ranks of a data-parallel rank have read the same samples: a rank gets tokens from ranks with its cp rank.
    """

    def __init__(self, placements: Sequence[Placement], dp: Group, cp_rank: int) -> None:
        self._dp = dp
        shape = placements[0].shape
        set_tokens = shape.micro_batch_size * shape.seq_len
        numbers = np.concatenate([placement.slots(dp.rank * shape.cp + cp_rank) for placement in placements])
        set_index = np.repeat(np.arange(len(placements)), shape.tokens_per_rank)
        sample = numbers // shape.seq_len
        source = sample // shape.micro_batch_size
        self._order = np.argsort(source, kind="stable")
        self._output_splits = np.bincount(source, minlength=dp.size).tolist()
        sent = [
            [
                number * set_tokens + _tokens_between(placement, rank, dp.rank * set_tokens, set_tokens)
                for number, placement in enumerate(placements)
            ]
            for rank in range(cp_rank, shape.num_ranks, shape.cp)
        ]
        self._sent = np.concatenate([tokens for rows in sent for tokens in rows])
        self._input_splits = [sum(map(len, rows)) for rows in sent]
        per_rank = len(placements) * shape.micro_batch_size
        self.samples: Integers = (
            source * per_rank + set_index * shape.micro_batch_size + sample % shape.micro_batch_size
        )
        """Index in the global batch of the sample of each slot, set by set, int64 [sets * C]."""
        self.positions: Integers = numbers % shape.seq_len
        """Position of the token of each slot in its sample, int64 [sets * C]."""

    def send(self, tokens: NDArray[np.float64], device: torch.device) -> NDArray[np.float64]:
        """Send the tokens of this rank's samples and return the tokens of its slots, set by set, [sets * C, W].

        Args:
            tokens: values of each token, sample by sample, [samples * S, W].
        """
        rows = torch.from_numpy(np.ascontiguousarray(tokens[self._sent])).to(device)
        received = all_to_all(rows, self._dp, self._input_splits, self._output_splits).cpu().numpy()
        slots: NDArray[np.float64] = np.empty_like(received)
        slots[self._order] = received
        return slots


def _tokens_between(placement: Placement, rank: int, first: int, count: int) -> Integers:
    """Return a rank's tokens in [first, first + count), minus `first`, in the order of its slots."""
    runs = slice(*np.searchsorted(placement.ranks_M, (rank, rank + 1)))
    begins = np.maximum(placement.firsts_M[runs], first)
    ends = np.minimum(placement.firsts_M[runs] + placement.lengths_M[runs], first + count)
    run, offset = repeat_indices(np.maximum(ends - begins, 0))
    return begins[run] + offset - first
