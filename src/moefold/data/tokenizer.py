"""Tokenizers: UTF-8 bytes, any tokenizer.json, or decimal numbers for data without text."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moefold.bounded_read import MAX_CONFIG_BYTES, MAX_TOKENIZER_BYTES, read_bytes, read_json
from moefold.config.schema import DataConfig
from moefold.data.input_paths import existing_path
from moefold.data.tokenizer_process import TokenizerError, TokenizerLimits, TokenizerProcess
from moefold.errors import ConfigError

# End-of-document tokens of published tokenizers, in order of preference: the plain end of text comes before the end
# of a chat turn, which a tokenizer may declare as its eos token.
_END_OF_TEXT = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
)


class Tokenizer(Protocol):
    """Converts text to ids and ids to text."""

    vocab_size: int
    """One more than the largest id."""
    separator_id: int | None
    """The id appended to every document; None joins documents without one."""
    identity: str
    """Cache key: must stay the same for a tokenised copy to stay valid."""

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the ids of a text, [tokens], without a separator."""
        ...

    def encode_batch(self, texts: list[str]) -> list[NDArray[np.int64]]:
        """Return the ids of several texts, each as `encode` does."""
        ...

    def decode(self, ids: ArrayLike) -> str:
        """Return the text of ids."""
        ...


class OffsetTokenizer(Tokenizer, Protocol):
    """A tokenizer that also returns character offsets."""

    def encode_with_offsets(self, texts: list[str]) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Return for each text its ids, [tokens], and the character offset at which each id begins, [tokens]."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0 .. 255; byte 0, which text does not contain, separates documents."""

    vocab_size = 256
    separator_id: int | None = 0
    identity = "bytes"

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the UTF-8 bytes of a text, [bytes]."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def encode_batch(self, texts: list[str]) -> list[NDArray[np.int64]]:
        """Return the UTF-8 bytes of several texts."""
        return [self.encode(text) for text in texts]

    def encode_with_offsets(self, texts: list[str]) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Return the bytes of several texts, and the character offset of each byte."""
        pairs = []
        for text in texts:
            octets = self.encode(text)
            # Bytes 10xxxxxx continue a character, all others begin one.
            pairs.append((octets, np.cumsum((octets & 0xC0) != 0x80) - 1))
        return pairs

    def decode(self, ids: ArrayLike) -> str:
        """Return the text of bytes; invalid UTF-8 and ids above 255 become the replacement character."""
        # 0xFF never occurs in UTF-8, so it replaces any id that is not a byte.
        flat = np.asarray(ids, dtype=np.int64).reshape(-1)
        octets = np.where((flat >= 0) & (flat < 256), flat, 0xFF).astype(np.uint8).tobytes()
        return octets.decode("utf-8", errors="replace")


class JsonTokenizer:
    """A tokenizer.json of the `tokenizers` package.

    Documents are separated by its end-of-text token: the first of the common names in its vocabulary, else the
    eos_token of a tokenizer_config.json in the same folder. If there is neither, documents are joined without a
    separator. Special tokens that occur in the text become their ids. It runs in a subprocess with limited memory and
    time, since the file may be a stranger's.
    """

    def __init__(self, path: Path, limits: TokenizerLimits | None = None) -> None:
        """Load a tokenizer.json, or the one in a folder.

        Args:
            path: the file or the folder.
            limits: resource limits of the subprocess that runs it; None for the defaults.

        Raises:
            ConfigError: the file is missing or is not a tokenizer.
        """
        file = path / "tokenizer.json" if path.is_dir() else path
        self._file = file
        self._limits = limits or TokenizerLimits()
        with self._translate_errors("is not a tokenizer.json of the tokenizers package"):
            try:
                self._process = TokenizerProcess(partial(read_bytes, file, MAX_TOKENIZER_BYTES), self._limits)
            except OSError as error:
                raise ConfigError(
                    f"data.tokenizer={str(file)!r} is not readable ({error.strerror}); name a tokenizer.json"
                ) from error
            vocabulary = self._process.vocabulary(_END_OF_TEXT)
            ids = vocabulary["ids"]
            found = [ids[name] for name in _END_OF_TEXT if name in ids]
            if not found and (eos := _declared_eos(file.with_name("tokenizer_config.json"))) is not None:
                found = list(self._process.vocabulary([eos])["ids"].values())
        if not vocabulary["entries"]:
            raise ConfigError(f"data.tokenizer={str(file)!r} has an empty vocabulary; name a trained tokenizer.json")
        self.vocab_size: int = vocabulary["vocab_size"]
        self.separator_id: int | None = found[0] if found else None
        self.identity = f"{self._process.sha256} separator={self.separator_id}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the path: another process starts its own subprocess."""
        return JsonTokenizer, (self._file, self._limits)

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the ids of a text, [tokens], without added special tokens."""
        return self.encode_batch([text])[0]

    def encode_start(self, text: str) -> NDArray[np.int64]:
        """Return the ids of a text that begins a document, [tokens], with the special tokens of the post-processor."""
        with self._translate_errors("cannot make tokens of a text"):
            return next(self._process.encode([text], start=True))[0]

    def encode_batch(self, texts: list[str]) -> list[NDArray[np.int64]]:
        """Return the ids of several texts, on all cores."""
        with self._translate_errors("cannot make tokens of a text"):
            return [ids for ids, _ in self._process.encode(texts)]

    def encode_with_offsets(self, texts: list[str]) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Return the ids of several texts, and the character offset of each id, on all cores."""
        with self._translate_errors("cannot make tokens of a text"):
            return list(self._process.encode(texts, offsets=True))

    def decode(self, ids: ArrayLike) -> str:
        """Return the text of ids, including special tokens."""
        flat = np.asarray(ids, dtype=np.int64).reshape(-1)
        with self._translate_errors("cannot make text of tokens"):
            return self._process.decode(flat)

    @contextmanager
    def _translate_errors(self, failure: str) -> Iterator[None]:
        """Turn errors of the tokenizer, and texts that are not Unicode, into a ConfigError."""
        try:
            yield
        except (TokenizerError, UnicodeError) as error:
            raise ConfigError(
                f"data.tokenizer={str(self._file)!r} {failure} ({error}); name another tokenizer.json, "
                'or use data.tokenizer="bytes"'
            ) from error


