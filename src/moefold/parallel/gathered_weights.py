"""Source of the weights of a model in training for Hugging Face folders, gathered region by region on rank 0."""

import torch
from torch import Tensor

from moefold.comm.collectives import all_to_all
from moefold.comm.groups import World
from moefold.cost.shard_boxes import Box
from moefold.parallel.fsdp import reshard_parameters
from moefold.parallel.parallel_model import ParallelModel
from moefold.parallel.reshard import check_boxes, gather_dtypes, merged_shards, weight_sharding, weight_tensors


class GatheredWeights:
    """Reads regions of the weights of a model under any mapping. At most one region is in memory.

    The constructor, `refresh` and `read` are collective: all ranks call them in the same order.
    """

    def __init__(self, model: ParallelModel) -> None:
        self._model = model
        self._world = model.groups.world
        sharding = weight_sharding(model)
        self.shapes = dict(sharding.shapes)
        boxes = sharding.boxes(self._world.rank)
        check_boxes(weight_tensors(model), boxes)
        self._own_boxes = boxes
        self._owners = _owners([sharding.boxes(rank) for rank in range(self._world.size)])
        self._dtypes = gather_dtypes(weight_tensors(model), World(self._world.rank, self._world.size))
        self._local: dict[str, Tensor] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the current weights from now on. Call it between two training steps."""
        # A gathered parameter is not a shard.
        reshard_parameters(self._model.stages)
        self._local = {name: values.detach() for name, values in merged_shards(self._model).items()}

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor in training."""
        return self._dtypes[name]

    def clear_cache(self) -> None:
        """Do nothing: this source has no cache."""

    def read(self, name: str, region: tuple[slice, ...]) -> Tensor:
        """Return the values of a region on rank 0, on the CPU. Other ranks get undefined values of its shape.

        Uses one all-to-all where only rank 0 receives, or none if rank 0 holds the region.
        """
        box = Box(tuple(span.start for span in region), tuple(span.stop - span.start for span in region))
        dtype = self._dtypes[name]
        values = torch.empty(box.size, dtype=dtype)
        boxes = [(rank, common) for rank, owned in self._owners[name] if (common := owned.intersect(box)) is not None]
        rank = self._world.rank
        received = None
        if any(owner != 0 for owner, _ in boxes):
            received = self._send_to_first(name, [(owner, overlap) for owner, overlap in boxes if owner != 0])
        if rank != 0:
            return values
        first = 0
        for owner, overlap in boxes:
            target = values[overlap.index_in(box)]
            if owner == 0:
                target.copy_(self._local[name][overlap.index_in(self._own_boxes[name])])
                continue
            assert received is not None
            num_bytes = overlap.numel * dtype.itemsize
            target.copy_(received[first : first + num_bytes].view(dtype).view(overlap.size))
            first += num_bytes
        return values

    def _send_to_first(self, name: str, boxes: list[tuple[int, Box]]) -> Tensor:
        """Send parts of a tensor to rank 0 as bytes, and return the received parts, in the order of the ranks."""
        rank = self._world.rank
        itemsize = self._dtypes[name].itemsize
        own_boxes = [overlap for owner, overlap in boxes if owner == rank]
        send_splits = [0] * self._world.size
        receive_splits = [0] * self._world.size
        buffer = torch.empty(0, dtype=torch.uint8, device=self._model.groups.device)
        for overlap in own_boxes:
            values = self._local[name][overlap.index_in(self._own_boxes[name])].contiguous()
            buffer = values.flatten().view(torch.uint8)
            send_splits[0] = buffer.numel()
        if rank == 0:
            for owner, overlap in boxes:
                receive_splits[owner] = overlap.numel * itemsize
        return all_to_all(buffer, self._world, send_splits, receive_splits).cpu()


def _owners(boxes_of_rank: list[dict[str, Box]]) -> dict[str, list[tuple[int, Box]]]:
    """Return the different boxes of each tensor and the first rank that holds each box, in the order of the ranks."""
    owners: dict[str, dict[Box, int]] = {}
    for rank, boxes in enumerate(boxes_of_rank):
        for name, box in boxes.items():
            owners.setdefault(name, {}).setdefault(box, rank)
    return {name: [(rank, box) for box, rank in rank_of_box.items()] for name, rank_of_box in owners.items()}
