"""Upgrade of recipes of earlier versions, which have flat keys, to tables of parts."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from moefold.config.base.part_registry import find_part, kinds
from moefold.config.layer_words import parse_layers, repeat_layers, spell_layers
from moefold.config.part_table import NONE, shown_value, toml_value
from moefold.config.suggestions import annotation_at, choices_of, default_of, group_at, join_with_or, kind_settings
from moefold.config.tree import parsed_value, put, value_at
from moefold.errors import ConfigError

FORMAT = 2
"""Format of recipes and checkpoints that this version writes. It reads older ones."""
FORMAT_KEY = "format"
"""Key above the sections of a recipe with its format."""
KIND = "kind"


class MovedKey(NamedTuple):
    """Place of a flat key of earlier versions: a setting of the part that another key chooses."""

    key: str
    """Key of the part, as "section.key"."""
    setting: str
    """Setting of the part. `KIND`: a flag, which chooses the kind with the old kind in its name."""
    kinds: tuple[str, ...] = ()
    """Kinds that read the setting; empty: the built-in kinds that have it."""

    def __str__(self) -> str:
        """Return the path of an override."""
        return f"{self.key}.{self.setting}"


_PLACES = """
train.lr_schedule min_lr decay_steps
train.optimizer beta1 beta2 eps moment_dtype groups:muon_groups momentum:muon_momentum ns_steps:muon_ns_steps
align.method reward threshold beta weight_cap template want gamma desirable_weight undesirable_weight
moe.choice iterations:sinkhorn_iterations share:skew
parallel.dispatcher receive_factor
parallel.schedule path:schedule_csv
parallel.context placement hosts:attention_hosts tolerance:attention_tolerance pool:attention_pool block:attention_block
rl.objective clip_low clip_high
rl.correction low:correction_low high:correction_high
model residual:norm_placement
model.rope scaling:rope_scaling theta:rope_theta interleaved:rope_interleaved
model.ffn.moe router:router_score activation:moe_activation num_experts top_k zero_experts active_experts
model.ffn.moe intermediate_size:moe_ffn_hidden_size latent_size:moe_hidden_size bias:moe_bias
model.ffn.moe probs_on_input:router_probs_on_input shortcut:moe_shortcut
model.attention qk_norm gate:attention_gate num_heads:num_attention_heads num_kv_heads:num_query_groups head_dim
model.attention q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim scale_latents:mla_scale_latents
model.attention qkv_bias output_bias:attention_output_bias sinks:attention_sinks scale:attention_scale rope_fraction
model.ffn.moe.router softmax:router_softmax normalize:router_normalize scaling_factor:router_scaling_factor num_groups
model.ffn.moe.router top_groups expert_bias bias:router_bias
model.attention.temperature scale:nope_temperature_scale tokens:nope_temperature_tokens
model.attention.indexer top_k:index_topk num_heads:index_heads head_dim:index_head_dim
model.attention.indexer rope_interleaved:index_rope_interleaved
model.ffn.moe.shared intermediate_size:shared_expert_ffn_hidden_size gate:shared_expert_gate
model.attention.qk_norm over:qk_norm_width after_rope:qk_norm_after_rope weight:qk_norm_weight in_nope:qk_norm_nope
model.attention.gate per:attention_gate_width
model.linear_attention num_key_heads:linear_num_key_heads num_value_heads:linear_num_value_heads
model.linear_attention key_head_dim:linear_key_head_dim value_head_dim:linear_value_head_dim
model.linear_attention conv_kernel:linear_conv_kernel bias:linear_conv_bias gate_rank:linear_gate_rank
model.linear_attention full_rank_gates:linear_full_rank_gates decay_bound:linear_decay_bound
model.ffn.dense intermediate_size:ffn_hidden_size
model.ffn.moe.activation alpha:swiglu_alpha limit:swiglu_limit
model.ffn.moe.router.softmax jitter:sparsemixer_jitter
model.norm eps:norm_eps zero_centered:zero_centered_norms
model.residual multiplier:residual_multiplier
model.rope.scaling factor:rope_scaling_factor original_seq_len:rope_original_seq_len short_factors:rope_short_factors
model.rope.scaling long_factors:rope_long_factors short_mscale:rope_short_mscale long_mscale:rope_long_mscale
model.rope.scaling low_freq_factor:rope_low_freq_factor high_freq_factor:rope_high_freq_factor
model.rope.scaling beta_fast:rope_beta_fast beta_slow:rope_beta_slow truncate:rope_truncate
model.rope.scaling attention_factor:rope_attention_factor mscale:rope_mscale mscale_all_dim:rope_mscale_all_dim
"""
"""Flat keys by their new tables in the same section: "setting:key", or "setting" with the same name.

