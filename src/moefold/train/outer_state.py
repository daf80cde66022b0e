"""The outer optimizer of a model: what it averages, and how often each shard counts in its norms."""

import torch
from torch import nn

from moefold.config.lora import LoraConfig
from moefold.config.model import ModelConfig
from moefold.config.sites import SitesConfig
from moefold.cost.adapter_spec import expert_names
from moefold.model.local_param import local_tensor
from moefold.optim.outer import OuterOptimizer
from moefold.optim.state_offload import StateStore
from moefold.optim.states import named_moments
from moefold.parallel.gradients import num_replicas
from moefold.parallel.parallel_model import ParallelModel
from moefold.topology.fragments import recipe_fragments


def make_outer_optimizer(
    model: ParallelModel,
    sizes: ModelConfig,
    lora: LoraConfig,
    sites: SitesConfig,
    optimizer: torch.optim.Optimizer,
    state_store: StateStore | None,
) -> OuterOptimizer:
    """Return the outer optimizer of a run with sites over this rank's shards.

    Args:
        model: the model.
        optimizer: the inner optimizer, whose moments the sites may average.
        state_store: store of the outer states; None: on the device.
    """
    parameters = trained_parameters(model)
    averaged = dict(model.named_buffers)
    if sites.moments == "average":
        averaged |= {name: local_tensor(moment) for name, moment in named_moments(optimizer, parameters).items()}
    replicas = {
        name: 0 if name in model.duplicate_params else num_replicas(parameter.data)
        for name, parameter in parameters.items()
    }
    return OuterOptimizer(
        parameters,
        averaged,
        sites,
        state_store or StateStore(),
        num_fragments=recipe_fragments(sizes, sites),
        replicas=replicas,
        experts=expert_names(sizes, lora),
    )


def trained_parameters(model: ParallelModel) -> dict[str, nn.Parameter]:
    """Return the parameters of this rank that learn, by their names in the full model."""
    return {name: parameter for name, parameter in model.named_parameters.items() if parameter.requires_grad}
