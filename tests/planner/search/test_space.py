"""The enumeration is exact: it equals brute force through the runtime's own `check_config`."""

from collections.abc import Iterator
from dataclasses import replace
from inspect import getattr_static, isfunction
from itertools import chain, combinations, islice, product
from types import MethodType
from typing import Any

import pytest

from moefold.config.base.part import make_part
from moefold.config.rule import apply_rule
from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.cost.recompute_parts import COMMON_PARTS, recompute_parts
from moefold.errors import ConfigError
from moefold.planner.model_spec import model_spec_from_config
from moefold.planner.search.constraints import (
    ALL_AXES_RULE,
    AXIS_KEYS,
    DERIVED_VALUES,
    MAPPING_RULES,
    MappingConstraints,
    Restriction,
)
from moefold.planner.search.space import MappingSpace
from moefold.planner.stage_splitter import RecipeStageSplitter
from moefold.validate.config import RULES, check_config
from tests.models import edit_model
from tests.planner.recipes import RECIPES, SMALL, on_ranks

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev")
DISPATCHERS = ("local", "allgather", "alltoall", "leastloaded", "deepep", "symm_mem")
UNCOUNTED = {"recompute": ("norms",), "offload": (), "moments": "none"}
FREE = {"zero": 2, **UNCOUNTED}
"""Common settings of the tuples of brute force, as `test_recompute_and_zero_are_free_of_the_rest` allows."""


def brute_force(cfg: Config, of: int = 1) -> Iterator[tuple[dict[str, Any], bool]]:
    """One of so many tuples of axes and whether the runtime accepts it, degrees and sizes that divide nothing included.

    Which of the tuples it is differs from fold to fold.
    """
    legality = MappingConstraints(cfg)
    world, batch, layers = cfg.parallel.world_size, cfg.train.global_batch_size, cfg.model.num_layers
    names = ("tp", "cp", "pp", "ep", "etp", "mbs", "schedule", "vpp", "dispatcher", "overlap")
    degrees = [range(1, world + 1)] * 5
    tails = list(product(range(1, batch + 1), SCHEDULES, range(1, layers + 4), DISPATCHERS, (False, True)))
    for number, head in enumerate(product(*degrees)):
        folds = accepts(replace(cfg, parallel=degrees_of(cfg, head)), fold_only=True)
        for tail in tails[number % of :: of]:
            values = dict(zip(names, (*head, *tail), strict=True))
            yield values, folds and accepts(written(legality.config_with({**values, **FREE})))


def written(cfg: Config) -> Config:
    """The recipe with stages of the planner's choice, if it has several and names none."""
    p = cfg.parallel
    several = p.pp * p.virtual_stages > 1 and not p.pipeline_layout
    return replace(cfg, parallel=replace(p, pipeline_layout="auto")) if several else cfg


def degrees_of(cfg: Config, head: tuple[int, ...]) -> ParallelConfig:
    tp, cp, pp, ep, etp = head
    return replace(cfg.parallel, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)


def accepts(cfg: Config, *, fold_only: bool = False) -> bool:
    try:
        check_config(cfg)
    except ConfigError as error:
        # A fold by itself is refused before any rule between keys; its messages speak of a divisor or an order.
        return fold_only and not ("must divide world_size" in str(error) or "different pp groups" in str(error))
    return True


def key(values: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(values[axis] for axis in AXIS_KEYS if axis not in FREE)


def assert_exact(cfg: Config, of: int = 1) -> None:
    """Compare the enumeration with brute force, and with one of every `of` tuples if `of` is more than 1."""
    space = MappingSpace(MappingConstraints(cfg), Restriction(fixed=FREE))
    found = [key(values) for values in space]
    assert len(found) == len(set(found)) == space.count()
    tried, expected = set(), set()
    for values, is_legal in brute_force(cfg, of):
        tried.add(key(values))
        if is_legal:
            expected.add(key(values))
    assert tried & set(found) == expected
    assert 0 < len(expected) < len(tried)
    if of == 1:
        assert set(found) == expected
    free = MappingSpace(MappingConstraints(cfg))
    overlapped = sum(values[-1] for values in found)
    plain = len(found) - overlapped
    # Two micro-batches at a time need parameters that stay.
    choices = (plain * 4 + overlapped * 3) * len(free.strategies)
    assert free.count() == choices * len(free.optimizer_placements)


@pytest.mark.parametrize("name", ["windows and an uneven batch"])
def test_enumeration_equals_brute_force(name):
    assert_exact(on_ranks(RECIPES[name], 2), 7)


ON_MORE_RANKS = [
    (world_size, name)
    for world_size in (1, 2, 3, 4)
    for name in RECIPES
    if (world_size, name) != (1, "stages spelled out")  # four stages need at least two ranks
]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "name"), ON_MORE_RANKS)
def test_enumeration_equals_brute_force_on_more_ranks(name, world_size):
    assert_exact(on_ranks(RECIPES[name], world_size))


