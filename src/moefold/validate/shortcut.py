"""Rules on shortcut-connected MoE layers, whose routed output is added after the next layer."""

from collections.abc import Iterator

from moefold.config.model import ModelConfig
from moefold.config.parallel import ParallelConfig
from moefold.message_text import Problem, Setting
from moefold.topology.pipeline_layout import StageParts, even_stages, parse_layout
from moefold.topology.selection_groups import stage_starts

KEY = Setting("model.ffn.moe.shortcut", True)


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
        yield KEY.problem(rule, "set residual='pre'")
    if not part.shared_width:
        rule = "adds the shared expert in the layer, and model.ffn.moe.shared is none"
        yield KEY.problem(rule, "set model.ffn.moe.shared.intermediate_size")
    is_routed = [layer.ffn.is_routed for layer in model.decoder_layers]
    if any(current and following for current, following in zip(is_routed, [*is_routed[1:], True], strict=True)):
        rule = (
            "adds the routed output of a layer after the next one, which is dense, and "
            f"model.layers={model.layers!r} has layers 'moe' without a 'dense' one after them"
        )
        yield KEY.problem(rule, f"choose '{max(1, model.num_layers // 2)} x (moe, dense)'")
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
            yield KEY.problem(rule, f"choose {num_groups + 2} or less")
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
            yield KEY.problem(
                "adds the routed output of a layer after the next one on the same pipeline stage, and stage "
                f"{number} of {num_stages} ends with layer {stage.layers[-1]}, a layer 'moe'",
                f"choose {Setting('parallel.pp')} and virtual_stages that give each stage whole pairs, or "
                "parallel.pipeline_layout",
            )
            return
