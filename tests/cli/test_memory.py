"""`moefold memory` from the command line."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from moefold.cli.main import main
from moefold.cli.memory import print_parts, rank_imbalance
from moefold.cost.peak_memory import compute_rank_memory
from moefold.cost.saved_tensors import KERNEL_PROFILES
from moefold.recipe import load_config
from moefold.topology.layout import fold
from moefold.train.memory_profile import MeasuredMemory

pytestmark = pytest.mark.usefixtures("forks_without_threads")

SMALL = ["model.layers=2", "train.seq_len=64", "train.micro_batch_size=1", "train.global_batch_size=8"]
RECIPE = "recipes/quickstart.toml"
SSD = ["train.offload_to=ssd", "train.offload_min_kib=0"]
TWO = ["parallel.world_size=2", "parallel.tp=1", "parallel.cp=1", "parallel.pp=1", "parallel.ep=2"]


def _json(capsys: pytest.CaptureFixture, *words: str) -> dict:
    assert main(["memory", RECIPE, *SMALL, "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_dry_has_a_row_for_each_stage_and_finds_the_model_as_computed(capsys):
    found = _json(capsys, "--dry", "parallel.world_size=64", "train.global_batch_size=64")
    assert [rank["rank"] for rank in found["ranks"]] == [0, 32]
    assert found["faults"] == []
    assert all(rank["total"] > rank["states"]["weights"] > 0 for rank in found["ranks"])


def test_dry_has_no_moments_of_frozen_weights(capsys):
    words = ["model.layers=dense, moe", "train.indexer_stage=warmup"]
    assert main(["memory", "recipes/sparse.toml", *words, "--json", "--dry"]) == 0
    assert json.loads(capsys.readouterr().out)["faults"] == []


@pytest.mark.parametrize("dispatcher", ["symm_mem", "deepep", "auto"])
def test_dry_needs_no_kernels_of_the_dispatcher(capsys, dispatcher):
    found = _json(capsys, "--dry", *TWO, f"parallel.dispatcher={dispatcher}", "run.device=cuda", "run.dtype=bfloat16")
    assert found["faults"] == []


def test_dry_as_a_table(capsys):
    assert main(["memory", RECIPE, *SMALL, "--dry", "--device", "cuda", "--imbalance", "1.5"]) == 0
    out = capsys.readouterr().out
    assert "gathered weights" in out
    assert "of 8 ranks, to the byte" in out


def test_dry_lists_the_cache_of_rollouts_and_the_further_models(capsys):
    words = ("--dry", "data.kind=task", "rl.group_size=4", "rl.kl=0.1", "rollout.tp=1", "train.eval_every=0")
    ranks = _json(capsys, *words, "parallel.tp=2")["ranks"]
    for rank in ranks:
        assert rank["further_weights"]["reference weights"] > 0
        assert rank["further_weights"]["rollout weights"] > 0
        assert rank["sampling"]["rollout cache"] > 0
        assert rank["sampling"].items() >= rank["further_weights"].items()
    assert main(["memory", RECIPE, *SMALL, *words, "parallel.tp=2"]) == 0
    table = capsys.readouterr().out
    step, sampling = table.split("while rollouts are sampled")
    assert "reference weights" in step
    assert "rollout cache" in sampling


def test_auto_is_settled_and_explained(capsys):
    assert main(["memory", RECIPE, *SMALL, "--dry", 'train.recompute=["auto"]', "train.memory_budget_gib=1"]) == 0
    assert "train.recompute=['auto'] recomputes nothing" in capsys.readouterr().out


@pytest.mark.parity
def test_measured_on_the_ranks_of_the_recipe(capsys):
    words = ["parallel.world_size=2", "parallel.tp=1", "parallel.cp=1", "parallel.pp=2", "parallel.ep=1"]
    found = _json(capsys, *words)
    assert [rank["pp_rank"] for rank in found["ranks"]] == [0, 1]
    assert all(rank["total"] >= rank["activations"] > 0 for rank in found["ranks"])
    assert {"weights", "optimizer", "experts", "norms"} <= found["ranks"][0]["peak"].keys()


def test_dry_leaves_out_moments_that_are_outside_and_writes_nothing(capsys, tmp_path):
    folder = tmp_path / "moments"
    words = ["train.offload_optimizer=ssd", f"train.offload_dir={folder}", "train.offload_min_kib=1"]
    kept, left = (_json(capsys, "--dry", *more)["ranks"][0]["states"]["optimizer"] for more in ([], words))
    assert left < 0.1 * kept
    assert not folder.exists()


@pytest.mark.parity
def test_measured_with_offload_no_part_has_the_offloaded_bytes(capsys, tmp_path):
    words = [*TWO, "train.offload_optimizer=ssd", f"train.offload_dir={tmp_path}", *SSD, "train.offload_waits=true"]
    ranks = [MeasuredMemory(**rank) for rank in _json(capsys, *TWO)["ranks"]]
    _assert_loads(ranks)
    plain = asdict(ranks[0])
    found = _json(capsys, *words, 'train.offload=["layer"]')["ranks"][0]
    assert found["after"]["optimizer"] < 0.1 * plain["after"]["optimizer"]
    assert found["activations"] < plain["activations"]
    assert "postponed gradients" not in found["peak"]
    assert main(["memory", RECIPE, *SMALL, *words[:-1], 'train.offload=["layer"]']) == 0
    out = capsys.readouterr().out
    assert "as if nothing were offloaded" in out
    assert re.search(r"rank +measured +formula +off by +rows +with rows +off by", out)
    assert "a rank saves activations for the rows" in out
    assert "train.offload_waits=true waits for the disk" in out


def test_by_formula_offloaded_bytes_are_gone_but_for_two_parts_in_transit(capsys):
    deep = ["--dry", "model.layers=8"]
    words = [*deep, *SSD, "train.offload_dir=/tmp"]
    plain = _json(capsys, *deep)
    found = _json(capsys, *words, 'train.offload=["layer"]')
    assert "as if every copy were in time" in found["note"]
    kept, whole = (memory["ranks"][0]["activations"]["total"] for memory in (found, plain))
    assert 0 < kept < whole
    part = _json(capsys, *words, 'train.offload=["norms"]')["ranks"][0]["activations"]["total"]
    assert kept < part < whole


def _assert_loads(ranks: list[MeasuredMemory]) -> None:
    """The rows of each rank, by the router's choices, explain the difference between measurement and formula."""
    cfg = load_config(Path(RECIPE), [*SMALL, *TWO])
    layout = fold(world_size=2, ep=2)
    loads = [rank_imbalance(layout, ranks, rank) for rank in range(2)]
    copies = [rank.routed for rank in ranks]
    # Micro-batches of one sample, four of them a rank, each token twice in each of two layers.
    assert [sum(routed) for routed in copies] == [4 * 64 * 2 * 2] * 2
    half = len(copies[0]) // 2
    assert loads[0] == sum(sum(routed[:half]) for routed in copies) / (4 * 64 * 2 * 2)
    assert sum(loads) == pytest.approx(2)
    for rank, load in zip(ranks, loads, strict=True):
        formula = compute_rank_memory(cfg, kernels=KERNEL_PROFILES["cpu"], imbalance=load)[0].activations.total
        assert rank.activations == pytest.approx(formula, rel=0.15)


