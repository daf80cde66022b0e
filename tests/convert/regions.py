"""Regions of tensors."""

from moefold.convert.families.tensor_mapping import Region, Shape


def full_region(shape: Shape) -> Region:
    """Return the region of a whole tensor."""
    return tuple(slice(0, size) for size in shape)
