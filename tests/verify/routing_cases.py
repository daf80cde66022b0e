"""Routers, losses and drop rules, and the mappings that they are tested on."""

from moefold.config.base.part import make_part

V3 = {
    "ffn.moe.router": "sigmoid",
    "ffn.moe.router.expert_bias": True,
    "ffn.moe.router.scaling_factor": 2.5,
    "ffn.moe.router.num_groups": 4,
    "ffn.moe.router.top_groups": 2,
}
KINDS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "deepseek-v3": (V3, {"aux_kind": "sequence", "bias_update_rate": 0.05}),
    "deepseek-v2": (
        {"ffn.moe.router.softmax": "pre", "ffn.moe.router.num_groups": 4, "ffn.moe.router.top_groups": 2},
        {},
    ),
    "sigmoid": ({"ffn.moe.router": "sigmoid", "ffn.moe.router.normalize": False}, {"z_loss": 0.1}),
    "sqrtsoftplus": ({"ffn.moe.router": "sqrtsoftplus"}, {}),
    "softmax with bias": ({"ffn.moe.router.expert_bias": True}, {"bias_update_rate": 0.02, "aux_loss": 0.0}),
    "global batch": ({}, {"aux_kind": "global_batch", "aux_loss": 0.5}),
    "last global batch": ({}, {"aux_kind": "last_global_batch", "aux_loss": 0.5, "capacity_factor": 1.0}),
    "sinkhorn": (
        {"ffn.moe.router": "sigmoid"},
        {"choice": make_part("choice", "sinkhorn", iterations=5), "aux_loss": 0.0},
    ),
    "quantile": ({"ffn.moe.router": "sigmoid", "ffn.moe.router.expert_bias": True}, {"choice": "quantile"}),
    "quantile of softmax": (
        {"ffn.moe.router.expert_bias": True, "ffn.moe.router.softmax": "pre"},
        {"choice": "quantile"},
    ),
    "sparsemixer without noise": (
        {"ffn.moe.router.softmax": "sparsemixer", "ffn.moe.router.softmax.samples": False},
        {},
    ),
    "jitter": ({}, {"input_jitter": 0.3}),
    "round robin": ({}, {"choice": "round_robin"}),
    "skewed": ({}, {"choice": make_part("choice", "skewed", share=0.7), "capacity_factor": 1.0}),
    "drop at evaluation": ({"ffn.moe.router": "sigmoid"}, {"capacity_factor": 2.0, "eval_capacity_factor": 0.6}),
    "drop positions": ({}, {"capacity_factor": 0.75, "drop_policy": "position", "eval_capacity_factor": 0.0}),
    "drop on each rank": ({}, {"capacity_factor": 0.75, "drop_scope": "sub_sequence", "pad_to_capacity": True}),
}
MAPPINGS: list[dict[str, object]] = [
    {"world_size": 2, "tp": 2, "ep": 2},
    {"world_size": 4, "tp": 2, "cp": 2, "ep": 4},
    {"tp": 2, "cp": 2, "pp": 2, "ep": 4},
    {"ep": 8, "zero": 2},
    {"tp": 2, "cp": 2, "ep": 8},
    {"pp": 2, "ep": 2, "etp": 2, "zero": 3},
    {"tp": 4, "cp": 2, "ep": 2, "etp": 4, "dispatcher": "allgather"},
    {"cp": 4, "ep": 4, "context": "allgather", "zero": 0},
    {"tp": 2, "etp": 2, "ep": 4, "dispatcher": "allgather"},
    {"cp": 2, "pp": 2, "ep": 4, "context": "ulysses"},
    {"tp": 4, "etp": 8},
    {"pp": 2, "schedule": "interleaved", "virtual_stages": 2, "ep": 2, "tp": 2},
    {"cp": 2, "tp": 2, "pp": 2, "ep": 2, "schedule": "gpipe"},
    {"cp": 8, "ep": 2, "etp": 2, "zero": 3},
    {"pp": 4, "tp": 2, "etp": 2},
]
