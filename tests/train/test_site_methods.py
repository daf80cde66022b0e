"""Settings of rounds that the oracle has not: moments of the inner optimizer, weights of sites."""

from dataclasses import replace

import pytest

from moefold.checkpoint.checkpoint_meta import read_meta
from tests.train.site_jobs import MEAN, Server, of_site, planned_bytes, recipe, run_sites, train, train_sites
from tests.train.site_results import TOLERANCE, checkpoint, largest_error, records, tensors

pytestmark = pytest.mark.parity


def test_moments_are_averaged_and_sites_count_equally_if_asked(pool, tmp_path):
    """Site 1 has half the batch, so that the mean by tokens is another one. Moments are those before the round."""
    before = recipe(tmp_path / "keep", 2, MEAN | {"first": 2}, every=1)
    after = recipe(tmp_path / "average", 2, MEAN | {"first": 2, "moments": "average", "weigh": "even"}, every=1)
    for cfg in (before, after):
        with Server().running() as server:
            jobs = [of_site(cfg, n, server.port) for n in (0, 1)]
            jobs[1] = replace(jobs[1], train=replace(cfg.train, global_batch_size=2))
            run_sites(pool, jobs, train)
        assert [records(tmp_path / cfg.run.dir / "site-0")[-1]["sites"]["sent_bytes"]] == [planned_bytes(cfg, -1)]
    paths = {run: [checkpoint(tmp_path / run / f"site-{n}", 2) for n in (0, 1)] for run in ("keep", "average")}
    own = [tensors(path, "optimizer.") for path in paths["keep"]]
    mean = {name: (own[0][name] + own[1][name]) / 2 for name in own[0]}
    assert any("exp_avg_sq" in name for name in mean)
    assert largest_error(own[0], mean) > 1e-3
    for path in paths["average"]:
        assert largest_error(tensors(path, "optimizer."), mean) <= TOLERANCE
    weights = [tensors(paths[run][0], "model.") for run in ("keep", "average")]
    assert largest_error(*weights) > 1e-6


@pytest.mark.slow
def test_moments_are_reset_after_a_round(pool, tmp_path):
    cfg = recipe(tmp_path, 3, MEAN | {"moments": "reset"}, every=1, world_size=2, tp=2)
    train_sites(pool, cfg)
    for step, is_zero, updates in ((1, False, 1), (2, True, 0), (3, True, 0)):
        path = checkpoint(tmp_path / "site-1", step)
        moments = tensors(path, "optimizer.")
        assert all(not moment.any() for moment in moments.values()) == is_zero
        assert read_meta(path).state_of("weights")["moment_updates"] == updates
