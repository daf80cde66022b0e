"""Runs that train on text with a small tokenizer, and their exports."""

import json
from pathlib import Path

import pytest

from moefold.cli.main import main
from tests.convert.hf_models import make_model, save_model

END = "<|endoftext|>"
TEXT = "Rivers carry 12345 stones, and it's far  to the sea.\n\n" * 40
SIZES = ["model.layers=1", "model.hidden_size=32", "model.attention.num_heads=4", "model.attention.num_kv_heads=4"]
SIZES += ["model.ffn.moe.intermediate_size=16", "model.ffn.moe.num_experts=4", "model.ffn.moe.top_k=2"]
RUN = ["run.device=cpu", "run.dtype=float32", "run.steps=1", "train.seq_len=16", "train.global_batch_size=2"]
RUN += ["checkpoint.every=1", "data.validation_fraction=0.2"]


def make_tokenizer(file: Path, *, special: tuple[str, ...] = (END,), merges: int = 40) -> Path:
    """A byte-level BPE. Its ids do not depend on anything but the arguments."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(special) + merges,
        special_tokens=["<pad>", *special],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    file.parent.mkdir(exist_ok=True)
    tokenizer.save(str(file))
    return file


def make_import(folder: Path) -> Path:
    """Make a Hugging Face folder with a tokenizer and its other files."""
    model = make_model("qwen3-moe", num_hidden_layers=1, vocab_size=320)
    save_model(model, folder)
    make_tokenizer(folder / "tokenizer.json", merges=20)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    (folder / "chat_template.jinja").write_text("theirs")
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 7, "eos_token_id": [7, 8], "temperature": 0.7})
    )
    return folder


@pytest.fixture
def place(tmp_path, monkeypatch, capsys):
    """A folder to work in, with a text."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    Path("recipe.toml").write_text("")
    return tmp_path


def train(*words: str) -> None:
    assert main(["train", "recipe.toml", "data.kind=text", "data.path=text.txt", "run.dir=run", *RUN, *words]) == 0


def export(capsys) -> tuple[Path, str]:
    """Return the folder of the run's newest checkpoint, and the output of the command."""
    capsys.readouterr()
    assert main(["export", "run", "out", "--check"]) == 0
    return Path("out"), capsys.readouterr().out
