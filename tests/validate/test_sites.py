import pytest

from moefold.config.load import config_from_dict
from moefold.errors import ConfigError
from moefold.recipe import load_config
from moefold.topology.fragments import fragment_of, fragments_due, num_fragments
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
    ((*TWO, "faults.timeout_s=100"), "sites.timeout_s=60 must be at most half of faults.timeout_s=100"),
    ((*TWO, "parallel.zero=0", "parallel.world_size=2"), "parallel.zero=0 holds all weights"),
    ((*TWO, "parallel.elastic=true"), "parallel.elastic=true changes the shards of a site"),
    ((*TWO, "data.kind=task", "rl.group_size=8"), "set sites.count=1"),
    ((*TWO, "data.kind=preference", "data.path=a.jsonl", "align.method=dpo"), "align.method='dpo' stores"),
    ((*TWO, "sites.every=1", "sites.fragment_layers=1"), "sites.every=1 must be at least the"),
    ((*TWO, "sites.overlap=40"), "sites.overlap=40 must be below the 30 steps between two rounds"),
    ((*TWO, "sites.overlap=1", "sites.keep_local=1"), "sites.keep_local=1 never takes the outer weights"),
    ((*TWO, "sites.overlap=31"), "choose at most 29, or 30 to exchange a round during the whole next one"),
    ((*TWO, "sites.overlap=30", "sites.fragment_layers=1", "model.num_layers=2"), "must be below the 15 steps"),
    ((*TWO, "sites.density=0.5", "sites.precision=int8"), "sites.density=0.5 sends values of sites.values bits"),
    (
        (*TWO, "sites.method=sparseloco", "sites.momentum=0.9"),
        "sites.momentum=0.9 and sites.residual=0.95 with sites.density=0.015625 would count a difference twice",
    ),
    ((*TWO, "sites.moments=average", "sites.overlap=1"), "sites.moments='average' would replace moments by those of"),
    (
        (*TWO, "sites.moments=reset", "sites.fragment_layers=1", "model.num_layers=2"),
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
    sites = config_from_dict({"sites": {"count": 2, "method": "co2", "every": 48}}).sites
    assert (sites.overlap, sites.lr, sites.momentum, sites.clip, sites.penalty) == (48, 1.0, 0.2, 1.0, True)
    assert config_from_dict({"sites": {"count": 2, "method": "co2"}}).sites.overlap == 30
    sites = config_from_dict({"sites": {"count": 2, "method": "sparseloco", "residual": 0.9}}).sites
    assert (sites.density, sites.values, sites.residual, sites.momentum) == (1 / 64, 2, 0.9, 0.0)
    assert not config_from_dict({}).sites.is_active
    assert config_from_dict({"sites": {"method": "diloco"}}).sites.is_active


def test_rounds_are_due_every_so_many_steps_and_at_the_end():
    assert rounds("sites.every=30", "sites.first=40") == {60: (0,), 90: (0,), 100: (0,)}
    assert rounds("sites.first=100") == {100: (0,)}


def rounds(*overrides: str) -> dict[int, tuple[int, ...]]:
    """The fragments of each round of 100 steps."""
    cfg = load_config(None, [*TWO, *overrides])
    return {step: found for step in range(1, 101) if (found := fragments_due(cfg, step))}


def test_fragments_have_rounds_at_steps_of_their_own():
    found = rounds("sites.every=40", "sites.fragment_layers=1", "model.num_layers=4")
    assert found == {
        10: (1,), 20: (2,), 30: (3,), 40: (0,), 50: (1,), 60: (2,), 70: (3,), 80: (0,), 90: (1,), 100: (0, 1, 2, 3)
    }  # fmt: skip
    assert [num_fragments(layers, 3) for layers in (1, 3, 4, 61)] == [1, 1, 2, 21]
    names = ["embedding.weight", "layers.0.ffn.w_up", "layers.5.attention.wq", "head.weight", "mtp.0.projection"]
    assert [fragment_of(name, 3) for name in names] == [2, 0, 2, 2, 2]
    assert {fragment_of(name, 1) for name in names} == {0}
