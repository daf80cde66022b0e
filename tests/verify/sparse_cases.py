"""Sparse attention that must equal the oracle: both forms and both stages under every axis."""

from tests.verify.cases import Case, Settings, cases, few
from tests.verify.recipes import LATENT

SPARSE = {"attention.indexer.top_k": 5, "attention.indexer.num_heads": 3, "attention.indexer.head_dim": 6}
"""Sizes that are all different. Most queries of a sample of 16 tokens see more keys than they select."""
SPARSE_LATENT = LATENT | SPARSE | {"attention.indexer.rope_interleaved": True}
DOCUMENTS = {"document_end": 2}
TWO_SAMPLES = {"micro_batch_size": 2, "global_batch_size": 8}
ALLGATHER = {"context": "allgather"}
AXES = (
    {"world_size": 4, "tp": 2, "cp": 2, **ALLGATHER},
    {"world_size": 1},
    {"world_size": 2, "tp": 2},
    {"world_size": 2, "cp": 2, **ALLGATHER},
    {"world_size": 4, "cp": 4, "zero": 3, **ALLGATHER},
    {"world_size": 2, "pp": 2},
    {"world_size": 4, "ep": 4},
    {"world_size": 2, "etp": 2, "zero": 2},
    {"world_size": 2, "zero": 3},
    {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4, **ALLGATHER},
    {"world_size": 2, "pp": 2, "schedule": "zero-bubble"},
    {"world_size": 4, "pp": 2, "ep": 2, "overlap_experts": True},
    {"world_size": 2, "tp": 2, "overlap_tp": True},
)


def _sparse(mapping: Settings, model: Settings, train: Settings | None = None, **more: object) -> Settings:
    return few({"model": model, "train": train or {}, **more, **mapping})


