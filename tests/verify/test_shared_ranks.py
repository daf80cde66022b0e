"""Tests that share ranks get their own results, and a failure is of the test that asked for it."""

import os

import pytest

from moefold.launch.rank_pool import WorkerError
from tests.verify.shared_ranks import MOST_CALLS, Call, SharedRanks, run_each

pytestmark = pytest.mark.parity


def _process_and(word: str) -> tuple[int, str]:
    if word == "bad":
        raise ValueError("this word is bad")
    return os.getpid(), word


def _calls(*words: str) -> dict[str, Call]:
    return {f"test of {word}": Call(1, _process_and, (word,)) for word in words}


def test_tests_share_ranks_and_get_their_own_results(fresh_pool):
    words = [f"word {i}" for i in range(MOST_CALLS + 1)]
    shared = SharedRanks(fresh_pool, _calls(*words))
    found = [shared.results(f"test of {word}")[0] for word in words]
    assert [word for _, word in found] == words
    processes = [process for process, _ in found]
    assert len(set(processes[:MOST_CALLS])) == 1
    assert processes[MOST_CALLS] != processes[0]


def test_ranks_that_fail_fail_the_test_that_asked_and_no_other(fresh_pool):
    shared = SharedRanks(fresh_pool, _calls("good", "bad", "fine"))
    assert shared.results("test of good")[0][1] == "good"
    with pytest.raises(WorkerError, match="this word is bad"):
        shared.results("test of bad")
    assert shared.results("test of fine")[0][1] == "fine"


_SEEN: list[str] = []


def _refuse_a_second_word(word: str) -> str:
    _SEEN.append(word)
    assert len(_SEEN) == 1, f"{_SEEN} on one rank"
    return word


def test_calls_that_fail_only_one_after_another_fail_the_last_test(fresh_pool):
    calls = {word: Call(1, _refuse_a_second_word, (word,)) for word in ("first", "second")}
    shared = SharedRanks(fresh_pool, calls)
    assert shared.results("first") == ["first"]
    with pytest.raises(AssertionError, match="one fails after others") as caught:
        shared.results("second")
    assert "['first', 'second'] on one rank" in str(caught.value.__cause__)


def test_each_of_some_arguments_has_the_results_of_all_ranks(fresh_pool):
    one, two = run_each(fresh_pool, 2, _process_and, ("one",), ("two",))
    assert [[word for _, word in found] for found in (one, two)] == [["one"] * 2, ["two"] * 2]
    assert [process for process, _ in one] == [process for process, _ in two]
