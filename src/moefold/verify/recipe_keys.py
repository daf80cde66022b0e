"""Classes of the recipe keys: those that the oracle has to read, and those that do not change what it computes.

Every key of the schema is in one class. If a key that counts is set and no formula has read it, the verdict means
nothing: `unread_keys` finds it.
"""

from types import MappingProxyType

from moefold.config.schema import Config
from moefold.validate.unused import idle_keys
from moefold.verify.read_record import ReadRecord

FORMULA_KEYS = """
run.steps
model.num_layers model.num_attention_heads model.num_query_groups model.head_dim model.attention model.q_lora_rank
model.kv_lora_rank model.qk_nope_head_dim model.qk_rope_head_dim model.v_head_dim model.mla_scale_latents
model.layer_pattern model.mtp_layers model.num_experts model.top_k model.zero_experts model.active_experts
model.moe_hidden_size model.router_softmax model.sparsemixer_jitter model.router_score model.router_normalize
model.router_scaling_factor model.num_groups model.top_groups model.expert_bias model.shared_expert_ffn_hidden_size
model.moe_bias model.moe_activation model.swiglu_alpha model.swiglu_limit model.router_probs_on_input model.router_bias
model.moe_shortcut model.shared_expert_gate model.qk_norm model.qk_norm_width model.qk_norm_after_rope
model.qk_norm_weight model.qk_norm_nope model.qkv_bias model.attention_output_bias model.attention_sinks
model.attention_gate model.attention_gate_width model.attention_scale model.attention_pattern model.sliding_window
model.attention_chunk_size model.linear_attention model.linear_num_key_heads model.linear_num_value_heads
model.linear_key_head_dim model.linear_conv_bias model.linear_full_rank_gates
model.linear_decay_bound model.index_topk model.index_heads model.index_head_dim model.index_pattern
model.index_rope_interleaved model.norm model.norm_placement model.embedding_multiplier model.residual_multiplier
model.logits_divisor model.tie_embeddings model.head_bias model.zero_centered_norms model.norm_eps model.rope_theta
model.rope_fraction model.rope_interleaved model.rope_pattern model.nope_temperature_scale
model.nope_temperature_tokens model.rope_scaling model.rope_scaling_factor model.rope_original_seq_len
model.rope_short_factors model.rope_long_factors model.rope_short_mscale model.rope_long_mscale
model.rope_low_freq_factor model.rope_high_freq_factor model.rope_beta_fast model.rope_beta_slow model.rope_truncate
model.rope_attention_factor model.rope_mscale model.rope_mscale_all_dim
moe.capacity_factor moe.eval_capacity_factor moe.drop_policy moe.drop_scope moe.aux_loss moe.aux_kind moe.z_loss
moe.bias_update_rate moe.choice moe.sinkhorn_iterations moe.skew moe.input_jitter moe.sparsemixer_sampling
moe.dispatch_precision moe.replay
train.micro_batch_size train.optimizer train.muon_groups train.muon_momentum train.muon_ns_steps train.spsa_eps
train.spsa_max_gradient train.lr train.min_lr train.warmup_steps train.lr_schedule train.decay_steps train.weight_decay
train.beta1 train.beta2 train.eps train.reset_moments_every train.gradient_delay train.delay_correction train.clip_grad
train.mtp_loss train.indexer_stage train.indexer_loss
lora.rank lora.alpha
align.method align.gamma align.desirable_weight align.undesirable_weight
"""
"""Keys of the maths of a step: the oracle reads each of them that is set."""

SITES_FORMULA_KEYS = """
sites.every sites.topology sites.first sites.fragment_layers sites.overlap sites.keep_local sites.precision
sites.density sites.values sites.residual sites.lr sites.momentum sites.nesterov sites.penalty sites.clip sites.moments
sites.weigh sites.experts sites.merge_experts sites.merge_every sites.merge_until
"""
"""Keys of the rounds of sites: the oracle of sites reads them, and `moefold verify` says that it compares no round."""

