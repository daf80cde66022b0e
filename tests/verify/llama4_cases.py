"""Llama 4's layers that must equal the oracle: attention chunks, layers without RoPE, routing weights on inputs."""

from tests.verify.cases import Case, Settings, cases, few

LLAMA4 = {
    "layers.attention": "chunk, full",
    "attention_chunk_size": 5,
    "layers.position": "rope, nope",
    "rope.interleaved": True,
    "attention.temperature.scale": 0.5,
    "attention.temperature.tokens": 3,
    "attention.qk_norm": {},
    "attention.qk_norm.weight": False,
    "attention.qk_norm.after_rope": True,
    "attention.qk_norm.in_nope": False,
    "ffn.moe.router": "sigmoid",
    "ffn.moe.router.normalize": False,
    "ffn.moe.probs_on_input": True,
    "ffn.moe.shared.intermediate_size": 16,
    "layers.ffn": "moe, dense",
    "vocab_size": 8,
}
"""Two layers of different kinds, or as many as there are pipeline stages."""
DOCUMENTS = {"document_end": 2}
TWO_SAMPLES = {"micro_batch_size": 2, "global_batch_size": 8}


def _llama4(
    mapping: Settings, model: Settings | None = None, train: Settings | None = None, **more: object
) -> Settings:
    return few({"model": LLAMA4 | (model or {}), "train": train or {}, **more, **mapping})


PACKED = [
    _llama4(mapping, model, TWO_SAMPLES | train, data=DOCUMENTS)
    for mapping, model, train in (
        ({"world_size": 2, "cp": 2, "ep": 2}, {}, {}),
        ({"world_size": 4, "tp": 2, "cp": 2, "ep": 2}, {}, {}),
        ({"world_size": 2, "cp": 2, "context": "allgather"}, {"ffn.moe.top_k": 1, "layers.attention": "chunk"}, {}),
        ({"world_size": 2, "cp": 2, "context": "ulysses"}, {}, {"recompute": ("layer",)}),
        ({"world_size": 4, "cp": 4, "ep": 4}, {"layers.attention": "window, chunk", "sliding_window": 3}, {}),
        (
            {"world_size": 2, "tp": 2, "zero": 3},
            {"attention.qk_norm.in_nope": True},
            {"recompute": ("norms", "core_attention", "moe")},
        ),
        ({"world_size": 1}, {"mtp_layers": 1, "attention.sinks": True}, {}),
        ({"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4}, {}, {}),
    )
]
WHOLE = [
    _llama4(mapping, model, train, moe=moe)
    for mapping, model, train, moe in (
        ({"world_size": 2, "cp": 2}, {"attention_chunk_size": 3}, {}, {}),
        ({"world_size": 4, "cp": 4, "context": "allgather"}, {"attention_chunk_size": 4}, {}, {}),
        ({"world_size": 4, "cp": 4, "context": "ulysses"}, {"attention.num_kv_heads": 4}, {}, {}),
        ({"world_size": 2, "etp": 2, "dispatcher": "allgather"}, {"ffn.moe.bias": True}, {}, {}),
        ({"world_size": 4, "pp": 2, "ep": 2, "schedule": "zero-bubble"}, {}, {}, {}),
        ({"world_size": 4, "pp": 2, "ep": 2, "overlap_experts": True}, {}, {}, {}),
        ({"world_size": 4, "ep": 4, "dispatcher": "dedup_alltoall", "zero": 3}, {}, {"recompute": ("moe",)}, {}),
        (
            {"world_size": 2, "ep": 2, "dispatcher": "leastloaded"},
            {},
            {},
            {"choice": "skewed", "llep_min_tokens": 1, "llep_threshold": 1.0, "llep_capacity": 1.0},
        ),
        (
            {"world_size": 4, "ep": 2, "etp": 2},
            {"ffn.moe.latent_size": 16},
            {},
            {"capacity_factor": 0.75, "pad_to_capacity": True, "drop_policy": "position"},
        ),
        ({"world_size": 2, "ep": 2}, {"ffn.moe.top_k": 1}, {}, {"dispatch_precision": "fp8-blockwise"}),
    )
]
CASES: list[Case] = [
    *cases("llama 4 documents", PACKED[:1], PACKED[1:]),
    *cases("llama 4", [], WHOLE),
]
