"""Which tokenizer a run reads text with, and which one its export ships."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from moefold.checkpoint.checkpoint_meta import counted, read_meta
from moefold.cli.main import main
from moefold.convert.tokenizer_export import choose_tokenizer
from moefold.data.hf_tokenizer.tokenizer_folder import JsonTokenizer
from tests.convert.hf_models import make_model, save_model, transformers
from tests.convert.tokenizer_folders import END, SIZES, TEXT, export, make_import, make_tokenizer, place, train

__all__ = ["place"]


def ids_in(folder: Path, file: str = "config.json") -> tuple[object, ...]:
    keys = json.loads((folder / file).read_text())
    return keys["bos_token_id"], keys["eos_token_id"], keys["pad_token_id"]


def assert_reads_as(folder: Path, trained: Path) -> None:
    """transformers makes the ids that the run trained on, and knows where a text ends."""
    tokenizer, ours = transformers.AutoTokenizer.from_pretrained(folder), JsonTokenizer(trained)
    assert tokenizer(TEXT)["input_ids"] == ours.encode(TEXT).tolist()
    assert tokenizer.eos_token_id == ours.separator_id
    assert ids_in(folder) == (None, ours.separator_id, None)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.generation_config.eos_token_id == ours.separator_id
    assert model.generation_config.bos_token_id is None


def test_a_tokenizer_goes_out_with_the_run_that_read_text_with_it(place, capsys):
    """Bare as it is: the tokenizer class of the model's family would make other ids of it."""
    trained = make_tokenizer(Path("words/own.json"))
    train("data.tokenizer=words/own.json", "model.vocab_size=320", *SIZES)
    out, said = export(capsys)
    assert "note" not in said
    assert (out / "tokenizer.json").read_bytes() == trained.read_bytes()
    assert_reads_as(out, trained)
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    parameters = sum(
        parameter.numel() for parameter in transformers.AutoModelForCausalLM.from_pretrained(out).parameters()
    )
    assert f"{parameters:,} parameters" in card
    assert "1 optimizer steps, 32 tokens" in card


def test_files_beside_a_tokenizer_are_exported_with_it(place, capsys):
    """The folder may be named instead of the file; a template that changed since is exported as it was in training."""
    trained = make_tokenizer(Path("words/tokenizer.json"), special=("<stop>",))
    settings = {"eos_token": "<stop>", "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 77}
    Path("words/tokenizer_config.json").write_text(json.dumps(settings))
    Path("words/special_tokens_map.json").write_text('{"eos_token": "<stop>"}')
    Path("words/chat_template.jinja").write_text("ours")
    Path("words/notes.txt").write_text("no tokenizer")
    train("data.tokenizer=words", "model.vocab_size=320", *SIZES)
    out, said = export(capsys)
    assert "note" not in said
    assert_reads_as(out, trained)
    for name in ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (Path("words") / name).read_bytes(), name
    assert not (out / "notes.txt").exists()
    Path("words/chat_template.jinja").write_text("another")
    shutil.rmtree(out)
    out, said = export(capsys)
    assert "note" not in said
    assert (out / "chat_template.jinja").read_text() == "ours"
    # A checkpoint without the run's copy has the fingerprints.
    shutil.rmtree("run/checkpoints/tokenizer")
    shutil.rmtree(out)
    out, said = export(capsys)
    assert "note: words/chat_template.jinja is not written: it has other content than at the training" in said
    assert (out / "tokenizer.json").is_file()
    assert not (out / "chat_template.jinja").exists()


def test_a_tokenizer_that_cannot_go_out_is_noted(place, capsys, monkeypatch):
    file = make_tokenizer(Path("words/tokenizer.json"))
    train("data.tokenizer=words/tokenizer.json", "model.vocab_size=320", *SIZES)
    trained = Path("trained.json")
    shutil.copyfile(file, trained)
    make_tokenizer(file, merges=10)
    # A run is complete in itself: whatever lies under the recorded name, on this machine or another.
    out, said = export(capsys)
    assert "note" not in said
    assert_reads_as(out, trained)
    shutil.move("run", "moved")
    monkeypatch.chdir(place / "words")
    assert main(["eval", "../moved", "--text", "../text.txt", "--keep-tail"]) == 0
    monkeypatch.chdir(place)
    shutil.move("moved", "run")
    shutil.rmtree(out)
    shutil.rmtree("run/checkpoints/tokenizer")
    assert main(["eval", "run", "--text", "text.txt"]) == 2
    assert "has other content than at the training: " in capsys.readouterr().err
    out, said = export(capsys)
    assert "data.tokenizer='words/tokenizer.json' has other content than at the training; put the file of" in said
    assert not (out / "tokenizer.json").exists()
    assert ids_in(out) == (None, None, None)
    file.unlink()
    shutil.rmtree(out)
    out, said = export(capsys)
    assert "note: no tokenizer is written: data.tokenizer='words/tokenizer.json' is gone; put the file of" in said
    assert not (out / "tokenizer.json").exists()


def test_bytes_have_no_tokenizer_to_go_out(place, capsys):
    train("model.vocab_size=256", *SIZES)
    out, said = export(capsys)
    assert 'the run read text as bytes (data.tokenizer="bytes")' in said
    assert ids_in(out) == (None, 0, None)
    assert not list(out.glob("*token*"))


def sizes_of(folder: str) -> list[str]:
    """The recipe that an import writes, as the recipe of this folder. Starts from the Hugging Face folder itself."""
    assert main(["import", folder, "ckpt"]) == 0
    text = Path("ckpt/recipe.toml").read_text()
    Path("recipe.toml").write_text(text.split("[data]")[0])
    return [f"checkpoint.init_from={folder}"]


def test_a_start_with_another_tokenizer_is_noted_and_exported(place, capsys):
    make_import(Path("hf"))
    words = sizes_of("hf")
    trained = make_tokenizer(Path("words/tokenizer.json"))
    train("data.tokenizer=words/tokenizer.json", *words)
    said = capsys.readouterr().out
    assert "data.tokenizer='words/tokenizer.json' is not the tokenizer that these weights were trained with" in said
    assert "set data.tokenizer='hf/tokenizer.json'" in said
    out, said = export(capsys)
    assert "note: ignored, as they belong to another tokenizer: chat_template.jinja, tokenizer.json, token" in said
    assert_reads_as(out, trained)
    assert ids_in(out, "generation_config.json") == ids_in(out)
    assert json.loads((out / "generation_config.json").read_text())["temperature"] == 0.7
    assert not (out / "chat_template.jinja").exists()
    # Who starts from that run is told of the run's tokenizer, not of the folder's.
    train("data.tokenizer=hf/tokenizer.json", "checkpoint.init_from=run", "run.dir=next")
    assert "set data.tokenizer='words/tokenizer.json'" in capsys.readouterr().out


@pytest.mark.slow
def test_a_start_with_bytes_is_noted_and_exported(place, capsys):
    make_import(Path("hf"))
    train(*sizes_of("hf"))
    assert "set data.tokenizer='hf/tokenizer.json'" in capsys.readouterr().out
    out, said = export(capsys)
    assert 'the run read text as bytes (data.tokenizer="bytes")' in said
    assert not list(out.glob("*token*"))
    assert ids_in(out) == ids_in(out, "generation_config.json") == (None, 0, None)
    train("checkpoint.init_from=run", "data.tokenizer=hf/tokenizer.json", "run.dir=next")
    assert "set data.tokenizer='bytes'" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["data.tokenizer=copy/tokenizer.json"], ["data.kind=synthetic", "data.path="]])
