"""Planners of torch.distributed.checkpoint that take the place of each shard from `local_slice`."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from moefold.comm.sharded_tensor import local_slice


class ShardSavePlanner(DefaultSavePlanner):
    """Save planner of a state of tensors; an empty shard is not written."""

    def create_local_plan(self) -> SavePlan:
        """Return the items of torch's plan with the places of the shards."""
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[placed for item in plan.items for placed in self._place(item)])
        return self.plan

    def _place(self, item: WriteItem) -> Iterator[WriteItem]:
        tensor = self.state_dict[item.index.fqn]
        if not isinstance(tensor, DTensor):
            yield item
            return
        assert item.tensor_data is not None
        for chunk in _chunks(tensor):
            data = replace(item.tensor_data, chunk=chunk)
            yield replace(item, index=MetadataIndex(item.index.fqn, chunk.offsets), tensor_data=data)


class ShardLoadPlanner(DefaultLoadPlanner):
    """Load planner of a state of tensors, of which the checkpoint has every one."""

    def create_local_plan(self) -> LoadPlan:
        """Return the reads that fill the shards of this rank."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, tensor in self.state_dict.items():
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata), name
            assert stored.size == tensor.shape, (name, stored.size, tensor.shape)
            items += create_read_items_for_chunk_list(name, stored, _chunks(tensor))
        return LoadPlan(items)


def _chunks(tensor: Tensor) -> list[ChunkStorageMetadata]:
    """Return the part of a tensor that this rank holds; none if it is empty."""
    values, start = local_slice(tensor)
    is_empty = values.numel() == 0
    return [] if is_empty else [ChunkStorageMetadata(offsets=torch.Size(start), sizes=values.shape)]
