from dataclasses import replace

import pytest

from moefold.config.schema import Config, ParallelConfig, TrainConfig
from moefold.errors import ConfigError
from moefold.recipe import fitting_world_sizes, with_world_size


def recipe(global_batch_size: int = 12, **parallel: int) -> Config:
    train = TrainConfig(global_batch_size=global_batch_size, micro_batch_size=1)
    return replace(Config(), parallel=ParallelConfig(elastic=True, **parallel), train=train)


def test_dp_and_edp_follow_and_the_rest_stays():
    cfg = recipe(world_size=8, tp=2, ep=4)
    fewer = with_world_size(cfg, 4)
    assert (fewer.parallel.dp, fewer.parallel.edp, fewer.parallel.tp, fewer.parallel.ep) == (2, 1, 2, 4)
    assert fewer.train == cfg.train
    assert fewer.num_micro_batches == 6


@pytest.mark.parametrize(
    ("parallel", "fitting"),
    [
        ({}, [1, 2, 3, 4, 6, 12]),
        # Multiples of tp*cp*pp = 2 and of ep = 4 whose dp divides 12.
        ({"tp": 2, "ep": 4}, [4, 8, 12, 24]),
        ({"cp": 2, "etp": 2, "ep": 4}, [8, 24]),
        # 1f1b wants at least pp = 2 micro-batches on each rank.
        ({"pp": 2}, [2, 4, 6, 8, 12]),
    ],
    ids=str,
)
def test_the_numbers_that_fit(parallel, fitting):
    assert fitting_world_sizes(recipe(**parallel)) == fitting


@pytest.mark.parametrize(("number", "reason"), [(6, "must divide"), (16, "must be divisible")])
def test_another_number_is_refused_with_those_that_fit(number, reason):
    with pytest.raises(ConfigError) as refused:
        with_world_size(recipe(world_size=8, tp=2, ep=4), number)
    message = str(refused.value)
    assert message.startswith(
        f"parallel.elastic=true: the launcher started {number} processes, and the recipe with tp=2"
    )
    assert "fits 4, 8, 12 or 24: " in message
    assert reason in message


def test_a_recipe_that_fits_nothing_says_what_is_wrong_with_it():
    cfg = recipe(tp=3)
    with pytest.raises(ConfigError, match="parallel.tp=3 must divide"):
        with_world_size(cfg, 3)
