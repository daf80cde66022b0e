"""Registry of the model families of Hugging Face folders. Torch-free."""

import pkgutil
from importlib import import_module

from moefold.convert import family_files
from moefold.convert.decoder_families import DECODER_FAMILIES
from moefold.convert.family import Family

FILED_FAMILIES: dict[str, Family] = {
    name: import_module(f"{family_files.__name__}.{name}").FAMILY
    for name in sorted(found.name for found in pkgutil.iter_modules(family_files.__path__))
}
"""Family of each file of `family_files`."""

FAMILIES = DECODER_FAMILIES | {family.name: family for family in FILED_FAMILIES.values() if not family.exported_as}
"""Families that an export may write, in the order in which it tries them without --family."""

UNSUPPORTED_FAMILIES = {
    "deepseek_v4": "hyper-connections (several residual streams, mixed at each sublayer), attention over compressed "
    "keys with one key-value head and a grouped output projection, and experts chosen by a table of token ids",
    "granitemoehybrid": "Mamba layers",
    "nemotron_h": "Mamba layers",
    "doge": "a router that chooses over all tokens of a batch, so that a token depends on later ones, and experts that "
    "are rows of an embedding",
    "jetmoe": "experts that are heads of attention, to which tokens are dispatched",
    "unlimited_ocr": "attention to other keys in the prompt than while text is generated, so that no loss of a "
    "sequence is defined",
    "nllb-moe": "an encoder and a decoder",
    "switch_transformers": "an encoder and a decoder",
    "openai_privacy_filter": "attention to later tokens (a classifier of tokens)",
    "diffusion_gemma": "attention to later tokens of a block (text by diffusion)",
}
"""Families of mixture-of-experts models that are refused by name, with the parts that moefold does not have."""

MODEL_TYPES = {name: family for family in FAMILIES.values() for name in family.model_types}
MODEL_TYPES |= {
    name: family for family in FILED_FAMILIES.values() for name in family.model_types if name not in MODEL_TYPES
}
"""Every family by each `model_type` that means it."""
