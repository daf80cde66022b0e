"""Formula of Muon, one weight and one matrix at a time.

It follows arXiv:2502.16982 sec. 2.2 literally: no transposed or batched matrices.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moefold.config.base.param_spec import ParamSpec

if TYPE_CHECKING:
    from moefold.parts.optimizer.muon.part import Muon


def update(
    part: "Muon",
    others: Callable[..., Tensor],
    spec: ParamSpec,
    weight: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    step: int,
) -> Tensor:
    """Return the scaled, orthogonalised momentum of each matrix plus its decay, or the update of AdamW (`others`)."""
    if not spec.is_matrix or spec.never_as_matrix or spec.part not in part.groups:
        return others(spec, weight, gradient, state, step)
    momentum = state.setdefault("momentum", torch.zeros_like(weight))
    momentum.mul_(part.momentum).add_(gradient)
    nesterov = gradient + part.momentum * momentum
    change = part.weight_decay * weight
    for index in matrix_indices(spec):
        orthogonal = newton_schulz(nesterov[index], part.ns_steps)
        change[index] += 0.2 * max(nesterov[index].shape) ** 0.5 * orthogonal
    return change


def matrix_indices(spec: ParamSpec) -> Iterator[int | Tensor]:
    """Yield the index of each logical matrix in a weight: the number of an expert, or rows."""
    if spec.part == "experts":
        yield from range(spec.shape[0])
        return
    rows = torch.arange(spec.shape[0])
    start = 0
    period = sum(spec.matrix_rows) or spec.shape[0]
    for height in spec.matrix_rows or (period,):
        yield rows[(rows % period >= start) & (rows % period < start + height)]
        start += height


def newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    """Iterate Newton-Schulz, X -> 3.4445 X - 4.775 (X X^T) X + 2.0315 (X X^T)^2 X, to orthogonalise a matrix."""
    x = matrix / (matrix.square().sum().sqrt() + 1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
    return x
