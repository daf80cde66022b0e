"""Several ranks convert together, and end quietly."""

import pytest

from tests.convert.hf_folders import add_tokenizer, assert_same_folder
from tests.convert.hf_models import make_model, save_model
from tests.e2e.agents import run_on_ranks

pytestmark = pytest.mark.e2e


def test_two_ranks_import_and_export(tmp_path):
    folder = add_tokenizer(save_model(make_model("qwen3-moe"), tmp_path / "hf", shard="20KB"))
    done = run_on_ranks(["import", str(folder), str(tmp_path / "ckpt"), "--check"], 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("read again and equal") == 1
    done = run_on_ranks(["export", str(tmp_path / "ckpt"), str(tmp_path / "again"), "--check"], 2)
    assert done.returncode == 0, done.stderr
    assert_same_folder(folder, tmp_path / "again")


def test_a_fault_ends_both_with_one_message(tmp_path):
    folder = add_tokenizer(save_model(make_model("qwen3-moe"), tmp_path / "hf"))
    (folder / "tokenizer.json").unlink()
    done = run_on_ranks(["import", str(folder), str(tmp_path / "ckpt")], 2)
    assert done.returncode != 0
    assert done.stderr.count("moefold: error: ") == 1
    assert "has no tokenizer" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
