"""Local: all experts are on each rank, and no token leaves it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NoReturn

from moefold.config.groups.dispatcher import DispatcherPart, DispatchSizes
from moefold.errors import ConfigError

if TYPE_CHECKING:
    from moefold.comm.groups import MoEGroups


@dataclass(frozen=True, kw_only=True)
class LocalDispatcherPart(DispatcherPart):
    """Permute the tokens by expert, with ep = etp = 1. Other kinds that allow these degrees do the same."""

    spreads_experts: ClassVar[bool] = False
    for_inference: ClassVar[bool] = True

    def build(self, groups: "MoEGroups", sizes: DispatchSizes) -> NoReturn:
        """Refuse experts that are spread over ranks.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"parallel.dispatcher={self.kind!r} needs all experts on each rank, but parallel.ep={groups.ep.size} and "
            f"parallel.etp={groups.etp.size} spread them; choose 'alltoall' or 'allgather', or ep=1 with etp=1"
        )
