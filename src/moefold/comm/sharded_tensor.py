"""The part of a logical tensor that a DTensor holds on a rank, and the whole of it.

torch's own offsets, and its `full_tensor`, are wrong where FSDP cuts shards of tensor parallelism of different sizes
(a vocabulary that tp does not divide): they take the k-th parts of all shards together, as if these had one size.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from moefold.comm.torch_compat import sharded_axes
from moefold.config.param_spec import shard_rows


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
    """Return the slices that select, in the logical tensor, what `local_slice` returned."""
    return tuple(slice(first, first + size) for first, size in zip(start, values.shape, strict=True))


MESSAGE_ELEMENTS = 2**22
"""Elements in one message of `full_tensors`, unless a tensor has more: 32 MiB in float64."""


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of a sharded tensor on every rank of its mesh; collective over that mesh (all-reduce)."""
    return full_tensors({"": tensor})[""]


@torch.no_grad()
def full_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the wholes of sharded tensors on every rank of their meshes; collective over these meshes (all-reduce).

    Args:
        tensors: DTensors in the same order on all ranks; plain tensors are returned as they are.
    """
    wholes = dict(tensors)
    for names in _messages(tensors):
        parts = []
        for name in names:
            values, start = local_slice(tensors[name])
            whole = values.new_zeros(tensors[name].shape)
            whole[region_of(values, start)] = values
            parts.append(whole.flatten())
        message = torch.cat(parts)
        for group in _sharding_groups(tensors[names[0]]):
            dist.all_reduce(message, group=group)
        for name, part in zip(names, message.split([len(part) for part in parts]), strict=True):
            wholes[name] = part.view(tensors[name].shape)
    return wholes


def _messages(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names of the DTensors that go together: of one type, sharded by the same groups."""
    messages: list[list[str]] = []
    newest: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            continue
        key = (tensor.dtype, *_sharding_groups(tensor))
        size = sum(tensors[other].numel() for other in newest.get(key, ()))
        if key not in newest or size + tensor.numel() > MESSAGE_ELEMENTS:
            newest[key] = []
            messages.append(newest[key])
        newest[key].append(name)
    return messages


def _sharding_groups(tensor: Tensor) -> list[dist.ProcessGroup]:
    """Return the groups of several ranks that hold different shards of a DTensor."""
    assert isinstance(tensor, DTensor)
    mesh = tensor.device_mesh
    return [mesh.get_group(axis) for axis, _ in sharded_axes(tensor) if mesh.size(axis) > 1]
