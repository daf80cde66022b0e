"""State of a meeting point: the living sites, the members of each round, and the applied rounds.

A round is applied only if all its members voted for it. A round that is not applied has no effect, as if it had not
been due. All of the state can be lost: a new meeting point learns it from the messages of the sites.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moefold.launch.meeting_keys import MAX_STORE_BYTES, MeetingKeys
from moefold.launch.meeting_sites import SiteList, read_registration
from moefold.launch.signed_lines import BadRequestError, Message, int_field, seconds_field, text_field
from moefold.launch.site_round import MeetingRound, RoundRequest, VotingGroup, estimate_grace_s, pair_members

MAX_KEPT_ROUNDS = 256
"""Rounds whose outcome is kept for late sites."""


class Meeting:
    """State machine of the meeting point. A request is entered once, and checked for an answer after every change."""

    def __init__(self, log: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self.sites = SiteList(log, clock, self._lose)
        """The registered sites."""
        self._keys = MeetingKeys()
        self._rounds: dict[int, MeetingRound] = {}
        self._transfer_answers: dict[int, Message] = {}
        """Answers to joining sites whose sender is known."""

    def enter(self, message: Message, connection: int, address: str) -> None:
        """Dispatch a request of a site to the method that answers it.

        Raises:
            BadRequestError: a field is missing or wrong.
        """
        match message.get("do"):
            case "hello":
                number, site = read_registration(message, connection, address, self._clock())
                if not self.sites.living:
                    # All sites of an earlier start have left.
                    self.sites.clear()
                    self._rounds.clear()
                    self._keys.end_all_except(())
                self.sites.register(number, site, message)
            case "round":
                self._enter_round(message, connection)
            case "vote":
                self._enter_vote(message, connection)
            case "join":
                number = self.sites.registered_site(message, connection)
                self.sites[number].is_joining = number not in self._transfer_answers
            case "beat":
                self.sites.beat(int_field(message, "site"))
            case "left":
                self.sites.drop(self.sites.registered_site(message, connection), "has left")
            case "set":
                self._keys.set(text_field(message, "key"), text_field(message, "value", MAX_STORE_BYTES))
            case "get":
                text_field(message, "key")
            case other:
                raise BadRequestError(f"{str(other)[:40]!r} is not a request")

    def answer(self, message: Message, connection: int, waited_s: float) -> Message | None:
        """Return the answer to a request that was entered, or None if not yet."""
        match message["do"]:
            case "hello":
                return self.sites.answer_registration(message, connection)
            case "round":
                return self._answer_round(self.sites.registered_site(message, connection), int_field(message, "round"))
            case "join":
                number = self.sites.registered_site(message, connection)
                if number in self._transfer_answers:
                    return self._transfer_answers.pop(number)
                return {"ended" if all(self.sites[living].is_joining for living in self.sites.living) else "wait": True}
            case "vote":
                return self._answer_vote(self.sites.registered_site(message, connection), int_field(message, "round"))
            case "get":
                value = self._keys.get(message["key"])
                if value is not None:
                    return {"value": value}
                if self._keys.is_over(message["key"]):
                    return {"over": True}
                return None if waited_s < seconds_field(message) else {}
        return {}

    def _lose(self, number: int) -> None:
        """Forget what a lost site waits for."""
        self._transfer_answers.pop(number, None)
        self._keys.leave(number)

    def _assign_joining_site(self, index: int, senders: Sequence[int]) -> Message:
        """Return the order to send the state to the first joining site after a round. One of `senders` sends it."""
        joining = [
            number
            for number in self.sites.living
            if self.sites[number].is_joining and number not in self._transfer_answers
        ]
        if not joining or not senders:
            return {}
        number = joining[0]
        transfer = self._keys.begin_transfer(number)
        # The next rounds wait for it again.
        self.sites[number].round = index
        self.sites[number].is_joining = False
        self._transfer_answers[number] = {"giver": senders[0], "gift": transfer}
        self._log(f"site {number} takes the state of site {senders[0]} after round {index}")
        return {"give": {"to": number, "gift": transfer, "round": index}}

    def _enter_round(self, message: Message, connection: int) -> None:
        number = self.sites.registered_site(message, connection)
        index = int_field(message, "round")
        site = self.sites[number]
        request = RoundRequest(
            version=int_field(message, "version"),
            tokens=int_field(message, "tokens"),
            is_finite=bool(message.get("finite")),
            digest=int_field(message, "digest"),
            timeout_s=seconds_field(message),
            is_last=bool(message.get("last")),
            merges=bool(message.get("merges")),
        )
        site.round = index
        site.version = request.version
        if not site.is_paired:
            site.weights_hash = request.digest
        site.is_joining = False
        # The state that it was given has arrived.
        self._keys.end_transfer(number)
        round_ = self._rounds.setdefault(index, MeetingRound(self._clock()))
        for old in sorted(self._rounds)[:-MAX_KEPT_ROUNDS]:
            if old != index:
                del self._rounds[old]
        round_.delays_s.setdefault(number, self._clock() - round_.opened_s)
        if not round_.is_closed:
            round_.requests[number] = request

    def _answer_round(self, number: int, index: int) -> Message | None:
        round_ = self._rounds.get(index)
        if round_ is None:
            raise BadRequestError(f"round {index} is over")
        if not round_.is_closed:
            self._try_close(index, round_)
        if not round_.is_closed:
            return None
        voters = round_.voting_group_of(number)
        if number in round_.answers and (voters is None or voters.outcome is None):
            return round_.answers[number]
        return self.sites.missed(number) or {"skip": f"it came after round {index} was over"}

    def _try_close(self, index: int, round_: MeetingRound) -> None:
        """Choose the members of a round once every living site has asked for it, or the wait is over."""
        living = self.sites.living
        requests = {number: request for number, request in round_.requests.items() if number in living}
        awaited = [
            number
            for number in living
            if number not in requests and self.sites[number].round < index and not self.sites[number].is_joining
        ]
        if not requests:
            return
        wait_s = self._wait_s(round_, requests)
        if awaited and self._clock() - round_.opened_s < wait_s:
            return
        version = max(request.version for request in requests.values())
        is_paired = self.sites[min(requests)].is_paired
        missed = {
            number: self.sites.missed(number)
            for number, request in requests.items()
            if is_paired or request.version < version
        }
        round_.answers = {number: answer for number, answer in missed.items() if answer}
        members = tuple(sorted(requests.keys() - round_.answers.keys()))
        if awaited:
            text = f"round {index}: {describe_sites(members)}"
            self._log(f"{text}; {describe_sites(awaited)} did not come within {wait_s:.3g} s")
        if not members:
            return
        is_last = any(requests[number].is_last for number in members)
        merges = any(requests[number].merges for number in members)
        of_members = {number: requests[number] for number in members}
        is_refused = self._answer_members(index, round_, of_members, in_pairs=is_paired and not merges)
        if not is_refused and not is_last:
            sender = next((number for voters in round_.voting_groups for number in voters.members), members[0])
            round_.answers[sender] = round_.answers[sender] | self._assign_joining_site(index, [sender])
        self._keys.forget()

    def _wait_s(self, round_: MeetingRound, requests: Mapping[int, RoundRequest]) -> float:
        """Return how long a round waits after its first site: the grace time, once a quorum is here."""
        timeout_s = round_.timeout_s
        settings = self.sites[min(requests)].settings
        # No site gives its state after the last round, so a site that is left out could not finish.
        if len(requests) < _quorum(settings) or any(request.is_last for request in requests.values()):
            return timeout_s
        past = (self._rounds[index] for index in sorted(self._rounds))
        grace_s = settings.get("sites.grace_s", 0) or estimate_grace_s(past)
        return timeout_s if grace_s is None else min(grace_s, timeout_s)

    def _answer_members(
        self, index: int, round_: MeetingRound, requests: Mapping[int, RoundRequest], *, in_pairs: bool
    ) -> bool:
        """Set the answers to the members of a round, and return whether it is refused because their weights differ."""
        members = tuple(requests)
        settings = self.sites[members[0]].settings
        quorum = _quorum(settings)
        digests = {number: request.digest for number, request in requests.items()}
        common: Message = {}
        if len(members) < quorum:
            common = {"skip": f"only {describe_sites(members)}, and sites.quorum needs {quorum}"}
        elif not self.sites[members[0]].is_paired and len(set(digests.values())) > 1:
            odd = describe_sites(_minority(digests))
            common = {"error": f"the outer weights of {odd} differ from the weights of the other sites"}
        if common:
            self._log(f"round {index}: {describe_sites(members)}; {common.get('skip') or common.get('error')}")
            round_.answers |= dict.fromkeys(members, common)
            return "error" in common
        groups = pair_members(int_field(settings, "run.seed"), index, members) if in_pairs else [members]
        round_.answers |= dict.fromkeys(members, {"rests": True})
        # Connections between other sets of sites are dropped, except for late sites that still exchange.
        open_groups = [v.members for other in self._rounds.values() for v in other.voting_groups if not v.outcome]
        self._keys.end_all_except([*groups, *open_groups])
        for group in groups:
            answer = self._group_answer(group, requests)
            round_.answers |= dict.fromkeys(group, answer)
            if "members" in answer:
                round_.voting_groups.append(VotingGroup(group))
            else:
                self._log(f"round {index}: {describe_sites(group)}; {answer['skip']}")
        return False

    def _group_answer(self, group: tuple[int, ...], requests: Mapping[int, RoundRequest]) -> Message:
        """Return the answer to sites that exchange with each other."""
        tokens = {number: requests[number].tokens * requests[number].is_finite for number in group}
        total = sum(tokens.values())
        if not total:
            return {"skip": "no site has trained since its last round and has finite weights"}
        return {
            "members": list(group),
            "weights": [tokens[number] / total for number in group],
            "nonfinite": [number for number in group if not requests[number].is_finite],
            "epoch": self._keys.connect(group),
        }

    def _enter_vote(self, message: Message, connection: int) -> None:
        number = self.sites.registered_site(message, connection)
        round_ = self._rounds.get(int_field(message, "round"))
        voters = None if round_ is None else round_.voting_group_of(number)
        if voters is None:
            raise BadRequestError(f"site {number} is not a member of the round")
        if not voters.votes:
            voters.first_vote_s = self._clock()
        voters.votes[number] = bool(message.get("ok"))
        if not message.get("ok"):
            # Connections between the members may be broken.
            self._keys.disconnect(voters.members)

    def _answer_vote(self, number: int, index: int) -> Message | None:
        round_ = self._rounds.get(index)
        voters = None if round_ is None else round_.voting_group_of(number)
        if round_ is None or voters is None:
            raise BadRequestError(f"round {index} is over")
        if voters.outcome is None:
            voters.outcome = self._outcome(voters, round_.timeout_s)
            if voters.outcome is None:
                return None
            if voters.outcome["apply"]:
                for member in voters.members:
                    self.sites[member].version = round_.requests[member].version + 1
                    if not self.sites[member].is_paired:
                        self.sites[member].weights_hash = None
            else:
                self._keys.disconnect(voters.members)
                text = f" of {describe_sites(voters.members)}" if len(round_.voting_groups) > 1 else ""
                self._log(f"round {index}{text} is not applied: {voters.outcome['why']}")
        return voters.outcome

    def _outcome(self, voters: VotingGroup, wait_s: float) -> Message | None:
        failed = [number for number in voters.members if voters.votes.get(number) is False]
        if failed:
            return {"apply": False, "why": f"the exchange failed on {describe_sites(failed)}"}
        missing = [number for number in voters.members if number not in voters.votes]
        if not missing:
            return {"apply": True}
        lost = [number for number in missing if number not in self.sites.living]
        if lost:
            return {"apply": False, "why": f"{describe_sites(lost)} left"}
        if self._clock() - voters.first_vote_s > wait_s:
            return {"apply": False, "why": f"{describe_sites(missing)} did not finish within {wait_s:g} s"}
        return None


def describe_sites(numbers: list[int] | tuple[int, ...]) -> str:
    """Return the text "no site", "site 1" or "sites 0, 2"."""
    if not numbers:
        return "no site"
    return f"site{'s' if len(numbers) > 1 else ''} {', '.join(str(number) for number in numbers)}"


def _quorum(settings: Mapping[str, Any]) -> int:
    """Return the minimum number of sites of a round."""
    return int_field(settings, "sites.quorum") or int_field(settings, "sites.count") // 2 + 1


def _minority(digests: Mapping[int, int]) -> list[int]:
    """Return the sites whose digest is not the most frequent one, or all sites if no digest is."""
    counts = sorted((list(digests.values()).count(value) for value in set(digests.values())), reverse=True)
    if counts[0] == counts[1]:
        return sorted(digests)
    values = list(digests.values())
    return sorted(number for number, value in digests.items() if values.count(value) < counts[0])
