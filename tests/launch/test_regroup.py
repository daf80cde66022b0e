"""The agreement of the survivors of a lost rank, with the ranks as threads of one process."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import DistStoreError

from moefold.errors import RunError
from moefold.host.rank_env import RankEnv
from moefold.launch.regroup import LostRankError, NoRankLostError, RankMembership, Regroup, lost_ranks, report_lost
from moefold.launch.rendezvous import HOST, loopback_store

ALL = 4


class Job:
    """The ranks of a job and its store, whose launcher is the test."""

    def __init__(self) -> None:
        self.store = loopback_store()
        self.gone: list[int] = []
        self.find_silent: Callable[[], list[int]] = list
        self.killed: list[int] = []
        self.pool = ThreadPoolExecutor(ALL)
        self.ranks = [self._rank(rank, 60.0) for rank in range(ALL)]

    def _rank(self, rank: int, timeout_s: float) -> Regroup:
        env = RankEnv(rank, rank, ALL, HOST, self.store.port, local_world_size=ALL)
        find_lost = (lambda: self.gone, lambda: self.find_silent())
        regroup = Regroup(env, "cpu", timeout_s, *find_lost, self.killed.append, lambda: None)
        regroup.open_first_store()
        return regroup

    def be_impatient(self, rank: int) -> None:
        """Connect a rank again, with a timeout that is over immediately."""
        self.ranks[rank] = self._rank(rank, 0.0)

    def arrive(self, rank: int, count: int) -> Any:
        """Return a rank's result in the next generation of the first `count` survivors: a generation or an error."""

        def choose(facts: dict[int, Any], lost: Sequence[int]) -> tuple[list[int], Any]:
            if len(facts) < count:
                raise RunError(f"lost {list(lost)}: too few")
            return sorted(facts)[:count], [facts[r]["of"] for r in sorted(facts)]

        try:
            return self.ranks[rank].agree_on_next({"of": rank}, choose)
        except (NoRankLostError, RunError) as error:
            return error

    def all_arrive(self, ranks: Sequence[int], count: int) -> list[Any]:
        return list(self.pool.map(lambda rank: self.arrive(rank, count), ranks))


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.pool.shutdown()


def test_survivors_agree_on_members_and_spares(job: Job) -> None:
    report_lost(job.store, 1)
    found = job.all_arrive([0, 2, 3], 2)
    assert found == [RankMembership(1, (0, 2), (3,), (1,), (0, 2, 3))] * 3
    assert [job.ranks[rank].is_spare for rank in (0, 2, 3)] == [False, False, True]
    assert job.ranks[2].rank == 1


def test_a_spare_takes_the_place_of_a_member(job: Job) -> None:
    report_lost(job.store, 1)
    job.all_arrive([0, 2, 3], 2)
    spare = job.pool.submit(job.ranks[3].wait_as_spare)
    assert job.ranks[2].ended_status() is None
    # Seen by a rank of its machine, not by the launcher.
    job.gone.append(0)
    member = job.pool.submit(job.arrive, 2, 2)
    assert spare.result() is None
    assert job.arrive(3, 2) == member.result() == RankMembership(2, (2, 3), (), (0,), (2, 3))
    assert lost_ranks(job.store) == {0, 1}


def test_the_loss_of_a_spare_changes_nothing(job: Job) -> None:
    report_lost(job.store, 1)
    job.all_arrive([0, 2, 3], 1)
    report_lost(job.store, 2)
    spare = job.pool.submit(job.ranks[3].wait_as_spare)
    job.be_impatient(3)
    # A rank that regrouped by itself would have the others killed.
    job.ranks[3].current = job.ranks[0].current
    assert isinstance(job.arrive(3, 1), NoRankLostError)
    assert (job.killed, lost_ranks(job.store)) == ([], {1, 2})
    job.ranks[0].end(0)
    assert spare.result() == 0


