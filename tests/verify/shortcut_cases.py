"""LongCat-Flash's layers that must equal the oracle: shortcut-connected MoE, scaled latents, zero experts."""

from tests.verify.cases import Case, Settings, cases, few
from tests.verify.recipes import LATENT

LONGCAT = LATENT | {
    "attention.scale_latents": True,
    "layers": 4,
    "layers.ffn": "moe, dense",
    "ffn.moe.shortcut": True,
    "ffn.moe.shared.intermediate_size": 16,
    "ffn.moe.zero_experts": 3,
    "ffn.moe.router.softmax": "pre",
    "ffn.moe.router.scaling_factor": 1.5,
    "ffn.moe.router.expert_bias": True,
    "vocab_size": 8,
}
"""Four layers: two pairs of an MoE layer and a dense one."""


def _longcat(
    mapping: Settings, model: Settings | None = None, train: Settings | None = None, **more: object
) -> Settings:
    return few({"model": LONGCAT | (model or {}), "train": train or {}, **more, **mapping})


MAPPED = [
    _longcat(mapping, model, train, data={"document_end": 2})
    for mapping, model, train in (
        ({"world_size": 2, "tp": 2, "ep": 2}, {}, {}),
        ({"world_size": 4, "tp": 2, "pp": 2, "ep": 2}, {}, {}),
        ({"world_size": 1}, {"attention.q_lora_rank": 0, "residual.multiplier": 0.7}, {}),
        ({"world_size": 2, "zero": 3, "ep": 2}, {"mtp_layers": 1}, {"recompute": ("layer",)}),
        (
            {"world_size": 2, "cp": 2},
            {"attention": "gqa", "attention.scale_latents": False},
            {"recompute": ("moe", "norms")},
        ),
        ({"world_size": 4, "cp": 4, "ep": 4, "dispatcher": "allgather"}, {"ffn.moe.shared.gate": True}, {}),
        (
            {"world_size": 2, "etp": 2, "zero": 2},
            {"ffn.moe.latent_size": 16},
            {"recompute": ("shared_experts", "mla_up")},
        ),
        ({"world_size": 4, "pp": 2, "ep": 2, "overlap_experts": True}, {}, {}),
        ({"world_size": 2, "ep": 2, "overlap_experts": True}, {}, {"recompute": ("moe",)}),
        ({"world_size": 4, "pp": 2, "ep": 2, "schedule": "zero-bubble"}, {}, {}),
        ({"world_size": 4, "pp": 2, "tp": 2, "schedule": "interleaved", "virtual_stages": 2}, {"layers": 8}, {}),
        ({"world_size": 2, "pp": 2, "pipeline_layout": "Ettttt|tL"}, {"layers": 6, "layers.ffn": "moe, 2 dense"}, {}),
        ({"world_size": 2, "ep": 2}, {}, {"offload": ("moe",), "offload_min_kib": 0, "offload_waits": True}),
        ({"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4}, {}, {}),
    )
]
CASES: list[Case] = cases("shortcut", MAPPED[:1], MAPPED[1:])
