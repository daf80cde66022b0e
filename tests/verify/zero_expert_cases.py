"""Zero-computation experts that must equal the oracle: under every axis, dispatcher and way to drop tokens."""

from tests.verify.cases import Case, Settings, cases, few

ZERO = {"ffn.moe.zero_experts": 3, "ffn.moe.router.softmax": "pre", "ffn.moe.router.scaling_factor": 1.5}
"""Eight experts and three without computation."""
SIGMOID = {"ffn.moe.router": "sigmoid", "ffn.moe.router.expert_bias": True}
BIASED = {"ffn.moe.router.expert_bias": True, "ffn.moe.active_experts": 1.6}
LOAN = {"choice": "skewed", "llep_min_tokens": 1, "llep_threshold": 1.0, "llep_capacity": 1.0}


def _zero(
    mapping: Settings, model: Settings | None = None, moe: Settings | None = None, train: Settings | None = None
) -> Settings:
    return few({"model": ZERO | (model or {}), "moe": moe or {}, "train": train or {}, **mapping})


MAPPED = [
    _zero(mapping, model, {"aux_loss": 0.1, "z_loss": 0.01} | moe, train)
    for mapping, model, moe, train in (
        ({"world_size": 4, "tp": 2, "cp": 2, "ep": 4}, BIASED, {}, {}),
        ({"world_size": 1}, {"ffn.moe.shared.intermediate_size": 16}, {"aux_kind": "sequence"}, {}),
        (
            {"world_size": 2, "etp": 2},
            {"ffn.moe.latent_size": 16, "ffn.moe.top_k": 4},
            {"aux_kind": "last_global_batch"},
            {},
        ),
        ({"world_size": 2, "ep": 2, "dispatcher": "allgather"}, SIGMOID, {}, {}),
        ({"world_size": 4, "ep": 4, "dispatcher": "dedup_alltoall", "zero": 3}, {}, {}, {"recompute": ("moe",)}),
        ({"world_size": 2, "ep": 2, "dispatcher": "leastloaded"}, {}, LOAN, {}),
        ({"world_size": 4, "ep": 2, "etp": 2}, {}, {"capacity_factor": 0.75, "pad_to_capacity": True}, {}),
        ({"world_size": 4, "cp": 2, "ep": 2}, {}, {"capacity_factor": 0.5, "drop_policy": "position"}, {}),
        ({"world_size": 4, "pp": 2, "ep": 2, "overlap_experts": True}, {"mtp_layers": 1}, {}, {}),
        ({"world_size": 4, "pp": 2, "ep": 2, "schedule": "zero-bubble"}, {"ffn.moe.bias": True}, {}, {}),
        ({"world_size": 2, "tp": 2, "zero": 3}, {}, {"choice": "sinkhorn"}, {"recompute": ("layer",)}),
        ({"world_size": 2, "cp": 2}, {"ffn.moe.router.expert_bias": True}, {"choice": "quantile"}, {}),
        ({"world_size": 2, "ep": 2}, {"ffn.moe.probs_on_input": True}, {"dispatch_precision": "fp8-blockwise"}, {}),
        ({"world_size": 2, "ep": 2}, {}, {"weight_in_expert": True, "input_jitter": 0.1}, {}),
        ({"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4}, BIASED, {}, {}),
    )
]
CASES: list[Case] = cases("zero experts", [], MAPPED)
