"""Runs of sites compared with their oracle, resumed, and lost and returned."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from moefold.checkpoint.checkpoint_meta import read_meta
from moefold.checkpoint.stored_tensors import differing_tensors
from moefold.config.schema import Config
from moefold.config.sections.data import DataConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.verify.distributed_run import open_samples
from tests.train.oracle_sites import OracleSites
from tests.train.site_jobs import (
    Server,
    of_site,
    planned_bytes,
    run_sites,
    train,
    train_and_come_back,
    train_sites,
    train_until,
)
from tests.train.site_results import TOLERANCE, assert_equals_oracle, checkpoint, largest_error, records, tensors
from tests.verify.recipes import without_mapping


def assert_sites_equal_oracle(pool, cfg: Config, oracle: OracleSites) -> None:
    """Train the sites of a recipe of 5 steps, and compare them with their oracle and with each other."""
    in_pairs = cfg.sites.part.in_pairs
    run_dir = Path(cfg.run.dir)
    log = train_sites(pool, cfg)
    count = cfg.sites.count
    assert not [line for line in log if "round" in line and "after" not in line], log
    expected = oracle.run(5)
    for number in range(count):
        folder = run_dir / f"site-{number}"
        assert_equals_oracle(cfg, number, folder, expected, (2, 3, 5))
        # Pairs end with the mean of all, and with momentum of their own.
        prefix = "outer.weights." if in_pairs else "outer."
        assert differing_tensors(checkpoint(folder, 5), checkpoint(run_dir / "site-0", 5), prefix) == []
        rounds = [record["step"] for record in records(folder) if record["sites"]]
        if not in_pairs or count % 2 == 0:
            assert rounds == {0: [2, 4, 5], 1: [3, 5], 2: [4, 5]}[cfg.sites.overlap]
        exchanged = [one["sites"] for one in records(folder) if one["sites"] and one["sites"]["members"] > 1]
        assert [round_["sent_bytes"] for round_ in exchanged] == [
            planned_bytes(cfg, round_["fragment"], is_last=round_["members"] == count) for round_ in exchanged
        ]
        assert records(folder)[-1]["sites"]["members"] == count


def assert_sites_count_by_tokens(pool, tmp_path: Path, cfg: Config, oracle: Callable[[Config], OracleSites]) -> None:
    """The texts differ in length, so the sums of the samples of each site differ too."""
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"q{i:02d}", "response": "x" * (20 + 9 * (i % 5))} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = replace(
        cfg,
        model=replace(cfg.model, vocab_size=256),
        train=replace(cfg.train, seq_len=120),
        data=DataConfig(kind="sft", path=str(path), validation_fraction=0.0),
    )
    train_sites(pool, cfg)
    expected = oracle(without_mapping(cfg)).run(4)
    tokens = []
    data = open_samples(cfg).train
    for number in range(cfg.sites.count):
        assert_equals_oracle(cfg, number, tmp_path / f"site-{number}", expected, (4,))
        read = data.batch_at([number + cfg.sites.count * i for i in range(4 * 4)])
        tokens.append(int(read.is_token().sum()))
        assert records(tmp_path / f"site-{number}")[-1]["tokens"] == tokens[-1]
    assert len(set(tokens)) > 1, "the sites would have the same weights"


def assert_sites_resume(pool, tmp_path: Path, whole: Config, last: int) -> None:
    """Stopped while a fragment is exchanged, or after it was applied, and resumed: the sites end with the same bits.

    Ranks of a site that hold the same shard of a weight decode the same values, though their other weights differ.
    """
    whole = replace(whole, faults=replace(whole.faults, replica_check_every=1))
    train_sites(pool, whole)
    parts = replace(whole, run=replace(whole.run, dir=str(tmp_path / "parts")))
    with Server().running() as server:
        jobs = [of_site(parts, n, server.port) for n in (0, 1)]
        run_sites(pool, jobs, train_until, last)
        state = read_meta(checkpoint(Path(jobs[0].run.dir), last)).state_of("sites")
        # CODED has two fragments, one each second step.
        assert state["rounds"] == last // 2
        overlap = whole.sites.overlap
        assert state.get("pending.due") == (last // 2 * 2 + overlap if last % 2 < overlap else None)
        run_sites(pool, jobs, train)
    for number in (0, 1):
        sent = records(tmp_path / "whole" / f"site-{number}")[-1]["sites"]["sent_bytes"]
        assert sent == planned_bytes(whole, -1, is_last=True)
        paths = [checkpoint(tmp_path / run / f"site-{number}", 5) for run in ("whole", "parts")]
        resumed = tensors(paths[1], "")
        assert not [name for name, tensor in tensors(paths[0], "").items() if not torch.equal(tensor, resumed[name])]
        folders = (tmp_path / run / f"site-{number}" for run in ("whole", "parts"))
        whole_rounds, rounds = ({r["step"]: r["sites"] for r in records(path) if r["sites"]} for path in folders)
        for step, metrics in rounds.items():
            # Metrics of a round that the checkpoint lacks are left out.
            for key in metrics.keys() & {"difference", "agreement", "router_distance"}:
                assert metrics[key] == whole_rounds[step][key], (step, key)


def assert_sites_resume_under_another_mapping(
    pool, tmp_path: Path, whole: Config, prefixes: tuple[str, ...] = ("outer.",)
) -> None:
    """Outer weights, momentum and a pending mean are logical tensors, cut as the weights of any mapping.

    Args:
        prefixes: of the names of the tensors that are compared.
    """
    train_sites(pool, whole)
    parts = replace(whole, run=replace(whole.run, dir=str(tmp_path / "parts")))
    with Server().running() as server:
        jobs = [of_site(parts, n, server.port) for n in (0, 1)]
        run_sites(pool, jobs, train_until, 4)
        mapping = ParallelConfig(world_size=4, pp=2, ep=2, zero=3)
        run_sites(pool, [replace(job, parallel=mapping) for job in jobs], train)
    for number, prefix in product((0, 1), prefixes):
        one, other = (tensors(checkpoint(tmp_path / run / f"site-{number}", 7), prefix) for run in ("whole", "parts"))
        assert largest_error(other, one) <= TOLERANCE


def assert_lost_site_returns(pool, tmp_path: Path, cfg: Config, every: int) -> None:
    """The others take 2 steps between rounds; the lost site may take fewer."""
    is_co2 = cfg.sites.overlap == 2
    go = tmp_path / "go"
    at = 3 if every == 2 else 1
    with Server().running() as server:
        jobs = [of_site(cfg, n, server.port) for n in range(3)]
        if every == 1:
            job = jobs[2]
            jobs[2] = replace(
                job,
                run=replace(job.run, steps=5),
                sites=replace(job.sites, every=1),
                checkpoint=replace(job.checkpoint, every=1),
            )
        server.watch(lambda line: line.startswith("site 2 on ") and f"is here, at step {at}" in line, go)
        ends = run_sites(pool, jobs, train_and_come_back, go, at)
    assert [end[0] for end in ends] == ["done", "done", "back"]
    rounds = [record["sites"] for record in records(tmp_path / "site-0") if record["sites"]]
    assert [round_["members"] for round_ in rounds] == [3, 2, 2, 2, 3, *([3] if is_co2 else [])]
    assert any("site 2 takes the state of site 0 after round 4" in line for line in server.log)
    steps = [record["step"] for record in records(tmp_path / "site-2")]
    taken = 4 * every + cfg.sites.overlap
    last = jobs[2].run.steps
    assert steps == [*range(1, at + 1), *range(taken + 1, last + 1)]
    for number in (1, 2):
        paths = [checkpoint(tmp_path / f"site-{n}", jobs[n].run.steps) for n in (0, number)]
        assert differing_tensors(*paths, "model.") == []
        assert differing_tensors(*paths, "outer.weights.") == differing_tensors(*paths, "outer.momentum.") == []
    assert read_meta(checkpoint(tmp_path / "site-2", last)).state_of("sites")["rounds"] == (7 if is_co2 else 5)
