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
        self._size = cfg.train.global_batch_size
        self._count = cfg.num_micro_batches * cfg.train.micro_batch_size
        self._first = groups.attn.dp.rank * self._count
        self._depths = cfg.model.mtp_layers
        self._positions = positions.cpu().numpy()
        self._device = groups.device
        self._dtype = torch.float64 if cfg.run.dtype == "float64" else torch.float32

    def batch(self, first_sample: int) -> Batch:
        """This rank's part of the global batch that starts at sample `first_sample` of the run."""
        return self._part(first_sample, first_sample + self._size, self._size)

    def evaluation(self, num_samples: int) -> list[Batch]:
        """This rank's part of the first `num_samples` of the split, each taken once: of a smaller split, all.

        The weights of all batches and ranks sum to 1. A global batch that the samples do not fill goes on with samples
        that weigh nothing, so the mean does not depend on the size of the batch.
        """
        # An empty split explains itself when it is asked for a sample.
        num_samples = max(1, min(num_samples, len(self._split)))
        return [self._part(first, num_samples, num_samples) for first in range(0, num_samples, self._size)]

    def _part(self, first_sample: int, end: int, num_samples: int) -> Batch:
        """This rank's part of one global batch, whose samples before `end` weigh as in a mean over `num_samples`."""
        first = first_sample + self._first
        inputs, labels = self._split.batch(first, self._count)
        share = 1.0 / (num_samples * self._split.seq_len)
        shares = [share if first + i < end else 0.0 for i in range(self._count)]
        tokens = self._local(inputs)
        weights = (
            torch.tensor(shares, dtype=self._dtype, device=self._device)[:, None].expand(tokens.shape).contiguous()
        )
        samples = self._first + torch.arange(self._count, device=self._device)
        return Batch(tokens, self._local(labels), weights, samples, *self._further(labels, shares))

    def _further(self, labels: np.ndarray, shares: list[float]) -> tuple[Tensor, Tensor] | tuple[()]:
        """The tokens 2, 3, ... places ahead of each position and their shares in the loss of their depth.

        They come from the sample itself, so that a rank needs nothing of those that hold the positions behind its own.
        Behind the sample's end stands token 0 with a share of 0.
        """
        if self._depths == 0:
            return ()
        length = self._split.seq_len
        ahead = np.zeros((len(labels), self._depths, length), dtype=labels.dtype)
        weights = np.zeros(ahead.shape)
        for depth in range(1, self._depths + 1):
            ahead[:, depth - 1, :-depth] = labels[:, depth:]
            # As many samples share the loss as at the next token, with fewer targets each.
            weights[:, depth - 1, :-depth] = np.array(shares)[:, None] * (length / (length - depth))
        mine = torch.from_numpy(np.ascontiguousarray(weights[..., self._positions]))
        return self._local(ahead), mine.to(self._device, self._dtype)

    def _local(self, ids: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(ids[..., self._positions])).to(self._device)
