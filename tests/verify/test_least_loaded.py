"""Whole models whose experts compute away from home equal the oracle, gradients of lent experts included."""

import pytest

from moefold.config.schema import Config
from moefold.parts.dispatcher.leastloaded.module import LeastLoadedDispatcher
from moefold.verify.compare import compare_records
from moefold.verify.distributed_run import DistributedRecord, run_distributed
from moefold.verify.shrink import shrink
from tests.slow import slow
from tests.verify.oracle import TOLERANCE, oracle_of
from tests.verify.recipes import tiny

pytestmark = pytest.mark.parity


def _run_and_count_loans(cfg: Config, num_steps: int) -> tuple[DistributedRecord, int]:
    """Run as `run_distributed` and return also the number of micro-batches and layers whose experts changed ranks."""
    loans = []
    loan_of = LeastLoadedDispatcher.migration

    def counting(self, plan):
        loans.append(loan_of(self, plan) is not None)
        return loan_of(self, plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LeastLoadedDispatcher, "migration", counting)
        return run_distributed(cfg, num_steps), sum(loans)


def _skewed(moe: dict[str, object] | None = None, train: dict[str, object] | None = None, **parallel: object) -> Config:
    """A recipe whose router sends four of five tokens to expert 0, among others."""
    skew = {"choice": "skewed", "llep_min_tokens": 1, "aux_loss": 0.1, "z_loss": 0.01}
    return tiny(moe=skew | (moe or {}), train=train, dispatcher="leastloaded", **parallel)


def _assert_moves_and_equals_oracle(pool, cfg: Config) -> None:
    ranks = pool.run(cfg.parallel.world_size, _run_and_count_loans, cfg, 1)
    worst = compare_records(oracle_of(cfg, 1), [record for record, _ in ranks])[0]
    assert worst.error <= TOLERANCE, worst
    assert all(loans > 0 for _, loans in ranks)


@pytest.mark.parametrize(
    "mapping",
    [
        {"world_size": 4, "tp": 2, "ep": 2, "etp": 2, "zero": 3},
        *slow(
            [
                ({"world_size": 4, "tp": 2, "cp": 2, "ep": 4, "zero": 3},),
                ({"world_size": 4, "tp": 2, "ep": 2, "etp": 2, "zero": 1},),
                ({"world_size": 2, "ep": 2, "zero": 0},),
                ({"world_size": 4, "ep": 2, "zero": 2},),
                ({"world_size": 4, "ep": 2, "zero": 3},),
                ({"world_size": 4, "tp": 2, "pp": 2, "ep": 2, "zero": 1},),
            ]
        ),
    ],
)
def test_lent_experts_of_a_skewed_router_equal_the_oracle(pool, mapping):
    _assert_moves_and_equals_oracle(pool, _skewed(**mapping))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["interleaved", "gpipe"])
def test_pipelines_with_several_micro_batches_under_way(pool, schedule):
    virtual_stages = 2 if schedule == "interleaved" else 1
    cfg = _skewed(
        train={"global_batch_size": 8}, world_size=4, pp=2, ep=2, schedule=schedule, virtual_stages=virtual_stages
    )
    _assert_moves_and_equals_oracle(pool, cfg)


@pytest.mark.parametrize("scope", ["sub_sequence", *slow([("full_sequence",)])])
def test_lent_experts_with_dropped_tokens_equal_the_oracle(pool, scope):
    moe = {"capacity_factor": 2.0, "drop_scope": scope, "llep_threshold": 1.1, "llep_capacity": 1.0}
    cfg = _skewed(moe, {"micro_batch_size": 2}, world_size=4, tp=2, cp=2, ep=4)
    _assert_moves_and_equals_oracle(pool, cfg)
    assert oracle_of(cfg, 1).steps[0].dropped > 0


def test_the_shrunk_recipe_still_moves(pool):
    large = _skewed({"llep_min_tokens": 64}, {"seq_len": 256, "micro_batch_size": 4}, world_size=4, tp=2, cp=2, ep=4)
    small = shrink(large)
    assert small.parallel.dispatcher.kind == "leastloaded"
    _assert_moves_and_equals_oracle(pool, small)


@pytest.mark.slow
def test_a_learned_router_that_is_never_even(pool):
    moe = {"llep_threshold": 1.0, "llep_capacity": 1.0, "llep_min_tokens": 1}
    _assert_moves_and_equals_oracle(pool, tiny(moe=moe, dispatcher="leastloaded", world_size=2, cp=2, ep=2))
