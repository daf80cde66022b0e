"""The state machine of the meeting point, with a clock that the test sets: no sockets."""

import pytest

from moefold.launch import meeting
from moefold.launch.meeting import Meeting
from moefold.launch.meeting_sites import SILENT_S
from moefold.launch.signed_lines import BadRequestError, Message
from moefold.launch.site_round import (
    MIN_GRACE_ROUNDS,
    MIN_GRACE_S,
    MeetingRound,
    estimate_grace_s,
    pair_members,
)


class Point:
    """A meeting point and its sites; a site's connection has its number unless a test says otherwise."""

    def __init__(self, count: int, quorum: int = 0, **settings: object) -> None:
        self.now_s = 0.0
        self.log: list[str] = []
        self.meeting = Meeting(self.log.append, lambda: self.now_s)
        self.settings = {"sites.count": count, "sites.quorum": quorum, "run.seed": 0} | settings

    def ask(self, message: Message, connection: int, address: str = "10.0.0.1", *, waited_s: float = 0.0):
        self.meeting.enter(message, connection, address)
        return self.meeting.answer(message, connection, waited_s)

    def hello(self, site: int, round_: int = 0, version: int = 0, weights: int = 7, **others):
        connection = others.pop("connection", site)
        address = others.pop("address", "10.0.0.1")
        settings = self.settings | others.pop("settings", {})
        message = {"do": "hello", "site": site, "host": f"host{site}", "settings": settings, "weights": weights}
        round_ = {"step": 10 * round_, "round": round_, "version": version}
        return self.ask(message | round_ | others, connection, address)

    def round(self, site: int, index: int, version: int = 0, tokens: int = 10, **others):
        message = {"do": "round", "site": site, "round": index, "version": version, "tokens": tokens}
        return self.ask(message | {"finite": True, "digest": 5, "timeout_s": 60.0} | others, site)

    def again(self, site: int, index: int, do: str = "round"):
        """Return the present answer to a question that was asked before."""
        return self.meeting.answer({"do": do, "site": site, "round": index}, site, 0.0)

    def vote(self, site: int, index: int, ok: bool = True):
        return self.ask({"do": "vote", "site": site, "round": index, "ok": ok}, site)

    def all_here(self, count: int) -> None:
        for site in range(count):
            self.hello(site)


def _site_2_missed_a_round() -> Point:
    """Return a meeting point of three sites, two of which have applied round 1."""
    point = Point(3)
    point.all_here(3)
    point.meeting.sites.close_connection(2)
    for site in (0, 1):
        point.round(site, 1)
    for site in (0, 1):
        point.vote(site, 1)
    return point


def test_sites_wait_for_each_other_at_the_start():
    point = Point(3)
    assert point.hello(0) == {"missing": [1, 2]}
    assert point.hello(2) == {"missing": [1]}
    assert point.hello(1) == {"ready": True}
    assert point.hello(0) == {"ready": True}
    point.meeting.sites.close_connection(2)
    assert point.hello(2, connection=9) == {"ready": True}


def test_site_whose_process_has_ended_is_not_awaited_without_a_word():
    point = Point(2)
    point.meeting.sites.end_site(0, "it is done")
    assert point.hello(1) == {"missing": [0], "refused_sites": {"0": "it is done"}}
    # It was started again.
    assert point.hello(0) == {"ready": True}
    point.meeting.sites.close_connection(0)
    point.meeting.sites.end_site(0, "it is done")
    assert point.hello(1) == {"ready": True}


def test_round_is_applied_once_all_have_voted():
    point = Point(2)
    point.all_here(2)
    assert point.round(0, 1, tokens=30) is None
    answer = point.round(1, 1, tokens=10)
    assert answer == point.again(0, 1)
    assert answer == {"members": [0, 1], "weights": [0.75, 0.25], "nonfinite": [], "epoch": answer["epoch"]}
    assert point.vote(0, 1) is None
    assert point.vote(1, 1) == {"apply": True} == point.again(0, 1, "vote")
    point.round(0, 2, 1)
    # The members stay connected.
    assert point.round(1, 2, 1)["epoch"] == answer["epoch"]


def test_failed_exchange_is_applied_by_no_site_and_the_next_round_connects_again():
    point = Point(2)
    point.all_here(2)
    point.round(0, 1)
    before = point.round(1, 1)["epoch"]
    assert point.vote(0, 1) is None
    assert point.vote(1, 1, ok=False) == {"apply": False, "why": "the exchange failed on site 1"}
    assert point.again(0, 1, "vote") == point.again(1, 1, "vote")
    point.round(0, 2)
    assert point.round(1, 2)["epoch"] != before


