"""Attention kinds, losses, precision, optimizer, overlap, recomputation and offload that must equal the oracle."""

from collections.abc import Callable
from itertools import product

from moefold.config.base.part import make_part
from tests.verify.cases import BATCH_8, BATCH_16, PIPELINE_AXES, Case, Settings, cases, few
from tests.verify.recipes import LATENT

TIED = {"tie_embeddings": True}
SHARED = {"ffn.moe.shared.intermediate_size": 16, "ffn.moe.shared.gate": True}
TWO_SAMPLES = {"micro_batch_size": 2, "global_batch_size": 8}
DOCUMENTS = {"document_end": 2}
"""Documents of about eight tokens, with a vocabulary of 8."""
LOAN = {"choice": "skewed", "llep_min_tokens": 1, "llep_threshold": 1.0, "llep_capacity": 1.0}

# Packed documents.

MLA = {
    "attention": "mla",
    "attention.q_lora_rank": 8,
    "attention.kv_lora_rank": 8,
    "attention.qk_nope_head_dim": 4,
    "attention.qk_rope_head_dim": 2,
    "attention.v_head_dim": 4,
}
DOCUMENT_MODELS = ({"mtp_layers": 2}, MLA, MLA | {"layers.attention": "window, full", "sliding_window": 5})
DOCUMENT_MAPPINGS = (
    {"world_size": 2, "tp": 2},
    {"world_size": 2, "cp": 2},
    {"world_size": 2, "cp": 2, "context": "allgather"},
    {"world_size": 2, "cp": 2, "context": "ulysses"},
    {"world_size": 4, "tp": 2, "pp": 2, "schedule": "interleaved", "virtual_stages": 2},
    {"world_size": 1},
    {"world_size": 2, "pp": 2},
    {"world_size": 4, "cp": 4, "ep": 4},
    {"world_size": 2},
)


def _documents(model: Settings, train: Settings, mapping: Settings) -> Settings:
    return {"model": model | {"vocab_size": 8}, "train": train, "data": DOCUMENTS, **mapping}


DOCUMENT_KINDS = [
    _documents(model, TWO_SAMPLES, {"world_size": 2, **mapping})
    for model, mapping in product(DOCUMENT_MODELS, ({"cp": 2}, {"tp": 2, "context": "ulysses"}, {"pp": 2}))
]
DOCUMENTS_MAPPED = [_documents({"attention.qk_norm": {}}, TWO_SAMPLES, mapping) for mapping in DOCUMENT_MAPPINGS]
DOCUMENTS_FOLDED = [
    _documents({}, BATCH_8, {"world_size": 8, "context": context, **degrees})
    for degrees in ({"tp": 2, "cp": 2, "pp": 2, "ep": 4}, {"cp": 4, "pp": 2, "ep": 2, "etp": 2})
    for context in ("ring", "allgather", "ulysses")
]

# gpt-oss: sinks, windows, biases and the clamped gate.

GPT_OSS_MODEL = {
    "attention.qkv_bias": True,
    "attention.output_bias": True,
    "attention.sinks": True,
    "layers.attention": "window, full",
    "sliding_window": 5,
    "ffn.moe.bias": True,
    "ffn.moe.activation": "clamped_swiglu",
    # Low, so that much is clamped.
    "ffn.moe.activation.limit": 0.3,
    "ffn.moe.router.bias": True,
    "rope.scaling": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_seq_len": 8,
    "rope.scaling.truncate": False,
    "rope.theta": 1000.0,
    "vocab_size": 8,
}


def gpt_oss(train: Settings | None = None, **settings: object) -> Settings:
    """Return a recipe of gpt-oss with two samples in a micro-batch."""
    return {"model": GPT_OSS_MODEL, "train": TWO_SAMPLES | (train or {}), **settings}


