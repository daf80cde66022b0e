"""Plans and memory of methods of sites: fixed keys of a method stay, and its rounds and states are priced."""

import pytest

from moefold.cli.main import main
from moefold.cost.hardware import SiteLink
from moefold.cost.layer_spec import model_weights
from moefold.cost.site_traffic import site_traffic
from moefold.planner.sites import TARGET, RoundSettings, RoundVolume, SiteCost, with_site_settings
from moefold_experiments.co2.part import CO2
from moefold_experiments.sparseloco.part import SparseLoCo
from moefold_experiments.spes.part import SPES
from tests.cost.random_mappings import assert_every_byte, random_config
from tests.cost.site_bytes import MODELS, assert_bytes
from tests.planner.planned_sites import RECIPE, planned
from tests.planner.site_rounds import simulate_site
from tests.slow import slow

SPARSE = {"method": SparseLoCo(), "residual": 0.95}
WHOLE = {"momentum": 0.2, "nesterov": False, "method": CO2()}


@pytest.mark.parametrize(("seconds", "every"), [(3.0, 20), (17.0, 20), (17.0, 12)])
def test_a_round_that_is_exchanged_during_the_next_one_is_exposed_beyond_it(seconds, every):
    """CO2 hides an exchange of up to `every` steps."""
    link = SiteLink(bytes_per_s=1e6, latency_s=0.01)
    cost = SiteCost(link, 2, 0.7, {"fp4": [RoundVolume((seconds - 0.01) * 1e6)]})
    rate = cost.rate(RoundSettings(precision="fp4", every=every, overlap=every))
    assert rate.exposed_s == pytest.approx(0.04 + max(0.0, seconds - 0.7 * every))
    assert simulate_site(cost, rate).utilisation == pytest.approx(rate.utilisation, rel=1e-12)
    least = CO2().least_every(cost, "fp4")
    reached = [cost.rate(RoundSettings(precision="fp4", every=n, overlap=n)).reaches_target for n in (least, least - 1)]
    assert reached == [True, False]


def test_least_round_that_is_exchanged_during_the_next_one():
    for bytes_per_s, latency_s in ((1e5, 0.0), (1e6, 0.05), (1e9, 2.0)):
        cost = SiteCost(SiteLink(bytes_per_s=bytes_per_s, latency_s=latency_s), 3, 0.3, {"int8": [RoundVolume(2e6)]})
        every = CO2().least_every(cost, "int8")
        reached = [
            cost.rate(RoundSettings(precision="int8", every=n, overlap=n)).utilisation for n in (every, every - 1)
        ]
        assert reached[0] >= TARGET * (1 - 1e-9) > reached[1]


def test_rounds_of_co2_stay_whole_and_top_k_stays_top_k(tmp_path):
    num_bytes = 2 * sum(part.num_coded for part in site_traffic(planned(tmp_path, bytes_per_s=1e9)[0])) * 4
    cfg, plan = planned(tmp_path, bytes_per_s=num_bytes / 500, **WHOLE, every=5, overlap=5)
    settings = with_site_settings(cfg, plan).sites
    assert settings.overlap == settings.every > 5
    assert plan.chosen.reaches_target
    sparse = SPARSE | {"every": 1}
    cfg, plan = planned(tmp_path, bytes_per_s=num_bytes / 500, **sparse)
    assert [first.settings.precision for first, _ in plan.options] == ["float32"]
    settings = with_site_settings(cfg, plan).sites
    assert (settings.method, settings.precision) == (SparseLoCo(), "float32")
    # 500 s of 4 bytes; 1/128 of them with top-k in 2 bits, but for the last chunk of each weight.
    assert 500 / 128 < sum(plan.recipe.exchanges_s) < 500 / 30


def test_fixed_keys_of_a_method_stay(tmp_path):
    """Top-k has a format of its own, CO2 an overlap of a whole round, and merged experts a multiple of `every`."""
    cfg, plan = planned(tmp_path, bytes_per_s=1e4, **SPARSE)
    assert [rate.settings.precision for rate, _ in plan.options] == ["float32"]
    sent = sum(part.num_coded for part in site_traffic(cfg)) // 4096 * (96 + 16 + 16)
    assert plan.cost.volumes["float32"][0].num_bytes == sent
    assert with_site_settings(cfg, plan).sites.method == SparseLoCo()
    cfg, plan = planned(tmp_path, bytes_per_s=1e5, **WHOLE, overlap=100)
    assert plan.chosen.settings.overlap == plan.chosen.settings.every > 1
    assert with_site_settings(cfg, plan).sites.overlap == plan.chosen.settings.every


def test_experts_are_sent_by_their_owners_and_merged_after_rounds(tmp_path):
    whole, _ = planned(tmp_path, bytes_per_s=1e5)
    cfg, plan = planned(tmp_path, bytes_per_s=1e5, count=2, method=SPES(merge_experts=0.0))
    numel = [sum(part.num_coded for part in site_traffic(one)) for one in (cfg, whole)]
    weights = model_weights(cfg.model).values()
    assert numel[1] - numel[0] == sum(weight.numel for weight in weights if weight.is_expert) // 2
    merged, plan = planned(tmp_path, bytes_per_s=8e3, count=2, method=SPES())
    every = plan.chosen.settings.every
    assert plan.chosen.settings.overlap == 0
    assert 100 < every < 500
    assert plan.further == {"method": SPES(merge_every=round(500 / every) * every)}
    assert with_site_settings(merged, plan).sites.method == plan.further["method"]


def test_the_table_of_a_plan_names_the_code_of_the_method(tmp_path, capsys):
    path = tmp_path / "sites.toml"
    path.write_text(RECIPE + 'method = "sparseloco"\n')
    link = ("--site-link", "1e8", "--site-latency", "0.05")
    assert main(["plan", str(path), "--gpu", "h100", "--top", "1", "--sites", "3", *link]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert 'kind = "sparseloco", density = 0.015625, bits = 2' in text


@pytest.mark.parametrize("model", MODELS)
def test_bytes_of_sparseloco_equal_the_boxes_of_its_ranks(model):
    assert_bytes(model, SPARSE)


@pytest.mark.parametrize("seed", [1, 5, *slow((seed,) for seed in range(9, 24, 4))])
def test_every_byte_of_a_site_that_owns_experts(seed):
    """Moments and residual are of the site's own experts, and outer weights of all."""
    assert_every_byte(seed, random_config(seed, SPES(merge_experts=0.0)))
