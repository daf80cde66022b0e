"""Table of the keys that configuration classes of other libraries declare, with their defaults. Torch-free to read.

tools/declared_keys.py makes it from the installed transformers and PEFT.
"""

import dataclasses
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("declared_keys.json")


@dataclasses.dataclass(frozen=True)
class DeclaredKeys:
    """Keys of the files of other libraries.

    Attributes:
        versions: of the libraries that the table was made from.
        base: keys of every config.json, which the base class of transformers declares, with their defaults.
        generation: keys of generation_config.json.
        adapter: keys of PEFT's LoraConfig.
        others: keys that transformers' classes of causal models of other families declare.
        families: for each `model_type` its own keys.
        aliases: for each `model_type` other spellings of keys.
        stacked_by_peft: for each `model_type` whose adapters of single experts PEFT stacks when it loads them, the last
            names of the modules that it takes for experts.
    """

    versions: Mapping[str, str]
    base: Mapping[str, Any]
    generation: Mapping[str, Any]
    adapter: Mapping[str, Any]
    others: frozenset[str]
    families: Mapping[str, Mapping[str, Any]]
    aliases: Mapping[str, Mapping[str, str]]
    stacked_by_peft: Mapping[str, list[str]]


@lru_cache(maxsize=1)
def declared_keys() -> DeclaredKeys:
    """Read the table."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    return DeclaredKeys(**table | {"others": frozenset(table["others"])})
