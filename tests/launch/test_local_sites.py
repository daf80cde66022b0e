"""How the sites of one machine share it."""

import pytest

from moefold.errors import ConfigError
from moefold.host.rank_env import RankEnv
from moefold.launch.local_sites import site_environments
from moefold.recipe import LoadedRecipe, load_config
from moefold.train.start import set_up_run


def test_sites_on_a_cpu_share_its_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(12)))
    assert site_environments(2, 2, "cpu", None) == [{"OMP_NUM_THREADS": "3"}] * 2
    assert site_environments(8, 4, "cpu", None) == [{"OMP_NUM_THREADS": "1"}] * 8
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert site_environments(2, 2, "cpu", None) == [{"OMP_NUM_THREADS": "5"}] * 2


def test_sites_need_gpus_of_their_own():
    with pytest.raises(ConfigError, match="sites.count=2 sites of 4 ranks need 8 GPUs on this machine, which has"):
        site_environments(2, 4, "cuda", None)


def test_rank_of_a_launcher_is_one_site():
    with pytest.raises(ConfigError, match="a launcher started this process as a rank of one job"):
        site_environments(2, 1, "cpu", RankEnv(0, 0, 1, "127.0.0.1", 1234))


def test_program_cannot_start_all_sites():
    recipe = LoadedRecipe(load_config(None, ["sites.count=2"]), frozenset(), ())
    with pytest.raises(
        ConfigError, match="sites.count=2 without a number starts all sites, which only `moefold train`"
    ):
        set_up_run(recipe, None)
