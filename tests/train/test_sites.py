"""Training across sites on forked ranks: the oracle of sites, data parallelism, resumes, lost sites."""

import json
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moefold.checkpoint.checkpoint_meta import read_meta
from moefold.checkpoint.inspect import differing_tensors
from moefold.comm.groups import ParallelGroups
from moefold.config.checkpoint import CheckpointConfig
from moefold.config.data import DataConfig
from moefold.config.lora import LoraConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.part import make_part
from moefold.config.run import RunConfig
from moefold.config.schema import Config
from moefold.config.sites import SitesConfig
from moefold.cost.adapter_spec import is_adapter
from moefold.cost.site_traffic import difference_itemsize, recipe_format, site_traffic, wire_format
from moefold.launch.meet_client import MeetConnection
from moefold.launch.signed_lines import Message
from moefold.train.callbacks.callback import Callback, FinishedStep, TrainingContext
from moefold.train.callbacks.sites import describe_wait
from moefold.train.signals import StopSignals
from moefold.train.site_meeting import ROUNDS_SETTING, equal_settings
from moefold.train.trainer import Trainer
from moefold.validate.config import check_config
from moefold.verify.compare import oracle_batch
from moefold.verify.distributed_run import open_samples
from moefold.verify.ranks.pool import WorkerError
from tests.models import edit_model
from tests.slow import slow
from tests.train.oracle_sites import OracleSites
from tests.train.site_jobs import Server, of_site, run_sites
from tests.train.site_results import TOLERANCE, assert_equals_oracle, checkpoint, largest_error, records, tensors
from tests.verify.recipes import tiny, without_mapping

pytestmark = pytest.mark.parity

MEAN = {"count": 2, "every": 2}
DILOCO = {"count": 2, "every": 2, "lr": 0.7, "momentum": 0.9}


def recipe(run_dir: Path, steps: int, sites: dict[str, Any], *, every: int = 0, **parallel: Any) -> Config:
    cfg = tiny(
        model={"ffn.moe.router.expert_bias": True, "ffn.moe.router": "sigmoid", "tie_embeddings": True},
        moe={"aux_loss": 0.0, "bias_update_rate": 0.01},
        train={"lr_schedule": "constant", "global_batch_size": 4},
        **parallel,
    )
    return replace(
        cfg,
        run=RunConfig(dir=str(run_dir), seed=3, steps=steps, device="cpu", dtype="float64"),
        checkpoint=CheckpointConfig(every=every, at_end=True, keep=0),
        sites=SitesConfig(**sites),
    )


def train(cfg: Config) -> int:
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    return Trainer(cfg, groups).run(StopSignals())


def train_until(cfg: Config, last: int) -> int:
    """Train as a job that gets SIGTERM before the end of step `last`."""
    stop = StopSignals()
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    return Trainer(cfg, groups, callbacks=[Stopper(stop, last)]).run(stop)


class Stopper(Callback):
    def __init__(self, stop: StopSignals, last: int) -> None:
        self._stop = stop
        self._last = last

    def after_step(self, context: TrainingContext, step: FinishedStep) -> None:
        if step.number == self._last - 1:
            self._stop.request(signal.SIGTERM)


def train_sites(pool, cfg: Config, **sites: Any) -> list[str]:
    """Train all sites of a recipe, and return the log of the meeting point."""
    with Server().running() as server:
        run_sites(pool, [of_site(cfg, n, server.port, **sites) for n in range(cfg.sites.count)], train)
    return server.log


def planned_bytes(cfg: Config, fragment: int, *, is_last: bool = False) -> int:
    """The bytes that the planner counts for a round of a fragment, or of all fragments (-1).

    The last round of sites that met in pairs is one of all sites, which send their weights.
    """
    in_pairs = cfg.sites.part.in_pairs and not is_last
    code = recipe_format(cfg.run, cfg.sites)
    if cfg.sites.part.in_pairs and is_last:
        # The vector has the blocks of the code, and is sent as it is.
        cfg = replace(cfg, sites=replace(cfg.sites, method="mean"))
        code = wire_format("float32", difference_itemsize(cfg.run))
    traffic = site_traffic(cfg)
    chosen = traffic if fragment < 0 else [traffic[fragment]]
    return (1 if in_pairs else cfg.sites.count - 1) * sum(part.num_bytes(code) for part in chosen)


STREAMING = {"count": 2, "every": 4, "fragment_layers": 1, "overlap": 1, "keep_local": 0.5, "lr": 0.4, "momentum": 0.9}
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
    check_equal(pool, cfg, OracleSites(without_mapping(cfg)))


def check_equal(pool, cfg: Config, oracle: OracleSites) -> None:
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


def adapted(run_dir: Path, **parallel: Any) -> Config:
    cfg = recipe(run_dir, 4, DILOCO | {"precision": "float32"}, every=1, **parallel)
    return replace(
        cfg,
        model=edit_model(cfg.model, {"ffn.moe.router.expert_bias": False}),
        moe=replace(cfg.moe, bias_update_rate=0.0),
        lora=LoraConfig(rank=2, alpha=6.0),
    )


