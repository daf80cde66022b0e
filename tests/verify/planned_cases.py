"""Planned attention that must equal the oracle: kinds of models, mappings, schedules, and work that moves."""

from tests.verify.cases import Case, Settings, cases, few
from tests.verify.feature_cases import GPT_OSS_MODEL, MLA
from tests.verify.linear_cases import HYBRID

DOCUMENTS = {"document_end": 2}
"""Documents of about eight tokens, with a vocabulary of 8."""
TWO_SAMPLES = {"micro_batch_size": 2, "global_batch_size": 8}
BALANCED = {"attention_hosts": "balanced", "attention_tolerance": 0.0, "attention_block": 1}
WINDOWS = {"layers.attention": "window, full", "sliding_window": 5}


def _planned(
    mapping: Settings, model: Settings | None = None, train: Settings | None = None, **more: object
) -> Settings:
    settings = {"model": {"vocab_size": 8} | (model or {}), "train": train or {}, "data": DOCUMENTS} | more
    return few({"context": "planned", **settings, **mapping})


HOME = [
    _planned(
        {"world_size": 4, "cp": 2, "tp": 2, "ep": 2, "etp": 2}, {"attention.qk_norm": {}, "mtp_layers": 1}, TWO_SAMPLES
    ),
    _planned({"world_size": 2, "cp": 2}, MLA | WINDOWS, TWO_SAMPLES),
    _planned({"world_size": 4, "cp": 4, "ep": 4}, data={}),
    _planned({"world_size": 4, "cp": 2, "pp": 2, "zero": 2}, HYBRID | {"layers": 4}),
]
MOVED = [
    _planned({"world_size": 4, "cp": 2, "ep": 4, "zero": 2} | BALANCED, GPT_OSS_MODEL | WINDOWS, TWO_SAMPLES),
    _planned({"world_size": 2, "ep": 2} | BALANCED, {"mtp_layers": 2}),
    _planned({"world_size": 4, "pp": 2, "ep": 2, "schedule": "zero-bubble"} | BALANCED, MLA, TWO_SAMPLES),
    _planned({"world_size": 4, "ep": 2, "etp": 2, "zero": 3} | BALANCED, {}, {"recompute": ("layer",)}),
    _planned({"world_size": 4, "cp": 2, "order": "pp-cp-dp-tp", "zero": 1} | BALANCED, {}, TWO_SAMPLES),
    _planned({"world_size": 4, "cp": 2, "attention_pool": 2} | BALANCED, {}, {"recompute": ("core_attention",)}),
    _planned({"world_size": 4, "tp": 2, "zero": 3} | BALANCED | {"attention_tolerance": 0.1}, {"tie_embeddings": True}),
    _planned(
        {"world_size": 4, "pp": 2, "ep": 2, "virtual_stages": 2, "schedule": "interleaved", "overlap_experts": True}
        | BALANCED
    ),
    _planned(
        {"world_size": 4, "ep": 4, "dispatcher": "leastloaded"} | BALANCED,
        moe={"choice": "skewed", "llep_min_tokens": 1, "llep_threshold": 1.0, "llep_capacity": 1.0},
    ),
    _planned({"world_size": 4, "pp": 2, "virtual_stages": 2, "schedule": "dualpipev"} | BALANCED),
    _planned({"world_size": 4, "cp": 2, "ep": 2} | BALANCED, HYBRID),
    _planned({"world_size": 8, "tp": 2, "cp": 2, "ep": 8, "zero": 3} | BALANCED, GPT_OSS_MODEL, TWO_SAMPLES),
    _planned({"world_size": 8, "cp": 2, "pp": 2, "ep": 2, "etp": 2} | BALANCED, MLA | WINDOWS, TWO_SAMPLES),
    _planned({"world_size": 2, "zero": 0} | BALANCED, {}, {"optimizer": "muon"}),
]

CASES: list[Case] = [
    *cases("planned attention", HOME[1:2], [HOME[0], *HOME[2:]]),
    *cases("planned attention with balanced hosts", MOVED[1:2], [MOVED[0], *MOVED[2:]]),
]
