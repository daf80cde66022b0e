"""Simulate the steps of a site between two rounds of a fragment, which the predicted utilisation is compared with."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moefold.planner.sites import MEETING_MESSAGES, SiteCost, SiteRate

STEP = "training"
MEETING = "meeting point"
WAIT = "waiting for the exchange"
EXCHANGE = "exchange"


@dataclass(frozen=True)
class Phase:
    """Action of a site in an interval, or an exchange meanwhile."""

    part: str
    round_number: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class SiteTimeline:
    """A period of `every` steps of a site, with a round of each fragment."""

    phases: tuple[Phase, ...]
    """Steps are numbered from 1, the phases of a round by its fragment."""
    every: int
    step_s: float
    total_s: float

    @property
    def utilisation(self) -> float:
        """Share of the period while the site trains."""
        return self.every * self.step_s / self.total_s


class _Clock:
    """The time of a site, and its phases."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.phases: list[Phase] = []

    def spend(self, part: str, number: int, seconds: float) -> None:
        """Add a phase of the site."""
        if seconds > 0:
            self.phases.append(Phase(part, number, self.now_s, self.now_s + seconds))
            self.now_s += seconds

    def finish(self, flight: tuple[int, int, float], question_s: float) -> None:
        """Wait for an exchange, and vote."""
        fragment, _, end_s = flight
        self.spend(WAIT, fragment, end_s - self.now_s)
        self.spend(MEETING, fragment, question_s)


def simulate_site(cost: SiteCost, rate: SiteRate) -> SiteTimeline:
    """Simulate a period of a site, from the round of the first fragment to its next one.

    Fragment p of P has its round after step p * every // P. Its members are asked for, its vector is exchanged while
    `overlap` steps are trained, and after a vote it is applied. The period before it is simulated too, as its last
    exchange may end in this one.

    Args:
        cost: cost model of the rounds.
        rate: settings, and the times of the exchanges under them.
    """
    settings = rate.settings
    exchanges: Sequence[float] = rate.exchanges_s
    question_s = MEETING_MESSAGES / 2 * cost.link.latency_s
    count = len(exchanges)
    begins = {fragment * settings.every // count: fragment for fragment in range(count)}
    clock = _Clock()
    flight: tuple[int, int, float] | None = None
    """Fragment of the exchange under way, step after which it is applied, and its end in seconds."""
    begins_at_s = 0.0
    for step in range(2 * settings.every):
        if step == settings.every:
            begins_at_s = clock.now_s
        if flight is not None and flight[1] == step:
            clock.finish(flight, question_s)
            flight = None
        fragment = begins.get(step % settings.every)
        if fragment is not None:
            clock.spend(MEETING, fragment, question_s)
            flight = fragment, step + settings.overlap, clock.now_s + exchanges[fragment]
            clock.phases.append(Phase(EXCHANGE, fragment, clock.now_s, flight[2]))
            if not settings.overlap:
                clock.finish(flight, question_s)
                flight = None
        clock.spend(STEP, step % settings.every + 1, cost.step_s)
    phases = [phase for phase in clock.phases if phase.start_s >= begins_at_s]
    moved = (replace(phase, start_s=phase.start_s - begins_at_s, end_s=phase.end_s - begins_at_s) for phase in phases)
    return SiteTimeline(tuple(moved), settings.every, cost.step_s, clock.now_s - begins_at_s)
