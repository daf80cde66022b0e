"""Generated text is shown without half characters and ends at its stop string."""

from pathlib import Path

import numpy as np
import pytest

from moefold.data.tokenizer import ByteTokenizer, NumberTokenizer
from moefold.errors import ConfigError
from moefold.inference.source import find_source
from moefold.inference.text import check_made_by, encode_prompts, open_tokenizer, read_text, stop_token_ids
from moefold.inference.text_stream import TextStream, has_stop_string
from tests.inference.checkpoint_folder import described_run


def pieces(tokenizer, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*(stream.push(i) for i in ids), stream.finish()]


def test_no_half_character_is_shown():
    text = "aé€😀\n"
    assert pieces(ByteTokenizer(), ByteTokenizer().encode(text).tolist()) == [
        "a", "", "é", "", "", "€", "", "", "", "😀", "\n", "",
    ]  # fmt: skip


def test_the_pieces_are_the_text_whatever_the_bytes():
    rng = np.random.default_rng(0)
    alphabet = [65, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0xFF]
    for _ in range(500):
        ids = rng.choice(alphabet, rng.integers(0, 10)).tolist()
        assert "".join(pieces(ByteTokenizer(), ids)) == ByteTokenizer().decode(ids)


def test_numbers_keep_their_spaces():
    assert "".join(pieces(NumberTokenizer(99), [5, 12, 3])) == "5 12 3"


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), NumberTokenizer(300)], ids=["bytes", "numbers"])
def test_a_stop_string_is_found_at_the_token_that_completes_it(tokenizer):
    rng = np.random.default_rng(1)
    ends = []
    for _ in range(200):
        ids = rng.choice([65, 66, 0xC3, 0xA9, 0xE2, 0x82, 0xAC], 60).tolist()
        for stops in (["BAB", "é"], ["€AB"], ["5 66"]):
            texts = [tokenizer.decode(ids[:end]) for end in range(1, 61)]
            whole = [any(stop in text for stop in stops) for text in texts]
            found = [has_stop_string(tokenizer, stops, ids[:end]) for end in range(1, 61)]
            assert found[: whole.index(True)] == whole[: whole.index(True)] if any(whole) else not any(found)
            assert not any(whole) or found[whole.index(True)]
            ends.append(any(whole))
    assert set(ends) == {True, False}


def test_the_search_for_a_stop_string_decodes_the_last_tokens_only(monkeypatch):
    counts = []
    decode = ByteTokenizer.decode
    monkeypatch.setattr(ByteTokenizer, "decode", lambda self, ids: counts.append(len(ids)) or decode(self, ids))
    assert has_stop_string(ByteTokenizer(), ["stop", "no"], [*range(65, 91), *b"and stop"])
    assert counts == [len("stop") + 4]


def test_prompts_of_text_of_numbers_and_of_nothing(tmp_path):
    described_run(tmp_path / "text")
    described_run(tmp_path / "numbers", data={"kind": "synthetic"})
    text, numbers = (find_source(str(tmp_path / name)) for name in ("text", "numbers"))
    assert encode_prompts(text, open_tokenizer(text), ["hi", ""]) == ((104, 105), (0,))
    assert encode_prompts(numbers, open_tokenizer(numbers), ["3 255"]) == ((3, 255),)
    assert (stop_token_ids(text, open_tokenizer(text)), stop_token_ids(numbers, open_tokenizer(numbers))) == (
        {0},
        set(),
    )
    with pytest.raises(ConfigError, match="trained on bare ids"):
        encode_prompts(numbers, open_tokenizer(numbers), ["hi"])
    with pytest.raises(ConfigError, match="the prompt is empty"):
        encode_prompts(numbers, open_tokenizer(numbers), [""])
    assert open_tokenizer(numbers, "bytes").identity == "bytes"


def test_a_file_that_is_not_text(tmp_path):
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match="is not text in UTF-8"):
        read_text(tmp_path / "latin", "--text")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_text(tmp_path / "none", "--text")


def test_ids_of_another_tokenizer_are_refused(tmp_path: Path):
    described_run(tmp_path / "run", data={"kind": "text", "path": "x.txt"})
    source = find_source(str(tmp_path / "run"))
    file = tmp_path / "tokens-000000.npy"
    check_made_by(file, source)
    note = tmp_path / "tokenize.json"
    note.write_text('{"format": 2, "tokenizer": "bytes 0"}')
    check_made_by(file, source)
    note.write_text('{"format": 2, "tokenizer": "0123abcd 5", "tokenizer_name": "other.json"}')
    refused = r"is not the tokenizer that made the ids of .* had 'other\.json'"
    with pytest.raises(ConfigError, match=f"^the model's tokenizer 'bytes' {refused}"):
        check_made_by(file, source)
    with pytest.raises(ConfigError, match=f"^--tokenizer bytes {refused}"):
        check_made_by(file, source, "bytes")
