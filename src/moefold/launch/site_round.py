"""Rounds of a meeting point: the requests of the sites, the sites that exchange with each other, and the votes.

`estimate_grace_s` says how long late sites usually take. `Meeting._wait_s` decides whether a round waits for that time,
for sites.grace_s, or for sites.timeout_s.
"""

import hashlib
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moefold.launch.signed_lines import Message

GRACE_ROUNDS = 16
"""Number of past rounds for the estimate of the grace time."""
MIN_GRACE_ROUNDS = 8
"""Minimum number of past rounds for an estimate. With fewer, a round waits for late sites up to sites.timeout_s."""
MIN_GRACE_S = 5.0
PAIRS_SETTING = "sites.topology"
"""Name of the setting whose value "pairs" lets the meeting point, also an older one, divide members into pairs."""


@dataclass(frozen=True)
class RoundRequest:
    """Request of a site for a round."""

    version: int
    tokens: int
    is_finite: bool
    digest: int
    timeout_s: float
    is_last: bool
    """True if no step follows the round. Then no state is given after it."""
    merges: bool
    """True if all sites take the mean of their weights, under every topology."""


@dataclass
class VotingGroup:
    """Sites that exchange with each other in a round and vote on it together: all members, or a pair."""

    members: tuple[int, ...]
    votes: dict[int, bool] = field(default_factory=dict)
    first_vote_s: float = 0.0
    outcome: Message | None = None
    """Answer to the votes, or None until it is decided."""


@dataclass
class MeetingRound:
    """One round: the requests of the sites, and the answers once it is closed."""

    opened_s: float
    requests: dict[int, RoundRequest] = field(default_factory=dict)
    delays_s: dict[int, float] = field(default_factory=dict)
    """Time of each site's request after the first request, also of late sites."""
    answers: dict[int, Message] = field(default_factory=dict)
    """Answers by site, or empty until the round is closed."""
    voting_groups: list[VotingGroup] = field(default_factory=list)

    @property
    def is_closed(self) -> bool:
        """Return whether the members are chosen."""
        return bool(self.answers)

    @property
    def timeout_s(self) -> float:
        """Longest wait that a site of the round allows."""
        return max(settings.timeout_s for settings in self.requests.values())

    def voting_group_of(self, number: int) -> VotingGroup | None:
        """Return the sites that a site votes with, or None if it exchanges nothing in this round."""
        return next((voters for voters in self.voting_groups if number in voters.members), None)


def pair_members(seed: int, index: int, members: Sequence[int]) -> list[tuple[int, ...]]:
    """Return random pairs of the members of a round. One member is left if their number is odd.

    The permutation depends on the arguments only, so that a run can be repeated.
    """
    text = f"{seed} {index} {sorted(members)}"
    order = sorted(members, key=lambda number: hashlib.sha256(f"{text} {number}".encode()).digest())
    return [tuple(sorted(order[first : first + 2])) for first in range(0, len(order) - 1, 2)]


def estimate_grace_s(rounds: Iterable[MeetingRound]) -> float | None:
    """Return how long a round waits for late sites after the first site, or None if too few rounds are known.

    Median plus three median absolute deviations of the delay of the last site in past rounds. A site that is left out
    loses its work of a round, and a wait for it delays the others. So the estimate is at least the time between two
    rounds divided by the number of sites, and at least `MIN_GRACE_S`.
    """
    closed = [round_ for round_ in rounds if round_.is_closed and len(round_.delays_s) > 1][-GRACE_ROUNDS:]
    if len(closed) < MIN_GRACE_ROUNDS:
        return None
    delays_s = [max(round_.delays_s.values()) for round_ in closed]
    median_s = statistics.median(delays_s)
    mad_s = statistics.median(abs(delay_s - median_s) for delay_s in delays_s)
    intervals_s = [after.opened_s - before.opened_s for before, after in zip(closed, closed[1:], strict=False)]
    share_s = statistics.median(intervals_s) / max(len(round_.delays_s) for round_ in closed)
    return max(MIN_GRACE_S, share_s, median_s + 3 * mad_s)
