"""Rules on routing and load balancing, and the requirements of DeepEP.

DeepEP is refused if the recipe names it; with "auto" the reasons decide the fallback.
"""

from collections.abc import Iterator

from moefold.config.chosen import chosen_in
from moefold.config.groups.dispatcher import DispatcherPart
from moefold.config.groups.ffn import RoutedPart
from moefold.config.groups.router import ChoicePart
from moefold.config.model import ModelConfig, has_moe_layers
from moefold.config.moe import MoEConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.suggestions import nearest_multiples, nearest_numbers
from moefold.errors import ConfigError
from moefold.topology.layout import divisors


def validate_routing(model: ModelConfig, moe: MoEConfig) -> Iterator[str]:
    """Check all routing settings of a model with MoE layers."""
    part = model.routed
    if part is None:
        return
    if part.top_k > part.num_experts:
        yield (
            f"model.ffn.moe.top_k={part.top_k} must be at most model.ffn.moe.num_experts={part.num_experts}; "
            f"choose 1 to {part.num_experts}"
        )
        return
    yield from _validate_zero_experts(part)
    yield from _validate_expert_groups(part)
    yield from _validate_replay(moe)


def _validate_replay(moe: MoEConfig) -> Iterator[str]:
    """Check that a replayed trace is not combined with a balancing choice."""
    if moe.replay and not chosen_in(moe, ChoicePart).scores_decide:
        yield (
            f"moe.replay={moe.replay!r} has chosen the experts already, and moe.choice='{moe.choice}' would choose "
            "others; choose moe.choice='topk', or leave replay out"
        )


def validate_router_gradient(model: ModelConfig, moe: MoEConfig) -> Iterator[str]:
    """Check that the router gets a gradient: a single normalised choice always has weight 1."""
    if model.routed is None or model.routed.top_k > 1:
        return
    score = model.routed.router
    if not score.weights_sum_to_one:
        return
    key, way_out = score.sums_to_one_by
    yield (
        f"model.ffn.moe.top_k=1 with {key} weighs every choice with 1, so the router gets no gradient from the loss; "
        f"set {way_out}, or model.ffn.moe.top_k=2 or more"
    )


def _validate_zero_experts(part: RoutedPart) -> Iterator[str]:
    """Check the settings that are incompatible with zero-computation experts, and their share."""
    if part.zero_experts and part.router.num_groups > 1:
        yield (
            f"model.ffn.moe.zero_experts={part.zero_experts} is incompatible with model.ffn.moe.router.num_groups="
            f"{part.router.num_groups}, as zero-computation experts are in no group; leave num_groups and top_groups "
            "out, or zero_experts"
        )
    if part.active_experts > part.top_k:
        yield (
            f"model.ffn.moe.active_experts={part.active_experts} must be at most model.ffn.moe.top_k={part.top_k}, "
            f"the choices of a token; choose a number up to {part.top_k}"
        )


def _validate_expert_groups(part: RoutedPart) -> Iterator[str]:
    """Check that groups divide the experts and that the top groups have enough experts."""
    groups = part.router.num_groups
    top = part.router.top_groups
    experts = part.num_experts
    if groups == 1 and top == 1:
        return
    name = f"model.ffn.moe.router.num_groups={groups}"
    top_name = f"model.ffn.moe.router.top_groups={top}"
    if experts % groups:
        legal = nearest_numbers(groups, divisors(experts))
        second = f"model.ffn.moe.num_experts={nearest_multiples(experts, groups)}"
        yield f"{name} must divide model.ffn.moe.num_experts={experts}; choose {legal}, or {second}"
        return
    size = experts // groups
    if top > groups:
        yield f"{top_name} must be at most {name}; choose 1 to {groups}"
    elif top * size < part.top_k:
        yield (
            f"{top_name} groups of {size} experts are fewer than model.ffn.moe.top_k={part.top_k} experts; "
            f"choose top_groups of {-(-part.top_k // size)} or more, or top_k of {top * size} or less"
        )
    elif top == groups:
        yield f"{top_name} of {name} limits nothing; choose top_groups below {groups}, or leave both out"
    if size == 1 and part.router.sums_top2:
        yield (
            f"model.ffn.moe.router={part.router.kind!r} scores a group by its two best experts, and {name} makes "
            f"groups of one; choose num_groups of {experts // 2} or less"
        )


ROUTING_RULES = (validate_routing,)
TRAINING_ONLY_RULES = (validate_router_gradient,)
"""Rules for training only."""


def check_dispatch_package(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Check that the kernels of the dispatcher are installed if the recipe names it.

    Raises:
        ConfigError: they are not installed.
    """
    part = chosen_in(parallel, DispatcherPart)
    if requests_dispatch_kernels(model, parallel) and not part.has_package():
        raise ConfigError(
            f"parallel.dispatcher={part.kind!r} needs the package {part.kernel_package}, which is not installed: get "
            f"it from {part.package_source}, or choose 'alltoall', or 'auto'"
        )


def check_dispatch_device(model: ModelConfig, parallel: ParallelConfig, device_type: str) -> None:
    """Check that the ranks run on GPUs if the recipe names a dispatcher that needs them.

    Raises:
        ConfigError: the ranks run on CPUs.
    """
    part = chosen_in(parallel, DispatcherPart)
    if requests_dispatch_kernels(model, parallel) and device_type != "cuda":
        raise ConfigError(
            f"parallel.dispatcher={part.kind!r} needs CUDA GPUs, and the ranks would run on the CPU; "
            "choose 'alltoall', or 'auto'"
        )


def requests_dispatch_kernels(model: ModelConfig, parallel: ParallelConfig) -> bool:
    """Return whether the recipe names a dispatcher with a package of kernels, and tokens leave their rank."""
    return (
        bool(chosen_in(parallel, DispatcherPart).kernel_package)
        and parallel.ep * parallel.etp > 1
        and has_moe_layers(model)
    )
