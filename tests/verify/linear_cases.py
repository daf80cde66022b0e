"""Layers of kind L that must equal the oracle: hybrids under every axis, with packed documents and recomputation."""

from tests.verify.cases import Case, Settings, cases, few

HYBRID = {
    "layers.attention": "linear, full",
    "linear_attention.num_key_heads": 4,
    "linear_attention.num_value_heads": 8,
    "linear_attention.key_head_dim": 3,
    "linear_attention.value_head_dim": 5,
    "linear_attention.conv_kernel": 3,
}
"""Four layers, two of them linear, so that each of two pipeline stages has both kinds."""
QWEN3_NEXT = {
    "attention.gate": {},
    "norm.zero_centered": True,
    "attention.qk_norm": {},
    "attention.rope_fraction": 0.5,
    "ffn.moe.shared.intermediate_size": 16,
    "ffn.moe.shared.gate": True,
    "ffn.moe.router.softmax": "pre",
}
DOCUMENTS = {"document_end": 2}
TWO_SAMPLES = {"micro_batch_size": 2, "global_batch_size": 8}
AXES = (
    {"world_size": 2, "cp": 2, "tp": 1},
    {"world_size": 4, "tp": 2, "pp": 2, "ep": 2},
    {"world_size": 2, "zero": 3},
    {"world_size": 1},
    {"world_size": 2, "tp": 2},
    {"world_size": 2, "pp": 2},
    {"world_size": 2, "etp": 2, "zero": 2},
    {"world_size": 4, "cp": 4},
    {"world_size": 4, "cp": 4, "context": "allgather", "zero": 3},
    {"world_size": 4, "cp": 4, "context": "ulysses"},
    {"world_size": 4, "ep": 4},
    {"world_size": 4, "tp": 4, "etp": 2},
    {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4},
    {"world_size": 8, "tp": 2, "cp": 4, "ep": 4, "etp": 2, "zero": 3},
    {"world_size": 4, "pp": 2, "virtual_stages": 2, "schedule": "interleaved", "ep": 2},
    {"world_size": 2, "pp": 2, "schedule": "zero-bubble"},
    {"world_size": 4, "pp": 2, "ep": 2, "overlap_experts": True},
    {"world_size": 2, "tp": 2, "overlap_tp": True},
)


def _hybrid(
    mapping: Settings, model: Settings | None = None, train: Settings | None = None, **more: object
) -> Settings:
    return few({"model": HYBRID | (model or {}), "train": train or {}, **more, **mapping})


