"""Test tokenizers that are not trusted: they run in a process with limits, and give the package's own ids."""

import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from moefold.data.hf_tokenizer.tokenizer_folder import JsonTokenizer
from moefold.data.hf_tokenizer.tokenizer_process import TokenizerLimits
from moefold.data.limited_process import LimitedProcess
from moefold.errors import ConfigError

from .conftest import make_text

VOCABULARY = {chr(i): i - 32 for i in range(32, 127)}
MANY = {
    "type": "Sequence",
    "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}] * 4,
}
SLOW = {"type": "Split", "pattern": {"Regex": r"(a+)+$|(a|aa)+b"}, "behavior": "Isolated", "invert": False}
BOMB = {"id": 95, "content": "aaa", "single_word": False, "lstrip": False, "rstrip": False, "normalized": True}
LITTLE_MEMORY = TokenizerLimits(memory_bytes=100 << 20)
LITTLE_TIME = TokenizerLimits(cpu_s=0.3)


def write_tokenizer(folder: Path, **keys: object) -> Path:
    unset = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    model = {"type": "BPE", **dict.fromkeys(unset), "fuse_unk": False, "byte_fallback": False, "vocab": VOCABULARY}
    model["merges"] = []
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({"version": "1.0", "added_tokens": [], **parts, "model": model, **keys}))
    return file


@pytest.mark.parametrize(
    ("limits", "keys", "text", "reason"),
    [
        (
            LITTLE_MEMORY,
            {"normalizer": MANY},
            "aaa!",
            r"the process that runs it has ended; it may use 1[\d,]+ bytes of",
        ),
        (LITTLE_TIME, {"pre_tokenizer": SLOW}, ("a" * 21 + "!") * 500, r"it takes more than 0\.\d* s of CPU time"),
    ],
    ids=["memory", "time"],
)
def test_a_text_that_takes_too_much_is_refused_and_the_next_one_is_not(tmp_path, limits, keys, text, reason):
    tokenizer = JsonTokenizer(write_tokenizer(tmp_path, **keys), limits)
    with pytest.raises(ConfigError, match=f"tokenizer.json' cannot make tokens of a text .{reason}"):
        tokenizer.encode(text)
    assert tokenizer.encode("bc!").tolist() == [66, 67, 1]
    assert tokenizer.decode([66, 67]) == "bc" or tokenizer.decode([66, 67]) == "b c"


def test_a_file_that_takes_too_much_is_refused(tmp_path):
    file = write_tokenizer(tmp_path, normalizer=MANY, added_tokens=[BOMB | {"special": False}])
    with pytest.raises(ConfigError, match=r"is not a tokenizer.json .*\(the process that runs it has ended"):
        JsonTokenizer(file, LITTLE_MEMORY)


def test_ids_offsets_and_text_equal_the_package(make_tokenizer_file, monkeypatch):
    import tokenizers

    file = make_tokenizer_file("<s>", "<|endoftext|>")
    theirs = tokenizers.Tokenizer.from_file(str(file))
    theirs.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    theirs.save(str(file))
    ours = JsonTokenizer(file)
    texts = ["", "naïve ☃ \U0001f600\0x", make_text(300), " <|endoftext|> a", "\r\n\t é"]
    for text, ids, (again, offsets) in zip(
        texts, ours.encode_batch(texts), ours.encode_with_offsets(texts), strict=True
    ):
        expected = theirs.encode(text, add_special_tokens=False)
        assert ids.tolist() == again.tolist() == expected.ids
        assert ids.dtype == offsets.dtype == np.int64
        untrimmed = tokenizers.Tokenizer.from_str(theirs.to_str())
        untrimmed.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
        assert offsets.tolist() == [list(one) for one in untrimmed.encode(text, add_special_tokens=False).offsets]
        assert ours.encode_start(text).tolist() == theirs.encode(text).ids
        assert ours.decode(ids) == theirs.decode(expected.ids, skip_special_tokens=False)
    assert ours.decode([-1, 2**40]) == ""
    assert ours.encode_batch([]) == []
    with pytest.raises(ConfigError, match="cannot make tokens of a text"):
        ours.encode("\ud800")
    monkeypatch.setattr("moefold.data.hf_tokenizer.tokenizer_process.BATCH_BYTES", 50)
    assert [ids.tolist() for ids in ours.encode_batch(texts)] == [
        theirs.encode(text, add_special_tokens=False).ids for text in texts
    ]


