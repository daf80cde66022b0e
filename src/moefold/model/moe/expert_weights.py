"""Weights of a set of experts, as the expert GEMMs read them."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ExpertWeights:
    """Local weights of a set of experts in the compute dtype; either all biases are present or none.

    The matrices may be master weights of higher precision, where the expert implementation casts them itself.
    """

    gate_EHF: Tensor
    up_EHF: Tensor
    down_EFH: Tensor
    gate_bias_EF: Tensor | None = None
    up_bias_EF: Tensor | None = None
    down_bias_EH: Tensor | None = None
    """Bias of the columns `bias_slice` of the output, which this rank adds."""
