"""The search leaves nothing out that could win: compared with pricing every mapping of small worlds."""

from dataclasses import replace

import numpy as np
import pytest

from moefold.plan.device import load_device
from moefold.plan.legality import Legality
from moefold.plan.mapping import OPTIMIZER, Mapping
from moefold.plan.memory import OVERHEAD_GIB, Memory
from moefold.plan.restriction import Restriction
from moefold.plan.search import Plan, Search
from moefold.plan.shape import shape_of
from moefold.plan.space import Fold, MappingSpace
from moefold.plan.stages import RecipeSplit
from moefold.plan.step_time import Pricer
from moefold.plan.workload import Workload
from tests.plan.recipes import RECIPES, on_ranks

NAMES = ("plain", "latent attention, padded to a capacity", "another order of the ranks", "dense")


def searched(name: str, world_size: int, room_gib: float, fixed: dict | None = None) -> Search:
    """A search on a device that has so much beside the overhead."""
    cfg = on_ranks(RECIPES[name], world_size)
    space = MappingSpace(Legality(cfg), Restriction(fixed or {}))
    device = replace(load_device("h100"), memory_gib=OVERHEAD_GIB + room_gib)
    workload = Workload(seq_len=cfg.train.seq_len, global_batch_size=cfg.train.global_batch_size)
    shape = shape_of(cfg.model)
    split = RecipeSplit(cfg, shape)
    memory = Memory(shape, workload, device, cfg, split)
    return Search(space, Pricer(shape, device, workload, memory.kept, split), memory)


def every_mapping(search: Search, fixed: dict | None = None) -> dict[Fold, list[Mapping]]:
    found: dict[Fold, list[Mapping]] = {}
    world = search.space.legality.base.parallel.world_size
    for values in MappingSpace(search.space.legality, Restriction(fixed or {})):
        tp, cp, pp, ep, etp = (values[axis] for axis in ("tp", "cp", "pp", "ep", "etp"))
        fold = Fold(tp, cp, world // (tp * cp * pp), pp, ep, etp, world // (ep * etp * pp))
        if values.pop("moments") == "host":
            values["offload"] = (*values["offload"], OPTIMIZER)
        found.setdefault(fold, []).append(Mapping(**values, dp=fold.dp, edp=fold.edp))
    return found


def check_folds(search: Search, step: int) -> None:
    """Compare every so manieth fold with the prices of all its mappings.

    All savers of a mapping are priced at once; that this is what each costs by itself is tested below.
    """
    without = every_mapping(search, {"recompute": (), "offload": ()})
    views = dict(search.space.folds)
    assert set(views) == set(without)
    for fold in sorted(without)[::step]:
        plan, fastest = search.best(fold, views[fold]), float("inf")
        for m in without[fold]:
            for probe in (m, replace(m, offload=(OPTIMIZER,))):
                savers = search.space.savers_with(m.overlap)
                seconds = search.pricer.step_times(probe, savers)
                fits = search.memory.room(probe).fitting(np.arange(len(savers)), savers)
                fastest = min(fastest, seconds[fits].min(initial=float("inf")))
        assert plan.memory.fits == (fastest < float("inf"))
        if plan.memory.fits:
            assert plan.time.total_s == pytest.approx(fastest, rel=1e-12)


@pytest.mark.parametrize("room_mib", [0.3, 0.5, 100.0])
def test_the_best_of_each_fold_is_the_best_of_all_its_mappings(room_mib):
    check_folds(searched("plain", 2, room_mib / 1024), 1)


@pytest.mark.slow
@pytest.mark.parametrize("room_mib", [0.3, 0.5, 1.0, 100.0])
@pytest.mark.parametrize("name", NAMES)
def test_the_best_of_each_fold_is_the_best_on_four_ranks(name, room_mib):
    check_folds(searched(name, 4, room_mib / 1024), 1)


def test_plans_are_ranked_best_first():
    plans = searched("plain", 4, 0.25 / 1024).ranked()
    assert len(plans) == len(searched("plain", 4, 1.0).space.folds)
    assert [plan.order for plan in plans] == sorted(plan.order for plan in plans)
    fits = [plan.memory.fits for plan in plans]
    assert fits == sorted(fits, reverse=True)


@pytest.mark.parametrize("name", NAMES[:3])
def test_times_and_memory_of_all_savers_are_those_of_each(name):
    search = searched(name, 2, 0.45 / 1024)
    for mappings in every_mapping(search).values():
        for m in mappings[::9973]:
            probe = replace(m, recompute=(), offload=tuple(part for part in m.offload if part == OPTIMIZER))
            savers = search.space.savers_with(m.overlap)
            i = savers.index((m.recompute, tuple(part for part in m.offload if part != OPTIMIZER)))
            seconds = search.pricer.step_times(probe, savers)[i]
            assert seconds == pytest.approx(search.pricer.step_time(m).total_s, rel=1e-12), m
            total = search.memory.room(probe).totals(np.array([i]), savers)[0]
            assert total == pytest.approx(search.memory.estimate(m).total, rel=1e-9), m


@pytest.mark.parametrize("room_mib", [0.5, 100.0])
def test_the_first_few_are_those_of_the_whole_ranking(room_mib):
    everything = [plan for plan in searched("plain", 4, room_mib / 1024).ranked() if plan.memory.fits]
    search = searched("plain", 4, room_mib / 1024)
    for count in (1, 3, 10):
        found = [plan.time.total_s for plan in search.first(count)]
        assert found == pytest.approx([plan.time.total_s for plan in everything[:count]], rel=1e-12)
    for place in range(0, len(everything), 5):
        faster = sum(plan.time.total_s < everything[place].time.total_s * (1 - 1e-9) for plan in everything)
        assert search.num_faster(everything[place].time.total_s * (1 - 1e-9)) == faster


def test_a_fixed_zero_is_searched():
    search = searched("plain", 2, 1.0, {"zero": 0})
    assert {plan.mapping.zero for plan in search.ranked()} == {0}


def test_what_is_bound_by_memory_says_so():
    search = searched("plain", 4, 1.0)
    plan = search.ranked()[0]
    assert "memory" not in plan.binding
    again = search.price(replace(plan.mapping, recompute=("layer",)))
    assert isinstance(again, Plan)
    assert again.binding.endswith("+ memory")
