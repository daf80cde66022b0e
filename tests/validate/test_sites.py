import pytest

from moefold.config.load import config_from_dict
from moefold.errors import ConfigError
from moefold.recipe import load_config
from moefold.topology.fragments import (
    fragment_of,
    fragments_due,
    is_probed,
    merge_share,
    merged_fragments,
    num_fragments,
    rounds_until,
    step_of_round,
)
from moefold.validate.config import check_config

TWO = ("sites.count=2", "run.steps=100")
OWN = (*TWO, "sites.experts=own", "sites.every=50", "sites.merge_experts=0.01")

REFUSED = [
    ((*TWO, "sites.number=2", "sites.meet=h:1"), "sites.number=2 must be below sites.count=2"),
    ((*TWO, "sites.number=1"), "sites.number=1 needs sites.meet, the HOST:PORT of `moefold meet`"),
    ((*TWO, "sites.meet=h:1"), "sites.meet='h:1' needs sites.number"),
    (
        (*TWO, "sites.number=1", "sites.meet=h:1", "checkpoint.dir=s3://b/x"),
        "checkpoint.dir='s3://b/x' must end with 'site-1', as sites that write to one folder of a store would mix",
    ),
    ((*TWO, "sites.quorum=3"), "sites.quorum=3 must be at most sites.count=2"),
    ((*TWO, "sites.first=101"), "sites.first=101 must be at most run.steps=100"),
    ((*TWO, "sites.every=101"), "sites.every=101 is above run.steps=100"),
    ((*TWO, "faults.timeout_s=100"), "sites.timeout_s=60 must be at most half of faults.timeout_s=100"),
    ((*TWO, "parallel.zero=0", "parallel.world_size=2"), "parallel.zero=0 holds all weights"),
    ((*TWO, "parallel.elastic=true"), "parallel.elastic=true changes the shards of a site"),
    ((*TWO, "data.kind=task", "rl.group_size=8"), "set sites.count=1"),
    ((*TWO, "data.kind=preference", "data.path=a.jsonl", "align.method=dpo"), "align.method='dpo' stores"),
    ((*TWO, "sites.every=1", "sites.fragment_layers=1"), "sites.every=1 must be at least the"),
    ((*TWO, "sites.overlap=40"), "sites.overlap=40 must be below the 30 steps between two rounds"),
    ((*TWO, "sites.fragment_layers=99"), "sites.fragment_layers=99 must be at most model.layers="),
    ((*TWO, "sites.topology=pairs", "sites.overlap=30"), "sites.topology='pairs' needs a sites.overlap below"),
    ((*TWO, "sites.topology=pairs", "sites.experts=own"), "sites.topology='pairs' exchanges with one other site"),
    ((*TWO, "sites.grace_s=61"), "sites.grace_s=61 must be at most sites.timeout_s=60"),
    ((*TWO, "sites.overlap=1", "sites.keep_local=1"), "sites.keep_local=1 never takes the outer weights"),
    ((*TWO, "sites.overlap=31"), "choose at most 29, or 30 to exchange a round during the whole next one"),
    ((*TWO, "sites.overlap=30", "sites.fragment_layers=1", "model.layers=2"), "must be below the 15 steps"),
    ((*TWO, "sites.density=0.5", "sites.precision=int8"), "sites.density=0.5 sends values of sites.values bits"),
    (
        (*TWO, "sites.density=0.015625", "sites.residual=0.95", "sites.momentum=0.9"),
        "sites.momentum=0.9 and sites.residual=0.95 with sites.density=0.015625 would count a difference twice",
    ),
    (
        (*TWO, "sites.moments=average", "sites.overlap=1"),
        "sites.moments='average' would replace moments by the moments of",
    ),
    (
        (*TWO, "sites.moments=reset", "sites.fragment_layers=1", "model.layers=2"),
        "sites.moments='reset' resets the moments of all layers",
    ),
    ((*TWO, "faults.spike=rollback", "checkpoint.every=5"), "faults.spike='rollback' goes back to weights"),
    (
        (*OWN, "sites.merge_experts=0", "sites.overlap=50"),
        "sites.overlap=50 exchanges a round during the whole next one",
    ),
    ((*OWN, "sites.moments=average"), "sites.moments='average' needs moments of the same experts on all sites"),
    ((*OWN, "model.layers=4 dense"), 'sites.experts="own" needs MoE layers, and the model has none'),
    ((*OWN, "sites.count=3"), "sites.count=3 must divide the 8 experts of a rank (parallel.ep=1), so that each rank"),
    (
        (*OWN, "parallel.world_size=8", "parallel.ep=4"),
        "sites.count=2 must divide the 1 experts of a rank (parallel.ep=4, sharded over 2 data-parallel ranks)",
    ),
    (
        (*OWN, "model.ffn.moe.num_experts=4", "model.ffn.moe.top_k=2"),
        "merges each expert with the 4 most similar ones, and model.ffn.moe.num_ex",
    ),
    (
        (*OWN, "sites.every=30"),
        "sites.merge_every=500 must be a multiple of sites.every=30, as experts are merged after",
    ),
    ((*OWN, "sites.overlap=1"), "sites.overlap=1: sites.merge_experts changes the weights of a round, which training"),
    (
        (*OWN, "lora.rank=2", "checkpoint.init_from=x"),
        "lora.rank=2 freezes the experts that sites.merge_experts would m",
    ),
    ((*TWO, "moe.trace_every=5"), "moe.trace_every and moe.replay store the routing of one job"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_settings_that_cannot_work_are_refused(overrides, message):
    with pytest.raises(ConfigError) as refused:
        check_config(load_config(None, list(overrides)))
    assert message in str(refused.value)


def test_site_may_save_to_its_own_folder_of_a_store():
    check_config(load_config(None, [*TWO, "sites.number=1", "sites.meet=h:1", "checkpoint.dir=s3://b/x/site-1/"]))
    check_config(load_config(None, [*TWO, "checkpoint.dir=s3://b/x"]))


def test_method_fills_the_keys_that_are_left_out():
    sites = config_from_dict({"sites": {"count": 2, "method": "diloco"}}).sites
    assert (sites.lr, sites.momentum) == (0.7, 0.9)
    sites = config_from_dict({"sites": {"count": 2, "method": "diloco", "momentum": 0.5}}).sites
    assert (sites.lr, sites.momentum) == (0.7, 0.5)
    assert not config_from_dict({}).sites.is_active
    assert config_from_dict({"sites": {"method": "diloco"}}).sites.is_active


def test_rounds_are_due_every_so_many_steps_and_at_the_end():
    assert rounds("sites.every=30", "sites.first=40") == {60: (0,), 90: (0,), 100: (0,)}
    assert rounds("sites.first=100") == {100: (0,)}


def rounds(*overrides: str) -> dict[int, tuple[int, ...]]:
    """The fragments of each round of 100 steps."""
    cfg = load_config(None, [*TWO, *overrides])
    return {step: found for step in range(1, 101) if (found := fragments_due(cfg.run, cfg.model, cfg.sites, step))}


def test_experts_are_merged_after_rounds_by_a_share_that_falls_to_zero():
    cfg = load_config(None, [*OWN, "sites.every=10", "sites.merge_every=20", "sites.merge_until=80"])
    assert [step for step in range(1, 101) if merged_fragments(cfg.run, cfg.model, cfg.sites, step)] == [20, 40, 60]
    assert [merge_share(cfg.sites, step) for step in (20, 60, 80, 90)] == pytest.approx([0.0075, 0.0025, 0.0, 0.0])
    cfg = load_config(None, [*OWN, "sites.every=10", "sites.merge_every=20", "sites.fragment_layers=1"])
    merged = {step: found for step in range(1, 61) if (found := merged_fragments(cfg.run, cfg.model, cfg.sites, step))}
    count = cfg.model.num_layers
    assert merged == {
        20 * k + 10 * p // count: (p,) for k in (0, 1, 2, 3) for p in range(count) if 0 < 20 * k + p <= 60
    }


def test_routing_is_compared_every_tenth_round_and_at_the_end():
    for words, steps in (
        (("sites.every=3",), [3, 33, 63, 93, 100]),
        (("sites.every=3", "sites.first=50"), [51, 81, 100]),
        (("sites.every=4", "sites.fragment_layers=1"), [4, 44, 84, 100]),
        (("sites.every=3", "model.layers=4 dense"), []),
    ):
        cfg = load_config(None, [*TWO, *words])
        assert [step for step in range(1, 101) if is_probed(cfg.run, cfg.model, cfg.sites, step)] == steps


def test_fragments_have_rounds_at_steps_of_their_own():
    found = rounds("sites.every=40", "sites.fragment_layers=1", "model.layers=4")
    assert found == {
        10: (1,), 20: (2,), 30: (3,), 40: (0,), 50: (1,), 60: (2,), 70: (3,), 80: (0,), 90: (1,), 100: (0, 1, 2, 3)
    }  # fmt: skip
    assert [num_fragments(layers, 3) for layers in (1, 3, 4, 61)] == [1, 1, 2, 21]
    names = ["embedding.weight", "layers.0.ffn.w_up", "layers.5.attention.wq", "head.weight", "mtp.0.projection"]
    assert [fragment_of(name, 3) for name in names] == [2, 0, 2, 2, 2]
    assert {fragment_of(name, 1) for name in names} == {0}


@pytest.mark.parametrize("first", [0, 7, 99, 100])
@pytest.mark.parametrize("layers", [0, 1, 2])
def test_rounds_are_counted_and_found_again(first, layers):
    overrides = (f"sites.first={first}", "sites.every=12", f"sites.fragment_layers={layers}", "model.layers=4")
    cfg = load_config(None, [*TWO, *overrides])
    steps = [step for step in range(1, 101) if fragments_due(cfg.run, cfg.model, cfg.sites, step)]
    assert [rounds_until(cfg.run, cfg.model, cfg.sites, step) for step in range(101)] == [
        sum(due <= step for due in steps) for step in range(101)
    ]
    assert [step_of_round(cfg.run, cfg.model, cfg.sites, index) for index in range(len(steps) + 1)] == [0, *steps]
