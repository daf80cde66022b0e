"""Test which layers of each family decode in C, in how many calls, and the reasons that the log gives."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moefold.convert.families.families import FAMILIES
from moefold.convert.families.hf_config import parse_model_config
from moefold.model.block import Block
from moefold.model.fused_block import fused_unsupported_reason, layer_weights, supports_fused_head
from moefold.model.transformer import build_model
from moefold.parallel.kernels.select import apply_kernels, select_kernels
from tests.models import config_of
from tests.ops.c_kernels import CPU, needs_compiler

pytest.importorskip("transformers", reason="transformers comes with the extra `dev`")
from tests.convert.hf_models import FILED, MODELS, SIZES, first_sizes, multimodal_config, transformers

pytestmark = needs_compiler

ONE_CALL = "one call"
TWO_CALLS = "two calls"
DENSE = "attention in C, the feed-forward layer a module"
LINEAR = "linear attention"
HEAD = "a head of modules after layers in C"
REASONS = {
    "llama": {DENSE},
    "qwen2": {DENSE},
    "qwen3": {DENSE},
    "mixtral": {ONE_CALL},
    "qwen2_moe": {DENSE, TWO_CALLS},
    "qwen3_moe": {DENSE, ONE_CALL},
    "glm4_moe": {DENSE, TWO_CALLS},
    "dots1": {DENSE, TWO_CALLS},
    "hy_v3": {DENSE, TWO_CALLS},
    "solar_open": {TWO_CALLS},
    "exaone_moe": {DENSE, TWO_CALLS, "no RoPE"},
    "lfm2_moe": {TWO_CALLS, LINEAR},
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
"""How each family's layers decode in C, or the reason why they do not."""
FILED_REASONS = {
    "aria": {TWO_CALLS},
    "deepseek-ocr2": {DENSE, TWO_CALLS},
    "ernie4-5-vl-moe": {"interleaved RoPE"},
    "flint": {TWO_CALLS, "no RoPE"},
    "glm4v-moe": {DENSE, TWO_CALLS},
    "kimi-k25": {"latent attention"},
    "lara-mini": {TWO_CALLS, LINEAR, "no RoPE"},
    "qwen3-omni-moe": {ONE_CALL},
    "qwen3-vl-moe": {ONE_CALL},
    "sarvam-mla": {"latent attention"},
    "sarvam-moe": {DENSE, TWO_CALLS},
}
"""The same for the families in files of their own, by the name of the file."""


def _reasons(theirs: Any) -> set[str]:
    """Why the layers of a model of transformers do not decode in C."""
    recipe = config_of({"run": {"dtype": "float32", "kernels": "c"}, "data": {"kind": "synthetic"}})
    cfg = replace(recipe, model=parse_model_config(theirs.to_dict(), Path("folder")))
    stage = build_model(cfg)
    apply_kernels(stage, select_kernels(cfg, CPU))
    ways = set(map(_way, stage.layers.values()))
    if ways & {ONE_CALL, TWO_CALLS, DENSE} and not supports_fused_head(stage.head, stage.kernels.decode):
        ways.add(HEAD)
    return ways


def _way(block: Block) -> str:
    if reason := fused_unsupported_reason(block):
        return reason
    weights = layer_weights(block, torch.empty(0))
    if weights.router is None:
        return DENSE
    return TWO_CALLS if weights.routing is None else ONE_CALL


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