GPT_OSS_AXES = [
    gpt_oss(**mapping)
    for mapping in (
        {"world_size": 2, "tp": 2},
        {"world_size": 2, "pp": 2},
        {"world_size": 2, "etp": 2},
        {"world_size": 2, "ep": 2, "dispatcher": "allgather"},
        {"world_size": 2, "cp": 2, "context": "allgather"},
        {"world_size": 1},
        {"world_size": 4, "tp": 4, "ep": 2},
        {"world_size": 2, "cp": 2},
        {"world_size": 2, "cp": 2, "context": "ulysses"},
        {"world_size": 2, "etp": 2, "dispatcher": "allgather"},
        {"world_size": 2, "zero": 3},
    )
]
GPT_OSS_DOCUMENTS = [
    gpt_oss(data=DOCUMENTS, world_size=2, cp=2),
    *(
        gpt_oss(data=DOCUMENTS, world_size=4, tp=2, cp=2, ep=2, etp=2, context=context)
        for context in ("ring", "ulysses", "allgather")
    ),
]
GPT_OSS_LOANS = [
    gpt_oss(moe={**LOAN, "weight_in_expert": weighs_early}, dispatcher="leastloaded", **mapping)
    for mapping, weighs_early in (
        ({"world_size": 2, "ep": 2}, True),
        ({"world_size": 4, "ep": 2, "etp": 2}, True),
        ({"world_size": 4, "ep": 2, "etp": 2}, False),
        ({"world_size": 4, "ep": 4}, False),
    )
]
# By position: equal tokens in equal windows have equal scores, up to rounding.
GPT_OSS_DROPS = [
    gpt_oss(moe={"capacity_factor": 0.75, "pad_to_capacity": True, "drop_policy": "position"}, world_size=2, ep=2)
]
GPT_OSS_FOLDED = [
    gpt_oss({"seq_len": 32}, data=DOCUMENTS if context != "allgather" else {}, world_size=8, context=context, **degrees)
    for degrees in (
        {"tp": 2, "cp": 2, "pp": 2, "ep": 4},
        {"tp": 2, "cp": 4, "ep": 4, "etp": 2},
        {"tp": 4, "pp": 2, "ep": 2, "etp": 2, "zero": 3},
        {"cp": 8, "ep": 8},
    )
    for context in ("ring", "allgather", "ulysses")
    # Ulysses splits the 4 heads over the ranks of tp and cp.
    if context != "ulysses" or degrees.get("tp", 1) * degrees.get("cp", 1) <= 4
]

# Latent attention, and norms over all heads.

V2 = {
    "attention": "mla",
    "attention.kv_lora_rank": 6,
    "attention.qk_nope_head_dim": 4,
    "attention.qk_rope_head_dim": 2,
    "attention.v_head_dim": 5,
    "ffn.moe.router.softmax": "pre",
    "ffn.moe.router.num_groups": 4,
    "ffn.moe.router.top_groups": 2,
    "ffn.moe.router.scaling_factor": 2.0,
    "ffn.moe.shared.intermediate_size": 16,
    "layers.ffn": "dense, moe",
    "rope.scaling": "yarn",
    "rope.scaling.factor": 6.0,
    "rope.scaling.original_seq_len": 12,
    "rope.theta": 40.0,
    "rope.scaling.beta_fast": 2.0,
    "rope.scaling.beta_slow": 0.5,
    "rope.scaling.mscale": 0.7,
    "rope.scaling.mscale_all_dim": 1.2,
    "rope.interleaved": True,
}
V3 = {key: value for key, value in V2.items() if key != "ffn.moe.router.softmax"} | {
    "attention.q_lora_rank": 7,
    "attention.v_head_dim": 8,
    "ffn.moe.router": "sigmoid",
    "ffn.moe.router.expert_bias": True,
    "layers.ffn": "moe",
}
OLMOE = {"attention.qk_norm": {}, "attention.qk_norm.over": "all_heads", "ffn.moe.router.softmax": "pre"}
LATENT_AXES = (
    {"world_size": 2, "tp": 2},
    {"world_size": 2, "cp": 2, "context": "ring"},
    {"world_size": 2, "pp": 2, "zero": 3},
    {"world_size": 2, "cp": 2, "context": "allgather"},
    {"world_size": 2, "cp": 2, "context": "ulysses"},
    {"world_size": 2, "ep": 2, "zero": 2},
    {"world_size": 1},
)
LATENT_FOLDED = (
    {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4},
    {"world_size": 8, "tp": 2, "cp": 4, "ep": 4, "etp": 2, "context": "allgather", "zero": 3},
    {"world_size": 8, "tp": 2, "cp": 2, "ep": 8, "context": "ulysses"},
    {"world_size": 8, "tp": 4, "pp": 2, "ep": 2, "etp": 2, "zero": 2},
)


