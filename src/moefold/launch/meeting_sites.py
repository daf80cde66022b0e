"""Sites of a meeting point: registered sites, refused sites, and sites that missed rounds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moefold.host.listen import is_loopback
from moefold.launch.signed_lines import MAX_WAIT_S, BadRequestError, Message, int_field, text_field
from moefold.launch.site_round import PAIRS_SETTING

SILENT_S = 30.0
"""Time without a message after which a site counts as lost."""
MAX_SITES = 1024


@dataclass
class Site:
    """A registered site."""

    host: str
    """Host of the site, as the site reports it."""
    address: str
    """Address that the first rank of the site connects from."""
    settings: dict[str, Any]
    weights_hash: int | None
    """Hash of the site's outer weights after `version` rounds, or None if unknown."""
    round: int
    """Last round that was due on the site, counted from 1 in a run, as the steps between rounds may differ."""
    version: int
    """Rounds applied."""
    connection: int | None
    last_word_s: float
    is_joining: bool = False
    """True if the site lacks rounds and waits for the state of another site. Rounds do not wait for it."""

    @property
    def is_paired(self) -> bool:
        """Return whether the rounds of the site are exchanges of random pairs."""
        return self.settings.get(PAIRS_SETTING) == "pairs"


class SiteList:
    """Registered sites by number, and the checks of a site that registers."""

    def __init__(self, log: Callable[[str], None], clock: Callable[[], float], on_lost: Callable[[int], None]) -> None:
        self._log = log
        self._clock = clock
        self._on_lost = on_lost
        self._sites: dict[int, Site] = {}
        self._has_started = False
        self._refusals: dict[int, str] = {}
        """Reasons of refusals by connection, until they are sent."""
        self._refused: dict[int, str] = {}
        """Sites that were refused at the start and did not come back, with the reason."""
        self._ended: dict[int, str] = {}
        """Sites whose process ended before the site came here, with the reason."""

    def __getitem__(self, number: int) -> Site:
        """Return the site with this number, which must be registered."""
        return self._sites[number]

    def beat(self, number: int) -> None:
        """Count a message of a registered site."""
        if site := self._sites.get(number):
            site.last_word_s = self._clock()

    def clear(self) -> None:
        """Forget the sites of an earlier start."""
        self._sites.clear()
        self._refused.clear()
        self._has_started = False

    def register(self, number: int, site: Site, message: Message) -> None:
        """Add a site that registers, or refuse it."""
        if refusal := self._refusal(number, site):
            self._log(f"site {number} on {site.host} is refused: {refusal}")
            assert site.connection is not None
            self._refusals[site.connection] = refusal
            if number not in self.living:
                self._refused[number] = refusal
            return
        self._refused.pop(number, None)
        self._ended.pop(number, None)
        is_new = number not in self._sites or self._sites[number].connection is None
        self._sites[number] = site
        # After the loss of a connection or of the meeting point, a site does not wait for the others again.
        self._has_started = self._has_started or bool(message.get("again"))
        if is_new:
            step = int_field(message, "step")
            self._log(f"site {number} on {site.host} is here, at step {step} after {site.version} rounds")

    def _refusal(self, number: int, site: Site) -> str:
        """Return why a site cannot take part, or empty if it can."""
        before = self._sites.get(number)
        if before is not None and before.connection not in (None, site.connection):
            return f"sites.number={number} is taken by a job on {before.host}; give each site a number of its own"
        for other in self.living:
            if other == number:
                continue
            peer = self._sites[other]
            for key in sorted(site.settings.keys() | peer.settings.keys()):
                site_value = site.settings.get(key)
                value = peer.settings.get(key)
                if site_value != value:
                    return (
                        f"{key}={site_value!r} must equal the value of site {other}, {value!r}; start all sites with "
                        "the same recipe and the same base weights"
                    )
            is_known = site.weights_hash is not None and peer.weights_hash is not None
            # Sites in pairs have equal weights only at the start.
            is_known = is_known and (site.version == 0 or not site.is_paired)
            if site.version == peer.version and is_known and site.weights_hash != peer.weights_hash:
                return (
                    f"its outer weights differ from the weights of site {other} after {site.version} rounds; start the "
                    "sites with the same run.seed and checkpoint.init_from, or from checkpoints of the same run"
                )
            if is_loopback(site.address) != is_loopback(peer.address):
                return (
                    f"it comes from {site.address}, and site {other} from {peer.address}, which cannot reach each "
                    "other; set sites.meet to an address of the meeting point that all sites can reach, not 127.0.0.1"
                )
        return ""

    def answer_registration(self, message: Message, connection: int) -> Message | None:
        """Return the answer to a site that has registered: all are here, some are missing, or it is refused."""
        if refusal := self._refusals.pop(connection, ""):
            return {"refused": refusal}
        number = self.registered_site(message, connection)
        count = int_field(message["settings"], "sites.count")
        missing = [other for other in range(count) if other not in self.living]
        if missing and not self._has_started:
            absent = self._refused | self._ended
            refused = {str(other): absent[other] for other in missing if other in absent}
            return {"missing": missing} | ({"refused_sites": refused} if refused else {})
        if not self._has_started:
            self._has_started = True
            self._log(f"all {count} sites are here")
        # The next request of a joining site says so: it also registers after a lost connection, during a vote too.
        return self.missed(number) or {"ready": True}

    def missed(self, number: int) -> Message | None:
        """Return the answer to a site that lacks rounds which other sites have applied, or None if it lacks none.

        Sites in pairs have different weights. Such a site takes part in the next round if it lacks a single one.
        """
        site = self._sites[number]
        if site.is_paired:
            ahead = [other for other in self.living if self._sites[other].round > site.round + 1]
        else:
            ahead = [other for other in self.living if self._sites[other].version > site.version]
        if not ahead:
            return None
        sender = max(ahead, key=lambda other: (self._sites[other].version, -other))
        return {"missed": site.version, "giver": sender, "version": self._sites[sender].version}

    def registered_site(self, message: Message, connection: int) -> int:
        """Return the site of a message, which must have registered on this connection."""
        number = int_field(message, "site")
        site = self._sites.get(number)
        if site is None or site.connection != connection:
            raise BadRequestError(f"site {number} has not registered on this connection")
        site.last_word_s = self._clock()
        return number

    def close_connection(self, connection: int) -> None:
        """Count the site of a connection as lost."""
        self._refusals.pop(connection, None)
        for number, site in self._sites.items():
            if site.connection == connection:
                self.drop(number, f"on {site.host} has closed its connection")

    def end_site(self, number: int, reason: str) -> None:
        """Count a site as absent, if its process has ended before the first round."""
        if not self._has_started and number not in self._sites:
            self._ended[number] = reason

    def drop_silent(self) -> list[int]:
        """Count sites as lost that were silent for `SILENT_S`, and return their connections."""
        dropped = []
        for number, site in self._sites.items():
            if site.connection is not None and self._clock() - site.last_word_s > SILENT_S:
                dropped.append(site.connection)
                self.drop(number, f"on {site.host} was silent for {SILENT_S:g} s")
        return dropped

    @property
    def living(self) -> list[int]:
        """The sites that are connected, ascending."""
        return sorted(number for number, site in self._sites.items() if site.connection is not None)

    def drop(self, number: int, why: str) -> None:
        """Count a site as lost, and log why."""
        if self._sites[number].connection is not None:
            self._sites[number].connection = None
            self._sites[number].is_joining = False
            self._on_lost(number)
            self._log(f"site {number} {why}")


def read_registration(message: Message, connection: int, address: str, now_s: float) -> tuple[int, Site]:
    """Return the number and the state of a site that registers.

    Raises:
        BadRequestError: a field is missing or wrong.
    """
    number = int_field(message, "site")
    settings = message.get("settings")
    if not isinstance(settings, dict) or not 0 <= number < int_field(settings, "sites.count") <= MAX_SITES:
        raise BadRequestError("settings or site is wrong")
    grace_s = settings.get("sites.grace_s", 0)
    if not isinstance(grace_s, int | float) or isinstance(grace_s, bool) or not 0 <= grace_s <= MAX_WAIT_S:
        raise BadRequestError("sites.grace_s must be a number of seconds")
    site = Site(
        host=text_field(message, "host"),
        address=address,
        settings=settings,
        weights_hash=int_field(message, "weights") if "weights" in message else None,
        round=int_field(message, "round"),
        version=int_field(message, "version"),
        connection=connection,
        last_word_s=now_s,
    )
    return number, site
