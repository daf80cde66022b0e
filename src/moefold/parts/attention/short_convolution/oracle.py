"""Gated short convolution (arXiv:2511.23404) in float64."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from moefold.parts.attention.gated_deltanet.oracle import convolve


def output(part: Any, weights: Mapping[str, Tensor], x: Tensor, eps: float) -> Tensor:
    """Return the output for the tokens of one document, [S, H].

    Args:
        eps: not used. This layer has no norm.
    """
    before, after, values = (x @ weights[f"w{letter}"].T for letter in "bcv")
    if not part.bias:
        return (after * convolve(before * values, weights["conv"])) @ weights["wo"].T
    before, after, values = (
        projected + weights[f"b{letter}"] for projected, letter in zip((before, after, values), "bcv", strict=True)
    )
    mixed = convolve(before * values, weights["conv"]) + weights["conv_bias"]
    return (after * mixed) @ weights["wo"].T + weights["bo"]
