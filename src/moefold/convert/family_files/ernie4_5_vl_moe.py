"""Family ernie4_5_vl_moe (ERNIE 4.5 VL): the text experts of a multimodal folder are those of ERNIE 4.5. Torch-free."""

from dataclasses import replace

from moefold.convert.decoder_families import DECODER_FAMILIES
from moefold.convert.family import Example, MultimodalFolder, merge_rules
from moefold.convert.family_files.qwen3_vl_moe import MROPE
from moefold.convert.layer_fields import ExpertLayerRange, MlpLayerTypes
from moefold.convert.tensor_mapping import TensorBlock

_ERNIE = DECODER_FAMILIES["ernie4_5_moe"]
_ROUTER = {"layers.{l}.ffn.router.weight": TensorBlock("model.layers.{l}.mlp.gate.weight", dims=(1, 0))}

FAMILY = replace(
    _ERNIE,
    name="ernie4_5_vl_moe_text",
    config_fields=(
        *(entry for entry in _ERNIE.config_fields if not isinstance(entry, ExpertLayerRange)),
        MlpLayerTypes(default=1),
    ),
    layouts=(merge_rules(_ERNIE.layouts[0], _ROUTER),),
    multimodal=MultimodalFolder(
        "ernie4_5_vl_moe",
        r"model\.(vision_model|resampler_model)\..*|model\.layers\.\d+\.mlp\.gate\.weight_1",
        pairs=("moe_intermediate_size",),
        pair_tensors=r"model\.layers\.\d+\.mlp\.moe_statics\.e_score_correction_bias",
        other_experts=r"model\.layers\.\d+\.mlp\.experts\.(\d+)\..*",
    ),
    exported_as="ernie4_5_moe",
    example=Example(
        "Ernie4_5_VLMoeConfig",
        "Ernie4_5_VLMoeForConditionalGeneration",
        {"num_hidden_layers": 2, "moe_k": 3, "head_dim": 10, "rope_parameters": MROPE},
        {
            "intermediate_size": (19, 20),
            "moe_intermediate_size": ([11, 7], [12, 8]),
            "moe_num_experts": (5, 6),
            "moe_num_shared_experts": (2, 0, 1),
            "mlp_layer_types": (None, ["sparse", "dense"], ["sparse", "sparse"]),
        },
        {"vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2}},
    ),
)
