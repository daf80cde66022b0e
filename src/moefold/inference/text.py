"""Text for a model and from it: its tokenizer, and a stream that never shows half a character. Torch-free.

Messages to a model that knows conversations: its chat template around them, and where its turn ends. Torch-free.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from moefold.bounded_read import MAX_TEXT_BYTES
from moefold.bounded_read import read_text as read_bounded
from moefold.config.schema import DataConfig
from moefold.data.chat import ChatTemplate, load_chat_template
from moefold.data.file_formats import reject_surrogates
from moefold.data.tokenizer import JsonTokenizer, NumberTokenizer, Tokenizer, load_tokenizer
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


_ANSWER = "answer"


def open_chat_template(source: ModelSource, tokenizer_override: str, template_override: str) -> ChatTemplate:
    """Load the template of a model: that of its fine-tuning, of its tokenizer's folder, or ChatML for bytes.

    Args:
        source: the model.
        tokenizer_override: "bytes" or a path that wins over the model's tokenizer; "" takes that.
        template_override: the file of a template that wins over the model's; "" takes that.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    tokenizer = tokenizer_override or source.data.tokenizer
    template = template_override or source.data.chat_template
    return load_chat_template(replace(source.data, tokenizer=tokenizer, chat_template=template))


def encode_messages(
    template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[str]
) -> tuple[tuple[int, ...], ...]:
    """Return the ids of each message as a user's turn, with the assistant's turn begun after it.

    No special token is added: what the template writes is what the model has seen.

    Raises:
        ConfigError: the template refuses a message, or the model knows numbers only.
    """
    if isinstance(tokenizer, NumberTokenizer):
        raise ConfigError("--chat: the model was trained on bare ids, so it knows no text; name its --tokenizer")
    found = []
    for message in messages:
        reject_surrogates(message, "the prompt")
        text = template.prompt([{"role": "user", "content": message}], "the prompt", add_generation_prompt=True)
        found.append(tuple(tokenizer.encode(text).tolist()))
    return tuple(found)


def turn_end(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[frozenset[int], str]:
    """Return what ends the assistant's turn: a token of its own, or else a text that several tokens spell.

    Returns:
        (ids that end the turn, text that ends it); both empty where the template writes nothing there.

    Raises:
        ConfigError: the template refuses a conversation of a question and an answer.
    """
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER}]
    rendered = template.render(messages, None, "a question and an answer")
    response = rendered.text[rendered.responses[-1].start : rendered.responses[-1].stop] if rendered.responses else ""
    mark = response.rpartition(_ANSWER)[2].strip()
    ids = tokenizer.encode(mark).tolist() if mark else []
    return (frozenset(ids), "") if len(ids) == 1 else (frozenset(), mark)


class StopStringFilter:
    """Passes text on up to a mark, and holds back what may become the mark.

    Args:
        stop_string: the text that ends it; "" passes everything on.
    """

    def __init__(self, stop_string: str) -> None:
        self._stop_string = stop_string
        self._pending_text = ""
        self._is_stopped = False

    def push(self, text: str) -> str:
        """Return what of the text so far can be shown now."""
        if self._is_stopped or not self._stop_string:
            return "" if self._is_stopped else text
        whole = self._pending_text + text
        before, found, _ = whole.partition(self._stop_string)
        self._is_stopped = bool(found)
        length = 0 if found else self._partial_match_length(before)
        self._pending_text = before[len(before) - length :]
        return before[: len(before) - length]

    def finish(self) -> str:
        """Return what was held back and has not become the mark."""
        held = "" if self._is_stopped else self._pending_text
        self._pending_text = ""
        return held

    def _partial_match_length(self, text: str) -> int:
        """Characters at the end of a text with which the mark begins."""
        longest = min(len(text), len(self._stop_string) - 1)
        return next((length for length in range(longest, 0, -1) if text.endswith(self._stop_string[:length])), 0)
