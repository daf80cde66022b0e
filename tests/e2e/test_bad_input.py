"""Everything a user can get wrong is one message on stderr, exit 2, no traceback, within two seconds."""

import time

import pytest

from tests.e2e.command import SMALL, moefold

pytestmark = pytest.mark.e2e

BAD = {
    "unknown key": (["train.learning_rate=1"], "train.lr"),
    "wrong type": (["run.steps=many"], "run.steps='many'"),
    "degree": (["parallel.world_size=8", "parallel.tp=3"], "parallel.tp=3 must divide"),
    "heads": (["parallel.world_size=8", "parallel.tp=8"], "parallel.tp=8"),
    "experts": (["parallel.world_size=3", "parallel.ep=3", "train.global_batch_size=9"], "parallel.ep=3"),
    "missing file": (["data.kind=text", "data.path=/nonexistent/file.txt"], "/nonexistent/file.txt"),
    "vocabulary": (["data.kind=python-docs", "model.vocab_size=100"], "model.vocab_size=100"),
    "sequence": (["parallel.world_size=4", "parallel.cp=4", "train.seq_len=60"], "train.seq_len=60"),
    "order law": (
        [
            "parallel.world_size=8",
            "parallel.pp=2",
            "parallel.tp=2",
            "parallel.order=dp-pp-cp-tp",
            "parallel.moe_order=edp-pp-ep-etp",
        ],
        "parallel.order",
    ),
    "checkpoint": (["checkpoint.resume=/nonexistent/step-000001"], "checkpoint.resume"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_setting_is_one_message(tmp_path, name):
    words, expected = BAD[name]
    recipe = tmp_path / "recipe.toml"
    recipe.touch()
    started_s = time.perf_counter()
    done = moefold("train", str(recipe), *SMALL, f"run.dir={tmp_path / 'run'}", *words)
    took_s = time.perf_counter() - started_s
    assert done.returncode == 2
    assert done.stderr.startswith("moefold: error: ") and expected in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
    assert took_s < 2.0


def test_empty_data(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "recipe.toml").touch()
    done = moefold("train", str(tmp_path / "recipe.toml"), *SMALL, "data.kind=text", f"data.path={tmp_path}/empty.txt")
    assert done.returncode == 2 and "empty.txt" in done.stderr and "Traceback" not in done.stderr


def test_run_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "recipe.toml").touch()
    done = moefold("train", str(tmp_path / "recipe.toml"), *SMALL, f"run.dir={tmp_path}/file/run")
    assert done.returncode == 2 and "run.dir=" in done.stderr and "Traceback" not in done.stderr
