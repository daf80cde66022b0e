"""State of a meeting point: the living sites, the members of each round, and the applied rounds.

A round is applied only if all its members voted for it. A round that is not applied has no effect, as if it had not
been due. All of the state can be lost: a new meeting point learns it from the messages of the sites.
"""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moefold.host.listen import is_loopback
from moefold.launch.signed_lines import Message
from moefold.launch.site_round import PAIRS_SETTING, Asked, Ballot, MeetingRound, estimate_grace_s, pair_members

SILENT_S = 30.0
"""Time without a message after which a site counts as lost."""
MAX_SITES = 1024
MAX_KEPT_ROUNDS = 256
"""Rounds whose outcome is kept for late sites."""
MAX_STORE_BYTES = 256 * 2**20
MAX_KEY_CHARS = 512
MAX_WAIT_S = 24 * 3600.0
"""Longest timeout that a site may ask for."""


class BadRequestError(Exception):
    """A message with missing or wrong fields."""


@dataclass
class _Site:
    host: str
    """Host of the site, as the site reports it."""
    address: str
    """Address that its first rank connects from."""
    settings: dict[str, Any]
    weights: int | None
    """Hash of its outer weights after `version` rounds; None if it is not known."""
    round: int
    """Last round that was due on the site, counted from 1 in a run, as the steps between rounds may differ."""
    version: int
    """Rounds applied."""
    connection: int | None
    last_word_s: float
    is_joining: bool = False
    """Whether the site lacks rounds and waits for the state of another site; rounds do not wait for it."""

    @property
    def is_paired(self) -> bool:
        """Return whether its rounds are exchanges of random pairs."""
        return self.settings.get(PAIRS_SETTING) == "pairs"


