"""Mismatch of sampler and training in reinforcement learning: its limit, likely causes and ways out."""

from moefold.config.chosen import chosen_in
from moefold.config.groups.dispatcher import WirePart
from moefold.config.model import ModelConfig
from moefold.config.sections.moe import MoEConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.rl import RLConfig, RolloutConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.topology.rollout_mapping import has_rollout_mapping

EXACT_LIMIT = 1e-6
"""Limit in nats if sampling is bitwise equal to training, in any dtype."""
STALE_LIMIT = 1.0
"""Limit in nats on rollouts of older weights: updates cause a mismatch of hundredths, broken weights more."""
ROUNDING_LIMITS = {"float64": 1e-6, "float32": 0.01, "bfloat16": 0.1}
"""Limit in nats by run.dtype if sampling differs by rounding, which sends some tokens to other experts."""


def mismatch_limit(run: RunConfig, moe: MoEConfig, rl: RLConfig, *, is_exact: bool, is_stale: bool = False) -> float:
    """Return the largest mean mismatch of sampler and training, in nats, of the first step on a round of rollouts.

    Args:
        run, moe, rl: sections of a recipe of reinforcement learning.
        is_exact: whether sampling has the bits of training, see `inexact_settings` of validate/exactness.py.
        is_stale: whether older weights sampled the round (`rl.staleness`).
    """
    if is_stale:
        return max(rl.mismatch_limit, STALE_LIMIT)
    if rl.mismatch_limit:
        return rl.mismatch_limit
    if is_exact:
        return EXACT_LIMIT
    if chosen_in(moe, WirePart).rounds:
        # The rounding of the experts' input is coarser than the rounding of any dtype.
        return ROUNDING_LIMITS["bfloat16"]
    return ROUNDING_LIMITS[run.dtype]


def mismatch_advice(
    run: RunConfig,
    model: ModelConfig,
    parallel: ParallelConfig,
    train: TrainConfig,
    rl: RLConfig,
    rollout: RolloutConfig,
) -> str:
    """Return likely causes of a larger mismatch, and ways out."""
    if rollout.uses_server:
        causes = (
            f"the server computes in another dtype than run.dtype={run.dtype!r}; its reload left stale weights or "
            f"broke the weights of the experts (vLLM 0.32 on a CPU does); rollout.folder={rollout.folder!r} has "
            "another RoPE, length, vocabulary or tokenizer than this run"
        )
        way_out = (
            "start the server again, on a GPU or with another version of vLLM, from a folder that moefold "
            "export wrote of this model, or set rollout.engine='own'"
        )
    else:
        causes, way_out = _own_engine(run, model, parallel, rl, rollout)
    if rl.staleness:
        causes = f"training moved the weights that far since they sampled (train.lr={train.lr:g}); {causes}"
        way_out = f"lower train.lr or rl.staleness={rl.staleness}, or {way_out}"
    return f"likely causes: {causes}; {way_out}; if it does no harm, raise rl.mismatch_limit"


def _own_engine(
    run: RunConfig, model: ModelConfig, parallel: ParallelConfig, rl: RLConfig, rollout: RolloutConfig
) -> tuple[str, str]:
    """Return causes and ways out for the own engine, except changes that the recipe has already."""
    causes = ["kernels that compute wrongly on this machine"]
    ways_out = [] if run.kernels == "plain" else ["set run.kernels='plain'"]
    if run.dtype == "bfloat16":
        causes.append("run.dtype='bfloat16' rounds too coarsely for a router whose experts are nearly tied")
        ways_out.append("set run.dtype='float32'")
    # Rollouts of older weights have no recorded choices.
    if rl.replay != "on" and not rl.staleness and model.has_moe_layers:
        causes.append("training chooses other experts than sampling")
        ways_out.append("set rl.replay='on'")
    if has_rollout_mapping(parallel, rl, rollout):
        causes.append("stale weights in the copy that samples")
        ways_out.append("leave rollout.ranks, tp, pp, ep and etp out")
    return "; ".join(causes), ", or ".join(ways_out) or "report it with mismatch.jsonl"
