"""Tokenizers of bytes and of a JSON file encode and decode without loss; other files are refused."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moefold.config.sections.data import DataConfig
from moefold.data.hf_tokenizer.tokenizer_folder import JsonTokenizer
from moefold.data.tokenizer import (
    ByteTokenizer,
    NumberTokenizer,
    encode_documents,
    load_tokenizer,
    refuse_nul,
)
from moefold.errors import ConfigError

from .conftest import make_text

MakeFile = Callable[..., Path]


def test_bytes_there_and_back():
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("naïve ☃\n")
    assert ids.dtype == np.int64
    assert ids.tolist() == list("naïve ☃\n".encode())
    assert tokenizer.decode(ids) == "naïve ☃\n"
    assert (tokenizer.vocab_size, tokenizer.separator_id) == (256, 0)


@pytest.mark.parametrize("ids", [[104, 105, 300], [104, 105, 0xFF], [104, 105, -1], [104, 105, 0xE2]])
def test_ids_that_are_no_text_are_shown_and_do_not_fail(ids: list[int]):
    assert ByteTokenizer().decode(ids) == "hi\ufffd"


def test_decode_returns_the_text_that_was_encoded(make_tokenizer_file: MakeFile):
    tokenizer = JsonTokenizer(make_tokenizer_file("<|endoftext|>"))
    text = make_text(40) + "naïve ☃"
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64
    assert len(ids) < len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == 350
    assert [x.tolist() for x in tokenizer.encode_batch([text, "a"])] == [ids.tolist(), tokenizer.encode("a").tolist()]


@pytest.mark.parametrize(
    ("special", "separator"),
    [
        (["<pad>", "<|endoftext|>"], 1),
        (["<s>", "</s>"], 1),
        (["<eos>"], 0),
        (["</s>", "<|endoftext|>"], 1),
        (["<pad>"], None),
        ([], None),
    ],
)
def test_the_end_of_text_token_is_found(make_tokenizer_file: MakeFile, special: list[str], separator: int | None):
    assert JsonTokenizer(make_tokenizer_file(*special)).separator_id == separator


@pytest.mark.parametrize("declared", ["<stop>", {"content": "<stop>", "special": True}])
def test_config_in_the_same_folder_may_name_the_end_token(make_tokenizer_file: MakeFile, declared: object):
    file = make_tokenizer_file("<pad>", "<stop>")
    file.with_name("tokenizer_config.json").write_text(json.dumps({"eos_token": declared}))
    assert JsonTokenizer(file).separator_id == 1
    assert JsonTokenizer(file.parent).identity == JsonTokenizer(file).identity


def test_broken_config_in_the_same_folder_is_refused(make_tokenizer_file: MakeFile):
    file = make_tokenizer_file("<pad>")
    file.with_name("tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not a readable tokenizer_config.json"):
        JsonTokenizer(file)


def test_truncation_and_padding_of_the_file_do_not_apply(make_tokenizer_file: MakeFile):
    tokenizer = JsonTokenizer(make_tokenizer_file("<eos>", truncation=5))
    assert len(tokenizer.encode(make_text(100))) > 50
    assert len(tokenizer.encode("a")) == 1


def test_numbers_there_and_back():
    tokenizer = NumberTokenizer(500)
    assert tokenizer.decode([3, 499]) == "3 499"
    assert tokenizer.encode("3 499").tolist() == [3, 499]
    with pytest.raises(ValueError, match=r"ids must be in \[0, 500\)"):
        tokenizer.encode("500")


def test_each_kind_of_data_has_its_tokenizer(make_tokenizer_file: MakeFile):
    file = str(make_tokenizer_file("<eos>"))
    assert isinstance(load_tokenizer(DataConfig(), vocab_size=256), ByteTokenizer)
    assert isinstance(load_tokenizer(DataConfig(tokenizer=file), vocab_size=350), JsonTokenizer)
    assert isinstance(load_tokenizer(DataConfig(kind="tokens", tokenizer=file), vocab_size=512), JsonTokenizer)
    assert isinstance(load_tokenizer(DataConfig(kind="tokens"), vocab_size=256), ByteTokenizer)
    assert isinstance(load_tokenizer(DataConfig(kind="tokens"), vocab_size=100), NumberTokenizer)
    assert isinstance(load_tokenizer(DataConfig(kind="synthetic"), vocab_size=7), NumberTokenizer)


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(make_tokenizer_file: MakeFile):
    file = str(make_tokenizer_file("<eos>"))
    with pytest.raises(
        ConfigError, match=r"model.vocab_size=255 must be at least the tokenizer's 256 .*set model.vocab"
    ):
        load_tokenizer(DataConfig(), vocab_size=255)
    with pytest.raises(ConfigError, match="model.vocab_size=349 must be at least the tokenizer's 350"):
        load_tokenizer(DataConfig(tokenizer=file), vocab_size=349)


def test_files_that_are_no_tokenizer_are_refused(tmp_path: Path, text_folder: Path):
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(
        ConfigError, match=r"is not a tokenizer.json of the tokenizers package .*use data.tokenizer=.bytes"
    ):
        load_tokenizer(DataConfig(tokenizer=str(tmp_path / "tokenizer.json")), vocab_size=256)
    with pytest.raises(
        ConfigError, match="data.tokenizer='.*tokeniser.json' does not exist; did you mean '.*tokenizer.json'"
    ):
        load_tokenizer(DataConfig(tokenizer=str(tmp_path / "tokeniser.json")), vocab_size=256)
    with pytest.raises(ConfigError, match="data.tokenizer=.* has no tokenizer"):
        load_tokenizer(DataConfig(tokenizer=str(text_folder)), vocab_size=256)


def test_synthetic_takes_no_tokenizer():
    with pytest.raises(ConfigError, match='data.tokenizer=.x. is not used by data.kind="synthetic"; leave it out'):
        load_tokenizer(DataConfig(kind="synthetic", tokenizer="x"), vocab_size=256)


def test_a_nul_character_in_a_text_of_data_is_refused_where_it_ends_documents(make_tokenizer_file):
    for values in (["a", "b\0"], [{"content": ["b\0"]}]):
        with pytest.raises(ConfigError, match="f:1 holds a NUL character, .*'bytes', after 'b'; remove it, or name"):
            refuse_nul(ByteTokenizer(), values, "f:1")
    refuse_nul(ByteTokenizer(), [{"content": "b"}, None, 1], "f:1")
    with pytest.raises(ConfigError, match="a text holds a NUL character"):
        encode_documents(ByteTokenizer(), ["a", "\0"])
    tokenizer = JsonTokenizer(make_tokenizer_file("</s>"))
    assert len(encode_documents(tokenizer, ["a\0"])) == 1
    # A chat template may end a turn by one.
    assert ByteTokenizer().encode_batch(["a\0"])[0].tolist() == [97, 0]
