"""Methods of sites: the keys that they set, and a run that records one."""

import json

import pytest

from moefold.config.load import config_from_dict
from moefold.config.schema import config_to_dict
from moefold.errors import ConfigError
from moefold.recipe import load_config
from moefold.validate.config import check_config


def test_a_method_fills_the_keys_that_are_left_out():
    sites = config_from_dict({"sites": {"count": 2, "method": "spes"}}).sites
    assert (sites.experts, sites.every, sites.merge_experts, sites.lr, sites.momentum) == ("own", 50, 0.01, 1.0, 0.0)
    sites = config_from_dict({"sites": {"count": 2, "method": "co2", "every": 48}}).sites
    assert (sites.overlap, sites.lr, sites.momentum, sites.clip, sites.penalty) == (48, 1.0, 0.2, 1.0, True)
    assert config_from_dict({"sites": {"count": 2, "method": "co2"}}).sites.overlap == 30
    sites = config_from_dict({"sites": {"count": 2, "method": "sparseloco", "residual": 0.9}}).sites
    assert (sites.density, sites.values, sites.residual, sites.momentum) == (1 / 64, 2, 0.9, 0.0)


@pytest.mark.parametrize("kind", ["noloco", "sparseloco", "co2", "spes"])
def test_what_a_run_records_is_read_again(kind):
    cfg = load_config(None, ["sites.count=2", f"sites.method={kind}", "run.steps=300"])
    check_config(cfg)
    assert str(cfg.sites.method) == kind
    assert config_from_dict(json.loads(json.dumps(config_to_dict(cfg)))) == cfg


def test_a_message_names_the_method():
    with pytest.raises(ConfigError, match=r"^sites.topology='pairs' \(sites.method='noloco'\) exchanges between two"):
        check_config(load_config(None, ["sites.method=noloco", "run.steps=300"]))
