"""Entries of a checkpoint: the tensors of this rank, by names that are the same for all mappings."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from moefold.comm.sharded_tensor import local_slice
from moefold.optim.states import named_moments

OPTIONAL_BUFFER_SUFFIX = ".last_counts_E"
"""Suffix of buffers of a loss that a run may enable at any step: an older checkpoint may lack them."""


def checkpoint_state(
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    optimized: Mapping[str, nn.Parameter] | None = None,
) -> dict[str, Tensor]:
    """Return this rank's shards of all checkpoint entries, by mapping-independent names. It copies nothing.

    Args:
        optimized: its parameters by name. None means `parameters`.
    """
    moments = named_moments(optimizer, parameters if optimized is None else optimized)
    moments = {f"optimizer.{name}": moment for name, moment in moments.items()}
    return model_state(parameters, buffers) | moments


def model_state(parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's shards of the weights and buffers, by names that all mappings share."""
    weights = {f"model.{name}": parameter.data for name, parameter in parameters.items()}
    return weights | {f"model.{name}": buffer for name, buffer in buffers.items()}


def chunks_of(tensor: Tensor) -> list[ChunkStorageMetadata]:
    """Return the chunk of a tensor that this rank holds, or an empty list if it has no values."""
    values, start = local_slice(tensor)
    is_empty = values.numel() == 0
    return [] if is_empty else [ChunkStorageMetadata(offsets=torch.Size(start), sizes=values.shape)]
