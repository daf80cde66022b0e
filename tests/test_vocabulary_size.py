"""model.vocab_size where nothing gives it: the vocabulary size of the data's tokenizer."""

import json
from pathlib import Path

import pytest

from moefold.cli.main import main
from moefold.errors import ConfigError
from moefold.recipe import load_recipe
from moefold.validate.config import check_config

pytestmark = pytest.mark.usefixtures("forks_without_threads")


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Words of a recipe of a tokenizer with 500 ids."""
    (tmp_path / "text.txt").write_text("w1 w2 w3 w4 " * 200, encoding="utf-8")
    vocabulary = {f"w{i}": i for i in range(500)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}
    content = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    (tmp_path / "own.json").write_text(json.dumps(content), encoding="utf-8")
    return ["data.kind=text", f"data.path={tmp_path / 'text.txt'}", f"data.tokenizer={tmp_path / 'own.json'}"]


@pytest.mark.parametrize(
    ("more", "size"),
    [
        ([], 512),
        (["parallel.tp=3", "parallel.world_size=3"], 512),
        (["parallel.tp=0"], 512),
        (["model.vocab_size=500"], 500),
        (["model.vocab_size=256"], 256),
        (["model.preset=bench-small"], 4096),
        (["model.preset=quickstart"], 512),
        (["model.preset=quickstart", "model.vocab_size=256"], 256),
        (["model.preset=quickstart", "data.tokenizer=none.json"], 256),
        (["data.tokenizer=bytes"], 256),
    ],
)
def test_the_size_is_taken_from_the_tokenizer_unless_it_is_given(words, more, size):
    loaded = load_recipe(None, [*words, *more])
    cfg = loaded.cfg
    # The tokenizer that replaces the one of `words` has a note of its own.
    notes = [message for message in loaded.messages if " replaces " not in message]
    assert cfg.model.vocab_size == size
    assert len(notes) == (size == 512)
    if notes:
        assert notes[0].startswith(f"model.vocab_size is {size}: data.tokenizer=")
        assert "own.json' has 500 ids, rounded up to a multiple of " in notes[0]


def test_a_tokenizer_that_the_default_holds_changes_nothing(words, tmp_path):
    text = (tmp_path / "own.json").read_text(encoding="utf-8")
    content = json.loads(text)
    content["model"]["vocab"] = {f"w{i}": i for i in range(9)}
    (tmp_path / "own.json").write_text(json.dumps(content), encoding="utf-8")
    loaded = load_recipe(None, words)
    cfg, notes = loaded.cfg, loaded.messages
    assert (cfg.model.vocab_size, notes) == (256, ())


def test_a_tokenizer_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.json' does not exist; .*; model\.vocab_size is not set, so"):
        load_recipe(None, ["data.kind=text", "data.path=x", f"data.tokenizer={tmp_path / 'none.json'}"])


def test_the_commands_agree_and_the_log_says_it(words, tmp_path, capsys):
    recipe = tmp_path / "recipe.toml"
    shape = "[model]\nlayers = 1\nhidden_size = 16\nattention = { num_heads = 2, num_kv_heads = 1 }\n"
    recipe.write_text(shape + "ffn.moe.intermediate_size = 16\nffn.moe.num_experts = 2\n", encoding="utf-8")
    small = ["train.seq_len=16", "train.global_batch_size=1", "train.micro_batch_size=1", "run.device=cpu"]
    run = ["run.steps=1", "train.warmup_steps=0", "run.dtype=float32", f"run.dir={tmp_path / 'run'}"]
    check_config(load_recipe(recipe, [*words, *small]).cfg)
    assert main(["memory", str(recipe), "--dry", *words, *small]) == 0
    assert main(["layout", str(recipe), "world_size=1"]) == 0
    capsys.readouterr()
    assert main(["train", str(recipe), *words, *small, *run]) == 0
    assert "model.vocab_size is 512: data.tokenizer=" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model"]["vocab_size"] == 512
    # Given by hand, too few rows are refused as ever.
    assert main(["train", str(recipe), *words, *small, *run, "model.vocab_size=320"]) == 2
    assert "model.vocab_size=320 must be at least the tokenizer's 500" in capsys.readouterr().err
