"""Recipes of recomputation, overlap and offload, which must not change one bit of the same recipe without them."""

from dataclasses import fields, replace

from moefold.config.base.part import make_part
from moefold.config.schema import Config
from moefold.config.sections.train import TrainConfig
from tests.verify.cases import Case, Settings, cases, data_parallel, in_one_step
from tests.verify.feature_cases import LOAN, RECOMPUTE_MODEL, SHARED, TIED, TWO_SAMPLES
from tests.verify.recipes import LATENT

NOISY = {"input_jitter": 0.1, "capacity_factor": 1.0, "bias_update_rate": 0.1}
INNER_PARTS = ("norms", "core_attention", "dense_mlp", "expert_activation", "shared_experts")
ALL_PARTS = ("norms", "core_attention", "dense_mlp", "moe")
LAYER = ("layer",)
SOME_PARTS = ("norms", "core_attention", "expert_activation")
LATENT_MTP = LATENT | {"mtp_layers": 1}
ONE_RANK: Settings = {"world_size": 1}
INTERLEAVED = {"schedule": "interleaved", "virtual_stages": 2, "pp": 2}
DUALPIPEV = {"schedule": "dualpipev", "virtual_stages": 2, "pp": 2}


SWITCHES = tuple(f.name for f in fields(TrainConfig) if f.name.startswith(("recompute", "offload")))
"""Keys of [train] that go back to their defaults."""


def without_switch(cfg: Config) -> Config:
    """Return the recipe without the settings that must change no bit."""
    off = {name: getattr(TrainConfig(), name) for name in SWITCHES}
    return replace(cfg, parallel=replace(cfg.parallel, overlap_experts=False), train=replace(cfg.train, **off))


# Recomputation.


def _two_samples(mapping: Settings) -> Settings:
    """Return the smallest batches of two samples that fill the data-parallel ranks and the pipeline."""
    fills_four = mapping.get("pp", 1) == 1 and data_parallel(mapping) == 1
    return TWO_SAMPLES | {"global_batch_size": 4 if fills_four else 8}


def _recompute(
    parts: tuple[str, ...], mapping: Settings, model: Settings = RECOMPUTE_MODEL, moe: Settings = NOISY
) -> Settings:
    return {"model": model, "moe": moe, "train": _two_samples(mapping) | {"recompute": parts}, **mapping}


RECOMPUTE_ONE_RANK = [_recompute((part,), ONE_RANK) for part in (*INNER_PARTS, "moe")]
RECOMPUTE_MAPPED = [
    _recompute(INNER_PARTS, {"world_size": 2, "tp": 2, "ep": 2, "zero": 3}),
    _recompute(INNER_PARTS, {"world_size": 4, "tp": 2, "cp": 2, "ep": 2, "etp": 2, "zero": 3}),
    _recompute(ALL_PARTS, {"world_size": 4, "tp": 2, "pp": 2, "ep": 2, "dispatcher": "allgather", "zero": 2}),
    _recompute(LAYER, {"world_size": 4, "cp": 2, "ep": 4, "zero": 3}),
    _recompute(LAYER, ONE_RANK),
    _recompute(LAYER, {"world_size": 4, "etp": 2, "zero": 1, **INTERLEAVED}),
    _recompute(LAYER, {"world_size": 4, "tp": 2, "cp": 2, "ep": 2, "etp": 2, "context": "ulysses", "zero": 0}),
    _recompute(INNER_PARTS, {"world_size": 4, "tp": 4, "ep": 4, "dispatcher": "allgather"}),
    _recompute(
        INNER_PARTS,
        {"world_size": 4, "pp": 2, "cp": 2, "ep": 2, "schedule": "gpipe", "zero": 3, "context": "allgather"},
    ),
    _recompute(ALL_PARTS, {"world_size": 4, "ep": 2, "zero": 3}),
    _recompute(ALL_PARTS, {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4, "zero": 2}),
    _recompute(LAYER, {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 2, "etp": 2, "zero": 3}),
]
RECOMPUTE_LATENT = [
    _recompute(parts, {"world_size": 2, **mapping}, LATENT_MTP, {})
    for parts, mapping in (
        (("mla_up", "norms", "core_attention"), {"tp": 2, "ep": 2}),
        (("mla_up",), {"cp": 2, "zero": 3}),
        (LAYER, {"pp": 2}),
    )
]
FOLDED_FOUR = {"world_size": 4, "cp": 2, "ep": 2, "etp": 2}
LOAN_WEIGHED = {**LOAN, "weight_in_expert": True}
RECOMPUTE_ROUTING = [
    _recompute(("moe",), {"world_size": 2, "ep": 2, "dispatcher": "leastloaded", "zero": 2}, {}, LOAN_WEIGHED),
    *(
        _recompute(parts, {**FOLDED_FOUR, "dispatcher": dispatcher, "zero": 2}, {}, moe)
        for moe, dispatcher, parts in (
            (LOAN_WEIGHED, "leastloaded", ("moe",)),
            ({"aux_kind": "global_batch", "aux_loss": 0.5}, "alltoall", LAYER),
            ({"choice": "sinkhorn"}, "alltoall", ("moe",)),
            ({"weight_in_expert": True, "aux_loss": 0.0, "z_loss": 0.0}, "alltoall", ("moe", "norms")),
            ({"weight_in_expert": True}, "alltoall", ("expert_activation",)),
        )
    ),
]

