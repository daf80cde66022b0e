"""Rules on failures: regrouping without lost ranks, rollback, and snapshots in the memory of peers."""

from collections.abc import Iterator

from moefold.config.chosen import chosen_in
from moefold.config.groups.dispatcher import DispatcherPart
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.faults import FaultsConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.rl import RLConfig, RolloutConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.sites import SitesConfig
from moefold.message_text import Problem


def validate_regrouped_job(
    faults: FaultsConfig, rl: RLConfig, rollout: RolloutConfig, sites: SitesConfig
) -> Iterator[Problem]:
    """Check that the job can continue without a lost rank: no ranks that sample, and no sites."""
    if not faults.regroups:
        return
    if rl.is_on or rollout.ranks:
        rule = "does not rebuild the ranks that sample, of reinforcement learning"
        yield Problem("faults.on_loss", "regroup", rule, "set faults.on_loss='stop'")
    if sites.is_active:
        rule = f"changes the mapping of one site, and sites.count={sites.count} needs equal mappings"
        way_out = "set faults.on_loss='stop': the other sites go on without a lost one"
        yield Problem("faults.on_loss", "regroup", rule, way_out)


def validate_regrouped_ranks(parallel: ParallelConfig, faults: FaultsConfig) -> Iterator[Problem]:
    """Check that ranks may be lost, and that the other ranks can form new groups."""
    p = parallel
    if not faults.regroups:
        return
    if p.dp == 1:
        rule = (
            f"needs a second data-parallel replica, and parallel.world_size={p.world_size} with tp={p.tp}, "
            f"cp={p.cp}, pp={p.pp} is one"
        )
        yield Problem("faults.on_loss", "regroup", rule, "raise parallel.world_size, or set faults.on_loss='stop'")
    dispatcher = chosen_in(parallel, DispatcherPart)
    if dispatcher.has_shared_buffers:
        rule = f"cannot rebuild the shared buffers of parallel.dispatcher={dispatcher.kind!r}"
        way_out = "choose parallel.dispatcher='alltoall', or set faults.on_loss='stop'"
        yield Problem("faults.on_loss", "regroup", rule, way_out)
    if faults.min_ranks >= p.world_size:
        rule = f"must be below parallel.world_size={p.world_size}, or no rank may be lost"
        yield Problem("faults.min_ranks", faults.min_ranks, rule, "lower it, or set faults.on_loss='stop'")


def validate_state_after_loss(run: RunConfig, checkpoint: CheckpointConfig, faults: FaultsConfig) -> Iterator[Problem]:
    """Check that a state is saved from which the other ranks can continue."""
    if faults.regroups and not checkpoint.peer_every and not 0 < checkpoint.every < run.steps:
        rule = (
            f"needs a state to go back to, and checkpoint.every={checkpoint.every} saves none before the end of "
            f"the run, run.steps={run.steps}"
        )
        way_out = f"set checkpoint.peer_every=1, or checkpoint.every below {run.steps}"
        yield Problem("faults.on_loss", "regroup", rule, way_out)


REGROUP_RULES = (validate_regrouped_job, validate_regrouped_ranks, validate_state_after_loss)


def validate_rollback(run: RunConfig, checkpoint: CheckpointConfig, faults: FaultsConfig) -> Iterator[Problem]:
    """Check that a rollback has checkpoints to load."""
    every = checkpoint.every
    steps = run.steps
    for key in ("nonfinite", "spike"):
        if getattr(faults, key) == "rollback" and not 0 < every < steps:
            rule = (
                f"needs checkpoints to go back to, and checkpoint.every={every} saves none before the end of the "
                f"run, run.steps={steps}"
            )
            way_out = f"set checkpoint.every below {steps}, or faults.{key}='skip'"
            yield Problem(f"faults.{key}", "rollback", rule, way_out)


def validate_peer_snapshots(checkpoint: CheckpointConfig, rl: RLConfig, sites: SitesConfig) -> Iterator[Problem]:
    """Check that snapshots contain the whole state of the run."""
    every = checkpoint.peer_every
    if every > 0 and rl.is_on:
        rule = "has no copy of rollouts and of the reference model of reinforcement learning"
        yield Problem("checkpoint.peer_every", every, rule, "set checkpoint.peer_every=0")
    if every > 0 and sites.is_active:
        rule = "has no copy of the state of the outer optimizer of sites"
        yield Problem("checkpoint.peer_every", every, rule, "set checkpoint.peer_every=0")


FAULT_RULES = (validate_rollback, validate_peer_snapshots)
