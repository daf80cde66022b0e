"""Memory that the planner leaves free on each device, beyond what its formulas count. Torch-free."""

from moefold.plan.device import Device

RESERVE_FRACTION = 0.05
"""Share of the device's memory that a planned mapping leaves free: for fragmentation of the allocator and for what the
formulas have too little. The constants of `plan.memory` (context, NCCL, libraries) are counted separately."""


def default_reserve_gib(device: Device) -> float:
    """Return the memory that `moefold plan` and `parallel = "auto"` leave free on a device by default."""
    return RESERVE_FRACTION * device.memory_gib