def test_threads_forks_and_copies_share_no_answers(make_tokenizer_file):
    tokenizer = JsonTokenizer(make_tokenizer_file("<eos>"))
    texts = [make_text(n) for n in range(1, 40)]
    expected = [tokenizer.encode(text).tolist() for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert [ids.tolist() for ids in pool.map(tokenizer.encode, texts)] == expected
    child = os.fork()
    if not child:
        is_same = [tokenizer.encode(text).tolist() for text in texts] == expected
        del tokenizer
        os._exit(0 if is_same else 1)
    assert [tokenizer.encode(text).tolist() for text in texts] == expected
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pickle.loads(pickle.dumps(tokenizer)).encode(texts[5]).tolist() == expected[5]
    assert tokenizer.encode(texts[7]).tolist() == expected[7]


def test_the_answer_to_an_interrupted_request_is_not_given_to_the_next(make_tokenizer_file, monkeypatch):
    tokenizer = JsonTokenizer(make_tokenizer_file("<eos>"))
    expected = tokenizer.encode("some words").tolist()

    def interrupt(self: LimitedProcess, limit: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(LimitedProcess, "_read_line", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tokenizer.encode("others")
    assert tokenizer.encode("some words").tolist() == expected


def test_a_file_that_changed_is_not_loaded_in_place_of_the_first(tmp_path):
    tokenizer = JsonTokenizer(write_tokenizer(tmp_path, normalizer=MANY), LITTLE_MEMORY)
    with pytest.raises(ConfigError, match="has ended"):
        tokenizer.encode("aaa")
    write_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="its file has changed since it was loaded"):
        tokenizer.encode("b")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="its file cannot be read again: No such file"):
        tokenizer.encode("b")


def test_declarations_are_applied_in_the_process_and_again_after_it_was_ended(tmp_path, monkeypatch):
    monkeypatch.setitem(VOCABULARY, "<eos>", 95)
    file = write_tokenizer(tmp_path, normalizer=MANY)
    settings = {"eos_token": "<eos>", "added_tokens_decoder": {"96": {"content": "<new>", "special": True}}}
    file.with_name("tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = JsonTokenizer(file, LITTLE_MEMORY)
    assert (tokenizer.separator_id, tokenizer.vocab_size) == (95, 97)
    assert tokenizer.encode("b<new><eos>").tolist() == [66, 96, 95]
    with pytest.raises(ConfigError, match="has ended"):
        tokenizer.encode("aaa")
    assert tokenizer.encode("b<new><eos>").tolist() == [66, 96, 95]


def test_declarations_that_do_not_fit_are_one_message(tmp_path):
    file = write_tokenizer(tmp_path)
    for wrong in ({"added_tokens_decoder": {"x": {"content": "a"}}}, {"extra_special_tokens": 3}):
        file.with_name("tokenizer_config.json").write_text(json.dumps(wrong))
        with pytest.raises(ConfigError, match="tokenizer.json' has parts or added tokens that do not fit it"):
            JsonTokenizer(file)


def sentencepiece_like(file: Path) -> None:
    """A vocabulary with byte pieces and visible spaces, as of Llama 2."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    entries = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "\u2581a", "b"]
    vocab = {entry: i for i, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.BPE(vocab, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(file))


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_the_pieces_of_ids_are_the_bytes_of_the_text(make_tokenizer_file, tmp_path, kind):
    file = tmp_path / "tokenizer.json"
    if kind == "sentencepiece":
        sentencepiece_like(file)
    else:
        file = make_tokenizer_file("<|endoftext|>")
    tokenizer = JsonTokenizer(file)
    table = tokenizer.token_table()
    assert len(table.pieces) == tokenizer.vocab_size
    text = " a ab b\u5317\u4eac \U0001f642 a"
    assert b"".join(table.pieces[i] for i in tokenizer.encode(text)) == text.encode()
    specials = {table.pieces[i].decode() for i in table.special_ids}
    assert specials
    assert all(mark.startswith("<") for mark in specials)
