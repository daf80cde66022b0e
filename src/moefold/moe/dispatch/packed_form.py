"""Rows in 8 bits on their way to the experts; their gradients travel back in the type that they have."""

from torch import Tensor

from moefold.moe.permute import Permutation, add_copies, copy_rows
from moefold.parallel.in_flight import Form
from moefold.precision.packed import pack, unpack


def packed_rows(rows: Tensor) -> Form:
    """Each row is sent in 8 bits. Rows that were rounded before are not changed any more, but for the last bit."""
    width, dtype = rows.shape[1], rows.dtype
    return Form(pack, lambda packed: unpack(packed, width, dtype))


def packed_copies(x_TH: Tensor, permutation: Permutation) -> Form:
    """A copy of each token is sent for each of its experts, in the order of the permutation."""
    return Form(
        lambda x: copy_rows(pack(x), permutation),
        packed_rows(x_TH).unpack,
        lambda grad_RH: add_copies(grad_RH, permutation),
    )
