"""Folders of Llama 4 as released: a text model in a multimodal one."""

import json

import torch
from safetensors.torch import load_file

from moefold.cli.main import main
from tests.convert.hf_folders import add_tokenizer
from tests.convert.hf_models import MODELS, SIZES, tokens_of, transformers
from tests.convert.our_logits import our_logits

VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vision_output_dim": 16,
    "image_size": 28,
    "patch_size": 14,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
}


def test_the_text_model_of_a_multimodal_folder_is_read(tmp_path, capsys):
    """The folder that transformers writes. Exports hold the text model."""
    sizes = {**SIZES, **MODELS["llama4"][1], "pad_token_id": None}
    config = transformers.Llama4Config(text_config=sizes, vision_config=VISION, attn_implementation="eager")
    torch.manual_seed(3)
    theirs = transformers.Llama4ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path / "hf")
    folder = add_tokenizer(tmp_path / "hf")
    assert main(["import", str(folder), str(tmp_path / "ckpt"), "--check"]) == 0
    assert "ignored (not of the text model): multi_modal_projector.linear_1.weight" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "out"), "--check"]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama4_text"
    prefix = "language_model."
    expected = {n.removeprefix(prefix): t for n, t in load_file(folder / "model.safetensors").items() if prefix in n}
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    tokens = tokens_of(2, 16)
    with torch.no_grad():
        logits = theirs.language_model(input_ids=tokens).logits
    for path in (folder, tmp_path / "out"):
        torch.testing.assert_close(our_logits(path, tokens).float(), logits, rtol=2e-5, atol=2e-5)
