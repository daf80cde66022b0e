"""The cut of layers into stages: costs add up, no other cut is better, and memory parts are chosen last."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from moefold.config.presets import load_preset
from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.train import TrainConfig
from moefold.cost.auto_layout_memory import max_in_flight, unit_bytes
from moefold.cost.auto_recompute import with_recompute
from moefold.cost.flops import count_parameters, train_flops_per_token
from moefold.cost.peak_memory import compute_rank_memory
from moefold.cost.rank_state_memory import RankStateMemory
from moefold.cost.split_units import split_units
from moefold.cost.stage_balance import (
    MAX_SLOWDOWN_PCT,
    balanced_stages,
    plan_stages,
    split_model,
    stage_cost,
    unit_costs,
)
from moefold.topology.pipeline_layout import StageParts, format_layout, validate_layout
from tests.models import model_of


def _config(
    layout: str = "auto",
    *,
    model: dict[str, object] | None = None,
    train: dict[str, object] | None = None,
    **parallel: object,
) -> Config:
    return Config(
        model=model_of({"layers": 6, "layers.ffn": "dense, 2 moe"} | (model or {})),
        parallel=ParallelConfig(pipeline_layout=layout, **parallel),
        train=TrainConfig(**train or {}),
    )


@pytest.mark.parametrize("model", [{}, {"vocab_size": 200_000}, {"mtp_layers": 2}, {"layers.ffn": "moe"}])
def test_the_costs_of_the_parts_add_up_to_the_model(model):
    cfg = _config(model=model)
    loads = unit_costs(cfg.model, cfg.parallel, cfg.train, cfg.lora)
    assert sum(load.flops for load in loads) == train_flops_per_token(cfg.model, cfg.train.seq_len).forward
    # For MTP the last stage has a copy of the embedding.
    copy = count_parameters(cfg.model).embedding if cfg.model.mtp_layers else 0
    assert sum(load.num_parameters for load in loads) == count_parameters(cfg.model).total + copy


@pytest.mark.parametrize(
    "model",
    [
        {"layers.ffn": "moe"},
        {"preset": "deepseek-v2-lite"},
        {"tie_embeddings": True, "layers": 4},
        {"mtp_layers": 1, "layers": 4},
    ],
)
def test_the_parameters_of_a_stage_are_those_that_its_ranks_hold(model):
    """Sharded and replicated bytes of every tp rank by the exact formula of states."""
    sizes = load_preset(model["preset"]) if "preset" in model else model
    parallel = ParallelConfig(world_size=8, tp=4, pp=2, ep=2, zero=0)
    cfg = Config(model=model_of(sizes), parallel=parallel)
    stages = plan_stages(cfg).stages
    held = [states.weights // 4 for states in RankStateMemory(cfg).max_by_pp_rank]
    assert [stage_cost(cfg, stage.parts).num_parameters for stage in stages] == held
    one = replace(cfg, parallel=ParallelConfig())
    (whole,) = plan_stages(one).stages
    assert stage_cost(one, whole.parts).num_parameters == count_parameters(cfg.model).total


TIGHT = {"vocab_size": 5000, "hidden_size": 64, "attention.num_heads": 4, "ffn.dense.intermediate_size": 128}
ORACLE = {
    "plain": ({}, {}, {}),
    "vocabulary": ({"vocab_size": 200_000}, {}, {}),
    "small vocabulary": ({"vocab_size": 5000}, {}, {}),
    "experts": ({"layers.ffn": "moe"}, {}, {}),
    "further": ({"mtp_layers": 2, "vocab_size": 5000}, {}, {}),
    "long": (TIGHT, {"seq_len": 16384}, {}),
    "long gpipe": (TIGHT, {"seq_len": 16384}, {"schedule": "gpipe"}),
    "long, layers again": (TIGHT, {"seq_len": 16384, "recompute": ("layer",)}, {}),
}


def _bounds(stages: tuple[StageParts, ...], num_units: int) -> tuple[int, ...]:
    ends = [stage.layers.stop + 1 for stage in stages[:-1]]
    return (0, *ends, num_units)


@pytest.mark.parametrize("name", ORACLE)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 5, 8])
def test_no_other_cut_is_better(name, num_stages):
    """No cut has a smaller product of operations squared and bytes, within the pace that is allowed."""
    model, train, parallel = ORACLE[name]
    cfg = _config(model=model, train=train, world_size=num_stages, pp=num_stages, **parallel)
    loads = unit_costs(cfg.model, cfg.parallel, cfg.train, cfg.lora)
    sizes = unit_bytes(cfg, num_stages)

    def judged(bounds: tuple[int, ...]) -> tuple[int, int]:
        stages = list(enumerate(pairwise(bounds)))
        pace = max(sum(load.flops for load in loads[a:b]) for _, (a, b) in stages)
        return pace, max(sum(sizes[i][a:b]) for i, (a, b) in stages)

    found = judged(_bounds(balanced_stages(cfg), len(loads)))
    cuts = [judged((0, *inner, len(loads))) for inner in combinations(range(1, len(loads)), num_stages - 1)]
    fastest = min(pace for pace, _ in cuts)
    allowed = [
        (pace * pace * fullest, pace) for pace, fullest in cuts if pace * 100 <= fastest * (100 + MAX_SLOWDOWN_PCT)
    ]
    assert (found[0] ** 2 * found[1], found[0]) == min(allowed)


@pytest.mark.parametrize("vocab_size", [256, 5000, 200_000])
@pytest.mark.parametrize(
    "ranks", [(0,), (0, 1), (0, 1, 2), (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 0, 1, 2), (0, 1, 0, 1, 0, 1), (*range(8),)]
)
def test_no_other_cut_is_faster(ranks, vocab_size):
    """No cut has a busiest rank, the sum of its stages, with fewer operations."""
    cfg = _config(model={"vocab_size": vocab_size})
    loads = unit_costs(cfg.model, cfg.parallel, cfg.train, cfg.lora)

    def pace(bounds: tuple[int, ...]) -> int:
        stages = [sum(x.flops for x in loads[a:b]) for a, b in pairwise(bounds)]
        return max(sum(work for work, r in zip(stages, ranks, strict=True) if r == rank) for rank in set(ranks))

    found = pace(_bounds(split_model(cfg.model, cfg.train, cfg.lora, ranks), len(loads)))
    assert found == min(pace((0, *cut, len(loads))) for cut in combinations(range(1, len(loads)), len(ranks) - 1))


LAYERS = {
    "equal": [10] * 10,
    "dense first": [7, 7, 7, *[10] * 7],
    "alternating": [10, 17] * 5,
    "three kinds": [3, 10, 10, 17, 10, 3, 17, 17, 10, 3],
}


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("loss", [0, 3, 25, 60])
@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (0, 1) * 2, (0, 1, 2) * 2, (0, 1) * 4, (0, 1, 2, 2, 1, 0)])
def test_no_other_split_of_units_is_better(layers, loss, ranks):
    flops = [0, *LAYERS[layers], loss]
    sizes = [[30 + 20 * k, *(40 + x + 5 * k for x in LAYERS[layers]), 35 + k] for k in range(len(ranks), 0, -1)]

    def judged(bounds: tuple[int, ...]) -> tuple[int, int]:
        work, size = ([0] * len(ranks) for _ in range(2))
        for stage, (first, stop) in enumerate(pairwise(bounds)):
            work[ranks[stage]] += sum(flops[first:stop])
            size[ranks[stage]] += sum(sizes[stage][first:stop])
        return max(work), max(size)

    cuts = [judged((0, *inner, 12)) for inner in combinations(range(1, 12), len(ranks) - 1)]
    fastest = min(pace for pace, _ in cuts)
    assert judged(tuple(split_units(flops, ranks)))[0] == fastest
    found = judged(tuple(split_units(flops, ranks, sizes, 10)))
    assert found[0] ** 2 * found[1] == min(pace**2 * size for pace, size in cuts if pace * 100 <= fastest * 110)


@pytest.mark.parametrize(("pp", "chunks", "busiest"), [(32, 3, 3), (8, 4, 12), (16, 1, 6)])
def test_layers_are_balanced_over_the_chunks_of_a_rank(pp, chunks, busiest):
    """94 equal layers: counted stage by stage, ranks had 4 of pp32 x 3, or 2, where 3 are enough."""
    ranks = tuple(stage % pp for stage in range(pp * chunks))
    bounds = split_units([0, *[10] * 94, 12], ranks)
    held = [0] * pp
    for stage, (first, stop) in enumerate(pairwise(bounds)):
        held[ranks[stage]] += min(stop, 95) - max(first, 1)
    assert max(held) == busiest
    assert sum(held) == 94


def _deep(layout: str = "auto", **train: object) -> Config:
    model = {"layers": 48, "vocab_size": 1024, "layers.ffn": "dense"}
    train = {"seq_len": 4096, "global_batch_size": 64} | train
    return _config(layout, model=model, train=train, world_size=4, pp=4)


def _fullest(cfg: Config, layout: str) -> int:
    spelled = replace(cfg, parallel=replace(cfg.parallel, pipeline_layout=layout))
    return max(rank.total for rank in compute_rank_memory(spelled))


def test_long_samples_take_layers_off_the_first_stages():
    """1F1B has most micro-batches in flight on the first stage: a little speed buys more memory."""
    cfg = _deep(seq_len=4096)
    by_compute = "Et*12|t*12|t*12|t*12L"
    stages = balanced_stages(cfg)
    assert len(stages[0].layers) < 12
    saved = 1 - _fullest(cfg, format_layout(stages)) / _fullest(cfg, by_compute)
    slower = max(len(parts.layers) for parts in stages) / 12 - 1
    assert 0 < slower <= MAX_SLOWDOWN_PCT / 100
    assert saved > 0.1, (slower, saved)


def test_light_activations_leave_the_fastest_layout():
    assert format_layout(balanced_stages(_deep(seq_len=64))) == "Et*12|t*12|t*12|t*12L"
    assert format_layout(balanced_stages(_deep(recompute=("layer",), seq_len=256))) == "Et*12|t*12|t*12|t*12L"


def test_the_layout_of_auto_recompute_stays_when_parts_are_chosen():
    cfg = _deep(recompute=("auto",), memory_budget_gib=1.0)
    chosen = with_recompute(cfg, ("layer",))
    assert plan_stages(chosen) == plan_stages(cfg)
    spelled = replace(chosen, parallel=replace(chosen.parallel, pipeline_layout="auto"))
    assert plan_stages(spelled) != plan_stages(cfg), "it would follow the choice"


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zbv", 2)])
def test_in_flight_are_as_many_as_the_formulas_walk_through(schedule, chunks):
    cfg = _config("", train={"global_batch_size": 16}, world_size=4, pp=4, schedule=schedule, virtual_stages=chunks)
    most = max_in_flight(cfg, 4 * chunks)
    assert {"1f1b": [4, 3, 2, 1], "gpipe": [16] * 4}.get(schedule, most) == most
    for rank in compute_rank_memory(cfg):
        assert all(most[stage] >= count for stage, count in rank.activations.in_flight.items())


def test_a_large_vocabulary_gets_a_stage_of_its_own():
    cfg = _config(model={"vocab_size": 500_000}, world_size=4, pp=4)
    assert format_layout(balanced_stages(cfg)).endswith("|L")


@pytest.mark.parametrize("mtp_layers", [0, 2])
@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
def test_an_automatic_layout_is_a_layout_without_faults(mtp_layers, num_stages):
    cfg = _config(model={"mtp_layers": mtp_layers}, world_size=num_stages, pp=num_stages)
    text = format_layout(balanced_stages(cfg))
    assert list(validate_layout(text, num_layers=6, num_mtp_layers=mtp_layers, num_stages=num_stages)) == []


def test_hundreds_of_layers_are_cut_at_once():
    cfg = _config(model={"layers": 160}, world_size=32, pp=32, virtual_stages=4)
    assert len(balanced_stages(cfg)) == 128


def test_a_plan_knows_the_rank_of_every_layer():
    cfg = _config("E|tt|ttt|tmL", model={"mtp_layers": 1}, world_size=2, pp=2, schedule="zbv", virtual_stages=2)
    plan = plan_stages(cfg)
    assert plan.ranks == (0, 1, 1, 0)
    assert [stage.index for stage in plan.stages_of_rank(0)] == [0, 3]
    assert plan.rank_of_layers(6) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 0, 6: 0}
    assert plan.embedding_ranks == (0, 0)
    looped = plan_stages(replace(cfg, parallel=replace(cfg.parallel, schedule="interleaved")))
    assert looped.ranks == (0, 1, 0, 1)
    assert looped.rank_of_layers(6)[6] == 1
