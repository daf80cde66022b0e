"""Text input and output of a model: tokenizer, chat template, decoding, stop strings, token datasets."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moefold.bounded_read import MAX_TEXT_BYTES
from moefold.bounded_read import read_text as read_bounded
from moefold.checkpoint.run_tokenizer import other_tokenizer_reason
from moefold.config.data import DataConfig
from moefold.data.conversations.chat import ChatTemplate, load_chat_template
from moefold.data.hf_tokenizer.tokenizer_folder import JsonTokenizer, tokenizer_file
from moefold.data.input_paths import existing_path
from moefold.data.shard_reader import ShardReader
from moefold.data.sources.file_formats import refuse_surrogates
from moefold.data.token_file import TokenFile, compare_tokenizers, read_npy_header, read_tokenize_info
from moefold.data.tokenizer import NumberTokenizer, Tokenizer, load_tokenizer, refuse_nul, report_notes
from moefold.errors import ConfigError
from moefold.inference.source import ModelSource
from moefold.message_text import Problem, Setting, spelled_as

REPLACEMENT_CHARACTER = "\ufffd"
"""Result of decoding an incomplete or invalid UTF-8 sequence."""


def open_tokenizer(source: ModelSource, override: str = "", *, reports: bool = False) -> Tokenizer:
    """Open the tokenizer of a model, or "bytes" or a tokenizer.json to use instead. Report the notes on it.

    Raises:
        ConfigError: the tokenizer is missing or invalid, or has more ids than the model's vocabulary.
    """
    if source.uses_hf_text_start and not override and not Path(source.data.tokenizer).exists():
        raise ConfigError(
            f"{str(source.path)!r} has no tokenizer.json, so it cannot tokenise text; name one with "
            f"{Setting('--tokenizer')} (moefold eval takes ids too: {Setting('--tokens')})"
        )
    data = DataConfig(kind="text", tokenizer=override) if override else source.data
    if source.tokenizer_fingerprint and not override and data.tokenizer != "bytes":
        file = tokenizer_file(existing_path("data.tokenizer", data.tokenizer))
        if reason := other_tokenizer_reason(data.tokenizer, file, source.tokenizer_fingerprint):
            raise ConfigError(f"{reason}; name the one of the training with {Setting('--tokenizer')}")
    with spelled_as({"data.tokenizer": "--tokenizer"} if override else {}):
        tokenizer = load_tokenizer(data, vocab_size=source.model.vocab_size)
    if reports:
        report_notes(tokenizer)
    return tokenizer


def check_made_by(file: Path, source: ModelSource, override: str = "") -> None:
    """Refuse a file of ids that `moefold tokenize` made with another tokenizer than the model's, if both are known."""
    name = override or source.data.tokenizer
    if read_tokenize_info(file.parent) and (name == "bytes" or Path(name).exists()):
        tokenizer = open_tokenizer(source, override)
        with spelled_as({"data.tokenizer": "--tokenizer" if override else "the model's tokenizer"}):
            try:
                compare_tokenizers([TokenFile(file, 0, None)], tokenizer, name)
            except ConfigError as error:
                [problem] = error.problems
                raise ConfigError(replace(problem, way_out="name ids of the model's")) from error


def encode_text(source: ModelSource, tokenizer: Tokenizer, text: str, source_label: str) -> np.ndarray:
    """Tokenise a text, int64 [tokens], with the start-of-text tokens that the model was trained with.

    Hugging Face models, including imported models, use the start tokens of their tokenizer (such as a BOS id). Our
    training adds no tokens.

    Raises:
        ConfigError: the text is not valid Unicode, or the model was trained on ids and the text is not numbers.
    """
    refuse_surrogates(text, source_label)
    refuse_nul(tokenizer, text, source_label)
    if source.uses_hf_text_start and isinstance(tokenizer, JsonTokenizer):
        return tokenizer.encode_start(text)
    try:
        return tokenizer.encode(text)
    except ValueError as error:
        raise ConfigError(
            f"{source_label} cannot be tokenised: this model was trained on bare ids, so text must be numbers "
            f"separated by spaces ({error}); write those, or name its tokenizer with {Setting('--tokenizer')}"
        ) from error


def encode_prompts(source: ModelSource, tokenizer: Tokenizer, prompts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Tokenise each prompt. An empty prompt becomes the document separator, or is refused if there is none."""
    start = () if tokenizer.separator_id is None else (tokenizer.separator_id,)
    encoded = tuple(tuple(encode_text(source, tokenizer, text, "the prompt").tolist()) or start for text in prompts)
    if not all(encoded):
        raise ConfigError("the prompt is empty, and the tokenizer has no token to start from; give at least a word")
    return encoded


def stop_token_ids(source: ModelSource, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the end-of-text ids: the Hugging Face folder's ids, else the document separator."""
    separator = frozenset() if tokenizer.separator_id is None else frozenset({tokenizer.separator_id})
    return source.eos_ids or separator


def read_text(path: Path, option: str) -> str:
    """Read a UTF-8 text file. Raise ConfigError if the file cannot be read, or is not UTF-8."""
    try:
        return read_bounded(path, MAX_TEXT_BYTES)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{Setting(option, str(path))} is not text in UTF-8 ({error.reason}); convert it first"
        ) from error
    except OSError as error:
        raise ConfigError(f"{Setting(option, str(path))} cannot be read: {error.strerror}") from error


