"""Differences between a recipe and the run that wrote a checkpoint: its model, samples and mapping."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from moefold.checkpoint.checkpoint_meta import CheckpointMeta, method_of_samples, model_of, model_sizes
from moefold.config.base.field import SAME_TENSORS
from moefold.config.base.part import NONE, keys_of, without_source
from moefold.config.base.part_registry import built_in_kinds
from moefold.config.chosen import chosen_in
from moefold.config.groups.alignment import AlignmentPart
from moefold.config.groups.drop import DropScopePart
from moefold.config.groups.router import aux_loss_depends_on_dp
from moefold.config.keys.annotations import keys_with
from moefold.config.keys.paths import flat_settings, part_keys, tables, value_at
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.moe import MoEConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.data.fingerprint import LOCATION_KEYS, DataFiles
from moefold.data.input_paths import SKIPPED, file_differences, separate_dropped_files
from moefold.message_text import format_list

SampleOrder = dict[str, Any]
"""The settings that determine the text of sample n. The batch size is not among them."""


def sample_order(cfg: Config) -> SampleOrder:
    """Return the order of the samples of a recipe."""
    order = {"seed": cfg.run.seed, "seq_len": cfg.train.seq_len, **keys_of(cfg.data)}
    # Site n of several reads every count-th sample.
    order |= {"sites.count": cfg.sites.count, "sites.number": cfg.sites.number if cfg.sites.count > 1 else -1}
    order[AlignmentPart.key] = method_of_samples(without_source(keys_of(cfg.align)["method"]))
    # The list of dropped files is compared instead.
    del order["corrupt"]
    return json.loads(json.dumps(order))


def data_order_change(
    meta: CheckpointMeta,
    order: SampleOrder,
    fingerprints: Mapping[str, str] | None = None,
    *,
    drops_files: bool = False,
) -> str:
    """Describe how the samples of a checkpoint's run differ from the samples of a recipe. Empty: they are the same.

    Files are compared by their content: other paths with the same fingerprints are not a difference.

    Args:
        fingerprints: current fingerprints of the data files. None: compare only the settings.
        drops_files: token files that have become corrupt or missing are not a difference (data.corrupt="skip"): see
            `dropped_files`.
    """
    current = _without_wanted_reward(order)
    recorded = _recorded_order(meta)
    if not meta.data_files:
        return _differences(recorded, current)
    settings = {key: value for key, value in recorded.items() if key not in LOCATION_KEYS}
    if _differences(settings, current):
        return _differences(recorded, current)
    if fingerprints is None:
        return ""
    locations = {key: recorded[key] for key in LOCATION_KEYS}
    old = DataFiles.of(recorded, meta.data_files)
    new = DataFiles.of(current, fingerprints)
    if unmatched := old.unmatched_locations(new, recorded, current):
        return _differences({key: recorded[key] for key in unmatched}, current)
    fingerprints = old.comparable(new)
    meta = with_recipe_file_names(meta, order, fingerprints)
    dropped, more = _classify_differences(meta, fingerprints)
    if recorded["path"] != current["path"]:
        # A damaged file keeps its place: a different file at a new place is not damage.
        changed = [
            name for name in dropped if name not in meta.data_lost and fingerprints.get(name, SKIPPED) != SKIPPED
        ]
        more |= {name: dropped.pop(name) for name in changed}
    if drops_files and any(name not in dropped for name in meta.data_tokens):
        dropped = {}
    unmatched = [*dropped.values(), *more.values()]
    return "; ".join(filter(None, [_differences(locations, current), format_list(unmatched)])) if unmatched else ""


def with_recipe_file_names(meta: CheckpointMeta, order: SampleOrder, fingerprints: Mapping[str, str]) -> CheckpointMeta:
    """Return the metadata of a checkpoint with the names that its data files have in the recipe."""
    names = DataFiles.of(_recorded_order(meta), meta.data_files).current_names(DataFiles.of(order, fingerprints))
    data = {
        field: {names.get(name, name): value for name, value in getattr(meta, field).items()}
        for field in ("data_files", "data_tokens", "data_lost")
    }
    return replace(meta, states=meta.states | {"data": meta.state_of("data") | data})


def moved_data_message(meta: CheckpointMeta, order: SampleOrder) -> str:
    """Return a message about data of the same content at other paths than in a checkpoint, or empty if no data moved.

    Args:
        order: `sample_order` of the recipe. `data_order_change` returns "" for it.
    """
    recorded = _recorded_order(meta)
    moved_keys = [key for key in LOCATION_KEYS if recorded[key] != order[key]]
    names = {"path": "data", "tokenizer": "data.tokenizer", "chat_template": "data.chat_template"}
    lines = [f"{names[key]} at {order[key]!r} has the same content as {recorded[key]!r}" for key in moved_keys]
    return f"{'; '.join(lines)}: continuing at sample {meta.samples}" if lines else ""


def _recorded_order(meta: CheckpointMeta) -> dict[str, Any]:
    """Return `sample_order` of a checkpoint's run."""
    # Keys missing in a checkpoint of an older version had their defaults.
    return _without_wanted_reward(sample_order(Config()) | meta.order)


def _without_wanted_reward(order: Mapping[str, Any]) -> dict[str, Any]:
    """Return an order without the wanted reward of generation, which changes no sample."""
    method = order[AlignmentPart.key]
    if isinstance(method, dict) and "template" in method:
        method = {key: value for key, value in method.items() if key != "want"}
    return {**order, AlignmentPart.key: method}


def dropped_files(meta: CheckpointMeta, fingerprints: Mapping[str, str]) -> dict[str, str]:
    """Return the token files that have changed or that the run dropped earlier, with reasons."""
    dropped = _classify_differences(meta, fingerprints)[0] | meta.data_lost
    return {name: reason for name, reason in dropped.items() if name in meta.data_tokens}


def _classify_differences(
    meta: CheckpointMeta, fingerprints: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the lost token files and the other differences, each as {name: description}."""
    dropped, more = separate_dropped_files(
        meta.data_files, file_differences(meta.data_files, fingerprints), meta.data_tokens
    )
    left_out = {name: f"data file {name} was left out ({reason})" for name, reason in meta.data_lost.items()}
    return dropped | left_out, more


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