def test_lost_site_ends_the_wait_at_once():
    point = Point(3)
    point.all_here(3)
    point.round(0, 1)
    assert point.round(1, 1) is None
    point.meeting.sites.close_connection(2)
    assert point.again(0, 1)["members"] == point.again(1, 1)["members"] == [0, 1]
    assert point.vote(0, 1) is None
    point.meeting.sites.close_connection(1)
    assert point.again(0, 1, "vote") == {"apply": False, "why": "site 1 left"}
    assert point.round(0, 2) == {"skip": "only site 0, and sites.quorum needs 2"}
    assert "site 2 on host2 has closed its connection" in point.log


def test_silent_and_late_sites_are_waited_for_within_limits():
    point = Point(3)
    point.all_here(3)
    point.round(0, 1)
    point.now_s = SILENT_S - 1
    assert point.round(1, 1) is None
    point.ask({"do": "beat", "site": 0}, 99)
    point.now_s = SILENT_S + 1
    point.meeting.sites.drop_silent()
    assert point.again(1, 1)["members"] == [0, 1]
    late = Point(3)
    late.all_here(3)
    late.round(0, 1)
    late.round(1, 1)
    for late.now_s in (20.0, 40.0, 59.0):
        for site in range(3):
            late.ask({"do": "beat", "site": site}, 99)
        late.meeting.sites.drop_silent()
        assert late.again(0, 1) is None
    late.now_s = 61.0
    assert late.again(0, 1)["members"] == [0, 1]
    assert late.round(2, 1) == {"skip": "it came after round 1 was over"}


def test_site_that_missed_a_round_is_told_so():
    point = _site_2_missed_a_round()
    assert point.hello(2, connection=12) == {"missed": 0, "giver": 0, "version": 1}


def test_a_restarted_site_is_compared_with_weights_of_its_round():
    """The others registered before the round, with other weights than its checkpoint has after the round."""
    point = Point(2)
    point.all_here(2)
    for site in range(2):
        point.round(site, 1)
    for site in range(2):
        point.vote(site, 1)
    point.meeting.sites.close_connection(1)
    assert point.hello(1, 1, 1, weights=8) == {"ready": True}
    assert point.round(0, 2, 1, digest=8) is None
    point.meeting.sites.close_connection(1)
    assert "refused" in point.hello(1, 1, 1, weights=9)
    assert point.hello(1, 1, 1, weights=8) == {"ready": True}
    assert point.round(1, 2, 1, digest=8)["members"] == [0, 1]


def test_site_that_is_past_a_round_is_not_awaited():
    point = Point(3)
    for site, index in ((0, 0), (1, 0), (2, 1)):
        point.hello(site, index)
    point.round(0, 1)
    assert point.round(1, 1)["members"] == [0, 1]


def test_odd_weights_and_nonfinite_sites_are_named():
    point = Point(3)
    point.all_here(3)
    point.round(0, 1)
    point.round(1, 1, digest=6)
    assert "site 1 differ from the weights of the other sites" in point.round(2, 1)["error"]
    point = Point(2)
    point.all_here(2)
    point.round(0, 1, finite=False)
    answer = point.round(1, 1)
    assert answer["weights"] == [0.0, 1.0]
    assert answer["nonfinite"] == [0]
    for site in (0, 1):
        point.vote(site, 1)
    point.round(0, 2, 1, finite=False)
    assert point.round(1, 2, 1, finite=False) == {
        "skip": "no site has trained since its last round and has finite weights"
    }


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"settings": {"run.seed": 1}}, "run.seed=1 must equal the value of site 0, 0"),
        ({"weights": 8}, "its outer weights differ from the weights of site 0 after 0 rounds"),
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
        point.round(site, 1)
    for site in (0, 1):
        point.vote(site, 1)
        point.ask({"do": "left", "site": site}, site)
    assert point.hello(0, connection=10) == {"missing": [1]}
    assert point.hello(1, connection=11) == {"ready": True}


def test_new_meeting_point_learns_from_the_sites():
    point = Point(3)
    assert point.hello(0, round_=0, version=4, again=True) == {"ready": True}
    point.hello(1, round_=0, version=4, again=True)
    point.round(0, 1, 4)
    assert point.round(1, 1, 4)["members"] == [0, 1]


