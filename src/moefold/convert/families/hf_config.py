"""Reading of config.json: the family of a Hugging Face folder and its model config."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from moefold.bounded_read import MAX_CONFIG_BYTES, read_json
from moefold.checkpoint.checkpoint_meta import model_sizes
from moefold.checkpoint.model_differences import model_differences
from moefold.config.base.part import describe_part, parts_in
from moefold.config.base.part_registry import is_built_in
from moefold.config.load import config_from_dict
from moefold.config.model import ModelConfig
from moefold.convert.families.families import FAMILIES, MODEL_TYPES, UNSUPPORTED_FAMILIES
from moefold.convert.families.family import Family, MultimodalFolder
from moefold.convert.families.known_keys import (
    KeyReader,
    KeyReport,
    classify_keys,
    config_known_keys,
    file_report,
    generation_known_keys,
    join_reports,
    multimodal_known_keys,
    nested_reports,
    overlay,
    plain,
    quantization_known_keys,
    spellings_of,
    tokenizer_known_keys,
    with_all_spellings,
)
from moefold.convert.families.layer_fields import joined_layers
from moefold.convert.families.mtp import count_mtp_layers, tensor_names
from moefold.data.input_paths import CONFIG_FILE, GENERATION_FILE, TOKENIZER_CONFIG_FILE
from moefold.errors import ConfigError
from moefold.hub import download_advice
from moefold.message_text import closest_match, format_list
from moefold.validate.config import check_config

QUANTIZATION_KEY = "quantization_config"


def is_hf_folder(path: Path) -> bool:
    """Return whether a path is a folder with a model's config.json, rather than a checkpoint of moefold."""
    return (path / CONFIG_FILE).is_file() and "model_type" in _read_keys(path / CONFIG_FILE)


def read_model_config(folder: Path, ignored_keys: Collection[str] = ()) -> ModelConfig:
    """Return the section [model] of a Hugging Face folder, with the MTP layers in the folder.

    Raises:
        ConfigError: config.json is missing or broken, of an unknown family, or needs computation that moefold does not
            support, or a JSON file has an unknown key that is not in `ignored_keys`.
    """
    return inspect_folder(folder, ignored_keys)[0]


