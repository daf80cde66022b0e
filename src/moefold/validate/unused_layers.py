"""Keys without effect in models without certain kinds of layers and experts."""

from moefold.config.chosen import chosen_in
from moefold.config.groups.choice import ChoicePart
from moefold.validate.unused_rule import UnusedKeyRule

LAYER_RULES = (
    UnusedKeyRule(
        "model.qk_norm_width",
        lambda cfg: not cfg.model.qk_norm,
        "model.qk_norm=false normalises nothing",
        "set model.qk_norm=true",
    ),
    UnusedKeyRule(
        "model.qk_norm_after_rope",
        lambda cfg: not cfg.model.qk_norm,
        "model.qk_norm=false normalises nothing",
        "set model.qk_norm=true",
    ),
    UnusedKeyRule(
        "moe.weight_in_expert",
        lambda cfg: cfg.model.router_probs_on_input,
        "model.router_probs_on_input=true applies the routing weights before",
        "leave one of them out",
    ),
    UnusedKeyRule(
        "model.active_experts",
        lambda cfg: (
            not (cfg.model.zero_experts and cfg.model.expert_bias and chosen_in(cfg.moe, ChoicePart).scores_decide)
        ),
        "no expert bias balances experts against zero-computation experts",
        "set model.zero_experts and model.expert_bias=true with moe.choice='topk'",
    ),
    UnusedKeyRule(
        "model.qk_norm_weight",
        lambda cfg: not cfg.model.qk_norm,
        "model.qk_norm=false normalises nothing",
        "set model.qk_norm=true",
    ),
    UnusedKeyRule(
        "model.qk_norm_nope",
        lambda cfg: not cfg.model.qk_norm or "N" not in cfg.model.rope_pattern,
        "there is no norm of queries and keys (model.qk_norm), or no layer of model.rope_pattern is N",
        "set model.qk_norm=true, and choose a pattern with N",
    ),
    UnusedKeyRule(
        "model.attention_chunk_size",
        lambda cfg: "C" not in cfg.model.attention_pattern,
        "no layer of model.attention_pattern is C",
        "choose a pattern with C",
    ),
    UnusedKeyRule(
        "model.nope_temperature_scale",
        lambda cfg: "N" not in cfg.model.rope_pattern or cfg.model.attention == "mla",
        "no layer of model.rope_pattern is N, or model.attention='mla' has no temperature",
        "choose a pattern with N and model.attention='gqa'",
    ),
    UnusedKeyRule(
        "model.nope_temperature_tokens",
        lambda cfg: cfg.model.nope_temperature_scale == 0,
        "model.nope_temperature_scale=0.0 changes no temperature",
        "set model.nope_temperature_scale",
    ),
    UnusedKeyRule(
        "model.mla_scale_latents",
        lambda cfg: cfg.model.attention != "mla",
        "model.attention is not 'mla'",
        "set model.attention='mla'",
    ),
)
