"""Which dispatcher `parallel.dispatcher = "auto"` stands for."""

from dataclasses import dataclass

import torch

from moefold.config.checks_dispatch import deepep_unsupported_reasons, is_deepep_installed
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.parallel.collectives import all_reduce_max
from moefold.parallel.groups import ParallelGroups

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
