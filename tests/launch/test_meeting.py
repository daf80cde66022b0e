"""The state machine of the meeting point, with a clock that the test sets: no sockets."""

import pytest

from moefold.launch.meeting import SILENT_S, BadRequestError, Meeting
from moefold.launch.signed_lines import Message


class Point:
    """A meeting point and its sites; a site's connection has its number unless a test says otherwise."""

    def __init__(self, count: int, quorum: int = 0) -> None:
        self.now_s = 0.0
        self.log: list[str] = []
        self.meeting = Meeting(self.log.append, lambda: self.now_s)
        self.settings = {"sites.count": count, "sites.quorum": quorum, "run.seed": 0}

    def ask(self, message: Message, connection: int, address: str = "10.0.0.1", *, waited_s: float = 0.0):
        self.meeting.enter(message, connection, address)
        return self.meeting.answer(message, connection, waited_s)

    def hello(self, site: int, step: int = 0, version: int = 0, weights: int = 7, **others):
        connection = others.pop("connection", site)
        address = others.pop("address", "10.0.0.1")
        settings = self.settings | others.pop("settings", {})
        message = {"do": "hello", "site": site, "host": f"host{site}", "settings": settings, "weights": weights}
        return self.ask(message | {"step": step, "version": version} | others, connection, address)

    def round(self, site: int, step: int, version: int = 0, tokens: int = 10, **others):
        message = {"do": "round", "site": site, "step": step, "version": version, "tokens": tokens}
        return self.ask(message | {"finite": True, "digest": 5, "timeout_s": 60.0} | others, site)

    def again(self, site: int, step: int, do: str = "round"):
        """What a question that was asked before is answered now."""
        return self.meeting.answer({"do": do, "site": site, "step": step}, site, 0.0)

    def vote(self, site: int, step: int, ok: bool = True):
        return self.ask({"do": "vote", "site": site, "step": step, "ok": ok}, site)

    def all_here(self, count: int) -> None:
        for site in range(count):
            self.hello(site)


def _site_2_missed_a_round() -> Point:
    """Return a meeting point of three sites, of which two have applied the round of step 10."""
    point = Point(3)
    point.all_here(3)
    point.meeting.close_connection(2)
    for site in (0, 1):
        point.round(site, 10)
    for site in (0, 1):
        point.vote(site, 10)
    return point


def test_sites_wait_for_each_other_at_the_start():
    point = Point(3)
    assert point.hello(0) == {"missing": [1, 2]}
    assert point.hello(2) == {"missing": [1]}
    assert point.hello(1) == {"ready": True}
    assert point.hello(0) == {"ready": True}
    point.meeting.close_connection(2)
    assert point.hello(2, connection=9) == {"ready": True}


def test_round_is_applied_once_all_have_voted():
    point = Point(2)
    point.all_here(2)
    assert point.round(0, 10, tokens=30) is None
    answer = point.round(1, 10, tokens=10)
    assert answer == point.again(0, 10)
    assert answer == {"members": [0, 1], "weights": [0.75, 0.25], "nonfinite": [], "epoch": "1"}
    assert point.vote(0, 10) is None
    assert point.vote(1, 10) == {"apply": True} == point.again(0, 10, "vote")
    point.round(0, 20, 1)
    assert point.round(1, 20, 1)["epoch"] == "1"


def test_failed_exchange_is_applied_by_no_site_and_the_next_round_connects_again():
    point = Point(2)
    point.all_here(2)
    point.round(0, 10)
    point.round(1, 10)
    assert point.vote(0, 10) is None
    assert point.vote(1, 10, ok=False) == {"apply": False, "why": "the exchange failed on site 1"}
    assert point.again(0, 10, "vote") == point.again(1, 10, "vote")
    point.round(0, 20)
    assert point.round(1, 20)["epoch"] == "2"


