"""The oracle of `benchmarks.site_faults`, whose rounds have the members of a plan."""

import pytest

from benchmarks.site_faults import COUNT, EVERY, RECIPE, Plan, PlannedSites
from moefold.recipe import load_config
from tests.train.oracle_sites import OracleSites

SITES = list(range(COUNT))
STEPS = 2 * EVERY


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    path = tmp_path_factory.mktemp("site_faults") / "recipe.toml"
    path.write_text(RECIPE)
    return load_config(path, ["sites.number=0"])


def planned_losses(cfg, **plan):
    rounds = {step: (SITES, [1 / COUNT] * COUNT, SITES) for step in range(EVERY, STEPS + 1, EVERY)}
    return [state.losses for state in PlannedSites(cfg, Plan(rounds, **plan)).run(STEPS)]


def test_a_plan_without_faults_is_the_oracle_of_sites(cfg):
    expected = [state.losses for state in OracleSites(cfg).run(STEPS)]
    for losses, of_oracle in zip(planned_losses(cfg), expected, strict=True):
        assert losses == pytest.approx(of_oracle, rel=1e-9)


def test_a_site_that_takes_a_state_takes_the_optimizer_too(cfg):
    alone = planned_losses(cfg)
    joined = planned_losses(cfg, joins={EVERY: {2: 0}}, taken={2: EVERY})
    # After a round all weights are the same: only the next update shows whose moments it used.
    assert joined[: EVERY + 1] == alone[: EVERY + 1]
    assert joined[EVERY + 1][:2] == alone[EVERY + 1][:2]
    assert joined[EVERY + 1][2] != alone[EVERY + 1][2]
