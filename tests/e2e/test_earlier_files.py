"""Test that files written by commit ad78ce5 load, and that training continues with equal numbers."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.e2e.command import moefold

ARCHIVE = Path(__file__).parents[1] / "checkpoint" / "written_by_ad78ce5.tar.gz"
pytestmark = pytest.mark.e2e


@pytest.fixture
def folder(tmp_path):
    """Unpack the files of the earlier commit: a run of 4 steps as it was after step 2, in float64 on one rank."""
    subprocess.run(["tar", "-xzf", str(ARCHIVE), "-C", str(tmp_path)], check=True)
    return tmp_path


def _records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_training_continues_with_the_numbers_of_the_earlier_commit(folder):
    refused = moefold("train", "recipe.toml", cwd=folder)
    assert "model.num_experts is model.ffn.moe.num_experts now: " in refused.stderr
    for words in (("recipe", "upgrade", "recipe.toml"), ("train", "recipe.toml")):
        done = moefold(*words, cwd=folder)
        assert done.returncode == 0, done.stderr
    records = _records(folder / "run" / "metrics.jsonl")
    expected = _records(folder / "expected_metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    for found, wanted in zip(records[2:], expected[2:], strict=True):
        assert set(wanted) <= set(found)
        for key in ("loss", "aux_loss", "grad_norm", "lr", "tokens"):
            assert found[key] == pytest.approx(wanted[key], rel=1e-12), key


def test_commands_read_the_earlier_run(folder):
    for words in (("checkpoint", "verify", "run"), ("inspect", "run"), ("eval", "run", "--text", "recipe.toml")):
        done = moefold(*words, cwd=folder)
        assert done.returncode == 0, (words, done.stderr)
