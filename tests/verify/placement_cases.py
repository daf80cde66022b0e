"""Placements that move tokens between ranks must equal the oracle: kinds of losses, mappings, schedules, hosts."""

from tests.verify.cases import Case, Settings, cases, few
from tests.verify.feature_cases import GPT_OSS_MODEL, LOAN, MLA
from tests.verify.planned_cases import BALANCED, DOCUMENTS, TWO_SAMPLES, WINDOWS

PLACED = {"context": "planned", "placement": "balanced", "attention_block": 1}
BY_DOCUMENT = PLACED | {"placement": "documents"}
ZERO = {
    "ffn.moe.zero_experts": 3,
    "ffn.moe.router.softmax": "pre",
    "ffn.moe.router.expert_bias": True,
    "ffn.moe.active_experts": 1.6,
    "mtp_layers": 1,
}
TEMPERATURE = {"layers.position": "rope, nope", "attention.temperature.scale": 0.5, "attention.temperature.tokens": 4}
V3 = {
    "ffn.moe.router": "sigmoid",
    "ffn.moe.router.expert_bias": True,
    "ffn.moe.router.num_groups": 4,
    "ffn.moe.router.top_groups": 2,
}


def _placed(
    mapping: Settings, model: Settings | None = None, train: Settings | None = None, **more: object
) -> Settings:
    settings = {"model": {"vocab_size": 8} | (model or {}), "train": train or {}, "data": DOCUMENTS} | more
    if settings.get("attention_hosts") != "balanced" and mapping.get("placement", "balanced") == "balanced":
        settings |= {"attention_block": 128}
    return few(PLACED | settings | mapping)


WITH_V3 = [
    _placed(mapping, V3 | {"mtp_layers": 1}, TWO_SAMPLES, moe={"aux_kind": "sequence", "input_jitter": 0.2})
    for mapping in ({"world_size": 2, "ep": 2, "zero": 2}, {"world_size": 4, "cp": 2, "ep": 4, "zero": 2})
]
KINDS = [
    _placed({"world_size": 4, "cp": 2, "tp": 2, "ep": 2}, train=TWO_SAMPLES),
    _placed({"world_size": 4, "tp": 2, "ep": 4}, train=TWO_SAMPLES, moe={"aux_kind": "sequence"}),
    _placed({"world_size": 4, "ep": 2, "etp": 2}, train=TWO_SAMPLES, moe={"aux_kind": "global_batch", "aux_loss": 0.5}),
    _placed({"world_size": 4, "cp": 2}, train=TWO_SAMPLES, moe={"aux_kind": "last_global_batch", "aux_loss": 0.5}),
    _placed(
        {"world_size": 4, "ep": 4}, {"ffn.moe.router.expert_bias": True}, TWO_SAMPLES, moe={"bias_update_rate": 0.02}
    ),
    _placed({"world_size": 4, "ep": 4, "dispatcher": "leastloaded"}, moe=LOAN),
    _placed({"world_size": 4, "ep": 4, "dispatcher": "dedup_alltoall"}, moe={"choice": "round_robin"}),
    _placed({"world_size": 4, "cp": 2, "ep": 4} | BALANCED, GPT_OSS_MODEL | WINDOWS, TWO_SAMPLES),
    _placed({"world_size": 4, "cp": 2, "order": "pp-cp-dp-tp", "zero": 1} | BALANCED, MLA, TWO_SAMPLES),
    _placed({"world_size": 4, "cp": 2, "ep": 4, "zero": 3} | BALANCED, ZERO, TWO_SAMPLES, moe={"aux_kind": "sequence"}),
    _placed({"world_size": 4, "cp": 2} | BALANCED, TEMPERATURE, TWO_SAMPLES),
]
MAPPINGS = [
    _placed({"world_size": 2, "ep": 2, "zero": 0}),
    _placed({"world_size": 4, "zero": 3}, {"mtp_layers": 2}, TWO_SAMPLES),
    _placed({"world_size": 4, "pp": 2, "ep": 2, "schedule": "zero-bubble"}, MLA, TWO_SAMPLES),
    _placed({"world_size": 4, "pp": 2, "virtual_stages": 2, "schedule": "dualpipev", "ep": 2}),
    _placed({"world_size": 4, "cp": 2, "ep": 2, "overlap_experts": True}),
    _placed({"world_size": 4, "tp": 2, "ep": 2}, train={"recompute": ("layer",)}),
    _placed({"world_size": 8, "tp": 2, "cp": 2, "ep": 8, "zero": 3}, GPT_OSS_MODEL, TWO_SAMPLES),
    _placed(
        {"world_size": 8, "cp": 2, "pp": 2, "ep": 2, "etp": 2} | BALANCED, V3, TWO_SAMPLES, moe={"aux_kind": "sequence"}
    ),
    _placed({"world_size": 2}, train={"optimizer": "muon"}),
]
BY_DOCUMENTS = [
    _placed({"world_size": 4, "cp": 4, "ep": 4} | BY_DOCUMENT, train=TWO_SAMPLES),
    _placed({"world_size": 4, "cp": 2} | BY_DOCUMENT, V3, TWO_SAMPLES, moe={"aux_kind": "sequence"}),
    _placed({"world_size": 2, "cp": 2} | BY_DOCUMENT, {"ffn.moe.router": "sigmoid"}, moe={"choice": "sinkhorn"}),
    # With few tokens many have equal contexts, and which of them is at the quantile is a matter of rounding.
    _placed(
        {"world_size": 2, "cp": 2} | BY_DOCUMENT,
        {"ffn.moe.router.expert_bias": True, "vocab_size": 32},
        TWO_SAMPLES,
        moe={"choice": "quantile"},
    ),
    _placed({"world_size": 4, "cp": 2, "tp": 2} | BY_DOCUMENT, {}, TWO_SAMPLES, moe={"capacity_factor": 0.75}),
    _placed({"world_size": 8, "cp": 2, "tp": 2, "pp": 2, "ep": 4} | BY_DOCUMENT | BALANCED, MLA, TWO_SAMPLES),
]

CASES: list[Case] = [
    *cases("balanced placement", WITH_V3[:1], [*WITH_V3[1:], *KINDS, *MAPPINGS]),
    *cases("placement by documents", BY_DOCUMENTS[2:3], [*BY_DOCUMENTS[:2], *BY_DOCUMENTS[3:]]),
]
