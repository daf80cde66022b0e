"""The rows of the embedding where no recipe says how many: those that the tokenizer of the data needs."""

import math
from dataclasses import replace

from moefold.config.keys import default_of
from moefold.config.presets import load_preset
from moefold.config.schema import Config
from moefold.errors import ConfigError

VOCAB_MULTIPLE = 64
"""The rows are a multiple of this, which tensor parallelism of any usual degree divides, and which kernels like."""


def infer_vocab_size(cfg: Config, explicit_keys: frozenset[str]) -> tuple[Config, str]:
    """Take model.vocab_size from data.tokenizer where neither the recipe, an override nor a preset gives it.

    The size is that of the tokenizer or the default, whichever is larger, rounded up to a multiple of 64 and of
    parallel.tp. The tokenizer "bytes" and data without text keep the default.

    Args:
        cfg: a valid recipe.
        explicit_keys: the keys that the recipe and the overrides set, as "section.key".

    Returns:
        The recipe, and what was changed in words; empty if nothing was.

    Raises:
        ConfigError: the tokenizer.json is missing or broken.
    """
    data, model = cfg.data, cfg.model
    if data.tokenizer in ("", "bytes") or data.kind == "synthetic" or "model.vocab_size" in explicit_keys:
        return cfg, ""
    if model.preset and "vocab_size" in load_preset(model.preset):
        return cfg, ""
    # The tokenizers package is not needed where a recipe gives the size.
    from moefold.data.path import existing_path
    from moefold.data.tokenizer import JsonTokenizer

    try:
        num_ids = JsonTokenizer(existing_path("data.tokenizer", data.tokenizer)).vocab_size
    except ConfigError as error:
        raise ConfigError(f"{error}; model.vocab_size is not set, so its size is read from the tokenizer") from error
    multiple = math.lcm(VOCAB_MULTIPLE, max(1, cfg.parallel.tp))
    size = math.ceil(max(num_ids, default_of("model", "vocab_size")) / multiple) * multiple
    if size == model.vocab_size:
        return cfg, ""
    note = (
        f"model.vocab_size is {size}: data.tokenizer={data.tokenizer!r} has {num_ids} ids, rounded up to a multiple "
        f"of {multiple}"
    )
    return replace(cfg, model=replace(model, vocab_size=size)), note
