"""Colours that a reader can distinguish."""

from itertools import combinations

import numpy as np
import pytest

from benchmarks.colours import PALETTE

SEEN = {
    "normal": np.eye(3),
    # Machado et al. 2009, severity 1, in linear RGB.
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}
LMS = np.array(
    [[0.41222147, 0.53633254, 0.05144599], [0.2119035, 0.68069955, 0.10739696], [0.08830246, 0.28171884, 0.6299787]]
)
OKLAB = np.array(
    [[0.21045426, 0.79361779, -0.00407205], [1.9779985, -2.42859221, 0.45059371], [0.0259040, 0.78277177, -0.80867577]]
)


def oklab(colour: str, seen: np.ndarray) -> np.ndarray:
    """The place of #rrggbb in OKLab, where equal distances look about equal."""
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return OKLAB @ np.cbrt(LMS @ np.clip(seen @ linear, 0, 1))


@pytest.mark.parametrize("seen", SEEN)
def test_no_two_colours_look_the_same(seen):
    for a, b in combinations(PALETTE, 2):
        assert np.linalg.norm(oklab(a, SEEN[seen]) - oklab(b, SEEN[seen])) > 0.07, (a, b)
