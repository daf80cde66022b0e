"""Which layers of each family decode in C, and why the others do not: the reasons that the log has."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moefold.convert.families import FAMILIES
from moefold.convert.hf_config import parse_model_config
from moefold.model.fused_block import fused_unsupported_reason
from moefold.model.transformer import build_model
from moefold.parallel.kernels.select import apply_kernels, select_kernels
from tests.models import config_of
from tests.ops.c_kernels import CPU, needs_compiler

pytest.importorskip("transformers", reason="transformers comes with the extra `dev`")
from tests.convert.hf_models import FILED, MODELS, SIZES, first_sizes, multimodal_config, transformers

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
    "granitemoe": {"model.residual.multiplier"},
    "granitemoeshared": {"model.residual.multiplier"},
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
"""Reason of each family's layers; empty: they decode in C."""
FILED_REASONS = {
    "aria": IN_C,
    "deepseek-ocr2": IN_C,
    "ernie4-5-vl-moe": {"interleaved RoPE"},
    "flint": {"", "no RoPE"},
    "glm4v-moe": IN_C,
    "kimi-k25": {"latent attention"},
    "lara-mini": {"", LINEAR, "no RoPE"},
    "qwen3-omni-moe": IN_C,
    "qwen3-vl-moe": IN_C,
    "sarvam-mla": {"latent attention"},
    "sarvam-moe": IN_C,
}
"""The same for the families in files of their own, by the name of the file."""


def _reasons(theirs: Any) -> set[str]:
    """Why the layers of a model of transformers do not decode in C."""
    recipe = config_of({"run": {"dtype": "float32", "kernels": "c"}, "data": {"kind": "synthetic"}})
    cfg = replace(recipe, model=parse_model_config(theirs.to_dict(), Path("folder")))
    stage = build_model(cfg)
    apply_kernels(stage, select_kernels(cfg, CPU))
    return set(map(fused_unsupported_reason, stage.layers.values()))


def test_the_layers_of_every_family_decode_in_c_or_say_why_not():
    found: dict[str, set[str]] = {}
    for name, (kind, sizes) in MODELS.items():
        if name in FILED:
            continue
        theirs = getattr(transformers, f"{kind.partition(' ')[0]}Config")(**SIZES | sizes)
        found.setdefault(theirs.model_type, set()).update(_reasons(theirs))
    assert found == REASONS
    assert found.keys() | {family.name for family in FILED.values()} >= FAMILIES.keys()


def test_the_layers_of_every_family_in_a_file_do_too():
    found = {}
    for name, family in FILED.items():
        kind = MODELS[name][0].partition(" ")[0] if name in MODELS else ""
        sizes = SIZES | first_sizes(family)
        theirs = getattr(transformers, f"{kind}Config")(**sizes) if kind else multimodal_config(family, sizes, {})
        found[name] = _reasons(theirs)
    assert found == FILED_REASONS
