"""The outer optimizer of a model: the averaged tensors, the weight of each shard in the norms, and checkpoints."""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from moefold.checkpoint.checkpoint_meta import CheckpointMeta
from moefold.checkpoint.load import load_entries
from moefold.config.model import ModelConfig
from moefold.config.sections.lora import LoraConfig
from moefold.config.sections.sites import SitesConfig
from moefold.cost.adapter_spec import expert_names
from moefold.errors import ConfigError
from moefold.model.local_param import local_tensor
from moefold.optim.outer import OuterOptimizer
from moefold.optim.outer_weights import EXPERT_OWNER, EXPERT_OWNERS, FragmentsDue
from moefold.optim.states import StateStore, named_moments
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
        state_store: store of the outer states. None means on the device.
    """
    parameters = model.trained_parameters
    averaged = dict(model.named_buffers)
    if sites.moments == "average":
        averaged |= {name: local_tensor(moment) for name, moment in named_moments(optimizer, parameters).items()}
    replicas = {
        name: 0 if name in model.duplicate_params else num_replicas(parameter.data)
        for name, parameter in parameters.items()
    }
    return (sites.part.outer() or OuterOptimizer)(
        parameters,
        averaged,
        sites,
        state_store or StateStore(),
        num_fragments=recipe_fragments(sizes, sites),
        replicas=replicas,
        experts=expert_names(sizes, lora),
    )


class OuterState:
    """State of an outer optimizer in checkpoints, for the registry of a run.

    Args:
        due: returns the fragments of the round after a step.
    """

    def __init__(self, outer: OuterOptimizer, due: FragmentsDue) -> None:
        self._outer = outer
        self._due = due
        self._loaded: dict[str, int] = {}

    def state_dict(self) -> dict[str, int]:
        """Return the counts of its rounds."""
        return self._outer.state()

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Take the counts, for `load_tensors`."""
        self._loaded = state_dict

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's shards of its entries of a checkpoint."""
        return self._outer.checkpoint_entries()

    def load_tensors(self, path: Path | None) -> None:
        """Restore the outer optimizer from a checkpoint, or start it from the loaded weights. It is collective."""
        if path is not None and self._loaded:
            self._outer.restore(self._loaded, partial(load_entries, path), self._due)
        else:
            self._outer.start()


def check_expert_owner(meta: CheckpointMeta, sites: SitesConfig) -> None:
    """Check that a checkpoint has the moments of the experts that the site trains.

    Raises:
        ConfigError: the moments are of other experts.
    """
    outer = meta.state_of("sites")
    stored = outer.get(EXPERT_OWNERS, 1), outer.get(EXPERT_OWNER, 0)
    owner = sites.num_expert_owners, max(sites.number, 0) if sites.owns_experts else 0
    if stored == owner:
        return
    theirs, ours = (
        f"the experts of site {number} of {count}" if count > 1 else "all experts" for count, number in (stored, owner)
    )
    raise ConfigError(
        f"sites.method={sites.part.kind!r}: the checkpoint of step {meta.step} has the optimizer moments of {theirs}, "
        f"and this site trains {ours}; resume with the same sites.method, sites.count and sites.number, or begin a "
        "new run from its weights with checkpoint.init_from"
    )
