"""The ranks that hold the tokens of one micro-batch between them, as far as the maths must know.

The token scope of several ranks.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moefold.comm.collectives import all_gather, all_reduce_sum
from moefold.comm.groups import Group


class MicroBatchGroup(Protocol):
    """cp x tp ranks with equally many tokens each. Nothing here has a gradient."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def rank(self) -> int:
        """My place among them, which is the place of my rows in `gather`."""
        ...

    @property
    def positions(self) -> Tensor | None:
        """Positions of my tokens in their sample, int64 [S/(cp*tp)]; None stands for 0, 1, 2 and so on."""
        ...

    @property
    def data_parallel_size(self) -> int:
        """Micro-batches that go through the layer at the same time, each in a scope of its own: dp."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the ranks."""
        ...

    def sum_over_data_parallel(self, x: Tensor) -> Tensor:
        """Sum over the ranks of all scopes that are at work at the same time: dp x cp x tp."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Concatenate the rows of all ranks along dim 0."""
        ...


class LocalMicroBatch:
    """One rank holds whole micro-batches."""

    size = 1
    rank = 0
    positions = None
    data_parallel_size = 1

    def sum(self, x: Tensor) -> Tensor:
        """Nothing to add."""
        return x

    def sum_over_data_parallel(self, x: Tensor) -> Tensor:
        """Nothing to add."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Nothing to concatenate."""
        return x


@dataclass(frozen=True)
class TokenPositions:
    """Where the T = S/(cp*tp) * B tokens of this rank stand in their micro-batch and in the global batch."""

    group: MicroBatchGroup
    num_positions: int
    """S/(cp*tp)."""
    sample_ids_B: Tensor
    """Place of each sample in the global batch, int64 [B]."""

    def positions(self) -> Tensor:
        """Position of each of my rows in its sample, int64 [S/(cp*tp)]."""
        positions = self.group.positions
        device = self.sample_ids_B.device
        return torch.arange(self.num_positions, device=device) if positions is None else positions.to(device)

    def global_index(self) -> Tensor:
        """The place of each token in the micro-batch, position * B + b, int64 [T]: the same under every mapping."""
        batch_size = len(self.sample_ids_B)
        places_B = torch.arange(batch_size, device=self.sample_ids_B.device)
        return (self.positions().unsqueeze(1) * batch_size + places_B).flatten()


class ShardedMicroBatch:
    """The ranks of one group hold a micro-batch between them.

    Args:
        group: cp x tp.
        stage: dp x cp x tp, the ranks of the pipeline stage.
        positions: positions of my tokens in their sample, int64 [S/(cp*tp)]; those of all ranks together are 0 .. S-1.
    """

    def __init__(self, group: Group, stage: Group, positions: Tensor) -> None:
        self._group = group
        self._stage = stage
        self.positions = positions
        self.size = group.size
        self.rank = group.rank
        self.data_parallel_size = stage.size // group.size

    def sum(self, x: Tensor) -> Tensor:
        """All-reduce, without a gradient."""
        return all_reduce_sum(x, self._group)

    def sum_over_data_parallel(self, x: Tensor) -> Tensor:
        """All-reduce over the stage, without a gradient."""
        return all_reduce_sum(x, self._stage)

    def gather(self, x: Tensor) -> Tensor:
        """All-gather along dim 0, without a gradient."""
        return all_gather(x.detach(), self._group)
