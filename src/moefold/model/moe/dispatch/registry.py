"""Registry of dispatchers: `parallel.dispatcher` by name, and the choice for "auto"."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moefold.comm.collectives import all_reduce_max
from moefold.comm.groups import MoEGroups, ParallelGroups
from moefold.comm.row_exchange import RowExchange
from moefold.comm.torch_compat import is_nvshmem_available
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.model.moe.dispatch.allgather import AllGatherDispatcher
from moefold.model.moe.dispatch.alltoall import AllToAllDispatcher
from moefold.model.moe.dispatch.base import Dispatcher
from moefold.model.moe.dispatch.dedup_alltoall import DedupAllToAllDispatcher
from moefold.model.moe.dispatch.deepep import Buffer, DeepEPDispatcher
from moefold.model.moe.dispatch.least_loaded import LeastLoadedDispatcher, RebalanceRule
from moefold.model.moe.dispatch.local import LocalDispatcher
from moefold.model.moe.dispatch.options import DispatcherOptions
from moefold.model.moe.dispatch.symm_mem import SymmMemDispatcher
from moefold.topology.dispatchers import DispatcherSpec, dispatcher_of, dispatcher_spec
from moefold.validate.moe import UNSUPPORTED_REASONS, is_kernel_package_installed

DispatcherBuilder = Callable[[DispatcherOptions], Dispatcher[Any]]


def _build_alltoall(options: DispatcherOptions) -> AllToAllDispatcher:
    groups = options.groups
    return AllToAllDispatcher(
        groups.ep,
        groups.etp,
        groups.experts,
        groups.expert_coordinates,
        options.num_experts,
        fp8_dispatch=options.fp8_dispatch,
    )


def _build_dedup_alltoall(options: DispatcherOptions) -> DedupAllToAllDispatcher:
    return DedupAllToAllDispatcher(options.groups.ep, options.num_experts, fp8_dispatch=options.fp8_dispatch)


def _build_allgather(options: DispatcherOptions) -> AllGatherDispatcher:
    groups = options.groups
    return AllGatherDispatcher(
        groups.experts, groups.expert_coordinates, options.num_experts, fp8_dispatch=options.fp8_dispatch
    )


def _build_least_loaded(options: DispatcherOptions) -> LeastLoadedDispatcher:
    assert options.rebalance_rule is not None, "leastloaded needs to know when copies move"
    return LeastLoadedDispatcher(
        options.groups, options.num_experts, options.rebalance_rule, fp8_dispatch=options.fp8_dispatch
    )


def _build_deepep(options: DispatcherOptions) -> DeepEPDispatcher:
    assert options.buffer is not None, "deepep needs its buffers"
    return DeepEPDispatcher(options.buffer, options.num_experts, fp8_dispatch=options.fp8_dispatch)


def _build_symm_mem(options: DispatcherOptions) -> SymmMemDispatcher:
    assert options.exchange is not None, "symm_mem needs its buffers"
    return SymmMemDispatcher(options.groups.ep, options.exchange, options.num_experts)


BUILDERS: dict[str, DispatcherBuilder] = {
    "alltoall": _build_alltoall,
    "dedup_alltoall": _build_dedup_alltoall,
    "allgather": _build_allgather,
    "leastloaded": _build_least_loaded,
    "deepep": _build_deepep,
    "symm_mem": _build_symm_mem,
}
"""How to build each dispatcher of `topology/dispatchers.py` that runs with experts spread over ranks."""


def make_dispatcher(
    name: str,
    groups: MoEGroups,
    num_experts: int,
    rebalance_rule: RebalanceRule | None = None,
    buffer: Buffer | None = None,
    exchange: RowExchange | None = None,
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
        exchange: required by `symm_mem`.
        fp8_dispatch: send tokens to the experts in FP8; the local dispatcher rounds them likewise.

    Raises:
        ConfigError: `local` with experts spread over ranks.
    """
    if groups.experts.size == 1:
        return LocalDispatcher(num_experts, fp8_dispatch=fp8_dispatch)
    if name not in BUILDERS:
        raise ConfigError(
            f"parallel.dispatcher={name!r} needs all experts on each rank, but parallel.ep={groups.ep.size} and "
            f"parallel.etp={groups.etp.size} spread them; choose 'alltoall' or 'allgather', or ep=1 with etp=1"
        )
    return BUILDERS[name](
        DispatcherOptions(
            groups=groups,
            num_experts=num_experts,
            rebalance_rule=rebalance_rule,
            buffer=buffer,
            exchange=exchange,
            fp8_dispatch=fp8_dispatch,
        )
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
    spec = dispatcher_of(cfg)
    if spec.prefers and groups.moe.experts.size == 1:
        return DispatcherChoice(
            "local", f"parallel.dispatcher={spec.name!r} took local: ep = etp = 1, so no token leaves its rank"
        )
    wanted = dispatcher_spec(spec.prefers or spec.name)
    if not wanted.kernel_package:
        return DispatcherChoice(wanted.name)
    reason = next(UNSUPPORTED_REASONS[wanted.name](cfg), "") or _unsupported_device_reason(wanted, groups.device)
    if not spec.prefers:
        if reason:
            raise ConfigError(f"parallel.dispatcher={spec.name!r} cannot run: {reason}; choose 'alltoall'")
        return DispatcherChoice(spec.name)
    num_unable = int(all_reduce_max(torch.tensor([bool(reason)], device=groups.device).long(), groups.world))
    if not num_unable:
        return DispatcherChoice(wanted.name, f"parallel.dispatcher={spec.name!r} took {wanted.name}")
    reason = reason or f"another rank cannot run {wanted.name}"
    return DispatcherChoice(
        spec.falls_back_to, f"parallel.dispatcher={spec.name!r} took {spec.falls_back_to}: {reason}"
    )


def _unsupported_device_reason(spec: DispatcherSpec, device: torch.device) -> str:
    """Return why this rank cannot run the kernels of a dispatcher; empty if it can."""
    if device.type != "cuda":
        return f"{spec.kernel_package} needs CUDA GPUs, and this run is on the CPU"
    if torch.cuda.get_device_capability(device) < HOPPER_CAPABILITY:
        return f"{spec.kernel_package} needs a Hopper or newer GPU, and this is a {torch.cuda.get_device_name(device)}"
    if not is_kernel_package_installed(spec):
        return f"the package {spec.kernel_package} is not installed"
    if spec.has_receive_buffer and not is_nvshmem_available():
        return "torch finds no NVSHMEM"
    return ""
