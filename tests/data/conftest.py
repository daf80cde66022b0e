"""Texts and files that several tests of data read."""

from pathlib import Path

import pytest

WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "wizards",
    "hex",
    "queens",
)


def make_text(num_words: int, start: int = 0) -> str:
    """Words in a fixed, never quite repeating order, in lines of seven."""
    words = (WORDS[(i * i + 3 * i) % len(WORDS)] + str(i % 97) for i in range(start, start + num_words))
    return "".join(word + ("\n" if i % 7 == 6 else " ") for i, word in enumerate(words))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of tokenised text of each test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    """Three documents, one of them in a sub-folder, about 9 kB in all."""
    folder = tmp_path / "texts"
    (folder / "inner").mkdir(parents=True)
    (folder / "b.txt").write_text(make_text(500, 100), encoding="utf-8")
    (folder / "a.txt").write_text(make_text(300) + "naïve ☃\n", encoding="utf-8")
    (folder / "inner" / "c.txt").write_text(make_text(400, 2000), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def make_tokenizer_file(tmp_path_factory: pytest.TempPathFactory):
    """A function that writes a small byte-level BPE with the special tokens asked for."""

    def make(*special: str, truncation: int | None = None) -> Path:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=350,
            special_tokens=list(special),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator([make_text(2000)], trainer)
        if truncation:
            tokenizer.enable_truncation(truncation)
            tokenizer.enable_padding(length=truncation)
        path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
        tokenizer.save(str(path))
        return path

    return make
