"""`moefold memory` from the command line."""

import json

import pytest

from moefold.cli.main import main

SMALL = ["model.num_layers=2", "train.seq_len=64", "train.micro_batch_size=1", "train.global_batch_size=8"]
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


def test_dry_as_a_table(capsys):
    assert main(["memory", RECIPE, *SMALL, "--dry", "--device", "cuda", "--imbalance", "1.5"]) == 0
    out = capsys.readouterr().out
    assert "gathered weights" in out
    assert "of 8 ranks, to the byte" in out


def test_auto_is_settled_and_explained(capsys):
    assert main(["memory", RECIPE, *SMALL, "--dry", 'train.recompute=["auto"]', "train.memory_budget_gib=1"]) == 0
    assert "train.recompute=['auto'] makes nothing again" in capsys.readouterr().out


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
def test_measured_with_offload_what_is_outside_is_in_no_part(capsys, tmp_path):
    words = [*TWO, "train.offload_optimizer=ssd", f"train.offload_dir={tmp_path}", *SSD, "train.offload_waits=true"]
    plain = _json(capsys, *TWO)["ranks"][0]
    found = _json(capsys, *words, 'train.offload=["layer"]')["ranks"][0]
    assert found["after"]["optimizer"] < 0.1 * plain["after"]["optimizer"]
    assert found["activations"] < plain["activations"]
    assert "postponed gradients" not in found["peak"]
    assert main(["memory", RECIPE, *SMALL, *words[:-1], 'train.offload=["layer"]']) == 0
    out = capsys.readouterr().out
    assert "by formula if nothing were offloaded" in out
    assert "train.offload_waits=true waits for it" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--imbalance", "0.5", "--dry"], "--imbalance 0.5 must be a number of at least 1"),
        (["--imbalance", "nan", "--dry"], "--imbalance nan must be a number of at least 1"),
        (["--imbalance", "inf", "--dry"], "--imbalance inf must be a number of at least 1"),
        (["--device", "cuda"], "add --dry"),
        (["run.device=cuda"], "measured on the CPU alone"),
        (["parallel.world_size=128", "train.global_batch_size=512"], "add --dry"),
        (['train.recompute=["auto"]', "run.device=auto"], "needs train.memory_budget_gib"),
        (["train.offload_optimizer=host"], "train.offload_optimizer='host' needs CUDA GPUs"),
        (['train.offload=["layer"]', *SSD, "train.offload_dir=/proc/none"], "train.offload_dir='/proc/none' cannot be"),
        (
            ['train.offload=["layer"]', *SSD, "train.offload_dir=/tmp", "--dry"],
            "train.offload=['layer'] has no formula",
        ),
    ],
)
def test_wrong_words_are_answered(capsys, words, message):
    assert main(["memory", RECIPE, *SMALL, *words]) == 2
    assert message in capsys.readouterr().err
