"""Tokenizer classes of transformers that rebuild their tokenizer: the parts that replace parts of a tokenizer.json.

`AutoTokenizer` does not always use a tokenizer.json as it is: the classes of many model families keep its vocabulary,
merges, added tokens and post-processor, and take the normaliser, the pre-tokeniser and the decoder from their own code.
The table in tokenizer_classes.json has these parts; tools/tokenizer_classes.py made it from transformers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast", "PreTrainedTokenizer", "PythonBackend")
"""Classes that use a tokenizer.json as it is."""
PLAIN = PLAIN_CLASSES[0]
_REGISTERED_PLAIN = ("TokenizersBackend", "PythonBackend", "PreTrainedTokenizerFast", "MistralCommonBackend")


@dataclass(frozen=True, slots=True)
class TokenizerClass:
    """A class that rebuilds its tokenizer."""

    parts: Mapping[str, Any]
    """normalizer, pre_tokenizer and decoder of a tokenizer.json, and "model": the options of its BPE model."""
    special_tokens: Mapping[str, str]
    """Special tokens that the class has where no file declares others."""
    takes_unk_token: bool
    """Whether the BPE model has the declared unk_token."""
    replaces_post_processor: bool
    """Whether the post-processor of a tokenizer.json is replaced by the settings add_bos_token and add_eos_token."""
    reads_merges: bool
    """Whether the class reads vocab.json and merges.txt, where there is no tokenizer.json."""


@dataclass(frozen=True, slots=True)
class ClassTable:
    """The table of classes."""

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
        table = json.loads(files("moefold.data").joinpath("tokenizer_classes.json").read_text(encoding="utf-8"))
        return cls(**{**table, "distrusted_model_types": tuple(table["distrusted_model_types"])})

    def choose(self, settings: Mapping[str, Any], config: Mapping[str, Any], *, is_byte_level: bool) -> str:
        """Return the name of the class that `AutoTokenizer` chooses, without "Fast"; `PLAIN` for one of no family.

        Args:
            settings: tokenizer_config.json.
            config: config.json of the model; empty if there is none.
            is_byte_level: whether tokenizer.json describes a byte-level tokenizer.
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
            chosen = registered if is_distrusted else declared
        else:
            chosen = declared or registered
        return PLAIN if chosen in PLAIN_CLASSES or chosen not in self.known else chosen

    def rebuilt(self, name: str, settings: Mapping[str, Any]) -> TokenizerClass | None:
        """Return the parts of a class under the settings of tokenizer_config.json; None if it is not in the table."""
        entry = self.classes.get(name)
        if entry is None:
            return None
        given = {name: settings[name] for name in entry["switches"] if name in settings}
        known = {name: value for name, value in given.items() if value in (True, False)}
        number = entry["forms"].get(form_key(given), entry["forms"][form_key(known)])
        fields = ("special_tokens", "takes_unk_token", "replaces_post_processor", "reads_merges")
        return TokenizerClass(entry["parts"][number], **{name: entry[name] for name in fields})


def _class_name(name: object) -> str:
    return name.removesuffix("Fast") if isinstance(name, str) and name not in PLAIN_CLASSES else str(name or "")


def form_key(switches: Mapping[str, Any]) -> str:
    """Return the key of a form: the given switches in order; any value but a truth value counts as null."""
    return json.dumps({name: value if value in (True, False) else None for name, value in sorted(switches.items())})
