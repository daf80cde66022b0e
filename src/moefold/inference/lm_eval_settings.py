"""What `--model_args` of lm-eval says of a model of ours. Torch-free."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from moefold.config.schema import Config
from moefold.data.chat import ChatTemplate
from moefold.data.tokenizer import NumberTokenizer, Tokenizer
from moefold.errors import ConfigError
from moefold.inference.settings import InferenceRequest, inference_config
from moefold.inference.source import ModelSource, find_source
from moefold.inference.text import open_chat_template

AXES = ("tp", "pp", "ep", "etp", "world_size")


@dataclass(frozen=True, kw_only=True)
class LmSettings:
    """The arguments of the model; what lm-eval passes as text is converted."""

    path: str
    """Checkpoint, run folder or Hugging Face folder."""
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    world_size: int = 0
    """0: as many ranks as the others need."""
    dtype: str = "auto"
    device: str = "auto"
    batch_size: int = 8
    max_length: int = 0
    """Tokens of the longest text that is looked at; 0: what the model is made for."""
    max_gen_toks: int = 256
    """Most new tokens where a task does not say."""
    tokenizer: str = ""
    chat_template: str = ""
    """File of the template for --apply_chat_template; "" takes the model's."""

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> "LmSettings":
        """Read what lm-eval gives a model; settings of its own that stand for nothing (None) are left out.

        Raises:
            ConfigError: one is unknown, missing or out of range.
        """
        known = {field.name: field.type for field in fields(cls)}
        given = {key: value for key, value in arguments.items() if value is not None}
        if "max_batch_size" in given or str(given.get("batch_size", "")).startswith("auto"):
            raise ConfigError(
                "--batch_size auto (and --max_batch_size, which belongs to it) is not here: nothing tries out how many "
                "texts fit in memory; give a number, or leave it out for 8"
            )
        if strange := [key for key in given if key not in known]:
            raise ConfigError(f"--model_args {strange[0]}= is unknown; the arguments are {', '.join(known)}")
        if "path" not in given:
            raise ConfigError("--model_args needs path=MODEL: a checkpoint, a run folder or a Hugging Face folder")
        # "cuda:0" is lm-eval's default, on every machine.
        if str(given.get("device", "")).startswith("cuda:"):
            del given["device"]
        for key, value in given.items():
            if known[key] is int:
                text = str(value)
                least = 0 if key in ("world_size", "max_length") else 1
                if not text.isdecimal() or int(text) < least:
                    raise ConfigError(f"--model_args {key}={value} must be a number, at least {least}")
                given[key] = int(text)
        typed: dict[str, Any] = {key: value if known[key] is int else str(value) for key, value in given.items()}
        return cls(**typed)

    def resolve(self, world_size: int | None) -> tuple[ModelSource, Config]:
        """Find the model and check the mapping.

        Args:
            world_size: ranks that a launcher started, if one did.

        Raises:
            ConfigError: there is no such model, or the mapping does not fit it.
        """
        source = find_source(self.path)
        overrides = [f"parallel.{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis)]
        wish = InferenceRequest(
            overrides=tuple(overrides),
            dtype=self.dtype,
            device=self.device,
            world_size=world_size,
            seq_len=self.max_length or source.context,
            batch_size=self.batch_size,
        )
        return source, inference_config(source, wish, "generate")

    def load_chat_template(self, source: ModelSource, tokenizer: Tokenizer) -> ChatTemplate:
        """The template that --apply_chat_template puts prompts into.

        Raises:
            ConfigError: there is none, or the model knows no text.
        """
        if isinstance(tokenizer, NumberTokenizer):
            raise ConfigError(
                "--apply_chat_template: the model was trained on bare ids, so it knows no text; name its tokenizer "
                "with --model_args tokenizer="
            )
        try:
            return open_chat_template(source, self.tokenizer, self.chat_template)
        except ConfigError as error:
            raise ConfigError(f"--apply_chat_template: {error} (here --model_args chat_template=FILE)") from error


def model_arguments(argv: Sequence[str]) -> dict[str, str]:
    """What --model_args (-a), --batch_size (-b), --max_batch_size and --device say on a command line of lm-eval."""
    found: dict[str, str] = {}
    for option, word in _parse_options(argv):
        if option in ("--model_args", "-a"):
            found |= _parse_pairs(word)
        elif option in ("--batch_size", "-b", "--max_batch_size", "--device"):
            found.setdefault("batch_size" if option == "-b" else option.removeprefix("--"), word)
    return found


def applies_chat_template(argv: Sequence[str]) -> bool:
    """Whether a command line of lm-eval asks for --apply_chat_template.

    Raises:
        ConfigError: it names a template.
    """
    if named := [word for option, word in _parse_options(argv) if option == "--apply_chat_template"]:
        raise ConfigError(
            f"--apply_chat_template {named[0]} names one of several templates, and a model has one here; leave it "
            "out, or give the file of a template with --model_args chat_template=FILE"
        )
    return "--apply_chat_template" in argv


def _parse_options(argv: Sequence[str]) -> list[tuple[str, str]]:
    """The words behind options, each with its option; those of one letter may be glued to it (-b4)."""
    found: list[tuple[str, str]] = []
    option = ""
    for word in argv:
        if not word.startswith("-"):
            found.append((option, word))
            continue
        option, equals, value = word.partition("=")
        if not word.startswith("--") and len(option) > len("-b"):
            option = word[:2]
            equals = "="
            value = word[2:]
        if equals:
            found.append((option, value))
    return found


def _parse_pairs(text: str) -> dict[str, str]:
    """key=value,key=value, or an object in JSON."""
    if text.startswith("{"):
        try:
            tree = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"--model_args {text} is no JSON ({error}); write path=MODEL,tp=2") from error
        return {key: str(value) for key, value in tree.items()}
    parts = (part.partition("=") for part in text.split(",") if part)
    return {key: value for key, _, value in parts}
