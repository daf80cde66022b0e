"""States of any optimizer by name: they are saved, reset, and set after a resume.

A state is a tensor in `optimizer.state[parameter]`, of the shape and the sharding of the parameter, or the step count.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from moefold.comm.private_torch import zeros_like_shard
from moefold.config.base.param_spec import ParamSpec
from moefold.model.local_param import local_tensor

STEP = "step"
"""State key of the number of updates since the moments were zero."""


def is_moment(optimizer: torch.optim.Optimizer, name: str) -> bool:
    """Return whether a state is a moment: a store may offload it, and a reset zeroes it.

    Other states are the step count, and states that the part of the optimizer lists as `StateSpec.is_kept`, whose names
    are in `optimizer.kept_states`.
    """
    return name != STEP and name not in getattr(optimizer, "kept_states", ())


def named_moments(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the state tensors by name, `<parameter>.<state>`, without step counts."""
    return {
        f"{name}.{moment}": value
        for name, parameter in parameters.items()
        for moment, value in optimizer.state[parameter].items()
        if moment != STEP
    }


@torch.no_grad()
def reset_moments(optimizer: torch.optim.Optimizer) -> None:
    """Zero the moments of every parameter, and the step count of the bias correction, without communication.

    The next step is as in a new optimizer. Offloaded moments are zeroed where they are stored.
    """
    state_store = getattr(optimizer, "state_store", StateStore())
    for state in optimizer.state.values():
        for name, value in state.items():
            if name == STEP:
                value.zero_()
            elif is_moment(optimizer, name):
                state_store.zero(value)


def step_counts(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, float]:
    """Return the step counts of the moments by name of the parameter, for parameters with a step count."""
    states = {name: optimizer.state[parameter] for name, parameter in parameters.items() if parameter.requires_grad}
    return {name: float(state[STEP]) for name, state in states.items() if STEP in state}


def set_step_count(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Set the step count of the moments, for the bias correction after a resume."""
    for state in optimizer.state.values():
        if STEP in state:
            state[STEP].fill_(step)


class StateStore:
    """Store of optimizer moments, and the access of a step to them. This base class keeps them on the device."""

    def zeros(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Allocate a moment of a parameter, sharded like the parameter."""
        return zeros_like_shard(like, dtype)

    def is_offloaded(self, moment: Tensor) -> bool:
        """Return whether a moment is off the device between steps."""
        return False

    def zero(self, moment: Tensor) -> None:
        """Zero a moment in place, between two steps."""
        local_tensor(moment).zero_()

    def prefetch(self, moments: Sequence[Sequence[Tensor]]) -> Iterator[list[Tensor]]:
        """Yield the moments of one parameter after the other as local tensors on the device, to be changed in place.

        The changes are written back by the end of the iteration.
        """
        for moments_of_param in moments:
            yield [local_tensor(moment) for moment in moments_of_param]


def group_by_decay(
    parameters: Mapping[str, nn.Parameter], weights: Mapping[str, ParamSpec]
) -> dict[bool, list[nn.Parameter]]:
    """Return the parameters with weight decay (True), and norms, sinks and biases (False), at least one group.

    Args:
        parameters: parameters of this rank, by name.
        weights: every parameter of the model, by name.
    """
    groups: dict[bool, list[nn.Parameter]] = {}
    if not parameters:
        # A pipeline stage may have no parameters in the warm-up of indexers, but torch requires a group.
        groups[False] = []
    for name, parameter in parameters.items():
        groups.setdefault(weights[name].is_matrix, []).append(parameter)
    return groups


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all param groups for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate
