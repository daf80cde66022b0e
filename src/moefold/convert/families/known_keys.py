"""Keys of other people's JSON files: which were read, and which are constant, ignored, or refused by name."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from moefold.errors import ConfigError
from moefold.message_text import Setting
from moefold.package_table import package_table

Json = Mapping[str, Any]


class KeyReader(Mapping[str, Any]):
    """Keys of a JSON object, with a record of accessed keys. Nested objects have their own records.

    It does not support iteration, so that a copy does not count as access to every key. `overlay` copies.

    Attributes:
        read_keys: accessed keys, present or not.
        nested: readers of the accessed nested objects.
    """

    def __init__(self, values: Json) -> None:
        self.values_by_key = dict(values)
        self.read_keys: set[str] = set()
        self.nested: dict[str, KeyReader] = {}

    def __getitem__(self, key: str) -> Any:
        self.read_keys.add(key)
        value = self.values_by_key[key]
        if not isinstance(value, dict):
            return value
        return self.nested.setdefault(key, KeyReader(value))

    def __contains__(self, key: object) -> bool:
        if isinstance(key, str):
            self.read_keys.add(key)
        return key in self.values_by_key

    def __iter__(self) -> Iterator[str]:
        raise TypeError("a KeyReader records questions about single keys; copy it with overlay")

    def __len__(self) -> int:
        return len(self.values_by_key)

    def __repr__(self) -> str:
        return repr(self.values_by_key)


def overlay(hf_config: Json, values: Json) -> Json:
    """Return an object with some other values. Access to it is recorded in the original."""
    if not isinstance(hf_config, KeyReader):
        return {**hf_config, **values}
    reader = KeyReader({**hf_config.values_by_key, **values})
    reader.read_keys = hf_config.read_keys
    reader.nested = hf_config.nested
    return reader


def mark_read(hf_config: Json, *keys: str) -> None:
    """Record keys as read that other keys make void. Objects count with all of their keys."""
    for key in keys:
        value = hf_config.get(key)
        if isinstance(value, KeyReader):
            mark_read(value, *value.values_by_key)


def plain(value: Any) -> Any:
    """Return a value of a reader as JSON data."""
    return value.values_by_key if isinstance(value, KeyReader) else value


TABLE = "convert/families/declared_keys.json"


@dataclass(frozen=True)
class DeclaredKeys:
    """Keys of the files of other libraries.

    Attributes:
        versions: versions of the libraries of the table.
        generation: keys of generation_config.json.
        adapter: keys of PEFT's LoraConfig.
        others: keys that transformers' classes of causal models of other families declare.
        families: own keys of each `model_type`.
        aliases: other spellings of keys for each `model_type`.
        stacked_by_peft: for each `model_type` whose adapters of single experts PEFT stacks when it loads them, the last
            names of the modules of experts.
    """

    versions: Mapping[str, str]
    generation: Mapping[str, Any]
    adapter: Mapping[str, Any]
    others: frozenset[str]
    families: Mapping[str, Mapping[str, Any]]
    aliases: Mapping[str, Mapping[str, str]]
    stacked_by_peft: Mapping[str, list[str]]


@lru_cache(maxsize=1)
def declared_keys() -> DeclaredKeys:
    """Read the table."""
    table = package_table(TABLE)
    return DeclaredKeys(**{**table, "others": frozenset(table["others"])})


ALL_KEYS = ("*",)
"""Accept every key, for reading a folder whose keys were sorted before."""
Values = tuple[Any, ...] | None
"""Values of a key that change nothing. None means any value."""


@dataclass(frozen=True)
class KeyReport:
    """Kinds of the keys of one file.

    Attributes:
        constant: keys that change nothing here, by the lists of this module or by their default.
        ignored: keys that are ignored, each with its value.
    """

    file: str
    read: tuple[str, ...]
    constant: tuple[str, ...]
    ignored: tuple[str, ...]

    def note(self) -> str:
        """Return one line that names the ignored keys, or empty if there are none."""
        return f"{self.file} has keys that are ignored: {', '.join(self.ignored)}" if self.ignored else ""


@dataclass(frozen=True)
class KnownKeys:
    """Known keys of an object in addition to its read keys.

    Attributes:
        neutral: for each key the values that change nothing.
        declared: defaults of the keys that the class of another library declares. Moefold computes with these defaults.
        owner: name of that class in messages.
        void: regular expression of keys that are reported and ignored, whatever their value.
    """

    neutral: Mapping[str, Values]
    declared: Mapping[str, Any] = field(default_factory=dict)
    owner: str = ""
    void: str = r"(?!)"


_TRAINING = (
    r"aux_loss_alpha|seq_aux|aux_loss_coef|load_balance_coeff|router_z_loss_coef|z_loss_coefficient|use_aux_loss"
    r"|moe_aux_loss_coef|mtp_loss_scaling_factor"
)
"""Settings of the training loss, which a recipe sets."""
_VENDORS = (
    r"_.*|unsloth.*|auto_map|custom_pipelines|axolotl.*|trl.*|library_name|licen[cs]e|tags|language|model_name"
    r"|datasets|neuron|base_model.*"
)
"""Metadata of programs and hubs, and private keys of transformers."""
VOID = f"{_TRAINING}|{_VENDORS}"

MATHS = re.compile(r"(^|_)(act|activation|type|types|func|method|norm|mode|pattern)$|^(hidden|mlp|ff)_act")
"""Names of keys whose strings choose mathematics."""
_TRIVIAL_LISTS = {"layer_types": "full_attention", "mlp_layer_types": "sparse", "attn_type_list": 1}
"""Lists of kinds of layers with the same meaning as no list."""


def neutral_keys(table: str, family: str = "") -> dict[str, Values]:
    """Return the keys of a table of `neutral_keys.toml` with the values that change nothing."""
    groups = package_table("convert/families/neutral_keys.toml")[table]
    groups = groups.get(family, ()) if family else groups
    return {key: (*group["values"], None) if "values" in group else None for group in groups for key in group["keys"]}


def config_known_keys(family: str) -> KnownKeys:
    """Return the known keys of config.json of a family's text model."""
    neutral = neutral_keys("config") | (neutral_keys("families", family) if family else {})
    return KnownKeys(neutral, declared_keys().families.get(family, {}), f"transformers' {family}", VOID)


