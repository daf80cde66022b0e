"""Settings of regrouping after a lost rank are refused where they cannot work."""

import pytest

from moefold.errors import ConfigError
from moefold.host.rank_env import RankEnv
from moefold.recipe import load_config, load_recipe
from moefold.train.start import set_up_run
from moefold.validate.config import check_config, without_lost_ranks, world_sizes_after_rank_loss

EIGHT = ("faults.on_loss=regroup", "parallel.world_size=8", "train.global_batch_size=8", "run.steps=1000")

REFUSED = [
    ((*EIGHT, "data.kind=task", "rl.group_size=8"), "does not rebuild the ranks that sample"),
    ((*EIGHT, "sites.count=2"), "sites.count=2 needs equal mappings"),
    ((*EIGHT, "parallel.tp=4", "parallel.pp=2"), "needs a second data-parallel replica, and parallel.world_size=8"),
    ((*EIGHT, "parallel.dispatcher=auto"), "cannot rebuild the shared buffers of parallel.dispatcher='auto'"),
    ((*EIGHT, "checkpoint.every=0"), "needs a state to go back to, and checkpoint.every=0 saves none"),
    ((*EIGHT, "faults.min_ranks=8"), "faults.min_ranks=8 must be below parallel.world_size=8"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_settings_that_cannot_work_are_refused(overrides, message):
    with pytest.raises(ConfigError) as refused:
        check_config(load_config(None, list(overrides)))
    assert message in str(refused.value)


def test_batch_and_mapping_after_lost_ranks():
    cfg = load_config(None, [*EIGHT, "faults.min_ranks=2", "parallel.ep=2"])
    assert world_sizes_after_rank_loss(cfg) == [2, 4, 6]
    fewer = without_lost_ranks(cfg, 6)
    check_config(fewer)
    # The last ranks of three replicas have padding.
    assert (fewer.train.global_batch_size, fewer.train.num_padding_micro_batches(fewer.parallel.dp)) == (8, 4)
    # One replica is left, which a loss ends.
    one = load_config(None, [*EIGHT, "parallel.tp=2"])
    assert world_sizes_after_rank_loss(one) == [2, 4, 6]
    check_config(without_lost_ranks(one, 2))


@pytest.mark.parametrize(
    ("rank_env", "variables", "message"),
    [
        (RankEnv(0, 0, 8, "host", 1), {"TORCHELASTIC_RUN_ID": "1"}, "torchrun kills all ranks of a node"),
        (RankEnv(0, 0, 8, "host", 1, is_embedded=True), {}, "the processes of a program end with one of them"),
    ],
)
def test_launchers_that_end_all_ranks_are_refused(rank_env, variables, message, tmp_path, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        set_up_run(load_recipe(None, [*EIGHT, f"run.dir={tmp_path / 'run'}"]), rank_env)


def test_recipe_that_no_smaller_number_of_ranks_fits_is_refused(tmp_path):
    words = [*EIGHT, "parallel.ep=8", f"run.dir={tmp_path / 'run'}"]
    with pytest.raises(ConfigError, match=r"no number of ranks from faults\.min_ranks=1 to 7 fits the recipe"):
        set_up_run(load_recipe(None, words), None)
