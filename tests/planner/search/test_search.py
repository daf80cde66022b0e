"""The search leaves nothing out that could win: compared with pricing every mapping of small worlds."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from moefold.cost.hardware import load_device
from moefold.planner.cost_model.workload import workload_from_config
from moefold.planner.mapping import OFFLOADED_OPTIMIZER
from moefold.planner.memory.budget import OVERHEAD_GIB
from moefold.planner.model_spec import model_spec_from_config
from moefold.planner.planner import Planner, PlanRequest
from moefold.planner.search.memory_filter import MicroBatchChoice, with_strategy
from moefold.planner.search.search import PlannedMapping, Search, SearchTarget
from moefold.recipe import load_config
from tests.models import edit_model
from tests.planner.recipes import RECIPES, on_ranks
from tests.planner.search.exhaustive import assert_folds, every_mapping, found_by, priced, searching
from tests.slow import slow

MUON = replace(RECIPES["plain"], train=replace(RECIPES["plain"].train, optimizer="muon"))
CASES = {**RECIPES, "Muon": MUON}
NAMES = ("plain", "latent attention, padded to a capacity", "another order of the ranks", "dense", "Muon")
FEW_MAPPINGS = [
    (NAMES[0], {"moments": "none", "pp": 1, "zero": 1}),
    (NAMES[1], {"moments": "host", "pp": 2, "zero": 3}),
]
ALL_MAPPINGS = [(name, {}) for name in NAMES[:3]]


def searched(name: str, world_size: int, room_gib: float, fixed: dict | None = None) -> Search:
    """A search of a small recipe."""
    return searching(on_ranks(CASES[name], world_size), room_gib, fixed)


@pytest.mark.parametrize("room_mib", [0.3, *slow([(0.5,), (100.0,)])])
def test_the_best_of_each_fold_is_the_best_of_all_its_mappings(room_mib):
    assert_folds(searched("plain", 2, room_mib / 1024))


@pytest.mark.parametrize("share", [0.02, *slow([(0.1,), (0.3,)])])
def test_a_slower_dispatcher_that_keeps_less_is_found(share):
    """With a capacity below 1 an all-gather keeps fewer results than tokens have copies, which an exchange returns."""
    plain, fixed = RECIPES["plain"], {"overlap": False, "zero": 1}
    model, moe = (
        edit_model(plain.model, {"ffn.moe.num_experts": 8, "ffn.moe.top_k": 6}),
        replace(plain.moe, capacity_factor=0.5),
    )
    cfg = on_ranks(replace(plain, model=model, moe=moe), 2)
    roomy = searching(cfg, 100.0, fixed)
    probes = every_mapping(roomy, {**fixed, "recompute": (), "offload": ()})
    sizes = np.concatenate([priced(roomy, m)[1] for mappings in probes.values() for m in mappings])
    assert_folds(searching(cfg, np.quantile(sizes, share) / 2**30 - OVERHEAD_GIB, fixed), fixed)


@pytest.mark.slow
@pytest.mark.parametrize("room_mib", [0.3, 0.5, 1.0, 100.0])
@pytest.mark.parametrize("name", NAMES)
def test_the_best_of_each_fold_is_the_best_on_four_ranks(name, room_mib):
    assert_folds(searched(name, 4, room_mib / 1024))


def of_preset(preset: str, world_size: int, room_gib: float, fixed: dict) -> Search:
    """A search of a whole model, over a part of the space."""
    cfg = load_config(None, [f"model.preset={preset}", "train.seq_len=4096", "train.global_batch_size=32"])
    cfg = replace(on_ranks(cfg, world_size), run=replace(cfg.run, device="cuda"))
    return searching(cfg, room_gib, fixed)


@pytest.mark.parametrize(
    ("preset", "world_size", "room_gib", "fixed"),
    [
        pytest.param("mixtral-8x7b", 16, 60.0, {"pp": 4, "cp": 1, "etp": 1}, id="mixtral-8x7b-tight"),
        pytest.param("mixtral-8x7b", 16, 140.0, {"tp": 2, "zero": 1, "moments": "none"}, id="mixtral-8x7b-roomy"),
        pytest.param("qwen3-30b-a3b", 16, 70.0, {"tp": 1, "pp": 2}, id="qwen3-30b-a3b"),
        pytest.param("deepseek-v3", 256, 75.0, {"tp": 1, "cp": 1, "pp": 16, "etp": 1}, id="deepseek-v3"),
    ],
)
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_search_of_a_whole_model_leaves_nothing_out(preset, world_size, room_gib, fixed):
    assert_folds(of_preset(preset, world_size, room_gib, fixed), fixed)


def least_bytes(search: Search, fixed: dict) -> float:
    """Bytes of the smallest of every mapping."""
    mappings = every_mapping(search, {**fixed, "recompute": (), "offload": ()}).values()
    return min(priced(search, m)[1].min() for of_fold in mappings for m in of_fold)


@pytest.mark.parametrize("fixed", [{"pp": 2}, {"overlap": True, "zero": 1}, *slow([({"pp": 1, "mbs": 1},)])])
def test_where_nothing_fits_the_smallest_mapping_is_known(fixed):
    search = searched("plain", 2, 0.001 / 1024, fixed)
    assert found_by(search, 1) == []
    plan = search.smallest_plan()
    assert not plan.memory.fits
    assert plan.memory.total <= 1.01 * least_bytes(search, fixed)
    assert plan.memory.total == pytest.approx(search.memory.smallest[0], rel=1e-9)


@pytest.mark.parametrize(
    ("name", "fixed"),
    [
        (NAMES[0], {"pp": 1, "moments": "none", "zero": 1}),
        ("dense", {"pp": 1, "moments": "none", "zero": 1}),
        *((name, {"recompute": ("norms",), "pp": 2, "vpp": 1}) for name in NAMES[:2]),
        *slow((name, {"pp": 1, "moments": "none"}) for name in NAMES[:2]),
    ],
)
def test_whether_any_mapping_fits_is_known_without_prices(name, fixed):
    least = least_bytes(searched(name, 2, 1.0, fixed), fixed) / 2**30 - OVERHEAD_GIB
    for share, fits in ((0.5, False), (1 - 1e-4, False), (1 + 1e-4, True)):
        search = searched(name, 2, least * share, fixed)
        assert search.memory.any_fits == fits == bool(found_by(search, 1))


def test_one_large_micro_batch_without_accumulated_gradients_may_need_least():
    """With ZeRO-1, several small micro-batches keep the sums of whole gradients between them."""
    cfg = on_ranks(RECIPES["plain"], 2)
    cfg = replace(cfg, train=replace(cfg.train, seq_len=16, global_batch_size=4))
    fixed = {"zero": 1, **dict.fromkeys(("tp", "pp", "cp", "ep", "etp"), 1)}
    least = least_bytes(searching(cfg, 1.0, fixed), fixed) / 2**30 - OVERHEAD_GIB
    search = searching(cfg, least * (1 + 1e-4), fixed)
    assert search.memory.any_fits
    assert [plan.mapping.mbs for plan in found_by(search, 1)] == [2]


def test_rows_of_dropped_tokens_that_only_one_rank_keeps_are_not_a_lower_bound():
    """Experts of several ranks give up the rows that a capacity below 1 drops; one rank keeps them."""
    plain = on_ranks(RECIPES["plain"], 2)
    model = edit_model(plain.model, {"layers": 24, "ffn.moe.num_experts": 8, "ffn.moe.top_k": 6})
    cfg = replace(plain, model=edit_model(model, {"ffn.moe.intermediate_size": 64}))
    cfg = replace(cfg, moe=replace(cfg.moe, capacity_factor=0.25), run=replace(cfg.run, device="cuda"))
    cfg = replace(cfg, train=replace(cfg.train, seq_len=2048))
    fixed = {"recompute": (), "offload": (), "zero": 1, "moments": "none", "pp": 1}
    least = least_bytes(searching(cfg, 1000.0, fixed, offload=False), fixed) / 2**30 - OVERHEAD_GIB
    for share in (1 + 1e-4, 1.2):
        search = searching(cfg, least * share, fixed, offload=False)
        assert search.memory.any_fits
        assert found_by(search, 1)


def test_a_dispatcher_that_reserves_memory_leaves_small_batches():
    plain = on_ranks(RECIPES["plain"], 2)
    cfg = replace(plain, train=replace(plain.train, seq_len=2048, global_batch_size=8))
    cfg = replace(cfg, run=replace(cfg.run, device="cuda"))
    fixed = {"dispatcher": "symm_mem", "zero": 1, "moments": "none", "pp": 1}
    least = least_bytes(searching(cfg, 1000.0, fixed), fixed) / 2**30 - OVERHEAD_GIB
    for share in (1 + 1e-4, 1.05):
        search = searching(cfg, least * share, fixed)
        assert [plan.mapping.mbs for plan in search.plans_below(float("inf"))][:1] == [1]


def test_the_least_number_of_gpus_is_the_least_with_a_mapping_that_fits():
    cfg = on_ranks(RECIPES["plain"], 1)
    device = load_device("h100")
    for room_mib in (0.25, 0.35, 0.5, 100.0):
        request = PlanRequest(
            cfg,
            model_spec_from_config(cfg.model),
            replace(device, memory_gib=OVERHEAD_GIB + room_mib / 1024),
            workload_from_config(cfg.run, cfg.moe, cfg.train, "bf16"),
        )
        planners = ((count, Planner(request.with_num_gpus(count))) for count in range(1, 17))
        slow = next((count for count, one in planners if one.num_folds and one.search.find([SearchTarget()])[0]), None)
        assert Planner(request).smallest_num_gpus() == slow


@pytest.mark.parametrize(("name", "fixed"), [FEW_MAPPINGS[1], *slow([FEW_MAPPINGS[0], *ALL_MAPPINGS])])
def test_times_and_memory_of_all_savers_equal_each_by_itself(name, fixed):
    search = searched(name, 2, 0.45 / 1024)
    fixed = {"vpp": 2, "schedule": "interleaved"} | fixed
    for mappings in every_mapping(search, fixed).values():
        for m in mappings[::997]:
            probe = replace(m, recompute=(), offload=tuple(part for part in m.offload if part == OFFLOADED_OPTIMIZER))
            savers = search.space.strategies
            i = savers.index((m.recompute, tuple(part for part in m.offload if part != OFFLOADED_OPTIMIZER)))
            seconds, totals = (of_all[i] for of_all in priced(search, probe))
            assert seconds == pytest.approx(search.cost_model.step_time(m).total_s, rel=1e-12), m
            assert totals == pytest.approx(search.memory_model.estimate(m).total, rel=1e-9), m


def test_the_heaviest_moments_are_below_the_needed_memory():
    search = searched("plain", 4, 100.0)
    rng = np.random.default_rng(0)
    for mappings in every_mapping(search, {"recompute": (), "offload": (), "moments": "none", "zero": 1}).values():
        for m in mappings:
            heaviest, moments = search.memory_model.peak_candidates(m), search.memory_model.snapshots(m)
            states, kept = rng.random(heaviest.states.shape[1]), rng.random(heaviest.activations.shape[1])
            least, needed = ((of.states @ states + of.activations @ kept).max() for of in (heaviest, moments))
            assert 0.2 * needed < least <= needed * (1 + 1e-12)


def test_the_least_bytes_of_many_mappings_equal_each_by_itself():
    search = searched("plain", 4, 100.0)
    space, model, checked = search.space, search.memory_model, 0
    for fold, view in space.folds[::2]:
        mbs, pipelines = view.pipelines_by_mbs[-1]
        choice = MicroBatchChoice(fold, mbs, space.dispatchers(fold, mbs)[-1], False, pipelines)
        least = search.memory._least_bytes(choice, space.strategies)
        assert (search.memory.may_fit(choice) == (least <= search.memory.usable_bytes)).all()
        for (i, pipeline), (k, placement) in product(enumerate(pipelines), enumerate(search.memory.placements)):
            for j in range(k, len(space.strategies), 97):
                m = with_strategy(choice.mapping(pipeline, *placement), space.strategies, j)
                at = model.peak_candidates(m)
                states, saved = model.state_memory.bytes_by_part(m), model.activation_memory.bytes_by_part(m)
                each = (at.states @ states.T).sum(axis=1) + (at.activations @ saved.T).sum(axis=1)
                assert least[i, k, j] == pytest.approx(each.max() + model.workspace(m), rel=1e-12), m
                checked += 1
    assert checked > 100


@pytest.mark.parametrize("room_mib", [0.5, *slow([(100.0,)])])
def test_the_first_few_are_the_first_of_the_whole_ranking(room_mib):
    search = searched("plain", 4, room_mib / 1024)
    everything = found_by(search, 1000)
    assert [plan.sort_key for plan in everything] == sorted(plan.sort_key for plan in everything)
    assert all(plan.memory.fits for plan in everything)
    for count in (1, 10):
        found = [plan.time.total_s for plan in found_by(search, count)]
        assert found == pytest.approx([plan.time.total_s for plan in everything[:count]], rel=1e-12)
    for place in (0, 5, len(everything) // 2):
        faster = sum(plan.time.total_s < everything[place].time.total_s * (1 - 1e-9) for plan in everything)
        assert len(search.plans_below(everything[place].time.total_s * (1 - 1e-9))) == faster


@pytest.mark.parametrize("zero", range(4))
def test_a_fixed_zero_is_searched(zero):
    search = searched("plain", 2, 1.0, {"zero": zero})
    assert {plan.mapping.zero for plan in found_by(search, 1000)} == {zero}


def test_parts_bound_by_memory_say_so():
    search = searched("plain", 2, 1.0)
    (plan,) = found_by(search, 1)
    assert "memory" not in plan.bottleneck
    again = search.price(replace(plan.mapping, recompute=("layer",)))
    assert isinstance(again, PlannedMapping)
    assert again.bottleneck.endswith("+ memory")