def test_store_gives_a_value_once_it_is_there():
    point = Point(2)
    question = {"do": "get", "key": "1/0/x", "timeout_s": 5.0}
    assert point.ask(question, 1) is None
    assert point.ask(question, 1, waited_s=6.0) == {}
    point.ask({"do": "set", "key": "1/0/x", "value": "dGVzdA=="}, 2)
    assert point.ask(question, 1) == {"value": "dGVzdA=="}


def test_wait_for_the_address_of_a_site_ends_when_it_leaves():
    point = Point(3)
    point.all_here(3)
    for site in range(3):
        point.round(site, 1)
    question = {"do": "get", "key": f"{point.again(0, 1)['epoch']}/0/x", "timeout_s": 60.0}
    assert point.ask(question, 1) is None
    point.meeting.sites.close_connection(2)
    assert point.ask(question, 1) == {"over": True}


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"do": "pickle"},
        {"do": "hello", "site": 0},
        {"do": "hello", "site": 3, "settings": {"sites.count": 2}},
        {"do": "round", "site": 0, "round": 1},
        {"do": "round", "site": 1, "round": 1, "version": 0, "tokens": 1, "digest": 1, "timeout_s": 1},
        {"do": "round", "site": 0, "round": 2**80, "version": 0, "tokens": 1, "digest": 1, "timeout_s": 1},
        {"do": "round", "site": 0, "round": 1, "version": 0, "tokens": 1, "digest": 1, "timeout_s": True},
        {"do": "vote", "site": 0, "round": 77},
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
    point.hello(2, connection=2)
    join = {"do": "join", "site": 2}
    assert point.ask(join, 2) == {"wait": True}
    # Rounds do not wait for a site that joins.
    point.round(0, 2, 1)
    assert "give" not in point.round(1, 2, 1)
    gift = point.again(0, 2)["give"]["gift"]
    assert point.again(0, 2)["give"] == {"to": 2, "gift": gift, "round": 2}
    assert point.ask(join, 2) == {"giver": 0, "gift": gift}
    for site in (0, 1):
        point.vote(site, 2)
    # The next round waits for it again, and no other state is given.
    point.round(0, 3, 2)
    assert point.round(1, 3, 2) is None
    answer = point.round(2, 3, 2)
    assert answer["members"] == [0, 1, 2]
    assert "give" not in point.again(0, 3)


def test_state_is_given_after_a_skipped_round_and_not_after_the_last():
    point = Point(3, quorum=3)
    point.all_here(3)
    for site in range(3):
        point.round(site, 1)
    for site in range(3):
        point.vote(site, 1)
    point.meeting.sites.close_connection(1)
    point.meeting.sites.close_connection(2)
    point.hello(2, connection=2)
    point.ask({"do": "join", "site": 2}, 2)
    assert "give" not in point.round(0, 2, 1, last=True)
    assert point.round(0, 3, 1)["give"]["to"] == 2
    point.ask({"do": "left", "site": 0}, 0)
    point.hello(1, connection=1)
    assert point.ask({"do": "join", "site": 1}, 1) == {"wait": True}
    point.meeting.sites.close_connection(2)
    assert point.ask({"do": "join", "site": 1}, 1) == {"ended": True}


def _delayed_rounds(delays_s, interval_s=100.0, late=2):
    """Past rounds of three sites; one site comes as late as the delays say."""
    found = []
    for index, delay_s in enumerate(delays_s):
        round_ = MeetingRound(index * interval_s, answers={0: {}}, delays_s={0: 0.0, 1: 1.0})
        round_.delays_s[late] = delay_s
        found.append(round_)
    return found


def test_grace_time_is_the_median_and_three_deviations_of_past_delays():
    assert estimate_grace_s(_delayed_rounds([1.0] * (MIN_GRACE_ROUNDS - 1))) is None
    # Median 40, deviations 0, 0, 1, 1, 2, 2, 20, 3560: the site that was away for an hour changes little.
    delays_s = [40.0, 41.0, 38.0, 40.0, 42.0, 39.0, 60.0, 3600.0]
    assert estimate_grace_s(_delayed_rounds(delays_s)) == 40.5 + 3 * 1.5
    # To wait for a site of three costs the others less than to lose its work of a round.
    assert estimate_grace_s(_delayed_rounds([1.0] * 8, 120.0)) == 40.0
    assert estimate_grace_s(_delayed_rounds([1.0] * 8, 3.0)) == MIN_GRACE_S
    # Only the last rounds count.
    assert estimate_grace_s(_delayed_rounds([900.0] * 20 + [10.0] * 16, 15.0)) == 10.0


def _beat(point: Point, sites: range) -> None:
    for site in sites:
        point.ask({"do": "beat", "site": site}, 99)
    point.meeting.sites.drop_silent()


