"""The planner with document lengths: no mapping and no strategy of a small world is faster than the named one."""

from dataclasses import replace
from itertools import chain

import pytest

from moefold.config.base.part import make_part
from moefold.config.schema import Config
from moefold.config.sections.data import DataConfig
from moefold.config.sections.moe import MoEConfig
from moefold.cost.hardware import load_device
from moefold.errors import ConfigError
from moefold.planner.cost_model.workload import workload_from_config
from moefold.planner.export_recipe import render_recipe, write_recipe
from moefold.planner.lengths.balance import DocumentLoads
from moefold.planner.lengths.distribution import ListedLengths
from moefold.planner.lengths.samples import StreamedSamples
from moefold.planner.model_spec import model_spec_from_config
from moefold.planner.planner import Planner, PlanRequest
from moefold.planner.search.constraints import Restriction
from moefold.planner.search.document_search import candidate_strategies
from moefold.planner.search.search import SearchTarget
from moefold.recipe import load_config
from tests.models import edit_model
from tests.planner.recipes import RECIPES, on_ranks
from tests.planner.search.exhaustive import every_mapping, found_by

FIXED = {"zero": 1, "recompute": (), "offload": (), "moments": "none", "mbs": 1}
SEQ_LEN = 4096
LENGTHS = [64] * 6 + [500, 900, 4096]


def request(world_size: int, **fixed) -> PlanRequest:
    base = RECIPES["plain"]
    cfg: Config = on_ranks(base, world_size)
    model = edit_model(base.model, {"hidden_size": 512, "attention.num_heads": 8})
    cfg = replace(cfg, model=model, train=replace(cfg.train, seq_len=SEQ_LEN, global_batch_size=8))
    cfg = replace(cfg, data=DataConfig(document_end=0))
    loads = DocumentLoads(StreamedSamples(ListedLengths("", "", LENGTHS)), SEQ_LEN)
    return PlanRequest(
        base_config=cfg,
        model_spec=model_spec_from_config(model),
        device=load_device("h100"),
        workload=workload_from_config(cfg.run, cfg.moe, cfg.train, "bf16", attention=loads),
        restriction=Restriction({**FIXED, **fixed}),
    )


def test_the_best_mapping_of_every_fold_is_found_with_documents():
    asked = request(8, pp=1)
    search = Planner(asked).search.searches[make_part("context", "ring")]
    plans = found_by(search, 1000)
    found = {plan.mapping: plan.time.total_s for plan in plans}
    every = every_mapping(search, asked.restriction.fixed)
    assert len(every) == len(found) > 20
    for fold, mappings in every.items():
        priced = [search.price(mapping) for mapping in mappings]
        least = min(plan.time.total_s for plan in priced if plan.memory.fits)
        best = next(seconds for m, seconds in found.items() if (m.tp, m.cp, m.dp, m.pp, m.ep, m.etp) == fold[:6])
        assert best == pytest.approx(least), fold
    assert found_by(search, 3) == plans[:3]


def test_each_fold_gets_its_fastest_strategy():
    asked = request(8, cp=4, pp=1)
    planner = Planner(asked)
    assert make_part("context", "ring") in planner.search.searches
    assert any(strategy.is_planned for strategy in planner.search.searches)
    everything = planner.search.plans_below(float("inf"))
    alone = {
        strategy: {plan.fold: plan for plan in single.plans_below(float("inf"))}
        for strategy, single in planner.search.searches.items()
    }
    for plan in everything:
        m = plan.mapping
        for strategy, plans in alone.items():
            other = plans[plan.fold]
            assert plan.time.total_s <= other.time.total_s * (1 + 1e-12)
            if strategy == plan.attention:
                assert other.mapping == m
                assert planner.search_of(plan).cost_model.step_time(m) == plan.time
    best = planner.best()
    assert best.attention is not None
    assert best.attention.is_planned
    assert [p.mapping for p in planner.top_plans(4)] == [p.mapping for p in everything[:4]]
    assert planner.search.plans_below(best.time.total_s) == []
    parallel = planner.config_for(best).parallel
    assert parallel.context == best.attention
    assert (parallel.tp, parallel.cp) == (best.mapping.tp, best.mapping.cp)


