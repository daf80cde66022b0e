from dataclasses import replace
from itertools import combinations

import pytest

from moefold.config.pipeline_layout import layout_faults, write_layout
from moefold.config.schema import Config, ModelConfig, ParallelConfig
from moefold.metrics.flops import count_parameters, train_flops_per_token
from moefold.parallel.stage_balance import (
    balanced_stages,
    embedding_load,
    layer_load,
    loss_load,
    stage_load,
)
from moefold.parallel.stage_plan import plan_stages


def _config(layout: str = "auto", *, model: dict[str, object] | None = None, **parallel: object) -> Config:
    return Config(
        model=ModelConfig(**{"num_layers": 6, "layer_pattern": "DMM"} | (model or {})),
        parallel=ParallelConfig(pipeline_layout=layout, **parallel),
    )


@pytest.mark.parametrize("model", [{}, {"vocab_size": 200_000}, {"mtp_layers": 2}, {"layer_pattern": "M"}])
def test_the_parts_cost_what_the_model_costs(model):
    cfg = _config(model=model)
    loads = [embedding_load(cfg), *(layer_load(cfg, i) for i in range(6)), loss_load(cfg)]
    assert sum(load.flops for load in loads) == train_flops_per_token(cfg.model, cfg.train.seq_len).forward
    if not cfg.model.mtp_layers:
        # The norm behind the last layer is counted with each of the layers that are counted alone.
        norms = 5 * cfg.model.hidden_size
        assert sum(load.weights for load in loads) == count_parameters(cfg.model).total + norms


@pytest.mark.parametrize("model", [{}, {"vocab_size": 200_000}, {"vocab_size": 5000}, {"layer_pattern": "M"}])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 5, 8])
def test_no_other_cut_has_a_faster_pace_and_none_as_fast_is_lighter(model, num_stages):
    cfg = _config(model=model, world_size=num_stages, pp=num_stages)
    loads = [embedding_load(cfg), *(layer_load(cfg, i) for i in range(6)), loss_load(cfg)]
    found = [stage_load(cfg, parts) for parts in balanced_stages(cfg)]
    assert len(found) == num_stages
    mine = max(load.flops for load in found), max(load.weights for load in found)
    others = []
    for inner in combinations(range(1, len(loads)), num_stages - 1):
        bounds = (0, *inner, len(loads))
        stages = [loads[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
        others.append(
            tuple(max(sum(getattr(x, key) for x in stage) for stage in stages) for key in ("flops", "weights"))
        )
    assert mine == min(others)


def test_a_large_vocabulary_gets_a_stage_of_its_own():
    cfg = _config(model={"vocab_size": 500_000}, world_size=4, pp=4)
    assert write_layout(balanced_stages(cfg)).endswith("|L")


@pytest.mark.parametrize("mtp_layers", [0, 2])
@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
def test_an_automatic_layout_is_a_layout_without_faults(mtp_layers, num_stages):
    cfg = _config(model={"mtp_layers": mtp_layers}, world_size=num_stages, pp=num_stages)
    text = write_layout(balanced_stages(cfg))
    assert list(layout_faults(text, num_layers=6, num_further=mtp_layers, num_stages=num_stages)) == []


def test_hundreds_of_layers_are_cut_at_once():
    cfg = _config(model={"num_layers": 160}, world_size=32, pp=32, virtual_stages=4)
    assert len(balanced_stages(cfg)) == 128


def test_a_plan_knows_the_rank_of_every_layer():
    cfg = _config("E|tt|ttt|tmL", model={"mtp_layers": 1}, world_size=2, pp=2, schedule="zbv", virtual_stages=2)
    plan = plan_stages(cfg)
    assert plan.ranks == (0, 1, 1, 0)
    assert [stage.number for stage in plan.of_rank(0)] == [0, 3]
    assert plan.rank_of_layers(6) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 0, 6: 0}
    assert plan.embedding_ranks == (0, 0)
    looped = plan_stages(replace(cfg, parallel=replace(cfg.parallel, schedule="interleaved")))
    assert looped.ranks == (0, 1, 0, 1)
    assert looped.rank_of_layers(6)[6] == 1
