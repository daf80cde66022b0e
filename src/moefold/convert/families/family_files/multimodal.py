"""Text models of multimodal folders: families of other folders, with other names, defaults and tensors."""

from dataclasses import replace

from moefold.convert.families.config_fields import (
    Constants,
    HeadSize,
    RouterGroups,
    SharedExperts,
    allowed,
    attention_bias,
    renamed,
)
from moefold.convert.families.families import DECODER_FAMILIES
from moefold.convert.families.family import (
    EXPERTS,
    KEY_VALUE_HEADS,
    Family,
    MultimodalFolder,
    attention_fields,
    backbone_fields,
    layer_rules,
    layouts,
    merge_rules,
    untransposed_experts,
)
from moefold.convert.families.layer_fields import ExpertLayerRange, MlpLayerTypes
from moefold.convert.families.tensor_mapping import TensorBlock

_DEEPSEEK_V3 = DECODER_FAMILIES["deepseek_v3"]
_ERNIE = DECODER_FAMILIES["ernie4_5_moe"]
_GLM = DECODER_FAMILIES["glm4_moe"]
_QWEN3_MOE = DECODER_FAMILIES["qwen3_moe"]
_MROPE = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 2, 1]}
"""RoPE of three axes for heads of 10 dims."""
_IN_OUT_EXPERTS = untransposed_experts("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
_LANGUAGE_MODEL = {"model.language_model.": "model."}

FAMILIES = (
    # Each expert is stored as [in, out], gate before up.
    Family(
        "aria_text",
        "AriaTextForCausalLM",
        (
            *attention_fields(1e-6, 1e4),
            attention_bias(has_output=True),
            *allowed(mlp_bias=(False,)),
            *renamed(
                moe_num_experts=("ffn.moe.num_experts", 8),
                moe_topk=("ffn.moe.top_k", 2),
                intermediate_size="ffn.moe.intermediate_size",
            ),
            SharedExperts("moe_num_shared_experts", default=2, width_key="intermediate_size"),
            Constants({"ffn.moe.router.softmax": "post"}),
        ),
        layouts(
            layer_rules({"ffn.router.weight": "mlp.router.weight"}),
            experts=(untransposed_experts("mlp.experts.fc1.weight", "mlp.experts.fc2.weight"), _IN_OUT_EXPERTS),
        ),
        multimodal=MultimodalFolder("aria", r"(vision_tower|multi_modal_projector)\..*", {"language_model.": ""}),
        options={"intermediate_size": (11, 12)},
    ),
    # DeepSeek-OCR 2: DeepSeek-V2 with plain attention.
    Family(
        "deepseek_ocr2_text",
        # transformers has no class of the text model with a head.
        "DeepseekOcr2TextModel",
        (
            *backbone_fields(1e-6, 1e4),
            KEY_VALUE_HEADS,
            HeadSize(is_derived=True),
            attention_bias(has_output=True),
            MlpLayerTypes(default=0),
            *allowed(mlp_bias=(False,), norm_topk_prob=(False, None), scoring_func=("softmax", None)),
            *renamed(
                intermediate_size="ffn.dense.intermediate_size",
                n_routed_experts="ffn.moe.num_experts",
                num_experts_per_tok="ffn.moe.top_k",
                moe_intermediate_size="ffn.moe.intermediate_size",
                routed_scaling_factor=("ffn.moe.router.scaling_factor", 1.0),
            ),
            RouterGroups(has_method=True),
            SharedExperts(default=2),
            Constants({"ffn.moe.router.softmax": "pre"}),
        ),
        # That class only reads stacked experts.
        layouts(experts=EXPERTS[::-1]),
        multimodal=MultimodalFolder(
            "deepseek_ocr2", r"model\.(qwen2_model|sam_model|projector)\..*|model\.view_seperator"
        ),
        options={
            "hidden_size": (36,),
            "num_attention_heads": (6,),
            "num_key_value_heads": (2,),
            "head_dim": (None,),
            "mlp_layer_types": (["dense", "sparse"], ["sparse", "sparse"]),
            "topk_method": ("greedy", "group_limited_greedy"),
        },
    ),
    # ERNIE 4.5 VL: ERNIE 4.5 with vision experts in the same tensors.
    replace(
        _ERNIE,
        name="ernie4_5_vl_moe_text",
        config_fields=(
            *(entry for entry in _ERNIE.config_fields if not isinstance(entry, ExpertLayerRange)),
            MlpLayerTypes(default=1),
        ),
        layouts=(
            merge_rules(
                _ERNIE.layouts[0],
                {"layers.{l}.ffn.router.weight": TensorBlock("model.layers.{l}.mlp.gate.weight", dims=(1, 0))},
            ),
        ),
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
            "rope_parameters": (_MROPE,),
            "moe_intermediate_size": ([11, 7], [12, 8]),
            "mlp_layer_types": (None, ["sparse", "dense"], ["sparse", "sparse"]),
        },
    ),
    # GLM-4.5V.
    replace(
        _GLM,
        name="glm4v_moe_text",
        config_fields=(*_GLM.config_fields, *allowed(use_qk_norm=(False, None), num_nextn_predict_layers=(0, None))),
        default_keys={"num_key_value_heads": 8, "attention_bias": True, "num_nextn_predict_layers": 0},
        has_mtp=False,
        mtp_unreported=(),
        multimodal=MultimodalFolder("glm4v_moe", r"model\.visual\..*", _LANGUAGE_MODEL),
        exported_as="glm4_moe",
        options={"head_dim": (20,), "rope_parameters": (_MROPE | {"partial_rotary_factor": 0.5},)},
    ),
    # Kimi-K2.5.
    replace(
        _DEEPSEEK_V3,
        aliases=(),
        multimodal=MultimodalFolder(
            "kimi_k25",
            r"(model\.)?(vision_tower|mm_projector)\..*",
            # transformers 5.24 writes the layers of the text model as blocks.
            {"language_model.model.blocks.": "model.layers.", "language_model.": ""},
        ),
        exported_as="deepseek_v3",
        # transformers 5.24 cannot read back its own folders with other values.
        options={"model_type": ("deepseek_v3",), "q_lora_rank": (7, 8), "rope_interleave": (True,)},
    ),
    # Qwen3-Omni: the text model of the thinker.
    replace(
        _QWEN3_MOE,
        name="qwen3_omni_moe_text",
        default_keys={"rope_theta": 1e6, "num_key_value_heads": 4, "norm_topk_prob": True},
        multimodal=MultimodalFolder(
            "qwen3_omni_moe",
            r"(talker|code2wav|audio_tower|visual)\..*",
            {"thinker.": ""},
            ("thinker_config", "text_config"),
        ),
        exported_as="qwen3_moe",
        options={"head_dim": (10,), "rope_parameters": (_MROPE,)},
    ),
    # Qwen3-VL: the weights of chosen experts always sum to 1.
    replace(
        _QWEN3_MOE,
        name="qwen3_vl_moe_text",
        config_fields=(
            *_QWEN3_MOE.config_fields,
            *allowed(norm_topk_prob=(True, None)),
            Constants({"ffn.moe.router.softmax": "post"}),
        ),
        layouts=layouts(experts=(_IN_OUT_EXPERTS, EXPERTS[1], EXPERTS[0])),
        default_keys={"rope_theta": 5e5, "num_key_value_heads": 16},
        multimodal=MultimodalFolder("qwen3_vl_moe", r"model\.visual\..*", _LANGUAGE_MODEL),
        exported_as="qwen3_moe",
        options={"head_dim": (10,), "rope_parameters": (_MROPE,)},
    ),
)