def test_rows_of_an_expert_reach_every_etp_rank():
    layout = fold(world_size=4, ep=2, etp=2)
    # Ranks 0 and 1 hold the first two experts, each a half of them.
    routed = [[3, 1, 0, 0], [1, 1, 1, 1], [2, 2, 0, 0], [4, 0, 0, 0]]
    ranks = [MeasuredMemory(i, 0, 0, {}, 0, {}, 0, {}, counts) for i, counts in enumerate(routed)]
    assert [rank_imbalance(layout, ranks, rank) for rank in range(4)] == [
        14 * 2 / 16,
        14 * 2 / 16,
        2 * 2 / 16,
        2 * 2 / 16,
    ]
    dense = [MeasuredMemory(0, 0, 0, {}, 0, {}, 0, {}, [])]
    assert rank_imbalance(fold(world_size=1), dense, 0) is None


def test_all_ranks_are_shown_in_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    print_parts({rank: {"weights": 2**30 * (rank + 1)} for rank in range(12)}, "a title")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    assert [word for line in lines if line.startswith("part") for word in re.findall(r"rank \d+", line)] == [
        f"rank {rank}" for rank in range(12)
    ]
    assert [word for line in lines if line.startswith("weights") for word in re.findall(r"\d+ GiB", line)] == [
        f"{rank + 1} GiB" for rank in range(12)
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--imbalance", "0.5", "--dry"], "--imbalance 0.5 must be at least 1"),
        (["--imbalance", "nan", "--dry"], "--imbalance nan must be at least 1"),
        (["--imbalance", "inf", "--dry"], "--imbalance inf must be at least 1"),
        (["--device", "cuda"], "add --dry"),
        (["run.device=cuda"], "measured on the CPU only"),
        (["parallel.world_size=128", "train.global_batch_size=512"], "add --dry"),
        (['train.recompute=["auto"]', "run.device=auto"], "needs train.memory_budget_gib"),
        (["train.offload_optimizer=host"], "train.offload_optimizer='host' needs CUDA GPUs"),
        (
            ['train.offload=["layer"]', *SSD, f"train.offload_dir={__file__}/none"],
            f"train.offload_dir='{__file__}/none'",
        ),
    ],
)
def test_invalid_arguments_are_reported(capsys, words, message):
    assert main(["memory", RECIPE, *SMALL, *words]) == 2
    assert message in capsys.readouterr().err
