"""Messages to a model: the template around them, the end of its turn, and `moefold generate --chat` as a whole."""

import json
from pathlib import Path

import pytest
import tokenizers

from moefold.cli.main import main
from moefold.config.sections.data import DataConfig
from moefold.data.conversations.chat import end_of_turn_marker, load_chat_template
from moefold.data.tokenizer import ByteTokenizer, NumberTokenizer, load_tokenizer
from moefold.errors import ConfigError
from moefold.inference.source import find_source
from moefold.inference.text import encode_messages, open_chat_template
from moefold.inference.text_stream import StopStringFilter
from tests.inference.checkpoint_folder import described_run

CHAT_ML = load_chat_template(DataConfig())
MARKS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture
def with_marks(tmp_path: Path) -> Path:
    """A tokenizer's folder whose template ends turns with a token of its own."""
    words = ["</s>", "user", "assistant", ":", "hi", "question", "answer"]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="</s>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing("</s> $A", special_tokens=[("</s>", 0)])
    made.add_special_tokens(["</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    settings = {"chat_template": MARKS, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_a_message_is_a_turn_of_the_user_and_the_answer_is_begun():
    (ids,) = encode_messages(CHAT_ML, ByteTokenizer(), ["Hi"])
    assert bytes(ids).decode() == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    (ids,) = encode_messages(CHAT_ML, ByteTokenizer(), ["Hi"], "Be brief.")
    assert bytes(ids).decode().startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n")
    with pytest.raises(ConfigError, match="--chat: the model was trained on bare ids"):
        encode_messages(CHAT_ML, NumberTokenizer(9), ["1"])
    for message, system, place in (("a\0b", "", "the prompt"), ("a", "a\0b", "--system")):
        with pytest.raises(ConfigError, match=f"^{place} holds a NUL character"):
            encode_messages(CHAT_ML, ByteTokenizer(), [message], system)


def test_the_end_of_a_turn_is_a_text_or_a_token_and_nothing_is_put_before(with_marks):
    assert end_of_turn_marker(CHAT_ML, ByteTokenizer()) == (frozenset(), "<|im_end|>")
    data = DataConfig(kind="text", tokenizer=str(with_marks))
    template, tokenizer = load_chat_template(data), load_tokenizer(data, vocab_size=7)
    assert end_of_turn_marker(template, tokenizer) == (frozenset({0}), "")
    assert encode_messages(template, tokenizer, ["hi"]) == ((1, 3, 4, 0, 2, 3),)


def test_a_template_of_the_users_own_wins(tmp_path, with_marks):
    described_run(tmp_path / "run")
    source = find_source(str(tmp_path / "run"))
    assert open_chat_template(source, "", "").source == CHAT_ML.source
    assert open_chat_template(source, str(with_marks), "").source == MARKS
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    assert (
        open_chat_template(source, "", str(tmp_path / "own.jinja")).render_prompt(
            [{"role": "user", "content": "x"}], "it", add_generation_prompt=True
        )
        == "x"
    )


@pytest.mark.parametrize("text", ["one<|end|>two", "a<|e<|end|>", "a<|end|", "<|end|>", "", "<<|end|>x", "plain"])
def test_a_stream_ends_before_the_mark_however_it_is_cut(text):
    for size in range(1, 9):
        until = StopStringFilter("<|end|>")
        parts = [until.push(text[i : i + size]) for i in range(0, len(text), size)]
        assert "".join([*parts, until.finish()]) == text.partition("<|end|>")[0]
        assert not any("<|end|>" in part for part in parts)
    assert StopStringFilter("").push(text) == text


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that knows one conversation by heart."""
    folder = tmp_path_factory.mktemp("tuned")
    (folder / "chat.jsonl").write_text(json.dumps({"prompt": "Hi", "response": "Yo."}) + "\n")
    (folder / "empty.toml").touch()
    words = ["model.preset=tiny", "run.dtype=float32", "run.device=cpu", "run.steps=80", "train.seq_len=64"]
    words += [
        "train.global_batch_size=1",
        "train.lr=5e-3",
        "train.lr_schedule=constant",
        "train.optimizer.weight_decay=0",
    ]
    words += ["data.kind=sft", f"data.path={folder}/chat.jsonl", "data.validation_fraction=0", "checkpoint.every=80"]
    assert main(["train", str(folder / "empty.toml"), f"run.dir={folder}/run", *words]) == 0
    return folder / "run"


def test_a_fine_tuned_model_answers_and_stops(tuned, capsys):
    words = ["generate", str(tuned), "--chat", "--temperature", "0", "--device", "cpu", "--max-tokens", "30"]
    capsys.readouterr()
    assert main([*words, "Hi"]) == 0
    assert capsys.readouterr().out == "user: Hi\nassistant: Yo.\n"
    assert main([*words, "Hi", "--no-echo"]) == 0
    assert capsys.readouterr().out == "Yo.\n"
    assert main([*words, "Hi", "--json"]) == 0
    said = {"prompt": "Hi", "text": "Yo.", "tokens": list(b"Yo."), "end": "eos"}
    assert json.loads(capsys.readouterr().out) == said
    assert main([*words, "Hi", "Hi", "--no-echo"]) == 0
    assert capsys.readouterr().out == "--- 1\nYo.\n--- 2\nYo.\n"
    assert main([*words, "Hi", "--ignore-eos", "--no-echo", "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out.startswith("Yo.<|im")


def test_the_prompt_is_echoed_with_its_continuation(tuned, capsys):
    words = ["generate", str(tuned), "--temperature", "0", "--device", "cpu", "--max-tokens", "3"]
    capsys.readouterr()
    assert main([*words, "a prompt"]) == 0
    echoed = capsys.readouterr().out
    assert main([*words, "a prompt", "--no-echo"]) == 0
    assert echoed == "a prompt" + capsys.readouterr().out
