"""Oracle of SPSA: perturbations of whole weights from a counter-based generator in NumPy, and the rounded gradient.

Philox4x32-10 as its authors define it (SC 2011), with MeZO's update (arXiv:2305.17333, algorithm 1).
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from moefold.config.schema import Config
from moefold.model.init import seed_for
from moefold.verify.oracle_schedule import oracle_rate


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
    words = [
        [word for block in range(math.ceil(num_columns / 4)) for word in philox_block((block, row, step, 0), key)]
        for row in range(num_rows)
    ]
    pairs = np.array(words, dtype=np.float64).reshape(num_rows, -1, 2)
    radius = np.sqrt(-2 * np.log((pairs[..., 0] + 0.5) / 2**32))
    angle = 2 * np.pi * pairs[..., 1] / 2**32
    numbers = np.stack([radius * np.cos(angle), radius * np.sin(angle)], -1).reshape(num_rows, -1)
    return torch.from_numpy(numbers[:, :num_columns].astype(np.float32)).double()


def perturbation(cfg: Config, step: int, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return z of each trained weight; each expert has its own."""
    return {name: _draw(cfg, step, name, tuple(w.shape)) for name, w in weights.items() if w.requires_grad}


def _draw(cfg: Config, step: int, name: str, shape: tuple[int, ...]) -> Tensor:
    if ".experts." in name:
        return torch.stack([_draw_tensor(cfg, step, f"{name}.{i}", shape[1:]) for i in range(shape[0])])
    return _draw_tensor(cfg, step, name, shape)


def _draw_tensor(cfg: Config, step: int, name: str, shape: tuple[int, ...]) -> Tensor:
    key = seed_for(cfg.run.seed, f"spsa {name}")
    return normal_matrix(key, step, math.prod(shape[:-1]), shape[-1]).view(shape)


@torch.no_grad()
def move(weights: Mapping[str, Tensor], z: Mapping[str, Tensor], factor: float) -> None:
    """Add factor * z to the weights in place."""
    for name, direction in z.items():
        weights[name].add_(factor * direction)


def round_gradient(cfg: Config, step: int, gradient: float) -> float:
    """Round a projected gradient to one of 255 values, to the next lower or higher one at random."""
    distance = cfg.train.spsa_max_gradient / 127
    word = philox_block((0, 0, step, 0), seed_for(cfg.run.seed, "spsa code"))[0]
    code = math.floor(gradient / distance + (word + 0.5) / 2**32)
    return min(max(code, -127), 127) * distance


@torch.no_grad()
def update(cfg: Config, step: int, weights: Mapping[str, Tensor], z: Mapping[str, Tensor], gradient: float) -> None:
    """Decay the matrices, and move all trained weights against the gradient along z."""
    rate = oracle_rate(cfg.train, cfg.run.steps, step)
    for name, direction in z.items():
        is_matrix = direction.dim() > 1 and ".experts.b_" not in name
        weights[name].mul_(1 - rate * cfg.train.weight_decay * is_matrix).sub_(rate * gradient * direction)