def test_lost_site_ends_the_wait_at_once():
    point = Point(3)
    point.all_here(3)
    point.round(0, 10)
    assert point.round(1, 10) is None
    point.meeting.close_connection(2)
    assert point.again(0, 10)["members"] == point.again(1, 10)["members"] == [0, 1]
    assert point.vote(0, 10) is None
    point.meeting.close_connection(1)
    assert point.again(0, 10, "vote") == {"apply": False, "why": "site 1 left"}
    assert point.round(0, 20) == {"skip": "only site 0, and sites.quorum needs 2"}
    assert "site 2 on host2 has closed its connection" in point.log


def test_silent_and_late_sites_are_waited_for_within_limits():
    point = Point(3)
    point.all_here(3)
    point.round(0, 10)
    point.now_s = SILENT_S - 1
    assert point.round(1, 10) is None
    point.ask({"do": "beat", "site": 0}, 99)
    point.now_s = SILENT_S + 1
    point.meeting.drop_silent()
    assert point.again(1, 10)["members"] == [0, 1]
    late = Point(3)
    late.all_here(3)
    late.round(0, 10)
    late.round(1, 10)
    for late.now_s in (20.0, 40.0, 59.0):
        for site in range(3):
            late.ask({"do": "beat", "site": site}, 99)
        late.meeting.drop_silent()
        assert late.again(0, 10) is None
    late.now_s = 61.0
    assert late.again(0, 10)["members"] == [0, 1]
    assert late.round(2, 10) == {"skip": "it came after the round of step 10 was over"}


def test_site_that_missed_a_round_is_told_so():
    point = _site_2_missed_a_round()
    assert point.hello(2, step=5, connection=12) == {"missed": 0, "giver": 0, "version": 1}


def test_site_that_starts_again_between_two_rounds_is_compared_with_weights_of_that_round_alone():
    """The others said hello before the round, with other weights than those of its checkpoint after the round."""
    point = Point(2)
    point.all_here(2)
    for site in range(2):
        point.round(site, 10)
    for site in range(2):
        point.vote(site, 10)
    point.meeting.close_connection(1)
    assert point.hello(1, 10, 1, weights=8) == {"ready": True}
    assert point.round(0, 20, 1, digest=8) is None
    point.meeting.close_connection(1)
    assert "refused" in point.hello(1, 10, 1, weights=9)
    assert point.hello(1, 10, 1, weights=8) == {"ready": True}
    assert point.round(1, 20, 1, digest=8)["members"] == [0, 1]


def test_site_that_is_past_a_round_is_not_awaited():
    point = Point(3)
    for site, step in ((0, 9), (1, 9), (2, 10)):
        point.hello(site, step=step)
    point.round(0, 10)
    assert point.round(1, 10)["members"] == [0, 1]


def test_odd_weights_and_nonfinite_sites_are_named():
    point = Point(3)
    point.all_here(3)
    point.round(0, 10)
    point.round(1, 10, digest=6)
    assert "site 1 are not those of the other sites" in point.round(2, 10)["error"]
    point = Point(2)
    point.all_here(2)
    point.round(0, 10, finite=False)
    answer = point.round(1, 10)
    assert answer["weights"] == [0.0, 1.0]
    assert answer["nonfinite"] == [0]
    for site in (0, 1):
        point.vote(site, 10)
    point.round(0, 20, 1, finite=False)
    assert point.round(1, 20, 1, finite=False) == {"skip": "no site has finite weights"}


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"settings": {"run.seed": 1}}, "run.seed=1 must be that of site 0, 0"),
        ({"weights": 8}, "its outer weights are not those of site 0 after 0 rounds"),
        ({"address": "127.0.0.1"}, "it comes from 127.0.0.1, and site 0 from 10.0.0.1"),
    ],
)
def test_sites_that_do_not_fit_are_refused(others, message):
    point = Point(2)
    point.hello(0)
    assert message in point.hello(1, **others)["refused"]
    assert point.hello(1) == {"ready": True}


def test_number_that_is_taken_is_refused():
    point = Point(2)
    point.hello(0)
    refused = point.hello(0, connection=5)["refused"]
    assert refused == "sites.number=0 is taken by a job on host0; give each site a number of its own"
    assert point.hello(1) == {"ready": True}


