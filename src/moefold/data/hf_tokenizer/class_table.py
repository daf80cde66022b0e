"""Table of tokenizer classes of transformers: what each changes in the tokenizer of a folder."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moefold.package_table import package_table

PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast", "PreTrainedTokenizer", "PythonBackend")
"""Classes that use a tokenizer.json without changes."""
PLAIN = PLAIN_CLASSES[0]
_REGISTERED_PLAIN = ("TokenizersBackend", "PythonBackend", "PreTrainedTokenizerFast", "MistralCommonBackend")


@dataclass(frozen=True, slots=True)
class TokenizerClass:
    """Class that rebuilds its tokenizer."""

    parts: Mapping[str, Any]
    """normalizer, pre_tokenizer and decoder of a tokenizer.json, and "model": the options of its BPE model."""
    special_tokens: Mapping[str, str]
    """Special tokens of the class unless a file declares others."""
    takes_unk_token: bool
    """True if the BPE model uses the declared unk_token."""
    replaces_post_processor: bool
    """True if the settings add_bos_token and add_eos_token replace the post-processor of a tokenizer.json."""
    reads_merges: bool
    """True if the class reads vocab.json and merges.txt if there is no tokenizer.json."""


@dataclass(frozen=True, slots=True)
class ClassTable:
    """Table of tokenizer classes."""

    classes: Mapping[str, Any]
    model_types: Mapping[str, str]
    """Class of each model type of config.json."""
    distrusted_model_types: tuple[str, ...]
    """Model types whose published tokenizer_config.json names a wrong class."""
    known: tuple[str, ...]
    """All class names that transformers knows, without "Fast"."""

    @classmethod
    def load(cls) -> "ClassTable":
        """Read the table of the package."""
        table = package_table("data/hf_tokenizer/tokenizer_classes.json")
        return cls(**{**table, "distrusted_model_types": tuple(table["distrusted_model_types"])})

    def choose(self, settings: Mapping[str, Any], config: Mapping[str, Any], *, is_byte_level: bool) -> str:
        """Return the name of the class that `AutoTokenizer` chooses, without "Fast", or `PLAIN` for no family.

        The settings are tokenizer_config.json, the config is config.json of the model or empty.
        """
        declared = _class_name(settings.get("tokenizer_class")) or _class_name(config.get("tokenizer_class"))
        model_type = str(config.get("model_type", ""))
        registered = self.model_types.get(model_type, "")
        is_distrusted = model_type in self.distrusted_model_types
        has_own_code = "AutoTokenizer" in (settings.get("auto_map") or {})
        is_llama_in_bytes = declared == "LlamaTokenizer" and is_byte_level and not has_own_code
        if is_llama_in_bytes and registered != "MistralCommonBackend" and not is_distrusted:
            return PLAIN
        if declared and registered and registered != declared and not has_own_code:
            if registered in _REGISTERED_PLAIN:
                return PLAIN
            name = registered if is_distrusted else declared
        else:
            name = declared or registered
        return PLAIN if name in PLAIN_CLASSES or name not in self.known else name

    def rebuilt(self, name: str, settings: Mapping[str, Any]) -> TokenizerClass | None:
        """Return the parts of a class with the settings of tokenizer_config.json, or None if the table lacks it."""
        entry = self.classes.get(name)
        if entry is None:
            return None
        switches = {name: settings[name] for name in entry["switches"] if name in settings}
        booleans = {name: value for name, value in switches.items() if value in (True, False)}
        number = entry["forms"].get(form_key(switches), entry["forms"][form_key(booleans)])
        fields = ("special_tokens", "takes_unk_token", "replaces_post_processor", "reads_merges")
        return TokenizerClass(entry["parts"][number], **{name: entry[name] for name in fields})


def _class_name(name: object) -> str:
    return name.removesuffix("Fast") if isinstance(name, str) and name not in PLAIN_CLASSES else str(name or "")


def form_key(switches: Mapping[str, Any]) -> str:
    """Return the key of a form: the given switches in order, with null for values that are not booleans."""
    return json.dumps({name: value if value in (True, False) else None for name, value in sorted(switches.items())})