Keys that choose a kind or a table come before its settings.
"""
LAYERS = "model.layers"
PATTERNS = {
    "layer_pattern": ("ffn", {"D": "dense", "M": "moe"}),
    "attention_pattern": ("attention", {"F": "full", "W": "window", "C": "chunk", "L": "linear"}),
    "rope_pattern": ("position", {"R": "rope", "N": "nope"}),
    "index_pattern": ("selection", {"F": "own", "S": "shared"}),
}
"""Former keys of patterns: the words of their letters in `model.layers`, and the field of `LayerWords`."""
MOVED = {
    f"{line.split()[0].partition('.')[0]}.{word.rpartition(':')[2]}": MovedKey(line.split()[0], word.partition(":")[0])
    for line in _PLACES.split("\n")
    for word in line.split()[1:]
} | {
    "train.weight_decay": MovedKey("train.optimizer", "weight_decay", ("adamw", "muon", "spsa")),
    "train.spsa_eps": MovedKey("train.optimizer", "eps", ("spsa",)),
    "train.spsa_max_gradient": MovedKey("train.optimizer", "max_gradient", ("spsa",)),
    "train.gradient_delay": MovedKey("train.optimizer", KIND, ("delayed_adamw", "delayed_muon")),
    "train.delay_correction": MovedKey("train.optimizer", "correction", ("delayed_adamw", "delayed_muon")),
    "moe.llep_threshold": MovedKey("parallel.dispatcher", "threshold"),
    "moe.llep_capacity": MovedKey("parallel.dispatcher", "capacity"),
    "moe.llep_min_tokens": MovedKey("parallel.dispatcher", "min_tokens"),
    "model.upcycle_from": MovedKey("checkpoint.upcycle", "dense"),
    "model.upcycle_router": MovedKey("checkpoint.upcycle", "router_init"),
    "model.upcycle_scaling": MovedKey("checkpoint.upcycle", "scaling"),
    "model.upcycle_noise": MovedKey("checkpoint.upcycle", "noise"),
    "moe.sparsemixer_sampling": MovedKey("model.ffn.moe.router.softmax", "samples"),
    "sites.topology": MovedKey("sites.method", KIND, ("noloco",)),
    "sites.experts": MovedKey("sites.method", KIND, ("spes",)),
    "sites.density": MovedKey("sites.method", "density", ("sparseloco",)),
    "sites.values": MovedKey("sites.method", "bits", ("sparseloco",)),
    "sites.penalty": MovedKey("sites.method", "penalty", ("co2",)),
    "sites.clip": MovedKey("sites.method", "clip", ("co2",)),
    "sites.merge_experts": MovedKey("sites.method", "merge_experts", ("spes",)),
    "sites.merge_every": MovedKey("sites.method", "merge_every", ("spes",)),
    "sites.merge_until": MovedKey("sites.method", "merge_until", ("spes",)),
}
MOVED |= {f"model.{key}": MovedKey("model", "layers") for key in ("num_layers", *PATTERNS)}
"""Place of each flat key, as "section.key"."""
OFF = {
    *("model.nope_temperature_scale", "model.index_topk", "model.shared_expert_ffn_hidden_size", "model.upcycle_from")
}
"""Flat keys whose value 0 or "" means no table."""
SITES_OFF = {"topology": "all", "experts": "average", "density": 1.0, "penalty": False, "clip": 0.0}
"""Flat keys of [sites] that methods replace, with their values without effect."""
SITES_MORE = {"values": 32, "merge_experts": 0.0}
"""Former defaults of other flat keys of [sites], which differ from the values of some methods."""


def check_format(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the sections of a recipe without its format.

    Args:
        name: the file, for messages.

    Raises:
        ConfigError: the format is newer than this version of moefold.
    """
    version = tree.get(FORMAT_KEY, FORMAT)
    if type(version) is not int or not 1 <= version <= FORMAT:
        way_out = "update it" if type(version) is int and version > FORMAT else f"write {FORMAT_KEY} = {FORMAT}"
        raise ConfigError(f"{name} has format {version!r}, and this version of moefold reads up to {FORMAT}; {way_out}")
    return {key: value for key, value in tree.items() if key != FORMAT_KEY}


