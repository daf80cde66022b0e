"""The part of a logical tensor that a DTensor holds on a rank, and the whole of it.

torch's own offsets, and its `full_tensor`, are wrong where FSDP cuts shards of tensor parallelism of different sizes
(a vocabulary that tp does not divide): they take the k-th parts of all shards together, as if these had one size.
"""

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


@torch.no_grad()
def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of a sharded tensor on every rank of its mesh; collective over that mesh (all-reduce)."""
    if not isinstance(tensor, DTensor):
        return tensor
    values, start = local_slice(tensor)
    mesh = tensor.device_mesh
    whole = values.new_zeros(tensor.shape)
    whole[region_of(values, start)] = values
    for axis, _ in sharded_axes(tensor):
        if mesh.size(axis) > 1:
            dist.all_reduce(whole, group=mesh.get_group(axis))
    return whole
