"""All-reduce of the metrics of a step: named tensors in one flat tensor."""

import torch
from torch import Tensor

from moefold.comm.collectives import all_reduce_sum
from moefold.comm.groups import Group


class MetricPacker:
    """Named tensors that one all-reduce sums over the ranks, in float64."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Add this rank's summand; the same names and shapes on every rank."""
        self._tensors[name] = tensor

    def all_reduce(self, group: Group) -> Tensor:
        """Sum all tensors over the members; the sums in one flat tensor, which `unpack` splits. Collective."""
        return all_reduce_sum(torch.cat([tensor.flatten().double() for tensor in self._tensors.values()]), group)

    def unpack(self, sums: Tensor) -> dict[str, Tensor]:
        """Split the flat tensor, or a copy of it on the host, by name and shape."""
        parts = sums.split([tensor.numel() for tensor in self._tensors.values()])
        return {
            name: part.view(tensor.shape) for (name, tensor), part in zip(self._tensors.items(), parts, strict=True)
        }
