"""Parsing of lm-eval's `--model_args` and related options for moefold models."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from moefold.config.base.plugins import import_files
from moefold.config.schema import Config
from moefold.data.conversations.chat import ChatTemplate
from moefold.data.conversations.reward_prompt import override_want
from moefold.data.tokenizer import NumberTokenizer, Tokenizer
from moefold.errors import ConfigError
from moefold.inference.settings import InferenceRequest, inference_config
from moefold.inference.source import ModelSource, find_source
from moefold.inference.text import open_chat_template
from moefold.message_text import spelled_as

AXES = ("tp", "pp", "ep", "etp", "world_size")


ARGUMENT_NAMES = {
    f"--{name.replace('_', '-')}": f"--model_args {name}="
    for name in ("dtype", "tokenizer", "chat_template", "ignore_key", "part", "want")
}
"""Model arguments of lm-eval by the option of other commands in error messages."""


@dataclass(frozen=True, kw_only=True)
class LmSettings:
    """Model arguments of lm-eval, converted from text."""

    path: str
    """Checkpoint, run folder or Hugging Face folder."""
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    world_size: int = 0
    """Number of ranks. 0: as required by the other degrees."""
    dtype: str = "auto"
    device: str = "auto"
    batch_size: int = 8
    max_length: int = 0
    """Maximum sequence length in tokens. 0: the model's context length."""
    max_gen_toks: int = 256
    """Default limit of new tokens for tasks without a limit."""
    tokenizer: str = ""
    chat_template: str = ""
    """Template file for --apply_chat_template. "": the model's template."""
    add_bos_token: str = ""
    """true or false: whether a start token is added to texts. "": the tokens that the tokenizer declares."""
    ignore_key: str = ""
    """Keys of the JSON files of a Hugging Face folder that may have any value, with + between them."""
    part: str = ""
    """Parts of the model's training in files, FILE.py:CLASS, with + between them. The files are imported."""
    want: str = ""
    """Reward that --apply_chat_template writes into prompts instead of align.method.want, or "none"."""

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> "LmSettings":
        """Parse the arguments that lm-eval passes to a model. None values are ignored."""
        types = {field.name: field.type for field in fields(cls)}
        values = {key: value for key, value in arguments.items() if value is not None}
        if "max_batch_size" in values or str(values.get("batch_size", "")).startswith("auto"):
            raise ConfigError(
                "--batch_size auto (and its --max_batch_size) is not supported: moefold does not search for the "
                "largest batch that fits in memory; give a number, or leave it out for 8"
            )
        if unknown := [key for key in values if key not in types]:
            raise ConfigError(f"--model_args {unknown[0]}= is unknown; the arguments are {', '.join(types)}")
        if "path" not in values:
            raise ConfigError("--model_args needs path=MODEL: a checkpoint, a run folder or a Hugging Face folder")
        # lm-eval's default is "cuda:0" on every machine.
        if str(values.get("device", "")).startswith("cuda:"):
            del values["device"]
        for key, value in values.items():
            if types[key] is int:
                text = str(value)
                minimum = 0 if key in ("world_size", "max_length") else 1
                if not text.isdecimal() or int(text) < minimum:
                    raise ConfigError(f"--model_args {key}={value} must be a number, at least {minimum}")
                values[key] = int(text)
        if str(values.get("add_bos_token", "")).lower() not in ("", "true", "false"):
            raise ConfigError(f"--model_args add_bos_token={values['add_bos_token']} must be true or false")
        if "add_bos_token" in values:
            values["add_bos_token"] = str(values["add_bos_token"]).lower()
        typed: dict[str, Any] = {key: value if types[key] is int else str(value) for key, value in values.items()}
        return cls(**typed)

    @spelled_as(ARGUMENT_NAMES)
    def resolve(self, world_size: int | None) -> tuple[ModelSource, Config]:
        """Find the model and build its inference config for the ranks of a launcher, if any."""
        import_files(filter(None, self.part.split("+")))
        source = find_source(self.path, tuple(filter(None, self.ignore_key.split("+"))))
        source = replace(source, want=override_want(source.want, self.want))
        overrides = [f"parallel.{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis)]
        request = InferenceRequest(
            overrides=tuple(overrides),
            dtype=self.dtype,
            device=self.device,
            world_size=world_size,
            seq_len=self.max_length or source.context,
            batch_size=self.batch_size,
        )
        return source, inference_config(source, request, "generate")

    @spelled_as(ARGUMENT_NAMES)
    def load_chat_template(self, source: ModelSource, tokenizer: Tokenizer) -> ChatTemplate:
        """Load the chat template for --apply_chat_template."""
        if isinstance(tokenizer, NumberTokenizer):
            raise ConfigError(
                "--apply_chat_template: the model was trained on bare ids and has no tokenizer; name one with "
                "--model_args tokenizer="
            )
        try:
            return open_chat_template(source, self.tokenizer, self.chat_template)
        except ConfigError as error:
            raise error.with_start("--apply_chat_template: ") from error


def model_arguments(argv: Sequence[str]) -> dict[str, str]:
    """Return --model_args (-a), --batch_size (-b), --max_batch_size and --device of an lm-eval command line."""
    arguments: dict[str, str] = {}
    for option, value in _parse_options(argv):
        if option in ("--model_args", "-a"):
            arguments |= _parse_pairs(value)
        elif option in ("--batch_size", "-b", "--max_batch_size", "--device"):
            arguments.setdefault("batch_size" if option == "-b" else option.removeprefix("--"), value)
    return arguments


def applies_chat_template(argv: Sequence[str]) -> bool:
    """Return whether an lm-eval command line has --apply_chat_template. Raise ConfigError if it names a template."""
    if values := [value for option, value in _parse_options(argv) if option == "--apply_chat_template"]:
        raise ConfigError(
            f"--apply_chat_template {values[0]} names one of several templates, but a model has only one here; leave "
            "the name out, or give a template file with --model_args chat_template=FILE"
        )
    return "--apply_chat_template" in argv


def _parse_options(argv: Sequence[str]) -> list[tuple[str, str]]:
    """Return (option, value) pairs of a command line. Values of one-letter options may be attached (-b4)."""
    pairs: list[tuple[str, str]] = []
    option = ""
    for argument in argv:
        if not argument.startswith("-"):
            pairs.append((option, argument))
            continue
        option, equals, value = argument.partition("=")
        if not argument.startswith("--") and len(option) > len("-b"):
            option = argument[:2]
            equals = "="
            value = argument[2:]
        if equals:
            pairs.append((option, value))
    return pairs


def _parse_pairs(text: str) -> dict[str, str]:
    """Parse "key=value,key=value" or a JSON object."""
    if text.startswith("{"):
        try:
            tree = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"--model_args {text} is not valid JSON ({error}); write path=MODEL,tp=2") from error
        return {key: str(value) for key, value in tree.items()}
    pairs = (pair.partition("=") for pair in text.split(",") if pair)
    return {key: value for key, _, value in pairs}
