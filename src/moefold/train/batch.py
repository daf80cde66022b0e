"""This rank's part of each global batch."""

import numpy as np
import torch
from torch import Tensor

from moefold.config.schema import Config
from moefold.data import Split
from moefold.parallel.accumulate import Batch
from moefold.parallel.groups import ParallelGroups


class BatchLoader:
    """Cuts global batches by data-parallel rank and by context shard.

    Micro-batch j of the global batch is samples [j * B, (j + 1) * B); data-parallel rank d takes the j-th of its
    `num_micro_batches` from place d * num_micro_batches + j, so the batch is the same under every mapping.
    """

    def __init__(self, split: Split, cfg: Config, groups: ParallelGroups, positions: Tensor) -> None:
        self._split = split
        self._cfg = cfg
        self._count = cfg.num_micro_batches * cfg.train.micro_batch_size
        self._first = groups.attn.dp.rank * self._count
        self._positions = positions.cpu().numpy()
        self._device = groups.device
        self._weight = 1.0 / cfg.tokens_per_step
        self._dtype = torch.float64 if cfg.run.dtype == "float64" else torch.float32

    def batch(self, first_sample: int) -> Batch:
        """This rank's part of the global batch that starts at sample `first_sample` of the run."""
        inputs, labels = self._split.batch(first_sample + self._first, self._count)
        tokens = self._local(inputs)
        weights = torch.full(tokens.shape, self._weight, dtype=self._dtype, device=self._device)
        return Batch(tokens, self._local(labels), weights)

    def _local(self, ids: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(ids[:, self._positions])).to(self._device)
