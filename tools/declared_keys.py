"""Make the table of keys that transformers and PEFT declare, from the installed libraries.

python -m tools.declared_keys > src/moefold/convert/families/declared_keys.json
"""

import dataclasses
import importlib
import json
import sys
from collections.abc import Mapping
from typing import Any


def make_table(model_types: tuple[str, ...]) -> dict[str, Any]:
    """Make the table from the installed libraries.

    Args:
        model_types: types whose keys are listed one by one; types that transformers does not know are left out.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    peft: Any = importlib.import_module("peft")
    base = set(transformers.PretrainedConfig().to_dict())
    known = [name for name in model_types if name in CONFIG_MAPPING]
    families = {name: family_keys(name) for name in known}
    listed = set().union(*families.values()) | base
    others = {
        field.name
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if name in CONFIG_MAPPING and dataclasses.is_dataclass(CONFIG_MAPPING[name])
        for field in dataclasses.fields(CONFIG_MAPPING[name])
    }
    return {
        "versions": {"transformers": transformers.__version__, "peft": peft.__version__},
        "generation": _as_json(transformers.GenerationConfig().to_dict()),
        "adapter": _as_json(peft.LoraConfig().to_dict()),
        "others": sorted(others - listed),
        "families": families,
        "aliases": {name: dict(CONFIG_MAPPING[name].attribute_map) for name in known},
        "stacked_by_peft": _stacked_by_peft(known),
    }


def _stacked_by_peft(model_types: list[str]) -> dict[str, list[str]]:
    names = vars(importlib.import_module("peft.utils.transformers_weight_conversion"))
    targets = names["_MOE_TARGET_MODULE_MAPPING"]
    patterns = {name: names["_MODEL_TO_CONVERSION_PATTERN"].get(name) for name in model_types}
    return {name: sorted(targets[pattern]) for name, pattern in patterns.items() if pattern in targets}


def family_keys(model_type: str) -> dict[str, Any]:
    """Return the keys that transformers' class of a `model_type` declares beyond the base class, with defaults."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    defaults = _defaults(kind())
    declared = {field.name: field.default for field in dataclasses.fields(kind)} | defaults
    names = declared.keys() - transformers.PretrainedConfig().to_dict().keys() - {*kind.sub_configs}
    return {name: defaults.get(name) for name in sorted(names)}


def _defaults(config: Any) -> dict[str, Any]:
    """Return the keys and values that a configuration writes, without the version."""
    found = _as_json(config.to_dict())
    found.pop("transformers_version", None)
    return found


def _as_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys in order, as a JSON file would give them."""
    found: dict[str, Any] = json.loads(json.dumps(keys, default=lambda value: sorted(value), sort_keys=True))
    return found


def format_table(table: Mapping[str, Any]) -> str:
    """Return the table as text, one line for each family."""
    lines = []
    for part, content in table.items():
        if part in ("families", "aliases", "stacked_by_peft"):
            rows = [f"  {json.dumps(name)}: {json.dumps(keys)}" for name, keys in content.items()]
            lines.append(f"{json.dumps(part)}: {{\n" + ",\n".join(rows) + "\n }")
        else:
            lines.append(f"{json.dumps(part)}: {json.dumps(content)}")
    return "{\n " + ",\n ".join(lines) + "\n}\n"


if __name__ == "__main__":
    from moefold.convert.families.families import MODEL_TYPES

    sys.stdout.write(format_table(make_table(tuple(sorted(MODEL_TYPES)))))
