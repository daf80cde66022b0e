"""The three products of a linear layer, with operands of few bits: simulated, on every device.

Values are rounded to the format and multiplied in float32 (float64 in float64), which is what the hardware computes but
for the order of its sums. Rounding to nearest everywhere; neither stochastic rounding nor Hadamard transforms.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.kernels.rows import PlainRows, Rows, counts_of
from moefold.precision.recipe import Recipe, rounded


@dataclass(frozen=True)
class SimulatedProducts:
    """Quantise, scale back, multiply."""

    recipe: Recipe

    def forward(self, x_MK: Tensor, w_NK: Tensor) -> Tensor:
        """See `moefold.model.linear.Products`."""
        return self.narrow_product(x_MK, w_NK, self.recipe.weight_rows)

    def input_gradient(self, grad_MN: Tensor, w_NK: Tensor) -> Tensor:
        """See `moefold.model.linear.Products`."""
        return self.narrow_product(grad_MN, w_NK.t(), self.recipe.weight_rows)

    def weight_gradient(self, grad_MN: Tensor, x_MK: Tensor) -> Tensor:
        """See `moefold.model.linear.Products`; the blocks are of 128, 32 or 16 consecutive tokens of this rank."""
        return self.narrow_product(grad_MN.t(), x_MK.t(), 1)

    def narrow_product(self, a_MK: Tensor, b_NK: Tensor, b_rows: int) -> Tensor:
        """A @ b.T, both rounded in blocks along K; those of b have so many rows."""
        y_MN = rounded(a_MK, self.recipe) @ rounded(b_NK, self.recipe, b_rows).t()
        return y_MN.to(a_MK.dtype)


class SimulatedRows(PlainRows):
    """The same for experts over rows sorted by expert: each is a linear layer over its rows.

    Args:
        products: of a linear layer.
    """

    weighs_anywhere = False

    def __init__(self, products: SimulatedProducts) -> None:
        self._products = products

    def product(
        self, rows: Rows, w_EKN: Tensor, offsets_E: Tensor, second: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """See `RowKernels`."""
        counts, weight_rows = counts_of(offsets_E), self._products.recipe.weight_rows
        parts = zip(rows.gathered().split(counts), w_EKN, strict=True)
        y_RN = torch.cat([self._products.narrow_product(x, w.t(), weight_rows) for x, w in parts])
        return y_RN if second is None else y_RN.add_(self.product(Rows(second[0]), second[1], offsets_E))

    def weight_gradient(self, rows: Rows, grad: Rows, offsets_E: Tensor) -> Tensor:
        """See `RowKernels`."""
        counts = counts_of(offsets_E)
        pairs = zip(rows.gathered().split(counts), grad.gathered().split(counts), strict=True)
        return torch.stack([self._products.narrow_product(x.t(), g.t(), 1) for x, g in pairs])
