"""What `--model_args` of lm-eval says of a model of ours. Torch-free."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.inference.settings import Wish, inference_config
from moefold.inference.source import Source, find_source

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

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> "LmSettings":
        """Read what lm-eval gives a model; settings of its own that stand for nothing (None, "auto") are left out.

        Raises:
            ConfigError: one is unknown, missing or out of range.
        """
        known = {field.name: field.type for field in fields(cls)}
        given = {key: value for key, value in arguments.items() if value is not None and key != "max_batch_size"}
        if strange := [key for key in given if key not in known]:
            raise ConfigError(f"--model_args {strange[0]}= is unknown; the arguments are {', '.join(known)}")
        if "path" not in given:
            raise ConfigError("--model_args needs path=MODEL: a checkpoint, a run folder or a Hugging Face folder")
        if given.get("batch_size") == "auto":
            del given["batch_size"]
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

    def resolve(self, world_size: int | None) -> tuple[Source, Config]:
        """Find the model and check the mapping.

        Args:
            world_size: ranks that a launcher started, if one did.

        Raises:
            ConfigError: there is no such model, or the mapping does not fit it.
        """
        source = find_source(self.path)
        overrides = [f"parallel.{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis)]
        wish = Wish(
            overrides=tuple(overrides),
            dtype=self.dtype,
            device=self.device,
            world_size=world_size,
            seq_len=self.max_length or source.context,
            batch_size=self.batch_size,
        )
        return source, inference_config(source, wish, "generate")


def model_arguments(words: Sequence[str]) -> dict[str, str]:
    """The key=value pairs behind --model_args (-a), --batch_size (-b) and --device on a command line of lm-eval."""
    found: dict[str, str] = {}
    option = ""
    for word in words:
        name, equals, value = word.partition("=")
        if name.startswith("-"):
            option, word = name, value
            if not equals:
                continue
        if option in ("--model_args", "-a"):
            pairs = (part.partition("=") for part in word.split(",") if part)
            found |= {key: text for key, _, text in pairs}
        elif option in ("--batch_size", "-b", "--device"):
            key = "device" if option == "--device" else "batch_size"
            found.setdefault(key, word)
    return found