@pytest.mark.parametrize("name", RECIPES)
def test_the_sets_to_recompute_are_those_that_the_runtime_accepts(name):
    legality = MappingConstraints(on_ranks(RECIPES[name], 1))
    found = MappingSpace(legality).recompute_sets
    subsets = chain.from_iterable(combinations(recompute_parts(), n) for n in range(len(recompute_parts()) + 1))
    one = {
        "offload": (),
        "overlap": False,
        "tp": 1,
        "cp": 1,
        "pp": 1,
        "ep": 1,
        "etp": 1,
        "mbs": 1,
        "schedule": "1f1b",
        "vpp": 1,
        "dispatcher": "local",
    }
    stages = RECIPES[name].parallel.pipeline_layout not in ("", "auto")
    cfg = legality.base_config if not stages else replace(legality.base_config, parallel=ParallelConfig())
    accepted = [parts for parts in subsets if accepts(MappingConstraints(cfg).config_with({**one, "recompute": parts}))]
    assert sorted(found) == sorted(accepted)
    assert found[0] == ()


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_enumerated_offloads_are_those_that_the_runtime_accepts(overlap):
    legality = MappingConstraints(on_ranks(RECIPES["plain"], 2))
    space = MappingSpace(legality, Restriction({"overlap": overlap, "ep": 2, **UNCOUNTED}))
    values = next(iter(space))
    recomputes = MappingSpace(legality).recompute_sets[::17]
    subsets = chain.from_iterable(combinations(COMMON_PARTS, n) for n in range(len(COMMON_PARTS) + 1))
    tried = [{**values, "recompute": parts, "offload": away} for parts, away in product(recomputes, subsets)]
    accepted = {(one["recompute"], one["offload"]) for one in tried if accepts(legality.config_with(one))}
    assert accepted == {
        saver for saver in MappingSpace(legality, Restriction(offload=True)).strategies if saver[0] in recomputes
    }
    assert len(accepted) < len(tried)


def test_no_stage_ends_between_a_shortcut_and_the_layer_after_it():
    model = edit_model(
        SMALL,
        {"layers": 4, "layers.ffn": "moe, dense", "ffn.moe.shortcut": True, "ffn.moe.shared.intermediate_size": 16},
    )
    constraints = MappingConstraints(on_ranks(replace(RECIPES["plain"], model=model), 4))
    one = dict.fromkeys(("tp", "cp", "ep", "etp"), 1)
    found = {values["pp"] * values["vpp"] for values in MappingSpace(constraints, Restriction(one | FREE))}
    # Two groups, the embedding and the loss.
    assert found == {1, 2, 4}


def test_no_stage_begins_between_layers_that_share_a_selection():
    head_dim = SMALL.softmax_attention.head_dim
    model = edit_model(
        SMALL,
        {
            "layers": 4,
            "attention.indexer.top_k": 4,
            "attention.indexer.head_dim": head_dim,
            "layers.selection": "own, shared",
        },
    )
    constraints = MappingConstraints(on_ranks(replace(RECIPES["plain"], model=model), 4))
    one = dict.fromkeys(("tp", "cp", "ep", "etp"), 1)
    found = {values["pp"] * values["vpp"] for values in MappingSpace(constraints, Restriction(one | FREE))}
    # Two groups, the embedding and the loss.
    assert found == {1, 2, 4}
    split = RecipeStageSplitter(constraints.base_config, model_spec_from_config(model))
    assert {
        chunk.start for number in found for chunk in (stage.layers for stage in split.parts(tuple(range(number))))
    } <= {0, 2, 4}


def test_every_rule_states_the_keys_that_it_reads():
    """A rule that came to read another axis would be asked too seldom."""
    said: dict[Any, set[str]] = {ALL_AXES_RULE: {"tp", "cp", "pp", "ep", "etp", "vpp"}}
    for rule, reads in chain.from_iterable(rules.items() for rules in MAPPING_RULES.values()):
        said[rule] = {
            axis for name in reads for axis in (DERIVED_VALUES[name][1] if name in DERIVED_VALUES else (name,))
        }
    for name, recipe in RECIPES.items():
        for values in islice(MappingSpace(MappingConstraints(on_ranks(recipe, 2))), 0, None, 9973):
            cfg = MappingConstraints(on_ranks(recipe, 2)).config_with(values)
            # The planner writes the stages where more of them than layers are searched.
            cfg = replace(cfg, parallel=replace(cfg.parallel, pipeline_layout=cfg.parallel.pipeline_layout or "auto"))
            for rule in (*RULES, *chain.from_iterable(MAPPING_RULES.values())):
                notes: set[str] = set()
                list(apply_rule(rule, noting(cfg, notes)))
                assert notes <= said.get(rule, set()), (name, rule)


