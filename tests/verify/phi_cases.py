"""Phi-3.5-MoE's layers that must equal the oracle: LayerNorm, SparseMixer, LongRoPE, a bias of the output head."""

from tests.verify.cases import Case, Settings, cases, few

PHI = {
    "norm": "layernorm",
    "head_bias": True,
    "attention.qkv_bias": True,
    "attention.output_bias": True,
    "ffn.moe.router.softmax": "sparsemixer",
    # Several experts are close to the best one.
    "ffn.moe.router.softmax.jitter": 0.6,
    "rope.scaling": "longrope",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_seq_len": 8,
    "rope.scaling.short_factors": (1.0, 1.3),
    "rope.scaling.long_factors": (1.5, 4.0),
    "rope.scaling.long_mscale": 1.2,
    "vocab_size": 8,
}
"""Samples are longer than the original context."""


def phi(mapping: Settings, model: Settings | None = None, train: Settings | None = None, **more: object) -> Settings:
    """Return a recipe of Phi-3.5-MoE with small batches."""
    return few({"model": PHI | (model or {}), "train": train or {}, **more, **mapping})


SHORT = {"rope.scaling.original_seq_len": 64, "rope.scaling.short_mscale": 0.0}
MAPPED = [
    phi(mapping, model, train, **more)
    for mapping, model, train, more in (
        ({"world_size": 4, "tp": 2, "pp": 2, "ep": 2}, {}, {"loss_chunk": 5}, {}),
        ({"world_size": 1}, SHORT, {}, {"data": {"document_end": 2}}),
        (
            {"world_size": 2, "tp": 2},
            {"tie_embeddings": True, "layers.position": "rope, nope"},
            {},
            {"moe": {"input_jitter": 0.1}},
        ),
        ({"world_size": 2, "cp": 2}, {}, {}, {"data": {"document_end": 2}}),
        ({"world_size": 2, "pp": 2}, {"mtp_layers": 1}, {"recompute": ("norms", "moe")}, {}),
        ({"world_size": 4, "ep": 4}, {"ffn.moe.top_k": 3}, {}, {"moe": {"capacity_factor": 1.0}}),
        ({"world_size": 2, "etp": 2}, {"residual": "both"}, {"loss_chunk": 3}, {}),
        ({"world_size": 2, "zero": 3}, {"logits_divisor": 3.0}, {"recompute": ("layer",)}, {}),
        ({"world_size": 4, "tp": 2, "zero": 3}, {"mtp_layers": 1, "residual": "post"}, {"loss_chunk": 5}, {}),
        ({"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4}, {}, {}, {}),
        ({"world_size": 2, "ep": 2}, {"ffn.moe.top_k": 1, "ffn.moe.router.softmax.samples": False}, {}, {}),
        ({"world_size": 2, "pp": 2, "schedule": "zero-bubble"}, {}, {}, {}),
        ({"world_size": 2, "ep": 2, "overlap_experts": True}, {}, {"offload": ("moe",), "offload_min_kib": 0}, {}),
    )
]
CASES: list[Case] = cases("phi", MAPPED[2:3], [*MAPPED[:2], *MAPPED[3:]])
