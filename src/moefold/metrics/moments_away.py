"""What `train.offload_optimizer` takes out of a rank's memory, and what an update brings back. Torch-free."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from moefold.config.schema import Config
from moefold.metrics.state_memory import ShardSpec, make_shard_spec, unit_names, unit_weights
from moefold.metrics.weight_shapes import WeightShape
from moefold.parallel.stage_plan import plan_stages

PARAMS_IN_TRANSIT = 3
"""Parameters whose moments an update has in memory: of one they come, of one they are used, of one they go."""


@dataclass(frozen=True, slots=True)
class OptimizerOffloadMemory:
    """Bytes of the moments of the first rank of a pipeline stage."""

    offloaded: int = 0
    """Outside of memory between two updates."""
    in_transit: int = 0
    """Most that an update has in memory of them: those of `PARAMS_IN_TRANSIT` parameters."""


def optimizer_offload_memory(cfg: Config, pp_rank: int) -> OptimizerOffloadMemory:
    """Count the moments that are large enough to leave, as `parallel/moments.py` sends them away.

    Args:
        cfg: a recipe that `check_config` passed.
        pp_rank: pipeline rank.
    """
    p, train = cfg.parallel, cfg.train
    if train.offload_optimizer == "none":
        return OptimizerOffloadMemory()
    names = [name for stage in plan_stages(cfg).of_rank(pp_rank) for name in unit_names(cfg, stage)]
    if names.count("embedding") > 1:
        # The second copy follows the first and has no moments.
        names.remove("embedding")
    degrees = (p.dp * p.cp, p.edp) if p.world_size > 1 and p.zero > 0 else (1, 1)
    weights = (weight.shard(p.tp, p.ep, p.etp) for name in names for weight in unit_weights(cfg, name))
    sizes = list(
        offloaded_moment_sizes(
            make_shard_spec(cfg, degrees, accumulates_gradients=False), weights, train.offload_min_kib
        )
    )
    return OptimizerOffloadMemory(sum(sizes), sum(sorted(sizes)[-PARAMS_IN_TRANSIT:]))


def offloaded_moment_sizes(shard_spec: ShardSpec, weights: Iterable[WeightShape], min_kib: int) -> Iterator[int]:
    """Bytes of the moments of each weight that leave memory.

    Args:
        shard_spec: of the rank.
        weights: what tensor and expert parallelism have left of them.
        min_kib: KiB of one moment that is worth moving.
    """
    for weight in weights:
        one = weight.dp_shards(shard_spec.degrees[weight.is_expert]).numel(0) * shard_spec.moment_bytes
        if one >= max(min_kib * 2**10, 1):
            yield one if weight.uses_muon and weight.part in shard_spec.muon_groups else 2 * one