class NumberTokenizer:
    """Ids written as decimal numbers separated by spaces, for data without text."""

    separator_id: int | None = None

    def __init__(self, vocab_size: int) -> None:
        """Accept ids in [0, vocab_size)."""
        self.vocab_size = vocab_size
        self.identity = f"numbers below {vocab_size}"

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the numbers of a text, [numbers].

        Raises:
            ValueError: a word is not a number in [0, vocab_size).
        """
        ids = np.array([int(word) for word in text.split()], dtype=np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise ValueError(f"ids must be in [0, {self.vocab_size})")
        return ids

    def encode_batch(self, texts: list[str]) -> list[NDArray[np.int64]]:
        """Return the numbers of several texts."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: ArrayLike) -> str:
        """Return ids as decimal numbers."""
        return " ".join(str(i) for i in np.asarray(ids, dtype=np.int64).reshape(-1))


def load_tokenizer(data: DataConfig, *, vocab_size: int) -> Tokenizer:
    """Return the tokenizer of a recipe, checked against the model's vocabulary size.

    Ids are shown as numbers for `synthetic` and `program`, and for `tokens` with the default `bytes` and a vocabulary
    other than 256.

    Raises:
        ConfigError: the tokenizer is missing or broken, does not belong to the kind of data, or has more ids than the
            model's embedding has rows.
    """
    if data.kind in ("synthetic", "program"):
        if data.tokenizer != "bytes":
            raise ConfigError(f'data.tokenizer={data.tokenizer!r} is not used by data.kind="{data.kind}"; leave it out')
        return NumberTokenizer(vocab_size)
    if data.kind == "tokens" and data.tokenizer == "bytes" and vocab_size != ByteTokenizer.vocab_size:
        return NumberTokenizer(vocab_size)
    tokenizer: Tokenizer
    if data.tokenizer == "bytes":
        tokenizer = ByteTokenizer()
    else:
        tokenizer = JsonTokenizer(existing_path("data.tokenizer", data.tokenizer))
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"model.vocab_size={vocab_size} must be at least the tokenizer's {tokenizer.vocab_size} "
            f"(data.tokenizer={data.tokenizer!r}); set model.vocab_size={tokenizer.vocab_size} or more"
        )
    return tokenizer


def _declared_eos(config_file: Path) -> str | None:
    """Return the eos_token of a tokenizer_config.json."""
    try:
        declared = read_json(config_file, MAX_CONFIG_BYTES).get("eos_token")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{config_file} is not a readable tokenizer_config.json ({error}); fix or remove it"
        ) from error
    if isinstance(declared, dict):
        declared = declared.get("content")
    return declared if isinstance(declared, str) else None
