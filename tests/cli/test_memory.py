"""`moefold memory` from the command line."""

import json

import pytest

from moefold.cli.main import main

SMALL = ["model.num_layers=2", "train.seq_len=64", "train.micro_batch_size=1", "train.global_batch_size=8"]
RECIPE = "recipes/quickstart.toml"


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--imbalance", "0.5", "--dry"], "--imbalance 0.5 must be at least 1"),
        (["--device", "cuda"], "add --dry"),
        (["run.device=cuda"], "measured on the CPU alone"),
        (["parallel.world_size=128", "train.global_batch_size=512"], "add --dry"),
        (['train.recompute=["auto"]', "run.device=auto"], "needs train.memory_budget_gib"),
    ],
)
def test_wrong_words_are_answered(capsys, words, message):
    assert main(["memory", RECIPE, *SMALL, *words]) == 2
    assert message in capsys.readouterr().err
