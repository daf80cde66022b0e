"""Test training across sites on forked ranks: the oracle of sites, data parallelism, resumes, lost sites."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moefold.checkpoint.stored_tensors import differing_tensors
from moefold.config.base.part import make_part
from moefold.config.sections.sites import SitesConfig
from moefold.cost.adapter_spec import is_adapter
from moefold.launch.meet_client import MeetConnection
from moefold.launch.rank_pool import WorkerError
from moefold.launch.signed_lines import Message
from moefold.train.sites.meeting import ROUNDS_SETTING, equal_settings
from moefold.train.sites.rounds import describe_wait, hash_of_ranks
from moefold.verify.compare import oracle_batch
from moefold.verify.distributed_run import open_samples
from tests.models import edit_model
from tests.slow import slow
from tests.train.oracle_sites import OracleSites
from tests.train.site_checks import (
    assert_lost_site_returns,
    assert_sites_count_by_tokens,
    assert_sites_equal_oracle,
    assert_sites_resume,
    assert_sites_resume_under_another_mapping,
)
from tests.train.site_jobs import (
    CODED,
    DILOCO,
    MEAN,
    STREAMING,
    Server,
    adapted,
    of_site,
    planned_bytes,
    recipe,
    run_sites,
    train,
    train_and_fail,
    train_sites,
)
from tests.train.site_results import TOLERANCE, checkpoint, largest_error, records, tensors
from tests.verify.recipes import without_mapping

pytestmark = pytest.mark.parity


def _hashes() -> list[int]:
    rank = dist.get_rank()
    low, high = (torch.arange(4.0) + 8 * rank, torch.arange(4.0) + 8 * rank + 4)
    other_rank = torch.arange(4.0) + 8 * (1 - rank)
    pairs = ((low, high), (high, low), (other_rank, other_rank + 4), (low.clone(), high.clone()))
    return [hash_of_ranks({"a": a, "b": b}, torch.device("cpu")) for a, b in pairs]


def test_the_hash_of_a_site_knows_which_tensor_and_rank_has_which_values(pool):
    (weights, swapped_names, swapped_ranks, same), others = pool.run(2, _hashes)
    assert others == [weights, swapped_names, swapped_ranks, same]
    assert weights == same
    assert len({weights, swapped_names, swapped_ranks}) == 3


ORACLE_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one rank, mean": (MEAN, {}),
    "tp ep zero 2, diloco": (DILOCO, {"world_size": 2, "tp": 2, "ep": 2, "zero": 2}),
    "pp, diloco": (DILOCO, {"world_size": 2, "pp": 2}),
    "zero 1, diloco": (DILOCO, {"world_size": 2, "zero": 1}),
    "zero 2, mean": (MEAN, {"world_size": 2, "zero": 2}),
    "zero 3, diloco": (DILOCO, {"world_size": 2, "zero": 3}),
    "ep, four sites, mean": (MEAN | {"count": 4}, {"world_size": 2, "ep": 2}),
    "one rank, streaming": (STREAMING, {}),
    "tp ep zero 2, streaming": (STREAMING, {"world_size": 2, "tp": 2, "ep": 2, "zero": 2}),
    "pp zero 3, streaming": (STREAMING, {"world_size": 4, "pp": 2, "zero": 3}),
    "all axes, streaming": (STREAMING | {"overlap": 0}, {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4}),
    "all axes, diloco": (DILOCO, {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4}),
}


@pytest.mark.parametrize(
    "case",
    [
        "tp ep zero 2, streaming",
        *slow([(name,) for name in ORACLE_CASES if name != "tp ep zero 2, streaming"]),
    ],
)
def test_sites_equal_their_oracle(pool, tmp_path, case):
    """Weights between and after rounds, outer weights, momentum and losses, under each mapping."""
    sites, mapping = ORACLE_CASES[case]
    cfg = recipe(tmp_path, 5, sites, every=1, **mapping)
    assert_sites_equal_oracle(pool, cfg, OracleSites(without_mapping(cfg)))


@pytest.mark.slow
@pytest.mark.parametrize("mapping", [{}, {"world_size": 2, "tp": 2, "ep": 2, "zero": 2}])
def test_sites_exchange_only_adapters(pool, tmp_path, mapping):
    cfg = adapted(tmp_path, **mapping)
    train_sites(pool, cfg)
    expected = OracleSites(without_mapping(cfg)).run(4)
    for number, step in ((0, 2), (1, 3), (1, 4)):
        path = checkpoint(tmp_path / f"site-{number}", step)
        assert records(tmp_path / f"site-{number}")[-1]["sites"]["sent_bytes"] == planned_bytes(cfg, -1)
        state = expected[step - 1]
        for prefix, weights in (("model.", state.weights[number]), ("outer.weights.", state.outer[number])):
            adapters = {name: value for name, value in weights.items() if is_adapter(name)}
            assert largest_error(tensors(path, prefix), adapters) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("sites", "mapping"), [(MEAN, {}), *slow([(STREAMING, {"world_size": 2, "ep": 2})])])
def test_a_site_counts_by_its_tokens_without_padding(pool, tmp_path, sites, mapping):
    assert_sites_count_by_tokens(pool, tmp_path, recipe(tmp_path, 4, sites, **mapping), OracleSites)


def test_sites_compare_each_setting_of_a_table_by_its_path(tmp_path):
    cfg = recipe(tmp_path, 2, MEAN)
    other = edit_model(cfg.model, {"ffn.moe.top_k": cfg.model.ffn.moe.top_k + 1})
    here, there = (
        equal_settings(cfg.run, model, cfg.parallel, cfg.train, cfg.lora, cfg.sites) for model in (cfg.model, other)
    )
    assert [name for name in here if here[name] != there[name]] == ["model.ffn.moe.top_k"]
    # A meeting point of an earlier version reads this name.
    pairs = replace(cfg.sites, method="noloco")
    paired = equal_settings(cfg.run, cfg.model, cfg.parallel, cfg.train, cfg.lora, pairs)
    assert (here["sites.topology"], paired["sites.topology"]) == ("all", "pairs")


def test_site_whose_frozen_weights_are_others_is_refused(pool, tmp_path):
    cfg = adapted(tmp_path)
    with Server().running() as server:
        there = of_site(cfg, 0, server.port)
        settings = equal_settings(there.run, there.model, there.parallel, there.train, there.lora, there.sites)
        settings |= {"the hash of the frozen weights": 1}
        first = MeetConnection("127.0.0.1", server.port, b"", 10.0)
        hello = {"do": "hello", "site": 0, "host": "other", "settings": settings, "step": 0, "round": 0}
        hello["version"] = 0
        assert "missing" in first.ask(hello)
        with pytest.raises(
            WorkerError, match="the hash of the frozen weights=[0-9]+ must equal the value of site 0, 1"
        ):
            pool.run(1, train, of_site(cfg, 1, server.port), timeout_s=60.0)
        first.close()


@pytest.mark.slow
def test_linear_adamw_with_a_round_each_step_is_data_parallelism(pool, tmp_path):
    """AdamW with betas 0 and a huge eps is SGD of rate lr / eps: sites then equal one job on the joined batch."""
    linear = {
        "optimizer": make_part("optimizer", "adamw", beta1=0.0, beta2=0.0, eps=1e9, weight_decay=0.0),
        "lr": 1e8,
        "clip_grad": 0.0,
    }
    cfg = recipe(tmp_path, 4, {"count": 2, "every": 1}, world_size=1)
    cfg = replace(
        cfg, train=replace(cfg.train, **linear), model=edit_model(cfg.model, {"ffn.moe.router.expert_bias": False})
    )
    train_sites(pool, cfg)
    joined = replace(
        cfg,
        sites=SitesConfig(),
        train=replace(cfg.train, global_batch_size=8),
        run=replace(cfg.run, dir=str(tmp_path / "joined")),
    )
    pool.run(1, train, joined)
    sites, one = (tensors(checkpoint(tmp_path / name, 4), "model.") for name in ("site-1", "joined"))
    assert largest_error(sites, one) <= 1e-10


@pytest.mark.parametrize(
    ("sites", "last", "mapping"),
    [
        (CODED, 2, {}),
        *slow([(CODED, 3, {"world_size": 2, "tp": 2}), (CODED, 4, {"world_size": 2, "pp": 2}), (CODED, 4, {})]),
    ],
)
def test_sites_resume_bit_by_bit(pool, tmp_path, sites, last, mapping):
    assert_sites_resume(pool, tmp_path, recipe(tmp_path / "whole", 5, sites, **mapping), last)


@pytest.mark.slow
def test_sites_resume_under_another_mapping(pool, tmp_path):
    assert_sites_resume_under_another_mapping(pool, tmp_path, recipe(tmp_path / "whole", 7, STREAMING))


@pytest.mark.slow
def test_exchanges_go_on_without_a_lost_site_until_the_quorum(pool, tmp_path):
    cfg = recipe(tmp_path / "enough", 6, {"count": 3, "every": 2})
    few = recipe(tmp_path / "few", 6, {"count": 3, "every": 2, "quorum": 3})
    for one in (cfg, few):
        with Server().running() as server:
            ends = run_sites(pool, [of_site(one, n, server.port) for n in range(3)], train_and_fail, 3)
        assert ends == [["done"], ["done"], ["lost"]]
        assert any(line.startswith("site 2 on ") and line.endswith("closed its connection") for line in server.log)
    paths = [checkpoint(tmp_path / "enough" / f"site-{n}", 6) for n in (0, 1)]
    assert differing_tensors(*paths, "model.") == []
    rounds = [record["sites"] for record in records(tmp_path / "enough" / "site-0") if record["sites"]]
    assert [round_["members"] for round_ in rounds] == [3, 2, 2]
    rounds = [record["sites"] for record in records(tmp_path / "few" / "site-1") if record["sites"]]
    assert [round_["members"] for round_ in rounds] == [3, 0, 0]
    assert rounds[-1]["skipped"] == "only sites 0, 1, and sites.quorum needs 3"
    faults = (tmp_path / "few" / "site-1" / "faults.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in faults] == [4, 6]
    paths = [checkpoint(tmp_path / "few" / f"site-{n}", 6) for n in (0, 1)]
    assert differing_tensors(*paths, "outer.weights.") == []
    assert differing_tensors(*paths, "model.") != []


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
                    oracle_batch(
                        data, without_mapping(cfg).train, [number + 2 * i for i in range(4 * step, 4 * step + 4)]
                    )
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


@pytest.mark.slow
def test_sites_with_other_numbers_of_rounds_are_refused(pool, tmp_path):
    """The site that waits is told why, and ends if the other one does not come back."""
    cfg = recipe(tmp_path, 4, DILOCO)
    with Server().running() as server:
        first = of_site(cfg, 0, server.port, timeout_s=1.0)
        other = replace(first, sites=replace(first.sites, every=1, number=1))
        refused = MeetConnection("127.0.0.1", server.port, b"", 10.0)
        hello = {
            "do": "hello",
            "site": 1,
            "host": "other",
            "settings": equal_settings(other.run, other.model, other.parallel, other.train, other.lora, other.sites),
        }

        def come_late() -> Message:
            deadline = time.monotonic() + 60
            while not any(line.startswith("site 0 on") for line in server.log):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            return refused.ask(hello | {"step": 0, "round": 0, "version": 0})

        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(come_late)
            with pytest.raises(
                WorkerError, match="site 1 cannot take part in the run, and did not come back within 1 s"
            ):
                pool.run(1, train, first, timeout_s=60.0)
        refused.close()
    assert f"{ROUNDS_SETTING}=[4, 0] must equal the value of site 0, [2, 0]" in answer.result()["refused"]


@pytest.mark.parametrize(
    ("sites", "mapping", "every"),
    [
        (DILOCO, {}, 2),
        *slow(
            [
                (CODED | {"every": 2, "fragment_layers": 0}, {}, 2),
                (DILOCO, {"world_size": 4, "pp": 2, "ep": 2, "zero": 3}, 2),
                (DILOCO, {}, 1),
            ]
        ),
    ],
)
def test_lost_site_comes_back_with_the_state_of_another(pool, tmp_path, sites, mapping, every):
    assert_lost_site_returns(pool, tmp_path, recipe(tmp_path, 10, sites | {"count": 3}, every=3, **mapping), every)


def test_the_log_names_the_reason_of_a_wait():
    assert describe_wait({"missing": [1]}, "host:1") == "waiting for site 1 at host:1"
    refused = {"missing": [1], "refused_sites": {"1": "run.seed=1 must equal the value of site 0, 0"}}
    assert describe_wait(refused, "host:1").endswith(
        "site 1 at host:1; site 1 cannot take part: run.seed=1 must equal the value of site 0, 0"
    )
    assert describe_wait({"wait": True}, "host:1") == "waiting for the state of another site at host:1"
    reason = "the meeting point host:1 did not answer (Connection refused)"
    assert describe_wait({"unreachable": reason}, "host:1") == f"waiting for `moefold meet`: {reason}"
