"""Every mapping equals the one-process float64 oracle: loss terms, norm, every gradient, weights after two steps."""

import math
from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from moefold.config.load import config_from_dict
from moefold.config.schema import Config
from moefold.data import open_dataset
from moefold.parallel.parallelize import parallelize
from moefold.train.batch import BatchSharder
from moefold.verify.compare import NamedError, OracleRecord, compare_records, run_oracle
from moefold.verify.distributed_run import create_groups, run_distributed
from moefold.verify.shrink import shrink
from tests.verify.covering import covering_rows, few_else_slow
from tests.verify.recipes import few_samples, legal_mappings, tiny, without_mapping

TOLERANCE = 1e-9
STEPS = 2


def assert_equals_oracle(pool, cfg: Config) -> None:
    """Run a recipe on its ranks and compare everything with the oracle; names the worst."""
    worst = compare(pool, cfg)[0]
    assert worst.error <= TOLERANCE, worst


def compare(pool, cfg: Config) -> list[NamedError]:
    """All differences between a recipe on its ranks and the oracle, worst first."""
    ranks = pool.run(cfg.parallel.world_size, run_distributed, cfg, STEPS)
    return compare_records(_oracle(cfg), ranks)


def _oracle(cfg: Config) -> OracleRecord:
    """The oracle of a recipe; recipes that differ in mapping alone share it, unless they say that it matters."""
    is_mapped = cfg.moe.drop_scope == "sub_sequence" or cfg.moe.aux_kind == "global_batch"
    return _cached_oracle(cfg if is_mapped else without_mapping(cfg))


@lru_cache(maxsize=64)
def _cached_oracle(cfg: Config) -> OracleRecord:
    return run_oracle(cfg, STEPS)


def _name(mapping: dict[str, object]) -> str:
    return "-".join(f"{key}{value}" for key, value in mapping.items() if value != 1)


CONTEXTS = ("ring", "allgather", "ulysses")
DISPATCHERS = ("alltoall", "allgather")