class Meeting:
    """State machine of the meeting point. A request is entered once, and checked for an answer after every change.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, log: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._sites: dict[int, _Site] = {}
        self._has_started = False
        self._rounds: dict[int, MeetingRound] = {}
        self._store: dict[str, str] = {}
        self._store_bytes = 0
        self._name = secrets.token_hex(4)
        self._num_epochs = 0
        self._epochs: dict[tuple[int, ...], str] = {}
        """Sites that are connected with each other, and the name under which they connected."""
        self._refusals: dict[int, str] = {}
        self._refused: dict[int, str] = {}
        """Sites that were refused at the start and did not come back, with the reason."""
        self._ended: dict[int, str] = {}
        """Sites whose process has ended before they came here, with the reason."""
        self._givers: dict[int, Message] = {}
        """Answers to joining sites whose giver is known."""
        self._num_gifts = 0
        self._gifts: dict[int, str] = {}
        """Transfers to joining sites that may be in progress."""

    def enter(self, message: Message, connection: int, address: str) -> None:
        """Enter a request.

        Args:
            connection: number of its connection.
            address: address of the other side.

        Raises:
            BadRequestError: a field is missing or wrong.
        """
        match message.get("do"):
            case "hello":
                self._enter_hello(message, connection, address)
            case "round":
                self._enter_round(message, connection)
            case "vote":
                self._enter_vote(message, connection)
            case "join":
                number = self._own(message, connection)
                self._sites[number].is_joining = number not in self._givers
            case "beat":
                if site := self._sites.get(_int(message, "site")):
                    site.last_word_s = self._clock()
            case "left":
                self._drop(self._own(message, connection), "has left")
            case "set":
                self._set(message)
            case "get":
                _text(message, "key")
            case other:
                raise BadRequestError(f"{str(other)[:40]!r} is no request")

    def answer(self, message: Message, connection: int, waited_s: float) -> Message | None:
        """Return the answer to a request that was entered; None: not yet.

        Args:
            connection: number of its connection.
            waited_s: time since it was entered.
        """
        match message["do"]:
            case "hello":
                return self._answer_hello(message, connection)
            case "round":
                return self._answer_round(self._own(message, connection), _int(message, "round"))
            case "join":
                return self._answer_join(self._own(message, connection))
            case "vote":
                return self._answer_vote(self._own(message, connection), _int(message, "round"))
            case "get":
                value = self._store.get(message["key"])
                if value is not None:
                    return {"value": value}
                if self._is_over(message["key"].partition("/")[0]):
                    return {"over": True}
                return None if waited_s < _seconds(message) else {}
        return {}

    def close_connection(self, connection: int) -> None:
        """Count the site of a connection as lost."""
        self._refusals.pop(connection, None)
        for number, site in self._sites.items():
            if site.connection == connection:
                self._drop(number, f"on {site.host} has closed its connection")

    def end_site(self, number: int, reason: str) -> None:
        """Count a site as absent, if its process has ended before the first round.

        Args:
            reason: why the site does not come, for the sites that wait for it.
        """
        if not self._has_started and number not in self._sites:
            self._ended[number] = reason

    def drop_silent(self) -> list[int]:
        """Count sites as lost that were silent for `SILENT_S`, and return their connections."""
        dropped = []
        for number, site in self._sites.items():
            if site.connection is not None and self._clock() - site.last_word_s > SILENT_S:
                dropped.append(site.connection)
                self._drop(number, f"on {site.host} was silent for {SILENT_S:g} s")
        return dropped

    @property
    def living(self) -> list[int]:
        """The sites that are connected, ascending."""
        return sorted(number for number, site in self._sites.items() if site.connection is not None)

    def _drop(self, number: int, why: str) -> None:
        if self._sites[number].connection is not None:
            self._sites[number].connection = None
            self._sites[number].is_joining = False
            self._givers.pop(number, None)
            self._gifts.pop(number, None)
            # The site may come back as another process.
            self._epochs = {group: epoch for group, epoch in self._epochs.items() if number not in group}
            self._log(f"site {number} {why}")

    def _own(self, message: Message, connection: int) -> int:
        """Return the site of a message, which must have said hello on this connection."""
        number = _int(message, "site")
        site = self._sites.get(number)
        if site is None or site.connection != connection:
            raise BadRequestError(f"site {number} did not say hello on this connection")
        site.last_word_s = self._clock()
        return number

    def _enter_hello(self, message: Message, connection: int, address: str) -> None:
        number = _int(message, "site")
        settings = message.get("settings")
        if not isinstance(settings, dict) or not 0 <= number < _int(settings, "sites.count") <= MAX_SITES:
            raise BadRequestError("settings or site is wrong")
        grace_s = settings.get("sites.grace_s", 0)
        if not isinstance(grace_s, int | float) or isinstance(grace_s, bool) or not 0 <= grace_s <= MAX_WAIT_S:
            raise BadRequestError("sites.grace_s must be a number of seconds")
        site = _Site(
            host=_text(message, "host"),
            address=address,
            settings=settings,
            weights=_int(message, "weights") if "weights" in message else None,
            round=_int(message, "round"),
            version=_int(message, "version"),
            connection=connection,
            last_word_s=self._clock(),
        )
        if not self.living:
            # All sites of an earlier start have left.
            self._sites.clear()
            self._rounds.clear()
            self._refused.clear()
            self._epochs.clear()
            self._has_started = False
        if refusal := self._refusal(number, site):
            self._log(f"site {number} on {site.host} is refused: {refusal}")
            self._refusals[connection] = refusal
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
            step = _int(message, "step")
            self._log(f"site {number} on {site.host} is here, at step {step} after {site.version} rounds")

    def _refusal(self, number: int, site: _Site) -> str:
        """Return why a site cannot take part; empty if it can."""
        before = self._sites.get(number)
        if before is not None and before.connection not in (None, site.connection):
            return f"sites.number={number} is taken by a job on {before.host}; give each site a number of its own"
        for other in self.living:
            if other == number:
                continue
            theirs = self._sites[other]
            for key in sorted(site.settings.keys() | theirs.settings.keys()):
                own_value = site.settings.get(key)
                value = theirs.settings.get(key)
                if own_value != value:
                    return (
                        f"{key}={own_value!r} must equal the value of site {other}, {value!r}; start all sites with "
                        "the same recipe and the same base weights"
                    )
            is_known = site.weights is not None and theirs.weights is not None
            # Sites in pairs have equal weights only at the start.
            is_known = is_known and (site.version == 0 or not site.is_paired)
            if site.version == theirs.version and is_known and site.weights != theirs.weights:
                return (
                    f"its outer weights differ from the weights of site {other} after {site.version} rounds; start the "
                    "sites with the same run.seed and checkpoint.init_from, or from checkpoints of the same run"
                )
            if is_loopback(site.address) != is_loopback(theirs.address):
                return (
                    f"it comes from {site.address}, and site {other} from {theirs.address}, which cannot reach each "
                    "other; set sites.meet to an address of the meeting point that all sites can reach, not 127.0.0.1"
                )
        return ""

    def _answer_hello(self, message: Message, connection: int) -> Message | None:
        if refusal := self._refusals.pop(connection, ""):
            return {"refused": refusal}
        number = self._own(message, connection)
        count = _int(message["settings"], "sites.count")
        missing = [other for other in range(count) if other not in self.living]
        if missing and not self._has_started:
            absent = self._refused | self._ended
            refused = {str(other): absent[other] for other in missing if other in absent}
            return {"missing": missing} | ({"refused_sites": refused} if refused else {})
        if not self._has_started:
            self._has_started = True
            self._log(f"all {count} sites are here")
        # The next request of a joining site says so: a hello after a lost connection comes during a vote too.
        return self._missed(number) or {"ready": True}

    def _answer_join(self, number: int) -> Message:
        """Return the answer to a joining site: the site that gives it the state, a request to wait, or the end."""
        if number in self._givers:
            return self._givers.pop(number)
        if not [other for other in self.living if not self._sites[other].is_joining]:
            return {"ended": True}
        return {"wait": True}

    def _assign_joining_site(self, index: int, givers: Sequence[int]) -> Message:
        """Return the order to give the state to the first joining site after a round; `givers` may give it."""
        joining = [number for number in self.living if self._sites[number].is_joining and number not in self._givers]
        if not joining or not givers:
            return {}
        self._num_gifts += 1
        number = joining[0]
        gift = f"gift-{self._name}-{self._num_gifts}"
        self._gifts[number] = gift
        # The next rounds wait for it again.
        self._sites[number].round = index
        self._sites[number].is_joining = False
        self._givers[number] = {"giver": givers[0], "gift": gift}
        self._log(f"site {number} takes the state of site {givers[0]} after round {index}")
        return {"give": {"to": number, "gift": gift, "round": index}}

    def _missed(self, number: int) -> Message | None:
        """Return the answer to a site that lacks rounds which other sites have applied; None if it lacks none.

        Sites in pairs have different weights; such a site takes part in the next round if it lacks a single one.
        """
        site = self._sites[number]
        if site.is_paired:
            ahead = [other for other in self.living if self._sites[other].round > site.round + 1]
        else:
            ahead = [other for other in self.living if self._sites[other].version > site.version]
        if not ahead:
            return None
        giver = max(ahead, key=lambda other: (self._sites[other].version, -other))
        return {"missed": site.version, "giver": giver, "version": self._sites[giver].version}

    def _enter_round(self, message: Message, connection: int) -> None:
        number = self._own(message, connection)
        index = _int(message, "round")
        site = self._sites[number]
        asked = Asked(
            version=_int(message, "version"),
            tokens=_int(message, "tokens"),
            is_finite=bool(message.get("finite")),
            digest=_int(message, "digest"),
            timeout_s=_seconds(message),
            is_last=bool(message.get("last")),
            merges=bool(message.get("merges")),
        )
        site.round = index
        site.version = asked.version
        if not site.is_paired:
            site.weights = asked.digest
        site.is_joining = False
        # The state that it was given has arrived.
        self._gifts.pop(number, None)
        round_ = self._rounds.setdefault(index, MeetingRound(self._clock()))
        for old in sorted(self._rounds)[:-MAX_KEPT_ROUNDS]:
            if old != index:
                del self._rounds[old]
        round_.delays_s.setdefault(number, self._clock() - round_.opened_s)
        if not round_.is_closed:
            round_.asked[number] = asked

    def _answer_round(self, number: int, index: int) -> Message | None:
        round_ = self._rounds.get(index)
        if round_ is None:
            raise BadRequestError(f"round {index} is over")
        if not round_.is_closed:
            self._try_close(index, round_)
        if not round_.is_closed:
            return None
        ballot = round_.ballot_of(number)
        if number in round_.answers and (ballot is None or ballot.outcome is None):
            return round_.answers[number]
        return self._missed(number) or {"skip": f"it came after round {index} was over"}

    def _try_close(self, index: int, round_: MeetingRound) -> None:
        """Choose the members of a round once every living site has asked for it, or the wait is over."""
        living = self.living
        asked = {number: ask for number, ask in round_.asked.items() if number in living}
        awaited = [
            number
            for number in living
            if number not in asked and self._sites[number].round < index and not self._sites[number].is_joining
        ]
        if not asked:
            return
        wait_s = self._wait_s(round_, asked)
        if awaited and self._clock() - round_.opened_s < wait_s:
            return
        version = max(ask.version for ask in asked.values())
        is_paired = self._sites[min(asked)].is_paired
        missed = {number: self._missed(number) for number, ask in asked.items() if is_paired or ask.version < version}
        round_.answers = {number: answer for number, answer in missed.items() if answer}
        members = tuple(sorted(asked.keys() - round_.answers.keys()))
        if awaited:
            text = f"round {index}: {describe_sites(members)}"
            self._log(f"{text}; {describe_sites(awaited)} did not come within {wait_s:.3g} s")
        if not members:
            return
        is_last = any(asked[number].is_last for number in members)
        merges = any(asked[number].merges for number in members)
        is_refused = self._answer_members(index, round_, members, asked, in_pairs=is_paired and not merges)
        if not is_refused and not is_last:
            giver = next((number for ballot in round_.ballots for number in ballot.members), members[0])
            round_.answers[giver] = round_.answers[giver] | self._assign_joining_site(index, [giver])
        self._forget_keys()

    def _wait_s(self, round_: MeetingRound, asked: Mapping[int, Asked]) -> float:
        """Return how long a round waits after its first site: the grace time, once a quorum is here."""
        timeout_s = round_.timeout_s
        settings = self._sites[min(asked)].settings
        # No site gives its state after the last round, so a site that is left out could not finish.
        if len(asked) < _quorum(settings) or any(ask.is_last for ask in asked.values()):
            return timeout_s
        past = (self._rounds[other] for other in sorted(self._rounds))
        grace_s = settings.get("sites.grace_s", 0) or estimate_grace_s(past)
        return timeout_s if grace_s is None else min(grace_s, timeout_s)

    def _answer_members(
        self, index: int, round_: MeetingRound, members: tuple[int, ...], asked: Mapping[int, Asked], *, in_pairs: bool
    ) -> bool:
        """Set the answers to the members of a round; return whether it is refused because their weights differ."""
        settings = self._sites[members[0]].settings
        quorum = _quorum(settings)
        digests = {number: asked[number].digest for number in members}
        common: Message = {}
        if len(members) < quorum:
            common = {"skip": f"only {describe_sites(members)}, and sites.quorum needs {quorum}"}
        elif not self._sites[members[0]].is_paired and len(set(digests.values())) > 1:
            odd = describe_sites(_minority(digests))
            common = {"error": f"the outer weights of {odd} differ from the weights of the other sites"}
        if common:
            self._log(f"round {index}: {describe_sites(members)}; {common.get('skip') or common.get('error')}")
            round_.answers |= dict.fromkeys(members, common)
            return "error" in common
        groups = pair_members(_int(settings, "run.seed"), index, members) if in_pairs else [members]
        round_.answers |= dict.fromkeys(members, {"rests": True})
        # Connections between other sets of sites are dropped, except for late sites that still exchange.
        late = [ballot.members for other in self._rounds.values() for ballot in other.ballots if not ballot.outcome]
        self._epochs = {group: epoch for group, epoch in self._epochs.items() if group in groups or group in late}
        for group in groups:
            answer = self._group_answer(group, asked)
            round_.answers |= dict.fromkeys(group, answer)
            if "members" in answer:
                round_.ballots.append(Ballot(group))
            else:
                self._log(f"round {index}: {describe_sites(group)}; {answer['skip']}")
        return False

    def _group_answer(self, group: tuple[int, ...], asked: Mapping[int, Asked]) -> Message:
        """Return the answer to sites that exchange with each other."""
        tokens = {number: asked[number].tokens * asked[number].is_finite for number in group}
        total = sum(tokens.values())
        if not total:
            return {"skip": "no site has trained since its last round and has finite weights"}
        if group not in self._epochs:
            self._num_epochs += 1
            self._epochs[group] = f"{self._name}-{self._num_epochs}"
        return {
            "members": list(group),
            "weights": [tokens[number] / total for number in group],
            "nonfinite": [number for number in group if not asked[number].is_finite],
            "epoch": self._epochs[group],
        }

    def _forget_keys(self) -> None:
        """Delete the keys of connections and transfers that are over."""
        kept = {*self._epochs.values(), *self._gifts.values()}
        self._store = {key: value for key, value in self._store.items() if key.partition("/")[0] in kept}
        self._store_bytes = sum(len(key) + len(value) for key, value in self._store.items())

    def _is_over(self, name: str) -> bool:
        """Return whether a connection or a transfer of this meeting point has ended, because one of its sites left."""
        is_own = name.startswith((f"{self._name}-", f"gift-{self._name}-"))
        return is_own and name not in self._epochs.values() and name not in self._gifts.values()

    def _enter_vote(self, message: Message, connection: int) -> None:
        number = self._own(message, connection)
        round_ = self._rounds.get(_int(message, "round"))
        ballot = None if round_ is None else round_.ballot_of(number)
        if ballot is None:
            raise BadRequestError(f"site {number} is no member of the round")
        if not ballot.votes:
            ballot.first_vote_s = self._clock()
        ballot.votes[number] = bool(message.get("ok"))
        if not message.get("ok"):
            # Connections between the members may be broken.
            self._epochs.pop(ballot.members, None)

    def _answer_vote(self, number: int, index: int) -> Message | None:
        round_ = self._rounds.get(index)
        ballot = None if round_ is None else round_.ballot_of(number)
        if round_ is None or ballot is None:
            raise BadRequestError(f"round {index} is over")
        if ballot.outcome is None:
            ballot.outcome = self._outcome(ballot, round_.timeout_s)
            if ballot.outcome is None:
                return None
            if ballot.outcome["apply"]:
                for member in ballot.members:
                    self._sites[member].version = round_.asked[member].version + 1
                    if not self._sites[member].is_paired:
                        self._sites[member].weights = None
            else:
                self._epochs.pop(ballot.members, None)
                text = f" of {describe_sites(ballot.members)}" if len(round_.ballots) > 1 else ""
                self._log(f"round {index}{text} is not applied: {ballot.outcome['why']}")
        return ballot.outcome

    def _outcome(self, ballot: Ballot, wait_s: float) -> Message | None:
        failed = [number for number in ballot.members if ballot.votes.get(number) is False]
        if failed:
            return {"apply": False, "why": f"the exchange failed on {describe_sites(failed)}"}
        missing = [number for number in ballot.members if number not in ballot.votes]
        if not missing:
            return {"apply": True}
        lost = [number for number in missing if number not in self.living]
        if lost:
            return {"apply": False, "why": f"{describe_sites(lost)} left"}
        if self._clock() - ballot.first_vote_s > wait_s:
            return {"apply": False, "why": f"{describe_sites(missing)} did not finish within {wait_s:g} s"}
        return None

    def _set(self, message: Message) -> None:
        key = _text(message, "key")
        value = _text(message, "value", MAX_STORE_BYTES)
        before = self._store.get(key)
        added = len(key) + len(value) - (0 if before is None else len(key) + len(before))
        if self._store_bytes + added > MAX_STORE_BYTES:
            raise BadRequestError("the store is full")
        self._store[key] = value
        self._store_bytes += added


def describe_sites(numbers: list[int] | tuple[int, ...]) -> str:
    """Return the text "no site", "site 1" or "sites 0, 2"."""
    if not numbers:
        return "no site"
    return f"site{'s' if len(numbers) > 1 else ''} {', '.join(str(number) for number in numbers)}"


def _quorum(settings: Mapping[str, Any]) -> int:
    """Return the minimum number of sites of a round."""
    return _int(settings, "sites.quorum") or _int(settings, "sites.count") // 2 + 1


def _minority(digests: Mapping[int, int]) -> list[int]:
    """Return the sites whose digest is not the most frequent one; all sites if no digest is."""
    counts = sorted((list(digests.values()).count(value) for value in set(digests.values())), reverse=True)
    if counts[0] == counts[1]:
        return sorted(digests)
    values = list(digests.values())
    return sorted(number for number, value in digests.items() if values.count(value) < counts[0])


def _int(message: Mapping[str, Any], key: str) -> int:
    value = message.get(key)
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise BadRequestError(f"{key} must be an integer")
    return value


def _text(message: Mapping[str, Any], key: str, max_chars: int = MAX_KEY_CHARS) -> str:
    value = message.get(key)
    if not isinstance(value, str) or len(value) > max_chars:
        raise BadRequestError(f"{key} must be a text")
    return value


def _seconds(message: Mapping[str, Any]) -> float:
    value = message.get("timeout_s")
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= MAX_WAIT_S:
        raise BadRequestError("timeout_s must be a number of seconds")
    return float(value)
