"""Rounds between sites over a link: published tables, the simulated period, choices, refusals and outputs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from moefold.cli.main import main
from moefold.config.base.part_registry import find_part
from moefold.cost.flops import count_parameters
from moefold.cost.hardware import SiteLink
from moefold.cost.site_traffic import site_traffic
from moefold.errors import ConfigError
from moefold.planner.plan_request import PlanOptions, plan_request
from moefold.planner.planner import Planner
from moefold.planner.sites import (
    CODING_S,
    MAX_OVERLAP,
    TARGET,
    RoundSettings,
    RoundVolume,
    SiteCost,
    with_site_settings,
)
from moefold.recipe import load_config
from tests.planner.planned_sites import RECIPE, planned
from tests.planner.site_rounds import EXCHANGE, STEP, WAIT, simulate_site

ALONE = RECIPE.split("[sites]")[0]


def gbit_for(utilisation: float, at: Callable[[float], float]) -> float:
    """The bandwidth in Gbit/s with which `at(bytes_per_s)` reaches a utilisation."""
    low = 1.0
    high = 1e13
    for _ in range(100):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if at(middle) >= utilisation else (middle, high)
    return high * 8 / 1e9


def site_cost(bytes_per_s: float, step_s: float, volumes: list[float], count: int = 2) -> SiteCost:
    link = SiteLink(bytes_per_s=bytes_per_s, latency_s=0.0)
    return SiteCost(link, count, step_s, {"bfloat16": [RoundVolume(size) for size in volumes]})


@pytest.mark.parametrize(
    ("parameters", "step_s", "every", "published"),
    [
        (10e9, 0.8, 1, (104.8, 184.2, 222.3)),
        (10e9, 0.8, 100, (1.4, 6.2, 13.3)),
        (671e9, 20.0, 1, (323.8, 569.0, 686.6)),
        (671e9, 20.0, 100, (4.3, 16.0, 41.0)),
    ],
)
def test_bandwidth_equals_the_scaling_laws_of_diloco(parameters, step_s, every, published):
    """Table 6 of arXiv:2503.09799: Gbit/s for a utilisation of 50, 80 and 90 %, in bfloat16; every=1 is data parallel.

    The paper's simulation hides a part of DiLoCo's exchange, and not quite all of the exchange of data parallelism.
    """

    def utilisation(bytes_per_s: float) -> float:
        cost = site_cost(bytes_per_s, step_s, [2 * parameters])
        if every == 1:
            return cost.data_parallel(2 * parameters).utilisation
        return cost.rate(RoundSettings(precision="bfloat16", every=every, overlap=0)).utilisation

    ratios = [gbit_for(cu, utilisation) / gbit for cu, gbit in zip((0.5, 0.8, 0.9), published, strict=True)]
    assert all(1 / 1.5 < ratio < 1.5 for ratio in ratios), ratios
    assert all(ratio > 1 for ratio in ratios) == (every > 1)


@pytest.mark.parametrize(("parameters", "layers", "step_s"), [(1e9, 24, 0.1), (10e9, 48, 0.8), (100e9, 108, 4.9)])
def test_streaming_reaches_its_utilisation_at_1_to_5_gbit_a_second(parameters, layers, step_s):
    """For 95 %, with fragments of 3 layers in 4 bits, every 100 steps and overlapped with one (arXiv:2501.18512)."""
    method = find_part("site_method", "streaming")().values(30)
    count = layers // method["fragment_layers"]
    volumes = [parameters / count * (0.5 + 4 / 256)] * count

    def utilisation(bytes_per_s: float) -> float:
        settings = RoundSettings(precision="bfloat16", every=100, overlap=method["overlap"])
        return site_cost(bytes_per_s, step_s, volumes).rate(settings).utilisation

    assert 1 < gbit_for(0.95, utilisation) < 5


@pytest.mark.parametrize("overlap", [0, 1, 4])
@pytest.mark.parametrize("volumes", [[3e6], [1e6, 5e5, 4e6]])
def test_simulated_period_has_the_predicted_utilisation(overlap, volumes):
    link = SiteLink(bytes_per_s=1e6, latency_s=0.01)
    cost = SiteCost(link, 3, 0.7, {"int8": [RoundVolume(size, 2) for size in volumes]})
    rate = cost.rate(RoundSettings(precision="int8", every=20, overlap=overlap))
    period = simulate_site(cost, rate)
    assert period.utilisation == pytest.approx(rate.utilisation, rel=1e-12)
    exchanges = [phase for phase in period.phases if phase.part == EXCHANGE]
    seconds = [2 * (2 * 0.01 + size / 1e6) for size in volumes]
    assert [phase.end_s - phase.start_s for phase in exchanges] == pytest.approx(seconds)
    assert sum(phase.part == STEP for phase in period.phases) == 20
    waits = [max(0.0, second - 0.7 * overlap) for second in seconds]
    waited = [phase.end_s - phase.start_s for phase in period.phases if phase.part == WAIT]
    assert waited == pytest.approx([second for second in waits if second])


@pytest.mark.parametrize("overlap", [0, 3])
def test_least_every_is_the_least(overlap):
    for bytes_per_s in (1e5, 1e6, 1e7):
        cost = SiteCost(SiteLink(bytes_per_s=bytes_per_s, latency_s=0.05), 4, 0.3, {"fp4": [RoundVolume(2e6)] * 3})
        every = cost.least_every("fp4", overlap)
        reached = [
            cost.rate(RoundSettings(precision="fp4", every=n, overlap=overlap)).utilisation for n in (every, every - 1)
        ]
        assert reached[0] >= TARGET * (1 - 1e-9)
        assert reached[1] < TARGET or every == 3 * (overlap + 1)


def test_the_exchange_is_overlapped_with_steps_and_the_meeting_is_not():
    cost = SiteCost(SiteLink(bytes_per_s=1e6, latency_s=0.1), 2, 1.0, {"fp4": [RoundVolume(2.5e6, 3)]})
    assert cost.exchange_s(cost.volumes["fp4"][0]) == pytest.approx(0.3 + 2.5)
    assert [cost.exposed_s("fp4", overlap) for overlap in (0, 1, 2, 3)] == pytest.approx([3.2, 2.2, 1.2, 0.4])
    sent = cost.rate(RoundSettings(precision="fp4", every=10, overlap=3)).bytes_per_day
    assert sent == pytest.approx(86400 * 2.5e6 / 10.4)


def test_settings_of_the_recipe_are_kept_where_they_are_enough(tmp_path):
    cfg, plan = planned(tmp_path, bytes_per_s=1e9)
    assert plan.chosen == plan.recipe
    assert with_site_settings(cfg, plan) == cfg


def test_bits_come_before_overlap_and_overlap_before_fewer_rounds(tmp_path):
    """A slower link needs fewer bits, then overlap, then fewer rounds."""
    num_bytes = 2 * sum(part.num_coded for part in site_traffic(planned(tmp_path, bytes_per_s=1e9)[0])) * 4
    found = []
    for seconds in (4.0, 8.0, 16.0, 38.0, 43.0, 70.0, 500.0):
        cfg, plan = planned(tmp_path, bytes_per_s=num_bytes / seconds)
        chosen = plan.chosen.settings
        assert plan.chosen.reaches_target
        found.append((chosen.precision, chosen.overlap, chosen.every > 100, plan.further))
        assert with_site_settings(cfg, plan).sites.precision == chosen.precision
    assert found == [
        ("float32", 0, False, {}),
        ("bfloat16", 0, False, {}),
        ("int8", 0, False, {}),
        ("fp4", 0, False, {}),
        ("fp4", 1, False, {"keep_local": 0.5}),
        ("fp4", 4, False, {"keep_local": 0.5}),
        ("fp4", 0, True, {}),
    ]


def test_a_residual_needs_a_code_and_a_share_of_local_weights_an_overlap(tmp_path):
    """Keys that a recipe has go on to have an effect under all settings that are compared."""
    _, plan = planned(tmp_path, bytes_per_s=1e3, residual=0.9, precision="int8")
    assert {rate.settings.precision for pair in plan.options for rate in pair} == {"bfloat16", "int8", "fp4"}
    _, plan = planned(tmp_path, bytes_per_s=1e3, overlap=8, keep_local=0.3)
    assert {rate.settings.overlap for pair in plan.options for rate in pair} == {1, 8}
    assert plan.further == {}
    _, plan = planned(tmp_path, bytes_per_s=1e3, fragment_layers=1)
    assert all(rate.settings.every >= 2 * (MAX_OVERLAP + 1) for _, rate in plan.options)


def test_averaged_moments_allow_no_overlap(tmp_path):
    kept, _ = planned(tmp_path, bytes_per_s=1e5)
    cfg, plan = planned(tmp_path, bytes_per_s=1e5, moments="average")
    assert {rate.settings.overlap for pair in plan.options for rate in pair} == {0}
    assert plan.cost.volumes["float32"][0].num_bytes == 3 * sum(part.num_coded for part in site_traffic(kept)) * 4


def test_the_fullest_rank_sets_the_time_of_coding(tmp_path):
    """A rank encodes its vector, decodes the vectors of all members, and its own again."""
    cfg, plan = planned(tmp_path, bytes_per_s=1e4)
    (part,) = site_traffic(cfg, "fp4")
    encode_s, decode_s = CODING_S["fp4"]
    assert plan.cost.volumes["fp4"][0].coding_s == pytest.approx(part.rank_coded * (encode_s + 4 * decode_s))
    assert part.rank_coded * 4 >= part.num_coded
    (plain,) = site_traffic(cfg, "float32")
    assert plan.cost.volumes["float32"][0].coding_s == pytest.approx(plain.rank_coded * 3 * CODING_S["float32"][1])


def test_a_round_that_never_comes_is_not_written(tmp_path):
    cfg, plan = planned(tmp_path, bytes_per_s=1.0)
    with pytest.raises(ConfigError, match=r"utilisation of 95% needs sites.every=\d+, which is above run.steps=2000"):
        with_site_settings(cfg, plan)


def plan_of(tmp_path: Path, **options: object):
    (tmp_path / "one.toml").write_text(ALONE)
    return Planner(plan_request(str(tmp_path / "one.toml"), "h100", PlanOptions(**options)))


def test_a_site_is_planned_with_its_outer_weights_and_sharded_states(tmp_path):
    """ZeRO 0 would send each weight from every data-parallel rank; outer weights take 4 bytes of each weight."""
    alone = plan_of(tmp_path)
    site = plan_of(tmp_path, sites=3, site_link=1e8)
    assert alone.space.zero_stages == (0, 1, 2, 3)
    assert site.space.zero_stages == (1, 2, 3)
    mapping = site.best().mapping
    more = site.search.price(mapping).memory.parts["optimizer"] - alone.search.price(mapping).memory.parts["optimizer"]
    total = count_parameters(site.request.base_config.model).total
    assert total <= more * mapping.dp * mapping.pp * mapping.tp / 4 < 1.1 * total


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(list(words)) == 0
    return json.loads(capsys.readouterr().out)


LINK = ("--site-link", "1e8", "--site-latency", "0.05")


def test_plan_prints_and_writes_the_settings(tmp_path, capsys):
    path = tmp_path / "sites.toml"
    path.write_text(RECIPE)
    planned_path = tmp_path / "planned.toml"
    words = ("plan", str(path), "--gpu", "h100", "--sites", "3", *LINK)
    found = run_json(capsys, *words, "--json", "--top", "1", "--recipe", str(planned_path))["sites"]
    assert (found["count"], found["bytes_per_s"], found["latency_s"]) == (3, 1e8, 0.05)
    assert found["data_parallel"]["utilisation"] < found["recipe"]["utilisation"] < TARGET
    chosen = found["chosen"]
    assert chosen["utilisation"] >= TARGET * (1 - 1e-9)
    written = load_config(planned_path)
    assert written.sites.count == 3
    for key in ("every", "precision", "overlap", *(key for key in ("keep_local",) if key in chosen)):
        assert getattr(written.sites, key) == chosen[key]
    assert main([*words, "--top", "1"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "3 sites of these GPUs, 100 MB/s and 0.05 s between them, 1 fragment" in text
    assert f"every={chosen['every']} precision={chosen['precision']} overlap={chosen['overlap']}: utilisation" in text
    assert "one job: data parallelism across the sites" in text


def test_simulate_takes_the_link_from_the_device(tmp_path, capsys):
    path = tmp_path / "sites.toml"
    path.write_text(RECIPE)
    device = tmp_path / "home.toml"
    device.write_text('base = "h100"\n[site_link]\nbytes_per_s = 1e8\nlatency_s = 0.05\n')
    recipe = (str(path), "sites.count=3", "sites.every=7", "sites.overlap=1")
    found = run_json(capsys, "simulate", *recipe, "--gpu", str(device), "--json")["sites"]
    assert (found["recipe"]["every"], found["bytes_per_s"], found["latency_s"]) == (7, 1e8, 0.05)
    picture = tmp_path / "step.svg"
    assert main(["simulate", *recipe, "--gpu", str(device), "--timeline", str(picture)]) == 0
    assert "<svg" in picture.read_text()
    assert "3 sites, every=7 precision=float32 overlap=1: utilisation" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--sites", "1", *LINK), "--sites 1 must be at least 2: one site has nothing to exchange"),
        (("--sites", "3"), "--sites 3 needs the bandwidth between sites: add --site-link BYTES_PER_S, or [site_link]"),
        (("--site-latency", "0.1"), "--site-latency 0.1 needs the bandwidth between sites"),
        (LINK, "--site-link 1e+08 has no effect: sites.count=1 has no other site; add --sites"),
        (("--sites", "3", "--site-link", "0"), "--site-link 0 must be above 0: bytes a second"),
        (("--sites", "3", "--site-link", "nan"), "--site-link nan must be above 0"),
        (("--sites", "3", "--site-link", "1e8", "--site-latency", "-1"), "--site-latency -1 must be at least 0"),
        (("--sites", "2000", *LINK), "sites.count=2000 must lie between 1 and 1024"),
    ],
)
def test_wrong_options_are_refused_by_both_commands(tmp_path, capsys, words, message):
    path = tmp_path / "one.toml"
    path.write_text(ALONE)
    for command in ("plan", "simulate"):
        assert main([command, str(path), "--gpu", "h100", *words]) == 2
        assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "lines", "message"),
    [
        (("--explain", "tp=1"), "", "--sites has no effect on --explain, which prices no rounds between sites"),
        (("--compare-folding",), "", "--sites has no effect on --compare-folding"),
        (
            (),
            "[rl]\ngroup_size = 8\n[rollout]\nmax_tokens = 8\n",
            "rl.group_size=8 samples prompts by the state of one job",
        ),
        ((), "", "parallel.elastic=true changes the shards of a site"),
        (("--fix", "zero=0"), "", "parallel.zero=0 holds all weights on every data-parallel rank"),
    ],
)
def test_sites_are_refused_where_training_refuses_them(tmp_path, capsys, words, lines, message):
    text = RECIPE.replace("world_size = 4\n", "world_size = 4\nelastic = true\n") if "elastic" in message else RECIPE
    kind = '[data]\nkind = "task"\ntask = "add"\n' if lines else ""
    path = tmp_path / "refused.toml"
    path.write_text(text + lines + kind)
    assert main(["plan", str(path), "--gpu", "h100", "--sites", "2", *LINK, *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_dense_model_and_one_site_without_options_are_planned(tmp_path, capsys):
    path = tmp_path / "dense.toml"
    path.write_text(ALONE.replace('preset = "tiny"\n', 'preset = "tiny"\nlayers = "4 dense"\n'))
    words = ("plan", str(path), "--gpu", "h100", "--json", "--top", "1")
    assert "sites" not in run_json(
        capsys,
        *words,
    )
    assert run_json(capsys, *words, "--sites", "2", *LINK)["sites"]["fragments"] == 1
