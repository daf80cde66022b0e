"""Hang diagnosis: find the ranks that block the job from the flight-recorder snapshots of all ranks.

The main evidence is the number of collectives that each rank has started on each group. All members of a group start
the same collectives in the same order, so a rank with a lower count has not reached the collective of the others.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moefold.comm.flight_recorder import FlightSnapshot, format_ranks
from moefold.host.processes import ALIVE, BLOCKED, GONE, STOPPED

if TYPE_CHECKING:
    import torch.distributed as dist

RECENT_REPORT_S = 5.0
"""Age up to which the last report of a rank is recent, so that the rank does not count as silent."""


@dataclass(frozen=True)
class RankReport:
    """The last report of one rank."""

    host: str
    snapshot: FlightSnapshot
    reported_at_s: float
    """Time of the last report, as time.time()."""
    has_responded: bool = True
    """True if the rank answered the request for a last report."""
    process_state: str = ALIVE
    """State of the rank's process as seen by another rank of the same machine."""
    source_location: str = ""
    """Source line that the rank's main thread executes."""
    is_communicating: bool = False
    """True if `source_location` is inside torch's communication."""
    exit_status: int | None = None
    """Exit status, if the rank deregistered."""


@dataclass(frozen=True)
class Diagnosis:
    """The ranks that block the job and their symptom."""

    ranks: tuple[int, ...]
    """Blocking ranks, or empty for a deadlock, or if no rank is late."""
    symptom: str
    """Predicate for the message: "is stopped", "is late", ..."""


def gather_reports(store: "dist.Store", world_size: int) -> dict[int, RankReport]:
    """Return the report of every rank that ever reported. Silent ranks are reported by their local peers."""
    from moefold.launch.regroup import read_if_set

    reports: dict[int, RankReport] = {}
    observed: dict[int, tuple[str, dict[str, Any] | None]] = {}
    for rank in range(world_size):
        text = read_if_set(store, f"report/{rank}")
        if not text:
            continue
        data = json.loads(text)
        has_responded = store.check([f"answer/{rank}"])
        if has_responded:
            observed |= {int(other): observation for other, observation in data["local_peers"].items()}
        reports[rank] = RankReport(
            host=data["host"],
            snapshot=FlightSnapshot.from_json(data["snapshot"]),
            reported_at_s=data["reported_at_s"],
            has_responded=has_responded,
            source_location=data["source_location"] if has_responded else "",
            is_communicating=data["is_communicating"],
            exit_status=int(status) if (status := read_if_set(store, f"left/{rank}")) else None,
        )
    for rank, (state, snapshot) in observed.items():
        if rank in reports and reports[rank].has_responded and state == BLOCKED:
            # BLOCKED is the state of the main thread; the store reporter still responds.
            reports[rank] = replace(reports[rank], process_state=state)
        if rank in reports and not reports[rank].has_responded:
            last = reports[rank].snapshot if snapshot is None else FlightSnapshot.from_json(snapshot)
            reports[rank] = replace(reports[rank], process_state=state, snapshot=last)
    return reports


def diagnose(reports: Mapping[int, RankReport], world_size: int) -> Diagnosis:
    """Find the ranks that block the job.

    Args:
        reports: last report of every rank that ever reported.
    """
    present = {rank: report for rank, report in reports.items() if report.exit_status is None}
    rules: tuple[tuple[str, list[int]], ...] = (
        (
            "is gone: its process ended without an error message, as when it is killed or memory runs out",
            [r for r, x in present.items() if x.process_state == GONE],
        ),
        ("is stopped, as by SIGSTOP or a debugger", [r for r, x in present.items() if x.process_state == STOPPED]),
        ("never reported", [r for r in range(world_size) if r not in reports]),
        (
            "hangs inside the kernel, as in a disk or network folder that does not answer",
            [r for r, x in present.items() if x.process_state == BLOCKED and not x.is_communicating],
        ),
        (
            "is unreachable: its host, or the network to it, is down",
            [r for r, x in present.items() if not x.has_responded],
        ),
    )
    for fault, ranks in rules:
        if ranks:
            return Diagnosis(tuple(sorted(ranks)), fault)
    late_ranks = sorted(_stragglers(present))
    if late_ranks and len(late_ranks) < len(present):
        return Diagnosis(tuple(late_ranks), "is late")
    return Diagnosis((), "")