def _with(model: Settings, mappings: tuple[Settings, ...], moe: Settings | None = None) -> list[Settings]:
    return [few({"model": model, "moe": moe or {}, **mapping}) for mapping in mappings]


TP4 = _with(OLMOE, ({"world_size": 4, "tp": 4, "ep": 2},))

# Options of single families: an output gate, norms of outputs, layers without RoPE, norms after it, multipliers.

GATED = {
    "attention.gate": {},
    "residual": "both",
    "layers.position": "rope, nope",
    "layers.attention": "window, full",
    "sliding_window": 5,
    "attention.qk_norm": {},
    "embedding_multiplier": 1.7,
    "layers.ffn": "dense, moe",
    "ffn.moe.shared.intermediate_size": 16,
    "ffn.moe.router": "sigmoid",
    "ffn.moe.router.expert_bias": True,
}
SCALED = {
    "attention.scale": 0.3,
    "residual.multiplier": 0.6,
    "embedding_multiplier": 2.5,
    "logits_divisor": 3.0,
    "residual": "post",
    "attention.qk_norm": {},
    "attention.qk_norm.after_rope": True,
    "rope.scaling": "ntk",
    "rope.scaling.factor": 9.0,
    "mtp_layers": 1,
}
FAMILY_OPTIONS = [
    *_with(GATED, ({"world_size": 2, "tp": 2},)),
    # A norm after RoPE sees positions: those in the document.
    {"model": SCALED | {"vocab_size": 8}, "data": DOCUMENTS, "world_size": 2, "cp": 2},
]
FAMILY_OPTIONS_WIDE = [
    *_with(GATED, ({"world_size": 4, "pp": 2, "cp": 2, "ep": 2, "zero": 3}, *LATENT_AXES[1:], *LATENT_FOLDED)),
    *_with(SCALED, ({"world_size": 4, "tp": 2, "cp": 2, "etp": 2}, *LATENT_AXES, *LATENT_FOLDED)),
    *_with(SCALED | {"tie_embeddings": True}, LATENT_FOLDED),
    *_with(LATENT | {"layers.position": "rope, nope", "residual": "both"}, LATENT_AXES),
]

# Latent experts.

LATENT_EXPERTS = {"ffn.moe.latent_size": 6, "ffn.moe.shared.intermediate_size": 16, "ffn.moe.router.expert_bias": True}
LATENT_EXPERTS_AXES = (
    {"world_size": 2, "tp": 2},
    {"world_size": 2, "ep": 2, "zero": 3},
)
LATENT_EXPERTS_WIDE = (
    {"world_size": 4, "ep": 4, "zero": 3},
    {"world_size": 4, "pp": 2, "cp": 2, "etp": 2},
    {"world_size": 1},
    {"world_size": 2, "etp": 2},
    {"world_size": 2, "cp": 2},
    {"world_size": 2, "pp": 2, "zero": 3},
    {"world_size": 2, "ep": 2, "dispatcher": "allgather"},
    {"world_size": 4, "ep": 2, "etp": 2, "dispatcher": "allgather"},
    {"world_size": 4, "pp": 2, "ep": 2, "overlap_experts": True},
    {"world_size": 4, "pp": 2, "ep": 2, "schedule": "zero-bubble"},
    {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4},
    {"world_size": 8, "tp": 4, "pp": 2, "ep": 2, "etp": 2, "zero": 3},
)
LATENT_EXPERTS_BIAS = LATENT_EXPERTS | {"ffn.moe.bias": True, "mtp_layers": 1}

# Multi-token prediction.

MTP_ONE = {"mtp_layers": 1}
MTP_DENSE = {"mtp_layers": 2, "layers.ffn": "moe, dense", "tie_embeddings": True}
MTP_LATENT = LATENT | {
    "attention.v_head_dim": 6,
    "mtp_layers": 2,
    "ffn.moe.router.expert_bias": True,
    "ffn.moe.router": "sigmoid",
}
DROPS = {"capacity_factor": 0.75}
MTP_FOLDED = (
    {"world_size": 4, "pp": 2, "virtual_stages": 2, "schedule": "interleaved", "ep": 2},
    {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 2, "etp": 2, "zero": 3},
    {"world_size": 8, "tp": 4, "cp": 2, "ep": 8, "context": "allgather"},
)
MTP = [
    *_with(MTP_ONE, ({"world_size": 2, "tp": 2}, {"world_size": 2, "ep": 2, "zero": 3}), DROPS),
    *_with(MTP_LATENT, ({"world_size": 2, "cp": 2, "context": "ring"}, {"world_size": 2, "pp": 2, "zero": 2})),
    *_with(MTP_DENSE, ({"world_size": 2, "pp": 2, "zero": 3},)),
]
MTP_WIDE = [
    *_with(MTP_ONE, ({"world_size": 2, "cp": 2, "context": "ulysses"}, *MTP_FOLDED), DROPS),
    *_with(MTP_LATENT, ({"world_size": 1}, {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4}, *MTP_FOLDED)),
    *_with(MTP_DENSE, ({"world_size": 2, "cp": 2, "context": "allgather"}, *MTP_FOLDED)),
]

