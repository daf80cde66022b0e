"""Exponential means of curves by step, over every recorded point. numpy only."""

import math

import numpy as np

from moefold.metrics.expert_balance import Array

WEIGHTS = ("0.6", "0.9", "0.97", "0.99", "0.999")
"""Weights of the previous step that a page may ask for."""
_NEGLIGIBLE = 1e-17


def reach(weight: float) -> int:
    """Return the steps after which the weight of a point no longer shows in float64."""
    return math.ceil(math.log(_NEGLIGIBLE) / math.log(weight))


def exponential_mean(steps: Array, values: Array, weight: float) -> Array:
    """Return the mean of all points up to each one, weighted by `weight ** (step - step of the point)`.

    This is the exponential moving average without bias at the start, in steps: points that are far apart weigh less on
    each other. A value that is not finite counts nowhere, and its mean is NaN.

    Args:
        steps: ascending, [N].
        values: float64 [..., N], NaN where a value is not finite.
        weight: of the previous step, in (0, 1).
    """
    known = np.isfinite(values)
    sums = np.where(known, values, 0.0)
    # Curves without gaps have the same sum of weights.
    totals = np.ones(len(steps)) if known.all() else known.astype(np.float64)
    # After the pass of a distance, each sum covers twice as many points: log2(reach) passes over whole arrays.
    distance = 1
    while distance < min(len(steps), reach(weight)):
        decay = np.exp(math.log(weight) * (steps[distance:] - steps[:-distance]))
        sums[..., distance:] += decay * sums[..., :-distance]
        totals[..., distance:] += decay * totals[..., :-distance]
        distance *= 2
    means: Array = np.where(known, sums, np.nan) / np.where(known, totals, 1.0)
    return means
