"""Memory of a step without a backward pass: by its formula, as measured."""

import pytest

from moefold.cost.peak_memory import RankMemory, compute_rank_memory
from moefold.cost.saved_tensors import CPU_KERNELS
from moefold.train.memory_profile import MeasuredMemory
from moefold.validate.memory_need import CERTAIN_FRACTION
from moefold_experiments.spsa.part import Spsa
from tests.cost.measured_memory import measure_one_rank, measured, memory_config
from tests.slow import slow

SPSA = {"optimizer": Spsa()}
WIDE = [
    ({"model": {"mtp_layers": 1}},),
    ({"dtype": "bfloat16"},),
    ({"model": {"layers.ffn": "dense"}},),
    ({"model": {"vocab_size": 4096}},),
    ({"model": {"layers": 6}, "moe": {"capacity_factor": 1.0}},),
]


def _assert_certain(formula: RankMemory, rank: MeasuredMemory) -> None:
    """The part that the check of a machine's memory takes as certain is not above the measured one, and near it."""
    assert CERTAIN_FRACTION * formula.activations.total <= rank.activations <= 1.1 * formula.activations.total, rank


@pytest.mark.parametrize("settings", [{}, *slow(WIDE)])
def test_the_largest_part_of_the_model_is_the_peak(settings):
    cfg = memory_config(**settings, train=SPSA)
    rank = measure_one_rank(cfg)
    (formula,) = compute_rank_memory(cfg, kernels=CPU_KERNELS)
    _assert_certain(formula, rank)
    assert rank.after["weights"] == formula.states.weights
    assert "gradients" not in rank.after
    assert formula.states.gradients == formula.states.gradient_sums == formula.states.optimizer == 0


def test_layers_in_flight_do_not_add_up():
    totals = [
        compute_rank_memory(memory_config(model={"layers": layers}, train=SPSA))[0].activations.total
        for layers in (2, 8)
    ]
    assert totals[0] == totals[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        {"world_size": 2, "pp": 2},
        {"world_size": 2, "pp": 2, "schedule": "interleaved", "virtual_stages": 2},
        {"world_size": 4, "tp": 2, "pp": 2, "zero": 3},
        {"world_size": 2, "ep": 2, "zero": 2},
    ],
)
def test_under_a_mapping(pool, parallel):
    cfg = memory_config(model={"layers": 4}, train=SPSA | {"global_batch_size": 8}, **parallel)
    formulas = compute_rank_memory(cfg, kernels=CPU_KERNELS)
    for rank in pool.run(cfg.parallel.world_size, measured, cfg):
        _assert_certain(formulas[rank.pp_rank], rank)
        assert rank.after["weights"] == formulas[rank.pp_rank].states.weights
