"""Sites that own experts on forked ranks: the oracle over mappings, resumes, lost sites."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.tests.oracle_site_methods import OracleOfOwners
from moefold.checkpoint.checkpoint_meta import read_meta
from moefold.checkpoint.stored_tensors import differing_tensors
from moefold.config.base.part import make_part
from moefold.config.schema import Config
from moefold.cost.adapter_spec import is_adapter
from moefold.launch.rank_pool import WorkerError
from moefold.train.train_step import TrainingStep
from moefold_experiments.spes.module import OuterOfOwners
from moefold_experiments.spes.owned_experts import OwnedExperts, select_owned
from tests.models import edit_model
from tests.slow import slow
from tests.train.site_checks import assert_sites_resume_under_another_mapping
from tests.train.site_jobs import (
    Server,
    adapted,
    of_site,
    planned_bytes,
    recipe,
    run_sites,
    train,
    train_and_come_back,
    train_sites,
    train_until,
)
from tests.train.site_results import TOLERANCE, assert_equals_oracle, checkpoint, largest_error, records, tensors
from tests.verify.recipes import without_mapping

pytestmark = pytest.mark.parity

OWN = {"count": 2, "every": 2, "method": make_part("site_method", "spes", merge_experts=0.0)}
MERGED = OWN | {"method": make_part("site_method", "spes", merge_experts=0.1, merge_every=2, merge_until=8)}
STREAMED = OWN | {"every": 4, "fragment_layers": 1, "overlap": 1, "keep_local": 0.5, "lr": 0.8, "momentum": 0.5}


def owned(run_dir: Path, steps: int, sites: dict[str, Any], mapping: dict[str, Any], options: dict[str, Any]) -> Config:
    """A recipe whose sites own experts, with weight decay and clipping that would touch frozen experts."""
    cfg = recipe(run_dir, steps, sites, every=1, **mapping)
    train = {"clip_grad": 0.1} | options.get("train", {})
    optimizer = make_part("optimizer", train.pop("optimizer", "adamw"), weight_decay=0.3)
    return replace(
        cfg,
        train=replace(cfg.train, optimizer=optimizer, **train),
        model=edit_model(cfg.model, options.get("model", {})),
    )


ORACLE_CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "one rank": (OWN, {}, {}),
    "tp ep zero 2": (MERGED, {"world_size": 2, "tp": 2, "ep": 2, "zero": 2}, {}),
    "zero 1": (MERGED, {"world_size": 2, "zero": 1}, {}),
    "zero 3, muon": (MERGED, {"world_size": 2, "zero": 3}, {"train": {"optimizer": "muon"}}),
    "etp, biases": (MERGED, {"world_size": 4, "tp": 2, "etp": 2, "zero": 2}, {"model": {"ffn.moe.bias": True}}),
    "pp, streaming": (STREAMED, {"world_size": 2, "pp": 2}, {}),
    "tp ep, streaming, muon": (STREAMED, {"world_size": 2, "tp": 2, "ep": 2}, {"train": {"optimizer": "muon"}}),
    "virtual stages, mtp": (
        OWN,
        {"world_size": 2, "pp": 2, "virtual_stages": 2, "schedule": "interleaved"},
        {"model": {"mtp_layers": 1}},
    ),
    "ep, shared expert, four sites": (
        OWN | {"count": 4},
        {"world_size": 2, "ep": 2},
        {"model": {"ffn.moe.shared.intermediate_size": 8}},
    ),
    "offloaded moments": (
        MERGED,
        {"world_size": 2, "ep": 2},
        {"train": {"offload_optimizer": "host", "offload_min_kib": 0}},
    ),
    "all axes": (OWN, {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4}, {}),
    "all axes, edp": (MERGED, {"world_size": 8, "tp": 2, "cp": 2, "ep": 2, "etp": 2}, {}),
}


FAST = "tp ep zero 2"


@pytest.mark.parametrize("case", [FAST, *slow([(name,) for name in ORACLE_CASES if name != FAST])])
def test_sites_that_own_experts_equal_their_oracle(pool, tmp_path, case):
    """Weights between and after rounds, outer weights, momentum, losses and bytes, under each mapping."""
    sites, mapping, options = ORACLE_CASES[case]
    num_steps = 3 if case == FAST else 5
    cfg = owned(tmp_path, num_steps, sites, mapping, options)
    train_sites(pool, cfg)
    count = cfg.sites.count
    expected = OracleOfOwners(without_mapping(cfg)).run(num_steps)
    for number in range(count):
        run_dir = tmp_path / f"site-{number}"
        assert_equals_oracle(cfg, number, run_dir, expected, (2, 3, num_steps))
        assert (
            differing_tensors(*(checkpoint(folder, num_steps) for folder in (run_dir, tmp_path / "site-0")), "outer.")
            == []
        )
        last = records(run_dir)[-1]["sites"]
        assert (last["members"], last["sent_bytes"]) == (count, planned_bytes(cfg, -1))


@pytest.mark.slow
@pytest.mark.parametrize("mapping", [{}, {"world_size": 2, "tp": 2, "ep": 2, "zero": 2}])
def test_sites_own_the_adapters_of_their_experts(pool, tmp_path, mapping):
    cfg = adapted(tmp_path, **mapping)
    cfg = replace(cfg, sites=replace(cfg.sites, method=OWN["method"]))
    train_sites(pool, cfg)
    expected = OracleOfOwners(without_mapping(cfg)).run(4)
    for number, step in ((0, 2), (1, 3), (1, 4)):
        path = checkpoint(tmp_path / f"site-{number}", step)
        for prefix, weights in (
            ("model.", expected[step - 1].weights[number]),
            ("outer.weights.", expected[step - 1].outer[number]),
        ):
            adapters = {name: value for name, value in weights.items() if is_adapter(name)}
            assert any(".experts." in name for name in adapters)
            assert largest_error(tensors(path, prefix), adapters) <= TOLERANCE


def train_broken(cfg: Config, broken: str) -> int:
    """Train with one mistake."""
    drop_gradients, assemble, init = OwnedExperts.drop_gradients, OuterOfOwners.assemble, TrainingStep.__init__

    def decay_others(self: OwnedExperts) -> None:
        drop_gradients(self)
        for name, whole in self._whole.items():
            other = 1 - cfg.sites.number
            select_owned(whole.data, 2, other).mul_(1 - cfg.train.lr * cfg.train.optimizer.weight_decay)
            assert name.rpartition(".")[0].endswith("experts")

    def swap_owners(self: OuterOfOwners, fragments: Any, mean: Any, of_members: Any, members: Any) -> Any:
        return assemble(self, fragments, mean, of_members, members[::-1])

    def count_all(self: TrainingStep, *args: Any) -> None:
        init(self, *args)
        self.meter.clipped = dict(self.parameters)

    with pytest.MonkeyPatch.context() as patch:
        if broken == "weight decay of other experts":
            patch.setattr(OwnedExperts, "drop_gradients", decay_others)
        elif broken == "experts of the wrong site":
            patch.setattr(OuterOfOwners, "assemble", swap_owners)
        elif broken == "norm of all experts":
            patch.setattr(TrainingStep, "__init__", count_all)
        return train(cfg)


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken", ["", "weight decay of other experts", "experts of the wrong site", "norm of all experts"]
)
def test_a_mistake_is_noticed(pool, tmp_path, broken):
    """The comparison with the oracle would fail for each of these."""
    cfg = owned(tmp_path, 3, OWN, {}, {})
    with Server().running() as server:
        run_sites(pool, [of_site(cfg, n, server.port) for n in (0, 1)], train_broken, broken)
    state = OracleOfOwners(cfg).run(3)[-1]
    error = largest_error(tensors(checkpoint(tmp_path / "site-0", 3), "model."), state.weights[0])
    assert (error > 1e-5) if broken else (error <= TOLERANCE)


IN_FLIGHT = STREAMED | {"precision": "int8", "residual": 0.9}


@pytest.mark.slow
@pytest.mark.parametrize(("last", "mapping"), [(2, {"world_size": 2, "zero": 2}), (4, {"world_size": 2, "pp": 2})])
def test_sites_that_own_experts_resume_bit_by_bit(pool, tmp_path, last, mapping):
    """Stopped while fragments are exchanged, and resumed: the sites end with the same bits."""
    whole = owned(tmp_path / "whole", 6, IN_FLIGHT, mapping, {})
    train_sites(pool, whole)
    parts = replace(whole, run=replace(whole.run, dir=str(tmp_path / "parts")))
    with Server().running() as server:
        jobs = [of_site(parts, n, server.port) for n in (0, 1)]
        run_sites(pool, jobs, train_until, last)
        assert read_meta(checkpoint(Path(jobs[0].run.dir), last)).state_of("sites")["pending.due"] == last + 1
        run_sites(pool, jobs, train)
    for number in (0, 1):
        paths = [checkpoint(tmp_path / run / f"site-{number}", 6) for run in ("whole", "parts")]
        resumed = tensors(paths[1], "")
        assert not [name for name, tensor in tensors(paths[0], "").items() if not torch.equal(tensor, resumed[name])]


@pytest.mark.slow
def test_sites_that_own_experts_resume_under_another_mapping(pool, tmp_path):
    """The owner of an expert does not depend on the mapping, and moments of own experts are logical tensors."""
    whole = owned(tmp_path / "whole", 7, STREAMED, {}, {"train": {"optimizer": "muon"}})
    assert_sites_resume_under_another_mapping(pool, tmp_path, whole, ("outer.", "model.", "optimizer."))


@pytest.mark.slow
def test_experts_of_a_lost_site_stay_as_after_its_last_round(pool, tmp_path):
    """Site 2 is lost after step 3: the others go on, its experts stay, and it takes them back when it returns."""
    cfg = owned(tmp_path, 10, OWN | {"count": 3, "every": 3}, {}, {"model": {"ffn.moe.num_experts": 12}})
    go = tmp_path / "go"
    with Server().running() as server:
        jobs = [of_site(cfg, n, server.port) for n in range(3)]
        server.watch(lambda line: line.startswith("site 2 on ") and "is here, at step 3" in line, go)
        ends = run_sites(pool, jobs, train_and_come_back, go, 3)
    assert [end[0] for end in ends] == ["done", "done", "back"]
    name = "layers.1.ffn.experts.w_up"
    at = {step: tensors(checkpoint(tmp_path / "site-0", step), "outer.weights.")[name] for step in (3, 6, 9, 10)}
    for step in (6, 9):
        assert torch.equal(at[step][2::3], at[3][2::3])
        assert not torch.equal(at[step][1::3], at[3][1::3])
    assert not torch.equal(at[10][2::3], at[3][2::3])
    paths = [checkpoint(tmp_path / f"site-{n}", 10) for n in (0, 2)]
    assert differing_tensors(*paths, "model.") == []


@pytest.mark.slow
def test_moments_of_other_experts_are_refused(pool, tmp_path):
    cfg = owned(tmp_path, 2, OWN, {}, {})
    train_sites(pool, cfg)
    path = checkpoint(tmp_path / "site-0", 2)
    alone = replace(cfg, sites=replace(cfg.sites, count=1, method="mean"))
    alone = replace(alone, checkpoint=replace(alone.checkpoint, resume=str(path)))
    with pytest.raises(
        WorkerError, match="has the optimizer moments of the experts of site 0 of 2, and this site trains"
    ):
        pool.run(1, train, replace(alone, run=replace(alone.run, dir=str(tmp_path / "alone"))))