def has_stop_string(tokenizer: Tokenizer, stops: Sequence[str], tokens: Sequence[int]) -> bool:
    """Return whether the last token completes a stop string. Only tokens that can be part of it are decoded."""
    # Each token has at least one byte; 4 more bytes, because the first may be part of a character.
    text = tokenizer.decode(tokens[-max(len(stop.encode()) for stop in stops) - 4 :])
    return any(stop in text for stop in stops)


class TextStream:
    """Incremental detokenizer: converts ids to final pieces of text.

    Ids are decoded together with previous ids, because a tokenizer may emit a space or part of a character that depends
    on them. A piece with an incomplete character at its end is held back until the character is complete.
    """

    def __init__(self, tokenizer: Tokenizer, prefix_ids: Sequence[int] = ()) -> None:
        """Create a stream. `prefix_ids` are decoding context for the first id and produce no text."""
        self._tokenizer = tokenizer
        self._ids: list[int] = list(prefix_ids)
        self._emitted_end = len(self._ids)
        """Index of the first id whose text has not been emitted."""
        self._context_start = 0
        """Index of the first id that is decoded again, as context for later ids."""

    def push(self, token: int) -> str:
        """Add an id and return the text that is now final, often empty."""
        self._ids.append(token)
        return self._advance(is_end=False)

    def finish(self) -> str:
        """Return the remaining text."""
        return self._advance(is_end=True)

    def _advance(self, *, is_end: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._context_start : self._emitted_end])
        text = self._tokenizer.decode(self._ids[self._context_start :])
        if text.endswith(REPLACEMENT_CHARACTER) and not is_end:
            return ""
        self._context_start, self._emitted_end = self._emitted_end, len(self._ids)
        return text[len(before) :]


TEXT_NAMES = {"data.tokenizer": "--tokenizer", "data.chat_template": "--chat-template"}
"""Options of commands by the recipe key in error messages."""


@spelled_as(TEXT_NAMES)
def open_chat_template(source: ModelSource, tokenizer_override: str, template_override: str) -> ChatTemplate:
    """Load the chat template of a model, from its fine-tuning or its tokenizer's folder, or ChatML for bytes.

    Its prompts contain the reward of `source.want`. Overrides other than "" replace the model's tokenizer and template.
    """
    tokenizer = tokenizer_override or source.data.tokenizer
    template = template_override or source.data.chat_template
    template_of_source = load_chat_template(replace(source.data, tokenizer=tokenizer, chat_template=template))
    template_of_source.reward_prompt = source.want
    return template_of_source


def encode_messages(
    template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[str], system: str = ""
) -> tuple[tuple[int, ...], ...]:
    """Tokenise each message as a user turn, after a system message if any, followed by the start of the assistant turn.

    No special tokens are added beyond the template's.

    Raises:
        ConfigError: the template refuses a message, or the model was trained on token ids without a tokenizer.
    """
    if isinstance(tokenizer, NumberTokenizer):
        rule = ": the model was trained on bare ids and has no tokenizer"
        raise ConfigError(Problem("--chat", None, rule, f"name its {Setting('--tokenizer')}"))
    encoded = []
    refuse_surrogates(system, str(Setting("--system")))
    refuse_nul(tokenizer, system, str(Setting("--system")))
    before = [{"role": "system", "content": system}] if system else []
    for message in messages:
        refuse_surrogates(message, "the prompt")
        refuse_nul(tokenizer, message, "the prompt")
        turns = [*before, {"role": "user", "content": message}]
        text = template.render_prompt(turns, "the prompt", add_generation_prompt=True)
        encoded.append(tuple(tokenizer.encode(text).tolist()))
    return tuple(encoded)


