"""Settings without effect: a key that the recipe sets and no code reads is refused.

Keys that are absent, or set to their default, are not refused. Options of an axis (`parallel.schedule`, `context`,
`zero`) are allowed at degree 1, so that one recipe serves several mappings.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

from moefold.config.base.field import ReadIf
from moefold.config.base.limits import MAX_LAYERS
from moefold.config.base.part import Part, Table, default_of_field, settings_of
from moefold.config.chosen import chosen_parts, read_key, tables_in, with_key
from moefold.config.groups.router import aux_coefficient
from moefold.config.keys.annotations import read_conditions
from moefold.config.keys.paths import choices_of, default_of, group_at
from moefold.config.model import ModelConfig
from moefold.config.rule import apply_rule
from moefold.config.schema import Config
from moefold.config.tables.toml_text import shown_value
from moefold.errors import raise_all
from moefold.message_text import join_with_or
from moefold.topology.rollout_mapping import has_rollout_mapping
from moefold.validate.data import has_validation_split
from moefold.validate.exactness import caches_latents, inexact_settings
from moefold.validate.memory_savings import ssd_offload_keys
from moefold.validate.rl import uses_python_reward
from moefold.validate.train import compiles_parts

MOST_CHOICES = 4
"""Maximum number of values of a key in a remedy."""


@dataclass(frozen=True)
class UnusedKeyRule:
    """Keys without effect under a condition, with the reason and the remedy.

    The rule applies to keys that the recipe sets. Keys of a preset are ignored: a recipe that turns a part of the
    preset's model off need not reset each size of the part.
    """

    keys: str
    condition: Callable[[Config], bool]
    reason: str
    remedy: str


def _has_no(word: str) -> Callable[[Config], bool]:
    return lambda cfg: all(word not in words for words in cfg.model.layer_words)


def _is_after_run(key: str) -> Callable[[Config], bool]:
    return lambda cfg: bool(read_key(cfg, key) > cfg.run.steps)


LAYER_RULES = (
    *(
        UnusedKeyRule(keys, _has_no(word), f"no layer of model.layers is {word!r}", f"name {word!r} in model.layers")
        for word, keys in {
            "nope": "model.attention.qk_norm.in_nope model.attention.temperature",
            "linear": "model.linear_attention",
            "window": "model.sliding_window",
            "chunk": "model.attention_chunk_size",
        }.items()
    ),
    UnusedKeyRule(
        "model.attention model.rope",
        lambda cfg: not cfg.model.has_softmax_attention,
        "all layers of model.layers are 'linear', without softmax attention",
        "name 'full' in model.layers",
    ),
    UnusedKeyRule(
        "model.rope model.attention.rope_fraction model.attention.qk_norm.after_rope",
        lambda cfg: not cfg.model.has_rope,
        "no layer of softmax attention in model.layers has RoPE",
        "name a layer without 'nope'",
    ),
    UnusedKeyRule(
        "model.ffn.dense",
        _has_no("dense"),
        "no layer of model.layers is 'dense'",
        "name 'dense' in model.layers, or set model.ffn.moe.intermediate_size, the width of an expert",
    ),
)

UNUSED_KEY_RULES = (
    *LAYER_RULES,
    UnusedKeyRule(
        "train.recompute train.offload",
        lambda cfg: cfg.trains_indexers_only,
        "train.indexer_stage='warmup' saves no activations of the layers",
        "choose train.indexer_stage='sparse'",
    ),
    UnusedKeyRule(
        "sites.moments",
        lambda cfg: cfg.sites.count == 1 and cfg.sites.moments == "average",
        "sites.count=1 exchanges no moments",
        "set sites.count",
    ),
    UnusedKeyRule(
        "sites.residual",
        lambda cfg: cfg.sites.precision == "float32" and cfg.sites.part.wire_format(4) is None,
        "sites.precision='float32' loses nothing",
        "choose another sites.precision",
    ),
    UnusedKeyRule(
        "model.ffn.moe checkpoint.upcycle moe.capacity_factor moe.drop_policy moe.drop_scope moe.pad_to_capacity "
        "moe.aux_loss moe.z_loss parallel.dispatcher parallel.overlap_experts moe.eval_capacity_factor moe.aux_kind "
        "moe.bias_update_rate moe.choice moe.input_jitter moe.router_dtype moe.trace_every moe.replay "
        "moe.weight_in_expert moe.dispatch_precision rl.replay metrics.expert_counts_every rollout.experts "
        "metrics.per_layer faults.check_dispatch",
        lambda cfg: not cfg.model.has_moe_layers,
        "no layer of model.layers is 'moe'",
        "name 'moe' in model.layers",
    ),
    UnusedKeyRule(
        "train.offload_dir",
        lambda cfg: not ssd_offload_keys(cfg.train),
        "nothing is offloaded to a disk",
        "choose 'ssd' for train.offload_to (with parts in train.offload) or for train.offload_optimizer",
    ),
    UnusedKeyRule(
        "run.compile",
        lambda cfg: not compiles_parts(cfg.model),
        "the model has neither a norm of each query and key head, nor dense layers, nor a shared expert",
        "choose run.compile='none'",
    ),
    UnusedKeyRule(
        "moe.drop_policy moe.drop_scope",
        lambda cfg: cfg.moe.capacity_factor == 0 and cfg.moe.eval_capacity_factor <= 0,
        "moe.capacity_factor=0.0 drops nothing",
        "set moe.capacity_factor above 0",
    ),
    UnusedKeyRule(
        "moe.aux_loss",
        lambda cfg: cfg.moe.aux_loss > 0 and aux_coefficient(cfg.moe) == 0,
        "a moe.choice other than 'topk' balances by itself",
        "choose moe.choice='topk'",
    ),
    *(
        UnusedKeyRule(key, _is_after_run(key), "the run ends earlier, after run.steps", "choose at most run.steps")
        for key in ("moe.trace_every", "train.reset_moments_every", "metrics.memory_every")
    ),
    UnusedKeyRule(
        "rollout.tp rollout.pp rollout.ep rollout.etp",
        lambda cfg: cfg.is_rl and not has_rollout_mapping(cfg.parallel, cfg.rl, cfg.rollout),
        "training has the same degrees, and its model samples",
        "choose another degree",
    ),
    UnusedKeyRule(
        "rollout.experts",
        lambda cfg: cfg.rollout.experts == "whole" and cfg.parallel.ep * cfg.parallel.etp == 1,
        "with parallel.ep=1 and etp=1 each rank holds all experts",
        "set parallel.ep",
    ),
    UnusedKeyRule(
        "rollout.cache",
        lambda cfg: not any(caches_latents(layer) for layer in cfg.model.decoder_layers),
        "only model.attention='mla' has latents, which sparse attention (model.attention.indexer) always caches",
        "choose model.attention='mla' without model.attention.indexer",
    ),
    UnusedKeyRule(
        "rl.objective.clip_low rl.objective.clip_high",
        lambda cfg: cfg.is_rl and cfg.rl.updates == 1 and not cfg.rl.staleness and _samples_exactly(cfg),
        "with rl.updates=1, run.device='cpu' and run.kernels='c' rollouts have the bits of training: ratios are 1",
        "set rl.updates or rl.staleness above their defaults",
    ),
    UnusedKeyRule(
        "rl.correction",
        lambda cfg: cfg.is_rl and _samples_exactly(cfg),
        "with run.device='cpu' and run.kernels='c' sampler and trainer compute the same bits",
        "choose a mapping or kernels that differ (docs/exact-sampling.md)",
    ),
    UnusedKeyRule(
        "rl.replay",
        lambda cfg: cfg.is_rl and cfg.rl.replay == "on" and cfg.rl.updates == 1 and _samples_exactly(cfg),
        "with rl.updates=1, run.device='cpu' and run.kernels='c' training chooses the experts of sampling anyway",
        "choose rl.replay='auto'",
    ),
    UnusedKeyRule(
        "reward.timeout_s reward.workers reward.on_error",
        lambda cfg: not uses_python_reward(cfg.reward),
        "the built-in rewards run in the ranks themselves and do not fail",
        "set reward.use='FILE.py:FUNCTION'",
    ),
    UnusedKeyRule(
        "data.validation_fraction",
        lambda cfg: has_validation_split(cfg.data) and cfg.data.validation_fraction > 0,
        "data.validation_split is evaluated on",
        "leave data.validation_split out",
    ),
    UnusedKeyRule(
        "data.validation_fraction",
        lambda cfg: cfg.data.kind == "huggingface" and cfg.data.streaming and cfg.data.validation_fraction > 0,
        "a stream has no held-out part",
        "set data.validation_split",
    ),
    UnusedKeyRule(
        "faults.straggler_factor",
        lambda cfg: cfg.faults.straggler_factor > 0 and cfg.parallel.world_size == cfg.parallel.pp,
        "ranks are compared within their pipeline stage, and each stage has one rank",
        "choose parallel.pp below parallel.world_size",
    ),
    UnusedKeyRule(
        "faults.replica_check_every",
        lambda cfg: cfg.faults.replica_check_every > cfg.run.steps and not cfg.checkpoint.saves,
        "the run ends earlier, after run.steps, and has no save that would trigger a check",
        "choose at most run.steps, or set checkpoint.every",
    ),
    UnusedKeyRule(
        "faults.spike_window",
        lambda cfg: cfg.faults.spike_window >= cfg.run.steps,
        "the run ends before the window is full",
        "choose less than run.steps",
    ),
)


def _samples_exactly(cfg: Config) -> bool:
    """Return whether rollouts have the bits of training, or False if that depends on the machine or on a plan."""
    if cfg.run.device != "cpu" or cfg.run.kernels != "c" or cfg.parallel.mapping == "auto":
        return False
    return not inexact_settings(cfg, "cpu")


def check_unused_keys(explicit_keys: frozenset[str], cfg: Config) -> None:
    """Refuse keys without effect that the recipe sets to a non-default value.

    Args:
        explicit_keys: keys that the recipe and its overrides set, as "section.key", without the keys of a preset.

    Raises:
        ConfigError: one line for each such setting.
    """
    if not _has_layers(cfg.model):
        # `check_config` reports the reason.
        return
    names = sorted(name for name in set(map(_without_kind, explicit_keys)) if _is_set(cfg, name))
    # The settings of a table are reported instead of the table.
    names = [name for name in names if not any(inner.startswith(f"{name}.") for inner in names)]
    reasons: dict[str, tuple[str, str]] = {}
    for key, reason in idle_keys(cfg, names).items():
        for name in names:
            if is_within(name, key):
                reasons.setdefault(name, reason)
    raise_all(
        f"{name}={shown_value(read_key(cfg, name))} has no effect: {reason}; {remedy}, or leave "
        f"{name.partition('.')[2]} out"
        for name, (reason, remedy) in reasons.items()
    )


def _without_kind(key: str) -> str:
    """Return the key of a part instead of its key `kind`, and other keys unchanged."""
    name, _, last = key.rpartition(".")
    return name if last == "kind" and group_at(name) else key


def is_within(name: str, key: str) -> bool:
    """Return whether a key is equal to another key, or a setting in its table."""
    return name == key or name.startswith(f"{key}.")


def without_idle_keys(model: ModelConfig) -> ModelConfig:
    """Return a model with defaults for the settings that no layer reads, because a recipe may not set them.

    The other sections are assumed to have defaults.
    """
    cfg = Config(model=model)
    for name in idle_keys(cfg) if _has_layers(model) else ():
        if name.startswith("model.") and _is_set(cfg, name):
            cfg = with_key(cfg, name, _default_at(cfg, name))
    return cfg.model


def idle_keys(cfg: Config, names: Sequence[str] | None = None) -> dict[str, tuple[str, str]]:
    """Return the keys without effect, of some or all, in a recipe whose layers exist, with reason and remedy."""
    idle: dict[str, tuple[str, str]] = {}
    # Rules come first, because their reasons are better than the conditions of single keys.
    for rule in UNUSED_KEY_RULES:
        for name in rule.keys.split() if rule.condition(cfg) else ():
            idle.setdefault(name, (rule.reason, rule.remedy))
    owners = tuple((path, type(value)) for path, value in tables_in(cfg) if isinstance(value, Part | Table))
    for name, conditions in read_conditions(owners).items():
        if names is not None and not any(is_within(inner, name) for inner in names):
            continue
        if reason := why_unread(cfg, conditions):
            idle.setdefault(name, reason)
    layer_parts = (part for layer in cfg.model.all_layers for part in layer.parts() if isinstance(part, Part))
    for part in dict.fromkeys((*chosen_parts(cfg), *layer_parts)):
        for unused in apply_rule(part.unused_keys, cfg):
            for name in unused.names.split():
                idle.setdefault(name, (unused.reason, unused.remedy))
    return idle


def why_unread(cfg: Config, annotations: Iterable[ReadIf]) -> tuple[str, str] | None:
    """Return reason and remedy for a key that is not read under its conditions, or None if it is read."""
    for annotation in annotations:
        conditions = annotation.conditions.split()
        values = {name: read_key(cfg, _parse(name)[0]) for name in conditions}
        if not any(condition_holds(condition, value) for condition, value in values.items()):
            terms = " and ".join(f"{_parse(condition)[0]}={shown_value(value)}" for condition, value in values.items())
            return f"nothing reads it with {terms}", f"set {join_with_or(list(map(_way_out, conditions)))}"
    return None


def _parse(condition: str) -> tuple[str, list[str], bool]:
    """Return key and values of a condition, and whether the key must have one of them. No values: not its default."""
    key, _, words = condition.partition("=")
    return key.removesuffix("!"), list(filter(None, words.split("|"))), not key.endswith("!")


def condition_holds(condition: str, value: Any) -> bool:
    """Return whether a value meets a condition on its key."""
    key, words, must_equal = _parse(condition)
    if not words:
        return bool(value != default_of(*key.split(".", 1)))
    return (shown_value(value).strip("'") in words) is must_equal


def _way_out(condition: str) -> str:
    """Return a key with the values that meet a condition, or only the key if it has many values."""
    key, words, must_equal = _parse(condition)
    default = default_of(*key.split(".", 1))
    if isinstance(default, bool) and not words:
        words = [shown_value(not default)]
    elif not words or not must_equal:
        choices = [choice for choice in choices_of(*key.split(".", 1)) if choice not in (words or [default])]
        words = choices if len(choices) <= MOST_CHOICES else []
    values = [repr(word) if isinstance(default, str) else str(word) for word in words]
    return f"{key}={join_with_or(values)}" if values else key


def _has_layers(model: ModelConfig) -> bool:
    """Return whether the layers and sizes of a model describe layers."""
    if not 0 <= model.mtp_layers <= MAX_LAYERS:
        return False
    try:
        return bool(model.all_layers)
    except (ValueError, ZeroDivisionError):
        return False


def _is_set(cfg: Config, name: str) -> bool:
    """Return whether a key differs from its default. A key of an absent table does not."""
    owner, _, setting = name.rpartition(".")
    table = read_key(cfg, owner)
    part: Any = type(table)
    has_key = not owner.count(".") or (is_dataclass(table) and setting in settings_of(part))
    return has_key and bool(read_key(cfg, name) != _default_at(cfg, name))


def _default_at(cfg: Config, name: str) -> Any:
    """Return the default of a key, or of a setting of the chosen kind."""
    owner, _, setting = name.rpartition(".")
    part: Any = type(read_key(cfg, owner))
    return default_of_field(part, setting) if owner.count(".") else default_of(owner, setting)