def _with_rotating_kinds(mappings: list[dict[str, int]]) -> list[dict[str, object]]:
    """Spread the kinds of context, dispatcher and zero over a sweep, so that neighbours differ."""
    spread = []
    for i, mapping in enumerate(mappings):
        kinds: dict[str, object] = {"zero": i % 4, "dispatcher": DISPATCHERS[i // 4 % 2], "context": CONTEXTS[i % 3]}
        if mapping["ep"] * mapping["etp"] == 1:
            kinds["dispatcher"] = "alltoall"
        if mapping["tp"] * mapping["cp"] > 4 and kinds["context"] == "ulysses":
            kinds["context"] = "ring"
        spread.append({**mapping, **kinds})
    return spread


@pytest.mark.parity
@pytest.mark.parametrize("mapping", _with_rotating_kinds(legal_mappings(1) + legal_mappings(2)), ids=_name)
def test_every_legal_mapping_of_two_ranks(pool, mapping):
    assert_equals_oracle(pool, tiny(**mapping))


FOUR = _with_rotating_kinds(legal_mappings(4))


@pytest.mark.parity
@pytest.mark.parametrize("mapping", few_else_slow(FOUR, covering_rows(FOUR, 1) + FOUR[::3]), ids=_name)
def test_every_legal_mapping_of_four_ranks(pool, mapping):
    assert_equals_oracle(pool, tiny(train={"global_batch_size": few_samples(4, mapping)}, **mapping))


NAMED = [
    {"world_size": 8, "tp": 2, "cp": 2, "pp": 1, "ep": 8, "etp": 1},
    {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4, "etp": 1},
    {"world_size": 8, "tp": 1, "cp": 1, "pp": 2, "ep": 2, "etp": 2},
    {"world_size": 8, "tp": 4, "cp": 2, "pp": 1, "ep": 2, "etp": 4},
]
"""Mappings of eight ranks that the paper and the quickstart name."""


def _spread_over_eight() -> list[dict[str, object]]:
    """Twenty-eight mappings of eight ranks: those with a name, then every seventh of all."""
    everything = legal_mappings(8)
    picked = [m for m in everything[:: max(1, len(everything) // 24)] if m not in NAMED][:24]
    return _with_rotating_kinds(NAMED + picked)


EIGHT = _spread_over_eight()


@pytest.mark.parity
@pytest.mark.parametrize("mapping", few_else_slow(EIGHT, covering_rows(EIGHT, 1) + EIGHT[: len(NAMED)]), ids=_name)
def test_mappings_of_eight_ranks(pool, mapping):
    assert_equals_oracle(pool, tiny(train={"global_batch_size": few_samples(8, mapping)}, **mapping))


ORDERS = [
    ("pp-dp-cp-tp", "pp-ep-edp-etp", {"tp": 2, "cp": 2, "ep": 2, "etp": 2}),
    ("pp-tp-cp-dp", "pp-edp-ep-etp", {"tp": 2, "cp": 2, "ep": 2, "etp": 2}),
    ("dp-cp-tp-pp", "edp-etp-ep-pp", {"tp": 2, "pp": 2, "ep": 2, "etp": 2}),
    ("dp-pp-cp-tp", "edp-pp-ep-etp", {"tp": 2, "pp": 2, "ep": 2}),
    ("cp-pp-tp-dp", "ep-pp-etp-edp", {"tp": 2, "cp": 2, "pp": 2, "ep": 2}),
    ("pp-cp-dp-tp", "pp-etp-edp-ep", {"tp": 2, "cp": 4, "ep": 4, "etp": 2}),
]
"""Rank orders that fold the expert groups over other ranks of attention than the default does."""


@pytest.mark.parity
@pytest.mark.parametrize(("order", "moe_order", "degrees"), ORDERS)
def test_every_rank_order_folds_to_the_same_result(pool, order, moe_order, degrees):
    mapping = {"world_size": 8, **degrees}
    train = {"global_batch_size": few_samples(8, mapping)}
    cfg = tiny(train=train, order=order, moe_order=moe_order, **mapping)
    assert_equals_oracle(pool, cfg)


@pytest.mark.parity
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("pp", [1, 2])
def test_zero_levels_under_accumulation(pool, zero, pp):
    cfg = tiny(train={"global_batch_size": 8}, world_size=4, pp=pp, ep=2, zero=zero)
    assert cfg.num_micro_batches > 1
    assert cfg.parallel.dp > 1
    assert_equals_oracle(pool, cfg)


MODELS: dict[str, dict[str, object]] = {
    "qwen3": {"qk_norm": True, "router_softmax": "pre", "rope_theta": 1e6},
    "qwen2": {
        "qkv_bias": True,
        "shared_expert_ffn_hidden_size": 16,
        "shared_expert_gate": True,
        "router_softmax": "pre",
    },
    "tied": {"tie_embeddings": True, "shared_expert_ffn_hidden_size": 16},
    "dense-and-moe": {"layer_pattern": "DM", "rope_fraction": 0.5, "qk_norm": True},
    "stretched": {"rope_scaling": "llama3", "rope_scaling_factor": 4.0, "rope_original_seq_len": 12, "top_k": 8},
    "yarn": {
        "rope_scaling": "yarn",
        "rope_scaling_factor": 4.0,
        "rope_original_seq_len": 12,
        "rope_theta": 30.0,
        "rope_beta_fast": 2.0,
        "rope_beta_slow": 0.5,
        "rope_interleaved": True,
    },
    "few-experts": {
        "num_experts": 2,
        "top_k": 1,
        "router_softmax": "pre",
        "rope_scaling": "linear",
        "rope_scaling_factor": 2.0,
    },
}


@pytest.mark.parity
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    "mapping",
    [{"tp": 2, "cp": 2, "ep": 2}, {"tp": 4, "etp": 4}, {"tp": 2, "pp": 2, "ep": 2}, {"cp": 2, "pp": 2}],
    ids=_name,
)
def test_every_kind_of_model(pool, kind, mapping):
    mapping = {"world_size": 4, **mapping}
    train = {"global_batch_size": few_samples(4, mapping)}
    assert_equals_oracle(pool, tiny(model=MODELS[kind], train=train, **mapping))


@pytest.mark.parity
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("zero", [1, 3])
def test_schedules(pool, schedule, zero):
    virtual_stages = 2 if schedule == "interleaved" else 1
    cfg = tiny(
        model={"tie_embeddings": True, "num_layers": 5},
        train={"global_batch_size": 8},
        world_size=4,
        pp=2,
        ep=2,
        schedule=schedule,
        virtual_stages=virtual_stages,
        zero=zero,
    )
    assert_equals_oracle(pool, cfg)


@pytest.mark.parity
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize(("scope", "pads"), [("full_sequence", False), ("sub_sequence", False), ("sub_sequence", True)])
def test_dropping(pool, dispatcher, policy, scope, pads):
    moe = {"capacity_factor": 0.75, "drop_policy": policy, "drop_scope": scope, "pad_to_capacity": pads}
    cfg = tiny(moe=moe, train={"micro_batch_size": 2}, world_size=4, tp=2, cp=2, ep=2, etp=2, dispatcher=dispatcher)
    assert_equals_oracle(pool, cfg)
    assert _oracle(cfg).steps[0].dropped > 0


def _rows_per_expert(cfg: Config) -> set[int]:
    """How many rows the experts of this rank got in one step."""
    model, seen = parallelize(cfg, create_groups(cfg)), set()
    for layer in model.moe_layers().values():
        layer.experts.register_forward_pre_hook(lambda _, args: seen.update(args[1]))
    data = open_dataset(cfg.data, seq_len=cfg.train.seq_len, vocab_size=cfg.model.vocab_size, seed=cfg.run.seed)
    model.forward_backward(BatchSharder(data.train, cfg, model.groups, model.positions).batch(0))
    return seen


@pytest.mark.parity
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize(
    ("scope", "mapping"),
    [("sub_sequence", {"cp": 2, "tp": 2, "ep": 4}), ("full_sequence", {"ep": 4}), ("full_sequence", {"etp": 4})],
)
def test_a_padded_expert_gets_its_capacity_from_each_rank_and_no_more(pool, dispatcher, scope, mapping):
    moe = {"capacity_factor": 0.75, "drop_scope": scope, "pad_to_capacity": True}
    cfg = tiny(moe=moe, train={"micro_batch_size": 2, "global_batch_size": 8}, world_size=4, **mapping)
    cfg = replace(cfg, parallel=replace(cfg.parallel, dispatcher=dispatcher))
    tokens = 2 * 16 // (cfg.parallel.cp * cfg.parallel.tp)
    # Two of eight experts for each token; four ranks send to every expert.
    assert pool.run(4, _rows_per_expert, cfg) == [{4 * math.ceil(tokens * 2 / 8 * 0.75)}] * 4


@pytest.mark.parity
def test_full_sequence_drops_are_the_same_under_every_mapping(pool):
    fractions = set()
    for mapping in (
        {"world_size": 1},
        {"world_size": 4, "tp": 4, "ep": 4},
        {"world_size": 4, "cp": 2, "pp": 2, "etp": 2},
    ):
        cfg = tiny(moe={"capacity_factor": 0.5}, **mapping)
        steps = pool.run(cfg.parallel.world_size, run_distributed, cfg, STEPS)[0].steps
        fractions.add(tuple(step.dropped_fraction for step in steps))
    (only,) = fractions
    assert all(0 < fraction < 1 for fraction in only)


@pytest.mark.parity
def test_experts_fewer_than_their_data_parallel_ranks_are_cut_by_rows(pool):
    assert_equals_oracle(pool, tiny(model={"num_experts": 2}, world_size=4, zero=2))


@pytest.mark.parity
@pytest.mark.parametrize(
    "mapping", [{"tp": 2, "cp": 2, "ep": 4}, {"tp": 2, "pp": 2, "ep": 2}, {"cp": 2, "etp": 2}], ids=_name
)
def test_float32_agrees_on_the_first_step(pool, mapping):
    cfg = tiny(world_size=4, **mapping)
    single = replace(cfg, run=replace(cfg.run, dtype="float32"))
    found = compare_records(run_oracle(without_mapping(cfg), 1), pool.run(4, run_distributed, single, 1))
    worst = next(d for d in found if d.name.startswith(("step 1", "initial")))
    assert worst.error <= 1e-5, worst
    # Tensors hold elements far smaller than their largest one: AdamW's first step divides by their magnitude.
    worst = next(d for d in found if d.name.startswith("gradients"))
    assert worst.error <= 1e-4, worst


@pytest.mark.slow
@pytest.mark.parametrize(
    "mapping",
    [
        {"tp": 2, "cp": 2, "pp": 2, "ep": 8},
        {"tp": 4, "cp": 2, "pp": 2, "ep": 2, "etp": 4},
        {"tp": 2, "cp": 4, "ep": 8, "etp": 2, "context": "allgather"},
        {"tp": 1, "cp": 2, "pp": 4, "ep": 4, "zero": 3},
    ],
    ids=_name,
)
def test_mappings_of_sixteen_ranks(pool, mapping):
    assert_equals_oracle(pool, tiny(train={"global_batch_size": 16}, world_size=16, **mapping))


@pytest.mark.slow
def test_the_papers_accuracy_run_in_miniature(pool):
    """A shrunk Mixtral-8x7B, TP2 CP2 PP2 EP8 ETP1 on 16 ranks: the loss curve is the oracle's (arXiv:2504.14960)."""
    degrees = {"world_size": 16, "tp": 2, "cp": 2, "pp": 2, "ep": 8, "etp": 1}
    cfg = config_from_dict(
        {
            "run": {"dtype": "float64", "steps": 30, "seed": 1},
            "model": {"preset": "mixtral-8x7b"},
            "parallel": degrees,
            "train": {"seq_len": 256, "micro_batch_size": 1, "global_batch_size": 32, "lr": 1e-2, "warmup_steps": 3},
        }
    )
    small = shrink(cfg)
    ranks = pool.run(16, run_distributed, small, 30, timeout_s=900.0)
    oracle = run_oracle(small, 30)
    curve = [step.loss for step in ranks[0].steps]
    assert curve == pytest.approx([step.loss for step in oracle.steps], rel=1e-9)
    assert curve[-1] < curve[0]


@pytest.mark.parity
@pytest.mark.parametrize(
    "mapping",
    [
        {"world_size": 1},
        {"world_size": 4, "tp": 2, "cp": 2, "ep": 4},
        {"world_size": 2, "zero": 3},
        {"world_size": 2, "pp": 2, "zero": 2},
    ],
    ids=_name,
)
def test_bfloat16_follows_the_oracle(pool, mapping):
    cfg = tiny(train={"seq_len": 32, "global_batch_size": 8}, **mapping)
    half = replace(cfg, run=replace(cfg.run, dtype="bfloat16"))
    record = pool.run(cfg.parallel.world_size, run_distributed, half, STEPS)[0]
    oracle = _oracle(cfg)
    assert [s.loss for s in record.steps] == pytest.approx([s.loss for s in oracle.steps], rel=5e-3)
    assert [s.grad_norm for s in record.steps] == pytest.approx([s.grad_norm for s in oracle.steps], rel=5e-2)
    if record.weights:
        assert {w.dtype for w in record.weights.values()} == {torch.float32}


@pytest.mark.parity
def test_ulysses_repeats_key_value_heads_that_the_ranks_do_not_divide(pool):
    model = {"num_attention_heads": 12, "num_query_groups": 6, "hidden_size": 24, "qk_norm": True}
    assert_equals_oracle(pool, tiny(model=model, world_size=4, cp=4, context="ulysses"))
