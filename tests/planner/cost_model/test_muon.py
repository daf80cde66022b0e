"""Muon's time: its operations, its messages, and the bytes of moments."""

from dataclasses import replace

import pytest

from moefold.config.base.part import make_part
from moefold.config.chosen import chosen_in
from moefold.config.groups.optimizer import OptimizerPart
from moefold.config.sections.train import TrainConfig
from moefold.cost.hardware import load_device
from moefold.parts.optimizer.adamw.part import BF16_MOMENTS_BYTES_PER_PARAM, BYTES_PER_PARAM
from moefold.parts.optimizer.muon.part import BYTES_PER_PARAM as MUON_BYTES_PER_PARAM
from moefold.parts.optimizer.muon.part import OWNER_BYTES_PER_PARAM
from moefold.planner.cost_model.data_parallel import GatheredMatrixCost
from moefold.planner.cost_model.step import CostModel
from moefold.planner.cost_model.workload import TrainingWorkload
from moefold.planner.mapping import ParallelMapping
from moefold.planner.model_spec import load_model_spec

WORK = TrainingWorkload(seq_len=4096, global_batch_size=256)
SHAPE, H100 = load_model_spec("mixtral-8x7b"), load_device("h100")
SPREAD = ParallelMapping(tp=2, dp=8, ep=8, edp=2, zero=1)


def optimizer(**train):
    return chosen_in(TrainConfig(**train), OptimizerPart)


def muon(*groups, steps=5):
    return optimizer(optimizer=make_part("optimizer", "muon", groups=groups, ns_steps=steps))


def share(mapping, *groups, device=H100):
    return GatheredMatrixCost(SHAPE, device, replace(WORK, optimizer=muon(*groups))).rank_cost(mapping, (32,), True)


def test_experts_that_are_whole_take_their_operations_and_do_not_travel():
    """Newton-Schulz of 4096 x 14336: twice 2 s^2 l and 2 s^3 a step, of 3 * 8 matrices of 32 layers on 16 ranks."""
    small, large = 4096, 14336
    flops = 5 * (4 * small**2 * large + 2 * small**3) * 3 * 8 * 32 / 16
    for mapping in (replace(SPREAD, ep=4, edp=4), replace(SPREAD, zero=0)):
        assert share(mapping, "experts").seconds >= flops / 6.7e13
    slow = replace(H100, links=tuple(replace(link, bytes_per_s=link.bytes_per_s / 100) for link in H100.links))
    alone = replace(SPREAD, tp=1, dp=8, ep=8, edp=1)
    assert share(alone, "experts", device=slow).seconds == share(alone, "experts").seconds
    # Half as many ranks; over the rate come prologues and the last waves of tiles.
    assert 1 < share(alone, "experts").seconds / (2 * flops / (6.7e13 * H100.gemm_fraction["bf16"])) < 1.15
    # Cut by etp they do.
    cut = replace(SPREAD, etp=2, ep=8, edp=1)
    assert share(cut, "experts", device=slow).seconds > 2 * share(cut, "experts").seconds


def test_numbers_are_held_once_where_they_are_sharded():
    numbers = 32 * 3 * 8 * 4096 * 14336
    found = share(SPREAD, "experts")
    assert found.num_local == numbers / 16
    assert found.local_bytes == numbers / 16 * MUON_BYTES_PER_PARAM
    assert found.owned_bytes == numbers / 16 * OWNER_BYTES_PER_PARAM
    assert share(replace(SPREAD, zero=0), "experts").num_local == numbers / 8


def test_the_optimizer_comes_from_the_recipe():
    def seconds(part):
        return CostModel(SHAPE, H100, replace(WORK, optimizer=part)).data_parallel.cost(SPREAD)[2]

    plain = seconds(optimizer())
    assert seconds(WORK.optimizer) == plain
    narrow = seconds(optimizer(optimizer=make_part("optimizer", "adamw", moment_dtype="bfloat16")))
    assert narrow == pytest.approx(plain * BF16_MOMENTS_BYTES_PER_PARAM / BYTES_PER_PARAM)
    experts = seconds(muon("experts"))
    assert experts > plain + share(SPREAD, "experts").seconds
    assert seconds(muon("experts", steps=10)) > 1.8 * experts