@pytest.mark.slow
@pytest.mark.parametrize("mapping", [{}, {"world_size": 2, "tp": 2, "ep": 2, "zero": 2}])
def test_sites_exchange_adapters_alone(pool, tmp_path, mapping):
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
    check_tokens(pool, tmp_path, recipe(tmp_path, 4, sites, **mapping), OracleSites)


def check_tokens(pool, tmp_path: Path, cfg: Config, oracle: Callable[[Config], OracleSites]) -> None:
    """The texts differ in length, and so do the sums of the samples of each site."""
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
        recipe = of_site(cfg, 0, server.port)
        settings = equal_settings(
            recipe.run, recipe.model, recipe.parallel, recipe.train, recipe.lora, recipe.sites
        ) | {"the hash of the frozen weights": 1}
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


CODED = STREAMING | {"precision": "int8", "residual": 0.9}


@pytest.mark.parametrize(
    ("sites", "last", "mapping"),
    [
        (CODED, 2, {}),
        *slow([(CODED, 3, {"world_size": 2, "tp": 2}), (CODED, 4, {"world_size": 2, "pp": 2}), (CODED, 4, {})]),
    ],
)
def test_sites_resume_bit_by_bit(pool, tmp_path, sites, last, mapping):
    check_resume(pool, tmp_path, recipe(tmp_path / "whole", 5, sites, **mapping), last)


def check_resume(pool, tmp_path: Path, whole: Config, last: int) -> None:
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
        # CODED has two fragments, one of them each second step.
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
            # What the checkpoint lacks of a round is left out.
            for key in metrics.keys() & {"difference", "agreement", "router_distance"}:
                assert metrics[key] == whole_rounds[step][key], (step, key)


@pytest.mark.slow
def test_sites_resume_under_another_mapping(pool, tmp_path):
    check_other_mapping(pool, tmp_path, recipe(tmp_path / "whole", 7, STREAMING))


def check_other_mapping(pool, tmp_path: Path, whole: Config) -> None:
    """Outer weights, momentum and a pending mean are logical tensors, cut as the weights of any mapping."""
    train_sites(pool, whole)
    parts = replace(whole, run=replace(whole.run, dir=str(tmp_path / "parts")))
    with Server().running() as server:
        jobs = [of_site(parts, n, server.port) for n in (0, 1)]
        run_sites(pool, jobs, train_until, 4)
        mapping = ParallelConfig(world_size=4, pp=2, ep=2, zero=3)
        run_sites(pool, [replace(job, parallel=mapping) for job in jobs], train)
    for number in (0, 1):
        one, other = (tensors(checkpoint(tmp_path / run / f"site-{number}", 7), "outer.") for run in ("whole", "parts"))
        assert largest_error(other, one) <= TOLERANCE


def train_and_fail(cfg: Config, at: int) -> str:
    """Train; site 2 raises after step `at`, as a bug or a lost machine would end it."""
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    failing = [Failing(at)] if cfg.sites.number == 2 else []
    try:
        Trainer(cfg, groups, callbacks=failing).run(StopSignals())
    except ArithmeticError:
        return "lost"
    return "done"


class Failing(Callback):
    def __init__(self, at: int) -> None:
        self._at = at

    def after_step(self, context: TrainingContext, step: FinishedStep) -> None:
        if step.number == self._at:
            raise ArithmeticError


@pytest.mark.slow
def test_the_others_go_on_without_a_lost_site_and_stop_exchanging_below_the_quorum(pool, tmp_path):
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


def train_and_come_back(cfg: Config, go: Path, at: int) -> str:
    """Train; site 2 fails after step `at`, and starts again once the others wait for that after step 6."""
    if cfg.sites.number < 2:
        groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
        Trainer(cfg, groups, callbacks=[Waiting(6, go, cfg.sites.number)]).run(StopSignals())
        return "done"
    assert train_and_fail(cfg, at) == "lost"
    wait_for(go.with_name("site-0 waits"))
    wait_for(go.with_name("site-1 waits"))
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    Trainer(cfg, groups).run(StopSignals())
    return "back"


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 100
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Waiting(Callback):
    def __init__(self, at: int, go: Path, site: int) -> None:
        self._at = at
        self._go = go
        self._site = site

    def after_step(self, context: TrainingContext, step: FinishedStep) -> None:
        if step.number == self._at:
            self._go.with_name(f"site-{self._site} waits").touch()
            wait_for(self._go)


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
    check_return(pool, tmp_path, recipe(tmp_path, 10, sites | {"count": 3}, every=3, **mapping), every)


def check_return(pool, tmp_path: Path, cfg: Config, every: int) -> None:
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


def test_the_log_says_for_what_a_site_waits():
    assert describe_wait({"missing": [1]}, "host:1") == "waiting for site 1 at host:1"
    refused = {"missing": [1], "refused_sites": {"1": "run.seed=1 must equal the value of site 0, 0"}}
    assert describe_wait(refused, "host:1").endswith(
        "site 1 at host:1; site 1 cannot take part: run.seed=1 must equal the value of site 0, 0"
    )
    assert describe_wait({"wait": True}, "host:1") == "waiting for the state of another site at host:1"
    reason = "the meeting point host:1 did not answer (Connection refused)"
    assert describe_wait({"unreachable": reason}, "host:1") == f"waiting for `moefold meet`: {reason}"
