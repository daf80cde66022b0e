"""Sites in pairs, late sites, and sites that take other numbers of steps between the rounds, on forked ranks."""

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moefold.checkpoint.inspect import differing_tensors
from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.launch.meeting import describe_sites
from moefold.launch.site_round import pair_members
from moefold.train.callbacks.callback import Callback, FinishedStep, TrainingContext
from moefold.train.callbacks.sites import SiteRounds
from moefold.train.signals import StopSignals
from moefold.train.trainer import Trainer
from moefold.validate.config import check_config
from moefold.verify.compare import oracle_batch
from moefold.verify.distributed_run import open_samples
from moefold.verify.oracle_sites import OracleSites
from tests.train.site_jobs import Server, of_site, run_sites
from tests.train.test_sites import (
    DILOCO,
    NOLOCO,
    TOLERANCE,
    Waiting,
    checkpoint,
    largest_error,
    recipe,
    records,
    tensors,
    train,
)
from tests.verify.recipes import without_mapping

pytestmark = pytest.mark.parity


def train_and_fail_before_the_vote(cfg: Config) -> str:
    """Train; site 2 raises while its first exchange is done and not voted on."""
    trainer = Trainer(cfg, ParallelGroups.create(check_config(cfg), torch.device("cpu")))

    class FailingInARound(Callback):
        def after_step(self, run: TrainingContext, step: FinishedStep) -> None:
            rounds = trainer._callbacks[0]
            assert isinstance(rounds, SiteRounds)
            if cfg.sites.number == 2 and rounds._flight is not None:
                assert isinstance(rounds._flight.exchange, Future)
                rounds._flight.exchange.result(60)
                raise ArithmeticError

    trainer._further_callbacks = (FailingInARound(),)
    try:
        trainer.run(StopSignals())
    except ArithmeticError:
        return "lost"
    return "done"


@pytest.mark.slow
def test_site_lost_in_an_exchange_of_pairs_voids_the_round_of_its_pair_alone(pool, tmp_path):
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
    # Of the three sites that are left, two exchange in the second round, and one rests.
    assert sorted(members.values()) == [1, 2, 2]


def train_and_be_late(cfg: Config, go: Path) -> None:
    """Train; site 2 waits after step 3 until the others have gone on without it."""
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    late = [Waiting(3, go)] if cfg.sites.number == 2 else []
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


@pytest.mark.slow
def test_slow_site_takes_fewer_steps_between_the_rounds(pool, tmp_path):
    """Sites of 4 and 2 steps with two rounds: each counts for the tokens that it has trained on."""
    cfg = recipe(tmp_path, 4, DILOCO)
    slow_cfg = replace(cfg, run=replace(cfg.run, steps=2), sites=replace(cfg.sites, every=1))
    with Server().running() as server:
        run_sites(pool, [of_site(cfg, 0, server.port), of_site(slow_cfg, 1, server.port)], train)
    oracle = OracleSites(without_mapping(cfg))
    phi = {name: p.clone() for name, p in oracle.outer[0].items()}
    momentum = {name: torch.zeros_like(p) for name, p in phi.items()}
    data = open_samples(cfg).train
    shares = (2 / 3, 1 / 3)
    for round_ in range(2):
        for number, (site, steps) in enumerate(zip(oracle.sites, (2, 1), strict=True)):
            for step in range(round_ * steps, (round_ + 1) * steps):
                site.step(
                    oracle_batch(data, without_mapping(cfg), [number + 2 * i for i in range(4 * step, 4 * step + 4)])
                )
        with torch.no_grad():
            for name in phi:
                g = sum(
                    share * (phi[name] - site.weights[name]) for share, site in zip(shares, oracle.sites, strict=True)
                )
                momentum[name] = 0.9 * momentum[name] + g
                phi[name] = phi[name] - 0.7 * (g + 0.9 * momentum[name])
            for site in oracle.sites:
                for name, value in phi.items():
                    site.weights[name].copy_(value)
            for name, bias in oracle.sites[0].router.biases.items():
                of_sites = [site.router.biases[name] for site in oracle.sites]
                mean = sum(share * one.double() for share, one in zip(shares, of_sites, strict=True)) + 0 * bias
                for one in of_sites:
                    one.copy_(mean)
    biases = oracle.sites[0].router.biases
    for number, last in ((0, 4), (1, 2)):
        path = checkpoint(tmp_path / f"site-{number}", last)
        assert largest_error(tensors(path, "outer.weights."), phi) <= TOLERANCE
        assert largest_error(tensors(path, "outer.momentum."), momentum) <= TOLERANCE
        stored = tensors(path, "model.")
        assert largest_error({name: stored[name] for name in biases}, biases) <= TOLERANCE
