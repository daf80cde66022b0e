"""Settings of sites are refused where they cannot work; rounds are due at the computed steps."""

import pytest

from moefold.config.load import config_from_dict
from moefold.errors import ConfigError
from moefold.recipe import load_config
from moefold.topology.fragments import RoundCalendar, fragment_of, num_fragments
from moefold.validate.config import check_config

TWO = ("sites.count=2", "run.steps=100")

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
    ((*TWO, "faults.timeout_s=100"), "sites.timeout_s=60.0 must be at most half of faults.timeout_s=100.0"),
    ((*TWO, "parallel.zero=0", "parallel.world_size=2"), "parallel.zero=0 holds all weights"),
    ((*TWO, "parallel.elastic=true"), "parallel.elastic=true changes the shards of a site"),
    ((*TWO, "data.kind=task", "rl.group_size=8"), "set sites.count=1"),
    ((*TWO, "data.kind=preference", "data.path=a.jsonl", "align.method=dpo"), "align.method='dpo' stores"),
    ((*TWO, "sites.every=1", "sites.fragment_layers=1"), "sites.every=1 must be at least the"),
    ((*TWO, "sites.overlap=30"), "choose at most 29, or sites.method='co2', which overlaps a whole round"),
    ((*TWO, "sites.overlap=40"), "sites.overlap=40 must be below the 30 steps between two rounds"),
    ((*TWO, "sites.fragment_layers=99"), "sites.fragment_layers=99 must be at most model.layers="),
    ((*TWO, "sites.grace_s=61"), "sites.grace_s=61.0 must be at most sites.timeout_s=60.0"),
    ((*TWO, "sites.overlap=1", "sites.keep_local=1"), "sites.keep_local=1 never takes the outer weights"),
    (
        (*TWO, "sites.overlap=31"),
        "must be below the 30 steps between two rounds (sites.every=30 over 1 fragment); choose at most 29",
    ),
    ((*TWO, "sites.overlap=30", "sites.fragment_layers=1", "model.layers=2"), "must be below the 15 steps"),
    (
        (*TWO, "sites.moments=average", "sites.overlap=1"),
        "sites.moments='average' would replace moments by the moments of",
    ),
    (
        (*TWO, "sites.moments=reset", "sites.fragment_layers=1", "model.layers=2"),
        "sites.moments='reset' resets the moments of all layers",
    ),
    ((*TWO, "faults.spike=rollback", "checkpoint.every=5"), "faults.spike='rollback' goes back to weights"),
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
    calendar = calendar_of(*overrides)
    return {step: found for step in range(1, 101) if (found := calendar.fragments_due(step))}


def calendar_of(*overrides: str) -> RoundCalendar:
    cfg = load_config(None, [*TWO, *overrides])
    return RoundCalendar(cfg.run, cfg.model, cfg.sites)


def test_routing_is_compared_every_tenth_round_and_at_the_end():
    for words, steps in (
        (("sites.every=3",), [3, 33, 63, 93, 100]),
        (("sites.every=3", "sites.first=50"), [51, 81, 100]),
        (("sites.every=4", "sites.fragment_layers=1"), [4, 44, 84, 100]),
        (("sites.every=3", "model.layers=4 dense"), []),
    ):
        calendar = calendar_of(*words)
        assert [step for step in range(1, 101) if calendar.is_probed(step)] == steps


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
    calendar = calendar_of(*overrides)
    steps = [step for step in range(1, 101) if calendar.fragments_due(step)]
    assert [calendar.rounds_until(step) for step in range(101)] == [
        sum(due <= step for due in steps) for step in range(101)
    ]
    assert [calendar.step_of_round(index) for index in range(len(steps) + 1)] == [0, *steps]
