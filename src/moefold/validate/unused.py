"""Settings without effect: a key that the recipe sets and that nothing reads is refused.

A key that is left out, or set to its default, is no such setting. Options of an axis (`parallel.schedule`, `context`,
`zero`) are allowed at degree 1, so that one recipe serves several mappings.
"""

from typing import Any

from moefold.config.chosen import chosen, chosen_in, chosen_parts, layer_readers, read_key, readers
from moefold.config.groups.choice import ChoicePart
from moefold.config.model import ModelConfig
from moefold.config.patterns import MAX_LAYERS
from moefold.config.routing import aux_coefficient
from moefold.config.schema import Config, has_moe_layers
from moefold.config.suggestions import default_of, join_with_or
from moefold.errors import raise_all
from moefold.topology.rollout_mapping import has_rollout_mapping
from moefold.validate.exactness import caches_latents, inexact_settings
from moefold.validate.lora import UNUSED_LORA_KEYS
from moefold.validate.memory import ssd_offload_keys
from moefold.validate.rl import uses_python_reward
from moefold.validate.rollout_vllm import UNUSED_VLLM_RULES
from moefold.validate.sites import UNUSED_SITES_KEYS
from moefold.validate.sparse import UNUSED_SPARSE_KEYS
from moefold.validate.train import PACKED_KINDS, compiles_parts, has_validation_split
from moefold.validate.unused_layers import LAYER_RULES
from moefold.validate.unused_planned import PLANNED_ATTENTION_RULES
from moefold.validate.unused_rule import UnusedKeyRule

