"""Differences between the model and mapping of a recipe and of the run that wrote a checkpoint."""

from collections.abc import Iterator, Mapping
from typing import Any

from moefold.checkpoint.checkpoint_meta import model_of, model_sizes
from moefold.config.base.field import SAME_TENSORS
from moefold.config.base.part import NONE, without_source
from moefold.config.base.part_registry import built_in_kinds
from moefold.config.chosen import chosen_in
from moefold.config.groups.drop import DropScopePart
from moefold.config.groups.router import aux_loss_depends_on_dp
from moefold.config.keys.annotations import keys_with
from moefold.config.keys.paths import flat_settings, part_keys, tables, value_at
from moefold.config.model import ModelConfig
from moefold.config.sections.moe import MoEConfig
from moefold.config.sections.parallel import ParallelConfig


def model_differences(
    stored: dict[str, Any],
    model: ModelConfig,
    reader: ModelConfig | None = None,
    sides: tuple[str, str] = ("there", "here"),
) -> str:
    """Describe how the computation of a stored model (`model_sizes`) differs from `model`, or empty if it does not.

    Args:
        reader: the model whose layers read the weights, if they differ from `model`. Its keys are also compared.
        sides: words for the stored model and for `model`.
    """
    saved = model_of(stored)
    recorded, current = (_settings_of_layers(sizes) for sizes in (stored, model_sizes(model)))
    # Keys missing in a checkpoint of an older version had their defaults, except in a part of another package.
    defaults = _settings_of_layers(model_sizes(saved))
    outside = tuple(f"{key}." for key, kind in recorded.items() if key in defaults and _is_outside(key, kind))
    defaults = {key: value for key, value in defaults.items() if not key.startswith(outside)}
    recorded = defaults | {key: value for key, value in recorded.items() if value != GIVEN}
    unread = _unread_tables(saved) & _unread_tables(reader or model)
    free_keys = keys_with("model", SAME_TENSORS)
    for sizes, layers in ((recorded, saved.decoder_layers), (current, model.decoder_layers)):
        heads = [layer.attention for layer in layers if not layer.attention.is_recurrent]
        if "attention.head_dim" in sizes and heads and not (sizes is recorded and "attention." in outside):
            sizes["attention.head_dim"] = getattr(heads[0], "head_dim", 0)
        sizes["layer_windows"] = [layer.window for layer in layers]
        sizes["layer_chunks"] = [layer.chunk for layer in layers]
    keys = [key for key in (*recorded, *current) if key not in free_keys and not key.startswith(tuple(unread))]
    return _differences({key: recorded.get(key) for key in keys}, current, sides)


def mapping_notes(
    model: ModelConfig, moe: MoEConfig, parallel: ParallelConfig, before: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a note on each setting whose results depend on the mapping, where a checkpoint has another one.

    Args:
        before: the section [parallel] of the checkpoint, which may lack keys.
    """
    if not {"world_size", "tp", "cp", "pp"} <= before.keys():
        return
    dp = before["world_size"] // (before["tp"] * before["cp"] * before["pp"])
    if model.has_moe_layers and aux_loss_depends_on_dp(moe) and dp != parallel.dp:
        yield (
            f"moe.aux_kind='global_batch' depends on dp, which was {dp} and is {parallel.dp}: the loss continues with "
            "another grouping of micro-batches; 'last_global_batch' does not depend on it"
        )
    scope = chosen_in(moe, DropScopePart)
    context = str(parallel.context)
    was = _sample_split(before["tp"], before["cp"], before.get("context", context))
    now = _sample_split(parallel.tp, parallel.cp, context)
    if moe.capacity_factor > 0 and model.has_moe_layers and not scope.is_shared and was != now:
        yield (
            f"moe.drop_scope={scope.kind!r} depends on the ranks that share a sample, which were {was} and are {now}: "
            "other tokens may be dropped from here on; 'full_sequence' does not depend on them"
        )


def _sample_split(tp: int, cp: int, context: str) -> str:
    """Return the settings that say which tokens of a sample a rank has."""
    return f"tp={tp} cp={cp} context={context!r}" if cp > 1 else f"tp={tp} cp=1"


def _is_outside(key: str, kind: Any) -> bool:
    """Return whether the value of a key of [model] is the kind of a part from outside of this package."""
    group = part_keys().get(f"model.{key}")
    return group is not None and kind not in (*built_in_kinds(group), NONE, GIVEN)


GIVEN = "given"
"""Text for a present table without kinds in a message."""


def _settings_of_layers(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a stored model by their paths in [model]."""
    plain = {f"model.{key}": without_source(value) for key, value in sizes.items()}
    flat = flat_settings(plain) | {
        name: GIVEN for name in tables() if isinstance(value_at(name, {"model": sizes}), dict)
    }
    flat |= {name: kind for name, kind in flat_settings(plain).items() if name in part_keys()}
    return {name.removeprefix("model."): NONE if value is None else value for name, value in flat.items()}


def _unread_tables(model: ModelConfig) -> set[str]:
    """Return the keys, and prefixes of keys, that no layer of a model reads."""
    absent = {
        "attention.": model.has_softmax_attention,
        "linear_attention": model.has_linear_attention,
        "rope.": model.has_rope,
        "ffn.dense": model.has_dense_layers,
        "ffn.moe": model.has_moe_layers,
    }
    return {name for name, is_there in absent.items() if not is_there}


def _differences(stored: dict[str, Any], current: dict[str, Any], sides: tuple[str, str] = ("there", "here")) -> str:
    changes = {key: (value, current.get(key)) for key, value in stored.items() if current.get(key) != value}
    if "layers" in changes:
        for key in ("layer_windows", "layer_chunks"):
            changes.pop(key, None)
    # A different table is reported without its settings.
    changes = {key: pair for key, pair in changes.items() if not any(key.startswith(f"{table}.") for table in changes)}
    return "; ".join(f"{key} {before!r} {sides[0]}, {now!r} {sides[1]}" for key, (before, now) in changes.items())
