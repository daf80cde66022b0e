"""Methods of sites: keys that they set, runs that record them, keys of earlier versions, and refusals."""

import json

import pytest

from moefold.config.load import config_from_dict
from moefold.config.schema import config_to_dict
from moefold.config.upgrade.recipe import upgraded
from moefold.config.upgrade.refusals import upgraded_word
from moefold.config.upgrade.text import upgrade_text
from moefold.errors import ConfigError
from moefold.optim.outer_round import PendingRound
from moefold.recipe import load_config
from moefold.topology.fragments import RoundCalendar
from moefold.validate.config import check_config
from moefold_experiments.co2.part import CO2
from moefold_experiments.noloco.part import NoLoCo
from moefold_experiments.sparseloco.part import SparseLoCo
from moefold_experiments.spes.module import OuterOfOwners
from moefold_experiments.spes.part import SPES

TWO = ("sites.count=2", "run.steps=100")
OWN = (*TWO, "sites.method=spes")
KINDS = ("noloco", "sparseloco", "co2", "spes")


def test_a_method_fills_the_keys_that_are_left_out():
    sites = config_from_dict({"sites": {"count": 2, "method": "spes"}}).sites
    assert (sites.method, sites.every, sites.lr, sites.momentum) == (SPES(), 50, 1.0, 0.0)
    sites = config_from_dict({"sites": {"count": 2, "method": "co2", "every": 48}}).sites
    assert (sites.overlap, sites.lr, sites.momentum, sites.method) == (48, 1.0, 0.2, CO2(penalty=True, clip=1.0))
    assert config_from_dict({"sites": {"count": 2, "method": "co2"}}).sites.overlap == 30
    sites = config_from_dict({"sites": {"count": 2, "method": "sparseloco", "residual": 0.9}}).sites
    assert (sites.method, sites.residual, sites.momentum) == (SparseLoCo(density=1 / 64, bits=2), 0.9, 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_records_of_a_run_are_read_again(kind):
    cfg = load_config(None, ["sites.count=2", f"sites.method={kind}", "run.steps=300"])
    check_config(cfg)
    assert str(cfg.sites.method) == kind
    assert config_from_dict(json.loads(json.dumps(config_to_dict(cfg)))) == cfg


OFF = {
    "topology": "all",
    "experts": "average",
    "density": 1.0,
    "values": 32,
    "penalty": False,
    "clip": 0.0,
    "merge_experts": 0.0,
    "merge_every": 500,
    "merge_until": 10000,
}
"""The keys of an earlier run without these methods."""


@pytest.mark.parametrize("method", ["mean", {"kind": "KIND", "from": {"distribution": "moefold-experiments"}}])
@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"topology": "pairs"}, NoLoCo()),
        ({"experts": "own", "merge_experts": 0.2, "merge_every": 40}, SPES(merge_experts=0.2, merge_every=40)),
        ({"density": 0.25, "values": 8}, SparseLoCo(density=0.25, bits=8)),
        ({"penalty": True, "clip": 0.5}, CO2(clip=0.5)),
        ({"clip": 0.5}, CO2(penalty=False, clip=0.5)),
    ],
)
def test_an_earlier_run_has_its_settings(method, keys, part):
    """It records all keys, under a method by its name or under plain means."""
    table = method if isinstance(method, str) else method | {"kind": part.kind}
    tree, _ = upgraded({"sites": {"count": 2, "method": table, **OFF, **keys}})
    assert config_from_dict(tree).sites.method == part


def test_an_earlier_run_of_means_stays_one():
    tree, _ = upgraded({"sites": {"count": 2, "method": "mean", **OFF}})
    assert str(config_from_dict(tree).sites.method) == "mean"


@pytest.mark.parametrize(
    ("keys", "kind", "values"),
    [
        ({"density": 0.02}, "sparseloco", {"residual": 0.0, "lr": 1.0, "momentum": 0.0}),
        ({"topology": "pairs"}, "noloco", {"lr": 1.0, "momentum": 0.0, "nesterov": True, "every": 30}),
        (
            {"method": "streaming", "topology": "pairs", "lr": 0.5},
            "noloco",
            {"lr": 0.5, "momentum": 0.9, "precision": "fp4", "fragment_layers": 3, "overlap": 1, "keep_local": 0.5},
        ),
        ({"penalty": True, "overlap": 30}, "co2", {"momentum": 0.0, "nesterov": True, "overlap": 30}),
        ({"experts": "own"}, "spes", {"every": 30}),
        ({"method": "noloco", "topology": "all"}, "mean", {"lr": 0.7, "momentum": 0.5, "nesterov": False, "every": 50}),
        ({"method": "spes", "experts": "average"}, "mean", {"every": 50}),
        ({"method": "sparseloco", "density": 1.0, "precision": "int8"}, "mean", {"residual": 0.95}),
    ],
)
def test_keys_of_an_earlier_version_change_no_other_value(keys, kind, values, tmp_path):
    off = {"bits": 32, "penalty": False, "clip": 0.0, "merge_experts": 0.0}
    tree, _ = upgraded({"sites": {"count": 4, **keys}})
    sites = config_from_dict(tree).sites
    assert str(sites.method) == kind
    assert {key: getattr(sites, key) for key in values} == values
    for setting, value in off.items():
        assert getattr(sites.method, setting, value) == keys.get(setting, value)
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    text, _ = upgrade_text("\n".join(["[sites]", "count = 4", *lines]), "r.toml")
    (tmp_path / "r.toml").write_text(text)
    assert load_config(tmp_path / "r.toml").sites == sites


