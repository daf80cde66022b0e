"""Choice of routing replay (`rl.replay`): does training replay the experts that sampling chose? Torch-free."""

from moefold.config.model import has_moe_layers
from moefold.config.schema import Config


def replays_routing(cfg: Config, *, is_exact: bool) -> tuple[bool, str]:
    """Return whether training replays the choices of sampling, and a log message if `rl.replay` is "auto".

    Args:
        cfg: a recipe of reinforcement learning.
        is_exact: whether sampling has the bits of training, see `inexact_settings`.
    """
    rl = cfg.rl
    if not has_moe_layers(cfg.model) or rl.replay == "off":
        return False, ""
    if rl.replay == "on":
        return True, ""
    if is_exact and rl.updates == 1:
        return False, ""
    if rl.staleness:
        return False, f"rl.replay='auto': off, as rollouts with rl.staleness={rl.staleness} keep no expert choices"
    if counts_replayed_choices(cfg):
        return False, (
            f"rl.replay='auto': off, as moe.bias_update_rate={cfg.moe.bias_update_rate:g} would count choices of the "
            f"weights before rl.updates={rl.updates} updates"
        )
    cause = f"rl.updates={rl.updates}" if is_exact else "sampling differs by rounding"
    return True, f"rl.replay='auto': training sends each token to the experts that sampling chose, as {cause}"


def counts_replayed_choices(cfg: Config) -> bool:
    """Return whether the expert bias would be updated by counts of choices of older weights."""
    return cfg.rl.updates > 1 and cfg.model.expert_bias and cfg.moe.bias_update_rate > 0
