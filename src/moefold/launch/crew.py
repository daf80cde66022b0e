"""The processes that share a piece of work that is not training: who I am, and agreement among all."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class World:
    """One process of some; of one, unless a launcher started several and they have joined a process group."""

    rank: int = 0
    size: int = 1

    @property
    def is_rank0(self) -> bool:
        """Whether this process does what is done once."""
        return self.rank == 0

    def all_gather_object(self, value: Any) -> list[Any]:
        """What every process says, in rank order; collective. Values are pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


def current_world() -> World:
    """The crew of the process group that this process has joined, or a crew of one."""
    return World(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else World()
