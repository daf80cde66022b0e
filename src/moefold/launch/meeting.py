"""State of a meeting point: which sites live, who takes part in a round, and which rounds are applied. Torch-free.

A round is applied only if every one of its members voted for it; a round that is not applied is as if it had not been
due. All of the state can be lost: a new meeting point learns it from the messages of the sites.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moefold.host.listen import is_loopback
from moefold.launch.signed_lines import Message

SILENT_S = 30.0
"""A site counts as lost this long after its last message."""
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
    """Host of the site, as it says."""
    address: str
    """Address from which its first rank connects."""
    settings: dict[str, Any]
    weights: int | None
    """Hash of its outer weights after `version` rounds; None where it is not known."""
    step: int
    version: int
    """Rounds applied."""
    connection: int | None
    last_word_s: float
    is_joining: bool = False
    """It lacks rounds and waits for the state of another site; rounds do not wait for it."""


@dataclass(frozen=True)
class _Asked:
    version: int
    tokens: int
    is_finite: bool
    digest: int
    timeout_s: float
    is_last: bool
    """It is the last round of the run, after which no state is given."""


@dataclass
class _Round:
    opened_s: float
    asked: dict[int, _Asked] = field(default_factory=dict)
    answers: dict[int, Message] = field(default_factory=dict)
    """Answers by site; empty until the round is closed."""
    members: tuple[int, ...] = ()
    votes: dict[int, bool] = field(default_factory=dict)
    first_vote_s: float = 0.0
    outcome: Message | None = None
    """Answer to the votes; None until it is decided."""

    @property
    def is_closed(self) -> bool:
        return bool(self.answers)


class Meeting:
    """State machine of the meeting point; a request is entered once, and asks for its answer after every change.

    Args:
        log: called with each line of the log.
        clock: monotonic time in seconds.
    """

    def __init__(self, log: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._sites: dict[int, _Site] = {}
        self._has_started = False
        self._rounds: dict[int, _Round] = {}
        self._store: dict[str, str] = {}
        self._store_bytes = 0
        self._epoch = 0
        self._epoch_members: tuple[int, ...] = ()
        self._refusals: dict[int, str] = {}
        self._givers: dict[int, Message] = {}
        """Answers to joining sites whose giver is known."""
        self._num_gifts = 0

    def enter(self, message: Message, connection: int, address: str) -> None:
        """Enter a request.

        Args:
            message: the request.
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
            message: the request.
            connection: number of its connection.
            waited_s: time since it was entered.
        """
        match message["do"]:
            case "hello":
                return self._answer_hello(message, connection)
            case "round":
                return self._answer_round(self._own(message, connection), _int(message, "step"))
            case "join":
                return self._answer_join(self._own(message, connection))
            case "vote":
                return self._answer_vote(_int(message, "step"))
            case "get":
                value = self._store.get(message["key"])
                if value is None and waited_s < _seconds(message):
                    return None
                return {} if value is None else {"value": value}
        return {}

    def close_connection(self, connection: int) -> None:
        """Count the site of a connection as lost."""
        self._refusals.pop(connection, None)
        for number, site in self._sites.items():
            if site.connection == connection:
                self._drop(number, f"on {site.host} has closed its connection")

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
        site = _Site(
            host=_text(message, "host"),
            address=address,
            settings=settings,
            weights=_int(message, "weights") if "weights" in message else None,
            step=_int(message, "step"),
            version=_int(message, "version"),
            connection=connection,
            last_word_s=self._clock(),
        )
        if not self.living:
            # All sites of an earlier start have left.
            self._sites.clear()
            self._rounds.clear()
            self._epoch_members = ()
            self._has_started = False
        if refusal := self._refusal(number, site):
            self._log(f"site {number} on {site.host} is refused: {refusal}")
            self._refusals[connection] = refusal
            return
        is_new = number not in self._sites or self._sites[number].connection is None
        self._sites[number] = site
        # After a loss of the connection or of the meeting point, no site waits for the others again.
        self._has_started = self._has_started or bool(message.get("again"))
        if is_new:
            self._log(f"site {number} on {site.host} is here, at step {site.step} after {site.version} rounds")

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
                        f"{key}={own_value!r} must be that of site {other}, {value!r}; start all sites with the same "
                        "recipe and the same base weights"
                    )
            is_known = site.weights is not None and theirs.weights is not None
            if site.version == theirs.version and is_known and site.weights != theirs.weights:
                return (
                    f"its outer weights are not those of site {other} after {site.version} rounds; start the sites "
                    "with the same run.seed and checkpoint.init_from, or from checkpoints of the same run"
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
            return {"missing": missing}
        if not self._has_started:
            self._has_started = True
            self._log(f"all {count} sites are here")
        if missed := self._missed(number):
            self._sites[number].is_joining = True
            return missed
        return {"ready": True}

    def _answer_join(self, number: int) -> Message:
        """Return who gives a joining site its state, or that it has to ask again."""
        if number in self._givers:
            return self._givers.pop(number)
        if not [other for other in self.living if not self._sites[other].is_joining]:
            return {"ended": True}
        return {"wait": True}

    def _assign_joining_site(self, step: int, givers: Sequence[int]) -> Message:
        """Return the order to give the state to a joining site after a round, for the first of some sites."""
        joining = [number for number in self.living if self._sites[number].is_joining and number not in self._givers]
        if not joining or not givers:
            return {}
        self._num_gifts += 1
        number = joining[0]
        gift = f"gift-{self._num_gifts}"
        # The next rounds wait for it again.
        self._sites[number].step = step
        self._sites[number].is_joining = False
        self._givers[number] = {"giver": givers[0], "gift": gift}
        self._log(f"site {number} takes the state of site {givers[0]} after step {step}")
        return {"give": {"to": number, "gift": gift}}

    def _missed(self, number: int) -> Message | None:
        """Return the answer to a site that lacks rounds which others have applied; None if it lacks none."""
        site = self._sites[number]
        ahead = [other for other in self.living if self._sites[other].version > site.version]
        if not ahead:
            return None
        giver = max(ahead, key=lambda other: (self._sites[other].version, -other))
        return {"missed": site.version, "giver": giver, "version": self._sites[giver].version}

    def _enter_round(self, message: Message, connection: int) -> None:
        number = self._own(message, connection)
        step = _int(message, "step")
        site = self._sites[number]
        asked = _Asked(
            version=_int(message, "version"),
            tokens=_int(message, "tokens"),
            is_finite=bool(message.get("finite")),
            digest=_int(message, "digest"),
            timeout_s=_seconds(message),
            is_last=bool(message.get("last")),
        )
        site.step = step
        site.version = asked.version
        site.weights = asked.digest
        site.is_joining = False
        round_ = self._rounds.setdefault(step, _Round(self._clock()))
        for old in sorted(self._rounds)[:-MAX_KEPT_ROUNDS]:
            if old != step:
                del self._rounds[old]
        if not round_.is_closed:
            round_.asked[number] = asked

    def _answer_round(self, number: int, step: int) -> Message | None:
        round_ = self._rounds[step]
        if not round_.is_closed:
            self._try_close(step, round_)
        if not round_.is_closed:
            return None
        late = self._missed(number) or {"skip": f"it came after the round of step {step} was over"}
        return round_.answers.get(number, late)

    def _try_close(self, step: int, round_: _Round) -> None:
        """Choose the members of a round once every living site has asked for it, or the wait is over."""
        living = self.living
        asked = {number: ask for number, ask in round_.asked.items() if number in living}
        awaited = [
            number
            for number in living
            if number not in asked and self._sites[number].step < step and not self._sites[number].is_joining
        ]
        wait_s = max(ask.timeout_s for ask in round_.asked.values())
        if not asked or (awaited and self._clock() - round_.opened_s < wait_s):
            return
        version = max(ask.version for ask in asked.values())
        missed = {number: self._missed(number) for number, ask in asked.items() if ask.version < version}
        round_.answers = {number: answer for number, answer in missed.items() if answer}
        members = tuple(sorted(asked.keys() - missed.keys()))
        text = f"round of step {step}: {describe_sites(members)}"
        common = self._round_answer(members, asked)
        if awaited:
            self._log(f"{text}; {describe_sites(awaited)} did not come within {wait_s:g} s")
        elif "skip" in common or "error" in common:
            self._log(f"{text}; {common.get('skip') or common.get('error')}")
        if "members" in common:
            round_.members = members
        round_.answers |= dict.fromkeys(members, common)
        if "error" not in common and not any(asked[number].is_last for number in members):
            round_.answers[members[0]] = common | self._assign_joining_site(step, members)

    def _round_answer(self, members: tuple[int, ...], asked: Mapping[int, _Asked]) -> Message:
        """Return the common answer to the members of a round."""
        settings = self._sites[members[0]].settings
        quorum = _int(settings, "sites.quorum") or _int(settings, "sites.count") // 2 + 1
        if len(members) < quorum:
            return {"skip": f"only {describe_sites(members)}, and sites.quorum needs {quorum}"}
        digests = {asked[number].digest for number in members}
        if len(digests) > 1:
            odd = _minority({number: asked[number].digest for number in members})
            return {"error": f"the outer weights of {describe_sites(odd)} are not those of the other sites"}
        tokens = {number: asked[number].tokens * asked[number].is_finite for number in members}
        total = sum(tokens.values())
        if not total:
            return {"skip": "no site has finite weights"}
        if members != self._epoch_members:
            self._begin_epoch(members)
        return {
            "members": list(members),
            "weights": [tokens[number] / total for number in members],
            "nonfinite": [number for number in members if not asked[number].is_finite],
            "epoch": f"{self._epoch}",
        }

    def _begin_epoch(self, members: tuple[int, ...]) -> None:
        """Begin a new epoch, whose members connect to each other again."""
        self._epoch += 1
        self._epoch_members = members
        self._store = {key: value for key, value in self._store.items() if key.startswith("gift-")}
        self._store_bytes = sum(len(key) + len(value) for key, value in self._store.items())

    def _enter_vote(self, message: Message, connection: int) -> None:
        number = self._own(message, connection)
        round_ = self._rounds.get(_int(message, "step"))
        if round_ is None or number not in round_.members:
            raise BadRequestError(f"site {number} is no member of the round")
        if not round_.votes:
            round_.first_vote_s = self._clock()
        round_.votes[number] = bool(message.get("ok"))
        if message.get("ok"):
            return
        # Connections between the members may be broken.
        self._epoch_members = ()

    def _answer_vote(self, step: int) -> Message | None:
        round_ = self._rounds.get(step)
        if round_ is None:
            raise BadRequestError(f"the round of step {step} is over")
        if round_.outcome is None:
            round_.outcome = self._outcome(round_)
            if round_.outcome is None:
                return None
            if round_.outcome["apply"]:
                for number in round_.members:
                    self._sites[number].version += 1
                    self._sites[number].weights = None
            else:
                self._epoch_members = ()
                self._log(f"round of step {step} is not applied: {round_.outcome['why']}")
        return round_.outcome

    def _outcome(self, round_: _Round) -> Message | None:
        failed = [number for number in round_.members if round_.votes.get(number) is False]
        if failed:
            return {"apply": False, "why": f"the exchange failed on {describe_sites(failed)}"}
        missing = [number for number in round_.members if number not in round_.votes]
        if not missing:
            return {"apply": True}
        lost = [number for number in missing if number not in self.living]
        if lost:
            return {"apply": False, "why": f"{describe_sites(lost)} left"}
        wait_s = max(ask.timeout_s for ask in round_.asked.values())
        if self._clock() - round_.first_vote_s > wait_s:
            return {"apply": False, "why": f"{describe_sites(missing)} did not finish within {wait_s:g} s"}
        return None

    def _set(self, message: Message) -> None:
        key = _text(message, "key")
        value = _text(message, "value", MAX_STORE_BYTES)
        self._store_bytes += len(key) + len(value)
        if self._store_bytes > MAX_STORE_BYTES:
            raise BadRequestError("the store is full")
        self._store[key] = value


def describe_sites(numbers: list[int] | tuple[int, ...]) -> str:
    """Return "no site", "site 1" or "sites 0, 2"."""
    if not numbers:
        return "no site"
    return f"site{'s' if len(numbers) > 1 else ''} {', '.join(str(number) for number in numbers)}"


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
