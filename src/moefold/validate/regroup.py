"""Rules on `faults.on_loss="regroup"`: training goes on without lost ranks."""

from collections.abc import Iterator

from moefold.config.chosen import chosen
from moefold.config.groups.dispatcher import DispatcherPart
from moefold.config.schema import Config


def validate_regroup(cfg: Config) -> Iterator[str]:
    """Check that a job can go on without a lost rank."""
    faults = cfg.faults
    p = cfg.parallel
    if not faults.regroups:
        return
    if cfg.is_rl or cfg.rollout.ranks:
        yield (
            "faults.on_loss='regroup' does not rebuild the ranks that sample, of reinforcement learning; "
            "set faults.on_loss='stop'"
        )
    if cfg.sites.is_active:
        yield (
            f"faults.on_loss='regroup' changes the mapping of one site, and sites.count={cfg.sites.count} needs equal "
            "mappings; set faults.on_loss='stop': the other sites go on without a lost one"
        )
    if p.dp == 1:
        yield (
            f"faults.on_loss='regroup' needs a second data-parallel replica, and parallel.world_size={p.world_size} "
            f"with tp={p.tp}, cp={p.cp}, pp={p.pp} is one; raise parallel.world_size, or set faults.on_loss='stop'"
        )
    dispatcher = chosen(cfg, DispatcherPart)
    if dispatcher.has_shared_buffers:
        yield (
            f"faults.on_loss='regroup' cannot rebuild the shared buffers of parallel.dispatcher={dispatcher.kind!r}; "
            "choose parallel.dispatcher='alltoall', or set faults.on_loss='stop'"
        )
    if not cfg.checkpoint.peer_every and not 0 < cfg.checkpoint.every < cfg.run.steps:
        yield (
            "faults.on_loss='regroup' needs a state to go back to, and "
            f"checkpoint.every={cfg.checkpoint.every} saves none before the end of the run, run.steps={cfg.run.steps}; "
            f"set checkpoint.peer_every=1, or checkpoint.every below {cfg.run.steps}"
        )
    if faults.min_ranks >= p.world_size:
        yield (
            f"faults.min_ranks={faults.min_ranks} must be below parallel.world_size={p.world_size}, or no rank may be "
            "lost; lower it, or set faults.on_loss='stop'"
        )


REGROUP_RULES = (validate_regroup,)