def multimodal_known_keys(model_type: str) -> KnownKeys:
    """Return the known keys of config.json of a multimodal model around its `text_config`."""
    declared = dict.fromkeys(declared_keys().families.get(model_type, {}))
    return KnownKeys({**neutral_keys("config"), **neutral_keys("multimodal"), **declared}, void=VOID)


def quantization_known_keys() -> KnownKeys:
    """Return the known keys of `quantization_config`."""
    return KnownKeys(neutral_keys("quantization"), void=r"_.*")


def tokenizer_known_keys() -> KnownKeys:
    """Return the known keys of tokenizer_config.json: keys of transformers' tokenizers, and special tokens."""
    return KnownKeys(neutral_keys("tokenizer"), void=rf"{_VENDORS}|.*_tokens?|.*_token_ids?")


def generation_known_keys() -> KnownKeys:
    """Return the known keys of generation_config.json. Settings of sampling are ignored by name."""
    declared = declared_keys().generation
    neutral = neutral_keys("generation")
    void = "|".join(map(re.escape, declared.keys() - neutral.keys()))
    return KnownKeys(neutral, declared, void=f"{void}|{_VENDORS}")


def classify_keys(
    file: str, keys: KeyReader, known: KnownKeys, ignored: Collection[str], prefix: str = ""
) -> tuple[KeyReport, list[str]]:
    """Sort the keys of an object after some were read, and return the kinds, and the reasons to refuse keys.

    Args:
        ignored: keys that the user accepts.
        prefix: path of the object in its file, such as "text_config.".
    """
    kinds: dict[str, list[str]] = {"read": [], "constant": [], "ignored": []}
    refused = []
    for key, value in keys.values_by_key.items():
        name = f"{prefix}{key}"
        kind, reason = _kind_of(key, value, keys, known, {key, name, *ALL_KEYS} & set(ignored) != set())
        if reason:
            refused.append(f"{name}={shorten(value)}, {reason}")
        else:
            kinds[kind].append(f"{name}={shorten(value)}" if kind == "ignored" else name)
    return KeyReport(file, tuple(kinds["read"]), tuple(kinds["constant"]), tuple(kinds["ignored"])), refused


