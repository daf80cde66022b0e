"""Order of the samples of a run, and how the data of a checkpoint differs from the data of a recipe."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moefold.checkpoint.checkpoint_meta import CheckpointMeta, method_of_samples
from moefold.config.base.part import keys_of, without_source
from moefold.config.groups.alignment import AlignmentPart
from moefold.config.schema import Config
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
    """Describe how the samples of a checkpoint's run differ from a recipe's. Empty means that they are the same.

    Files are compared by their content: other paths with the same fingerprints are not a difference.

    Args:
        fingerprints: current fingerprints of the data files. None means compare only the settings.
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


def _differences(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    changed = {key: value for key, value in recorded.items() if current.get(key) != value}
    return "; ".join(f"{key} {value!r} there, {current.get(key)!r} here" for key, value in changed.items())
