"""Weights of a Hugging Face folder that were not trained on are read as the folder is: its tokenizer, its ends."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moefold.checkpoint.checkpoint_meta import read_meta, write_meta
from moefold.cli.main import main
from moefold.errors import ConfigError
from moefold.inference.source import find_source
from moefold.inference.text import encode_text, open_tokenizer, stop_token_ids

pytest.importorskip("tokenizers", reason="tokenizers comes with the extra `dev`")
pytest.importorskip("transformers", reason="transformers comes with the extra `dev`")
import tokenizers

from tests.convert.hf_models import make_model, save_model

TEXT = "the cat sat on the mat and the dog sat on the cat"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer puts <s> before a text, and which ends texts in two ways."""
    path = save_model(make_model("llama"), tmp_path_factory.mktemp("text") / "hf")
    words = ["<s>", "<end>", "<turn>", *sorted(set(TEXT.split()))]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<end>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    return path


@pytest.fixture(scope="module")
def imported(folder: Path) -> Path:
    """The same as a checkpoint."""
    assert main(["import", str(folder), str(folder.parent / "imported")]) == 0
    return folder.parent / "imported"


def test_an_import_reads_and_ends_texts_as_its_folder_does(folder, imported):
    ids = []
    for path in (folder, imported):
        source = find_source(str(path))
        tokenizer = open_tokenizer(source)
        ids.append(encode_text(source, tokenizer, TEXT, "it").tolist())
        assert stop_token_ids(source, tokenizer) == {1, 2}
    assert ids[0] == ids[1]
    assert ids[0][0] == 0


def test_same_text_has_the_same_loss_and_continuation(folder, imported, tmp_path, capsys):
    (tmp_path / "text").write_text(TEXT)
    upcycled = str(tmp_path / "moe")
    assert main(["upcycle", str(folder), upcycled, "model.ffn.moe.num_experts=4", "model.ffn.moe.top_k=2"]) == 0
    capsys.readouterr()
    said = []
    for model in (str(folder), str(imported), upcycled):
        words = [model, "--dtype", "float32", "--device", "cpu"]
        assert main(["eval", *words, "--text", str(tmp_path / "text"), "--seq-len", "4", "--json"]) == 0
        assert main(["generate", *words, "the cat", "--max-tokens", "8", "--temperature", "0", "--json"]) == 0
        loss, continued = (json.loads(line) for line in capsys.readouterr().out.splitlines())
        said.append((pytest.approx(loss["loss"], rel=1e-5), loss["tokens"], continued["text"], continued["end"]))
    assert said[1] == said[0]
    assert said[2] == said[0]


def test_ends_of_text_stay_with_the_same_tokenizer_only(imported):
    meta = read_meta(imported)
    other = imported.parent / "other.json"
    other.write_text((imported / "hf" / "tokenizer.json").read_text().replace('"cat"', '"cow"'))
    for name, ends in ((str(imported / "hf" / "tokenizer.json"), {1, 2}), (str(other), set())):
        write_meta(imported, replace(meta, order={"kind": "text", "tokenizer": name, "seq_len": 8}))
        source = find_source(str(imported))
        assert (stop_token_ids(source, open_tokenizer(source)), source.context) == (ends, 64)
        assert not source.uses_hf_text_start
    write_meta(imported, meta)


def test_an_import_without_tokenizer_knows_no_text(tmp_path):
    path = save_model(make_model("llama"), tmp_path / "hf")
    assert main(["import", str(path), str(tmp_path / "imported"), "--no-tokenizer"]) == 0
    with pytest.raises(
        ConfigError, match="has no tokenizer.json, so it cannot tokenise text; name one with --tokenizer"
    ):
        open_tokenizer(find_source(str(tmp_path / "imported")))
