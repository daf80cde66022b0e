"""Another number of ranks changes dp and edp only, or is refused with the numbers that fit."""

from dataclasses import replace

import pytest

from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.train import TrainConfig
from moefold.errors import ConfigError
from moefold.validate.config import check_config, fitting_world_sizes, with_world_size


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
        # dp need not divide the 12 micro-batches: the last ranks have padding.
        ({}, list(range(1, 13))),
        # Multiples of tp*cp*pp = 2 and of ep*etp*pp.
        ({"tp": 2, "ep": 4}, [4, 8, 12, 16, 20, 24]),
        ({"cp": 2, "etp": 2, "ep": 4}, [8, 16, 24]),
        # 1f1b wants at least pp = 2 micro-batches on each rank.
        ({"pp": 2}, list(range(2, 24, 2))),
    ],
)
def test_world_sizes_that_fit_a_mapping(parallel, fitting):
    assert fitting_world_sizes(recipe(**parallel)) == fitting


def test_without_padding_dp_divides_the_micro_batches():
    cfg = recipe()
    traced = replace(cfg, moe=replace(cfg.moe, trace_every=1))
    assert fitting_world_sizes(traced) == [1, 2, 3, 4, 6, 12]
    assert fitting_world_sizes(recipe(tp=2, ep=4), largest=16) == [4, 8, 12, 16]
    with pytest.raises(ConfigError, match="fits 1, 2, 3, 4, 6 or 12: .*moe.trace_every is incompatible with"):
        with_world_size(traced, 5)


def test_seven_of_eight_ranks_have_padding():
    cfg = with_world_size(recipe(world_size=8), 7)
    assert (cfg.parallel.dp, cfg.num_micro_batches, cfg.train.num_padding_micro_batches(cfg.parallel.dp)) == (7, 2, 2)
    six = with_world_size(cfg, 6)
    assert six.train.num_padding_micro_batches(six.parallel.dp) == 0
    fixed = replace(cfg, parallel=replace(cfg.parallel, elastic=False))
    with pytest.raises(ConfigError, match="must be divisible by .* or set parallel.elastic=true"):
        check_config(fixed)


@pytest.mark.parametrize(("number", "reason"), [(6, "must divide"), (28, "must be divisible")])
def test_another_number_is_refused_with_those_that_fit(number, reason):
    with pytest.raises(ConfigError) as refused:
        with_world_size(recipe(world_size=8, tp=2, ep=4), number)
    message = str(refused.value)
    assert message.startswith(
        f"parallel.elastic=true: the launcher started {number} processes, and the recipe with tp=2"
    )
    assert "fits 4, 8, 12, 16, 20 or 24: " in message
    assert reason in message


def test_a_recipe_that_fits_nothing_names_its_errors():
    cfg = recipe(tp=3)
    with pytest.raises(ConfigError, match="parallel.tp=3 must divide"):
        with_world_size(cfg, 3)
