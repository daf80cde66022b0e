"""The processes that share a piece of work that is not training: who I am, and agreement among all."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class Crew:
    """One process of some; of one, unless a launcher started several and they have joined a process group."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process does what is done once."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """What every process says, in rank order; collective. Values are pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


def joined_crew() -> Crew:
    """The crew of the process group that this process has joined, or a crew of one."""
    return Crew(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Crew()
