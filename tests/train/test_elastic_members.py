"""The survivors that train on, and the state that they start from."""

import pytest

from moefold.checkpoint.peer_snapshot import PeerSnapshots, Snapshot, SnapshotGeneration, SnapshotLayout
from moefold.launch.regroup import CannotChooseError
from moefold.train.regroup_loop import MemberChoice, choose_survivors, snapshot_facts

FOUR = SnapshotLayout((1, 2, 3, 0), tuple(((rank,), rank) for rank in range(4)))


def snapshots(rank: int, *steps: int, generation: int = 1) -> PeerSnapshots:
    """Return the shards of rank `rank` of four after some steps: its own, and the shards of the rank before it."""
    made = PeerSnapshots("node")
    slots = [Snapshot(step, None, {}, {(rank - 1) % 4: {}}) for step in steps]
    made.generation = SnapshotGeneration(generation, rank, FOUR, slots)
    return made


def facts_of(*survivors: PeerSnapshots | None) -> dict[int, object]:
    """Facts of survivors whose job ranks are 10, 11, ..."""
    return {10 + number: snapshot_facts(one) for number, one in enumerate(survivors)}


def test_without_snapshots_the_first_survivors_load_a_checkpoint():
    assert choose_survivors(facts_of(None, None, None), 2, None) == MemberChoice((10, 11), 0, None)


def test_the_newest_step_that_all_members_hold_is_found():
    survivors = [snapshots(rank, 7, 8 if rank else 6) for rank in (0, 1, 3)]
    assert choose_survivors(facts_of(*survivors), 3, survivors[0]) == MemberChoice((10, 11, 12), 1, 7)


def test_a_survivor_with_the_only_copy_of_a_shard_stays():
    # Rank 3's peer, 0, is lost; rank 2 has a copy on 3.
    survivors = [snapshots(rank, 8) for rank in (1, 2, 3)]
    assert choose_survivors(facts_of(*survivors), 2, survivors[0]) == MemberChoice((10, 12), 1, 8)


def test_shards_lost_with_their_peer_need_a_checkpoint():
    survivors = [snapshots(rank, 8) for rank in (2, 3)]
    assert choose_survivors(facts_of(*survivors), 2, survivors[0]) == MemberChoice((10, 11), 1, None)


def test_spares_fill_the_places_and_cannot_choose():
    spare = PeerSnapshots("node")
    survivors = [spare, *(snapshots(rank, 8) for rank in (1, 2, 3))]
    assert choose_survivors(facts_of(*survivors), 4, survivors[1]) == MemberChoice((10, 11, 12, 13), 1, 8)
    with pytest.raises(CannotChooseError):
        choose_survivors(facts_of(*survivors), 4, spare)


def test_first_snapshot_of_a_mapping_counts_where_a_rank_knows_that_all_have_it():
    confirmed = snapshots(1, 9, generation=2)
    others = [snapshots(rank, 8, generation=1) for rank in (2, 3)]
    for rank, one in zip((2, 3), others, strict=True):
        one._unconfirmed = SnapshotGeneration(2, rank, FOUR, [Snapshot(9, None, {}, {rank - 1: {}})])
    assert choose_survivors(facts_of(confirmed, *others), 3, others[0]) == MemberChoice((10, 11, 12), 2, 9)
    # Otherwise the snapshots before count.
    assert choose_survivors(facts_of(*others), 2, others[0]).generation == 1
