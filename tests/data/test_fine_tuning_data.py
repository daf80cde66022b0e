"""Samples of fine-tuning: every assistant turn is a target once, and padding weighs nothing."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moefold.cache_dir import default_cache_dir
from moefold.config.sections.data import DataConfig
from moefold.data.dataset import DataRequest, Dataset
from moefold.data.shard_reader import BrokenShardError
from moefold.data.validate_source import check_data
from moefold.errors import ConfigError

S = 400
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def chat(number: int, turns: int = 2) -> dict:
    messages = [{"role": "user", "content": f"Question {number} ☃" + "?" * (number % 5)}]
    for turn in range(turns):
        messages += [
            {"role": "assistant", "content": f" answer {number}.{turn} é\n"},
            {"role": "user", "content": "\nAnd then?"},
        ]
    return {"messages": messages}


def write(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    return write(tmp_path / "chats.jsonl", [chat(i, i % 3) for i in range(60)] + [{"prompt": "Hi", "response": "Ho"}])


def open_chats(path: Path, *, seq_len: int = S, vocab_size: int = 512, prepares: bool = False, **changes) -> Dataset:
    data = DataConfig(kind="sft", path=str(path), **changes)
    request = DataRequest(data, seq_len=seq_len, vocab_size=vocab_size, seed=0)
    return request.prepare() if prepares else request.open()


def answers(dataset: Dataset) -> list[str]:
    """Return the tokens that the weights of every training sample select, one string a sample."""
    found = []
    for i in range(len(dataset.train)):
        sample = dataset.train.annotated_sample(i)
        assert sample.tokens.shape == sample.document_ids.shape == (S + 1,)
        assert sample.weights.shape == (S,)
        assert sample.weights.any()
        # A target is predicted from its own document, never from the one before it or from padding.
        targets = np.flatnonzero(sample.weights)
        assert (sample.document_ids[targets] == sample.document_ids[targets + 1]).all()
        found.append(dataset.tokenizer.decode(sample.tokens[1:][sample.weights]))
    return found


@pytest.mark.parametrize("tokenizer", ["bytes", "json"])
def test_every_assistant_turn_is_a_target_once_and_nothing_else(
    chats: Path, make_tokenizer_file: Callable[..., Path], tokenizer: str
):
    changes, end = {}, "<|im_end|>"
    if tokenizer == "json":
        file = make_tokenizer_file("</s>", "<|user|>", "<|assistant|>", "<|end|>")
        (file.parent / "chat_template.jinja").write_text(TEMPLATE)
        changes, end = {"tokenizer": str(file)}, "<|end|>"
    dataset = open_chats(chats, validation_fraction=0.0, **changes)
    found = "".join(answers(dataset)).split(end)
    assert found.pop() == ""
    expected = [f" answer {i}.{turn} é\n" for i in range(60) for turn in range(i % 3)] + ["Ho"]
    assert sorted(found) == sorted(expected)


def test_documents_are_whole_conversations_and_padding_weighs_nothing(tmp_path: Path):
    chats = write(tmp_path / "chats.jsonl", [chat(i, i % 3) for i in range(9)])
    dataset = open_chats(chats, validation_fraction=0.0, shuffle=False)
    assert len(dataset.train) > 1
    alone = []
    for i in range(9):
        row = open_chats(write(tmp_path / f"{i}.jsonl", [chat(i, max(1, i % 3))]), validation_fraction=0.0).train
        sample = row.annotated_sample(0)
        assert set(sample.document_ids.tolist()) == {0, 1}
        alone.append(sample.tokens[sample.document_ids == 0].tolist())
    found = 0
    for i in range(len(dataset.train)):
        sample = dataset.train.annotated_sample(i)
        assert (np.diff(sample.document_ids) >= 0).all()
        last = sample.document_ids.max()
        padding = sample.document_ids == last
        assert not sample.tokens[padding].any()
        assert not sample.weights[padding[1:]].any()
        found += sum(sample.tokens[sample.document_ids == document].tolist() in alone for document in range(last))
    assert found == 6


def test_long_conversations_are_cut_or_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    late = {"messages": [{"role": "user", "content": "x" * S}, {"role": "assistant", "content": "late"}]}
    long = {"prompt": "p", "response": "r" * 900}
    path = write(tmp_path / "a.jsonl", [chat(1), late, long, chat(0, turns=0)])
    with caplog.at_level(logging.WARNING):
        open_chats(path, prepares=True, validation_fraction=0.0)
    assert "4 conversations, 2 skipped without a response within train.seq_len, 1 cut to 401 tokens" in caplog.text
    dataset = open_chats(path, validation_fraction=0.0)
    assert sorted(len(answer) for answer in answers(dataset))[-1] > 100
    with pytest.raises(ConfigError, match=r"a.jsonl:2: the conversation has .* 2 of 4 .* data.overlong"):
        open_chats(path, overlong="refuse")
    assert len(open_chats(path, seq_len=1000, overlong="refuse", validation_fraction=0.0).train)


def test_held_out_conversations_are_others_for_every_sequence_length(chats: Path):
    for seq_len in (S, 700):
        dataset = open_chats(chats, seq_len=seq_len, validation_fraction=0.2)
        texts = []
        for row in (dataset.train, dataset.validation):
            samples = [row.annotated_sample(i) for i in range(len(row))]
            texts.append("".join(dataset.tokenizer.decode(s.tokens[1:][s.weights]) for s in samples))
        held_out = set(texts[1].split("<|im_end|>")) - {""}
        assert 5 <= len(held_out) <= 20
        assert not held_out & set(texts[0].split("<|im_end|>"))


def test_changed_template_is_retokenised(chats: Path):
    before = open_chats(chats).train.annotated_sample(0)
    template = chats.parent / "t.jinja"
    template.write_text(TEMPLATE)
    after = open_chats(chats, chat_template=str(template)).train.annotated_sample(0)
    assert before.tokens.tolist() != after.tokens.tolist()
    assert len(list(default_cache_dir().glob("*.npy"))) == 2


def test_mixtures_of_conversations(chats: Path):
    other = write(chats.parent / "other.jsonl", [{"prompt": "p", "response": "OTHER"}] * 40)
    data = DataConfig(kind="sft", path=(str(chats), str(other)), weights=(1.0, 3.0), validation_fraction=0.1)
    dataset = DataRequest(data, seq_len=S, vocab_size=256, seed=0).open()
    texts = [dataset.tokenizer.decode(dataset.train.sample(i)) for i in range(40)]
    assert sum("OTHER" in text for text in texts) == 30


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            '{"prompt": "a", "response": "b"}\n{"prompt": 3, "response": "b"}\n',
            "a.jsonl:2: column 'prompt' holds a number",
        ),
        ('{"messages": [{"content": "b"}]}\n', "a.jsonl:1: message 1 has no role"),
        (
            r'{"messages": [{"role": "user", "content": null, "tool_calls": [{"x": "\ud800"}]}]}',
            r"a.jsonl:1: the rendered conversation is not Unicode text \(.*\); fix it",
        ),
        ('{"prompt": "a", "response": "b"\n', "a.jsonl:1 is not JSON"),
        ('{"prompt": "a"}\n', "a.jsonl:1: no column 'response'"),
        ("\n", "there is no conversation"),
        ('{"messages": [{"role": "user", "content": "b"}]}\n', "none of 1 conversations has a response"),
    ],
)
def test_unusable_files_are_named(tmp_path: Path, content: str, words: str):
    (tmp_path / "a.jsonl").write_text(content)
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.tool_calls | tojson }}{% endfor %}")
    with pytest.raises(ConfigError, match=words):
        open_chats(tmp_path / "a.jsonl", chat_template=str(template) if "tool_calls" in content else "")
    assert not list(default_cache_dir().glob("*.tmp"))


def test_a_tokenizer_without_a_template_is_refused_before_anything_is_read(
    chats: Path, make_tokenizer_file: Callable[..., Path]
):
    data = DataConfig(kind="sft", path=str(chats), tokenizer=str(make_tokenizer_file("</s>")))
    with pytest.raises(ConfigError, match="has no chat template"):
        check_data(DataRequest(data, seq_len=S, vocab_size=512, seed=0))
    with pytest.raises(ConfigError, match="holds no .jsonl file"):
        check_data(
            DataRequest(
                DataConfig(kind="sft", path=str(Path(data.tokenizer).parent)), seq_len=S, vocab_size=512, seed=0
            )
        )


@pytest.mark.parametrize("has_marks", [True, False])
def test_tokens_and_targets_equal_transformers(
    tmp_path: Path, make_tokenizer_file: Callable[..., Path], has_marks: bool
):
    transformers = pytest.importorskip("transformers")
    file = make_tokenizer_file("</s>", "<|user|>", "<|assistant|>", "<|end|>")
    marked = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    )
    (file.parent / "chat_template.jinja").write_text(marked if has_marks else TEMPLATE)
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file), chat_template=marked)
    for i in range(5):
        record = chat(i, 1 + i % 3)
        path = write(tmp_path / f"{i}.jsonl", [record])
        sample = open_chats(path, tokenizer=str(file), validation_fraction=0.0).train.annotated_sample(0)
        encoded = reference.apply_chat_template(
            record["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        length = len(encoded["input_ids"])
        assert sample.tokens[:length].tolist() == encoded["input_ids"]
        assert sample.weights[: length - 1].tolist() == [bool(x) for x in encoded["assistant_masks"][1:]]
        assert not sample.weights[length - 1 :].any()
        assert 3 < sum(encoded["assistant_masks"]) < length - 3


def test_a_cache_that_is_cut_under_the_run_is_named(chats: Path):
    dataset = open_chats(chats, shuffle=False)
    (cached,) = default_cache_dir().glob("*.npy")
    os.truncate(cached, cached.stat().st_size // 4)
    with pytest.raises(BrokenShardError) as caught:
        answers(dataset)
    assert f"data file {cached} broke while the run read it: it has " in str(caught.value)
    assert "create it again (if it is in the token cache, remove it)" in str(caught.value)
