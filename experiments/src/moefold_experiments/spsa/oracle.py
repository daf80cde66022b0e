"""Formula of SPSA: perturbations of whole weights from a counter-based generator, and the rounded gradient.

Philox4x32-10 as its authors define it (SC 2011), with MeZO's update (arXiv:2305.17333, algorithm 1).
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moefold.config.groups.optimizer import ForwardOnlyStep

if TYPE_CHECKING:
    from moefold_experiments.spsa.part import Spsa


def philox_block(counter: tuple[int, int, int, int], key: int) -> list[int]:
    """Return the four words of one counter, in Python's integers."""
    x = list(counter)
    k = [key % 2**32, key >> 32]
    for _ in range(10):
        a = 0xD2511F53 * x[0]
        b = 0xCD9E8D57 * x[2]
        x = [b // 2**32 ^ x[1] ^ k[0], b % 2**32, a // 2**32 ^ x[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return x


def normal_matrix(key: int, step: int, num_rows: int, num_columns: int) -> Tensor:
    """Return the normal numbers of a matrix, float64 with the values of float32."""
    numbers = []
    for row in range(num_rows):
        words = [
            word for block in range(math.ceil(num_columns / 4)) for word in philox_block((block, row, step, 0), key)
        ]
        polar = [
            (math.sqrt(-2 * math.log((first + 0.5) / 2**32)), 2 * math.pi * second / 2**32)
            for first, second in zip(words[::2], words[1::2], strict=True)
        ]
        numbers.append([x for radius, angle in polar for x in (radius * math.cos(angle), radius * math.sin(angle))])
    return torch.tensor(numbers, dtype=torch.float32)[:, :num_columns].double()


def run_step(part: "Spsa", step: ForwardOnlyStep) -> float:
    """Run algorithm 1 of MeZO: both losses, the rounded projection, the decay of matrices and the update.

    Returns:
        Magnitude of the projected gradient.
    """
    z = perturbation(step)
    losses = []
    for sign in (1, -1):
        _move(step.weights, z, sign * part.eps)
        losses.append(step.loss())
        _move(step.weights, z, -sign * part.eps)
    projection = (losses[0] - losses[1]) / (2 * part.eps)
    gradient = _round_gradient(part, step, projection)
    for name, weight in step.weights.items():
        decay = part.weight_decay if step.specs[name].is_matrix else 0.0
        weight.mul_(1 - step.rate * decay).sub_(step.rate * gradient * z[name])
    return abs(projection)


def perturbation(step: ForwardOnlyStep) -> dict[str, Tensor]:
    """Return z of each weight."""
    return {name: _draw(step, name) for name in step.weights}


def _draw(step: ForwardOnlyStep, name: str) -> Tensor:
    """Return z of a weight; each expert has its own."""
    shape = tuple(step.weights[name].shape)
    if step.specs[name].part == "experts":
        return torch.stack([_draw_tensor(step, f"{name}.{i}", shape[1:]) for i in range(shape[0])])
    return _draw_tensor(step, name, shape)


def _draw_tensor(step: ForwardOnlyStep, name: str, shape: tuple[int, ...]) -> Tensor:
    key = step.seed_of(f"spsa {name}")
    return normal_matrix(key, step.number, math.prod(shape[:-1]), shape[-1]).view(shape)


def _move(weights: Mapping[str, Tensor], z: Mapping[str, Tensor], factor: float) -> None:
    """Add factor * z to the weights in place."""
    for name, direction in z.items():
        weights[name].add_(factor * direction)


def _round_gradient(part: "Spsa", step: ForwardOnlyStep, gradient: float) -> float:
    """Round a projected gradient to one of 255 values, to the next lower or higher one at random."""
    distance = part.max_gradient / 127
    word = philox_block((0, 0, step.number, 0), step.seed_of("spsa code"))[0]
    code = math.floor(gradient / distance + (word + 0.5) / 2**32)
    return min(max(code, -127), 127) * distance
