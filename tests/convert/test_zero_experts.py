"""Folders of LongCat-Flash with experts without computation. Published folders hold no tensors of them."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from moefold.cli.main import main
from moefold.convert.hf_shards import MANIFEST_FILE
from tests.convert.hf_folders import add_tokenizer, assert_same_folder
from tests.convert.hf_models import make_model, save_model, tokens_of
from tests.convert.our_logits import our_logits

WEIGHTS = "model.safetensors"
UNREAD = re.compile(r".*\.experts\.[567]\..*")
"""Tensors that transformers writes for the three experts without computation, after five others."""


@pytest.fixture
def folder(tmp_path):
    return add_tokenizer(save_model(make_model("longcat-flash-zero"), tmp_path / "hf"))


def _edit(folder, change):
    tensors = load_file(folder / WEIGHTS)
    save_file(change(tensors), folder / WEIGHTS, metadata={"format": "pt"})


def _published(tensors):
    return {name: tensor for name, tensor in tensors.items() if not UNREAD.fullmatch(name)}


def test_a_published_folder_comes_back(tmp_path, folder):
    _edit(folder, _published)
    assert main(["import", str(folder), str(tmp_path / "ckpt"), "--check"]) == 0
    assert 'layers = "2 x (moe, dense)"\n' in (tmp_path / "ckpt" / "recipe.toml").read_text()
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "again"), "--check"]) == 0
    assert_same_folder(folder, tmp_path / "again")


def test_tensors_of_experts_without_computation_are_not_read(tmp_path, folder, capsys):
    """transformers writes them and does not read them: without them, the logits are the same."""
    tokens = tokens_of(2, 16)
    expected = our_logits(folder, tokens)
    assert main(["import", str(folder), str(tmp_path / "ckpt"), "--check"]) == 0
    assert "ignored (of an expert without computation): model.layers.0.mlp.experts.5" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "again"), "--check"]) == 0
    names = set(load_file(tmp_path / "again" / WEIGHTS))
    assert names == {name for name in load_file(folder / WEIGHTS) if not UNREAD.fullmatch(name)}
    assert json.loads((tmp_path / "again" / MANIFEST_FILE).read_text())["tensors"].keys() == names
    torch.testing.assert_close(our_logits(tmp_path / "again", tokens), expected)


@pytest.mark.parametrize(
    "surplus", ["model.layers.0.mlp.experts.5.down_proj.weight", "model.layers.1.mlp.experts.8.up_proj.weight"]
)
def test_a_surplus_expert_is_refused(tmp_path, folder, capsys, surplus):
    _edit(folder, lambda tensors: tensors | {surplus: torch.zeros(24, 12)})
    assert main(["import", str(folder), str(tmp_path / "ckpt")]) == 2
    assert f"tensor {surplus} has no place in this longcat_flash model" in capsys.readouterr().err
    assert not (tmp_path / "ckpt").exists()
