"""Lookup of a model spec by the name that a user or a table gives. Torch-free."""

import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from moefold.bounded_read import check_regular_file
from moefold.config.presets import preset_names
from moefold.config.suggestions import closest_match, download_advice
from moefold.convert.hf_config import read_model_config
from moefold.errors import ConfigError
from moefold.planner.model_spec import ModelSpec, model_spec_from_config
from moefold.planner.unsupported_models import unsupported_model_names, unsupported_model_spec
from moefold.recipe import load_config

_PARENTHESES = re.compile(r"\(.*?\)")
_SYNONYMS = {
    "nemotron3nano30ba3b": "nemotron-3-nano",
    "nemotron3super120b": "nemotron-3-super",
    "nemotron3super120ba12b": "nemotron-3-super",
    "llama4scoutllm": "llama4-scout",
    "llama318b": "llama3-8b",
    "llama3170b": "llama3-70b",
    "llama31405b": "llama3-405b",
    "llama38b": "llama3-8b",
    "llama370b": "llama3-70b",
    "kimik2base": "kimi-k2",
    "kimik21t": "kimi-k2",
    "qwen3next80b": "qwen3-next-80b-a3b",
    "qwen330b": "qwen3-30b-a3b",
    "qwen3235b": "qwen3-235b-a22b",
    "mixtral8x22bg8t8": "mixtral-8x22b-g8t8",
    "qwen257b": "qwen2-57b-a14b",
    "gptoss": "gpt-oss-120b",
    "deepseekv3671b": "deepseek-v3",
    "deepseekv3base": "deepseek-v3",
    "qwen3moe30b": "qwen3-30b-a3b",
    "qwen3moe235b": "qwen3-235b-a22b",
    "qwen2moe57b": "qwen2-57b-a14b",
    "nemotron3nano30b": "nemotron-3-nano",
    "nemotron3nanov330ba3b": "nemotron-3-nano",
    "llama4scout17b16e": "llama4-scout",
    "llama4maverick17b128e": "llama4-maverick",
    "llama4maverickllm": "llama4-maverick",
    "moonlight16ba3b": "moonlight-16b",
    "olmoe": "olmoe-1b-7b",
}


@lru_cache(maxsize=64)
def load_model_spec(name: str) -> ModelSpec:
    """Load the spec of a preset, a recipe, a Hugging Face config.json (or its folder), or another known model.

    Raises:
        ConfigError: it is none of these.
    """
    path = Path(name)
    if path.suffix == ".toml":
        return model_spec_from_config(load_config(path).model)
    if path.name == "config.json" or path.is_dir():
        return model_spec_from_config(read_model_config(path.parent if path.name == "config.json" else path))
    known = find_model_name(name)
    if known is None and path.exists():
        try:
            check_regular_file(path)
        except OSError as error:
            raise ConfigError(f"model {name!r} cannot be read: {error.strerror}") from None
        raise ConfigError(
            f"model {name!r} is a file and neither a recipe ending in .toml nor a config.json; give it one of these "
            "names if it is one, or name a preset"
        )
    if known is None:
        names = plannable_model_names()
        guess = closest_match(name.lower(), names, cutoff=0.5)
        hint = f"did you mean {guess!r}? The" if guess else "the"
        if advice := download_advice(name):
            namesake = find_model_name(name.rpartition("/")[2])
            hint = f"{f'{namesake!r} is known by its name; or, as ' if namesake else ''}{advice}; the"
        raise ConfigError(
            f"model {name!r} is unknown; {hint} models are {', '.join(sorted(names))}; "
            "or name a recipe.toml, or a folder with a config.json"
        )
    if known in unsupported_model_names():
        return unsupported_model_spec(known)
    return replace(model_spec_from_config(load_config(None, [f"model.preset={known}"]).model), name=known)


def plannable_model_names() -> tuple[str, ...]:
    """Return the names of models that the runtime can train; others are priced by `moefold plan-accuracy` alone."""
    return (
        *preset_names(),
        *(name for name in unsupported_model_names() if unsupported_model_spec(name).config is not None),
    )


def find_model_name(name: str) -> str | None:
    """Return the model that a spelling means ("Qwen3_30B_a3B (tokendrop)" is qwen3-30b-a3b), or None."""
    plain = _normalise_name(_PARENTHESES.sub("", name))
    names = {_normalise_name(known): known for known in (*preset_names(), *unsupported_model_names())}
    return names.get(plain) or _SYNONYMS.get(plain)


def _normalise_name(name: str) -> str:
    return "".join(char for char in name.lower() if char.isalnum())
