"""Rules on routing and load balancing, and the requirements of DeepEP.

DeepEP is refused if the recipe names it; with "auto" the reasons decide the fallback.
"""

from collections.abc import Iterator

from moefold.config.chosen import chosen_in
from moefold.config.groups.dispatcher import DispatcherPart
from moefold.config.groups.ffn import RoutedPart
from moefold.config.groups.router import ChoicePart
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.suggestions import nearest_multiples, nearest_numbers
from moefold.errors import ConfigError
from moefold.message_text import Problem, Setting
from moefold.topology.layout import divisors


def validate_routing(model: ModelConfig, moe: MoEConfig) -> Iterator[Problem]:
    """Check all routing settings of a model with MoE layers."""
    part = model.routed
    if part is None:
        return
    if part.top_k > part.num_experts:
        rule = f"must be at most model.ffn.moe.num_experts={part.num_experts}"
        yield Problem("model.ffn.moe.top_k", part.top_k, rule, f"choose 1 to {part.num_experts}")
        return
    yield from _validate_zero_experts(part)
    yield from _validate_expert_groups(part)
    yield from _validate_replay(moe)


def _validate_replay(moe: MoEConfig) -> Iterator[Problem]:
    """Check that a replayed trace is not combined with a balancing choice."""
    if moe.replay and not chosen_in(moe, ChoicePart).scores_decide:
        rule = f"has chosen the experts already, and moe.choice='{moe.choice}' would choose others"
        yield Problem("moe.replay", moe.replay, rule, "choose moe.choice='topk', or leave replay out")


def validate_router_gradient(model: ModelConfig, moe: MoEConfig) -> Iterator[Problem]:
    """Check that the router gets a gradient: a single normalised choice always has weight 1."""
    if model.routed is None or model.routed.top_k > 1:
        return
    score = model.routed.router
    if not score.weights_sum_to_one:
        return
    key, way_out = score.sums_to_one_by
    rule = f"with {key} weighs every choice with 1, so the router gets no gradient from the loss"
    yield Problem("model.ffn.moe.top_k", 1, rule, f"set {way_out}, or model.ffn.moe.top_k=2 or more")


def _validate_zero_experts(part: RoutedPart) -> Iterator[Problem]:
    """Check the settings that are incompatible with zero-computation experts, and their share."""
    if part.zero_experts and part.router.num_groups > 1:
        rule = (
            f"is incompatible with model.ffn.moe.router.num_groups={part.router.num_groups}, as zero-computation "
            "experts are in no group"
        )
        way_out = "leave num_groups and top_groups out, or zero_experts"
        yield Problem("model.ffn.moe.zero_experts", part.zero_experts, rule, way_out)
    if part.active_experts > part.top_k:
        rule = f"must be at most model.ffn.moe.top_k={part.top_k}, the choices of a token"
        way_out = f"choose a number up to {part.top_k}"
        yield Problem("model.ffn.moe.active_experts", part.active_experts, rule, way_out)


def _validate_expert_groups(part: RoutedPart) -> Iterator[Problem]:
    """Check that groups divide the experts and that the top groups have enough experts."""
    groups = part.router.num_groups
    top = part.router.top_groups
    experts = part.num_experts
    if groups == 1 and top == 1:
        return
    name = Setting("model.ffn.moe.router.num_groups", groups)
    top_name = Setting("model.ffn.moe.router.top_groups", top)
    if experts % groups:
        legal = nearest_numbers(groups, divisors(experts))
        second = f"model.ffn.moe.num_experts={nearest_multiples(experts, groups)}"
        yield name.problem(f"must divide model.ffn.moe.num_experts={experts}", f"choose {legal}, or {second}")
        return
    size = experts // groups
    if top > groups:
        yield top_name.problem(f"must be at most {name}", f"choose 1 to {groups}")
    elif top * size < part.top_k:
        yield top_name.problem(
            f"groups of {size} experts are fewer than model.ffn.moe.top_k={part.top_k} experts",
            f"choose top_groups of {-(-part.top_k // size)} or more, or top_k of {top * size} or less",
        )
    elif top == groups:
        yield top_name.problem(f"of {name} limits nothing", f"choose top_groups below {groups}, or leave both out")
    if size == 1 and part.router.sums_top2:
        rule = f"scores a group by its two best experts, and {name} makes groups of one"
        yield Problem("model.ffn.moe.router", part.router.kind, rule, f"choose num_groups of {experts // 2} or less")


TRAINING_ONLY_RULES = (validate_router_gradient,)
"""Rules for training only."""


def check_dispatch_package(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Check that the kernels of the dispatcher are installed if the recipe names it.

    Raises:
        ConfigError: they are not installed.
    """
    part = chosen_in(parallel, DispatcherPart)
    if requests_dispatch_kernels(model, parallel) and not part.has_package():
        rule = (
            f"needs the package {part.kernel_package}, which is not installed: get it from {part.package_source}, "
            "or choose 'alltoall', or 'auto'"
        )
        raise ConfigError(Problem("parallel.dispatcher", part.kind, rule))


def check_dispatch_device(model: ModelConfig, parallel: ParallelConfig, device_type: str) -> None:
    """Check that the ranks run on GPUs if the recipe names a dispatcher that needs them.

    Raises:
        ConfigError: the ranks run on CPUs.
    """
    part = chosen_in(parallel, DispatcherPart)
    if requests_dispatch_kernels(model, parallel) and device_type != "cuda":
        rule = "needs CUDA GPUs, and the ranks would run on the CPU"
        raise ConfigError(Problem("parallel.dispatcher", part.kind, rule, "choose 'alltoall', or 'auto'"))


def requests_dispatch_kernels(model: ModelConfig, parallel: ParallelConfig) -> bool:
    """Return whether the recipe names a dispatcher with a package of kernels, and tokens leave their rank."""
    return (
        bool(chosen_in(parallel, DispatcherPart).kernel_package)
        and parallel.ep * parallel.etp > 1
        and model.has_moe_layers
    )
