"""Reports of ranks in, verdict and message out; nothing runs."""

import time
from dataclasses import replace
from typing import Any

import pytest

from moefold.comm.flight_recorder import FlightSnapshot
from moefold.host.processes import BLOCKED, GONE, STOPPED
from moefold.launch.hang_diagnosis import RankReport, diagnose, format_diagnosis

EP, TP = "ep (ranks 0-3)", "tp (ranks 0, 1)"


def report(
    count: int = 5,
    *,
    step: int = 7,
    phase: str = "forward of micro-batch 0",
    number: int = 2,
    group: str = EP,
    counts: dict[str, int] | None = None,
    age_s: float = 10.0,
    **known: Any,
) -> RankReport:
    """A rank that has begun `count` collectives on its group, and by default waits in the last."""
    now_s = time.time()
    sighting = FlightSnapshot(step, phase, number, "all_to_all", group, (4, 8), now_s - age_s, counts or {group: count})
    return replace(RankReport("node0", sighting, now_s, is_communicating=True), **known)


def verdict(*reports: RankReport | None) -> tuple[tuple[int, ...], str]:
    known = {rank: found for rank, found in enumerate(reports) if found is not None}
    found = diagnose(known, len(reports))
    return found.ranks, found.symptom.split(",")[0].split(":")[0]


def test_a_rank_that_has_not_come_to_the_collective_of_the_others():
    assert verdict(report(), report(), report(4, is_communicating=False), report()) == ((2,), "is late")
    # Where the source of each thread tells nothing (a GPU waits elsewhere), the counts are enough.
    assert verdict(report(), report(), report(4), report()) == ((2,), "is late")


def test_who_waits_for_the_late_one_is_not_late_though_others_wait_for_it():
    chain = [
        report(group=EP, counts={EP: 5, TP: 3}),
        report(group=TP, counts={EP: 4, TP: 3}),  # holds up rank 0, and waits for rank 2
        report(group=EP, counts={EP: 4, TP: 2}, is_communicating=False),
    ]
    assert verdict(*chain) == ((2,), "is late")


def test_a_rank_that_computes_while_all_others_communicate():
    assert verdict(report(), report(is_communicating=False), report()) == ((1,), "is late")


def test_without_counts_the_one_in_the_earliest_step_and_phase():
    reports = [report(counts={EP: 5}, step=8, number=1), report(counts={TP: 1}, step=7, number=9)]
    assert verdict(*reports) == ((1,), "is late")
    reports = [report(counts={EP: 5}, number=3), report(counts={TP: 1}, number=2)]
    assert verdict(*reports) == ((1,), "is late")


def test_ranks_that_all_do_the_same_have_no_odd_one():
    assert verdict(report(), report()) == ((), "")
    message = format_diagnosis({0: report(), 1: report()}, 2, "no progress for 9 s (faults.timeout_s)")
    assert message.startswith("moefold: the ranks wait for each other, and none of them is late\n  ranks 0, 1: step 7")


@pytest.mark.parametrize(
    ("known", "fault"),
    [
        ({"process_state": GONE, "has_responded": False}, "is gone"),
        ({"process_state": STOPPED, "has_responded": False}, "is stopped"),
        ({"process_state": BLOCKED, "is_communicating": False}, "hangs inside the kernel"),
        ({"has_responded": False}, "is unreachable"),
    ],
)
def test_the_end_of_a_process_counts_before_its_position(known, fault):
    # Rank 0 is late, but not the cause.
    assert verdict(report(4), report(), report(**known)) == ((2,), fault)


def test_a_rank_that_never_reported():
    assert verdict(report(), None, report()) == ((1,), "never reported")
    message = format_diagnosis({0: report(), 2: report()}, 3, "")
    assert message.startswith("moefold: rank 1 never reported\n  ranks 0, 2: ")


def test_ranks_that_said_good_bye_are_not_missed():
    assert verdict(report(4, exit_status=143, has_responded=False, process_state=GONE), report(), report(4)) == (
        (2,),
        "is late",
    )


def test_the_message_names_rank_host_step_phase_and_collective():
    late = report(
        4,
        phase="loading data",
        age_s=31.0,
        source_location="data/streaming_sampler.py:88 read",
        is_communicating=False,
        host="node1",
    )
    gone = replace(late, has_responded=False, source_location="", reported_at_s=time.time() - 12, process_state=GONE)
    why = "no progress for 30 s (faults.timeout_s)"
    assert format_diagnosis({0: report(), 1: report(), 2: late}, 3, why).splitlines() == [
        "moefold: rank 2 on node1 is late",
        "  rank 2: step 7, loading data; last collective all_to_all over ep (ranks 0-3), shape [4, 8], 31.0 s ago"
        "; now at data/streaming_sampler.py:88 read",
        "  ranks 0, 1: step 7, forward of micro-batch 0; last collective all_to_all over ep (ranks 0-3), shape [4, 8], "
        "10.0 s ago",
        "  the run ends: no progress for 30 s (faults.timeout_s); see docs/failures.md",
    ]
    lines = format_diagnosis({0: report(), 1: gone, 2: gone}, 3, why).splitlines()
    assert lines[0].startswith("moefold: ranks 1, 2 on node1 are gone: their processes ended without an error message")
    assert lines[1].endswith("31.0 s ago; last heard 12.0 s ago")
