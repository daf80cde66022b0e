"""Which layers of each family decode in C, and why the others do not: the reasons that the log has."""

from dataclasses import replace
from pathlib import Path

import pytest

from moefold.config.load import config_from_dict
from moefold.convert.families import FAMILIES, FILED_FAMILIES
from moefold.convert.hf_config import parse_model_config
from moefold.model.fused_block import fused_unsupported_reason
from moefold.model.transformer import build_model
from moefold.parallel.select_ops import apply_kernels, select_kernels
from tests.ops.c_kernels import CPU, needs_compiler

pytest.importorskip("transformers", reason="transformers comes with the extra `dev`")
from tests.convert.hf_models import MODELS, SIZES, transformers

pytestmark = needs_compiler

IN_C = {""}
LINEAR = "linear attention"
REASONS = {
    "llama": IN_C,
    "qwen2": IN_C,
    "qwen3": IN_C,
    "mixtral": IN_C,
    "qwen2_moe": IN_C,
    "qwen3_moe": IN_C,
    "glm4_moe": IN_C,
    "dots1": IN_C,
    "hy_v3": IN_C,
    "solar_open": IN_C,
    "exaone_moe": {"", "no RoPE"},
    "lfm2_moe": {"", LINEAR},
    "gpt_oss": {"biases of experts"},
    "olmoe": {"QK norm of all heads"},
    "minimax_m2": {"QK norm of all heads"},
    "hunyuan_v1_moe": {"QK norm after RoPE"},
    "granitemoe": {"model.residual_multiplier"},
    "granitemoeshared": {"model.residual_multiplier"},
    "ernie4_5_moe": {"interleaved RoPE"},
    "llama4_text": {"interleaved RoPE", "no RoPE"},
    "flex_olmo": {"norms of outputs"},
    "afmoe": {"norms of outputs"},
    "phimoe": {"LayerNorm"},
    "qwen3_next": {LINEAR, "a gate of attention"},
    "qwen3_5_moe_text": {LINEAR, "a gate of attention"},
    "deepseek_v2": {"latent attention"},
    "deepseek_v3": {"latent attention"},
    "glm4_moe_lite": {"latent attention"},
    "longcat_flash": {"latent attention"},
    "kimi_linear": {LINEAR, "latent attention"},
    "bailing_hybrid": {LINEAR, "latent attention"},
    "deepseek_v32": {"sparse attention"},
    "glm_moe_dsa": {"sparse attention"},
}
"""Of the layers of each family; empty: in C."""


def test_the_layers_of_every_family_decode_in_c_or_say_why_not():
    recipe = config_from_dict({"run": {"dtype": "float32", "kernels": "c"}, "data": {"kind": "synthetic"}})
    found: dict[str, set[str]] = {}
    for kind, sizes in MODELS.values():
        theirs = getattr(transformers, f"{kind.partition(' ')[0]}Config")(**SIZES | sizes)
        cfg = replace(recipe, model=parse_model_config(theirs.to_dict(), Path("folder")))
        stage = build_model(cfg)
        apply_kernels(stage, select_kernels(cfg, CPU))
        reasons = set(map(fused_unsupported_reason, stage.layers.values()))
        found[theirs.model_type] = found.get(theirs.model_type, set()) | reasons
    filed = {family.name for family in FILED_FAMILIES.values() if not family.exported_as}
    assert {name: reasons for name, reasons in found.items() if name not in filed} == REASONS
    assert found.keys() | filed >= FAMILIES.keys()
    # Families in files of their own have no block that the others lack.
    assert set().union(*found.values()) == set().union(*REASONS.values())
