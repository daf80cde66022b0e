"""Who holds up the job: from what every rank was doing last to one message. Torch-free, and a function of its input.

Collectives tell most. Each rank counts those that it begins on each group, and all members of a group begin the same
ones in the same order: a rank whose count is behind has not come to the one in which the others wait for it.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from moefold.launch.process_state import ALIVE, BLOCKED, GONE, STOPPED
from moefold.parallel.flight_record import Sighting, rank_list

HEARD_S = 5.0
"""A rank that was heard so lately is not called silent."""


@dataclass(frozen=True)
class Report:
    """All that is known of one rank."""

    host: str
    sighting: Sighting
    heard_s: float
    """When it last reported, as time.time()."""
    answers: bool = True
    """Whether it reported since it was asked to."""
    state: str = ALIVE
    """Of its process, as another one of its machine sees it."""
    place: str = ""
    """Where in the source its main thread is."""
    communicates: bool = False
    """Whether that is inside torch's communication."""
    left: int | None = None
    """Its exit status, if it said good-bye."""


@dataclass(frozen=True)
class Verdict:
    """Who is to blame, and for what."""

    ranks: tuple[int, ...]
    """Empty: all wait for each other, or nobody is behind."""
    fault: str
    """What is wrong with them: "was killed", "is stopped", ..."""


def judge(reports: Mapping[int, Report], world_size: int) -> Verdict:
    """Find the odd ones.

    Args:
        reports: of every rank that ever reported.
        world_size: ranks of the job.
    """
    present = {rank: report for rank, report in reports.items() if report.left is None}
    rules: tuple[tuple[str, list[int]], ...] = (
        (
            "is gone: its process ended without a word, as when it is killed or memory runs out",
            [r for r, x in present.items() if x.state == GONE],
        ),
        ("is stopped, as by SIGSTOP or a debugger", [r for r, x in present.items() if x.state == STOPPED]),
        ("never reported", [r for r in range(world_size) if r not in reports]),
        (
            "hangs inside the kernel, as in a disk or network folder that does not answer",
            [r for r, x in present.items() if x.state == BLOCKED and not x.communicates],
        ),
        (
            "is not heard any more: its host, or the way to it, is down",
            [r for r, x in present.items() if not x.answers],
        ),
    )
    for fault, ranks in rules:
        if ranks:
            return Verdict(tuple(sorted(ranks)), fault)
    late = sorted(_late(present))
    if late and len(late) < len(present):
        return Verdict(tuple(late), "is late")
    return Verdict((), "")


def explain(reports: Mapping[int, Report], world_size: int, why: str) -> str:
    """The message of a job that ends because it is stuck.

    Args:
        reports: of every rank that ever reported.
        world_size: ranks of the job.
        why: what made somebody ask: "no progress for 600 s (faults.timeout_s)".
    """
    verdict = judge(reports, world_size)
    blamed = [rank for rank in verdict.ranks if rank in reports]
    lines = [f"moefold: {_headline(verdict, reports)}"]
    lines += [f"  {text}" for text in _by_activity(reports, blamed, is_blamed=True)]
    others = [rank for rank, report in reports.items() if rank not in verdict.ranks and report.left is None]
    lines += [f"  {text}" for text in _by_activity(reports, others, is_blamed=False)]
    lines.append(f"  the run ends: {why}; docs/failures.md says what to do")
    return "\n".join(lines)


def activity(sighting: Sighting) -> str:
    """What a rank was doing, in words: step, phase and the last collective."""
    step = f"step {sighting.step}, " if sighting.step else ""
    text = f"{step}{sighting.phase}"
    if sighting.collective:
        text += f"; last collective {sighting.collective} over {sighting.group}, shape {list(sighting.shape)}"
    return text


def _headline(verdict: Verdict, reports: Mapping[int, Report]) -> str:
    if not verdict.ranks:
        return "the ranks wait for each other, and none is behind the others"
    hosts = sorted({reports[rank].host for rank in verdict.ranks if rank in reports})
    where = f" on {', '.join(hosts)}" if hosts else ""
    fault = verdict.fault if len(verdict.ranks) == 1 else _plural(verdict.fault)
    return f"{rank_list(verdict.ranks)}{where} {fault}"


def _plural(fault: str) -> str:
    first, _, rest = fault.partition(" ")
    many = {"is": "are", "hangs": "hang"}.get(first, first)
    return f"{many} {rest}".replace("its process ended", "their processes ended").replace("its host", "their hosts")


def _by_activity(reports: Mapping[int, Report], ranks: Sequence[int], *, is_blamed: bool) -> Iterator[str]:
    """One line for all ranks that do the same."""
    same: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        same.setdefault(activity(reports[rank].sighting), []).append(rank)
    for text, group in same.items():
        seen = [reports[rank] for rank in group]
        now_s = time.time()
        still_s = max(now_s - report.sighting.moved_s for report in seen)
        words = f"{rank_list(group)}: {text}, {still_s:.1f} s ago"
        silent_s = max(now_s - report.heard_s for report in seen)
        if is_blamed and (silent_s > HEARD_S or not all(report.answers for report in seen)):
            words += f"; last heard {silent_s:.1f} s ago"
        places = sorted({report.place for report in seen if report.place})
        if is_blamed and places:
            words += f"; now at {', '.join(places[:2])}"
        yield words


@dataclass
class _Waits:
    """Who waits for whom."""

    waiting: set[int] = field(default_factory=set)
    awaited: set[int] = field(default_factory=set)


def _late(present: Mapping[int, Report]) -> set[int]:
    """The ranks that others wait for and that wait for nobody."""
    computing = {rank for rank, report in present.items() if not report.communicates}
    waits = _waits(present)
    behind = waits.awaited - waits.waiting
    if len(computing) == len(present):
        computing = set()
    for found in (behind & computing, computing, behind):
        if found:
            return found
    return _least_advanced(present)


def _waits(present: Mapping[int, Report]) -> _Waits:
    waits = _Waits()
    for rank, report in present.items():
        group = report.sighting.group
        mine = report.sighting.counts.get(group, 0)
        for other, its in present.items():
            if its.sighting.counts.get(group, mine) < mine:
                waits.waiting.add(rank)
                waits.awaited.add(other)
    return waits


def _least_advanced(present: Mapping[int, Report]) -> set[int]:
    progress = {rank: (x.sighting.step, x.sighting.phase_number) for rank, x in present.items()}
    least = min(progress.values(), default=None)
    return {rank for rank, at in progress.items() if at == least}