def test_the_joint_search_equals_separate_searches_and_plans_fewer_rounds():
    asked = request(8, pp=1, etp=1, tp=1)
    every = Planner(asked)
    ranking = every.search.plans_below(float("inf"))
    joint = Planner(request(8, pp=1, etp=1, tp=1))
    assert joint.top_plans(3) == ranking[:3]
    times = sorted({plan.time.total_s for plan in ranking})
    # Between two times: a fold is priced by itself or among others, and these sums may differ in their last bit.
    limit = (times[len(times) // 2 - 1] + times[len(times) // 2]) / 2
    assert len(joint.search.plans_below(limit)) == sum(plan.time.total_s < limit for plan in ranking)
    assert joint.search.folds_below(limit) == {plan.fold for plan in ranking if plan.time.total_s < limit}
    few = request(8, pp=1, etp=1, tp=1)
    assert Planner(few).top_plans(1) == ranking[:1]
    assert 0 < len(few.workload.attention.known_sets) < len(asked.workload.attention.known_sets) / 2


@pytest.mark.parametrize("count", [1, 5])
def test_the_joint_search_finds_what_searches_without_a_limit_find(count):
    planner = Planner(request(8, etp=1, tp=1))
    joint = planner.search.joint_searches
    assert [len(search.variants) for search in joint] == [6, 1]
    targets = [SearchTarget(count), SearchTarget(count, zero_stages=(1,), accepts=lambda fold: fold.ep > 1)]
    alone = [search.find(targets) for search in planner.search.searches.values()]
    assert len(alone) == 7
    for found, *separate in zip(planner.search.find(targets), *alone, strict=True):
        best = {}
        for plan in sorted(chain.from_iterable(separate), key=lambda plan: plan.sort_key):
            best.setdefault(plan.fold, plan)
        assert found == list(best.values())[:count]
        assert len(found) == count


def test_strategies_with_other_legal_mappings_are_searched_alone():
    # A pool of two ranks allows no cp=4, but only where hosts are balanced.
    own = make_part("context", "planned", hosts="balanced", pool=2)
    asked = request(8, pp=1, etp=1, tp=1)
    loads = replace(asked.workload.attention, strategy=own)
    cfg = replace(asked.base_config, parallel=replace(asked.base_config.parallel, context=own))
    planner = Planner(replace(asked, base_config=cfg, workload=replace(asked.workload, attention=loads)))
    groups = [{one.attention.hosts for one in search.variants} for search in planner.search.joint_searches]
    assert groups == [{"balanced"}, {"home"}]
    found = planner.search.plans_below(float("inf"))
    assert {plan.mapping.cp for plan in found} == {1, 2, 4, 8}


def test_the_recipes_own_strategy_wins_ties():
    own = make_part("context", "allgather")
    strategies = candidate_strategies(own)
    assert strategies[0] == own
    assert len(strategies) == len(set(strategies)) == 7
    own = make_part("context", "planned", tolerance=0.3)
    strategies = candidate_strategies(own)
    assert strategies[0] == own
    assert len(strategies) == len(set(strategies)) == 6
    assert {strategy.tolerance for strategy in strategies} == {0.3}
    # Without context parallelism on one rank there is nothing to share.
    alone = Planner(request(1)).best()
    assert alone.attention == make_part("context", "ring")


def test_a_planned_recipe_has_no_key_of_attention_without_effect(tmp_path):
    own = make_part("context", "planned", placement="documents", hosts="balanced", tolerance=0.2, pool=4, block=64)
    asked = request(8, pp=1, tp=2, etp=1)
    cfg = replace(asked.base_config, parallel=replace(asked.base_config.parallel, context=own), moe=MoEConfig())
    loads = asked.workload.attention
    asked = replace(asked, base_config=cfg, workload=replace(asked.workload, attention=replace(loads, strategy=own)))
    planner = Planner(asked)
    plans = planner.search.plans_below(float("inf"))
    assert {plan.mapping.cp for plan in plans} >= {1, 2}
    for number, plan in enumerate(plans):
        path = tmp_path / f"{number}.toml"
        write_recipe(render_recipe(planner.config_for(plan), [], {}), path)
        load_config(path)


def test_no_mapping_is_an_error_as_without_documents():
    with pytest.raises(ConfigError, match="no mapping of 8 GPUs"):
        Planner(request(8, tp=3)).best()