def noting(cfg: Config, notes: set[str]) -> Config:
    """A config that notes which axes are read of it."""
    axis_of = {f"{section}.{key}": axis for axis, (section, key) in AXIS_KEYS.items()}

    class Noting:
        def __init__(self, section: str, part: Any) -> None:
            self.section, self.part = section, part

        def __getattr__(self, key: str) -> Any:
            name = f"{self.section}.{key}"
            if name in axis_of:
                notes.add(axis_of[name])
            declared = getattr_static(type(self.part), key, None)
            if isinstance(declared, property):
                return declared.fget(self)
            return MethodType(declared, self) if isfunction(declared) else getattr(self.part, key)

    class NotingConfig(Config):
        __slots__ = ()

    sections = {name: Noting(name, getattr(cfg, name)) for name in ("parallel", "train")}
    return NotingConfig(**{name: sections.get(name, getattr(cfg, name)) for name in Config.__dataclass_fields__})


def test_the_rule_that_reads_more_than_it_says_is_found():
    notes: set[str] = set()
    cfg = noting(on_ranks(RECIPES["plain"], 2), notes)
    assert (cfg.num_micro_batches, cfg.parallel.schedule.kind) == (2, "1f1b")
    assert notes == {"mbs", "tp", "cp", "pp", "schedule"}


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        ("coupled", lambda m: m["etp"] != m["tp"]),
        ("coupled+cp", lambda m: m["etp"] != m["tp"]),
        ("fsdp", lambda m: (m["pp"], m["ep"], m["zero"]) != (1, 1, 3)),
        ("fsdp+ep", lambda m: m["pp"] != 1 or m["ep"] == 1 or m["zero"] != 3),
        ("tp+ep+dp", lambda m: m["pp"] != 1 or m["zero"] != 1),
    ],
)
def test_methods_are_parts_of_the_space(method, wrong):
    cfg = on_ranks(RECIPES["plain"], 4)
    everything = [tuple(values.items()) for values in MappingSpace(MappingConstraints(cfg), Restriction(UNCOUNTED))]
    some = list(MappingSpace(MappingConstraints(cfg), Restriction(UNCOUNTED, method=method)))
    assert some
    assert not any(wrong(values) for values in some)
    assert {tuple(values.items()) for values in some} < set(everything)


def test_fixed_axes_filter_the_space():
    cfg = on_ranks(RECIPES["plain"], 4)
    fixed = {"tp": 2, "edp": 2, "mbs": 1, "schedule": "1f1b", **UNCOUNTED}
    some = list(MappingSpace(MappingConstraints(cfg), Restriction(fixed)))
    kept = [
        values
        for values in MappingSpace(MappingConstraints(cfg), Restriction(UNCOUNTED))
        if 4 // (values["ep"] * values["etp"] * values["pp"]) == 2
        and all(values[axis] == value for axis, value in fixed.items() if axis != "edp")
    ]
    assert some == kept
    assert some


def test_a_recipe_that_no_mapping_helps_is_refused():
    cfg = on_ranks(RECIPES["plain"], 2)
    with pytest.raises(ConfigError, match=r"train.lr_schedule.min_lr"):
        MappingConstraints(
            replace(cfg, train=replace(cfg.train, lr_schedule=make_part("lr_schedule", "cosine", min_lr=1.0)))
        )
    with pytest.raises(ConfigError, match=r"top_k"):
        MappingConstraints(replace(cfg, model=edit_model(cfg.model, {"ffn.moe.top_k": 9})))


def test_every_fold_has_a_legal_mapping():
    legality = MappingConstraints(on_ranks(RECIPES["plain"], 4))
    free, overlapped = MappingSpace(legality), MappingSpace(legality, Restriction({"overlap": True, "mbs": 2}))
    assert 0 < len(overlapped.folds) < len(free.folds)
    for space in (free, overlapped):
        for fold, view in space.folds:
            samples = list(space.sample_mappings(fold, view))
            assert samples, fold
            for values in samples:
                check_config(written(legality.config_with(values)))
    assert MappingSpace(legality, Restriction({"overlap": True, "zero": 3})).folds == ()
