"""Rules on shortcut-connected MoE layers, whose routed output is added after the next layer. Torch-free."""

from collections.abc import Iterator

from moefold.config.model import ModelConfig
from moefold.config.parallel import ParallelConfig
from moefold.topology.pipeline_layout import StageParts, even_stages, parse_layout

KEY = "model.moe_shortcut=true"


def validate_shortcut(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    """Check that each MoE layer has a shared expert, and a dense layer after it on its pipeline stage."""
    part = model.routed
    if part is None or not part.is_shortcut:
        return
    if model.layers[0].residual.norms_output:
        yield (
            f"{KEY} does not go with model.norm_placement={model.layers[0].residual.kind!r}: the routed output would "
            "be added without a norm; set norm_placement='pre'"
        )
    if not part.shared_width:
        yield (
            f"{KEY} adds the shared expert in the layer, and model.shared_expert_ffn_hidden_size=0 means none; set "
            "shared_expert_ffn_hidden_size"
        )
    is_routed = [layer.ffn.is_routed for layer in model.layers]
    if any(left and right for left, right in zip(is_routed, [*is_routed[1:], True], strict=True)):
        yield (
            f"{KEY} adds the routed output of a layer after the next one, which is dense, and "
            f"model.layer_pattern={model.layer_pattern!r} has layers M without a D after them in model.num_layers="
            f"{model.num_layers}; choose 'MD' with an even number of layers"
        )
        return
    yield from _validate_stages(model, parallel, is_routed)


def _validate_stages(model: ModelConfig, parallel: ParallelConfig, is_routed: list[bool]) -> Iterator[str]:
    """Check that no pipeline stage ends with an MoE layer."""
    num_stages = parallel.pp * parallel.virtual_stages
    if num_stages == 1 or num_stages > model.num_layers:
        return
    if parallel.pipeline_layout == "auto":
        yield (
            f"parallel.pipeline_layout='auto' does not go with {KEY}, as it may part a layer M from the D after it; "
            "write the layout out, or leave it out"
        )
        return
    stages: tuple[StageParts, ...] = even_stages(model.num_layers, model.mtp_layers, num_stages)
    if parallel.pipeline_layout:
        try:
            stages = parse_layout(parallel.pipeline_layout)
        except ValueError:
            return
    for number, stage in enumerate(stages):
        if stage.layers and stage.layers[-1] < len(is_routed) and is_routed[stage.layers[-1]]:
            yield (
                f"{KEY} adds the routed output of a layer after the next one on the same pipeline stage, and stage "
                f"{number} of {num_stages} ends with layer {stage.layers[-1]}, an M; choose parallel.pp and "
                "virtual_stages that give each stage whole pairs MD, or parallel.pipeline_layout"
            )
            return


SHORTCUT_RULES = (validate_shortcut,)