# The loss by chunks of tokens, over samples of several documents: the first token of each counts for nothing.

LOSS_CHUNK = [
    {"model": model, "train": TWO_SAMPLES | {"loss_chunk": 3}, "data": {"document_end": 0}, **mapping}
    for model, mapping in (
        ({"tie_embeddings": True, "mtp_layers": 2}, {"world_size": 2, "tp": 2}),
        ({"tie_embeddings": True, "mtp_layers": 2}, {"world_size": 4, "tp": 2, "pp": 2, "ep": 2}),
        ({}, {"world_size": 4, "tp": 2, "cp": 2, "etp": 2, "zero": 3}),
        ({"mtp_layers": 1}, {"world_size": 1}),
        ({"tie_embeddings": True}, {"world_size": 4, "tp": 4, "zero": 2}),
        ({}, {"world_size": 4, "cp": 2, "pp": 2, "zero": 3}),
        ({"mtp_layers": 1}, {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4}),
    )
]

# Vocabularies that tp does not divide: the last rank has fewer rows. FSDP cuts the 10 and 9 rows of 19 over dp = 3 into
# 4 + 4 + 2 and 3 + 3 + 3.

UNEVEN_VOCAB = [
    {"model": {"vocab_size": 33, "mtp_layers": 1, "head_bias": True}, "world_size": 2, "tp": 2, "ep": 2},
    {"model": {"vocab_size": 19}, "train": {"global_batch_size": 6}, "world_size": 6, "tp": 2, "ep": 2, "zero": 3},
    {"model": {"vocab_size": 19}, "train": {"global_batch_size": 6}, "world_size": 6, "tp": 2, "zero": 0},
    {
        "model": {"vocab_size": 33, "tie_embeddings": True, "head_bias": True},
        "train": TWO_SAMPLES | {"loss_chunk": 3},
        "data": {"document_end": 0},
        "world_size": 4,
        "tp": 2,
        "pp": 2,
        "ep": 2,
        "zero": 2,
    },
    {"model": {"vocab_size": 34, "tie_embeddings": True}, "world_size": 4, "tp": 4, "etp": 2, "overlap_tp": True},
    {
        "model": {"vocab_size": 32, "attention.num_heads": 6, "attention.num_kv_heads": 3, "layers.ffn": "moe"},
        "train": {"seq_len": 24, "global_batch_size": 6},
        "world_size": 6,
        "tp": 3,
        "ep": 2,
        "dispatcher": "allgather",
    },
    {
        "model": {"vocab_size": 33, "mtp_layers": 1},
        "world_size": 4,
        "tp": 2,
        "pp": 2,
        "schedule": "zero-bubble",
        "ep": 2,
    },
]

# Muon on shards equals Muon on whole matrices; three steps.

# Under the default schedule the rate is 0 behind the reset, of four steps where the recipe has three.
RESET = {"reset_moments_every": 2, "global_batch_size": 4, "lr_schedule": "constant"}
MOMENTS_RESET = [
    {"train": RESET, "world_size": 2, "zero": 3},
    {"train": RESET | {"optimizer": "muon"}, "world_size": 2, "tp": 2, "ep": 2},
    {"train": RESET | {"optimizer": "muon"}, "world_size": 4, "pp": 2, "etp": 2, "zero": 2},
]

