"""The dispatcher by its name in the recipe.

Which dispatcher `parallel.dispatcher = "auto"` stands for.
"""

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
    """Make the dispatcher `parallel.dispatcher` names. On ep = etp = 1 all are the local one: there is nowhere to go.

    Args:
        name: as in the recipe, "auto" settled.
        groups: of the MoE view.
        num_experts: E, over all ranks; ep divides it.
        rebalance_rule: of `leastloaded`, which needs it.
        buffer: of `deepep`, which needs it.
        fp8_dispatch: whether rows travel to the experts in 8 bits. They are rounded where nothing travels, too.

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
        assert rebalance_rule is not None, "leastloaded needs to know when copies move"
        return LeastLoadedDispatcher(groups, num_experts, rebalance_rule, fp8_dispatch=fp8_dispatch)
    if name == "deepep":
        assert buffer is not None, "deepep needs its buffers"
        return DeepEPDispatcher(buffer, num_experts, fp8_dispatch=fp8_dispatch)
    raise ConfigError(
        f"parallel.dispatcher={name!r} needs all experts on each rank, but parallel.ep={groups.ep.size} and "
        f"parallel.etp={groups.etp.size} spread them; choose 'alltoall' or 'allgather', or ep=1 with etp=1"
    )


HOPPER_CAPABILITY = (9, 0)


@dataclass(frozen=True)
class DispatcherChoice:
    """The dispatcher of a run."""

    name: str
    """As in the recipe, never "auto"."""
    message: str = ""
    """What "auto" took, and why; empty where the recipe says it."""


def select_dispatcher(cfg: Config, groups: ParallelGroups) -> DispatcherChoice:
    """Settle `parallel.dispatcher`; with "auto" collective, as all ranks must take the same.

    Raises:
        ConfigError: "deepep" on a device that cannot run it, or without its package.
    """
    name = cfg.parallel.dispatcher
    if name == "auto" and groups.moe.experts.size == 1:
        return DispatcherChoice(
            "local", "parallel.dispatcher='auto' took local: ep = etp = 1, so no copy leaves its rank"
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
    """What keeps this rank from running DeepEP; empty if nothing does."""
    if device.type != "cuda":
        return "deep_ep needs CUDA GPUs, and this run is on the CPU"
    if torch.cuda.get_device_capability(device) < HOPPER_CAPABILITY:
        return f"deep_ep needs a Hopper or newer GPU, and this is a {torch.cuda.get_device_name(device)}"
    return "" if is_deepep_installed() else "the package deep_ep is not installed"
