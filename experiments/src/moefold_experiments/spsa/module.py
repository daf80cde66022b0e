"""SPSA with a gradient of one byte: weights learn from the losses of two forward passes, without a backward pass.

MeZO (arXiv:2305.17333): with normal numbers z of a step, the passes run with weights + eps z and weights - eps z, and
(l+ - l-) / (2 eps) is the gradient projected on z. As in Just One Byte (arXiv:2306.10015) it is rounded to a byte, and
z is drawn again for each use, by name and step: no second copy of the weights is in memory.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from moefold.config.groups.optimizer import ProjectedGradient
from moefold.model.local_param import local_tensor
from moefold.model.weight_init import logical_parts, seed_for
from moefold.optim.build import OptimizerRun
from moefold.optim.states import group_by_decay
from moefold_experiments.spsa.counter_normal import normal_rows, uniform
from moefold_experiments.spsa.part import Spsa

MAX_CODE = 127
"""Largest magnitude of a code, which is an int8."""
SIGNS = (1, -1)
"""Sign of eps z in each pass."""
CHUNK_NUMBERS = 1 << 16
"""Normal numbers that are in memory at a time, unless one row has more."""


def encode_gradient(gradient: float, largest: float, seed: int, step: int) -> int:
    """Return the int8 code of a finite projected gradient.

    Codes are equidistant: 127 stands for `largest`, and what is larger is clamped. Between two codes one is drawn so
    that the mean is the gradient: one that is small against the distance is not lost.

    Args:
        gradient: projected gradient.
        largest: largest magnitude, train.optimizer.max_gradient.
        seed: seed of the run.
        step: number of the step.
    """
    code = math.floor(gradient * (MAX_CODE / largest) + uniform(seed_for(seed, "spsa code"), step))
    return max(-MAX_CODE, min(MAX_CODE, code))


def decode_gradient(code: int, largest: float) -> float:
    """Return the projected gradient of a code; for the arguments see `encode_gradient`."""
    return code * (largest / MAX_CODE)


class SPSA(torch.optim.Optimizer):
    """Optimizer without state and gradients; all methods are local.

    `perturb` and `step` or `restore` draw the same z again. A weight is back at its value up to the rounding of its
    type.

    Args:
        part: the settings.
        parameters: parameters of this rank, by their names in the full model.
        run: learning rate and seed.
    """

    num_passes = len(SIGNS)
    projected_gradient = 0.0
    """Gradient along the perturbation, which the next call of `step` applies."""

    def __init__(self, part: Spsa, parameters: Mapping[str, nn.Parameter], run: OptimizerRun) -> None:
        groups = group_by_decay(parameters, run.weights)
        super().__init__(
            [{"params": p, "weight_decay": part.weight_decay if d else 0.0} for d, p in groups.items()], {"lr": run.lr}
        )
        self._seed = run.seed
        self._part = part
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._step_number = 0
        self._offset = 0.0

    def perturb(self, step_number: int, number: int) -> None:
        """Set the weights to their values plus eps * z of a step in pass 0, and minus eps * z in pass 1."""
        assert self._offset == 0 or step_number == self._step_number, "the weights still have the z of another step"
        self._step_number = step_number
        offset = SIGNS[number] * self._part.eps
        self._shift(offset - self._offset)
        self._offset = offset

    def project(self, losses: Sequence[float], step_number: int) -> ProjectedGradient:
        """Return (l+ - l-) / (2 eps), and the value of its byte; 0 where it is not finite."""
        plus, minus = losses
        value = (plus - minus) / (2 * self._part.eps)
        largest = self._part.max_gradient
        code = encode_gradient(value, largest, self._seed, step_number) if math.isfinite(value) else 0
        return ProjectedGradient(value, decode_gradient(code, largest))

    def restore(self) -> None:
        """Set the weights back to their values, without an update."""
        self._shift(-self._offset)
        self._offset = 0.0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Set the weights back to their values and update them by the projected gradient times z, and by the decay."""
        assert closure is None
        for group in self.param_groups:
            rate = group["lr"]
            for parameter in group["params"]:
                for weight, z in self._draw(parameter):
                    weight.sub_(z * self._offset)
                    weight.mul_(1 - rate * group["weight_decay"])
                    weight.sub_(z.mul_(rate * self.projected_gradient))
        self._offset = 0.0

    @torch.no_grad()
    def _shift(self, factor: float) -> None:
        """Add factor * z to all weights."""
        for parameter in self._names:
            for weight, z in self._draw(parameter):
                # Not by `add_(z, alpha=factor)`: whether that rounds the product depends on the place in a tensor.
                weight.add_(z.mul_(factor))

    def _draw(self, parameter: nn.Parameter) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parts of the local shard of a parameter with their z, chunk by chunk.

        z belongs to the logical tensor, and to each single expert: it is the same under every mapping.
        """
        parts = logical_parts(self._names[parameter], parameter)
        weights = local_tensor(parameter)
        if weights.numel() == 0:
            return
        _, shape, index, _ = parts[0]
        rows = _row_indices(shape[:-1], index[:-1], weights.device)
        keys = torch.tensor([seed_for(self._seed, f"spsa {name}") for name, _, _, _ in parts], device=weights.device)
        weights = weights.view(len(parts) * len(rows), -1)
        size = max(1, CHUNK_NUMBERS // weights.shape[1])
        chunks = (
            weights.split(size),
            keys.repeat_interleave(len(rows)).split(size),
            rows.repeat(len(parts)).split(size),
        )
        for weight, key, row in zip(*chunks, strict=True):
            yield weight, normal_rows(key, self._step_number, row, index[-1]).to(weight.dtype)


def _row_indices(shape: tuple[int, ...], index: tuple[slice, ...], device: torch.device) -> Tensor:
    """Return the flat indices of a box of rows in all rows of a tensor, int64 [rows of the box]."""
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for size, span in zip(shape, index, strict=True):
        rows = (rows[:, None] * size + torch.arange(span.start, span.stop, device=device)).flatten()
    return rows
