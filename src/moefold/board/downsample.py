"""Downsampling of curves by the minimum and maximum of each range, which keeps every spike. numpy only."""

import numpy as np

from moefold.metrics.expert_balance import Array

POINTS_OF_RANGE = 3
"""A range gives its minimum, its maximum, and its first value that is not finite."""


def downsample(values: Array, max_points: int) -> Array:
    """Return the indices of at most about `max_points` values, ascending; the first and the last are among them.

    The values are split into ranges of equal length, and each range keeps its smallest, its largest and its first
    non-finite value.

    Args:
        values: float64 [N], NaN where a value is not finite.
        max_points: at least 3.
    """
    count = len(values)
    if count <= max_points:
        return np.arange(count)
    length = -(-count // max(1, max_points // POINTS_OF_RANGE))
    num_ranges = -(-count // length)
    padded = np.full(num_ranges * length, np.nan)
    padded[:count] = values
    table = padded.reshape(num_ranges, length)
    unknown = np.isnan(table)
    starts = np.arange(num_ranges) * length
    picked = np.concatenate(
        [
            starts + np.where(unknown, np.inf, table).argmin(1),
            starts + np.where(unknown, -np.inf, table).argmax(1),
            (starts + unknown.argmax(1))[unknown.any(1)],
            [0, count - 1],
        ]
    )
    return np.unique(picked[picked < count])
