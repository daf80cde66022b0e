"""Family ernie4_5_vl_moe (ERNIE 4.5 VL): ERNIE 4.5 with vision experts in the same tensors."""

from dataclasses import replace

from moefold.convert.families import DECODER_FAMILIES
from moefold.convert.family import MultimodalFolder, merge_rules
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
    options={
        "head_dim": (10,),
        "rope_parameters": (MROPE,),
        "moe_intermediate_size": ([11, 7], [12, 8]),
        "mlp_layer_types": (None, ["sparse", "dense"], ["sparse", "sparse"]),
    },
)
