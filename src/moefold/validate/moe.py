"""Rules on routing, load balancing and shortcut-connected MoE, and the requirements of DeepEP.

DeepEP is refused if the recipe names it. With "auto" the reasons decide the fallback.
"""

from collections.abc import Iterator

from moefold.config.chosen import chosen_in
from moefold.config.groups.dispatcher import DispatcherPart
from moefold.config.groups.ffn import RoutedPart
from moefold.config.groups.router import ChoicePart
from moefold.config.model import ModelConfig
from moefold.config.sections.moe import MoEConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.suggestions import nearest_multiples, nearest_numbers
from moefold.errors import ConfigError
from moefold.message_text import Problem, Setting
from moefold.topology.layout import divisors
from moefold.topology.pipeline_layout import StageParts, even_stages, parse_layout
from moefold.topology.selection_groups import stage_starts


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


SHORTCUT_KEY = Setting("model.ffn.moe.shortcut", True)


def validate_shortcut(model: ModelConfig, parallel: ParallelConfig) -> Iterator[Problem]:
    """Check that each MoE layer has a shared expert, and a dense layer after it on its pipeline stage."""
    part = model.routed
    if part is None or not part.shortcut:
        return
    if model.decoder_layers[0].residual.norms_output:
        rule = (
            f"is incompatible with model.residual={model.decoder_layers[0].residual.kind!r}: the routed output "
            "would be added without a norm"
        )
        yield SHORTCUT_KEY.problem(rule, "set residual='pre'")
    if not part.shared_width:
        rule = "adds the shared expert in the layer, and model.ffn.moe.shared is none"
        yield SHORTCUT_KEY.problem(rule, "set model.ffn.moe.shared.intermediate_size")
    is_routed = [layer.ffn.is_routed for layer in model.decoder_layers]
    if any(current and following for current, following in zip(is_routed, [*is_routed[1:], True], strict=True)):
        rule = (
            "adds the routed output of a layer after the next one, which is dense, and "
            f"model.layers={model.layers!r} has layers 'moe' without a 'dense' one after them"
        )
        yield SHORTCUT_KEY.problem(rule, f"choose '{max(1, model.num_layers // 2)} x (moe, dense)'")
        return
    yield from shortcut_stage_errors(model, parallel, parallel.pipeline_layout)


def shortcut_stage_errors(model: ModelConfig, parallel: ParallelConfig, pipeline_layout: str) -> Iterator[Problem]:
    """Yield the errors of a pipeline layout with stages that end with an MoE layer."""
    if not model.has_shortcut:
        return
    is_routed = [layer.ffn.is_routed for layer in model.decoder_layers]
    num_stages = parallel.pp * parallel.virtual_stages
    if num_stages == 1:
        return
    if pipeline_layout == "auto":
        num_groups = len(stage_starts(model)) - 1
        if num_stages > num_groups + 2:
            rule = (
                "keeps a layer 'moe' and the dense one after it on one pipeline stage, and "
                f"{Setting('parallel.pp')}*parallel.virtual_stages={num_stages} stages are more than these "
                f"{num_groups} groups of layers, the embedding and the loss"
            )
            yield SHORTCUT_KEY.problem(rule, f"choose {num_groups + 2} or less")
        return
    if num_stages > model.num_layers:
        return
    stages: tuple[StageParts, ...] = even_stages(model.num_layers, model.mtp_layers, num_stages)
    if pipeline_layout:
        try:
            stages = parse_layout(pipeline_layout)
        except ValueError:
            return
    for number, stage in enumerate(stages):
        if stage.layers and stage.layers[-1] < len(is_routed) and is_routed[stage.layers[-1]]:
            yield SHORTCUT_KEY.problem(
                "adds the routed output of a layer after the next one on the same pipeline stage, and stage "
                f"{number} of {num_stages} ends with layer {stage.layers[-1]}, a layer 'moe'",
                f"choose {Setting('parallel.pp')} and virtual_stages that give each stage whole pairs, or "
                "parallel.pipeline_layout",
            )
            return
