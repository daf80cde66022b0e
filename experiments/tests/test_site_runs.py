"""Runs of methods of sites on forked ranks: their oracles, resumes, lost sites."""

from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from experiments.tests.oracle_site_methods import OracleOfPairs, OracleOfWholeRounds, oracle_of
from moefold.checkpoint.stored_tensors import differing_tensors
from moefold.comm.groups import ParallelGroups
from moefold.config.base.part import make_part
from moefold.config.schema import Config
from moefold.launch.meeting import describe_sites
from moefold.launch.site_round import pair_members
from moefold.train.callbacks.callback import Callback, FinishedStep, TrainingContext
from moefold.train.signals import StopSignals
from moefold.train.sites.rounds import SiteRounds
from moefold.train.trainer import Trainer
from moefold.validate.config import check_config
from tests.slow import slow
from tests.train.site_checks import (
    assert_lost_site_returns,
    assert_sites_count_by_tokens,
    assert_sites_equal_oracle,
    assert_sites_resume,
    assert_sites_resume_under_another_mapping,
)
from tests.train.site_jobs import CODED, STREAMING, Server, Waiting, of_site, recipe, run_sites, train_and_fail
from tests.train.site_results import checkpoint, records
from tests.verify.recipes import without_mapping

pytestmark = pytest.mark.parity

NOLOCO = {"count": 4, "every": 2, "method": "noloco", "lr": 0.7, "momentum": 0.5, "nesterov": False}
CO2 = {
    "count": 2,
    "every": 2,
    "overlap": 2,
    "momentum": 0.2,
    "nesterov": False,
    "method": make_part("site_method", "co2", clip=1e-3),
}
SPARSE = {"count": 2, "every": 2, "method": "sparseloco", "residual": 0.95}
CODED_PAIRS = CODED | {"method": "noloco"}
ORACLE_CASES = {
    "one rank, noloco": (NOLOCO, {}),
    "tp, noloco": (NOLOCO, {"world_size": 2, "tp": 2}),
    "ep, noloco": (NOLOCO, {"world_size": 2, "ep": 2}),
    "pp, noloco": (NOLOCO, {"world_size": 2, "pp": 2}),
    "zero 1, noloco": (NOLOCO, {"world_size": 2, "zero": 1}),
    "zero 2, noloco": (NOLOCO, {"world_size": 2, "zero": 2}),
    "zero 3, noloco": (NOLOCO, {"world_size": 2, "zero": 3}),
    "three sites, noloco": (NOLOCO | {"count": 3}, {}),
    "one rank, pairs of fragments": (STREAMING | {"count": 3, "method": "noloco"}, {}),
    "one rank, co2": (CO2, {}),
    "tp ep zero 2, co2": (CO2, {"world_size": 2, "tp": 2, "ep": 2, "zero": 2}),
    "pp zero 3, co2, nesterov": (CO2 | {"nesterov": True}, {"world_size": 4, "pp": 2, "zero": 3}),
    "all axes, co2": (CO2, {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4}),
}
FAST = ("one rank, co2", "three sites, noloco")


@pytest.mark.parametrize("case", [*FAST, *slow([(name,) for name in ORACLE_CASES if name not in FAST])])
def test_sites_equal_their_oracle(pool, tmp_path, case):
    """Weights between and after rounds, outer weights, momentum and losses, under each mapping."""
    sites, mapping = ORACLE_CASES[case]
    cfg = recipe(tmp_path, 5, sites, every=1, **mapping)
    assert_sites_equal_oracle(pool, cfg, oracle_of(without_mapping(cfg)))


@pytest.mark.slow
@pytest.mark.parametrize(("sites", "oracle"), [(CO2, OracleOfWholeRounds), (NOLOCO, OracleOfPairs)])
def test_a_site_counts_by_its_tokens_without_padding(pool, tmp_path, sites, oracle):
    assert_sites_count_by_tokens(pool, tmp_path, recipe(tmp_path, 4, sites), oracle)


@pytest.mark.parametrize(
    ("sites", "last", "mapping"),
    [
        (CODED_PAIRS, 2, {}),
        (CODED_PAIRS, 4, {"world_size": 2, "tp": 2}),
        (CO2, 2, {}),
        (CO2, 3, {"world_size": 2, "tp": 2}),
        (CO2 | {"precision": "int8", "residual": 0.9}, 4, {}),
        (SPARSE, 3, {"world_size": 2, "tp": 2}),
        (SPARSE | {"overlap": 1}, 2, {"world_size": 2, "zero": 3}),
    ],
)
# Fast: the same of another method in tests/train/test_sites.py, and saved states of these in their oracles.
@pytest.mark.slow
def test_sites_resume_bit_by_bit(pool, tmp_path, sites, last, mapping):
    assert_sites_resume(pool, tmp_path, recipe(tmp_path / "whole", 5, sites, **mapping), last)


