"""The part of a logical tensor that a DTensor holds on a rank, and the whole tensor.

torch's own offsets, and its `full_tensor`, are wrong where FSDP cuts shards of tensor parallelism of different sizes (a
vocabulary that tp does not divide). They take the k-th parts of all shards together, as if these had one size.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from moefold.comm.private_torch import sharded_axes
from moefold.config.base.param_spec import shard_rows


def local_slice(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return the local values of a plain tensor or DTensor, and their offsets in the logical tensor."""
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.dim()
    values = tensor.to_local()
    if values.numel() == 0:
        return values, (0,) * tensor.dim()
    mesh = tensor.device_mesh
    start = [0] * tensor.dim()
    size = list(tensor.shape)
    for axis, dim in sharded_axes(tensor):
        first, size[dim] = shard_rows(size[dim], mesh.size(axis), mesh.get_local_rank(axis))
        start[dim] += first
    assert size == list(values.shape), (size, values.shape)
    return values, tuple(start)


def region_of(values: Tensor, start: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the slices of the logical tensor that select the result of `local_slice`."""
    return tuple(slice(first, first + size) for first, size in zip(start, values.shape, strict=True))


MESSAGE_ELEMENTS = 2**22
"""Elements in one message of `full_tensors`, unless a tensor has more: 32 MiB in float64."""


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole sharded tensor on every rank of its mesh. It is collective over that mesh (all-reduce)."""
    ((_, full),) = full_tensors({"": tensor})
    return full


@torch.no_grad()
def full_tensors(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors of sharded tensors, several in a message. It is collective over their meshes (all-reduce).

    Args:
        tensors: tensors by name, the same on all ranks. Plain tensors are yielded unchanged.
    """
    messages: dict[tuple[Any, ...], list[str]] = {}
    count = 0
    for name, tensor in tensors.items():
        count += tensor.numel()
        key = (count // MESSAGE_ELEMENTS, tensor.dtype, *_sharding_groups(tensor))
        messages.setdefault(key, []).append(name)
    for (_, _, *groups), names in messages.items():
        wholes = [_local_part(tensors[name]) for name in names]
        if groups:
            message = torch.cat([full.flatten() for full in wholes])
            for group in groups:
                dist.all_reduce(message, group=group)
            flat = message.split([full.numel() for full in wholes])
            wholes = [values.view_as(full) for values, full in zip(flat, wholes, strict=True)]
        yield from zip(names, wholes, strict=True)


def _local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part in a tensor of the whole shape, which is zero elsewhere."""
    if not isinstance(tensor, DTensor):
        return tensor
    values, start = local_slice(tensor)
    full = values.new_zeros(tensor.shape)
    full[region_of(values, start)] = values
    return full


def _sharding_groups(tensor: Tensor) -> list[dist.ProcessGroup]:
    """Return the groups of several ranks that hold different shards of a DTensor."""
    if not isinstance(tensor, DTensor):
        return []
    mesh = tensor.device_mesh
    return [mesh.get_group(axis) for axis, _ in sharded_axes(tensor) if mesh.size(axis) > 1]