MUON = {"optimizer": "muon", "global_batch_size": 4}
MUON_MODEL = SHARED | {"layers.ffn": "dense, moe"}
MUON_MAPPED = [
    {"model": MUON_MODEL, "train": MUON, **mapping}
    for mapping in (
        {"world_size": 4, "tp": 2, "ep": 2, "etp": 2, "zero": 1},
        {"world_size": 4, "cp": 2, "ep": 4, "zero": 3},
        {"world_size": 4, "tp": 2, "pp": 2, "etp": 2, "zero": 2},
        {"world_size": 1},
        {"world_size": 2, "zero": 0},
        {"world_size": 2, "zero": 3},
        {"world_size": 2, "tp": 2, "ep": 2},
        {"world_size": 4, "zero": 0, "ep": 2},
        {"world_size": 4, "zero": 3},
        {"world_size": 4, "tp": 4, "etp": 4},
        {"world_size": 4, "tp": 2, "cp": 2, "etp": 2, "zero": 0},
        {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4, "zero": 2},
        {"world_size": 8, "tp": 2, "ep": 2, "etp": 2, "zero": 3, "order": "pp-tp-cp-dp"},
        {"world_size": 8, "tp": 4, "pp": 2, "ep": 2, "zero": 3, "schedule": "interleaved", "virtual_stages": 2},
    )
]
MUON_KINDS = [
    {"model": model, "train": MUON | train, "world_size": 4, **mapping}
    for model, train, mapping in (
        (LATENT | {"mtp_layers": 1}, {}, {"world_size": 2, "tp": 2, "ep": 2}),
        (LATENT | {"mtp_layers": 1}, {}, {"zero": 3, "tp": 2, "ep": 2}),
        (
            {"ffn.moe.bias": True, "attention.qkv_bias": True, "ffn.moe.router.bias": True},
            {},
            {"zero": 3, "tp": 2, "ep": 2},
        ),
        ({"ffn.moe.latent_size": 6}, {}, {"zero": 2, "tp": 2, "ep": 2}),
        ({"ffn.moe.num_experts": 2}, {}, {"zero": 2}),
        (
            TIED,
            {"optimizer": make_part("optimizer", "muon", groups=("experts", "router"))},
            {"zero": 3, "tp": 2, "ep": 2},
        ),
    )
]

# Experts that receive rows in 8 bits: a hidden size of one block of 128 and a part of one.

FP8_ROWS = [
    {"model": {"hidden_size": 144}, "moe": {"dispatch_precision": "fp8-blockwise"} | moe, "train": train, **mapping}
    for moe, train, mapping in (
        ({}, {}, {"world_size": 2, "ep": 2}),
        ({}, {}, {"world_size": 4, "tp": 2, "cp": 2, "ep": 4, "dispatcher": "allgather"}),
        ({}, {}, {"world_size": 4, "pp": 2, "ep": 2, "overlap_experts": True}),
        (
            {"llep_min_tokens": 1, "weight_in_expert": True},
            {"recompute": ("moe",)},
            {"world_size": 2, "ep": 2, "dispatcher": "leastloaded"},
        ),
        (
            {"capacity_factor": 1.0, "drop_scope": "sub_sequence", "pad_to_capacity": True},
            {},
            {"world_size": 4, "cp": 2, "ep": 2, "etp": 2},
        ),
        ({}, {}, {"world_size": 1}),
        ({}, {}, {"world_size": 2, "tp": 2, "etp": 2}),
        ({}, {}, {"world_size": 4, "tp": 2, "ep": 2, "etp": 2}),
        ({"llep_min_tokens": 1, "choice": "skewed"}, {}, {"world_size": 2, "ep": 2, "dispatcher": "leastloaded"}),
    )
]

# Tokens that are sent to a rank once, whatever the number of their experts there.

DEDUP = [
    {"moe": moe, "train": train, "dispatcher": "dedup_alltoall", **mapping}
    for moe, train, mapping in (
        ({}, {}, {"world_size": 2, "ep": 2}),
        (
            {"capacity_factor": 0.75, "weight_in_expert": True},
            {"recompute": ("moe",)},
            {"world_size": 4, "tp": 2, "cp": 2, "ep": 4},
        ),
        ({"dispatch_precision": "fp8-blockwise"}, {}, {"world_size": 4, "pp": 2, "ep": 2, "overlap_experts": True}),
        ({"capacity_factor": 1.0, "drop_policy": "position"}, {}, {"world_size": 4, "cp": 2, "ep": 2, "zero": 3}),
        ({"choice": "skewed"}, {}, {"world_size": 4, "ep": 4, "zero": 2}),
        ({}, {}, {"world_size": 8, "pp": 2, "tp": 2, "ep": 4, "schedule": "interleaved", "virtual_stages": 2}),
    )
]