def format_diagnosis(reports: Mapping[int, RankReport], world_size: int, reason: str) -> str:
    """Return the message of a job that ends because it hangs.

    Args:
        reports: last report of every rank that ever reported.
        reason: trigger of the diagnosis, such as "no progress for 600 s (faults.timeout_s)".
    """
    diagnosis = diagnose(reports, world_size)
    blamed = [rank for rank in diagnosis.ranks if rank in reports]
    lines = [f"moefold: {_headline(diagnosis, reports)}"]
    lines += [f"  {text}" for text in _group_by_activity(reports, blamed, is_blamed=True)]
    other_ranks = [
        rank for rank, report in reports.items() if rank not in diagnosis.ranks and report.exit_status is None
    ]
    lines += [f"  {text}" for text in _group_by_activity(reports, other_ranks, is_blamed=False)]
    lines.append(f"  the run ends: {reason}; see docs/failures.md")
    return "\n".join(lines)


def describe_activity(snapshot: FlightSnapshot) -> str:
    """Return step, phase and last collective of a snapshot as text."""
    step = f"step {snapshot.step}, " if snapshot.step else ""
    text = f"{step}{snapshot.phase}"
    if snapshot.collective:
        text += f"; last collective {snapshot.collective} over {snapshot.group}, shape {list(snapshot.shape)}"
    return text


def _headline(diagnosis: Diagnosis, reports: Mapping[int, RankReport]) -> str:
    if not diagnosis.ranks:
        return "the ranks wait for each other, and none of them is late"
    hosts = sorted({reports[rank].host for rank in diagnosis.ranks if rank in reports})
    hosts_text = f" on {', '.join(hosts)}" if hosts else ""
    fault = diagnosis.symptom if len(diagnosis.ranks) == 1 else _plural(diagnosis.symptom)
    return f"{format_ranks(diagnosis.ranks)}{hosts_text} {fault}"


def _plural(symptom: str) -> str:
    first, _, tail = symptom.partition(" ")
    plural = {"is": "are", "hangs": "hang"}.get(first, first)
    return f"{plural} {tail}".replace("its process ended", "their processes ended").replace("its host", "their hosts")


def _group_by_activity(reports: Mapping[int, RankReport], ranks: Sequence[int], *, is_blamed: bool) -> Iterator[str]:
    """Yield one line for each group of ranks with the same activity."""
    same: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        same.setdefault(describe_activity(reports[rank].snapshot), []).append(rank)
    for text, group in same.items():
        group_reports = [reports[rank] for rank in group]
        now_s = time.time()
        idle_s = max(now_s - report.snapshot.moved_s for report in group_reports)
        line = f"{format_ranks(group)}: {text}, {idle_s:.1f} s ago"
        silent_s = max(now_s - report.reported_at_s for report in group_reports)
        if is_blamed and (silent_s > RECENT_REPORT_S or not all(report.has_responded for report in group_reports)):
            line += f"; last heard {silent_s:.1f} s ago"
        locations = sorted({report.source_location for report in group_reports if report.source_location})
        if is_blamed and locations:
            line += f"; now at {', '.join(locations[:2])}"
        yield line


def _stragglers(present: Mapping[int, RankReport]) -> set[int]:
    """Return the ranks that other ranks wait for and that wait for no rank themselves."""
    computing = {rank for rank, report in present.items() if not report.is_communicating}
    waiting: set[int] = set()
    awaited: set[int] = set()
    for rank, report in present.items():
        group = report.snapshot.group
        count = report.snapshot.counts.get(group, 0)
        for peer, other_report in present.items():
            if other_report.snapshot.counts.get(group, count) < count:
                waiting.add(rank)
                awaited.add(peer)
    late_ranks = awaited - waiting
    if len(computing) == len(present):
        computing = set()
    for candidates in (late_ranks & computing, computing, late_ranks):
        if candidates:
            return candidates
    progress = {rank: (report.snapshot.step, report.snapshot.phase_number) for rank, report in present.items()}
    earliest = min(progress.values(), default=None)
    return {rank for rank, position in progress.items() if position == earliest}
