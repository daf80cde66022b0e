"""The search of the planner, compared with the price of every mapping."""

from dataclasses import replace

import numpy as np
import pytest

from moefold.config.chosen import part_of_kind
from moefold.config.groups.dispatcher import DispatcherPart
from moefold.config.schema import Config
from moefold.cost.hardware import Device, load_device
from moefold.planner.cost_model.step import CostModel
from moefold.planner.cost_model.workload import workload_from_config
from moefold.planner.mapping import OFFLOADED_OPTIMIZER, ParallelMapping, PipelineVariant
from moefold.planner.memory.budget import OVERHEAD_GIB, MemoryModel
from moefold.planner.model_spec import model_spec_from_config
from moefold.planner.search.constraints import Fold, MappingConstraints, Restriction
from moefold.planner.search.memory_filter import MemoryFilter
from moefold.planner.search.search import PlannedMapping, Search, SearchTarget
from moefold.planner.search.space import MappingSpace
from moefold.planner.stage_splitter import RecipeStageSplitter


def found_by(search: Search, count: int) -> list[PlannedMapping]:
    """Return the best plans that fit, each of another fold."""
    return search.find([SearchTarget(count)])[0]


def searching(
    cfg: Config,
    room_gib: float,
    fixed: dict | None = None,
    device: Device | None = None,
    imbalance: float = 1.0,
    offload: bool = True,
) -> Search:
    """A search on a device that has so much beside the overhead."""
    space = MappingSpace(MappingConstraints(cfg), Restriction(fixed or {}, offload=offload))
    device = replace(device or load_device("h100"), memory_gib=OVERHEAD_GIB + room_gib)
    workload = workload_from_config(cfg.run, cfg.moe, cfg.train, "bf16", imbalance=imbalance)
    shape = model_spec_from_config(cfg.model)
    split = RecipeStageSplitter(cfg, shape)
    memory = MemoryModel(shape, workload, device, cfg, split)
    cost_model = CostModel(shape, device, workload, memory.activation_memory, split)
    return Search(cost_model, MemoryFilter(space, memory))


def every_mapping(search: Search, fixed: dict | None = None) -> dict[Fold, list[ParallelMapping]]:
    found: dict[Fold, list[ParallelMapping]] = {}
    world = search.space.constraints.base_config.parallel.world_size
    for values in MappingSpace(search.space.constraints, Restriction(fixed or {}, offload=True)):
        tp, cp, pp, ep, etp = (values[axis] for axis in ("tp", "cp", "pp", "ep", "etp"))
        fold = Fold(tp, cp, world // (tp * cp * pp), pp, ep, etp, world // (ep * etp * pp))
        if values.pop("moments") == "host":
            values["offload"] = (*values["offload"], OFFLOADED_OPTIMIZER)
        values["dispatcher"] = part_of_kind(search.space.constraints.base_config, DispatcherPart, values["dispatcher"])
        found.setdefault(fold, []).append(ParallelMapping(**values, dp=fold.dp, edp=fold.edp))
    return found


def priced(search: Search, probe: ParallelMapping) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and bytes of a mapping with every saver, none left out."""
    savers, pipeline = search.space.strategies, PipelineVariant(probe.schedule, probe.vpp)
    passes = search.cost_model.pass_times(probe, (pipeline,), savers)
    return search.cost_model.step_s(passes, probe, 0), search.memory_model.totals(probe, savers)


def fastest_of_all(search: Search, fixed: dict | None = None) -> dict[Fold, float]:
    """Seconds of the best mapping of each fold by pricing every mapping; inf where none fits.

    All savers of a mapping are priced at once; test_search.py tests that each has the same price by itself.
    """
    found = {}
    for fold, mappings in every_mapping(search, {**(fixed or {}), "recompute": (), "offload": ()}).items():
        found[fold] = float("inf")
        for m in mappings:
            seconds, totals = priced(search, m)
            fits = totals <= search.memory_model.device.memory_bytes
            found[fold] = min(found[fold], seconds[fits].min(initial=float("inf")))
    return found


def assert_folds(search: Search, fixed: dict | None = None) -> None:
    """Compare the search with the ranking of everything: each fold, the first few, and who is faster."""
    everything = fastest_of_all(search, fixed)
    assert set(dict(search.space.folds)) == set(everything)
    found = {plan.fold: plan for plan in search.plans_below(float("inf"))}
    for fold, fastest in everything.items():
        assert (fold in found) == (fastest < float("inf"))
        if fold in found:
            assert found[fold].memory.fits
            assert found[fold].time.total_s == pytest.approx(fastest, rel=1e-12)
    ranking = sorted(seconds for seconds in everything.values() if seconds < float("inf"))
    for count in (1, 10):
        found = [plan.time.total_s for plan in found_by(search, count)]
        assert found == pytest.approx(ranking[:count], rel=1e-12)
    for place in {0, len(ranking) // 3, 2 * len(ranking) // 3} if ranking else ():
        limit = ranking[place] * (1 - 1e-9)
        assert len(search.plans_below(limit)) == sum(seconds < limit for seconds in ranking)
        assert search.folds_below(limit) == {plan.fold for plan in search.plans_below(limit)}
