"""Recipes of format 1, whose parts read flat keys of their section, in the keys of format 2. Torch-free."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from moefold.config.layer_words import parse_layers, repeat_layers, spell_layers
from moefold.config.part import Part
from moefold.config.part_table import NONE, shown_value, toml_table, toml_value
from moefold.config.suggestions import default_of, join_with_or, kind_settings, part_marks, tables
from moefold.config.tree import put, value_at
from moefold.errors import ConfigError

FORMAT = 2
"""Format of recipes and checkpoints that this version writes; it reads older ones."""
FORMAT_KEY = "format"
"""Key above the sections of a recipe with its format."""
KIND = "kind"


class Moved(NamedTuple):
    """Place of a flat key of format 1: a setting of the part that another key chooses."""

    key: str
    """As "section.key"."""
    setting: str
    """`KIND`: where the value is on, another kind stands for it, which has the old one in its name."""
    kinds: tuple[str, ...] = ()
    """Kinds that read it; empty: the built-in ones that have the setting."""

    def __str__(self) -> str:
        """Return the path, as an override has it."""
        return f"{self.key}.{self.setting}"


_MODEL = """
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
"""Flat keys of [model] by the tables that they have moved to: "setting:key", or "setting" with the same name.

Keys that choose a kind or a table come before its settings.
"""
LAYERS = "model.layers"
PATTERNS = {
    "layer_pattern": ("ffn", {"D": "dense", "M": "moe"}),
    "attention_pattern": ("attention", {"F": "full", "W": "window", "C": "chunk", "L": "linear"}),
    "rope_pattern": ("position", {"R": "rope", "N": "nope"}),
    "index_pattern": ("selection", {"F": "own", "S": "shared"}),
}
"""Words of the letters of patterns that stand in `model.layers`, and the field of `LayerWords` that has them."""
MOVED = {
    "train.min_lr": Moved("train.lr_schedule", "min_lr"),
    "train.decay_steps": Moved("train.lr_schedule", "decay_steps"),
    "train.weight_decay": Moved("train.optimizer", "weight_decay", ("adamw", "muon", "spsa")),
    "train.beta1": Moved("train.optimizer", "beta1"),
    "train.beta2": Moved("train.optimizer", "beta2"),
    "train.eps": Moved("train.optimizer", "eps"),
    "train.moment_dtype": Moved("train.optimizer", "moment_dtype"),
    "train.muon_groups": Moved("train.optimizer", "groups"),
    "train.muon_momentum": Moved("train.optimizer", "momentum"),
    "train.muon_ns_steps": Moved("train.optimizer", "ns_steps"),
    "train.spsa_eps": Moved("train.optimizer", "eps", ("spsa",)),
    "train.spsa_max_gradient": Moved("train.optimizer", "max_gradient", ("spsa",)),
    "train.gradient_delay": Moved("train.optimizer", KIND, ("delayed_adamw", "delayed_muon")),
    "train.delay_correction": Moved("train.optimizer", "correction", ("delayed_adamw", "delayed_muon")),
    "align.reward": Moved("align.method", "reward"),
    "align.threshold": Moved("align.method", "threshold"),
    "align.beta": Moved("align.method", "beta"),
    "align.weight_cap": Moved("align.method", "weight_cap"),
    "align.template": Moved("align.method", "template"),
    "align.want": Moved("align.method", "want"),
    "align.gamma": Moved("align.method", "gamma"),
    "align.desirable_weight": Moved("align.method", "desirable_weight"),
    "align.undesirable_weight": Moved("align.method", "undesirable_weight"),
    "moe.sinkhorn_iterations": Moved("moe.choice", "iterations"),
    "moe.skew": Moved("moe.choice", "share"),
    "moe.llep_threshold": Moved("parallel.dispatcher", "threshold"),
    "moe.llep_capacity": Moved("parallel.dispatcher", "capacity"),
    "moe.llep_min_tokens": Moved("parallel.dispatcher", "min_tokens"),
    "parallel.receive_factor": Moved("parallel.dispatcher", "receive_factor"),
    "parallel.schedule_csv": Moved("parallel.schedule", "path"),
    "parallel.placement": Moved("parallel.context", "placement"),
    "parallel.attention_hosts": Moved("parallel.context", "hosts"),
    "parallel.attention_tolerance": Moved("parallel.context", "tolerance"),
    "parallel.attention_pool": Moved("parallel.context", "pool"),
    "parallel.attention_block": Moved("parallel.context", "block"),
    "rl.clip_low": Moved("rl.objective", "clip_low"),
    "rl.clip_high": Moved("rl.objective", "clip_high"),
    "rl.correction_low": Moved("rl.correction", "low"),
    "rl.correction_high": Moved("rl.correction", "high"),
    "moe.sparsemixer_sampling": Moved("model.ffn.moe.router.softmax", "samples"),
    "sites.topology": Moved("sites.method", KIND, ("noloco",)),
    "sites.experts": Moved("sites.method", KIND, ("spes",)),
    "sites.density": Moved("sites.method", "density", ("sparseloco",)),
    "sites.values": Moved("sites.method", "bits", ("sparseloco",)),
    "sites.penalty": Moved("sites.method", "penalty", ("co2",)),
    "sites.clip": Moved("sites.method", "clip", ("co2",)),
    "sites.merge_experts": Moved("sites.method", "merge_experts", ("spes",)),
    "sites.merge_every": Moved("sites.method", "merge_every", ("spes",)),
    "sites.merge_until": Moved("sites.method", "merge_until", ("spes",)),
} | {
    f"model.{word.rpartition(':')[2]}": Moved(line.split()[0], word.partition(":")[0])
    for line in _MODEL.split("\n")
    for word in line.split()[1:]
}
MOVED |= {f"model.{key}": Moved("model", "layers") for key in ("num_layers", *PATTERNS)}
"""Place of each flat key of format 1, as "section.key"."""
OFF = {"model.nope_temperature_scale", "model.index_topk", "model.shared_expert_ffn_hidden_size"}
"""Flat keys whose value 0 meant that there is no table."""
SITE_METHODS = {
    "topology": ("all", "noloco"),
    "experts": ("average", "spes"),
    "density": (1.0, "sparseloco"),
    "penalty": (False, "co2"),
    "clip": (0.0, "co2"),
}
"""Keys of [sites] that did what a method does now: their default, and the method that another value needs."""