def test_all_sites_that_start_again_begin_again():
    point = Point(2)
    point.all_here(2)
    for site in (0, 1):
        point.round(site, 10)
    for site in (0, 1):
        point.vote(site, 10)
        point.ask({"do": "left", "site": site}, site)
    assert point.hello(0, connection=10) == {"missing": [1]}
    assert point.hello(1, connection=11) == {"ready": True}


def test_new_meeting_point_learns_from_the_sites():
    point = Point(3)
    assert point.hello(0, step=9, version=4, again=True) == {"ready": True}
    point.hello(1, step=9, version=4, again=True)
    point.round(0, 10, 4)
    assert point.round(1, 10, 4)["members"] == [0, 1]


def test_store_gives_a_value_once_it_is_there():
    point = Point(2)
    question = {"do": "get", "key": "1/0/x", "timeout_s": 5.0}
    assert point.ask(question, 1) is None
    assert point.ask(question, 1, waited_s=6.0) == {}
    point.ask({"do": "set", "key": "1/0/x", "value": "dGVzdA=="}, 2)
    assert point.ask(question, 1) == {"value": "dGVzdA=="}


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"do": "pickle"},
        {"do": "hello", "site": 0},
        {"do": "hello", "site": 3, "settings": {"sites.count": 2}},
        {"do": "round", "site": 0, "step": 1},
        {"do": "round", "site": 1, "step": 1, "version": 0, "tokens": 1, "digest": 1, "timeout_s": 1},
        {"do": "round", "site": 0, "step": 2**80, "version": 0, "tokens": 1, "digest": 1, "timeout_s": 1},
        {"do": "round", "site": 0, "step": 1, "version": 0, "tokens": 1, "digest": 1, "timeout_s": True},
        {"do": "vote", "site": 0, "step": 77},
        {"do": "set", "key": "k" * 600, "value": ""},
        {"do": "set", "key": 1, "value": ""},
    ],
)
def test_wrong_requests_are_refused(message):
    point = Point(2)
    point.hello(0)
    with pytest.raises(BadRequestError):
        point.ask(message, 0)


def test_joining_site_gets_the_state_of_a_member_after_the_next_round():
    point = _site_2_missed_a_round()
    point.hello(2, step=5, connection=2)
    join = {"do": "join", "site": 2}
    assert point.ask(join, 2) == {"wait": True}
    # Rounds do not wait for a site that joins.
    point.round(0, 20, 1)
    assert "give" not in point.round(1, 20, 1)
    assert point.again(0, 20)["give"] == {"to": 2, "gift": "gift-1"}
    assert point.ask(join, 2) == {"giver": 0, "gift": "gift-1"}
    for site in (0, 1):
        point.vote(site, 20)
    # The next round waits for it again, and no other state is given.
    point.round(0, 30, 2)
    assert point.round(1, 30, 2) is None
    answer = point.round(2, 30, 2)
    assert answer["members"] == [0, 1, 2]
    assert "give" not in point.again(0, 30)


def test_state_is_given_after_a_skipped_round_and_not_after_the_last():
    point = Point(3, quorum=3)
    point.all_here(3)
    for site in range(3):
        point.round(site, 10)
    for site in range(3):
        point.vote(site, 10)
    point.meeting.close_connection(1)
    point.meeting.close_connection(2)
    point.hello(2, step=5, connection=2)
    point.ask({"do": "join", "site": 2}, 2)
    assert "give" not in point.round(0, 20, 1, last=True)
    assert point.round(0, 30, 1)["give"] == {"to": 2, "gift": "gift-1"}
    point.ask({"do": "left", "site": 0}, 0)
    point.hello(1, step=5, connection=1)
    assert point.ask({"do": "join", "site": 1}, 1) == {"wait": True}
    point.meeting.close_connection(2)
    assert point.ask({"do": "join", "site": 1}, 1) == {"ended": True}
