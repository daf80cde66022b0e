"""Balanced routing for benchmarks: states, or an embedding, that load all experts equally."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moefold.config.model import ModelConfig

STEER_STRENGTH = 8.0
"""Strength of the steered direction over the noise; large enough that the router chooses the intended experts."""


def orthonormal_directions(num_experts: int, hidden_size: int, generator: torch.Generator) -> Tensor:
    """Return E random orthonormal rows, [E, H]; requires E <= H."""
    assert num_experts <= hidden_size
    matrix = torch.randn(hidden_size, num_experts, generator=generator, device=generator.device)
    return torch.linalg.qr(matrix)[0].t().contiguous()


def balanced_choices(count: int, model: ModelConfig, device: torch.device) -> Tensor:
    """Return balanced choices of K experts for `count` tokens, int64 [count, K]; expert counts differ by at most 1.

    The experts of a token are consecutive, so with group-limited routing they stay within few groups.
    """
    index = torch.arange(count * model.experts.top_k, device=device)
    return (index % model.experts.num_experts).view(count, model.experts.top_k)


@torch.no_grad()
def balanced_states(count: int, routers: Sequence[Tensor], model: ModelConfig, generator: torch.Generator) -> Tensor:
    """Return random states [count, H] with balanced routing; sets the routers' weights accordingly."""
    rows_EH = orthonormal_directions(model.experts.num_experts, model.hidden_size, generator)
    for router in routers:
        router.copy_(rows_EH)
    noise = torch.randn(count, model.hidden_size, generator=generator, device=generator.device)
    return _add_expert_directions(noise, rows_EH, model)


@torch.no_grad()
def steer_embedding(embedding: Tensor, routers: Sequence[Tensor], model: ModelConfig) -> None:
    """Steer the embedding so that each token id routes to fixed experts, balanced over random tokens."""
    generator = torch.Generator(embedding.device).manual_seed(0)
    rows_EH = orthonormal_directions(model.experts.num_experts, model.hidden_size, generator)
    for router in routers:
        router.copy_(rows_EH)
    embedding.copy_(_add_expert_directions(embedding / embedding.std(), rows_EH, model))


def _add_expert_directions(noise_NH: Tensor, rows_EH: Tensor, model: ModelConfig) -> Tensor:
    ids_NK = balanced_choices(len(noise_NH), model, noise_NH.device)
    strength_K = torch.linspace(STEER_STRENGTH + 1.0, STEER_STRENGTH, model.experts.top_k, device=noise_NH.device)
    chosen_NE = torch.zeros(len(noise_NH), model.experts.num_experts, device=noise_NH.device)
    chosen_NE.scatter_(1, ids_NK, strength_K.expand_as(ids_NK).contiguous())
    return noise_NH + chosen_NE @ rows_EH
