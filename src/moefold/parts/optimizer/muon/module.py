"""Muon (Keller Jordan, 2024; arXiv:2502.16982): orthogonalised momentum of each logical matrix, under any sharding.

W <- W * (1 - lr * weight_decay) - lr * 0.2 * sqrt(max(rows, columns)) * orthogonal(g + momentum * M), with the momentum
M <- momentum * M + g. The factor gives an update the root mean square of AdamW's, about 0.2, so that both share one
learning rate and weight decay (arXiv:2502.16982 sec. 2.2).
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from moefold.config.base.param_spec import ParamSpec
from moefold.model.local_param import local_tensor
from moefold.optim.build import OptimizerRun
from moefold.parts.optimizer.adamw.module import build_adamw
from moefold.parts.optimizer.muon.part import MOMENTUM, Muon
from moefold.parts.optimizer.muon.redistribute import MatrixKey, MatrixRedistributor

NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration (Keller Jordan): steep at 0, with singular values that end in 0.7 to 1.2."""
MIN_NORM = 1e-7
UPDATE_RMS = 0.2
"""Root mean square of AdamW's updates in practice (arXiv:2502.16982 sec. 2.2)."""

SplitMatrices = Callable[[str, Tensor], Sequence[Tensor]]


def logical_matrices(weight: ParamSpec, matrix: Tensor) -> Sequence[Tensor]:
    """Return the logical matrices of a parameter for Muon, as views of its rows.

    Returns:
        Tensors of two or three dims. The rows of the matrix are all dims except the last.
    """
    rows = weight.matrix_rows
    return matrix.unflatten(0, (-1, sum(rows))).split(rows, 1) if rows else (matrix,)


def newton_schulz(matrix: Tensor, num_steps: int) -> Tensor:
    """Orthogonalise a matrix approximately by Newton-Schulz iteration: its singular values end near 1.

    Args:
        matrix: 2D.
    """
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.t() if is_tall else matrix
    x = x / (torch.linalg.matrix_norm(x) + MIN_NORM)
    for _ in range(num_steps):
        square = x @ x.t()
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.t() if is_tall else x


class MuonOptimizer(torch.optim.Optimizer):
    """Muon for some matrices and a fallback optimizer for all other parameters, under one learning rate.

    Every rank of the stage has its shard of the momentum, sharded like the parameter. Each full matrix is gathered on
    one rank (`MatrixRedistributor`), so the update equals the update of the unsharded parameter and is computed once.

    Args:
        matrices: the parameters of Muon by name, 2D, or 3D with one matrix per index of the first dim.
        part: momentum, steps and weight decay.
        split: returns the logical matrices of a full matrix, as views.
        run: the stage (constructor and step are collective over it), learning rate and store of the momenta.
    """

    def __init__(
        self,
        matrices: Mapping[str, nn.Parameter],
        fallback: torch.optim.Optimizer,
        part: Muon,
        split: SplitMatrices,
        run: OptimizerRun,
    ) -> None:
        muon_group = {"params": list(matrices.values()), "weight_decay": part.weight_decay, "lr": run.lr}
        # The param groups of the fallback optimizer are shared, so setting a learning rate here also sets it there.
        super().__init__([muon_group, *fallback.param_groups], {})
        self._matrices = dict(matrices)
        self._fallback = fallback
        self._part = part
        self._split = split
        assert run.stage is not None
        self._redistribution = MatrixRedistributor(run.stage, self._matrices)
        self.state_store = run.store
        self.state.update(fallback.state)
        for parameter in matrices.values():
            dtype = torch.bfloat16 if part.has_bf16_moments else parameter.dtype
            self.state[parameter] = {MOMENTUM: run.store.zeros(parameter, dtype)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters. Every Muon parameter must have a gradient. It is collective over the stage."""
        assert closure is None
        self._fallback.step()
        group = self.param_groups[0]
        weights = {name: local_tensor(p) for name, p in self._matrices.items()}
        gradients = {}
        prefetched = self.state_store.prefetch([[self.state[p][MOMENTUM]] for p in self._matrices.values()])
        decay = self._part.momentum
        for (name, parameter), (momentum,) in zip(self._matrices.items(), prefetched, strict=True):
            assert parameter.grad is not None, name
            gradient = gradients[name] = local_tensor(parameter.grad)
            weights[name].mul_(1 - group["lr"] * group["weight_decay"])
            momentum.copy_(momentum.to(gradient.dtype).mul_(decay).add_(gradient))
            # Nesterov: overwrite the gradient in place.
            gradient.add_(momentum, alpha=decay)

        def nesterov_part(key: MatrixKey, index: int) -> Tensor:
            return _select_matrix(gradients[key.name], index)

        def apply(key: MatrixKey, index: int, update: Tensor) -> None:
            _select_matrix(weights[key.name], index).sub_(update, alpha=group["lr"])

        self._redistribution.run(nesterov_part, self._compute_update, apply)

    def _compute_update(self, key: MatrixKey, full_matrix: Tensor) -> Tensor:
        """Compute the update of a full parameter at learning rate 1, in place."""
        for part in self._split(key.name, full_matrix):
            rows = part.flatten(0, -2)
            factor = UPDATE_RMS * max(rows.shape) ** 0.5
            part.copy_(newton_schulz(rows, self._part.ns_steps).mul_(factor).view(part.shape))
        return full_matrix


def build_muon(part: Muon, parameters: Mapping[str, nn.Parameter], run: OptimizerRun) -> MuonOptimizer:
    """Build Muon, with AdamW for all other parameters. It is collective over the stage.

    Args:
        run: learning rate, ranks and store.
    """
    matrices = {name: p for name, p in parameters.items() if part.gathers(run.weights[name])}
    fallback = build_adamw(part, {name: p for name, p in parameters.items() if name not in matrices}, run)

    def split(name: str, matrix: Tensor) -> Sequence[Tensor]:
        return logical_matrices(run.weights[name], matrix)

    return MuonOptimizer(matrices, fallback, part, split, run)


def _select_matrix(tensor: Tensor, index: int) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor[index]
