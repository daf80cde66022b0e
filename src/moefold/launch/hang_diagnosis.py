"""Who holds up the job: from what every rank was doing last to one message. Torch-free, and a function of its input.

Collectives tell most. Each rank counts those that it begins on each group, and all members of a group begin the same
ones in the same order: a rank whose count is behind has not come to the one in which the others wait for it.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from moefold.comm.flight_recorder import FlightSnapshot, format_ranks
from moefold.host.processes import ALIVE, BLOCKED, GONE, STOPPED

RECENT_REPORT_S = 5.0
"""A rank that was heard so lately is not called silent."""


@dataclass(frozen=True)
class RankReport:
    """All that is known of one rank."""

    host: str
    snapshot: FlightSnapshot
    reported_at_s: float
    """When it last reported, as time.time()."""
    has_responded: bool = True
    """Whether it reported since it was asked to."""
    process_state: str = ALIVE
    """Of its process, as another one of its machine sees it."""
    source_location: str = ""
    """Where in the source its main thread is."""
    is_communicating: bool = False
    """Whether that is inside torch's communication."""
    exit_status: int | None = None
    """Its exit status, if it said good-bye."""


@dataclass(frozen=True)
class Diagnosis:
    """Who is to blame, and for what."""

    ranks: tuple[int, ...]
    """Empty: all wait for each other, or nobody is behind."""
    symptom: str
    """What is wrong with them: "was killed", "is stopped", ..."""


def diagnose(reports: Mapping[int, RankReport], world_size: int) -> Diagnosis:
    """Find the odd ones.

    Args:
        reports: of every rank that ever reported.
        world_size: ranks of the job.
    """
    present = {rank: report for rank, report in reports.items() if report.exit_status is None}
    rules: tuple[tuple[str, list[int]], ...] = (
        (
            "is gone: its process ended without a word, as when it is killed or memory runs out",
            [r for r, x in present.items() if x.process_state == GONE],
        ),
        ("is stopped, as by SIGSTOP or a debugger", [r for r, x in present.items() if x.process_state == STOPPED]),
        ("never reported", [r for r in range(world_size) if r not in reports]),
        (
            "hangs inside the kernel, as in a disk or network folder that does not answer",
            [r for r, x in present.items() if x.process_state == BLOCKED and not x.is_communicating],
        ),
        (
            "is not heard any more: its host, or the way to it, is down",
            [r for r, x in present.items() if not x.has_responded],
        ),
    )
    for fault, ranks in rules:
        if ranks:
            return Diagnosis(tuple(sorted(ranks)), fault)
    late = sorted(_stragglers(present))
    if late and len(late) < len(present):
        return Diagnosis(tuple(late), "is late")
    return Diagnosis((), "")


def format_diagnosis(reports: Mapping[int, RankReport], world_size: int, reason: str) -> str:
    """The message of a job that ends because it is stuck.

    Args:
        reports: of every rank that ever reported.
        world_size: ranks of the job.
        reason: what made somebody ask: "no progress for 600 s (faults.timeout_s)".
    """
    verdict = diagnose(reports, world_size)
    blamed = [rank for rank in verdict.ranks if rank in reports]
    lines = [f"moefold: {_headline(verdict, reports)}"]
    lines += [f"  {text}" for text in _group_by_activity(reports, blamed, is_blamed=True)]
    others = [rank for rank, report in reports.items() if rank not in verdict.ranks and report.exit_status is None]
    lines += [f"  {text}" for text in _group_by_activity(reports, others, is_blamed=False)]
    lines.append(f"  the run ends: {reason}; docs/failures.md says what to do")
    return "\n".join(lines)


def describe_activity(snapshot: FlightSnapshot) -> str:
    """What a rank was doing, in words: step, phase and the last collective."""
    step = f"step {snapshot.step}, " if snapshot.step else ""
    text = f"{step}{snapshot.phase}"
    if snapshot.collective:
        text += f"; last collective {snapshot.collective} over {snapshot.group}, shape {list(snapshot.shape)}"
    return text


def _headline(diagnosis: Diagnosis, reports: Mapping[int, RankReport]) -> str:
    if not diagnosis.ranks:
        return "the ranks wait for each other, and none is behind the others"
    hosts = sorted({reports[rank].host for rank in diagnosis.ranks if rank in reports})
    where = f" on {', '.join(hosts)}" if hosts else ""
    fault = diagnosis.symptom if len(diagnosis.ranks) == 1 else _plural(diagnosis.symptom)
    return f"{format_ranks(diagnosis.ranks)}{where} {fault}"


def _plural(symptom: str) -> str:
    first, _, rest = symptom.partition(" ")
    many = {"is": "are", "hangs": "hang"}.get(first, first)
    return f"{many} {rest}".replace("its process ended", "their processes ended").replace("its host", "their hosts")


def _group_by_activity(reports: Mapping[int, RankReport], ranks: Sequence[int], *, is_blamed: bool) -> Iterator[str]:
    """One line for all ranks that do the same."""
    same: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        same.setdefault(describe_activity(reports[rank].snapshot), []).append(rank)
    for text, group in same.items():
        seen = [reports[rank] for rank in group]
        now_s = time.time()
        still_s = max(now_s - report.snapshot.moved_s for report in seen)
        words = f"{format_ranks(group)}: {text}, {still_s:.1f} s ago"
        silent_s = max(now_s - report.reported_at_s for report in seen)
        if is_blamed and (silent_s > RECENT_REPORT_S or not all(report.has_responded for report in seen)):
            words += f"; last heard {silent_s:.1f} s ago"
        places = sorted({report.source_location for report in seen if report.source_location})
        if is_blamed and places:
            words += f"; now at {', '.join(places[:2])}"
        yield words


@dataclass
class _WaitGraph:
    """Who waits for whom."""

    waiting: set[int] = field(default_factory=set)
    awaited: set[int] = field(default_factory=set)


def _stragglers(present: Mapping[int, RankReport]) -> set[int]:
    """The ranks that others wait for and that wait for nobody."""
    computing = {rank for rank, report in present.items() if not report.is_communicating}
    waits = _wait_graph(present)
    behind = waits.awaited - waits.waiting
    if len(computing) == len(present):
        computing = set()
    for found in (behind & computing, computing, behind):
        if found:
            return found
    return _least_advanced(present)


def _wait_graph(present: Mapping[int, RankReport]) -> _WaitGraph:
    waits = _WaitGraph()
    for rank, report in present.items():
        group = report.snapshot.group
        mine = report.snapshot.counts.get(group, 0)
        for other, its in present.items():
            if its.snapshot.counts.get(group, mine) < mine:
                waits.waiting.add(rank)
                waits.awaited.add(other)
    return waits


def _least_advanced(present: Mapping[int, RankReport]) -> set[int]:
    progress = {rank: (x.snapshot.step, x.snapshot.phase_number) for rank, x in present.items()}
    least = min(progress.values(), default=None)
    return {rank for rank, at in progress.items() if at == least}
