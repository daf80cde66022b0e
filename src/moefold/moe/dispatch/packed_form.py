"""Rows in 8 bits on their way to the experts; their gradients travel back in the type that they have."""

from torch import Tensor

from moefold.moe.permute import Permutation, permute_no_grad, unpermute_no_grad
from moefold.parallel.in_flight import WireFormat
from moefold.precision.packed import pack, unpack


def fp8_wire_format(rows: Tensor) -> WireFormat:
    """Each row is sent in 8 bits. Rows that were rounded before are not changed any more, but for the last bit."""
    width, dtype = rows.shape[1], rows.dtype
    return WireFormat(pack, lambda packed: unpack(packed, width, dtype))


def fp8_permuted_wire_format(x_TH: Tensor, permutation: Permutation) -> WireFormat:
    """A copy of each token is sent for each of its experts, in the order of the permutation."""
    return WireFormat(
        lambda x: permute_no_grad(pack(x), permutation),
        fp8_wire_format(x_TH).unpack,
        lambda grad_RH: unpermute_no_grad(grad_RH, permutation),
    )
