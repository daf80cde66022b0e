"""Text for a model and from it: its tokenizer, and a stream that never shows half a character. Torch-free."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moefold.bounded_read import MAX_TEXT_BYTES
from moefold.bounded_read import read_text as read_bounded
from moefold.config.schema import DataConfig
from moefold.data.jsonl import reject_surrogates
from moefold.data.tokenizer import JsonTokenizer, Tokenizer, load_tokenizer
from moefold.errors import ConfigError
from moefold.inference.source import ModelSource

REPLACEMENT_CHARACTER = "\ufffd"
"""What an unfinished or broken UTF-8 sequence decodes to."""


def open_tokenizer(source: ModelSource, override: str = "") -> Tokenizer:
    """The tokenizer that belongs to a model.

    Args:
        source: the model.
        override: "bytes" or the path of a tokenizer.json that wins; "" takes what the source says.

    Raises:
        ConfigError: it is missing or broken, or has more ids than the model has rows.
    """
    if source.uses_hf_text_start and not override and not Path(source.data.tokenizer).exists():
        raise ConfigError(
            f"{str(source.path)!r} has no tokenizer.json, so it knows no text; name one with --tokenizer "
            "(moefold eval takes ids too: --tokens)"
        )
    if override:
        return load_tokenizer(DataConfig(kind="text", tokenizer=override), vocab_size=source.model.vocab_size)
    return load_tokenizer(source.data, vocab_size=source.model.vocab_size)


def encode_text(source: ModelSource, tokenizer: Tokenizer, text: str, what: str) -> np.ndarray:
    """The ids of a text, int64 [tokens], as the model has seen texts begin.

    A Hugging Face folder's tokenizer says what stands before a text (a begin-of-text id, say), an import's too; our
    training puts nothing there.

    Raises:
        ConfigError: the text is no Unicode, or the tokenizer knows numbers only, and the text is something else.
    """
    reject_surrogates(text, what)
    if source.uses_hf_text_start and isinstance(tokenizer, JsonTokenizer):
        return tokenizer.encode_start(text)
    try:
        return tokenizer.encode(text)
    except ValueError as error:
        raise ConfigError(
            f"{what} cannot be tokenised: this model was trained on bare ids, so text is numbers with spaces between "
            f"({error}); write those, or name its tokenizer with --tokenizer"
        ) from error


def encode_prompts(source: ModelSource, tokenizer: Tokenizer, prompts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The ids of each prompt; of an empty one the id that stands between documents.

    Raises:
        ConfigError: a prompt is empty and the tokenizer has no such id, or it cannot be tokenised.
    """
    start = () if tokenizer.separator_id is None else (tokenizer.separator_id,)
    found = tuple(tuple(encode_text(source, tokenizer, text, "the prompt").tolist()) or start for text in prompts)
    if not all(found):
        raise ConfigError("the prompt is empty, and the tokenizer has no token to start from; give at least a word")
    return found


def stop_token_ids(source: ModelSource, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end a text: those that the folder names, else what stands between documents."""
    separator = frozenset() if tokenizer.separator_id is None else frozenset({tokenizer.separator_id})
    return source.eos_ids or separator


def read_text(path: Path, option: str) -> str:
    """A text file in UTF-8.

    Raises:
        ConfigError: it is not readable, or is something else.
    """
    try:
        return read_bounded(path, MAX_TEXT_BYTES)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option} {str(path)!r} is not text in UTF-8 ({error.reason}); convert it first") from error
    except OSError as error:
        raise ConfigError(f"{option} {str(path)!r} cannot be read: {error.strerror}") from error


class TextStream:
    """Turns ids that come one by one into text, in pieces that are final.

    Ids are decoded with those before them, because a tokenizer may write a space or half a character that only the
    neighbour explains. A piece that ends in an unfinished character waits for the rest of it.
    """

    def __init__(self, tokenizer: Tokenizer, prefix_ids: Sequence[int] = ()) -> None:
        """Begin after some ids, of which no text comes out: they are neighbours of the first one."""
        self._tokenizer = tokenizer
        self._ids: list[int] = list(prefix_ids)
        self._emitted_end = len(self._ids)
        """Ids before this one are on the screen."""
        self._context_start = 0
        """Ids from this one to `_emitted_end` are decoded again, as neighbours."""

    def push(self, token: int) -> str:
        """The text that one more id makes final; often empty."""
        self._ids.append(token)
        return self._advance(is_end=False)

    def finish(self) -> str:
        """What was still waiting."""
        return self._advance(is_end=True)

    def _advance(self, *, is_end: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._context_start : self._emitted_end])
        text = self._tokenizer.decode(self._ids[self._context_start :])
        if text.endswith(REPLACEMENT_CHARACTER) and not is_end:
            return ""
        self._context_start, self._emitted_end = self._emitted_end, len(self._ids)
        return text[len(before) :]
