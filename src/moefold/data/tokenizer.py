"""Tokenizers: UTF-8 bytes, a tokenizer.json (`tokenizer_folder`), or decimal numbers for data without text."""

import logging
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moefold.config.sections.data import DataConfig
from moefold.data.input_paths import existing_path
from moefold.errors import ConfigError
from moefold.message_text import Problem, Setting

if TYPE_CHECKING:
    from moefold.data.hf_tokenizer.tokenizer_process import TokenTable

logger = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """Converts text to ids and ids to text."""

    vocab_size: int
    """One more than the largest id."""
    separator_id: int | None = None
    """Id appended to every document, or None if there is no separator."""
    bos_id: int | None = None
    """Declared id for the start of a text, or None if there is no such id."""
    identity: str
    """Cache key: must stay the same for a tokenised copy to stay valid."""
    notes: tuple[str, ...] = ()
    """Notes on guesses for missing declarations, and on declarations that are not supported."""

    @abstractmethod
    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the ids of a text, [tokens], without a separator."""

    def encode_start(self, text: str) -> NDArray[np.int64]:
        """Return the ids of a text, [tokens], with the special tokens that the tokenizer adds around it."""
        return self.encode(text)

    def encode_batch(self, texts: list[str]) -> list[NDArray[np.int64]]:
        """Return the ids of several texts, each like `encode`."""
        return [self.encode(text) for text in texts]

    @abstractmethod
    def decode(self, ids: ArrayLike) -> str:
        """Return the text of ids."""

    @abstractmethod
    def token_table(self) -> "TokenTable":
        """Return the table of the text of each id."""


class OffsetTokenizer(Tokenizer, Protocol):
    """A tokenizer that also returns character offsets."""

    added_ids: NDArray[np.int64]
    """Ids of the tokens that divide a text before it is tokenised, such as special tokens."""

    @abstractmethod
    def encode_with_offsets(self, texts: list[str]) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Return the ids of each text, [tokens], and the range of characters of each id, [tokens, 2]."""


class ByteTokenizer(OffsetTokenizer):
    """UTF-8 bytes as ids 0 .. 255. Byte 0, which does not occur in text, separates documents."""

    vocab_size = 256
    separator_id: int | None = 0
    identity = "bytes"
    added_ids = np.zeros(0, dtype=np.int64)

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the UTF-8 bytes of a text, [bytes]. A chat template may end a turn with a NUL character."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def encode_with_offsets(self, texts: list[str]) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Return the bytes of several texts, and the range of characters of each byte."""
        pairs = []
        for text in texts:
            octets = self.encode(text)
            # Bytes 10xxxxxx continue a character, all other bytes begin a character.
            characters = np.cumsum((octets & 0xC0) != 0x80)
            pairs.append((octets, np.stack([characters - 1, characters], axis=1)))
        return pairs

    def decode(self, ids: ArrayLike) -> str:
        """Return the text of bytes. Invalid UTF-8 and ids above 255 become the replacement character."""
        # 0xFF never occurs in UTF-8, so it replaces any id that is not a byte.
        flat = np.asarray(ids, dtype=np.int64).reshape(-1)
        octets = np.where((flat >= 0) & (flat < 256), flat, 0xFF).astype(np.uint8).tobytes()
        return octets.decode("utf-8", errors="replace")

    def token_table(self) -> "TokenTable":
        """Return the bytes. No id is special."""
        from moefold.data.hf_tokenizer.tokenizer_process import TokenTable

        return TokenTable([bytes([byte]) for byte in range(256)], frozenset())


class NumberTokenizer(Tokenizer):
    """Ids written as decimal numbers separated by spaces, for data without text."""

    def __init__(self, vocab_size: int) -> None:
        """Accept ids in [0, vocab_size)."""
        self.vocab_size = vocab_size
        self.identity = f"numbers below {vocab_size}"

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the numbers of a text, [numbers]. Raises ValueError if a word is not a number in [0, vocab_size)."""
        ids = np.array([int(word) for word in text.split()], dtype=np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise ValueError(f"ids must be in [0, {self.vocab_size})")
        return ids

    def decode(self, ids: ArrayLike) -> str:
        """Return ids as decimal numbers."""
        return " ".join(str(i) for i in np.asarray(ids, dtype=np.int64).reshape(-1))

    def token_table(self) -> "TokenTable":
        """Return the numbers. No id is special."""
        from moefold.data.hf_tokenizer.tokenizer_process import TokenTable

        return TokenTable([str(i).encode() for i in range(self.vocab_size)], frozenset())


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
            rule = f'is not used by data.kind="{data.kind}"'
            raise ConfigError(Problem("data.tokenizer", data.tokenizer, rule, "leave it out"))
        return NumberTokenizer(vocab_size)
    if data.kind == "tokens" and data.tokenizer == "bytes" and vocab_size != ByteTokenizer.vocab_size:
        return NumberTokenizer(vocab_size)
    tokenizer: Tokenizer
    if data.tokenizer == "bytes":
        tokenizer = ByteTokenizer()
    else:
        from moefold.data.hf_tokenizer.tokenizer_folder import JsonTokenizer

        tokenizer = JsonTokenizer(existing_path("data.tokenizer", data.tokenizer))
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"model.vocab_size={vocab_size} must be at least the tokenizer's {tokenizer.vocab_size} "
            f"({Setting('data.tokenizer', data.tokenizer)}); set model.vocab_size={tokenizer.vocab_size} or more"
        )
    return tokenizer


def report_notes(tokenizer: Tokenizer) -> None:
    """Log the notes on a tokenizer. This is called once per command."""
    for note in tokenizer.notes:
        logger.warning("note: %s", note)


def refuse_nul(tokenizer: Tokenizer, value: Any, subject: str) -> None:
    """Raise ConfigError if a text, or JSON values with texts, has a NUL for "bytes", where it ends documents.

    A NUL of a chat template is allowed, because it is not part of a text of data.
    """
    if isinstance(tokenizer, ByteTokenizer) and (before := _before_nul(value)) is not None:
        raise ConfigError(
            f"{subject} holds a NUL character, which ends documents with the tokenizer 'bytes', after {before!r}; "
            "remove it, or name a tokenizer.json"
        )


def _before_nul(value: Any) -> str | None:
    """Return the last characters before the first NUL character of a text in JSON values, or None if there is none."""
    if isinstance(value, str):
        position = value.find("\0")
        return None if position < 0 else value[max(0, position - 30) : position]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return next((before for entry in value if (before := _before_nul(entry)) is not None), None)
    return None


def encode_documents(tokenizer: Tokenizer, texts: list[str]) -> list[NDArray[np.int64]]:
    """Return the ids of texts of documents, without separators. `refuse_nul` says which texts are refused."""
    for text in texts:
        refuse_nul(tokenizer, text, "a text")
    return tokenizer.encode_batch(texts)
