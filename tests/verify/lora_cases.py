"""Low-rank adapters that must equal the oracle: of attention, dense, shared and routed experts, under every axis."""

from moefold.config.base.part import make_part
from tests.verify.cases import Case, Settings, cases, few
from tests.verify.phi_cases import PHI
from tests.verify.recipes import LATENT
from tests.verify.sparse_cases import SPARSE_LATENT

LORA = {"rank": 2, "alpha": 3.0}
MIXED = {"layers.ffn": "dense, moe", "ffn.moe.shared.intermediate_size": 16}
"""A dense layer and an MoE layer with a shared expert."""
GPT_OSS = {
    "attention.qkv_bias": True,
    "attention.output_bias": True,
    "attention.sinks": True,
    "ffn.moe.bias": True,
    "ffn.moe.activation": "clamped_swiglu",
    "ffn.moe.activation.limit": 0.3,
}


def lora(
    mapping: Settings, model: Settings | None = None, adapters: Settings | None = None, **more: object
) -> Settings:
    """Return a recipe with adapters of every matrix, unless `adapters` names others."""
    return few({"model": MIXED | (model or {}), "lora": LORA | (adapters or {}), **more, **mapping})


MAPPED = [
    lora({"world_size": 2, "tp": 2, "ep": 2, "zero": 1}),
    lora({"world_size": 4, "tp": 2, "ep": 2, "zero": 1}),
    lora({"world_size": 2, "cp": 2, "zero": 3}, LATENT),
    lora({"world_size": 2, "etp": 2, "zero": 3}, GPT_OSS),
    lora({"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4}),
    lora({"world_size": 2, "tp": 2}),
    lora({"world_size": 2, "cp": 2}),
    lora({"world_size": 2, "pp": 2}),
    lora({"world_size": 4, "ep": 4}),
    lora({"world_size": 2, "etp": 2, "tp": 2}),
    lora({"world_size": 2, "zero": 3}),
    lora({"world_size": 2, "zero": 0}),
    lora({"world_size": 2, "zero": 2}),
    lora({"world_size": 4, "tp": 4}),
    lora({"world_size": 4, "tp": 2, "etp": 4}, LATENT),
    lora({"world_size": 4, "tp": 2, "etp": 2, "zero": 2}, {"attention.gate": {}, "attention.num_kv_heads": 1}),
    lora({"world_size": 2, "tp": 2}, LATENT | {"attention.q_lora_rank": 0, "attention.gate": {}}),
    lora({"world_size": 2, "tp": 2}, LATENT | {"attention.gate": {}}),
    lora({"world_size": 4, "etp": 2, "ep": 2}, {"ffn.moe.probs_on_input": True}),
    lora({"world_size": 2, "ep": 2}, {"mtp_layers": 1, "tie_embeddings": True, "ffn.moe.latent_size": 16}),
    lora({"world_size": 4, "pp": 2, "tp": 2, "schedule": "zero-bubble"}),
    lora({"world_size": 2, "pp": 2, "schedule": "dualpipev", "virtual_stages": 2}, {"layers": 4}),
    lora({"world_size": 4, "pp": 2, "ep": 2, "overlap_experts": True}),
    lora({"world_size": 2, "tp": 2, "overlap_tp": True}),
    lora({"world_size": 2, "pp": 2, "schedule": "zbv", "virtual_stages": 2}, {"layers": 4}),
    lora({"world_size": 2, "tp": 2}, LATENT | {"attention.indexer.top_k": 4, "attention.indexer.head_dim": 8}),
    lora({"world_size": 2, "tp": 2, "ep": 2}, {"layers.attention": "linear, full", "linear_attention": "gla"}),
    lora({"world_size": 2, "ep": 2, "dispatcher": "allgather"}, moe={"capacity_factor": 0.75}),
    lora({"world_size": 4, "tp": 2, "etp": 2, "zero": 3}, PHI, train={"recompute": ("layer",)}),
    lora(
        {"world_size": 2, "tp": 2, "ep": 2},
        SPARSE_LATENT | {"layers": 4, "layers.selection": "own, shared", "mtp_layers": 1},
    ),
]
TARGETS = [
    lora({"world_size": 2, "tp": 2}, adapters={"targets": ("wq", "dense_mlp.w_down")}),
    lora({"world_size": 2, "etp": 2}, adapters={"targets": ("experts.w_up",)}),
    lora({"world_size": 2, "tp": 2}, LATENT, {"targets": ("wkv_up", "wo")}),
]
TRAINED = [
    lora({"world_size": 4, "tp": 2, "ep": 2}, train={"optimizer": "muon", "recompute": ("layer",)}),
    lora({"world_size": 2, "zero": 1}, train={"optimizer": make_part("optimizer", "muon", groups=("experts",))}),
    lora({"world_size": 2, "ep": 2}, LATENT, train={"recompute": ("mla_up", "moe")}),
    lora({"world_size": 2, "ep": 2}, train={"offload": ("moe",), "offload_min_kib": 0}),
    lora({"world_size": 2, "tp": 2}, {"vocab_size": 8}, train={"micro_batch_size": 2}, data={"document_end": 2}),
]
CASES: list[Case] = cases("adapters", [MAPPED[3]], [*MAPPED[:3], *MAPPED[4:], *TARGETS, *TRAINED], steps=3)