def test_keys_of_two_methods_are_refused_by_name():
    flat = {"sites": {"count": 4, "topology": "pairs", "density": 0.02, "values": 8}}
    assert upgraded(flat)[0] == flat
    message = "sites.topology is sites.method.kind now, a key of 'noloco', and no installed method does all of"
    with pytest.raises(ConfigError, match=message):
        config_from_dict(flat)
    with pytest.raises(ConfigError, match=message):
        upgrade_text('[sites]\ncount = 4\ntopology = "pairs"\ndensity = 0.02\n', "r.toml")


def test_words_of_keys_of_an_earlier_version():
    assert upgraded_word("sites.density=0.1", {}) == (
        "sites.method=sparseloco sites.method.density=0.1 sites.method.bits=32 sites.residual=0.0"
    )
    assert upgraded_word("sites.penalty=false", {"sites": {"method": "co2"}}) == "sites.method.penalty=false"
    assert upgraded_word("sites.topology=pairs", {"sites": {"method": "noloco"}}) == "sites.method=noloco"
    for word in ("sites.topology=all", "sites.density=1.0"):
        with pytest.raises(ConfigError, match="and not of 'mean'; leave it out"):
            upgraded_word(word, {})


REFUSED = [
    (("sites.method=noloco", "run.steps=300"), "sites.method='noloco' exchanges between two sites, and sites.count=1"),
    ((*TWO, "sites.topology=pairs"), "sites.topology is sites.method.kind now: write sites.method=noloco"),
    ((*TWO, "sites.method=noloco", "sites.overlap=50"), "sites.overlap=50 must be below the 50 steps"),
    (
        (*TWO, "sites.method=co2", "sites.overlap=3"),
        "sites.overlap=3 must be equal to sites.every=30 with sites.method",
    ),
    (
        (*TWO, "sites.method=co2", "sites.fragment_layers=1", "model.layers=2"),
        "sites.fragment_layers=1 has a round for a part of the layers, and sites.method='co2' exchanges all layers",
    ),
    ((*TWO, "sites.method=co2", "sites.momentum=0"), "sites.method.clip=1.0 limits a momentum, and sites.momentum=0"),
    ((*TWO, "sites.method=sparseloco", "sites.precision=int8"), "sites.precision='int8' is not what sites.method"),
    (
        (*TWO, "sites.method=sparseloco", "sites.method.density=0"),
        "density=0 must lie between 1/4096 and 1",
    ),
    (
        (*TWO, "sites.method=sparseloco", "sites.momentum=0.9"),
        "sites.momentum=0.9 and sites.residual=0.95 with sites.method='sparseloco' would count a difference twice",
    ),
    ((*OWN, "sites.moments=average"), "sites.moments='average' needs moments of the same experts on all sites"),
    ((*OWN, "model.layers=4 dense"), "sites.method='spes' needs MoE layers, and the model has none"),
    ((*OWN, "sites.count=3"), "sites.count=3 must divide the 8 experts of a rank (parallel.ep=1), so that each rank"),
    (
        (*OWN, "parallel.world_size=8", "parallel.ep=4"),
        "sites.count=2 must divide the 1 experts of a rank (parallel.ep=4, sharded over 2 data-parallel ranks)",
    ),
    (
        (*OWN, "model.ffn.moe.num_experts=4", "model.ffn.moe.top_k=2"),
        "sites.method.merge_experts=0.01 merges each expert with the 4 most similar ones, and "
        "model.ffn.moe.num_experts=4",
    ),
    (
        (*OWN, "sites.every=30"),
        "sites.method.merge_every=500 must be a multiple of sites.every=30, as experts are merged after a round",
    ),
    ((*OWN, "sites.overlap=1"), "sites.overlap=1 lets training go on from the weights of a round, which sites.method"),
    (
        (*OWN, "lora.rank=2", "checkpoint.init_from=x"),
        "lora.rank=2 freezes the experts that sites.method.merge_experts merges",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_settings_that_cannot_work_are_refused(overrides, message):
    with pytest.raises(ConfigError) as refused:
        check_config(load_config(None, list(overrides)))
    assert message in str(refused.value)


def merged(*words: str) -> dict[int, tuple[int, ...]]:
    """The fragments whose experts are merged, by step."""
    cfg = load_config(None, [*OWN, "sites.every=10", *words])
    count = cfg.model.num_layers if cfg.sites.fragment_layers else 1
    outer = OuterOfOwners({}, {}, cfg.sites, None, num_fragments=count)
    found = {}
    for step in range(1, 101):
        due = RoundCalendar(cfg.run, cfg.model, cfg.sites).fragments_due(step)
        if fragments := outer.merged_fragments(PendingRound(step, step, due, None, None)):
            found[step] = fragments
    return found


def test_experts_are_merged_after_rounds_by_a_share_that_falls_to_zero():
    assert [*merged("sites.method.merge_every=20", "sites.method.merge_until=80")] == [20, 40, 60]
    cfg = load_config(None, [*OWN, "sites.every=10", "sites.method.merge_every=20", "sites.method.merge_until=80"])
    outer = OuterOfOwners({}, {}, cfg.sites, None)
    assert [outer.merge_share(step) for step in (20, 60, 80, 90)] == pytest.approx([0.0075, 0.0025, 0.0, 0.0])
    count = cfg.model.num_layers
    found = merged("sites.method.merge_every=20", "sites.fragment_layers=1")
    assert {step: fragments for step, fragments in found.items() if step <= 60} == {
        20 * k + 10 * p // count: (p,) for k in (0, 1, 2, 3) for p in range(count) if 0 < 20 * k + p <= 60
    }
