"""Rules on `faults.on_loss="regroup"`: training continues without lost ranks."""

from collections.abc import Iterator

from moefold.config.checkpoint import CheckpointConfig
from moefold.config.chosen import chosen_in
from moefold.config.faults import FaultsConfig
from moefold.config.groups.dispatcher import DispatcherPart
from moefold.config.parallel import ParallelConfig
from moefold.config.rl import RLConfig, RolloutConfig
from moefold.config.run import RunConfig
from moefold.config.sites import SitesConfig


def validate_regrouped_job(
    faults: FaultsConfig, rl: RLConfig, rollout: RolloutConfig, sites: SitesConfig
) -> Iterator[str]:
    """Check that the job can continue without a lost rank: no ranks that sample, and no sites."""
    if not faults.regroups:
        return
    if rl.is_on or rollout.ranks:
        yield (
            "faults.on_loss='regroup' does not rebuild the ranks that sample, of reinforcement learning; "
            "set faults.on_loss='stop'"
        )
    if sites.is_active:
        yield (
            f"faults.on_loss='regroup' changes the mapping of one site, and sites.count={sites.count} needs equal "
            "mappings; set faults.on_loss='stop': the other sites go on without a lost one"
        )


def validate_regrouped_ranks(parallel: ParallelConfig, faults: FaultsConfig) -> Iterator[str]:
    """Check that ranks may be lost, and that the other ranks can form new groups."""
    p = parallel
    if not faults.regroups:
        return
    if p.dp == 1:
        yield (
            f"faults.on_loss='regroup' needs a second data-parallel replica, and parallel.world_size={p.world_size} "
            f"with tp={p.tp}, cp={p.cp}, pp={p.pp} is one; raise parallel.world_size, or set faults.on_loss='stop'"
        )
    dispatcher = chosen_in(parallel, DispatcherPart)
    if dispatcher.has_shared_buffers:
        yield (
            f"faults.on_loss='regroup' cannot rebuild the shared buffers of parallel.dispatcher={dispatcher.kind!r}; "
            "choose parallel.dispatcher='alltoall', or set faults.on_loss='stop'"
        )
    if faults.min_ranks >= p.world_size:
        yield (
            f"faults.min_ranks={faults.min_ranks} must be below parallel.world_size={p.world_size}, or no rank may be "
            "lost; lower it, or set faults.on_loss='stop'"
        )


def validate_state_after_loss(run: RunConfig, checkpoint: CheckpointConfig, faults: FaultsConfig) -> Iterator[str]:
    """Check that a state is saved from which the other ranks can continue."""
    if faults.regroups and not checkpoint.peer_every and not 0 < checkpoint.every < run.steps:
        yield (
            "faults.on_loss='regroup' needs a state to go back to, and "
            f"checkpoint.every={checkpoint.every} saves none before the end of the run, run.steps={run.steps}; "
            f"set checkpoint.peer_every=1, or checkpoint.every below {run.steps}"
        )


REGROUP_RULES = (validate_regrouped_job, validate_regrouped_ranks, validate_state_after_loss)