@pytest.mark.slow
def test_sites_resume_under_another_mapping(pool, tmp_path):
    assert_sites_resume_under_another_mapping(pool, tmp_path, recipe(tmp_path / "whole", 7, CO2))


@pytest.mark.slow
@pytest.mark.parametrize(("sites", "mapping"), [(CO2, {}), (CO2 | {"weigh": "even"}, {"world_size": 2, "tp": 2})])
def test_lost_site_comes_back_with_the_state_of_another(pool, tmp_path, sites, mapping):
    assert_lost_site_returns(pool, tmp_path, recipe(tmp_path, 13, sites | {"count": 3}, every=3, **mapping), 2)


@pytest.mark.slow
def test_differences_of_co2_whose_exchange_fails_go_into_the_next_round(pool, tmp_path):
    """Site 2 is lost before the others vote on the differences of step 2, which they have taken from their weights."""
    cfg = recipe(tmp_path, 6, CO2 | {"count": 3})
    with Server().running() as server:
        ends = run_sites(pool, [of_site(cfg, n, server.port) for n in range(3)], train_and_fail, 3)
    assert ends == [["done"], ["done"], ["lost"]]
    paths = [checkpoint(tmp_path / f"site-{n}", 6) for n in (0, 1)]
    assert differing_tensors(*paths, "model.") == differing_tensors(*paths, "outer.") == []
    rounds = [record["sites"] for record in records(tmp_path / "site-0") if record["sites"]]
    assert [round_["members"] for round_ in rounds] == [0, 2]
    assert rounds[0]["skipped"]
    assert rounds[1]["gap"] > 0


def train_and_fail_before_the_vote(cfg: Config) -> str:
    """Train; site 2 raises while its first exchange is done and not voted on."""

    class FailingInARound(Callback):
        def after_step(self, context: TrainingContext, step: FinishedStep) -> None:
            (rounds,) = (callback for callback in trainer.callbacks if isinstance(callback, SiteRounds))
            if cfg.sites.number == 2 and rounds._running_exchange is not None:
                assert isinstance(rounds._running_exchange.exchange, Future)
                rounds._running_exchange.exchange.result(60)
                raise ArithmeticError

    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    trainer = Trainer(cfg, groups, callbacks=[FailingInARound()])
    try:
        trainer.run(StopSignals())
    except ArithmeticError:
        return "lost"
    return "done"


@pytest.mark.slow
def test_site_lost_in_an_exchange_of_pairs_voids_only_the_round_of_its_pair(pool, tmp_path):
    cfg = recipe(tmp_path, 8, NOLOCO | {"every": 3, "overlap": 1})
    with Server().running() as server:
        jobs = [of_site(cfg, n, server.port) for n in range(4)]
        ends = run_sites(pool, jobs, train_and_fail_before_the_vote)
    assert ends == [["done"], ["done"], ["lost"], ["done"]]
    (pair,) = (pair for pair in pair_members(cfg.run.seed, 1, range(4)) if 2 in pair)
    assert any(line.startswith(f"round 1 of {describe_sites(pair)} is not applied") for line in server.log)
    members = {}
    for number in (0, 1, 3):
        rounds = [record["sites"]["members"] for record in records(tmp_path / f"site-{number}") if record["sites"]]
        assert rounds[0] == (0 if number in pair else 2)
        members[number] = rounds[1]
        assert rounds[2] == 3
        assert differing_tensors(*(checkpoint(tmp_path / f"site-{n}", 8) for n in (0, number)), "model.") == []
    # Two of the three remaining sites exchange in the second round, and one rests.
    assert sorted(members.values()) == [1, 2, 2]


def train_and_be_late(cfg: Config, go: Path) -> None:
    """Train; site 2 waits after step 3 until the others have gone on without it."""
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    late = [Waiting(3, go, cfg.sites.number)] if cfg.sites.number == 2 else []
    Trainer(cfg, groups, callbacks=late).run(StopSignals())


@pytest.mark.slow
def test_late_site_of_pairs_is_left_out_of_a_round_and_takes_part_in_the_next(pool, tmp_path):
    cfg = recipe(tmp_path, 6, NOLOCO | {"count": 3, "grace_s": 0.5})
    go = tmp_path / "go"
    with Server().running() as server:
        # The last round waits for all sites.
        server.watch(lambda line: line == "round 2: sites 0, 1; site 2 did not come within 0.5 s", go)
        run_sites(pool, [of_site(cfg, n, server.port) for n in range(3)], train_and_be_late, go)
    rounds = {record["step"]: record["sites"] for record in records(tmp_path / "site-2") if record["sites"]}
    assert rounds[4]["skipped"] == "it came after round 2 was over"
    assert rounds[6]["members"] == 3
    for number in (1, 2):
        paths = [checkpoint(tmp_path / f"site-{n}", 6) for n in (0, number)]
        assert differing_tensors(*paths, "model.") == differing_tensors(*paths, "outer.weights.") == []