UNUSED_KEY_RULES = (
    *LAYER_RULES,
    *UNUSED_SPARSE_KEYS,
    *UNUSED_LORA_KEYS,
    *UNUSED_SITES_KEYS,
    UnusedKeyRule(
        "model.num_experts model.top_k model.moe_ffn_hidden_size model.moe_hidden_size model.router_softmax "
        "model.shared_expert_ffn_hidden_size model.shared_expert_gate moe.capacity_factor moe.drop_policy "
        "moe.drop_scope moe.pad_to_capacity moe.aux_loss moe.z_loss parallel.dispatcher parallel.overlap_experts "
        "moe.llep_threshold moe.llep_capacity moe.llep_min_tokens parallel.receive_factor "
        "model.router_score model.router_normalize model.router_scaling_factor model.num_groups model.top_groups "
        "model.moe_bias model.moe_activation model.swiglu_alpha model.swiglu_limit model.router_bias "
        "model.router_probs_on_input model.expert_bias model.upcycle_from moe.eval_capacity_factor moe.aux_kind "
        "moe.bias_update_rate moe.choice moe.sinkhorn_iterations moe.skew moe.input_jitter moe.router_dtype "
        "moe.trace_every moe.replay moe.weight_in_expert moe.dispatch_precision rl.replay metrics.expert_counts_every "
        "model.zero_experts model.active_experts model.moe_shortcut metrics.per_layer faults.check_dispatch "
        "model.sparsemixer_jitter moe.sparsemixer_sampling",
        lambda cfg: not has_moe_layers(cfg.model),
        "no layer of model.layer_pattern is M",
        "choose a pattern with M",
    ),
    UnusedKeyRule(
        "train.offload_to train.offload_limit_gib train.offload_waits",
        lambda cfg: not cfg.train.offload,
        "train.offload=[] offloads no activations",
        "name parts in train.offload",
    ),
    UnusedKeyRule(
        "train.offload_min_kib",
        lambda cfg: not cfg.train.offload and cfg.train.offload_optimizer == "none",
        "nothing is offloaded",
        "name parts in train.offload, or set train.offload_optimizer",
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
        "model.swiglu_alpha model.swiglu_limit",
        lambda cfg: cfg.model.moe_activation != "clamped_swiglu",
        "only model.moe_activation='clamped_swiglu' reads it",
        "choose model.moe_activation='clamped_swiglu'",
    ),
    UnusedKeyRule(
        "model.upcycle_router model.upcycle_scaling model.upcycle_noise",
        lambda cfg: not cfg.model.upcycle_from,
        "only model.upcycle_from reads it",
        "set model.upcycle_from",
    ),
    UnusedKeyRule(
        "model.shared_expert_gate",
        lambda cfg: cfg.model.shared_expert_ffn_hidden_size == 0,
        "model.shared_expert_ffn_hidden_size=0 means no shared expert",
        "set model.shared_expert_ffn_hidden_size",
    ),
    UnusedKeyRule(
        "moe.drop_policy moe.drop_scope",
        lambda cfg: cfg.moe.capacity_factor == 0 and cfg.moe.eval_capacity_factor <= 0,
        "moe.capacity_factor=0.0 drops nothing",
        "set moe.capacity_factor above 0",
    ),
    UnusedKeyRule(
        "moe.eval_capacity_factor",
        lambda cfg: cfg.train.eval_every == 0,
        "train.eval_every=0 never evaluates",
        "set train.eval_every",
    ),
    UnusedKeyRule(
        "moe.bias_update_rate",
        lambda cfg: not cfg.model.expert_bias or chosen_in(cfg.moe, ChoicePart).sets_bias,
        "no bias is updated by steps: model.expert_bias=false, or moe.choice='quantile' sets it",
        "set model.expert_bias=true with moe.choice='topk'",
    ),
    UnusedKeyRule(
        "moe.aux_loss",
        lambda cfg: cfg.moe.aux_loss > 0 and aux_coefficient(cfg.moe) == 0,
        "a moe.choice other than 'topk' balances by itself",
        "choose moe.choice='topk'",
    ),
    UnusedKeyRule(
        "moe.aux_kind",
        lambda cfg: aux_coefficient(cfg.moe) == 0,
        "moe.aux_loss=0.0 turns the loss off, and so does a moe.choice other than 'topk'",
        "set moe.aux_loss above 0 with moe.choice='topk'",
    ),
    UnusedKeyRule(
        "moe.trace_every",
        lambda cfg: cfg.moe.trace_every > cfg.run.steps,
        "the run ends earlier, after run.steps",
        "choose at most run.steps",
    ),
    UnusedKeyRule(
        "moe.router_dtype",
        lambda cfg: cfg.run.dtype == "float64",
        "run.dtype='float64' routes in float64 anyway",
        "choose another run.dtype",
    ),
    UnusedKeyRule(
        "train.delay_correction",
        lambda cfg: cfg.train.gradient_delay == 0,
        "train.gradient_delay=0 has no delay to correct",
        "set train.gradient_delay=1",
    ),
    *PLANNED_ATTENTION_RULES,
    UnusedKeyRule(
        "parallel.overlap_tp",
        lambda cfg: cfg.parallel.tp == 1,
        "parallel.tp=1 communicates nothing",
        "choose tp=2 or more",
    ),
    UnusedKeyRule(
        "train.mtp_loss",
        lambda cfg: cfg.model.mtp_layers == 0,
        "model.mtp_layers=0 predicts no additional tokens",
        "set model.mtp_layers",
    ),
    UnusedKeyRule(
        "train.eval_samples",
        lambda cfg: cfg.train.eval_every == 0,
        "train.eval_every=0 never evaluates",
        "set train.eval_every",
    ),
    UnusedKeyRule(
        "data.task data.task_size",
        lambda cfg: cfg.data.kind != "task",
        "only data.kind='task' reads it",
        "choose data.kind='task'",
    ),
    UnusedKeyRule(
        "rl.objective rl.advantage rl.loss_mean rl.updates rl.clip_low rl.clip_high rl.kl rl.kl_kind rl.reference "
        "rl.correction rl.correction_low rl.correction_high rl.replay rl.mismatch_limit "
        "rl.reset_patience rl.mixed_only rl.most_rounds rl.truncated rl.length_penalty_from rollout.max_tokens "
        "rollout.temperature rollout.slots rollout.pass_tokens rollout.cache_gib rollout.cache reward.use "
        "rollout.tp rollout.pp rollout.ep rollout.etp rollout.ranks rollout.experts rl.staleness "
        "rollout.engine rollout.url rollout.folder rollout.timeout_s "
        "reward.weights reward.timeout_s reward.workers reward.on_error metrics.rollouts_every",
        lambda cfg: not cfg.is_rl,
        "rl.group_size=0 means no reinforcement learning",
        "set rl.group_size",
    ),
    *UNUSED_VLLM_RULES,
    UnusedKeyRule(
        "rollout.tp rollout.pp rollout.ep rollout.etp",
        lambda cfg: cfg.is_rl and not has_rollout_mapping(cfg),
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
        "rollout.experts",
        lambda cfg: not has_moe_layers(cfg.model),
        "the model has no experts",
        "choose model.layer_pattern='M'",
    ),
    UnusedKeyRule(
        "rollout.cache",
        lambda cfg: not any(caches_latents(layer) for layer in cfg.model.layers),
        "only model.attention='mla' has latents, which sparse attention (model.index_topk) always caches",
        "choose model.attention='mla' without model.index_topk",
    ),
    UnusedKeyRule(
        "rl.clip_low rl.clip_high",
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
        "rl.kl_kind rl.reference rl.reset_patience",
        lambda cfg: cfg.rl.kl == 0,
        "rl.kl=0.0 has no reference model",
        "set rl.kl",
    ),
    UnusedKeyRule(
        "rl.most_rounds",
        lambda cfg: not cfg.rl.mixed_only,
        "rl.mixed_only=false samples one round",
        "set rl.mixed_only=true",
    ),
    UnusedKeyRule(
        "reward.timeout_s reward.workers reward.on_error",
        lambda cfg: not uses_python_reward(cfg),
        "the built-in rewards run in the ranks themselves and do not fail",
        "set reward.use='FILE.py:FUNCTION'",
    ),
    UnusedKeyRule(
        "data.path",
        lambda cfg: cfg.data.kind in ("python-docs", "synthetic", "program", "task"),
        "data.kind reads no files",
        "choose data.kind='text', 'tokens', 'huggingface', 'sft' or 'preference'",
    ),
    UnusedKeyRule(
        "data.validation_fraction data.document_end data.shuffle",
        lambda cfg: cfg.data.kind == "program",
        "a program passes the samples, in order and with their documents",
        "choose another data.kind",
    ),
    UnusedKeyRule(
        "data.weights data.corrupt",
        lambda cfg: cfg.data.kind in ("python-docs", "synthetic", "program", "task"),
        "data.kind has no paths",
        "choose data.kind='text', 'tokens', 'huggingface', 'sft' or 'preference'",
    ),
    UnusedKeyRule(
        "data.column data.split data.validation_split data.subset data.revision data.streaming",
        lambda cfg: cfg.data.kind != "huggingface",
        "only data.kind='huggingface' reads it",
        "choose data.kind='huggingface'",
    ),
    UnusedKeyRule(
        "data.validation_fraction",
        lambda cfg: has_validation_split(cfg) and cfg.data.validation_fraction > 0,
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
        "data.document_end",
        lambda cfg: cfg.data.kind in ("sft", "preference", "task", "prompts") or cfg.data.document_index,
        "the documents are known already",
        "choose another data.kind, or data.document_index=false",
    ),
    UnusedKeyRule(
        "data.packing",
        lambda cfg: cfg.data.kind not in PACKED_KINDS,
        "only data.kind='python-docs', 'text', 'tokens' and 'huggingface' read it",
        "choose one of these; conversations, pairs and rollouts are packed by best fit always",
    ),
    UnusedKeyRule(
        "data.overlong",
        lambda cfg: cfg.data.kind not in ("sft", "preference"),
        "only data.kind='sft' and 'preference' read it",
        "choose one of these",
    ),
    UnusedKeyRule(
        "data.skip_bad_rows",
        lambda cfg: cfg.data.skip_bad_rows and cfg.data.kind not in ("sft", "preference", "prompts"),
        "only data.kind='sft', 'preference' and 'prompts' read it",
        "choose one of these",
    ),
    UnusedKeyRule(
        "data.chat_template",
        lambda cfg: cfg.data.kind not in ("sft", "preference", "prompts"),
        "only data.kind='sft', 'preference' and 'prompts' read it",
        "choose one of these",
    ),
    UnusedKeyRule(
        "data.weights data.corrupt",
        lambda cfg: cfg.data.kind == "prompts",
        "data.kind='prompts' reads all lines of all paths, once an epoch",
        "choose another data.kind",
    ),
    UnusedKeyRule(
        "data.shuffle",
        lambda cfg: cfg.data.kind == "task",
        "problems are drawn from run.seed",
        "choose data.kind='prompts'",
    ),
    UnusedKeyRule(
        "data.token_dtype data.document_index",
        lambda cfg: cfg.data.kind != "tokens",
        "only data.kind='tokens' reads it",
        "choose data.kind='tokens'",
    ),
    UnusedKeyRule(
        "checkpoint.keep",
        lambda cfg: not cfg.checkpoint.saves,
        "checkpoint.every=0 and at_end=false save nothing",
        "set checkpoint.every or at_end=true",
    ),
    UnusedKeyRule(
        "checkpoint.async_save",
        lambda cfg: not cfg.checkpoint.saves,
        "checkpoint.every=0 and at_end=false save nothing",
        "set checkpoint.every or at_end=true",
    ),
    UnusedKeyRule(
        "checkpoint.peer_every",
        lambda cfg: not cfg.faults.regroups,
        "faults.on_loss='stop' ends the job with the first lost rank, and its snapshots with it",
        "set faults.on_loss='regroup'",
    ),
    UnusedKeyRule(
        "checkpoint.keep_every",
        lambda cfg: cfg.checkpoint.keep == 0,
        "checkpoint.keep=0 keeps all",
        "set checkpoint.keep",
    ),
    UnusedKeyRule(
        "metrics.wandb_project metrics.wandb_entity metrics.wandb_name metrics.wandb_group metrics.wandb_tags",
        lambda cfg: not cfg.metrics.wandb,
        "metrics.wandb=false logs nothing to Weights & Biases",
        "set metrics.wandb=true",
    ),
    UnusedKeyRule(
        "metrics.per_layer",
        lambda cfg: not cfg.metrics.wandb and not cfg.metrics.tensorboard,
        "no tracker is on, and metrics.jsonl has every layer anyway",
        "set metrics.tensorboard=true or metrics.wandb=true",
    ),
    UnusedKeyRule(
        "faults.spike_factor faults.spike_window",
        lambda cfg: cfg.faults.spike == "ignore",
        "faults.spike='ignore' looks for none",
        "choose faults.spike='log'",
    ),
    UnusedKeyRule(
        "faults.replica_check_every faults.straggler_factor",
        lambda cfg: cfg.parallel.world_size == 1,
        "one rank has no others to be compared with",
        "set parallel.world_size",
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
    UnusedKeyRule(
        "faults.max_skips",
        lambda cfg: "skip" not in cfg.faults.actions,
        "nothing is skipped",
        "choose faults.nonfinite='skip'",
    ),
    UnusedKeyRule(
        "faults.min_ranks",
        lambda cfg: not cfg.faults.regroups,
        "faults.on_loss='stop' ends the job with the first lost rank",
        "set faults.on_loss='regroup'",
    ),
    UnusedKeyRule(
        "faults.max_rollbacks",
        lambda cfg: "rollback" not in cfg.faults.actions,
        "nothing is rolled back",
        "choose faults.nonfinite='rollback'",
    ),
    UnusedKeyRule(
        "checkpoint.ignore_keys",
        lambda cfg: not (cfg.checkpoint.init_from or cfg.model.upcycle_from or cfg.rl.reference != "start"),
        "the run begins with random weights",
        "set checkpoint.init_from",
    ),
    UnusedKeyRule(
        "checkpoint.keep_best",
        lambda cfg: cfg.checkpoint.keep == 0 or cfg.checkpoint.every == 0,
        "no checkpoint is deleted: checkpoint.keep=0 keeps all, and checkpoint.every=0 saves one",
        "set checkpoint.keep and checkpoint.every",
    ),
    UnusedKeyRule(
        "checkpoint.verify",
        lambda cfg: cfg.checkpoint.resume == "never",
        "checkpoint.resume='never' reads none",
        "choose checkpoint.resume='auto'",
    ),
)


def _samples_exactly(cfg: Config) -> bool:
    """Return whether rollouts have the bits of training; False where it depends on the machine or on a plan."""
    if cfg.run.device != "cpu" or cfg.run.kernels != "c" or cfg.parallel.mapping == "auto":
        return False
    return not inexact_settings(cfg, "cpu")


def check_unused_keys(explicit_keys: frozenset[str], cfg: Config) -> None:
    """Check that no key that the recipe sets to a non-default value is without effect.

    Args:
        explicit_keys: keys that the recipe and its overrides set, as "section.key", without the keys of a preset.
        cfg: the resulting config.

    Raises:
        ConfigError: one line for each such setting.
    """
    if not _has_layers(cfg.model):
        # `check_config` names the reason.
        return
    idle = idle_keys(cfg)
    raise_all(
        _describe_unused(cfg, name, *reason)
        for name, reason in idle.items()
        if name in explicit_keys and _is_set(cfg, name)
    )


def idle_keys(cfg: Config) -> dict[str, tuple[str, str]]:
    """Return the keys without effect in a recipe whose layers exist, each with the reason and the remedy."""
    found: dict[str, tuple[str, str]] = {}
    for rule in UNUSED_KEY_RULES:
        for name in rule.keys.split() if rule.condition(cfg) else ():
            found.setdefault(name, (rule.reason, rule.remedy))
    for part in chosen_parts(cfg):
        for unused in part.unused_keys():
            for name in unused.names.split():
                found.setdefault(name, (unused.reason, unused.remedy))
    for name in sorted(readers()):
        if reason := _unread_by_parts(cfg, name):
            found.setdefault(name, reason)
    for name, owners in keys_of_absent_parts(cfg.model).items():
        remedies = dict.fromkeys(owner.chosen_by for owner in owners)
        found.setdefault(name, ("no layer reads it", f"choose {join_with_or(list(remedies))}"))
    return found


def keys_of_absent_parts(model: ModelConfig) -> dict[str, tuple[Any, ...]]:
    """Return the keys that no layer of a model reads, with the classes of parts that would."""
    parts = {type(part) for layer in model.all_layers for part in layer.parts()}
    refused = {name for layer in model.all_layers for name in layer.attention.refuses}
    return {
        name: owners for name, owners in layer_readers().items() if name not in refused and parts.isdisjoint(owners)
    }


def _has_layers(model: ModelConfig) -> bool:
    """Return whether the patterns and sizes of a model describe layers."""
    if not 0 < model.num_layers <= MAX_LAYERS or not 0 <= model.mtp_layers <= MAX_LAYERS:
        return False
    try:
        return bool(model.all_layers)
    except (ValueError, ZeroDivisionError):
        return False


def _is_set(cfg: Config, name: str) -> bool:
    """Return whether a key differs from its default."""
    return bool(read_key(cfg, name) != default_of(*name.split(".")))


def _unread_by_parts(cfg: Config, name: str) -> tuple[str, str] | None:
    """Return reason and remedy for a key that other kinds of a part read; None: a chosen part reads it."""
    owners = readers()[name]
    if any(chosen(cfg, group).kind == kind for group, kind in owners):
        return None
    group = owners[0][0]
    kinds = [kind for owner, kind in owners if owner is group]
    value = chosen(cfg, group).kind
    reason = f"only {group.key}={kinds[0]!r} reads it" if len(kinds) == 1 else f"{group.key}={value!r} does not read it"
    return reason, f"choose {group.key}={join_with_or(list(map(repr, kinds)))}"


def _describe_unused(cfg: Config, name: str, reason: str, remedy: str) -> str:
    value = read_key(cfg, name)
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return f"{name}={text} has no effect: {reason}; {remedy}, or leave {name.partition('.')[2]} out"
