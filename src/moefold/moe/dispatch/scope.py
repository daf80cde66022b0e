"""The token scope of several ranks."""

from torch import Tensor

from moefold.parallel.collectives import all_gather, all_reduce_sum
from moefold.parallel.groups import Group


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
