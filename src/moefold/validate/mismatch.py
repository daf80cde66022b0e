"""Limit on the difference of log-probabilities between sampler and training (`rl.mismatch_limit`). Torch-free."""

from moefold.config.schema import Config

EXACT_LIMIT = 1e-6
"""Limit in nats where sampling has the bits of training, in any dtype."""
ROUNDING_LIMITS = {"float64": 1e-6, "float32": 0.01, "bfloat16": 0.1}
"""Limit in nats by run.dtype where sampling differs by rounding: some tokens go to other experts then."""


def mismatch_limit(cfg: Config, *, is_exact: bool) -> float:
    """Return the largest mean mismatch of sampler and training, in nats, of a step on rollouts of its own weights.

    Args:
        cfg: a recipe of reinforcement learning.
        is_exact: whether sampling has the bits of training, see `inexact_settings`.
    """
    if cfg.rl.mismatch_limit:
        return cfg.rl.mismatch_limit
    if is_exact:
        return EXACT_LIMIT
    if cfg.moe.dispatch_precision != "dtype":
        # The input of the experts is rounded more coarsely than any dtype does.
        return ROUNDING_LIMITS["bfloat16"]
    return ROUNDING_LIMITS[cfg.run.dtype]


def mismatch_advice(cfg: Config) -> str:
    """Return the likely causes of a larger mismatch, and the ways out."""
    dtype = f"run.dtype={cfg.run.dtype!r}"
    if cfg.rollout.engine == "vllm":
        causes = (
            f"the server computes in another dtype than {dtype}; its reload left stale weights or broke those of the "
            f"experts (vLLM 0.32 on a CPU does); rollout.folder={cfg.rollout.folder!r} has another RoPE, length, "
            "vocabulary or tokenizer than this run"
        )
        way_out = (
            "start a server of its own again, on a GPU or with another version of vLLM, from a folder that moefold "
            "export wrote of this model, or set rollout.engine='own'"
        )
    else:
        causes = (
            f"{dtype} is too coarse for a router whose experts are nearly tied; kernels that compute wrongly here; "
            "stale weights in the copy that samples (rollout.ranks, tp, pp, ep, etp)"
        )
        way_out = "set rl.replay='on', run.kernels='plain', run.dtype='float32', or no mapping of its own for sampling"
    return f"likely causes: {causes}; {way_out}; if it does no harm, raise rl.mismatch_limit"
