"""Family kimi_k25 (Kimi-K2.5): the text model of a multimodal folder is DeepSeek-V3."""

from dataclasses import replace

from moefold.convert.families import DECODER_FAMILIES
from moefold.convert.family import MultimodalFolder

_DEEPSEEK_V3 = DECODER_FAMILIES["deepseek_v3"]

FAMILY = replace(
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
)