def check_format(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the sections of a recipe without its format.

    Args:
        tree: what a file has.
        name: the file, as the message names it.

    Raises:
        ConfigError: the format is newer than this version of moefold.
    """
    found = tree.get(FORMAT_KEY, FORMAT)
    if type(found) is not int or not 1 <= found <= FORMAT:
        way_out = "update it" if type(found) is int and found > FORMAT else f"write {FORMAT_KEY} = {FORMAT}"
        raise ConfigError(f"{name} has format {found!r}, and this version of moefold reads up to {FORMAT}; {way_out}")
    return {key: value for key, value in tree.items() if key != FORMAT_KEY}


def upgraded(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the sections of a recipe of format 1 in format 2, and the flat keys that its parts do not read.

    Args:
        tree: sections, unchecked; sections of format 2 stay as they are.
    """
    found = {name: dict(keys) if isinstance(keys, dict) else keys for name, keys in tree.items()}
    model = found.get("model")
    base: Any = {}
    if isinstance(model, dict) and isinstance(name := model.get("preset"), str) and name:
        # A rank that reads a checkpoint needs no files of presets.
        from moefold.config.presets import load_preset, preset_names

        base = {"model": load_preset(name)} if name in preset_names() else {}
    if isinstance(model, dict):
        _put_layers(found["model"], base.get("model", {}))
    if isinstance(sites := found.get("sites"), dict):
        method = sites.get("method", "")
        kind = method.get(KIND) if isinstance(method, dict) else method
        of_keys = [other for key, (off, other) in SITE_METHODS.items() if sites.get(key, off) != off]
        if of_keys and kind not in of_keys:
            sites["method"] = of_keys[0]
    unread = []
    for name, place in MOVED.items():
        section, _, key = name.partition(".")
        if str(place) == LAYERS:
            continue
        keys = found.get(section)
        if not isinstance(keys, dict) or key not in keys:
            continue
        value = keys.pop(key)
        path = str(place)
        if path in tables() and isinstance(value, bool):
            value = {} if value else NONE
        elif name in OFF and not value:
            path, value = place.key, NONE
        if place.setting == KIND and value:
            kind = _kind_at(place.key, found, base)
            _put(found, place.key, next((one for one in place.kinds if one.endswith(f"_{kind}")), kind))
        elif place.setting == KIND or not _is_read(place.key if name in OFF else path, found, base, place.kinds):
            unread.append(name)
        elif value != NONE or value_at(path, base) is not None:
            _put(found, path, value)
    return found, unread


def _put_layers(model: dict[str, Any], preset: Mapping[str, Any]) -> None:
    """Replace the number of layers and their patterns by their words; what is not understood stays, and is refused."""
    # Checkpoints repeat the pattern, as long as the model.
    model.pop("layer_kinds", None)
    given = {key: model[key] for key in ("num_layers", *PATTERNS) if key in model}
    if not given:
        return
    try:
        rows = parse_layers(model.get("layers", preset.get("layers", 4)))
        rows = repeat_layers(rows, len(parse_layers(given.get("num_layers", len(rows)))))
        for key, (column, words) in PATTERNS.items():
            if key in given:
                found = _expanded(given[key], words, len(rows))
                rows = tuple(row._replace(**{column: found[i % len(found)]}) for i, row in enumerate(rows))
    except (KeyError, TypeError, ValueError):
        return
    for key in given:
        del model[key]
    model["layers"] = spell_layers(rows)


def _expanded(pattern: str, words: Mapping[str, str], most: int) -> list[str]:
    """Return the words of a pattern of letters with counts, such as "D3M2".

    Raises:
        KeyError: it has another letter.
        ValueError: it has another form, or is longer than the model.
    """
    runs = [(letter, int(count or 1)) for letter, count in re.findall(r"([A-Z])(\d{0,5})", pattern)]
    counts = [count for _, count in runs]
    if not re.fullmatch(r"([A-Z]\d{0,5})+", pattern) or not all(counts) or sum(counts) > most:
        raise ValueError(f"unexpected pattern {pattern!r}")
    return [words[letter] for letter, count in runs for _ in range(count)]


def _kind_at(path: str, found: Any, base: Any) -> str | None:
    """Return the kind of a part in a recipe, its preset, or by default; of a table that is absent None, else ""."""
    for value in (value_at(path, found), value_at(path, base)):
        if isinstance(value, str) or (isinstance(value, dict) and "kind" in value):
            return str(value if isinstance(value, str) else value["kind"])
    section, _, key = path.partition(".")
    default = default_of(section, key)
    if default is None and value_at(path, found) is None and value_at(path, base) is None:
        return None
    if default is None and path in part_marks():
        return part_marks()[path].words[0]
    return default.kind if isinstance(default, Part) else default if isinstance(default, str) else ""


def _is_read(path: str, found: Any, base: Any, kinds: tuple[str, ...] = ()) -> bool:
    """Return whether the parts of a recipe have a key, of which `kinds` have it; empty: the built-in ones."""
    owner = path.rpartition(".")[0]
    if not owner.count("."):
        return True
    kind = _kind_at(owner, found, base) if _is_read(owner, found, base) else None
    kinds = kinds or kind_settings().get(path, ())
    return kind is not None and (kind in kinds if kinds else path in kind_settings())


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    """Set the value of a key; a table of another section than [model] has its kind, also if that is the default."""
    section, key, *inner = path.split(".")
    if inner and section != "model" and "kind" not in (table := tree.get(section, {}).get(key, {})):
        value_of_kind = table if isinstance(table, str) else kind_by_default(f"{section}.{key}")
        put(tree, [section, key], {"kind": value_of_kind, **(table if isinstance(table, dict) else {})})
    put(tree, path.split("."), value)


def upgraded_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by "section.key" of format 1 in format 2, as `upgraded` does."""
    tree: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, _, key = name.partition(".")
        tree.setdefault(section, {})[key] = value
    return {f"{section}.{key}": value for section, keys in upgraded(tree)[0].items() for key, value in keys.items()}


def flat_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by "section.key", with a part as its kind and the settings of tables by "section.key.setting".

    Args:
        values: values of `keys_of` by "section.key".
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and name.partition(".")[2] and (name in tables() or "kind" in value):
            kind = {name: value["kind"]} if "kind" in value else {}
            found |= kind | flat_settings({f"{name}.{key}": entry for key, entry in value.items() if key != "kind"})
        else:
            found[name] = value
    return found


def moved_key_refusal(tree: Mapping[str, Any], name: str) -> str:
    """Return the refusal of a flat key of format 1 in a recipe, with the table that it belongs to.

    Args:
        tree: the sections of the recipe, unchecked.
        name: a key of MOVED.
    """
    place = MOVED[name]
    found, unread = upgraded(tree)
    if str(place) == LAYERS and name.partition(".")[2] in found["model"]:
        return f'{name} is {place} now: write the layers by name, such as {place} = "3 dense, 58 moe"'
    if name in unread:
        kind = _kind_at(place.key, found, {})
        owners = place.kinds or kind_settings()[str(place)]
        kinds = f"a key of {join_with_or(list(map(repr, owners)))}" if owners else f"a key of {place.key}"
        which = f"not of {kind!r}" if kind else "that is absent"
        return f"{name} is {place} now, {kinds}, and {which}; leave it out"
    table = shown_toml(str(place), found)
    return f"{name} is {place} now: write {table}, or run moefold recipe upgrade FILE"


def shown_toml(path: str, tree: Any) -> str:
    """Return the line of a recipe with the table of a key, or with the key alone in a section of tables."""
    section, key, *inner = path.split(".")
    value = tree[section].get(key)
    if section != "model":
        return f"{section}.{key} = {toml_table(value)}"
    found = value_at(path, tree)
    return f"{path} = {toml_value(NONE if found is None else found)}"


def moved_override_refusal(name: str, text: str) -> str:
    """Return the refusal of an override of a flat key of format 1.

    Args:
        name: a key of MOVED.
        text: its value, as the command line has it.
    """
    word = upgraded_word(f"{name}={text}", {}) if str(MOVED[name]) == LAYERS else _word(name, text)
    return f"{name} is {MOVED[name]} now: write {word}"


def _word(name: str, text: str) -> str:
    """Return an override of a flat key in format 2."""
    place = MOVED[name]
    if place.setting == KIND:
        return f"{place.key}={join_with_or(list(place.kinds))}"
    if str(place) in tables() and text in ("true", "false"):
        return f"{place}={'{}' if text == 'true' else NONE}"
    return f"{place.key}={NONE}" if name in OFF and text.rstrip(".0") == "" else f"{place}={text}"


def upgraded_word(word: str, tree: Mapping[str, Any]) -> str:
    """Return an override `section.key=value` in format 2; one that has not moved stays.

    Args:
        word: the override.
        tree: the sections of the recipe that it is for, unchecked.

    Raises:
        ConfigError: the word is no override, or the part that the recipe chooses does not read its key.
    """
    name, equals, text = word.partition("=")
    section, dot, key = name.partition(".")
    if not equals or not dot:
        raise ConfigError(f"{word!r} is no setting; settings are section.key=value, such as train.lr=1e-3")
    if name not in MOVED:
        return word
    keys = tree.get(section)
    value: Any = text.lower() == "true" if text in ("true", "false") else text
    if str(MOVED[name]) == LAYERS:
        value = int(text) if text.isdecimal() else text
    tree = {**tree, section: {**(keys if isinstance(keys, dict) else {}), key: value}}
    found, unread = upgraded(tree)
    if str(MOVED[name]) == LAYERS and key not in found[section]:
        return f"{LAYERS}={shown_value(found[section]['layers'])}"
    if name in unread or key in found[section]:
        raise ConfigError(moved_key_refusal(tree, name))
    if MOVED[name].setting == KIND:
        raise ConfigError(moved_override_refusal(name, text))
    return _word(name, text)


def kind_by_default(key: str) -> str:
    """Return the kind of the part that a key chooses in a recipe that sets nothing."""
    default = default_of(*key.split(".", 1))
    return default.kind if isinstance(default, Part) else str(default)