def _kind_of(key: str, value: Any, keys: KeyReader, known: KnownKeys, is_ignored: bool) -> tuple[str, str]:
    """Return the kind of a key, and the reason if it is refused."""
    if is_ignored:
        return "ignored", ""
    has_any_value = key in known.neutral and known.neutral[key] is None
    if value is None and known.declared.get(key) is True and not has_any_value:
        return "", f"which {known.owner} takes as false and moefold as an absent key, which is true; write one of them"
    if key in keys.read_keys:
        return "read", ""
    if key in known.declared and _is_same(value, known.declared[key]):
        return "constant", ""
    if key in known.neutral:
        values = known.neutral[key]
        if values is None or any(_is_same(value, other) for other in values):
            return "constant", ""
    elif key in _TRIVIAL_LISTS and isinstance(value, list) and all(kind == _TRIVIAL_LISTS[key] for kind in value):
        return "constant", ""
    elif re.fullmatch(known.void, key):
        return "ignored", ""
    if key in known.declared and value is not None:
        return "", f"which {known.owner} has and moefold computes only as {known.declared[key]!r}"
    # False may be another value of a key that is neutral with true alone.
    is_empty = value is None or value in ("", [], {}) or (value is False and key not in known.neutral)
    is_text = isinstance(value, str) and not (key in declared_keys().others or MATHS.search(key))
    if is_empty or is_text:
        return "ignored", ""
    declared = declared_keys()
    is_maths = any(key in keys for keys in (known.neutral, declared.others, *declared.families.values()))
    return "", "which other families compute with" if is_maths else "which moefold does not know"


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two values are equal. Booleans are only equal to booleans, and 1 is equal to 1.0."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def shorten(value: Any) -> str:
    """Return a value for a message, truncated if it is long."""
    text = repr(plain(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def nested_reports(
    file: str, keys: KeyReader, known: Mapping[str, KnownKeys], ignored: Collection[str], prefix: str = ""
) -> Iterator[tuple[KeyReport, list[str]]]:
    """Yield the kinds of the keys of every accessed nested object."""
    for key, inner in keys.nested.items():
        name = f"{prefix}{key}"
        if not {key, name, *ALL_KEYS} & set(ignored):
            yield classify_keys(file, inner, known.get(name, _PLAIN), ignored, f"{name}.")
            yield from nested_reports(file, inner, known, ignored, f"{name}.")


_PLAIN = KnownKeys({}, void=_VENDORS)


def join_reports(file: str, reports: Collection[tuple[KeyReport, list[str]]]) -> KeyReport:
    """Return the kinds of all keys of a file. Raise ConfigError if some are refused."""
    refused = [reason for _, reasons in reports for reason in reasons]
    if refused:
        names = [reason.partition("=")[0] for reason in refused]
        options = " ".join(f"{Setting('--ignore-key', name):s}" for name in names)
        raise ConfigError(
            f"{file} has {'; '.join(refused)}; if the model computes the same without, add {options} "
            f"(checkpoint.ignore_keys of a recipe)"
        )
    merged = [report for report, _ in reports]
    return KeyReport(
        file,
        tuple(key for report in merged for key in report.read),
        tuple(key for report in merged for key in report.constant),
        tuple(key for report in merged for key in report.ignored),
    )


def file_report(file: str, keys: Json, known: KnownKeys, ignored: Collection[str]) -> KeyReport:
    """Sort the keys of a file whose keys are known only by name. Raise ConfigError if some are refused."""
    return join_reports(file, [classify_keys(file, KeyReader(keys), known, ignored)])


def with_all_spellings(hf_config: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Return config.json with each key under both spellings that transformers reads. Refuses two different values."""
    keys = dict(hf_config)
    for alias, name in declared_keys().aliases.get(family, {}).items():
        if keys.get(alias) is None:
            continue
        if keys.get(name, keys[alias]) not in (keys[alias], None):
            raise ConfigError(
                f"config.json has {alias}={keys[alias]!r} and {name}={keys[name]!r}, two spellings of one key; remove "
                "the wrong one"
            )
        keys[name] = keys[alias]
    return keys


def spellings_of(names: Collection[str], family: str) -> set[str]:
    """Return keys with their other spellings."""
    found = set(names)
    for alias, name in declared_keys().aliases.get(family, {}).items():
        found |= {alias} if name in found else set()
    return found