# Experts' communication overlapped with another micro-batch.

OVERLAP_MODEL = SHARED | {"ffn.moe.router.expert_bias": True, "layers.ffn": "dense, moe"}
MTP = TIED | {"mtp_layers": 1}
DROPS_AND_NOISE = {"capacity_factor": 1.0, "input_jitter": 0.1}
SKEWED = LOAN | {"aux_loss": 0.0}


def _overlap(
    parallel: Settings,
    model: Settings | None = None,
    moe: Settings | None = None,
    recompute: tuple[str, ...] = (),
    batch: int = 8,
) -> Settings:
    train = {"global_batch_size": batch, "recompute": recompute}
    return {"model": model or {}, "moe": moe or {}, "train": train, "overlap_experts": True, **parallel}


OVERLAP_ONE_STAGE = [_overlap({"world_size": 2, "ep": 2}, OVERLAP_MODEL | MTP, batch=6)]
OVERLAP_LOANS = [
    _overlap({"world_size": 4, "ep": 4, "dispatcher": "leastloaded"}, moe=SKEWED),
    _overlap({"world_size": 4, "ep": 2, "etp": 2, "dispatcher": "leastloaded"}, {}, SKEWED, ("moe",)),
]
OVERLAP_DEDUP = [
    _overlap({"world_size": 2, "ep": 2, "dispatcher": "dedup_alltoall"}, OVERLAP_MODEL),
    _overlap({"world_size": 4, "pp": 2, "ep": 2, "dispatcher": "dedup_alltoall"}, OVERLAP_MODEL, {}, ("moe",)),
]
OVERLAP = [
    _overlap({"world_size": 4, "pp": 2, "ep": 2, "zero": 2}, moe=DROPS_AND_NOISE, recompute=("moe", "norms")),
    _overlap({"world_size": 4, "etp": 2, "zero": 0, **INTERLEAVED}, OVERLAP_MODEL),
    _overlap({"world_size": 4, "ep": 2, "tp": 2, **DUALPIPEV}, MTP, recompute=LAYER, batch=4),
    _overlap({"world_size": 4, "tp": 2, "ep": 4}, OVERLAP_MODEL),
    _overlap({"world_size": 4, "cp": 2, "ep": 2, "etp": 2, "zero": 2}, MTP, DROPS_AND_NOISE),
    _overlap({"world_size": 4, "cp": 2, "ep": 4, "dispatcher": "allgather"}, OVERLAP_MODEL, recompute=LAYER),
    _overlap({"world_size": 4, "ep": 2, "etp": 2}, moe={"weight_in_expert": True}),
    _overlap(
        {"world_size": 2, "ep": 2}, moe={"capacity_factor": 1.0, "pad_to_capacity": True, "drop_scope": "sub_sequence"}
    ),
    _overlap({"world_size": 2, "ep": 2}, moe={"aux_kind": "global_batch"}, recompute=("moe",)),
    _overlap({"world_size": 4, "pp": 2, "tp": 2, "etp": 2}, LATENT | MTP, recompute=("mla_up", "norms")),
    _overlap({"world_size": 4, "pp": 2, "ep": 2}, OVERLAP_MODEL) | {"faults": {"check_dispatch": True}},
    _overlap({"world_size": 8, "pp": 4, "ep": 2}, OVERLAP_MODEL, DROPS_AND_NOISE, batch=16),
    _overlap({"world_size": 8, **INTERLEAVED, "pp": 4, "ep": 2, "zero": 2}),
    _overlap({"world_size": 4, **INTERLEAVED, "virtual_stages": 3, "ep": 2}, recompute=LAYER),
    _overlap({"world_size": 8, **DUALPIPEV, "pp": 4, "ep": 2, "zero": 2}, OVERLAP_MODEL, batch=16),
    _overlap({"world_size": 8, "pp": 2, "tp": 2, "cp": 2, "ep": 4}, OVERLAP_MODEL | MTP, DROPS_AND_NOISE, ("moe",)),
    _overlap({"world_size": 8, **DUALPIPEV, "tp": 2, "cp": 2, "ep": 2, "etp": 2}, OVERLAP_MODEL | MTP),
    _overlap(
        {"world_size": 4, **INTERLEAVED, "virtual_stages": 3, "ep": 2, "pipeline_layout": "Et|tt|||tt|mL"},
        MTP | {"layers": 5, "layers.ffn": "dense, moe"},
    ),
    _overlap(
        {"world_size": 4, **DUALPIPEV, "ep": 2, "pipeline_layout": "E|ttt|tt|mL"},
        MTP | {"layers": 5, "layers.ffn": "moe, dense"},
    ),
    _overlap({"world_size": 4, "pp": 2, "ep": 2}, batch=4),
]

