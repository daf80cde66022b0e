"""Keys of RoPE that have no effect without another key. Torch-free."""

from moefold.validate.unused_rule import UnusedKeyRule


def _read_by(scaling: str, keys: str) -> UnusedKeyRule:
    """Return the rule of keys that one kind of `model.rope_scaling` reads."""
    return UnusedKeyRule(
        keys,
        lambda cfg: cfg.model.rope_scaling != scaling,
        f"only model.rope_scaling={scaling!r} reads it",
        f"choose model.rope_scaling={scaling!r}",
    )


ROPE_RULES = (
    UnusedKeyRule(
        "model.rope_theta model.rope_fraction model.rope_interleaved model.rope_scaling model.qk_norm_after_rope",
        lambda cfg: not cfg.model.has_rope,
        "no layer of kind F or W of model.attention_pattern is R in model.rope_pattern",
        "choose patterns with such a layer",
    ),
    UnusedKeyRule(
        "model.rope_scaling_factor",
        lambda cfg: cfg.model.rope_scaling == "none",
        "model.rope_scaling='none' scales nothing",
        "choose model.rope_scaling='linear', 'llama3', 'yarn', 'ntk' or 'longrope'",
    ),
    UnusedKeyRule(
        "model.rope_original_seq_len",
        lambda cfg: cfg.model.rope_scaling not in ("llama3", "yarn", "longrope"),
        "only model.rope_scaling='llama3', 'yarn' and 'longrope' read it",
        "choose one of these",
    ),
    _read_by(
        "yarn",
        "model.rope_beta_fast model.rope_beta_slow model.rope_truncate model.rope_attention_factor model.rope_mscale "
        "model.rope_mscale_all_dim",
    ),
    _read_by(
        "longrope",
        "model.rope_short_factors model.rope_long_factors model.rope_short_mscale model.rope_long_mscale",
    ),
    _read_by("llama3", "model.rope_low_freq_factor model.rope_high_freq_factor"),
)
