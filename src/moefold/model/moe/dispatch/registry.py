"""Registry of dispatchers: `parallel.dispatcher` by name, and the choice for "auto"."""

from dataclasses import dataclass
from typing import Any

import torch

from moefold.comm.collectives import all_reduce_max
from moefold.comm.groups import MoEGroups, ParallelGroups
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.model.moe.dispatch.allgather import AllGatherDispatcher
from moefold.model.moe.dispatch.alltoall import AllToAllDispatcher
from moefold.model.moe.dispatch.base import Dispatcher
from moefold.model.moe.dispatch.deepep import Buffer, DeepEPDispatcher
from moefold.model.moe.dispatch.least_loaded import LeastLoadedDispatcher, RebalanceRule
from moefold.model.moe.dispatch.local import LocalDispatcher
from moefold.validate.moe import deepep_unsupported_reasons, is_deepep_installed


def make_dispatcher(
    name: str,
    groups: MoEGroups,
    num_experts: int,
    rebalance_rule: RebalanceRule | None = None,
    buffer: Buffer | None = None,
    *,
    fp8_dispatch: bool = False,
) -> Dispatcher[Any]:
    """Create the dispatcher named by `parallel.dispatcher`; with ep = etp = 1 always the local one.

    Args:
        name: as in the recipe, but never "auto".
        groups: of the MoE view.
        num_experts: E, over all ranks; ep divides it.
        rebalance_rule: required by `leastloaded`.
        buffer: required by `deepep`.
        fp8_dispatch: send tokens to the experts in FP8; the local dispatcher rounds them likewise.

    Raises:
        ConfigError: `local` with experts spread over ranks.
    """
    if groups.experts.size == 1:
        return LocalDispatcher(num_experts, fp8_dispatch=fp8_dispatch)
    if name == "allgather":
        return AllGatherDispatcher(groups.experts, groups.expert_coordinates, num_experts, fp8_dispatch=fp8_dispatch)
    if name == "alltoall":
        return AllToAllDispatcher(
            groups.ep, groups.etp, groups.experts, groups.expert_coordinates, num_experts, fp8_dispatch=fp8_dispatch
        )
    if name == "leastloaded":
        assert rebalance_rule is not None, "leastloaded needs a rebalance_rule"
        return LeastLoadedDispatcher(groups, num_experts, rebalance_rule, fp8_dispatch=fp8_dispatch)
    if name == "deepep":
        assert buffer is not None, "deepep needs a buffer"
        return DeepEPDispatcher(buffer, num_experts, fp8_dispatch=fp8_dispatch)
    raise ConfigError(
        f"parallel.dispatcher={name!r} needs all experts on each rank, but parallel.ep={groups.ep.size} and "
        f"parallel.etp={groups.etp.size} spread them; choose 'alltoall' or 'allgather', or ep=1 with etp=1"
    )


HOPPER_CAPABILITY = (9, 0)


@dataclass(frozen=True)
class DispatcherChoice:
    """Dispatcher of a run."""

    name: str
    """Name as in the recipe, never "auto"."""
    message: str = ""
    """Choice of "auto" and its reason; empty if the recipe names the dispatcher."""


def select_dispatcher(cfg: Config, groups: ParallelGroups) -> DispatcherChoice:
    """Resolve `parallel.dispatcher`; collective for "auto", as all ranks must choose the same.

    Raises:
        ConfigError: "deepep" on a device that cannot run it, or without its package.
    """
    name = cfg.parallel.dispatcher
    if name == "auto" and groups.moe.experts.size == 1:
        return DispatcherChoice(
            "local", "parallel.dispatcher='auto' took local: ep = etp = 1, so no token leaves its rank"
        )
    if name not in ("auto", "deepep"):
        return DispatcherChoice(name)
    reason = next(deepep_unsupported_reasons(cfg), "") or _deepep_unsupported_reason(groups.device)
    if name == "deepep":
        if reason:
            raise ConfigError(f"parallel.dispatcher='deepep' cannot run: {reason}; choose 'alltoall'")
        return DispatcherChoice(name)
    num_unable = int(all_reduce_max(torch.tensor([bool(reason)], device=groups.device).long(), groups.world))
    if not num_unable:
        return DispatcherChoice("deepep", "parallel.dispatcher='auto' took deepep")
    return DispatcherChoice(
        "alltoall", f"parallel.dispatcher='auto' took alltoall: {reason or 'another rank cannot run deepep'}"
    )


def _deepep_unsupported_reason(device: torch.device) -> str:
    """Return why this rank cannot run DeepEP; empty if it can."""
    if device.type != "cuda":
        return "deep_ep needs CUDA GPUs, and this run is on the CPU"
    if torch.cuda.get_device_capability(device) < HOPPER_CAPABILITY:
        return f"deep_ep needs a Hopper or newer GPU, and this is a {torch.cuda.get_device_name(device)}"
    return "" if is_deepep_installed() else "the package deep_ep is not installed"