PACKED = [
    _hybrid(mapping, {"vocab_size": 8, **model}, TWO_SAMPLES | train, data=DOCUMENTS)
    for mapping, model, train in (
        ({"world_size": 2, "cp": 2}, QWEN3_NEXT | {"mtp_layers": 1, "layers.attention": "full, linear"}, {}),
        ({"world_size": 2, "cp": 2}, {}, {}),
        ({"world_size": 1}, {}, {}),
        ({"world_size": 4, "cp": 4, "context": "ulysses"}, {}, {}),
        ({"world_size": 4, "tp": 2, "cp": 2, "zero": 3}, {"mtp_layers": 1, "layers.attention": "full, linear"}, {}),
        ({"world_size": 4, "pp": 2, "cp": 2}, {"layers.attention": "linear", "layers.ffn": "dense, moe"}, {}),
        ({"world_size": 2, "cp": 2, "zero": 3}, {}, {"recompute": ("layer",)}),
        ({"world_size": 2, "tp": 2}, {}, {"recompute": ("norms", "core_attention", "moe")}),
        ({"world_size": 2, "tp": 2}, QWEN3_NEXT, {}),
        ({"world_size": 4, "cp": 2, "pp": 2, "zero": 3}, QWEN3_NEXT | {"mtp_layers": 1}, {}),
        ({"world_size": 2, "pp": 2}, {"layers.attention": "full, linear", "layers": 3}, {}),
    )
]
KDA = [
    _hybrid(
        mapping,
        {"linear_attention": "kda", "layers.attention": "linear", "vocab_size": 8},
        TWO_SAMPLES | train,
        data=DOCUMENTS,
    )
    for mapping, train in (
        ({"world_size": 2, "tp": 2}, {"optimizer": "muon"}),
        ({"world_size": 4, "tp": 2, "cp": 2, "zero": 3}, {}),
        ({"world_size": 4, "pp": 2, "cp": 2, "zero": 2}, {"recompute": ("layer",)}),
        ({"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4}, {}),
        ({"world_size": 2, "pp": 2, "schedule": "zero-bubble"}, {}),
        ({"world_size": 4, "cp": 4, "context": "ulysses"}, {}),
    )
]
LING = {
    "linear_attention": "kda",
    "linear_attention.full_rank_gates": True,
    "linear_attention.decay_bound": -5.0,
    "attention": "mla",
    "attention.q_lora_rank": 6,
    "attention.gate": {},
    "attention.gate.per": "head",
}
KINDS = {
    "gla": {"linear_attention": "gla", "linear_attention.gate_rank": 3},
    "convolution": {
        "linear_attention": "short_convolution",
        "linear_attention.bias": True,
        "attention.gate": {},
        "attention.gate.per": "head",
    },
    "bounded": LING,
}
KIND_AXES: tuple[tuple[str, Settings, Settings, Settings], ...] = (
    ("gla", {"world_size": 2, "cp": 2}, {}, {}),
    ("gla", {"world_size": 4, "tp": 2, "cp": 2, "zero": 3}, {}, {}),
    ("convolution", {"world_size": 4, "cp": 2, "pp": 2}, {}, {}),
    ("bounded", {"world_size": 2, "tp": 2}, {}, {}),
    ("bounded", {"world_size": 4, "tp": 2, "cp": 2}, {}, {}),
    ("gla", {"world_size": 2, "pp": 2, "schedule": "zero-bubble"}, {"layers.attention": "linear"}, {}),
    ("gla", {"world_size": 4, "cp": 4, "context": "ulysses"}, {}, {"recompute": ("layer",)}),
    ("gla", {"world_size": 4, "cp": 4, "context": "allgather"}, {}, {}),
    ("gla", {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4}, {}, {}),
    ("gla", {"world_size": 4, "tp": 4, "etp": 2}, {"layers.attention": "linear"}, {"optimizer": "muon"}),
    ("gla", {"world_size": 2, "ep": 2, "zero": 2}, {"mtp_layers": 1, "layers.attention": "full, linear"}, {}),
    ("convolution", {"world_size": 4, "tp": 2, "cp": 2, "zero": 3}, {"layers.attention": "linear"}, {}),
    ("convolution", {"world_size": 2, "pp": 2, "schedule": "zero-bubble"}, {"layers.attention": "linear"}, {}),
    ("convolution", {"world_size": 4, "cp": 4, "context": "ulysses"}, {}, {"recompute": ("layer",)}),
    ("convolution", {"world_size": 4, "cp": 4, "context": "allgather"}, {}, {}),
    ("convolution", {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4}, {}, {}),
    ("convolution", {"world_size": 4, "tp": 2, "ep": 2, "etp": 2}, {}, {"optimizer": "muon"}),
    ("convolution", {"world_size": 2, "zero": 3}, {"mtp_layers": 1, "layers.attention": "full, linear"}, {}),
    ("bounded", {"world_size": 2, "pp": 2, "schedule": "zero-bubble"}, {}, {}),
    ("bounded", {"world_size": 4, "tp": 2, "zero": 3}, {"attention.q_lora_rank": 0}, {"recompute": ("layer",)}),
    ("bounded", {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4}, {"attention.gate.per": "dim"}, {}),
    ("bounded", {"world_size": 2, "tp": 2, "overlap_tp": True}, {"mtp_layers": 1}, {"optimizer": "muon"}),
)
OTHER_KINDS = [
    _hybrid(mapping, {"vocab_size": 8, **KINDS[kind], **model}, TWO_SAMPLES | train, data=DOCUMENTS)
    for kind, mapping, model, train in KIND_AXES
]
FAST_KINDS = [OTHER_KINDS[0], OTHER_KINDS[3], OTHER_KINDS[12]]
MUON = [_hybrid(mapping, train={"optimizer": "muon"}) for mapping in ({"world_size": 4, "tp": 2, "ep": 2, "zero": 3},)]
OFFLOAD = [
    _hybrid({"world_size": 2, "cp": 2}, train={"offload": ("layer",), "offload_min_kib": 0, "offload_waits": True})
]
MAPPED = [_hybrid(mapping) for mapping in AXES]

CASES: list[Case] = [
    *cases("linear attention", PACKED[:1], [*PACKED[1:], *MAPPED, *MUON, *OFFLOAD]),
    *cases("Kimi Delta Attention", KDA[:1], KDA[1:]),
    *cases("other layers of kind L", FAST_KINDS, [case for case in OTHER_KINDS if case not in FAST_KINDS]),
]
