"""Qwen folders with a layer of multi-token prediction, and the text model of a multimodal folder."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from moefold.checkpoint.checkpoint_meta import read_meta
from moefold.cli.main import main
from tests.convert.hf_folders import add_tokenizer, assert_same_folder
from tests.convert.hf_models import logits_of, make_model, save_model, tokens_of
from tests.convert.mtp_folders import SEQ_LEN, WEIGHTS, as_published, assert_loads, assert_mtp_loss_of_transformers

OWN = {
    "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "eh_proj.weight": "mtp.fc.weight",
    "shared_head.norm.weight": "mtp.norm.weight",
}
COUNT_KEYS = {"qwen3-next": "num_nextn_predict_layers", "qwen3-5-moe": "mtp_num_hidden_layers"}


def published(folder: Path, name: str, **counted: int) -> SimpleNamespace:
    """A folder with an MTP layer as Qwen3-Next and Qwen3.5 have it, the model and its drafting layer."""
    from transformers.modeling_layers import MtpModel

    kinds = ["linear_attention", "linear_attention", "full_attention"]
    dense = {} if name == "qwen3-5-moe" else {"mlp_only_layers": [1]}
    model = make_model(name, layer_types=kinds, num_mtp_layers=1, mtp_layer_types=["full_attention"], **dense)
    torch.manual_seed(1)
    further = MtpModel(model, 1).eval()
    with torch.no_grad():
        for parameter in further.layers.parameters():
            parameter.normal_(0.0, 0.2)
    for key in ("num_mtp_layers", "mtp_layer_types"):
        delattr(model.config, key)
    save_model(model, folder)
    tensors = load_file(folder / WEIGHTS)
    for key, tensor in further.layers.state_dict().items():
        for theirs, part in as_published(key, tensor.detach(), 3).items():
            rest = theirs.removeprefix("model.layers.3.")
            tensors[OWN.get(rest, f"mtp.layers.0.{rest}")] = part.contiguous()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | counted, indent=2, sort_keys=True) + "\n")
    return SimpleNamespace(folder=add_tokenizer(folder), model=model, further=further)


@pytest.mark.parametrize("name", COUNT_KEYS)
def test_the_loss_of_the_mtp_layer_equals_transformers(tmp_path, name):
    made = published(tmp_path / "hf", name)
    assert_mtp_loss_of_transformers(made)


@pytest.mark.parametrize("name", COUNT_KEYS)
def test_a_folder_with_an_mtp_layer_comes_back(tmp_path, monkeypatch, caplog, name):
    """config.json of Qwen3-Next lacks the key that counts the layer. An export without these files counts it."""
    out = tmp_path
    made = published(out / "hf", name, **({} if name == "qwen3-next" else {COUNT_KEYS[name]: 1}))
    assert main(["import", str(made.folder), str(out / "ckpt"), "--check"]) == 0
    assert read_meta(out / "ckpt").model["mtp_layers"] == 1
    assert main(["export", str(out / "ckpt"), str(out / "again"), "--check"]) == 0
    assert_same_folder(made.folder, out / "again")
    for file in (out / "ckpt" / "hf").iterdir():
        file.unlink()
    family = {"qwen3-next": "qwen3_next", "qwen3-5-moe": "qwen3_5_moe_text"}[name]
    assert main(["export", str(out / "ckpt"), str(out / "new"), "--check", "--family", family]) == 0
    assert load_file(out / "new" / WEIGHTS).keys() == load_file(made.folder / WEIGHTS).keys()
    assert json.loads((out / "new" / "config.json").read_text())[COUNT_KEYS[name]] == 1
    assert_loads(out / "new", made.model, monkeypatch, caplog)
    assert main(["import", str(made.folder), str(out / "without"), "--without-mtp", "--check"]) == 0
    assert read_meta(out / "without").model["mtp_layers"] == 0


def test_more_mtp_layers_and_another_kind_are_refused(tmp_path, capsys):
    made = published(tmp_path / "hf", "qwen3-5-moe", mtp_num_hidden_layers=2)
    assert main(["import", str(made.folder), str(tmp_path / "ckpt")]) == 2
    assert "mtp_num_hidden_layers=2; moefold reads 0 or 1" in capsys.readouterr().err


def test_mtp_tensors_of_other_families_can_be_left_out(tmp_path, capsys):
    folder = add_tokenizer(save_model(make_model("exaone-moe"), tmp_path / "hf"))
    tensors = load_file(folder / WEIGHTS) | {"mtp.fc.weight": torch.zeros(4, 8)}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    assert main(["import", str(folder), str(tmp_path / "ckpt")]) == 2
    assert (
        "mtp.fc.weight is of multi-token prediction, which moefold does not read from exaone_moe folders; import "
        in (capsys.readouterr().err)
    )
    assert main(["import", str(folder), str(tmp_path / "ckpt"), "--without-mtp", "--check"]) == 0
    assert "ignored (multi-token prediction): mtp.fc.weight" in capsys.readouterr().out


def test_the_text_model_of_a_multimodal_folder_is_read(tmp_path, monkeypatch, capsys, caplog):
    """As Qwen3.5 is released: text_config, model.language_model and a vision model. Exports hold the text model."""
    made = published(tmp_path / "hf", "qwen3-5-moe", mtp_num_hidden_layers=1)
    folder = made.folder
    config = json.loads((folder / "config.json").read_text())
    nested = {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"], "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(nested | {"text_config": config, "tie_word_embeddings": False}))
    tensors = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
        for name, tensor in load_file(folder / WEIGHTS).items()
    }
    tensors["model.visual.patch_embed.proj.weight"] = torch.ones(3, 2)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    assert main(["import", str(folder), str(tmp_path / "ckpt"), "--check"]) == 0
    assert "ignored (not of the text model): model.visual.patch_embed.proj.weight" in capsys.readouterr().out
    assert read_meta(tmp_path / "ckpt").model["mtp_layers"] == 1
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "out"), "--check"]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "qwen3_5_moe_text"
    assert_loads(tmp_path / "out", made.model, monkeypatch, caplog)
    tokens = tokens_of(1, SEQ_LEN)
    assert logits_of(made.model, tokens).isfinite().all()
    (folder / "config.json").write_text(json.dumps(nested))
    assert main(["import", str(folder), str(tmp_path / "again")]) == 2
    assert "model_type='qwen3_5_moe' has text_config=None, no object" in capsys.readouterr().err
