"""Choice of the ranks that train after a loss, and of the state that they restore. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from moefold.checkpoint.peer_snapshot import HeldSteps, PeerSnapshots, SnapshotLayout, choose_members, choose_step
from moefold.launch.regroup import CannotChooseError

Facts = Mapping[int, Any]
"""`snapshot_facts` of each survivor, by job rank."""


class MemberChoice(NamedTuple):
    """Members of the next generation."""

    members: tuple[int, ...]
    """Job ranks, ascending."""
    generation: int
    """Generation of the snapshots that the survivors settle on; 0 without snapshots."""
    step: int | None
    """Step to restore from the snapshots; None: the members load a checkpoint."""


def snapshot_facts(snapshots: PeerSnapshots | None) -> Any:
    """Return the facts of this process for the choice, as JSON: the claims of its `PeerSnapshots`."""
    if snapshots is None:
        return None
    return [
        [generation, rank, {str(step): sorted(ranks) for step, ranks in held_steps.items()}]
        for generation, rank, held_steps in snapshots.claims()
    ]


def choose(facts: Facts, count: int, snapshots: PeerSnapshots | None) -> MemberChoice:
    """Choose `count` survivors, which have all shards of the newest step in memory if possible.

    Args:
        snapshots: snapshots of this process, for their layout.

    Raises:
        CannotChooseError: this process has no snapshot of the mapping that was lost, but another process has one.
    """
    survivors = sorted(facts)
    generation = max((claims[0][0] for claims in facts.values() if claims), default=0)
    if not generation or snapshots is None:
        return MemberChoice(tuple(survivors[:count]), 0, None)
    held_steps, job_ranks = _held_by_rank(facts, generation)
    layout = snapshots.layout_of(generation)
    if layout is None:
        if held_steps:
            raise CannotChooseError
        return MemberChoice(tuple(survivors[:count]), generation, None)
    return MemberChoice(*_members(survivors, count, held_steps, job_ranks, layout, generation))


def _held_by_rank(facts: Facts, generation: int) -> tuple[dict[int, HeldSteps], dict[int, int]]:
    """Return the held steps and the job rank of each survivor, by its rank in a generation."""
    held_steps: dict[int, HeldSteps] = {}
    job_ranks = {}
    for job_rank, claims in facts.items():
        for number, rank, steps in claims or []:
            if number == generation and rank is not None:
                held_steps[rank] = {int(step): frozenset(ranks) for step, ranks in steps.items()}
                job_ranks[rank] = job_rank
    return held_steps, job_ranks


def _members(
    survivors: Sequence[int],
    count: int,
    held_steps: Mapping[int, HeldSteps],
    job_ranks: Mapping[int, int],
    layout: SnapshotLayout,
    generation: int,
) -> tuple[tuple[int, ...], int, int | None]:
    step = choose_step(held_steps, layout)
    chosen = tuple(held_steps) if len(held_steps) <= count else choose_members(held_steps, layout, count)
    if step is None or chosen is None:
        return tuple(survivors[:count]), generation, None
    members = [job_ranks[rank] for rank in chosen]
    # Spares of the lost mapping have no snapshot of it, and get all shards from the other ranks.
    members += [rank for rank in survivors if rank not in job_ranks.values()][: count - len(members)]
    return tuple(sorted(members)), generation, step
