"""Auto: DeepEP where it can run, otherwise the all-to-all.

The log names the choice.
"""

from dataclasses import dataclass
from typing import ClassVar

from moefold.config.groups.dispatcher import DispatcherPart


@dataclass(frozen=True, kw_only=True)
class AutoDispatcherPart(DispatcherPart):
    """Take deepep where all ranks can run it, else alltoall. It is chosen when a run starts, and named in the log."""

    keeps_sum_order: ClassVar[bool] = True
    has_shared_buffers: ClassVar[bool] = True
    resolves_to: ClassVar[tuple[str, str] | None] = ("deepep", "alltoall")