class StopStringFilter:
    """Streaming filter that emits text up to the first stop string, and holds back possible prefixes of stop strings.

    Without any stop string, or only with "", all text is emitted.
    """

    def __init__(self, *stop_strings: str) -> None:
        self._stop_strings = [stop for stop in stop_strings if stop]
        self._pending_text = ""
        self.is_stopped = False
        """True if a stop string was found."""

    def push(self, text: str) -> str:
        """Add text and return the text that can be emitted."""
        if self.is_stopped or not self._stop_strings:
            return "" if self.is_stopped else text
        pending = self._pending_text + text
        starts = [start for stop in self._stop_strings if (start := pending.find(stop)) >= 0]
        self.is_stopped = bool(starts)
        emitted = min(starts) if starts else len(pending) - self._partial_match_length(pending)
        self._pending_text = pending[emitted:]
        return pending[:emitted]

    def finish(self) -> str:
        """Return the text held back, unless a stop string was found."""
        pending = "" if self.is_stopped else self._pending_text
        self._pending_text = ""
        return pending

    def _partial_match_length(self, text: str) -> int:
        """Return the length of the longest suffix of a text that is a proper prefix of a stop string."""
        longest = min(len(text), max(map(len, self._stop_strings)) - 1)
        lengths = range(longest, 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self._stop_strings)), 0)


_CHECK_BATCH_TOKENS = 2**24
"""Number of ids that are checked at a time."""


@dataclass(frozen=True)
class TokenDataset:
    """Token ids split into sequences of length S. The shorter tail is used only if `keeps_tail`."""

    ids: np.ndarray | ShardReader
    """Token ids of any integer type, [tokens]. It may be a file."""
    seq_len: int
    keeps_tail: bool

    @property
    def num_full_sequences(self) -> int:
        """Number of sequences of S tokens."""
        return len(self.ids) // self.seq_len

    @property
    def tail(self) -> int:
        """Number of tokens after the last full sequence."""
        return len(self.ids) % self.seq_len

    @property
    def num_sequences(self) -> int:
        """Number of evaluated sequences. A tail of one token has no target."""
        return self.num_full_sequences + (self.keeps_tail and self.tail > 1)

    @property
    def num_predicted(self) -> int:
        """Number of predicted tokens: all tokens except the first of each sequence."""
        tail = self.tail - 1 if self.num_sequences > self.num_full_sequences else 0
        return self.num_full_sequences * (self.seq_len - 1) + tail

    @property
    def num_unused_tokens(self) -> int:
        """Number of tokens in no evaluated sequence."""
        return self.tail if self.num_sequences == self.num_full_sequences else 0

    def batch(self, first: int, count: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return `count` sequences from index `first` on, padded with id 0 to [count, width].

        Returns:
            (tokens, labels, is_target, is_token), each [count, width]: inputs, next tokens, the mask of predicted
            tokens, and the mask of tokens that are not padding.
        """
        tokens = np.zeros((count, width), dtype=np.int64)
        labels = np.zeros_like(tokens)
        is_target = np.zeros(tokens.shape, dtype=bool)
        is_token = np.zeros(tokens.shape, dtype=bool)
        for i, number in enumerate(range(first, min(first + count, self.num_sequences))):
            ids = self.ids[number * self.seq_len : (number + 1) * self.seq_len]
            tokens[i, : len(ids)] = ids
            labels[i, : len(ids) - 1] = ids[1:]
            is_target[i, : len(ids) - 1] = True
            is_token[i, : len(ids)] = True
        return tokens, labels, is_target, is_token


def open_ids(path: Path) -> ShardReader:
    """Open an .npy file of token ids without reading it into memory."""
    name = Setting("--tokens", str(path))
    if not path.exists():
        raise ConfigError(name.problem("does not exist", "name an .npy file of token ids"))
    if path.is_dir() or path.suffix != ".npy":
        raise ConfigError(name.problem("is no .npy file", "write the ids with numpy.save"))
    return read_npy_header(path).open()


def check_dataset(dataset: TokenDataset, vocab_size: int, name: str) -> None:
    """Read all ids of a dataset. Raise ConfigError if an id is outside the vocabulary, or there is no full sequence."""
    if dataset.seq_len < 2:
        rule = "must be at least 2: the first token of a sequence is not predicted"
        raise ConfigError(Problem("--seq-len", dataset.seq_len, rule))
    if dataset.num_sequences == 0:
        tail = (
            ""
            if dataset.keeps_tail or len(dataset.ids) < 2
            else f", or {Setting('--keep-tail')} for a last shorter sequence"
        )
        rule = f"has {len(dataset.ids)} tokens, less than one sequence of {Setting('--seq-len', dataset.seq_len)}"
        raise ConfigError(f"{name} {rule}; give more, or a shorter {Setting('--seq-len')}{tail}")
    for start in range(0, len(dataset.ids), _CHECK_BATCH_TOKENS):
        ids = dataset.ids[start : start + _CHECK_BATCH_TOKENS]
        is_invalid = (ids < 0) | (ids >= vocab_size)
        if is_invalid.any():
            index = int(np.argmax(is_invalid))
            raise ConfigError(
                f"{name} holds id {int(ids[index])} at token {start + index}, but the model's vocabulary is "
                f"{vocab_size}: ids must be 0 to {vocab_size - 1}; tokenise with the model's tokenizer"
            )