def upgraded(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the sections of a recipe with flat keys moved to tables of parts, and the flat keys that no part reads.

    Args:
        tree: sections, unchecked. Tables of parts are kept.
    """
    sections = {name: dict(keys) if isinstance(keys, dict) else keys for name, keys in tree.items()}
    base = _preset_of(sections)
    if isinstance(model := sections.get("model"), dict):
        _put_layers(model, base.get("model", {}))
    is_clear = not isinstance(sites := sections.get("sites"), dict) or _put_site_method(sites)
    unread = []
    for name, place in MOVED.items():
        section, _, key = name.partition(".")
        keys = sections.get(section)
        if str(place) == LAYERS or not isinstance(keys, dict) or key not in keys or (keys is sites and not is_clear):
            continue
        move = _move_kind if place.setting == KIND else _move_setting
        if not move(name, keys.pop(key), sections, base):
            unread.append(name)
    return sections, unread


def _move_kind(name: str, value: Any, sections: dict[str, Any], base: Mapping[str, Any]) -> bool:
    """Set the kind that a flat key enables; return whether a part reads the key."""
    place = MOVED[name]
    kind = _kind_at(place.key, sections, base)
    kind_there = next((candidate for candidate in place.kinds if candidate.endswith(f"_{kind}")), "")
    if value and kind_there:
        put(sections, place.key.split("."), kind_there)
        return True
    return bool(value) and kind in place.kinds


def _move_setting(name: str, value: Any, sections: dict[str, Any], base: Mapping[str, Any]) -> bool:
    """Set the setting or the table of a flat key; return whether a part reads the key."""
    place = MOVED[name]
    path = str(place)
    owner = place.key
    kind = _kind_at(owner, sections, base)
    if annotation_at(path) is not None and isinstance(value, bool):
        value = {} if value else NONE
    elif name in OFF and not value:
        path, value = owner, NONE
    if not _is_read(owner if name in OFF else path, sections, base, place.kinds):
        return False
    if value != NONE or value_at(path, base) is not None:
        owner_path = owner.split(".", 1)
        if group_at(owner) and value != NONE and (not name.startswith("model.") or default_of(*owner_path) is None):
            put(sections, [*owner.split("."), KIND], kind or choices_of(*owner_path)[0])
        put(sections, path.split("."), value)
    return True


def _preset_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section [model] of the preset of a recipe; empty: no preset, or an unknown one."""
    model = tree.get("model")
    name = model.get("preset") if isinstance(model, dict) else ""
    if not isinstance(name, str) or not name:
        return {}
    # Without a preset, reading a checkpoint needs no files of presets.
    from moefold.config.presets import load_preset, preset_names

    return {"model": load_preset(name)} if name in preset_names() else {}


def _put_site_method(sites: dict[str, Any]) -> bool:
    """Set the method that flat keys of [sites] need, and the keys that it would change; return whether it was set."""
    method = sites.get("method", "mean")
    before = method.get(KIND) if isinstance(method, dict) else method
    method_of = {key: MOVED[f"sites.{key}"].kinds[0] for key in (*SITES_OFF, *SITES_MORE)}
    # Absent keys have the defaults of the given method, which enable it. For another method they count as off.
    silent = {key: None if method_of[key] == before else off for key, off in SITES_OFF.items()}
    on = {method_of[key] for key, off in SITES_OFF.items() if sites.get(key, silent[key]) != off}
    after = next(iter(on), "mean" if before in method_of.values() else before)
    if len(on) > 1 or (after != before and any(kind not in kinds("site_method") for kind in (before, after))):
        return False
    if after == before:
        return True
    period = sites.get("every", default_of("sites", "every"))
    old, new = (find_part("site_method", kind)().values(period) for kind in (before, after))
    defaults = {key: default_of("sites", key) for key in {**old, **new}}
    settings = {key: off for key, off in {**SITES_OFF, **SITES_MORE}.items() if method_of[key] == after}
    settings |= {key: old.get(key, off) for key, off in defaults.items() if new.get(key, off) != old.get(key, off)}
    sites |= {"method": after} | {key: value for key, value in settings.items() if key not in sites}
    return True


def _put_layers(model: dict[str, Any], preset: Mapping[str, Any]) -> None:
    """Replace the number of layers and their patterns by words. Unknown patterns stay, to be refused later."""
    # Checkpoints have the pattern repeated to the length of the model.
    model.pop("layer_kinds", None)
    former = {key: model[key] for key in ("num_layers", *PATTERNS) if key in model}
    if not former:
        return
    try:
        rows = parse_layers(model.get("layers", preset.get("layers", 4)))
        rows = repeat_layers(rows, len(parse_layers(former.get("num_layers", len(rows)))))
        for key, (column, words) in PATTERNS.items():
            if key in former:
                cells = _expanded(former[key], words, len(rows))
                rows = tuple(row._replace(**{column: cells[i % len(cells)]}) for i, row in enumerate(rows))
    except (KeyError, TypeError, ValueError):
        return
    for key in former:
        del model[key]
    model["layers"] = spell_layers(rows)


def _expanded(pattern: str, words: Mapping[str, str], num_layers: int) -> list[str]:
    """Return the words of a pattern of letters with counts, such as "D3M2".

    Raises:
        KeyError: unknown letter.
        ValueError: another form, or longer than the model.
    """
    runs = [(letter, int(count or 1)) for letter, count in re.findall(r"([A-Z])(\d{0,5})", pattern)]
    counts = [count for _, count in runs]
    if not re.fullmatch(r"([A-Z]\d{0,5})+", pattern) or not all(counts) or sum(counts) > num_layers:
        raise ValueError(f"unexpected pattern {pattern!r}")
    return [words[letter] for letter, count in runs for _ in range(count)]


def _kind_at(path: str, tree: Any, base: Any) -> str | None:
    """Return the kind of a part in a recipe, its preset or by default; "" without kinds, None without a table."""
    section, _, key = path.partition(".")
    if not key:
        return ""
    values = [value_at(path, tree), value_at(path, base), default_of(section, key)]
    for value in values:
        kind = value.get(KIND) if isinstance(value, dict) else getattr(value, KIND, value)
        if kind == NONE and NONE not in choices_of(section, key):
            return None
        if isinstance(kind, str):
            return kind
    return None if values == [None] * 3 else next(iter(choices_of(section, key)), "")


def _is_read(path: str, tree: Any, base: Any, kinds: tuple[str, ...] = ()) -> bool:
    """Return whether the parts of a recipe read a key of `kinds`; empty: of the built-in kinds with the setting."""
    owner = path.rpartition(".")[0]
    if not owner.count("."):
        return True
    kind = _kind_at(owner, tree, base) if _is_read(owner, tree, base) else None
    kinds = kinds or kind_settings().get(path, ())
    return kind is not None and (kind in kinds if kinds else path in kind_settings())


def upgraded_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by "section.key" with flat keys moved to tables of parts, like `upgraded`."""
    tree: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, _, key = name.partition(".")
        tree.setdefault(section, {})[key] = value
    return {f"{section}.{key}": value for section, keys in upgraded(tree)[0].items() for key, value in keys.items()}


_FORMER_STATES = {
    "position": ("step", "samples", "tokens", "tokens_consumed"),
    "weights": ("moment_updates",),
    "evaluation": ("eval_loss",),
    "replica_check": ("checked_step",),
    "data": ("stream", "data_files", "data_tokens", "data_lost", "rl"),
}
"""Fields of checkpoints up to 0.2.0 by the object whose state they are now."""


def states_by_object(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a checkpoint up to 0.2.0, with the state of each object moved to its name in "states".

    Raises:
        TypeError: a field has another type.
    """
    flat = {name: value for name, value in fields.items() if value is not None}
    states = {name: {key: flat.pop(key) for key in keys if key in flat} for name, keys in _FORMER_STATES.items()}
    states |= {name: flat.pop(name) for name in ("guard", "schedule", "lora", "sites") if name in flat}
    for name in ("guard", "schedule"):
        if not isinstance(states.get(name, {}), dict):
            raise TypeError(f"{name} is not an object")
    guard = states.get("guard", {})
    states["position"]["skipped"] = guard.get("left_out", [])
    states["weights"].setdefault("moment_updates", states["position"].get("step", 0) - guard.get("num_skipped", 0))
    return flat | {"states": states | {"schedule": upgraded_keys(states.get("schedule", {}))}}


def flat_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by "section.key", parts as their kinds, and settings of tables by "section.key.setting".

    Args:
        values: values of `keys_of` by "section.key".
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and name.partition(".")[2] and ("kind" in value or annotation_at(name) is not None):
            kind = {name: value["kind"]} if "kind" in value else {}
            flat |= kind | flat_settings({f"{name}.{key}": entry for key, entry in value.items() if key != "kind"})
        else:
            flat[name] = value
    return flat


def moved_key_refusal(tree: Mapping[str, Any], name: str) -> str:
    """Return the refusal of a flat key in a recipe, with the table that it belongs to.

    Args:
        tree: the sections of the recipe, unchecked.
        name: a key of MOVED.
    """
    place = MOVED[name]
    section, _, key = name.partition(".")
    sections, unread = upgraded(tree)
    owners = place.kinds or kind_settings().get(str(place), ())
    key_of = f"a key of {join_with_or(list(map(repr, owners)))}" if owners else f"a key of {place.key}"
    if key in sections[section]:
        if str(place) == LAYERS:
            return f'{name} is {place} now: write the layers by name, such as {place} = "3 dense, 58 moe"'
        return f"{name} is {place} now, {key_of}, and no installed method does all of [sites]; leave out a part"
    if name in unread:
        kind = _kind_at(place.key, sections, _preset_of(sections))
        owner_kind = f"not of {kind!r}" if kind else "that is absent"
        return f"{name} is {place} now, {key_of}, and {owner_kind}; leave it out"
    path = place.key if name in OFF and not tree[section][key] else str(place)
    owner = path if path.startswith("model.") else ".".join(path.split(".")[:2])
    table = f"{owner} = {toml_value(value_at(owner, sections))}"
    return f"{name} is {place} now: write {table}, or run moefold recipe upgrade FILE"


def moved_override_refusal(name: str, text: str, tree: Mapping[str, Any]) -> str:
    """Return the refusal of an override of a flat key.

    Args:
        name: a key of MOVED.
        text: its value on the command line.
        tree: the sections of the recipe to override, unchecked.
    """
    needs_tree = str(MOVED[name]) == LAYERS or name.startswith("sites.")
    word = upgraded_word(f"{name}={text}", tree) if needs_tree else _word(name, text)
    return f"{name} is {MOVED[name]} now: write {word}"


def _word(name: str, text: str) -> str:
    """Return an override of a flat key, rewritten to the path of its table."""
    place = MOVED[name]
    if place.setting == KIND:
        return f"{place.key}={join_with_or(list(place.kinds))}"
    if annotation_at(str(place)) is not None and text in ("true", "false"):
        return f"{place}={'{}' if text == 'true' else NONE}"
    return f"{place.key}={NONE}" if name in OFF and text.rstrip(".0") == "" else f"{place}={text}"


def upgraded_word(word: str, tree: Mapping[str, Any]) -> str:
    """Return an override `section.key=value`, rewritten to the path of its table; several if the kind also changes.

    Args:
        tree: the sections of the recipe to override, unchecked.

    Raises:
        ConfigError: the argument is not an override, or the part that the recipe chooses does not read its key.
    """
    name, equals, text = word.partition("=")
    section, dot, key = name.partition(".")
    if not equals or not dot:
        raise ConfigError(f"{word!r} is not a setting; settings are section.key=value, such as train.lr=1e-3")
    if name not in MOVED:
        return word
    place = MOVED[name]
    keys = tree.get(section)
    before = keys if isinstance(keys, dict) else {}
    tree = {**tree, section: {**before, key: parsed_value(text)}}
    sections, unread = upgraded(tree)
    kind = _kind_at(place.key, sections, _preset_of(sections))
    if key in sections[section] or (name in unread and kind is not None):
        raise ConfigError(moved_key_refusal(tree, name))
    if str(place) == LAYERS:
        return f"{LAYERS}={shown_value(sections[section]['layers'])}"
    if section != "sites" and place.setting != KIND:
        return _word(name, text)
    old, new = (flat_settings({f"{section}.{key}": keys[key] for key in keys}) for keys in (before, sections[section]))
    words = [f"{key}={toml_value(value).strip(chr(34))}" for key, value in new.items() if old.get(key) != value]
    return " ".join(words) or f"{place.key}={kind}"