def test_late_site_is_left_out_after_the_grace_time_and_takes_part_again():
    point = Point(3, **{"sites.grace_s": 7.0})
    point.all_here(3)
    point.round(0, 1)
    point.now_s = 7.5
    # Without a quorum the round waits longer.
    assert point.again(0, 1) is None
    assert point.round(1, 1)["members"] == [0, 1]
    assert "round 1: sites 0, 1; site 2 did not come within 7 s" in point.log
    for site in (0, 1):
        point.vote(site, 1)
    assert point.round(2, 1)["missed"] == 0
    assert point.ask({"do": "join", "site": 2}, 2) == {"wait": True}
    point.round(0, 2, 1)
    assert point.round(1, 2, 1) is not None
    for site in (0, 1):
        point.vote(site, 2)
    # It has the state now: the next round waits for it, within the grace time.
    point.round(0, 3, 2)
    assert point.round(1, 3, 2) is None
    assert point.round(2, 3, 2)["members"] == [0, 1, 2]


def test_grace_time_follows_the_delays_of_the_rounds_and_not_the_last_round():
    point = Point(3)
    point.all_here(3)
    for index in range(1, MIN_GRACE_ROUNDS + 1):
        point.now_s = 30.0 * index
        _beat(point, range(3))
        point.round(0, index, index - 1)
        point.round(1, index, index - 1)
        point.now_s += 2.0
        assert point.round(2, index, index - 1)["members"] == [0, 1, 2]
        for site in range(3):
            point.vote(site, index)
    version = MIN_GRACE_ROUNDS
    point.now_s = 300.0
    _beat(point, range(3))
    point.round(0, version + 1, version)
    assert point.round(1, version + 1, version) is None
    # A third of the 30 s between two rounds.
    point.now_s = 309.0
    assert point.again(0, version + 1) is None
    point.now_s = 310.5
    assert point.again(0, version + 1)["members"] == [0, 1]
    last = Point(3, **{"sites.grace_s": 7.0})
    last.all_here(3)
    last.round(0, 1, last=True)
    last.round(1, 1, last=True)
    last.now_s = 20.0
    assert last.again(0, 1) is None


PAIRS = {"sites.topology": "pairs"}
"""The name is the same as in earlier versions, so that meeting points and sites of two versions agree on pairs."""


def test_pairs_are_a_permutation_of_seed_round_and_members():
    members = (0, 2, 3, 5, 7)
    found = [pair_members(1, index, members) for index in range(200)]
    for pairs in found:
        paired = [site for pair in pairs for site in pair]
        assert len(paired) == len(set(paired)) == 4
        assert set(paired) < set(members)
    # All 15 choices of two pairs of five sites, and each site rests in about a fifth of the rounds.
    assert len({tuple(sorted(pairs)) for pairs in found}) == 15
    for site in members:
        assert 20 < sum(site not in {s for pair in pairs for s in pair} for pairs in found) < 60
    assert found[3] == pair_members(1, 3, members[::-1])
    assert found != [pair_members(2, index, members) for index in range(200)]


def _open_pairs(point: Point, index: int, count: int, version: int = 0) -> dict[int, Message]:
    """Let all sites ask for a round, each with weights of its own; return their answers."""
    for site in range(count):
        point.round(site, index, version, digest=site)
    return {site: point.again(site, index) for site in range(count)}


def test_lost_site_voids_only_the_round_of_its_pair():
    point = Point(5, **PAIRS)
    point.all_here(5)
    answers = _open_pairs(point, 1, 5)
    (first, second) = pairs = pair_members(0, 1, range(5))
    for pair in pairs:
        for site in pair:
            assert answers[site]["members"] == list(pair)
            assert answers[site]["weights"] == [0.5, 0.5]
    (resting,) = set(range(5)) - {*first, *second}
    assert {key: value for key, value in answers[resting].items() if key != "give"} == {"rests": True}
    assert answers[first[0]]["epoch"] != answers[second[0]]["epoch"]
    assert [point.vote(site, 1) for site in (*first, second[0])] == [None, {"apply": True}, None]
    point.meeting.sites.close_connection(second[1])
    why = f"site {second[1]} left"
    assert point.again(second[0], 1, "vote") == {"apply": False, "why": why}
    assert point.again(first[0], 1, "vote") == {"apply": True}
    assert f"round 1 of sites {second[0]}, {second[1]} is not applied: {why}" in point.log
    # The sites that did not exchange take part in the next round, with fewer rounds than the others.
    for site in range(5):
        if site != second[1]:
            point.round(site, 2, int(site in first))
    assert all("members" in point.again(site, 2) for site in range(5) if site != second[1])


