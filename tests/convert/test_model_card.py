"""Test the model card and generation settings of an export: facts of the run, reproducible, without paths."""

import json
from pathlib import Path

import yaml

from moefold.checkpoint.checkpoint_meta import read_meta
from moefold.checkpoint.find_checkpoint import locate_checkpoint
from moefold.cli.main import main
from moefold.convert.model_card import read_training_run
from moefold.convert.preflight import read_model
from moefold.hub import snapshot
from moefold.remote_copy import local_copy
from tests.convert.hf_models import transformers
from tests.convert.tokenizer_folders import SIZES, export, make_import, make_tokenizer, place, train

__all__ = ["place"]


def card_of(folder: Path) -> tuple[dict[str, object], str]:
    """Return the header and the text of a card."""
    _, header, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(header), text


def test_an_export_has_card_and_generation_settings_of_its_run(place, capsys):
    trained = make_tokenizer(Path("words/own.json"))
    train("data.tokenizer=words/own.json", "model.vocab_size=320", "train.eval_every=1", "train.lr=0.002", *SIZES)
    out, _ = export(capsys)
    header, text = card_of(out)
    assert header == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["moefold", "mixture-of-experts"],
    }
    assert "- parallel mapping: world_size=1, tp=1, cp=1, pp=1, ep=1, etp=1, float32" in text
    (record,) = map(json.loads, Path("run/metrics.jsonl").read_text().splitlines())
    assert f"- training loss of the last step: {record['loss']:.4f}" in text
    assert f"- loss on held-out data: {record['eval_loss']:.4f}, after step 1" in text
    assert "lr = 0.002" in text
    assert 'optimizer = "adamw"' in text
    assert str(place) not in text
    assert "words" not in text
    ids = json.loads((out / "generation_config.json").read_text())
    assert ids == {"eos_token_id": transformers.AutoTokenizer.from_pretrained(out).eos_token_id}
    assert transformers.GenerationConfig.from_pretrained(out).eos_token_id == ids["eos_token_id"]
    assert trained.is_file()
    first = {path.name: path.read_bytes() for path in out.iterdir()}
    assert main(["export", "run", "again"]) == 0
    assert first == {path.name: path.read_bytes() for path in Path("again").iterdir()}
    for name in ("hf://me/model", "nope://x/y"):
        assert main(["export", "run", name]) == 2
        assert name in capsys.readouterr().err


def test_a_card_names_the_model_on_the_hub_that_training_began_with(place, capsys):
    """Through an import and a run: none of them has to be there by its name on the hub."""
    folder = make_import(Path("hub/models--me--base/snapshots/0123"))
    assert main(["import", str(folder), "start"]) == 0
    words = ["model.vocab_size=320", f"data.tokenizer={folder}/tokenizer.json"]
    size = [f"model.{line}" for line in _model_lines(Path("start/recipe.toml"))]
    train(*size, *words, "checkpoint.init_from=start")
    out, _ = export(capsys)
    header, text = card_of(out)
    assert header["base_model"] == "me/base"
    assert "- base model: me/base" in text
    # Sampling settings came with the imported weights, and stay.
    assert json.loads((out / "generation_config.json").read_text())["temperature"] == 0.7
    Path("run").rename("first")
    train(*size, *words, "checkpoint.init_from=first")
    path = locate_checkpoint(Path("run"))
    assert read_training_run(path, read_model(path), read_meta(path)).base_model == "me/base"
    Path("start").rename("elsewhere")
    assert read_training_run(path, read_model(path), read_meta(path)).base_model == ""


def _model_lines(recipe: Path) -> list[str]:
    text = recipe.read_text().partition("[model]\n")[2].partition("\n\n")[0]
    return [line.replace(" = ", "=") for line in text.splitlines()]


def test_folders_go_to_a_store_and_come_back_unchanged(place, monkeypatch, capsys):
    """Import to one remote folder, export to another: the files are those that were imported."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    local_copy.cache_clear()
    snapshot.cache_clear()
    folder = make_import(Path("theirs"))
    store = f"file://{place}/store"
    assert main(["import", "theirs", f"{store}/start"]) == 0
    assert f"moefold train RECIPE checkpoint.init_from={store}/start" in capsys.readouterr().out
    assert main(["export", f"{store}/start", f"{store}/out", "--check"]) == 0
    for path in folder.iterdir():
        assert (place / "store" / "out" / path.name).read_bytes() == path.read_bytes(), path.name
    assert main(["import", f"{store}/out", "back"]) == 0
    assert main(["checkpoint", "diff", "back", f"{store}/start", "--weights"]) == 1
    assert "all tensors are equal" in capsys.readouterr().out
    assert main(["export", f"{store}/start", f"{store}/out"]) == 2
    assert f"'{store}/out' exists" in capsys.readouterr().err
    assert not list((place / "cache" / "moefold" / "upload").iterdir())
    assert main(["generate", f"{store}/start", "Rivers", "--max-tokens", "2"]) == 0
