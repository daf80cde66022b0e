"""Validation of a config before any rank starts, without torch.

`check_config` uses the settings only; `train/start.py` checks the machine that will run them. Each rule is a function
that yields one message per violation: key, value, rule and the nearest legal settings. Rules on one key are here, rules
between keys in `model.py`, `moe.py`, `parallel.py`, `train.py` and `memory.py`, settings without effect in `unused.py`,
and the memory of a step in `memory_need.py`.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.errors import ConfigError, raise_all
from moefold.topology.layout import Layout, fold
from moefold.topology.rollout_mapping import has_rollout_mapping, rollout_config, rollout_degrees
from moefold.validate.align import ALIGN_RULES
from moefold.validate.cuda_graphs import CUDA_GRAPH_RULES
from moefold.validate.lora import LORA_RULES
from moefold.validate.memory import OFFLOAD_RULES, RECOMPUTE_RULES, validate_memory
from moefold.validate.model import MODEL_RULES
from moefold.validate.moe import ROUTING_RULES, TRAINING_ONLY_RULES
from moefold.validate.parallel import OVERLAP_RULES, PARALLEL_RULES, validate_collective_order
from moefold.validate.regroup import REGROUP_RULES
from moefold.validate.rl import RL_RULES
from moefold.validate.rollout_experts import validate_rollout_experts
from moefold.validate.rollout_vllm import validate_vllm
from moefold.validate.shortcut import SHORTCUT_RULES
from moefold.validate.sites import SITES_RULES
from moefold.validate.sparse import SELECTION_STAGE_RULES, SPARSE_TRAINING_RULES
from moefold.validate.spsa import SPSA_RULES
from moefold.validate.train import DATA_RULES, FAULT_RULES, KERNEL_RULES, TRAIN_RULES


@dataclass(frozen=True)
class RangeRule:
    """Rule on the value of each of some keys of one section."""

    rule: str
    is_legal: Callable[[Any], bool]
    section: str
    keys: str


def _at_least(low: int) -> tuple[str, Callable[[Any], bool]]:
    return f"must be at least {low}", lambda value: value >= low


HTTP = ("http://", "https://")
POSITIVE: tuple[str, Callable[[Any], bool]] = ("must be greater than 0", lambda value: value > 0)
FRACTION: tuple[str, Callable[[Any], bool]] = (
    "must lie in [0, 1): at least 0 and below 1",
    lambda value: 0 <= value < 1,
)

RANGES = (
    RangeRule("must name a folder", bool, "run", "dir"),
    RangeRule("must be at least 0 and below 2**63", lambda seed: 0 <= seed < 2**63, "run", "seed"),
    RangeRule(*_at_least(1), "run", "steps"),
    RangeRule("must be at least 0 (0: run.steps)", lambda epochs: epochs >= 0, "run", "epochs"),
    RangeRule(*_at_least(1), "model", "num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size"),
    RangeRule(*_at_least(1), "model", "vocab_size num_experts top_k moe_ffn_hidden_size rope_original_seq_len"),
    RangeRule("must be at least 0 (0: hidden_size/num_attention_heads)", lambda size: size >= 0, "model", "head_dim"),
    RangeRule(
        "must be at least 0 (0: none)",
        lambda size: size >= 0,
        "model",
        "shared_expert_ffn_hidden_size moe_hidden_size zero_experts",
    ),
    RangeRule("must be at least 0 (0: as all choices)", lambda mean: mean >= 0, "model", "active_experts"),
    RangeRule("must be at least 0 (0: no latent)", lambda rank: rank >= 0, "model", "q_lora_rank"),
    RangeRule(*_at_least(1), "model", "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"),
    RangeRule("must be at least 0 (0: no layer of kind W)", lambda window: window >= 0, "model", "sliding_window"),
    RangeRule("must be at least 0 (0: no layer of kind C)", lambda size: size >= 0, "model", "attention_chunk_size"),
    RangeRule("must be at least 0 (0: none)", lambda scale: scale >= 0, "model", "nope_temperature_scale"),
    RangeRule(*_at_least(1), "model", "nope_temperature_tokens"),
    RangeRule(
        *_at_least(1),
        "model",
        "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_gate_rank",
    ),
    RangeRule(*_at_least(2), "model", "linear_conv_kernel"),
    RangeRule("must be at most 0 (0: none)", lambda bound: bound <= 0, "model", "linear_decay_bound"),
    RangeRule(*POSITIVE, "model", "swiglu_alpha swiglu_limit"),
    RangeRule(*POSITIVE, "model", "norm_eps init_std rope_low_freq_factor rope_high_freq_factor"),
    RangeRule(*POSITIVE, "model", "sparsemixer_jitter"),
    RangeRule(*POSITIVE, "model", "rope_beta_fast rope_beta_slow"),
    RangeRule(
        "must be at least 0 (0: not given)",
        lambda factor: factor >= 0,
        "model",
        "rope_attention_factor rope_mscale rope_mscale_all_dim rope_short_mscale rope_long_mscale",
    ),
    RangeRule("must be greater than 1", lambda base: base > 1, "model", "rope_theta"),
    RangeRule("must lie in (0, 1]: above 0 and at most 1", lambda part: 0 < part <= 1, "model", "rope_fraction"),
    RangeRule(*_at_least(1), "model", "rope_scaling_factor"),
    RangeRule("must be at least 0 (0: 1/sqrt(head_dim))", lambda scale: scale >= 0, "model", "attention_scale"),
    RangeRule(*POSITIVE, "model", "embedding_multiplier residual_multiplier logits_divisor"),
    RangeRule(*_at_least(1), "parallel", "world_size tp cp pp ep etp virtual_stages receive_factor attention_block"),
    RangeRule(
        "must lie between 0 and 1: 0.1 keeps 10 % above the mean",
        lambda tolerance: 0 <= tolerance <= 1,
        "parallel",
        "attention_tolerance",
    ),
    RangeRule("must be at least 0 (0: all ranks)", lambda ranks: ranks >= 0, "parallel", "attention_pool"),
    RangeRule("must be at least 0 (0: dropless)", lambda factor: factor >= 0, "moe", "capacity_factor"),
    RangeRule(
        "must be at least 0 (0: dropless), or -1 (as moe.capacity_factor)",
        lambda factor: factor >= 0 or factor == -1,
        "moe",
        "eval_capacity_factor",
    ),
    RangeRule("must be at least 0 (0: off)", lambda weight: weight >= 0, "moe", "aux_loss z_loss"),
    RangeRule("must lie in [0, 1): at least 0 (0: off) and below 1", lambda part: 0 <= part < 1, "moe", "input_jitter"),
    RangeRule("must lie in (0, 1]: above 0 and at most 1", lambda part: 0 < part <= 1, "moe", "skew"),
    RangeRule(*_at_least(1), "moe", "sinkhorn_iterations"),
    RangeRule("must be at least 0 (0: the bias stays)", lambda rate: rate >= 0, "moe", "bias_update_rate"),
    RangeRule(*POSITIVE, "model", "router_scaling_factor"),
    RangeRule("must be at least 0 (0: none)", lambda noise: noise >= 0, "model", "upcycle_noise"),
    RangeRule(*_at_least(1), "model", "num_groups top_groups"),
    RangeRule(*_at_least(1), "moe", "llep_threshold llep_capacity llep_min_tokens"),
    RangeRule(*_at_least(1), "train", "seq_len micro_batch_size global_batch_size eval_samples"),
    RangeRule("must be at least 0 (0: none)", lambda layers: layers >= 0, "model", "mtp_layers"),
    RangeRule("must be at least 0 (0: all keys)", lambda keys: keys >= 0, "model", "index_topk"),
    RangeRule(*_at_least(1), "model", "index_heads index_head_dim"),
    RangeRule("must be at least 0 (0: the indexers do not learn)", lambda c: c >= 0, "train", "indexer_loss"),
    RangeRule(*POSITIVE, "train", "lr eps mtp_loss spsa_eps spsa_max_gradient"),
    RangeRule("must be at least 0 (0: never)", lambda n: n >= 0, "train", "reset_moments_every"),
    RangeRule(*_at_least(0), "train", "min_lr warmup_steps decay_steps weight_decay"),
    RangeRule(*FRACTION, "train", "beta1 beta2 muon_momentum"),
    RangeRule(*_at_least(1), "train", "muon_ns_steps"),
    RangeRule("must be at least 0 (0: off)", lambda norm: norm >= 0, "train", "clip_grad"),
    RangeRule("must be at least 0 (0: none)", lambda factor: factor >= 0, "train", "delay_correction"),
    RangeRule("must be at least 0 (0: never)", lambda steps: steps >= 0, "train", "eval_every"),
    RangeRule("must be at least 0 (0: all), or -1 (automatic)", lambda tokens: tokens >= -1, "train", "loss_chunk"),
    RangeRule("must be at least 0 (0: all)", lambda size: size >= 0, "train", "offload_min_kib"),
    RangeRule("must be at least 0 (0: no limit)", lambda size: size >= 0, "train", "offload_limit_gib"),
    RangeRule("must be at least 0 (0: the device's)", lambda size: size >= 0, "train", "memory_budget_gib"),
    RangeRule(*FRACTION, "data", "validation_fraction"),
    RangeRule(
        "must be at least 0, or -1 (a sample is one document)", lambda token: token >= -1, "data", "document_end"
    ),
    RangeRule("must name a column", bool, "align", "reward"),
    RangeRule(*POSITIVE, "align", "beta desirable_weight undesirable_weight"),
    RangeRule(*_at_least(0), "align", "gamma"),
    RangeRule("must be at least 1 (0: none)", lambda cap: cap >= 1 or cap == 0, "align", "weight_cap"),
    RangeRule("must be a finite number", math.isfinite, "align", "want"),
    RangeRule("must be at least 0 (0: no adapters)", lambda rank: rank >= 0, "lora", "rank"),
    RangeRule(*POSITIVE, "lora", "alpha"),
    RangeRule("must be at least 0 (0: never)", lambda steps: steps >= 0, "checkpoint", "every"),
    RangeRule("must be at least 0 (0: never)", lambda steps: steps >= 0, "checkpoint", "peer_every"),
    RangeRule("must be at least 0 (0: all)", lambda count: count >= 0, "checkpoint", "keep"),
    RangeRule("must be at least 0 (0: none)", lambda count: count >= 0, "checkpoint", "keep_every"),
    RangeRule("must be at least 0 (0: never)", lambda steps: steps >= 0, "moe", "trace_every"),
    RangeRule("must be at least 0 (0: never)", lambda steps: steps >= 0, "metrics", "expert_counts_every memory_every"),
    RangeRule(*_at_least(1), "faults", "timeout_s"),
    RangeRule(*POSITIVE, "faults", "spike_factor"),
    RangeRule("must be above 1, or 0 (off)", lambda factor: factor > 1 or factor == 0, "faults", "straggler_factor"),
    RangeRule(*_at_least(3), "faults", "spike_window"),
    RangeRule("must be at least 0 (0: never)", lambda steps: steps >= 0, "faults", "replica_check_every"),
    RangeRule(*_at_least(1), "faults", "max_skips max_rollbacks min_ranks"),
    RangeRule(
        "must have at most 128 characters, and none of / \\ # ? % :",
        lambda name: len(name) <= 128 and not set(name) & set("/\\#?%:"),
        "metrics",
        "wandb_project",
    ),
    RangeRule(
        "must be a list of tags of 1 to 64 characters",
        lambda tags: all(1 <= len(tag) <= 64 for tag in tags),
        "metrics",
        "wandb_tags",
    ),
    RangeRule("must be at least 0 (0: never)", lambda steps: steps >= 0, "metrics", "rollouts_every"),
    RangeRule(*_at_least(1), "data", "task_size"),
    RangeRule(
        "must be at least 2, or 0 (no reinforcement learning)", lambda size: size >= 2 or size == 0, "rl", "group_size"
    ),
    RangeRule(*_at_least(1), "rl", "updates most_rounds"),
    RangeRule("must lie in (0, 1]: above 0 and at most 1", lambda part: 0 < part <= 1, "rl", "clip_low"),
    RangeRule(*POSITIVE, "rl", "clip_high"),
    RangeRule("must lie in [0, 1]", lambda bound: 0 <= bound <= 1, "rl", "correction_low"),
    RangeRule(*_at_least(1), "rl", "correction_high"),
    RangeRule("must be at least 0 (0: off)", lambda value: value >= 0, "rl", "kl reset_patience length_penalty_from"),
    RangeRule("must be at least 0 (0: by dtype and sampler)", lambda value: value >= 0, "rl", "mismatch_limit"),
    RangeRule("must be at least 0 (0: the newest weights sample)", lambda steps: steps >= 0, "rl", "staleness"),
    RangeRule("must name 'start', a checkpoint, a run or a Hugging Face folder", bool, "rl", "reference"),
    RangeRule("must be at least 0 (0: the training ranks sample)", lambda count: count >= 0, "rollout", "ranks"),
    RangeRule("must be at least 0 (0: as in training)", lambda degree: degree >= 0, "rollout", "tp pp ep etp"),
    RangeRule(*_at_least(1), "rollout", "max_tokens slots pass_tokens"),
    RangeRule(*POSITIVE, "rollout", "temperature cache_gib timeout_s"),
    RangeRule("must begin with http:// or https://", lambda url: url.startswith(HTTP), "rollout", "url"),
    RangeRule(*POSITIVE, "reward", "timeout_s"),
    RangeRule(*_at_least(1), "reward", "workers"),
    RangeRule("must lie between 1 and 1024", lambda count: 1 <= count <= 1024, "sites", "count"),
    RangeRule("must be at least 0, or -1 (all sites on this machine)", lambda n: n >= -1, "sites", "number"),
    RangeRule(*_at_least(1), "sites", "every"),
    RangeRule(*_at_least(0), "sites", "first"),
    RangeRule("must be at least 0 (0: more than half of sites.count)", lambda n: n >= 0, "sites", "quorum"),
    RangeRule(*POSITIVE, "sites", "lr timeout_s"),
    RangeRule(*FRACTION, "sites", "momentum"),
    RangeRule("must lie between 0 and 1", lambda part: 0 <= part <= 1, "sites", "keep_local residual merge_experts"),
    RangeRule(*_at_least(1), "sites", "merge_every merge_until"),
    RangeRule("must lie between 1/4096 and 1", lambda part: 1 / 4096 <= part <= 1, "sites", "density"),
    RangeRule("must be at least 0 (0: no limit)", lambda limit: limit >= 0, "sites", "clip"),
    RangeRule("must be at least 0 (0: all layers)", lambda layers: layers >= 0, "sites", "fragment_layers"),
    RangeRule("must be at least 0 (0: from past rounds)", lambda grace_s: grace_s >= 0, "sites", "grace_s"),
    RangeRule("must be at least 0 (0: wait for each round)", lambda steps: steps >= 0, "sites", "overlap"),
    RangeRule("must be at least 0 (0: look the device up)", lambda peak: peak >= 0, "metrics", "peak_tflops"),
)


def validate_ranges(cfg: Config) -> Iterator[str]:
    """Yield one message for each key whose value is out of its range."""
    for entry in RANGES:
        for key in entry.keys.split():
            value = getattr(getattr(cfg, entry.section), key)
            if not entry.is_legal(value):
                yield f"{entry.section}.{key}={value!r} {entry.rule}"


RULES = (
    *MODEL_RULES,
    *ROUTING_RULES,
    *SHORTCUT_RULES,
    *SELECTION_STAGE_RULES,
    *PARALLEL_RULES,
    *TRAIN_RULES,
    *RECOMPUTE_RULES,
    *OFFLOAD_RULES,
    *OVERLAP_RULES,
    *DATA_RULES,
    *FAULT_RULES,
    *KERNEL_RULES,
    *CUDA_GRAPH_RULES,
)


ROLLOUT_RULES = (validate_rollout_experts, validate_vllm)

_DEGREE_KEY = re.compile(r"\bparallel\.(tp|pp|ep|etp)\b")


def check_config(cfg: Config, *, is_training: bool = True) -> Layout:
    """Check every setting and combination, and return the rank layout.

    Args:
        cfg: the settings.
        is_training: whether the model is trained; inference also allows settings without a gradient.

    Raises:
        ConfigError: one line for each violation. Rules between keys run only if every key is in its range and the
            degrees fold.
    """
    raise_all(validate_ranges(cfg))
    p = cfg.parallel
    layout = fold(
        world_size=p.world_size, tp=p.tp, cp=p.cp, pp=p.pp, ep=p.ep, etp=p.etp, order=p.order, moe_order=p.moe_order
    )
    # A model is used with the data section of its training, which names its tokenizer.
    training_only = (
        *TRAINING_ONLY_RULES,
        *SPARSE_TRAINING_RULES,
        *LORA_RULES,
        *ALIGN_RULES,
        *RL_RULES,
        *ROLLOUT_RULES,
        *SITES_RULES,
        *REGROUP_RULES,
        *SPSA_RULES,
    )
    training_rules = training_only if is_training else ()
    raise_all(message for rule in (*RULES, *training_rules) for message in rule(cfg))
    raise_all(validate_collective_order(cfg))
    if is_training:
        raise_all(validate_memory(cfg))
        check_rollout_mapping(cfg)
    return layout


def check_rollout_mapping(cfg: Config) -> None:
    """Check the mapping that samples rollouts, if it is another one than that of training.

    Raises:
        ConfigError: it does not fit the ranks or the model.
    """
    if not has_rollout_mapping(cfg):
        return
    try:
        check_config(rollout_config(cfg), is_training=False)
    except ConfigError as error:
        degrees = " ".join(f"{axis}={degree}" for axis, degree in rollout_degrees(cfg).items())
        rules = _DEGREE_KEY.sub(r"rollout.\1", str(error))
        if cfg.rollout.ranks:
            rules = rules.replace("parallel.world_size", "rollout.ranks")
        raise ConfigError(f"rollouts cannot be sampled under {degrees}: {rules}") from None


def check_model(model: ModelConfig) -> None:
    """Check the [model] section alone.

    Raises:
        ConfigError: one line for each violation.
    """
    cfg = Config(model=model)
    raise_all(validate_ranges(cfg))
    raise_all(message for rule in MODEL_RULES for message in rule(cfg))
