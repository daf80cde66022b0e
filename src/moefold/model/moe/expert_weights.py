"""The weights of some experts, as their maths reads them."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ExpertWeights:
    """The local weights of some experts, in the compute type; the biases are all there or all absent.

    The matrices may be wider master weights, where the maths rounds them itself.
    """

    gate_EHF: Tensor
    up_EHF: Tensor
    down_EFH: Tensor
    gate_bias_EF: Tensor | None = None
    up_bias_EF: Tensor | None = None
    down_bias_EH: Tensor | None = None
    """Of the columns `bias_columns` of the result, which this rank adds."""
