"""What `train.offload_optimizer` takes out of a rank's memory, and what an update brings back. Torch-free."""

from dataclasses import dataclass

from moefold.config.schema import Config
from moefold.metrics.state_memory import master_bytes, unit_names, unit_weights
from moefold.parallel.stage_plan import plan_stages


@dataclass(frozen=True, slots=True)
class MomentsAway:
    """Bytes of the moments of the first rank of a pipeline stage."""

    away: int = 0
    """Outside of memory between two updates."""
    in_transit: int = 0
    """Most that an update has in memory of them: those of three parameters."""


def moments_away(cfg: Config, pp_rank: int) -> MomentsAway:
    """Count the moments that are large enough to leave, as `parallel/moments.py` sends them away.

    Args:
        cfg: a recipe that `check_config` passed.
        pp_rank: pipeline rank.
    """
    p, train = cfg.parallel, cfg.train
    if train.offload_optimizer == "none":
        return MomentsAway()
    is_cut = p.world_size > 1 and p.zero > 0
    item = 2 if train.moment_dtype == "bfloat16" else master_bytes(cfg)
    names = [name for stage in plan_stages(cfg).of_rank(pp_rank) for name in unit_names(cfg, stage)]
    if names.count("embedding") > 1:
        # The second copy follows the first and has no moments.
        names.remove("embedding")
    sizes = []
    for weight in (weight.cut(p.tp, p.ep, p.etp) for name in names for weight in unit_weights(cfg, name)):
        degree = (p.edp if weight.is_expert else p.dp * p.cp) if is_cut else 1
        one = weight.shards(degree).numel(0) * item
        is_muons = train.optimizer == "muon" and weight.is_muons and weight.part in train.muon_groups
        if one >= max(train.offload_min_kib * 2**10, 1):
            sizes.append(one if is_muons else 2 * one)
    return MomentsAway(sum(sizes), sum(sorted(sizes)[-3:]))