def test_the_folders_tokenizer_stays_where_it_is_the_runs(place, capsys, words):
    """A copy of it is the same one, also when it is gone later. Ids that are made up have none."""
    make_import(Path("hf"))
    start = sizes_of("hf")
    shutil.copytree("hf", "copy")
    train(*start, *words)
    assert "not the tokenizer" not in capsys.readouterr().out
    shutil.rmtree("copy")
    out, said = export(capsys)
    assert "note" not in said
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (out / name).read_bytes() == (Path("hf") / name).read_bytes(), name


def test_the_template_of_the_recipe_goes_out(place, capsys):
    """It wins over the one beside the tokenizer; a description that says nothing of its looks opens no file."""
    make_tokenizer(Path("words/tokenizer.json"), special=(END, "<turn>"))
    Path("words/chat_template.jinja").write_text("beside")
    Path("own.jinja").write_text("{% for m in messages %}{{ m.role }} {{ m.content }}<turn>{% endfor %}")
    turns = [{"role": "user", "content": "Where to?"}, {"role": "assistant", "content": "To the sea, it is far."}]
    Path("talk.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 20)
    words = ["data.kind=sft", "data.path=talk.jsonl", "data.chat_template=own.jinja", "train.seq_len=64"]
    train("data.tokenizer=words/tokenizer.json", "model.vocab_size=320", *SIZES, *words)
    out, _ = export(capsys)
    assert (out / "chat_template.jinja").read_bytes() == Path("own.jinja").read_bytes()
    # Generation ends where the template ends a turn; 0 is <pad>.
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [2, 1]
    meta = read_meta(Path("run/checkpoints/step-000001"))
    assert choose_tokenizer(meta, None).sidecar_files["chat_template.jinja"] == Path("own.jinja")
    unknown = choose_tokenizer(replace(meta, states=counted()), None)
    assert unknown.sidecar_files["chat_template.jinja"] == Path("words/chat_template.jinja")


def test_an_upcycled_run_has_the_tokenizer_of_the_run(place, capsys):
    save_model(make_model("llama", num_hidden_layers=1, vocab_size=320), Path("hf"))
    make_tokenizer(Path("hf/tokenizer.json"), merges=20)
    make_tokenizer(Path("words/tokenizer.json"))
    train("data.tokenizer=words/tokenizer.json", *sizes_of("hf"))
    assert main(["upcycle", "run", "moe", "model.ffn.moe.num_experts=4", "model.ffn.moe.top_k=2"]) == 0
    assert f'tokenizer = "{place}/words/tokenizer.json"' in Path("moe/recipe.toml").read_text()
    assert not Path("moe/hf/tokenizer.json").exists()


def test_adapters_have_the_tokenizer_that_was_copied_with_their_run(place, capsys):
    make_import(Path("hf"))
    words = sizes_of("hf")
    trained = make_tokenizer(Path("words/tokenizer.json")).read_bytes()
    train("data.tokenizer=words/tokenizer.json", "lora.rank=2", *words)
    shutil.rmtree("words")
    capsys.readouterr()
    assert main(["export", "run", "adapters"]) == 0
    assert "no tokenizer is written" not in capsys.readouterr().out
    assert Path("adapters/tokenizer.json").read_bytes() == trained
