"""Mappings, rank orders, ZeRO levels, kinds of models, dropping and pipeline schedules that must equal the oracle."""

from collections.abc import Sequence

from tests.verify.cases import (
    BATCH_8,
    BATCH_16,
    PIPELINE_AXES,
    SPLIT_SCHEDULES,
    Case,
    Settings,
    cases,
    few,
    in_one_step,
    mapping_levels,
)
from tests.verify.covering import covering_rows
from tests.verify.recipes import LATENT, legal_mappings

# Mappings: every legal mapping of one and two ranks, and a spread of the legal mappings of four and eight ranks.

CONTEXTS = ("ring", "allgather", "ulysses")
DISPATCHERS = ("alltoall", "allgather")


def _with_rotating_kinds(mappings: Sequence[dict[str, int]]) -> list[Settings]:
    """Spread the kinds of context, dispatcher and zero over a sweep, so that neighbours differ."""
    spread = []
    for i, mapping in enumerate(mappings):
        kinds: Settings = {"zero": i % 4, "dispatcher": DISPATCHERS[i // 4 % 2], "context": CONTEXTS[i % 3]}
        if mapping["ep"] * mapping["etp"] == 1:
            kinds["dispatcher"] = "alltoall"
        if mapping["tp"] * mapping["cp"] > 4 and kinds["context"] == "ulysses":
            kinds["context"] = "ring"
        spread.append({**mapping, **kinds})
    return spread


ONE_AND_TWO = _with_rotating_kinds(legal_mappings(1) + legal_mappings(2))
FEW_TWO = ONE_AND_TWO[1:2]
"""One of two replicas: mappings of four ranks have each pair of axes, and rows of features each axis by itself."""
FOUR = _with_rotating_kinds(legal_mappings(4))
FEW_FOUR = covering_rows(FOUR, levels=mapping_levels)
NAMED = [
    {"world_size": 8, "tp": 2, "cp": 2, "pp": 1, "ep": 8, "etp": 1},
    {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4, "etp": 1},
    {"world_size": 8, "tp": 1, "cp": 1, "pp": 2, "ep": 2, "etp": 2},
    {"world_size": 8, "tp": 4, "cp": 2, "pp": 1, "ep": 2, "etp": 4},
]
"""Mappings of eight ranks that the paper and the quickstart name."""
ALL_EIGHT = legal_mappings(8)
EIGHT = _with_rotating_kinds(NAMED + [m for m in ALL_EIGHT[:: len(ALL_EIGHT) // 24] if m not in NAMED][:24])
MAPPINGS = [
    *cases("mapping of 1 rank", ONE_AND_TWO[:1]),
    *cases("mapping of 2 ranks", map(few, FEW_TWO), [few(m) for m in ONE_AND_TWO[2:]]),
    *cases("mapping of 4 ranks", map(few, FEW_FOUR), [few(m, 4) for m in FOUR if m not in FEW_FOUR]),
    *cases("mapping of 8 ranks", [], map(few, EIGHT)),
    *cases(
        "mapping of 16 ranks",
        [],
        [
            {"world_size": 16, "train": {"global_batch_size": 16}, **degrees}
            for degrees in (
                {"tp": 2, "cp": 2, "pp": 2, "ep": 8},
                {"tp": 4, "cp": 2, "pp": 2, "ep": 2, "etp": 4},
                {"tp": 2, "cp": 4, "ep": 8, "etp": 2, "context": "allgather"},
                {"tp": 1, "cp": 2, "pp": 4, "ep": 4, "zero": 3},
            )
        ],
    ),
]

# Rank orders that fold the expert groups over other ranks of attention than the default does.

ORDERS = [
    few({"world_size": world_size, "order": order, "moe_order": moe_order, **degrees})
    for world_size, order, moe_order, degrees in (
        (4, "pp-tp-cp-dp", "pp-edp-ep-etp", {"tp": 2, "ep": 2}),
        (8, "cp-pp-tp-dp", "ep-pp-etp-edp", {"tp": 2, "cp": 2, "pp": 2, "ep": 2}),
        (8, "pp-tp-cp-dp", "pp-edp-ep-etp", {"tp": 2, "cp": 2, "ep": 2, "etp": 2}),
        (8, "pp-dp-cp-tp", "pp-ep-edp-etp", {"tp": 2, "cp": 2, "ep": 2, "etp": 2}),
        (8, "dp-cp-tp-pp", "edp-etp-ep-pp", {"tp": 2, "pp": 2, "ep": 2, "etp": 2}),
        (8, "dp-pp-cp-tp", "edp-pp-ep-etp", {"tp": 2, "pp": 2, "ep": 2}),
        (8, "pp-cp-dp-tp", "pp-etp-edp-ep", {"tp": 2, "cp": 4, "ep": 4, "etp": 2}),
    )
]

# ZeRO levels under accumulation.

ZERO = [
    {"world_size": 4, "pp": pp, "ep": 2, "zero": zero, "train": {"global_batch_size": 8}}
    for pp in (2, 1)
    for zero in (0, 1, 2, 3)
]

# Kinds of models, each under each mapping of four ranks; on two ranks in `make test`.

MODELS: dict[str, Settings] = {
    "qwen3": {"attention.qk_norm": {}, "ffn.moe.router.softmax": "pre", "rope.theta": 1e6},
    "qwen2": {
        "attention.qkv_bias": True,
        "ffn.moe.shared.intermediate_size": 16,
        "ffn.moe.shared.gate": True,
        "ffn.moe.router.softmax": "pre",
    },
    "tied": {"tie_embeddings": True, "ffn.moe.shared.intermediate_size": 16},
    "dense-and-moe": {"layers.ffn": "dense, moe", "attention.rope_fraction": 0.5, "attention.qk_norm": {}},
    "llama3-rope": {
        "rope.scaling": "llama3",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_seq_len": 12,
        "ffn.moe.top_k": 8,
    },
    "yarn": {
        "rope.scaling": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_seq_len": 12,
        "rope.theta": 30.0,
        "rope.scaling.beta_fast": 2.0,
        "rope.scaling.beta_slow": 0.5,
        "rope.interleaved": True,
    },
    "few-experts": {
        "ffn.moe.num_experts": 2,
        "ffn.moe.top_k": 1,
        "ffn.moe.router.softmax": "pre",
        "rope.scaling": "linear",
        "rope.scaling.factor": 2.0,
    },
}
MODEL_MAPPINGS = [
    {"world_size": 4, "tp": 2, "pp": 2, "ep": 2},
    {"world_size": 4, "tp": 2, "cp": 2, "ep": 2},
    {"world_size": 4, "cp": 2, "pp": 2},
    {"world_size": 4, "tp": 4, "etp": 4},
]
MODEL_AXES = ({"tp": 2, "ep": 2}, {"cp": 2}, {"pp": 2}, {"tp": 2, "etp": 2})
"""Mappings of two ranks: each model is fast under one of them."""


def _model_kinds() -> list[Case]:
    found: list[Case] = []
    for i, (kind, model) in enumerate(MODELS.items()):
        fast = [few({"model": model, "world_size": 2, **MODEL_AXES[i % 4]}, 4)]
        found += cases(f"model {kind}", fast, [few({"model": model, **mapping}, 4) for mapping in MODEL_MAPPINGS])
    return found


# Dropping.

DROPPING = [
    {
        "moe": {"capacity_factor": 0.75, "drop_policy": policy, "drop_scope": scope, "pad_to_capacity": pads},
        "train": {"micro_batch_size": 2},
        "dispatcher": dispatcher,
        "world_size": 4,
        "tp": 2,
        "cp": 2,
        "ep": 2,
        "etp": 2,
    }
    for scope, pads in (("full_sequence", False), ("sub_sequence", False), ("sub_sequence", True))
    for policy in ("probs", "position")
    for dispatcher in DISPATCHERS
]
FEW_DROPPING = [DROPPING[0]]

# Pipeline schedules and layouts.

TIED = {"tie_embeddings": True}
MTP = {"mtp_layers": 1, "layers.ffn": "dense, moe"}
BIASED = {
    "ffn.moe.bias": True,
    "attention.qkv_bias": True,
    "ffn.moe.shared.intermediate_size": 16,
    "ffn.moe.shared.gate": True,
}
LATENT_MTP = LATENT | {"attention.v_head_dim": 6, "mtp_layers": 2, "tie_embeddings": True}
SCHEDULES = [
    {
        "model": TIED | {"layers": 5},
        "train": BATCH_8,
        "world_size": 4,
        "pp": 2,
        "ep": 2,
        "schedule": schedule,
        "virtual_stages": virtual_stages,
        "zero": zero,
    }
    for zero, schedule, virtual_stages in (
        (1, "gpipe", 1),
        (3, "1f1b", 1),
        (1, "interleaved", 2),
        (3, "interleaved", 2),
        (1, "1f1b", 1),
        (3, "gpipe", 1),
    )
]
SCHEDULES_OF_TWO_RANKS = [SCHEDULES[i] | {"world_size": 2, "ep": 1, "train": {"global_batch_size": 4}} for i in (0, 2)]
SPLIT_BACKWARD = [
    few({"pp": 2, **settings})
    for settings in (
        {"schedule": "zero-bubble", "model": BIASED, "world_size": 2},
        {"schedule": "zero-bubble", "model": TIED, "world_size": 2, "virtual_stages": 2, "zero": 3},
        {
            "schedule": "zbv",
            "virtual_stages": 2,
            "model": MTP | {"layers": 3},
            "world_size": 2,
            "pipeline_layout": "E|tt||tmL",
        },
        {"schedule": "dualpipev", "virtual_stages": 2, "model": TIED, "world_size": 2},
    )
]


def _split_backward_mixed() -> list[Settings]:
    """Return each schedule with each axis on four ranks, then longer pipelines. Models and zero levels rotate."""
    models = ({}, TIED, MTP, BIASED, LATENT_MTP)
    cases: list[Settings] = []
    for i, (schedule, virtual_stages) in enumerate(SPLIT_SCHEDULES):
        base = {"train": BATCH_16, "schedule": schedule, "virtual_stages": virtual_stages}
        for j, axes in enumerate(PIPELINE_AXES):
            model = models[(i + 2 * j) % 5]
            cases.append(base | {"model": model, "world_size": 4, "pp": 2, "zero": (i + j) % 4, **axes})
        long = base | {"pp": 4, "zero": i % 4}
        cases.append(long | {"model": models[i], "world_size": 4})
        cases.append(long | {"model": models[i - 1], "world_size": 8, **PIPELINE_AXES[i]})
    return cases


SCHEDULE_FROM_FILE = [
    {
        "model": TIED,
        "world_size": 2,
        "pp": 2,
        "virtual_stages": 2,
        "schedule": "csv",
        "schedule_csv": (1, 0, 1, 0),
    },
    *(
        {
            "model": LATENT_MTP,
            "train": BATCH_8,
            "world_size": 4,
            "pp": 2,
            "virtual_stages": 3,
            "schedule": "csv",
            "schedule_csv": (0, 1, 1, 0, 0, 1),
            **axes,
        }
        for axes in PIPELINE_AXES
    ),
]
LAYOUTS = [
    few({"model": TIED | {"layers": 3, "layers.ffn": "dense, 2 moe"}, "world_size": 2, "pp": 2, **settings})
    for settings in (
        {"pipeline_layout": "E|tttL", "schedule": "gpipe"},
        {"pipeline_layout": "Et||tt|L", "schedule": "interleaved", "virtual_stages": 2, "zero": 2},
        {"pipeline_layout": "auto", "schedule": "1f1b", "zero": 3},
    )
]
LAYOUTS_MIXED = [
    {
        "model": TIED | {"layers": 5, "layers.ffn": "dense, moe", "mtp_layers": 1},
        "train": BATCH_16,
        "schedule": schedule,
        "pipeline_layout": layout,
        **parallel,
    }
    for schedule, layout, parallel in (
        ("gpipe", "E|ttt|tt|mL", {"world_size": 4, "pp": 4}),
        ("1f1b", "E|ttt|tt|mL", {"world_size": 8, "pp": 4, "tp": 2, "ep": 2}),
        ("1f1b", "auto", {"world_size": 4, "pp": 4, "zero": 2}),
        ("interleaved", "E|t|t|t||tt||mL", {"world_size": 4, "pp": 4, "virtual_stages": 2}),
        ("interleaved", "Et|tt|||tt|mL", {"world_size": 4, "pp": 2, "virtual_stages": 3, "cp": 2}),
        ("zero-bubble", "E||ttt||tt|mL", {"world_size": 4, "pp": 2, "virtual_stages": 3, "ep": 2, "zero": 3}),
        ("zbv", "E|t|t|t|t||t|mL", {"world_size": 4, "pp": 4, "virtual_stages": 2}),
        ("dualpipev", "E|ttt|tt|mL", {"world_size": 4, "pp": 2, "virtual_stages": 2, "etp": 2, "zero": 2}),
    )
]

CASES = [
    *MAPPINGS,
    *cases("zero level", [], ZERO),
    *cases("schedule", [], [*SCHEDULES_OF_TWO_RANKS, *SCHEDULES]),
    # Two steps: the second one reads the copy of the tied embedding.
    *cases("schedule from a file", SCHEDULE_FROM_FILE[:1], SCHEDULE_FROM_FILE[1:]),
    *in_one_step(
        [
            *cases("rank order", ORDERS[:1], ORDERS[1:]),
            *_model_kinds(),
            *cases("dropping", FEW_DROPPING, [case for case in DROPPING if case not in FEW_DROPPING]),
            *cases(
                "fewer experts than data-parallel ranks",
                [{"model": {"ffn.moe.num_experts": 2}, "world_size": 4, "zero": 2}],
            ),
            *cases(
                "ulysses repeats key-value heads",
                [
                    few(
                        {
                            "model": {
                                "attention.num_heads": 12,
                                "attention.num_kv_heads": 6,
                                "hidden_size": 24,
                                "attention.qk_norm": {},
                            },
                            "world_size": 4,
                            "cp": 4,
                            "context": "ulysses",
                        }
                    )
                ],
            ),
            *cases("split backward", SPLIT_BACKWARD[1:], [SPLIT_BACKWARD[0], *_split_backward_mixed()]),
            *cases("pipeline layout", LAYOUTS[:2], [*LAYOUTS[2:], *LAYOUTS_MIXED]),
        ]
    ),
]