def test_a_site_of_pairs_joins_again_after_missed_rounds():
    point = Point(4, **PAIRS)
    point.all_here(4)
    found = []
    for index in (1, 2, 3):
        point.meeting.sites.close_connection(3)
        for site in range(3):
            point.round(site, index, 1, digest=site)
        # In pairs its outer weights are its own.
        found.append("ready" in point.hello(3, 0, 1, weights=9))
    assert found == [True, False, False]
    point.meeting.sites.close_connection(3)
    assert point.hello(3, 2, 1, weights=9) == {"ready": True}


def test_last_round_of_pairs_is_one_of_all():
    point = Point(4, **PAIRS)
    point.all_here(4)
    for site in range(4):
        point.round(site, 1, last=True, merges=True, digest=site, tokens=10 + 10 * site)
    assert point.again(2, 1)["members"] == [0, 1, 2, 3]
    assert point.again(2, 1)["weights"] == [0.1, 0.2, 0.3, 0.4]


def test_site_that_reconnects_amid_a_vote_is_a_member_and_does_not_join():
    """Its hello has the rounds that it knows of, fewer than the others have since the vote."""
    point = Point(3)
    point.all_here(3)
    for site in range(3):
        point.round(site, 1)
    for site in range(3):
        point.vote(site, 1)
    point.meeting.sites.close_connection(2)
    point.hello(2, 0, 0, connection=2, again=True)
    assert point.vote(2, 1) == {"apply": True}
    point.round(0, 2, 1)
    # It is awaited, and no site is to give it a state.
    assert point.round(1, 2, 1) is None
    assert point.round(2, 2, 1)["members"] == [0, 1, 2]
    assert "give" not in point.again(0, 2)


def test_site_that_comes_back_during_a_round_connects_again():
    point = Point(2)
    point.all_here(2)
    point.round(0, 1)
    before = point.round(1, 1)["epoch"]
    point.meeting.sites.close_connection(1)
    assert point.vote(0, 1)["apply"] is False
    point.hello(1, weights=5)
    assert point.round(1, 1) == {"skip": "it came after round 1 was over"}
    point.round(0, 2)
    assert point.round(1, 2)["epoch"] != before


def test_sites_learn_that_another_one_was_refused():
    point = Point(3)
    point.hello(0)
    point.hello(1, settings={"run.seed": 1})
    why = "run.seed=1 must equal the value of site 0, 0; start all sites with the same recipe and the same base weights"
    assert point.hello(0) == {"missing": [1, 2], "refused_sites": {"1": why}}
    # A further job with the number of a site that is here has not replaced it.
    point.hello(0, connection=7)
    assert point.hello(2) == {"missing": [1], "refused_sites": {"1": why}}
    point.hello(1)
    assert point.hello(0) == {"ready": True}


@pytest.mark.parametrize("in_pairs", [False, True])
def test_memory_of_the_meeting_point_is_bounded(in_pairs, monkeypatch):
    """Sites that connect in every round, and a site that joins again and again, leave no keys behind."""
    monkeypatch.setattr(meeting, "MAX_KEPT_ROUNDS", 8)
    point = Point(4, **(PAIRS if in_pairs else {}))
    point.all_here(4)
    point.meeting.sites.close_connection(3)
    for index in range(1, 61):
        # The fourth site is away in two of three rounds, and takes the state of another.
        present = range(4) if index % 3 == 0 else range(3)
        for site in present:
            point.round(site, index, index - 1, digest=3)
        answers = [point.again(site, index) for site in present]
        for answer in answers:
            for name in (answer.get("epoch"), answer.get("give", {}).get("gift")):
                if name is not None:
                    point.ask({"do": "set", "key": f"{name}/0/address", "value": "x" * 100}, 1)
        for site, answer in zip(present, answers, strict=True):
            if "members" in answer:
                point.vote(site, index)
        if index % 3 == 0:
            point.meeting.sites.close_connection(3)
        if index % 3 == 1:
            point.hello(3, index - 2, index - 2)
            point.ask({"do": "join", "site": 3}, 3)
    assert any("takes the state" in line for line in point.log)
    keys = point.meeting._keys
    assert len(keys._values) <= 4
    assert len(point.meeting._rounds) <= 9
    assert len(keys._transfers) + len(keys._epochs) <= 4
    assert keys._num_bytes == sum(len(k) + len(v) for k, v in keys._values.items())