# Offload of activations, to SSD unless a case says otherwise, and of optimizer state.

OFFLOAD_MODEL = SHARED | {"layers.ffn": "dense, moe", "ffn.moe.router.expert_bias": True}
OFFLOAD_LATENT = LATENT_MTP | TIED | {"layers.ffn": "dense, moe"}


def _offload(
    parts: tuple[str, ...],
    mapping: Settings,
    model: Settings = OFFLOAD_MODEL,
    moe: Settings = NOISY,
    to: str = "ssd",
    **train: object,
) -> Settings:
    keys = {"offload": parts, "offload_to": to, "offload_min_kib": 0, "offload_waits": True}
    return {"model": model, "moe": moe, "train": _two_samples(mapping) | keys | train, **mapping}


OFFLOAD_ONE_RANK = [
    _offload(parts, ONE_RANK, offload_waits=waits)
    for waits in (True, False)
    for parts in (INNER_PARTS, ALL_PARTS, LAYER)
]
OFFLOAD_RECOMPUTED = [
    _offload(parts, ONE_RANK, recompute=recomputed)
    for parts, recomputed in (
        (LAYER, SOME_PARTS),
        (LAYER, LAYER),
        (ALL_PARTS, ("norms", "core_attention", "moe")),
    )
]
OFFLOAD_MAPPED = [
    _offload(parts, {"world_size": 4, **mapping}, recompute=recomputed)
    for parts, recomputed, mapping in (
        (LAYER, SOME_PARTS, {"world_size": 2, "ep": 2, "zero": 2, "dispatcher": "allgather"}),
        (INNER_PARTS, (), {"tp": 2, "cp": 2, "ep": 2, "etp": 2, "zero": 3}),
        (LAYER, SOME_PARTS, {"tp": 2, "pp": 2, "ep": 2, "zero": 2, "dispatcher": "allgather"}),
        (ALL_PARTS, ("norms",), {"cp": 2, "etp": 2, "zero": 3, **INTERLEAVED}),
        (LAYER, LAYER, {"ep": 4, "zero": 3}),
    )
]
OFFLOAD_SCHEDULES: list[Settings] = [
    {"schedule": "gpipe"},
    {"schedule": "1f1b", "zero": 2},
    {"schedule": "interleaved", "virtual_stages": 3},
    {"schedule": "zero-bubble", "zero": 3},
    {"schedule": "zero-bubble", "virtual_stages": 3},
    {"schedule": "zbv", "virtual_stages": 2, "zero": 2},
    {"schedule": "dualpipev", "virtual_stages": 2},
]
OFFLOAD_AXES = ({"pp": 2, "tp": 2}, {"pp": 2, "cp": 2}, {"pp": 2, "ep": 2}, {"pp": 2, "tp": 2, "etp": 2}, {"pp": 4})
# Several micro-batches are offloaded at a time, and those whose weight gradients are delayed are fetched.
OFFLOAD_SCHEDULED = [
    _offload(LAYER, {"world_size": 2, "pp": 2, **OFFLOAD_SCHEDULES[i]}, OFFLOAD_LATENT, {}, recompute=("norms",))
    for i in (3, 6, 0, 5)
]


def _offload_mixed() -> list[Settings]:
    """Return schedules with axes. Models, parts, recomputation, loss chunk, destination and waiting rotate."""
    found = []
    for number, schedule in enumerate(OFFLOAD_SCHEDULES):
        for j, axes in enumerate(OFFLOAD_AXES):
            i = number + j
            train = {
                "micro_batch_size": 1,
                "global_batch_size": 16 if "ep" in axes else 8,
                "loss_chunk": 5 * (i % 2),
                "recompute": ((), SOME_PARTS, ("norms",))[i % 3],
                "offload_waits": i % 5 > 0,
            }
            parts = ALL_PARTS if i % 6 == 3 else LAYER
            model = (OFFLOAD_MODEL, OFFLOAD_LATENT)[i % 2]
            to = "host" if i % 4 == 0 else "ssd"
            found.append(_offload(parts, {"world_size": 4, **schedule, **axes}, model, {}, to, **train))
    return found