def inspect_folder(folder: Path, ignored_keys: Collection[str] = ()) -> tuple[ModelConfig, tuple[KeyReport, ...]]:
    """Return the section [model] of a folder, and the kinds of the keys of its files. Raise as `read_model_config`."""
    keys = read_hf_config(folder)
    model, report = inspect_config(keys, folder, ignored_keys)
    reports = [report]
    side_files = ((GENERATION_FILE, generation_known_keys), (TOKENIZER_CONFIG_FILE, tokenizer_known_keys))
    for file, known_keys in side_files:
        if (folder / file).is_file():
            try:
                reports.append(file_report(file, _read_keys(folder / file), known_keys(), ignored_keys))
            except ConfigError as error:
                raise ConfigError(f"{str(folder)!r}: {error}") from None
    names = tensor_names(folder)
    if names is not None and (multimodal := multimodal_folder(keys, find_family(keys, folder))):
        names = [multimodal.text_name(name) for name in names]
    return count_mtp_layers(model, names), tuple(reports)


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Return the keys of config.json. Raise ConfigError if the file is missing or broken."""
    path = folder / CONFIG_FILE
    if not folder.is_dir():
        advice = download_advice(str(folder), allows_bare_name=True) if not folder.exists() else ""
        hint = advice or f"name a folder with a {CONFIG_FILE}"
        raise ConfigError(f"{str(folder)!r} does not exist or is not a folder; {hint}")
    if not path.is_file():
        raise ConfigError(f"{str(folder)!r} is not a Hugging Face folder: it has no {CONFIG_FILE}")
    return _read_keys(path)


def find_family(hf_config: Mapping[str, Any], folder: Path) -> Family:
    """Return the family of a config.json. Refuse unknown families and formats of quantised weights."""
    name = hf_config.get("model_type")
    if name is None and isinstance(hf_config.get("run"), dict):
        raise ConfigError(
            f"{str(folder)!r} is a run of moefold, not a Hugging Face folder; name its recipe, or a folder that "
            "`moefold export` wrote"
        )
    if isinstance(name, str) and name in UNSUPPORTED_FAMILIES:
        raise ConfigError(
            f"{str(folder)!r} is of model_type {name!r}, which needs parts that moefold does not have: "
            f"{UNSUPPORTED_FAMILIES[name]} (docs/conversion.md#families)"
        )
    if not isinstance(name, str) or name not in MODEL_TYPES:
        guess = closest_match(name, MODEL_TYPES) if isinstance(name, str) else None
        hint = f"; did you mean {guess!r}?" if guess else ""
        raise ConfigError(
            f"{str(folder)!r} is of model_type {name!r}, which moefold does not know; "
            f"it knows {', '.join(MODEL_TYPES)}{hint}"
        )
    if reason := quantization_unsupported_reason(hf_config.get(QUANTIZATION_KEY)):
        raise ConfigError(f"{str(folder)!r} {reason}")
    return MODEL_TYPES[name]


def multimodal_folder(hf_config: Mapping[str, Any], family: Family) -> MultimodalFolder | None:
    """Return the description of a multimodal folder whose text model has the family, or None for other folders."""
    folder = family.multimodal
    return folder if folder is not None and hf_config.get("model_type") == folder.model_type else None


def text_config(hf_config: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """Return the keys that describe the text model: the whole config.json, or an object in a multimodal config.json."""
    multimodal = multimodal_folder(hf_config, family)
    return hf_config if multimodal is None else multimodal.text_config(hf_config)


def quantization_unsupported_reason(quantization: Any) -> str:
    """Return the reason why the `quantization_config` of a config.json cannot be read. Empty means no reason."""
    if quantization is None:
        return ""
    if not isinstance(quantization, Mapping):
        return f"has {QUANTIZATION_KEY}={quantization!r}, which should be an object"
    method = quantization.get("quant_method")
    if method == "mxfp4":
        return ""
    if method != "fp8":
        return (
            f"has weights quantised by quant_method={method!r}; moefold reads 'fp8' in blocks and 'mxfp4': convert "
            "them to bfloat16 first, as docs/conversion.md shows"
        )
    sizes = quantization.get("weight_block_size")
    if not isinstance(sizes, list | tuple) or len(sizes) != 2 or not all(type(n) is int and n > 0 for n in sizes):
        return f"has FP8 weights of weight_block_size={sizes!r}; moefold reads blocks of two whole numbers"
    if quantization.get("fmt", "e4m3") != "e4m3":
        return f"has FP8 weights of fmt={quantization['fmt']!r}; moefold reads 'e4m3'"
    return ""


def parse_model_config(hf_config: Mapping[str, Any], folder: Path, ignored_keys: Collection[str] = ()) -> ModelConfig:
    """Convert a config.json to the section [model]. `ignored_keys` may have any value."""
    return inspect_config(hf_config, folder, ignored_keys)[0]


def inspect_config(
    hf_config: Mapping[str, Any], folder: Path, ignored_keys: Collection[str] = ()
) -> tuple[ModelConfig, KeyReport]:
    """Convert a config.json to the section [model], and sort its keys."""
    family = find_family(hf_config, folder)
    model: dict[str, Any] = {}
    try:
        spelled = with_all_spellings(hf_config, family.name)
        root = KeyReader(spelled)
        text = text_config(root, family)
        if reason := quantization_unsupported_reason(plain(text.get(QUANTIZATION_KEY))):
            raise ConfigError(reason)
        defaults = {key: value for key, value in family.default_keys.items() if key not in text}
        text = overlay(text, defaults)
        for entry in family.config_fields:
            model |= entry.read(text)
        report = _classify_config_keys(hf_config, root, family, ignored_keys)
        cfg = config_from_dict({"model": joined_layers(model)})
        check_config(cfg, is_training=False)
    except ConfigError as error:
        raise ConfigError(f"{str(folder)!r} ({family.name}): {error}") from None
    return cfg.model, report


def _classify_config_keys(
    hf_config: Mapping[str, Any], root: KeyReader, family: Family, ignored_keys: Collection[str]
) -> KeyReport:
    """Sort the keys of a config.json whose fields have been read."""
    root.read_keys = spellings_of(root.read_keys, family.name)
    reader = KeyReader(hf_config)
    reader.read_keys = root.read_keys
    reader.nested = {key: inner for key, inner in root.nested.items() if key in hf_config}
    multimodal = multimodal_folder(hf_config, family)
    text_keys = config_known_keys(family.name)
    if quantization := hf_config.get(QUANTIZATION_KEY):
        reader.nested[QUANTIZATION_KEY] = KeyReader(quantization)
    top = text_keys if multimodal is None else multimodal_known_keys(multimodal.model_type)
    paths = () if multimodal is None else tuple(accumulate(multimodal.config_path, "{}.{}".format))
    quantization_keys = quantization_known_keys()
    key_sets = {QUANTIZATION_KEY: quantization_keys} | dict.fromkeys(paths, top)
    key_sets |= {paths[-1]: text_keys, f"{paths[-1]}.{QUANTIZATION_KEY}": quantization_keys} if paths else {}
    reports = [classify_keys(CONFIG_FILE, reader, top, ignored_keys)]
    reports += nested_reports(CONFIG_FILE, reader, key_sets, ignored_keys)
    report = join_reports(CONFIG_FILE, reports)
    classes = hf_config.get("architectures")
    if multimodal is None and isinstance(classes, list) and classes and family.architecture not in classes:
        report = replace(report, ignored=(*report.ignored, f"architectures={classes!r}"))
    return report


def families_for(model: ModelConfig, first: str = "") -> Iterator[Family]:
    """Yield the families whose config.json can express a model exactly, a family with the given name first."""
    ordered = sorted(FAMILIES.values(), key=lambda family: family.name != first)
    return (family for family in ordered if not family_unsupported_reason(family, model))


def family_unsupported_reason(family: Family, model: ModelConfig) -> str:
    """Return the settings of a model that the family's config.json cannot express, or empty if there are none.

    A family can express a model if writing and reading back its config.json gives the same model.
    """
    if reason := foreign_parts_reason(model):
        return reason
    try:
        restored = parse_model_config(family.write(model), Path(family.name))
    except ConfigError as error:
        return str(error)
    sides = ("in this model", "in the family")
    return model_differences(model_sizes(model), replace(restored, init_std=model.init_std), sides=sides)


def foreign_parts_reason(model: ModelConfig) -> str:
    """Return the refusal of a model with parts from outside, which no family has, or empty without such parts."""
    foreign = dict.fromkeys(describe_part(part) for part in parts_in(model) if not is_built_in(type(part)))
    return f"Hugging Face families have no {format_list(list(foreign))}" if foreign else ""


def _read_keys(path: Path) -> dict[str, Any]:
    try:
        keys = read_json(path, MAX_CONFIG_BYTES)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} is not JSON: {error}") from None
    if not isinstance(keys, dict):
        raise ConfigError(f"{str(path)!r} is not a JSON object; repair it or copy it again")
    return keys