OTHER_KEYS = MappingProxyType(
    {
        "mapping: what is compared with the oracle, and must not change the result": """
parallel.mapping parallel.world_size parallel.tp parallel.cp parallel.pp parallel.ep parallel.etp parallel.order
parallel.moe_order parallel.schedule parallel.virtual_stages parallel.schedule_csv parallel.pipeline_layout
parallel.zero parallel.dispatcher parallel.receive_factor parallel.overlap_experts parallel.overlap_tp parallel.context
parallel.placement parallel.attention_hosts parallel.attention_tolerance parallel.attention_pool
parallel.attention_block parallel.elastic moe.llep_threshold moe.llep_capacity moe.llep_min_tokens moe.pad_to_capacity
moe.weight_in_expert
""",
        "memory and speed: the same result": """
run.compile run.cuda_graphs run.kernels run.deterministic run.check_memory train.recompute train.memory_budget_gib
train.offload train.offload_to train.offload_optimizer train.offload_dir train.offload_min_kib train.offload_limit_gib
train.offload_waits train.loss_chunk
""",
        "number formats: the comparison is in float64, or has a tolerance of its own": """
run.dtype run.device moe.router_dtype train.precision train.moment_dtype
""",
        "sizes that the parameters have: another one does not fit the formulas": """
model.preset model.hidden_size model.ffn_hidden_size model.vocab_size model.moe_ffn_hidden_size model.linear_conv_kernel
model.linear_gate_rank model.linear_value_head_dim train.seq_len train.global_batch_size
""",
        "initial weights and random numbers: both sides begin with the same": """
run.seed model.init_std model.upcycle_from model.upcycle_router model.upcycle_scaling model.upcycle_noise lora.init_from
lora.targets checkpoint.init_from
""",
        "samples: both sides read the same, and the oracle takes tokens, documents, weights and columns from them": """
data.kind data.path data.task data.task_size data.weights data.tokenizer data.token_dtype data.validation_fraction
data.document_end data.document_index data.packing data.corrupt data.skip_bad_rows data.shuffle data.column data.split
data.validation_split data.subset data.revision data.streaming data.chat_template data.overlong
align.reward align.threshold align.beta align.weight_cap align.template align.want
""",
        "files, logs and failures: no part of a step": """
run.dir run.epochs moe.trace_every train.eval_every train.eval_samples
checkpoint.dir checkpoint.every checkpoint.at_end checkpoint.keep checkpoint.keep_every checkpoint.keep_best
checkpoint.verify checkpoint.ignore_keys checkpoint.async_save checkpoint.peer_every checkpoint.resume
metrics.tensorboard metrics.wandb metrics.wandb_project metrics.wandb_entity metrics.wandb_name metrics.wandb_group
metrics.wandb_tags metrics.per_layer metrics.peak_tflops metrics.memory_every metrics.expert_counts_every
metrics.rollouts_every
faults.timeout_s faults.check_dispatch faults.nonfinite faults.spike faults.spike_factor faults.spike_window
faults.max_skips faults.max_rollbacks faults.straggler_factor faults.replica_check_every faults.on_loss
faults.min_ranks
sites.count sites.number sites.meet sites.secret sites.method sites.quorum sites.grace_s sites.timeout_s
""",
        "rollouts: `moefold verify` says that it compares none; an objective is judged by its own settings": """
rl.group_size rl.objective rl.advantage rl.loss_mean rl.updates rl.staleness rl.clip_low rl.clip_high rl.correction
rl.correction_low rl.correction_high rl.replay rl.mismatch_limit rl.kl rl.kl_kind rl.reference rl.reset_patience
rl.mixed_only rl.most_rounds rl.truncated rl.length_penalty_from
rollout.engine rollout.url rollout.folder rollout.timeout_s rollout.ranks rollout.tp rollout.pp rollout.ep rollout.etp
rollout.experts rollout.max_tokens rollout.temperature rollout.slots rollout.pass_tokens rollout.cache_gib rollout.cache
reward.use reward.weights reward.timeout_s reward.workers reward.on_error
""",
    }
)
"""Keys that no formula of a step has to read, by the reason."""


def unread_keys(cfg: Config, reads: ReadRecord, *, has_rounds: bool) -> list[str]:
    """Return the keys that are set and matter, and that no formula has read, as "section.key=value".

    Keys without effect in this recipe are no such keys (`validate/unused.py`): a preset may set them.

    Args:
        cfg: the recipe.
        reads: what the oracle has read of it.
        has_rounds: whether rounds of sites are compared as well.
    """
    other = {key for keys in OTHER_KEYS.values() for key in keys.split()}
    other |= set() if has_rounds else set(SITES_FORMULA_KEYS.split())
    unread = [name for name in reads.unread(cfg) if name not in other]
    if unread:
        idle = idle_keys(cfg)
        unread = [name for name in unread if name not in idle]
    return [f"{name}={_value(cfg, name)!r}" for name in unread]


def _value(cfg: Config, name: str) -> object:
    section, key = name.split(".")
    return getattr(getattr(cfg, section), key)
