"""Choice of routing replay (`rl.replay`): does training replay the experts that sampling chose? Torch-free."""

from moefold.config.model import ModelConfig, has_moe_layers
from moefold.config.moe import MoEConfig
from moefold.config.rl import RLConfig


def replays_routing(model: ModelConfig, moe: MoEConfig, rl: RLConfig, *, is_exact: bool) -> tuple[bool, str]:
    """Return whether training replays the choices of sampling, and a log message if `rl.replay` is "auto".

    Args:
        model, moe, rl: sections of a recipe of reinforcement learning.
        is_exact: whether sampling has the bits of training, see `inexact_settings`.
    """
    if not has_moe_layers(model) or rl.replay == "off":
        return False, ""
    if rl.replay == "on":
        return True, ""
    if is_exact and rl.updates == 1:
        return False, ""
    if rl.staleness:
        return False, f"rl.replay='auto': off, as rollouts with rl.staleness={rl.staleness} keep no expert choices"
    if counts_replayed_choices(model, moe, rl):
        return False, (
            f"rl.replay='auto': off, as moe.bias_update_rate={moe.bias_update_rate:g} would count choices of the "
            f"weights before rl.updates={rl.updates} updates"
        )
    cause = f"rl.updates={rl.updates}" if is_exact else "sampling differs by rounding"
    return True, f"rl.replay='auto': training sends each token to the experts that sampling chose, as {cause}"


def counts_replayed_choices(model: ModelConfig, moe: MoEConfig, rl: RLConfig) -> bool:
    """Return whether the expert bias would be updated by counts of choices of older weights."""
    has_bias = model.routed is not None and model.routed.router.expert_bias
    return rl.updates > 1 and has_bias and moe.bias_update_rate > 0
