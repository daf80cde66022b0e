"""Text input of a model: its tokenizer, its chat template, and prompts as token ids."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from moefold.bounded_read import MAX_TEXT_BYTES
from moefold.bounded_read import read_text as read_bounded
from moefold.checkpoint.run_tokenizer import other_tokenizer_reason
from moefold.config.sections.data import DataConfig
from moefold.data.conversations.chat import ChatTemplate, load_chat_template
from moefold.data.hf_tokenizer.tokenizer_folder import JsonTokenizer, tokenizer_file
from moefold.data.input_paths import existing_path
from moefold.data.sources.file_formats import refuse_surrogates
from moefold.data.tokenize_record import compare_tokenizers, read_tokenize_info
from moefold.data.tokenizer import NumberTokenizer, Tokenizer, load_tokenizer, refuse_nul, report_notes
from moefold.errors import ConfigError
from moefold.inference.source import ModelSource
from moefold.message_text import Problem, Setting, spelled_as


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
                compare_tokenizers([file], tokenizer, name)
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