OFFLOAD_FROM_FILE = [
    _offload(
        LAYER,
        {"world_size": 2, "pp": 2, "virtual_stages": 2, "schedule": "csv", "schedule_csv": (1, 0, 1, 0)},
        OFFLOAD_LATENT,
        {},
        micro_batch_size=1,
        global_batch_size=4,
    )
]
TWO_CHUNKS = {"world_size": 4, "pp": 2, "ep": 2, "virtual_stages": 2}
OFFLOAD_OVERLAPPED = [
    _offload(
        parts,
        {"overlap_experts": True, **mapping},
        OFFLOAD_MODEL | {"layers": 4},
        micro_batch_size=1,
        recompute=recomputed,
        offload_waits=waits,
    )
    for waits in (True, False)
    for parts, recomputed, mapping in (
        (("moe", "core_attention"), ("norms",), {"world_size": 4, "pp": 2, "ep": 2, "zero": 2}),
        (LAYER, (), {"world_size": 2, "ep": 2}),
        (LAYER, LAYER, {"world_size": 4, "tp": 2, "etp": 2}),
        (("norms", "dense_mlp", "moe"), (), TWO_CHUNKS | {"schedule": "interleaved"}),
        (LAYER, SOME_PARTS, TWO_CHUNKS | {"schedule": "dualpipev"}),
        (LAYER, ("moe",), {"world_size": 4, "cp": 2, "ep": 4, "dispatcher": "allgather"}),
    )
]
OFFLOAD_ROUTING = [
    _offload(("core_attention", "moe"), {"world_size": 4, **mapping}, {}, moe)
    for moe, mapping in (
        ({**LOAN, "weight_in_expert": True}, {"cp": 2, "ep": 2, "etp": 2, "dispatcher": "leastloaded", "zero": 2}),
        ({"aux_kind": "global_batch"}, {"tp": 2, "ep": 2, "zero": 0}),
        ({"choice": "sinkhorn"}, {"cp": 2, "etp": 2, "context": "ulysses"}),
    )
]
OPTIMIZER_OFFLOAD = [
    {
        "model": OFFLOAD_MODEL | {"layers": 4},
        "train": TWO_SAMPLES
        | {
            "optimizer": make_part("optimizer", optimizer, moment_dtype=dtype),
            "offload_optimizer": "ssd",
            "offload_min_kib": 0,
        },
        "world_size": 4,
        **mapping,
    }
    for optimizer, dtype, mapping in (
        ("adamw", "bfloat16", {"world_size": 2, "tp": 2, "zero": 3}),
        ("adamw", "bfloat16", {"tp": 2, "etp": 2, "zero": 3}),
        ("adamw", "float32", {"tp": 2, "ep": 4, "zero": 1}),
        ("muon", "float32", {"cp": 2, "pp": 2, "ep": 2, "zero": 2}),
        ("muon", "bfloat16", {"pp": 2, "schedule": "zbv", "virtual_stages": 2, "zero": 3}),
        ("adamw", "float32", {"zero": 0}),
    )
]

CASES: list[Case] = [
    *in_one_step(
        [
            *cases("recomputation on one rank", RECOMPUTE_ONE_RANK[-1:], RECOMPUTE_ONE_RANK[:-1]),
            *cases("recomputation", RECOMPUTE_MAPPED[:1], RECOMPUTE_MAPPED[1:]),
            *cases("recomputation of latent attention", RECOMPUTE_LATENT[:1], RECOMPUTE_LATENT[1:]),
            *cases("recomputation of routing", RECOMPUTE_ROUTING[:1], RECOMPUTE_ROUTING[1:]),
            *cases("expert overlap", OVERLAP_ONE_STAGE, [*OVERLAP_LOANS, *OVERLAP_DEDUP, *OVERLAP]),
            *cases("offload on one rank", OFFLOAD_ONE_RANK[:1], OFFLOAD_ONE_RANK[1:]),
            *cases("offload with recomputation", OFFLOAD_RECOMPUTED[:1], OFFLOAD_RECOMPUTED[1:]),
            *cases("offload", OFFLOAD_MAPPED[:1], OFFLOAD_MAPPED[1:]),
            *cases("offload under a schedule", OFFLOAD_SCHEDULED[:1], [*OFFLOAD_SCHEDULED[1:], *_offload_mixed()]),
            *cases("offload under a schedule from a file", [], OFFLOAD_FROM_FILE),
            *cases(
                "offload with expert overlap", OFFLOAD_OVERLAPPED[1:2], [OFFLOAD_OVERLAPPED[0], *OFFLOAD_OVERLAPPED[2:]]
            ),
            *cases("offload of routing", [], OFFLOAD_ROUTING),
        ]
    ),
    *cases("optimizer offload", OPTIMIZER_OFFLOAD[:1], OPTIMIZER_OFFLOAD[1:]),
]
