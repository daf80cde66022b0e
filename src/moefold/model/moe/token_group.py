"""Ranks that share the tokens of one micro-batch, and the positions of these tokens."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moefold.comm.collectives import all_gather, all_reduce_sum
from moefold.comm.groups import Group


class MicroBatchGroup(Protocol):
    """Group of cp x tp ranks with equally many tokens of a micro-batch each. Its collectives have no gradient."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def rank(self) -> int:
        """Index of this rank in the group, and of its rows in the result of `gather`."""
        ...

    @property
    def positions(self) -> Tensor | None:
        """Positions of this rank's tokens in their sample, int64 [S/(cp*tp)]; None: 0, 1, 2, ..."""
        ...

    @property
    def data_parallel_size(self) -> int:
        """Micro-batches that are computed at the same time, each by a group of its own: dp."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the group (all-reduce)."""
        ...

    def sum_over_data_parallel(self, x: Tensor) -> Tensor:
        """Sum over the dp x cp x tp ranks of the pipeline stage (all-reduce)."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Concatenate along dim 0 over the group (all-gather)."""
        ...


class LocalMicroBatch:
    """Group of one rank, which holds whole micro-batches."""

    size = 1
    rank = 0
    positions = None
    data_parallel_size = 1

    def sum(self, x: Tensor) -> Tensor:
        """Return x: there is no other rank."""
        return x

    def sum_over_data_parallel(self, x: Tensor) -> Tensor:
        """Return x: there is no other rank."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Return x: there is no other rank."""
        return x


@dataclass(frozen=True)
class TokenPositions:
    """Positions of the T = S/(cp*tp) * B tokens of this rank in their micro-batch and in the global batch."""

    group: MicroBatchGroup
    num_positions: int
    """S/(cp*tp)."""
    sample_ids_B: Tensor
    """Index of each sample in the global batch, int64 [B]."""

    def positions(self) -> Tensor:
        """Return the positions of this rank's rows in their sample, int64 [S/(cp*tp)]."""
        positions = self.group.positions
        device = self.sample_ids_B.device
        return torch.arange(self.num_positions, device=device) if positions is None else positions.to(device)

    def global_index(self) -> Tensor:
        """Return the index of each token in the micro-batch, position * B + b, int64 [T]; the same on every mapping."""
        batch_size = len(self.sample_ids_B)
        samples_B = torch.arange(batch_size, device=self.sample_ids_B.device)
        return (self.positions().unsqueeze(1) * batch_size + samples_B).flatten()


class ShardedMicroBatch:
    """Micro-batch sharded over the ranks of one group.

    Args:
        group: cp x tp.
        stage: dp x cp x tp, the ranks of the pipeline stage.
        positions: positions of this rank's tokens in their sample, int64 [S/(cp*tp)]; over all ranks: 0 .. S-1.
    """

    def __init__(self, group: Group, stage: Group, positions: Tensor) -> None:
        self._group = group
        self._stage = stage
        self.positions = positions
        self.size = group.size
        self.rank = group.rank
        self.data_parallel_size = stage.size // group.size

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the group (all-reduce), without a gradient."""
        return all_reduce_sum(x, self._group)

    def sum_over_data_parallel(self, x: Tensor) -> Tensor:
        """Sum over the stage (all-reduce), without a gradient."""
        return all_reduce_sum(x, self._stage)

    def gather(self, x: Tensor) -> Tensor:
        """Concatenate along dim 0 over the group (all-gather), without a gradient."""
        return all_gather(x.detach(), self._group)
