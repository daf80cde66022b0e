"""Ranks that share the tokens of one micro-batch, and the positions of these tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.comm.collectives import all_gather, all_reduce_sum
from moefold.comm.groups import Group


class MicroBatchGroup:
    """Group of cp x tp ranks with equal numbers of tokens of a micro-batch, here one rank, which has all of them.

    Its collectives have no gradient.
    """

    size: int = 1
    rank: int = 0
    """Index of this rank in the group, and of its rows in the result of `gather`."""
    positions: Tensor | None = None
    """Positions of this rank's tokens in their sample, int64 [S/(cp*tp)]. None means 0, 1, 2, ..."""
    data_parallel_size: int = 1
    """Micro-batches that are computed at the same time, each by a separate group: dp."""

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the group (all-reduce)."""
        return x

    def sum_over_data_parallel(self, x: Tensor) -> Tensor:
        """Sum over the dp x cp x tp ranks of the pipeline stage (all-reduce)."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Concatenate along dim 0 over the group (all-gather)."""
        return x

    def local_rows(self, column: Tensor) -> Tensor:
        """Return the values of this rank's tokens, sequence-first, [T], of a column of the micro-batch, [B, S/cp]."""
        return column.t().flatten()


@dataclass(frozen=True)
class TokenColumns:
    """Columns of a micro-batch that MoE layers read. See `Batch`."""

    sample_ids: Tensor | None = None
    """Index of each sample in the global batch, int64 [B]. None means 0 .. B-1."""
    token_weights: Tensor | None = None
    """Share of each token in the auxiliary losses, 0 for padding, [B, S/cp], or None if there is no padding."""
    positions: Tensor | None = None
    """Position of each token in its sample, int64 [B, S/cp], where `parallel.context` moves tokens, else None."""
    token_samples: Tensor | None = None
    """Index of each token's sample in the global batch, int64 [B, S/cp], together with `positions`."""


NO_COLUMNS = TokenColumns()
"""Samples 0 .. B-1 of the global batch, without padding."""


@dataclass(frozen=True)
class PlacedTokens:
    """Tokens of this rank's rows where `parallel.context` moves them: any tokens of the samples of a round.

    The round is the micro-batches that the data-parallel ranks compute at the same time.
    """

    sample_ids_T: Tensor
    """Index of each token's sample in the global batch, int64 [T]."""
    positions_T: Tensor
    """Position of each token in its sample, int64 [T]."""
    micro_batch_size: int
    """Samples of a micro-batch, B."""

    def micro_batches(self) -> Tensor:
        """Return the index in the global batch of each token's micro-batch, int64 [T]."""
        return self.sample_ids_T // self.micro_batch_size

    def samples_in_micro_batch(self) -> Tensor:
        """Return the index of each token's sample in its micro-batch, int64 [T]."""
        return self.sample_ids_T % self.micro_batch_size


@dataclass(frozen=True)
class TokenPositions:
    """Positions of the T = S/(cp*tp) * B tokens of this rank in their micro-batch and in the global batch."""

    group: MicroBatchGroup
    num_positions: int
    """S/(cp*tp)."""
    sample_ids_B: Tensor
    """Index of each sample in the global batch, int64 [B]."""
    weights_T: Tensor | None = None
    """Share of each token in the auxiliary losses: 1/(tokens of the global batch), 0 for padding, or None without
    padding."""
    placed: PlacedTokens | None = None
    """The tokens, where `parallel.context` moves them. `sample_ids_B` are then the samples of unmoved rows.
    """

    @staticmethod
    def of_columns(group: MicroBatchGroup, x: Tensor, columns: TokenColumns) -> "TokenPositions":
        """Return the positions of the tokens of a micro-batch."""
        sample_ids = columns.sample_ids
        samples_B = torch.arange(x.shape[1], device=x.device) if sample_ids is None else sample_ids
        weights_T = None if columns.token_weights is None else group.local_rows(columns.token_weights)
        placed = None
        if columns.token_samples is not None and columns.positions is not None:
            placed = PlacedTokens(
                group.local_rows(columns.token_samples), group.local_rows(columns.positions), x.shape[1]
            )
        return TokenPositions(group, len(x), samples_B, weights_T, placed)

    def is_token(self) -> Tensor | None:
        """Return the mask of this rank's rows that are not padding, bool [T]. None means all."""
        return None if self.weights_T is None else self.weights_T > 0

    def keys(self) -> tuple[Tensor, Tensor]:
        """Return sample ids [B] and positions [S/(cp*tp)] of the rows, or [T, 1] and [T], for `uniform_noise`."""
        if self.placed is not None:
            return self.placed.sample_ids_T.unsqueeze(1), self.placed.positions_T
        return self.sample_ids_B, self.positions()

    def micro_batch(self, micro_batches_per_rank: int) -> Tensor:
        """Return the number of this micro-batch among the micro-batches of a data-parallel rank in a step, int64 []."""
        return self.sample_ids_B[0] // len(self.sample_ids_B) % micro_batches_per_rank

    def positions(self) -> Tensor:
        """Return the positions of this rank's rows in their sample, int64 [S/(cp*tp)]."""
        positions = self.group.positions
        device = self.sample_ids_B.device
        return torch.arange(self.num_positions, device=device) if positions is None else positions.to(device)

    def global_index(self) -> Tensor:
        """Return the index of each token in the micro-batch, position * B + b, int64 [T], the same on every mapping."""
        batch_size = len(self.sample_ids_B)
        if self.placed is not None:
            return self.placed.positions_T * batch_size + self.placed.samples_in_micro_batch()
        samples_B = torch.arange(batch_size, device=self.sample_ids_B.device)
        return (self.positions().unsqueeze(1) * batch_size + samples_B).flatten()


class ShardedMicroBatch(MicroBatchGroup):
    """Micro-batch sharded over the ranks of one group.

    Args:
        stage: dp x cp x tp, the ranks of the pipeline stage.
        tp: tp, between whose ranks sequence parallelism divides the positions of a cp rank.
        positions: positions of this rank's tokens in their sample, int64 [S/(cp*tp)], over all ranks 0 .. S-1.
    """

    def __init__(self, group: Group, stage: Group, tp: Group, positions: Tensor) -> None:
        self._group = group
        self._stage = stage
        self._tp = tp
        self.positions = positions
        self.size = group.size
        self.rank = group.rank
        self.data_parallel_size = stage.size // group.size

    def sum(self, x: Tensor) -> Tensor:
        """See base class."""
        return all_reduce_sum(x, self._group)

    def sum_over_data_parallel(self, x: Tensor) -> Tensor:
        """See base class."""
        return all_reduce_sum(x, self._stage)

    def gather(self, x: Tensor) -> Tensor:
        """See base class."""
        return all_gather(x.detach(), self._group)

    def local_rows(self, column: Tensor) -> Tensor:
        """See base class."""
        return column.t().chunk(self._tp.size)[self._tp.rank].flatten()