# Communication of tensor parallelism overlapped with its products.

DENSE = {
    "layers.ffn": "dense, moe",
    "ffn.moe.shared.intermediate_size": 16,
    "attention.qkv_bias": True,
    "attention.output_bias": True,
}
OVERLAP_TP = [
    few({"model": model, "train": train, "overlap_tp": True, **mapping})
    for model, train, mapping in (
        (DENSE, {}, {"world_size": 2, "tp": 2, "ep": 2}),
        # More ranks than query groups.
        ({}, {}, {"world_size": 4, "tp": 4, "etp": 2, "zero": 2}),
        (DENSE, {}, {"world_size": 4, "tp": 2, "pp": 2, "ep": 2, "schedule": "zero-bubble"}),
        (LATENT, {"recompute": ("layer",)}, {"world_size": 4, "tp": 2, "ep": 2, "zero": 3}),
        (DENSE, {}, {"world_size": 4, "tp": 2, "pp": 2, "ep": 2, "overlap_experts": True}),
        (DENSE, {"offload": ("norms",)}, {"world_size": 2, "tp": 2, "ep": 2}),
        (DENSE, {}, {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4}),
    )
]

# Recomputation under schedules that split the backward pass.

RECOMPUTE_MODEL = SHARED | {"layers.ffn": "dense, moe", "ffn.moe.router.expert_bias": True, "ffn.moe.router": "sigmoid"}
RECOMPUTE_SPLIT = [
    {
        "model": RECOMPUTE_MODEL | LATENT | {"layers": 4},
        "train": TWO_SAMPLES | {"recompute": parts},
        "pp": 2,
        **mapping,
    }
    for parts, mapping in (
        (
            ("norms", "core_attention", "dense_mlp", "expert_activation", "shared_experts", "mla_up"),
            {"world_size": 2, "schedule": "zero-bubble", "zero": 2},
        ),
        (("layer",), {"world_size": 2, "schedule": "zbv", "virtual_stages": 2, "zero": 3}),
        (
            ("moe", "dense_mlp", "norms", "core_attention", "mla_up"),
            {"world_size": 4, "schedule": "dualpipev", "virtual_stages": 2, "tp": 2, "ep": 2},
        ),
    )
]

# Every schedule with everything that saves memory.

SCHEDULES = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zero-bubble", 1),
    ("zero-bubble", 2),
    ("zero-bubble", 3),
    ("zbv", 2),
    ("dualpipev", 2),
    ("csv", 2),
)
"""Each with its virtual stages."""
SAVING_MODELS = (SHARED, TIED, {"layers.ffn": "dense, moe"}, LATENT | {"mtp_layers": 1})
RECOMPUTED = (("norms", "core_attention", "expert_activation"), ("moe", "norms"), ("layer",), ("core_attention", "moe"))
OFFLOADED = (("layer",), ("moe", "core_attention"), ("norms", "expert_activation"))
MEMORY_STRATEGIES: dict[str, Callable[[int], Settings]] = {
    "plain": lambda i: {},
    "recompute": lambda i: {"recompute": RECOMPUTED[i % 4]},
    "recompute, loss chunk": lambda i: {"recompute": RECOMPUTED[(i + 1) % 4], "loss_chunk": 3},
    # On CPU to other memory of the host; all of it is offloaded, so that all of it has to be fetched.
    "offload": lambda i: {"offload": OFFLOADED[i % 3], "offload_min_kib": 0, "offload_waits": True},
    "offload, recompute": lambda i: {"offload": ("layer",), "offload_min_kib": 0, "recompute": RECOMPUTED[i % 4]},
}
"""Keys of [train]. Which parts they name differs from case to case."""


def _memory_case(strategy: str, number: int, mapping: Settings) -> Case:
    model = SAVING_MODELS[number % 4]
    if "mtp_layers" not in model:
        model = model | {"layers": mapping["pp"] * mapping["virtual_stages"]}
    if mapping["schedule"] == "csv":
        mapping = mapping | {"schedule_csv": tuple(range(mapping["pp"])) * 2}
    # The zero-bubble schedule runs in `make test` with the strategies that contain the others.
    is_thin = mapping["schedule"] == "zero-bubble" and mapping["virtual_stages"] == 1 and mapping["pp"] == 2
    is_slow = not is_thin or strategy not in ("recompute, loss chunk", "offload, recompute")
    train = (BATCH_16 if is_slow else {}) | MEMORY_STRATEGIES[strategy](number)
    return Case(f"schedule with {strategy}", few({"model": model, "train": train, **mapping}), is_slow=is_slow)