def test_a_rank_lost_while_it_regroups_is_not_a_member(job: Job) -> None:
    report_lost(job.store, 1)
    early = [job.pool.submit(job.arrive, rank, 2) for rank in (0, 2)]
    report_lost(job.store, 0)
    report_lost(job.store, 0)
    assert job.arrive(3, 2) == early[1].result() == RankMembership(1, (2, 3), (), (0, 1), (2, 3))
    assert "went on without it" in str(early[0].result())


def test_members_that_connect_to_a_lost_one_are_told(job: Job) -> None:
    report_lost(job.store, 1)
    job.all_arrive([0, 2, 3], 3)
    store = job.ranks[0].group_store()
    connecting = job.pool.submit(store.wait, ["address of rank 3"])
    report_lost(job.store, 3)
    with pytest.raises(LostRankError, match="ranks 1, 3 lost"):
        connecting.result()
    # The keys of another generation are others.
    store.set("mine", "1")
    assert store.check(["mine"])
    assert [found.members for found in job.all_arrive([0, 2], 2)] == [(0, 2)] * 2
    assert not job.ranks[0].group_store().check(["mine"])


def test_a_silent_rank_counts_as_lost(job: Job) -> None:
    report_lost(job.store, 1)
    early = job.pool.submit(job.arrive, 2, 2)
    job.be_impatient(0)
    found = job.arrive(0, 2)
    assert found == early.result() == RankMembership(1, (0, 2), (), (1, 3), (0, 2))
    assert job.killed == [3]
    assert "went on without it" in str(job.arrive(3, 2))


def test_the_ranks_of_a_lost_machine_are_missed_by_the_others(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moefold.launch.regroup.LOSS_WAIT_S", 0.0)
    job.find_silent = lambda: [1, 2]
    assert job.all_arrive([0, 3], 2) == [RankMembership(1, (0, 3), (), (1, 2), (0, 3))] * 2
    assert job.killed == []


def test_another_survivor_records_the_ranks_of_a_lost_machine_first(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moefold.launch.regroup.LOSS_WAIT_S", 0.0)
    job.find_silent = lambda: report_lost(job.store, 1) or report_lost(job.store, 2) or []
    assert job.all_arrive([0, 3], 2) == [RankMembership(1, (0, 3), (), (1, 2), (0, 3))] * 2


def test_too_few_survivors_get_the_message(job: Job) -> None:
    for rank in (1, 2):
        report_lost(job.store, rank)
    assert [str(error) for error in job.all_arrive([0, 3], 3)] == ["lost [1, 2]: too few"] * 2


def test_without_a_loss_the_error_stands(job: Job) -> None:
    job.be_impatient(0)
    assert isinstance(job.arrive(0, 1), NoRankLostError)


def test_the_end_of_training_reaches_spares_and_late_ranks(job: Job) -> None:
    report_lost(job.store, 1)
    job.all_arrive([0, 2, 3], 2)
    job.ranks[0].end(0)
    job.ranks[2].end(143)
    assert job.ranks[3].wait_as_spare() == 0
    assert isinstance(job.arrive(2, 1), NoRankLostError)


def test_the_failure_of_a_member_ends_spares(job: Job) -> None:
    report_lost(job.store, 1)
    job.all_arrive([0, 2, 3], 2)
    job.ranks[0].fail()
    with pytest.raises(RunError, match="a rank that trains has failed"):
        job.ranks[3].wait_as_spare()


def test_the_host_of_the_store_leaves_last(job: Job) -> None:
    report_lost(job.store, 1)
    job.all_arrive([0, 2, 3], 2)
    host = job.pool.submit(job.ranks[0].leave)
    job.ranks[2].leave()
    assert not host.done()
    job.ranks[3].leave()
    host.result()


def test_a_wait_for_a_member_is_not_progress(job: Job) -> None:
    # The watchdog can kill a stopped member only if the time runs.
    job.ranks[0]._note_progress = lambda: pytest.fail("progress")
    with pytest.raises(DistStoreError, match="wait timeout"):
        job.ranks[0].group_store().wait(["address of rank 3"], timedelta(seconds=0.01))
