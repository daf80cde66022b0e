"""A small model of each family, with every layer kind that its config.json can state."""

from moefold.config.model import ModelConfig
from moefold.convert.families.config_fields import (
    Constants,
    GatedSharedExpert,
    HunyuanSharedExpert,
    Renamed,
    SharedExperts,
)
from moefold.convert.families.families import FAMILIES
from moefold.convert.families.layer_fields import (
    ExpertLayerRange,
    FirstKDense,
    MlpLayerTypes,
    SlidingWindowLayers,
    joined_layers,
)
from tests.models import model_of


def model_of_family(family: str) -> ModelConfig:
    sizes = {
        "layers": 3,
        "hidden_size": 48,
        "attention.num_heads": 6,
        "attention.num_kv_heads": 3,
        "attention.head_dim": 8,
    }
    sizes |= {
        "ffn.moe.num_experts": 6,
        "rope.theta": 123.0,
        "norm.eps": 1e-4,
        "init_std": 0.1,
        "ffn.dense.intermediate_size": 96,
    }
    if family in ("llama", "qwen2", "qwen3"):
        sizes["layers.ffn"] = "dense"
    if family == "gpt_oss":
        sizes |= {"rope.scaling": "yarn", "rope.scaling.factor": 2.0}
    if family == "deepseek_v3":
        sizes["mtp_layers"] = 2
    if family == "longcat_flash":
        sizes |= {
            "layers": 4,
            "layers.ffn": ["moe", "dense"] * 2,
            "ffn.moe.shortcut": True,
            "ffn.moe.shared.intermediate_size": 96,
        }
        sizes |= {"ffn.moe.zero_experts": 5, "attention.q_lora_rank": 8}
    fields = FAMILIES[family].config_fields
    if any(isinstance(entry, GatedSharedExpert) for entry in fields):
        sizes |= {"ffn.moe.shared.intermediate_size": 12, "ffn.moe.shared.gate": True}
    for entry in fields:
        sizes |= entry.values if isinstance(entry, Constants) else {}
        sizes |= {entry.key: 32} if isinstance(entry, Renamed) and entry.minimum == 1 and entry.key != "layers" else {}
    if any(isinstance(entry, SharedExperts) for entry in fields):
        sizes["ffn.moe.shared.intermediate_size"] = 1024
    if any(isinstance(entry, HunyuanSharedExpert) for entry in fields):
        sizes["ffn.moe.shared.intermediate_size"] = 512
    if any(isinstance(entry, FirstKDense | MlpLayerTypes | ExpertLayerRange) for entry in fields):
        sizes["layers.ffn"] = ["dense", "moe", "moe"]
    windows = [entry.full_layers for entry in fields if isinstance(entry, SlidingWindowLayers)]
    if windows:
        sizes |= {"layers.attention": ["window", "full", "window"], "sliding_window": 5}
    if windows not in ([], ["rope"]):
        sizes["layers.position"] = ["rope", "nope", "rope"]
    return model_of(joined_layers(sizes))