OPTIONS = [
    _sparse(mapping, {"vocab_size": 8, **model}, TWO_SAMPLES | train, data=DOCUMENTS)
    for mapping, model, train in (
        ({"world_size": 4, "tp": 2, "cp": 2, **ALLGATHER}, SPARSE_LATENT | {"mtp_layers": 1}, {}),
        ({"world_size": 1}, SPARSE | {"attention.sinks": True, "attention.gate": {}, "attention.qk_norm": {}}, {}),
        ({"world_size": 2, "tp": 2}, SPARSE | {"layers.attention": "window, full", "sliding_window": 7}, {}),
        ({"world_size": 2, "cp": 2, **ALLGATHER}, SPARSE, {"recompute": ("layer",)}),
        ({"world_size": 4, "tp": 4}, SPARSE_LATENT | {"attention.q_lora_rank": 0}, {}),
        ({"world_size": 2, "tp": 2}, SPARSE_LATENT | {"attention.gate": {}}, {}),
        ({"world_size": 2, "tp": 2}, SPARSE_LATENT, {"recompute": ("norms", "moe")}),
        ({"world_size": 2, "tp": 2}, SPARSE | {"layers.position": "rope, nope"}, {"optimizer": "muon"}),
        ({"world_size": 2, "pp": 2}, SPARSE | {"layers.attention": "linear, full", "layers": 4}, {}),
    )
]
WARMUP = [
    _sparse(mapping, model, {"indexer_stage": "warmup"} | train, data=DOCUMENTS)
    for mapping, model, train in (
        ({"world_size": 2, "tp": 2}, SPARSE_LATENT, {}),
        ({"world_size": 4, "tp": 2, "cp": 2, **ALLGATHER}, SPARSE, {}),
        ({"world_size": 1}, SPARSE | {"attention.sinks": True}, {}),
        ({"world_size": 2, "tp": 2, "zero": 3}, SPARSE_LATENT, {}),
        ({"world_size": 2, "pp": 2}, SPARSE, TWO_SAMPLES),
        ({"world_size": 2, "ep": 2, "zero": 2}, SPARSE_LATENT, {"optimizer": "muon"}),
        ({"world_size": 2, "pp": 2, "schedule": "zero-bubble"}, SPARSE_LATENT, {}),
        ({"world_size": 2, "pp": 2}, SPARSE | {"tie_embeddings": True, "mtp_layers": 1}, {}),
        ({"world_size": 2, "ep": 2, "dispatcher": "leastloaded", "moe": {"llep_min_tokens": 1}}, SPARSE, {}),
        ({"world_size": 4, "pp": 2, "ep": 2, "overlap_experts": True}, SPARSE, {}),
        # Half of the stages have no indexer, and train nothing.
        ({"world_size": 4, "pp": 4}, SPARSE | {"layers.attention": "linear, full", "layers": 4}, {}),
        (
            {"world_size": 2, "pp": 2},
            SPARSE | {"layers.attention": "2 full, 2 linear", "layers": 4},
            {"optimizer": "muon"},
        ),
    )
]
SHARED = {"layers": 4, "layers.selection": "2 own, shared"}
"""Layers 1 and 2 share a selection, the others have their own."""
SHARING = [
    _sparse(mapping, {"vocab_size": 8, **model}, TWO_SAMPLES | train, data=DOCUMENTS)
    for mapping, model, train in (
        ({"world_size": 2, "cp": 2, **ALLGATHER}, SPARSE_LATENT | SHARED, {}),
        ({"world_size": 4, "tp": 2, "cp": 2, **ALLGATHER}, SPARSE_LATENT | SHARED, {}),
        ({"world_size": 2, "pp": 2}, SPARSE | SHARED | {"layers.selection": "own, shared"}, {"recompute": ("layer",)}),
        ({"world_size": 1}, SPARSE_LATENT | SHARED | {"layers.selection": "own, 3 shared", "mtp_layers": 1}, {}),
        ({"world_size": 2, "pp": 2, "pipeline_layout": "auto"}, SPARSE_LATENT | SHARED, {"recompute": ("moe",)}),
        ({"world_size": 2, "pp": 2, "pipeline_layout": "Et|tttL"}, SPARSE | SHARED, {}),
        (
            {"world_size": 2, "pp": 2, "virtual_stages": 2, "schedule": "interleaved"},
            SPARSE_LATENT | {"layers": 8, "layers.selection": "own, shared"},
            {},
        ),
        (
            {"world_size": 2, "pp": 2, "schedule": "zero-bubble"},
            SPARSE_LATENT | SHARED | {"layers.selection": "own, shared"},
            {},
        ),
        (
            {"world_size": 4, "pp": 2, "ep": 2, "overlap_experts": True},
            SPARSE | SHARED | {"layers.selection": "own, shared"},
            {"recompute": ("layer",)},
        ),
        ({"world_size": 4, "cp": 4, "zero": 3, **ALLGATHER}, SPARSE | SHARED, {"recompute": ("layer",)}),
        ({"world_size": 2, "zero": 3}, SPARSE_LATENT | SHARED, {"recompute": ("norms", "moe")}),
        ({"world_size": 4, "ep": 4}, SPARSE_LATENT | SHARED, {"optimizer": "muon"}),
        ({"world_size": 2, "etp": 2, "zero": 2}, SPARSE | SHARED | {"attention.gate": {}}, {}),
        (
            {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4, **ALLGATHER},
            SPARSE_LATENT | SHARED | {"layers.selection": "own, shared"},
            {},
        ),
        (
            {"world_size": 2, "tp": 2},
            SPARSE | SHARED | {"layers.attention": "full, linear, full", "layers.position": "rope, nope"},
            {},
        ),
        ({"world_size": 2, "tp": 2}, SPARSE | SHARED | {"layers.attention": "window, 2 full", "sliding_window": 7}, {}),
        ({"world_size": 2, "tp": 2}, SPARSE_LATENT | SHARED, {"indexer_stage": "warmup"}),
        ({"world_size": 4, "tp": 2, "cp": 2, **ALLGATHER}, SPARSE | SHARED, {"indexer_stage": "warmup"}),
        (
            {"world_size": 2, "pp": 2},
            SPARSE | SHARED | {"layers.selection": "own, shared"},
            {"indexer_stage": "warmup"},
        ),
    )
]
MAPPED = [_sparse(mapping, model) for mapping in AXES for model in (SPARSE, SPARSE_LATENT)]
CASES: list[Case] = [
    *cases("sparse attention", MAPPED[6:7], [*MAPPED[:6], *MAPPED[7:], *OPTIONS]),
    *cases("layers that share a selection", SHARING[:1], SHARING[1:]),
    *cases("warm-up of sparse attention", WARMUP[:1], WARMUP[1:]),
]
