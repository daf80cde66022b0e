"""Auto: DeepEP where it can run, otherwise the all-to-all.

The log names the choice.
"""

from dataclasses import dataclass
from typing import ClassVar

from moefold.config.groups.dispatcher import DispatcherPart


@dataclass(frozen=True, kw_only=True)
class AutoDispatcherPart(DispatcherPart):
    """Take the kernels of DeepEP where all ranks can run them; resolved when a run starts, and never built."""

    keeps_sum_order: ClassVar[bool] = True
    has_shared_buffers: ClassVar[bool] = True
    resolves_to: ClassVar[tuple[str, str] | None] = ("deepep", "alltoall")