def _memory_strategies() -> list[Case]:
    """Return each schedule with each strategy: on four ranks with each axis in turn, a few on eight."""
    found = []
    for i, (schedule, virtual_stages) in enumerate(SCHEDULES):
        for j, strategy in enumerate(MEMORY_STRATEGIES):
            number = i + j
            base = {"schedule": schedule, "virtual_stages": virtual_stages, "zero": number % 4}
            two_stages = base | {"world_size": 4, "pp": 2, **PIPELINE_AXES[number % 5]}
            wide = {"world_size": 8, **PIPELINE_AXES[(number + 2) % 5]} if number % 3 == 0 else {"world_size": 4}
            found.append(_memory_case(strategy, number, two_stages))
            found.append(_memory_case(strategy, number + 1, base | {"pp": 4, **wide}))
    return found


CASES = [
    *cases("documents", DOCUMENTS_MAPPED[1:2], [*DOCUMENTS_MAPPED[:1], *DOCUMENTS_MAPPED[2:], *DOCUMENTS_FOLDED]),
    *cases("documents of model kinds", DOCUMENT_KINDS[:9:8], DOCUMENT_KINDS[1:8]),
    *cases("gpt-oss", GPT_OSS_AXES[:1], [*GPT_OSS_AXES[1:], *GPT_OSS_FOLDED]),
    *cases("gpt-oss with documents", GPT_OSS_DOCUMENTS[:1], GPT_OSS_DOCUMENTS[1:]),
    *cases("gpt-oss with least-loaded dispatch", GPT_OSS_LOANS[:1], GPT_OSS_LOANS[1:]),
    *cases("gpt-oss with dropping", GPT_OSS_DROPS),
    *cases("deepseek-v3", _with(V3, LATENT_AXES[1:2]), _with(V3, (LATENT_AXES[0], *LATENT_AXES[2:], *LATENT_FOLDED))),
    *cases("deepseek-v2", _with(V2, LATENT_AXES[:1]), _with(V2, (*LATENT_AXES[1:], *LATENT_FOLDED))),
    *cases(
        "norm over all heads", _with(OLMOE, LATENT_AXES[:1]), [*TP4, *_with(OLMOE, (*LATENT_AXES[1:], *LATENT_FOLDED))]
    ),
    *cases("options of families", FAMILY_OPTIONS, FAMILY_OPTIONS_WIDE),
    *cases(
        "latent experts",
        _with(LATENT_EXPERTS, LATENT_EXPERTS_AXES[1:]),
        [
            *_with(LATENT_EXPERTS, (LATENT_EXPERTS_AXES[0], *LATENT_EXPERTS_WIDE)),
            *_with(LATENT_EXPERTS_BIAS, LATENT_EXPERTS_WIDE),
        ],
    ),
    *cases("multi-token prediction", MTP[4:], [*MTP[:4], *MTP_WIDE]),
    *cases("loss in chunks", LOSS_CHUNK[:1], LOSS_CHUNK[1:]),
    *cases("vocabulary that tp does not divide", UNEVEN_VOCAB[:1], UNEVEN_VOCAB[1:]),
    *cases("muon", MUON_MAPPED[5:6], [*MUON_MAPPED[:5], *MUON_MAPPED[6:]], steps=3),
    *cases("moments reset", MOMENTS_RESET[1:2], [MOMENTS_RESET[0], *MOMENTS_RESET[2:]], steps=4),
    *cases("muon on kinds of matrices", MUON_KINDS[:1], MUON_KINDS[1:], steps=3),
    *cases("rows in 8 bits", FP8_ROWS[:1], FP8_ROWS[1:]),
    *cases("dispatch without duplicates", DEDUP[:1], DEDUP[1:]),
    *cases("tensor-parallel overlap", OVERLAP_TP[1:2], [OVERLAP_TP[0], *OVERLAP_TP[2:]]),
    *cases("recomputation with a split backward", RECOMPUTE_SPLIT[:1], RECOMPUTE_SPLIT[1:]),
    *_memory_strategies(),
]
