"""Flat keys of earlier versions with their places in tables of parts."""

from typing import NamedTuple

KIND = "kind"


class MovedKey(NamedTuple):
    """Place of a flat key of earlier versions: a setting of the part that another key chooses."""

    key: str
    """Key of the part, as "section.key"."""
    setting: str
    """Setting of the part. `KIND`: a flag, which chooses the kind with the old kind in its name."""
    kinds: tuple[str, ...] = ()
    """Kinds that read the setting, or empty for the built-in kinds that have it."""

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
