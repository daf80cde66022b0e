"""Which steps may change the weights."""

import json
import math
import random

import pytest

from moefold.config.sections.faults import FaultsConfig
from moefold.train.step_guard import Mismatch, StepGuard

CALM = {"loss": 2.0, "gradient norm": 1.0, "z loss": 0.1}


def guard(**faults: object) -> StepGuard:
    return StepGuard(FaultsConfig(**{"spike_window": 5, **faults}))


@pytest.mark.parametrize("name", list(CALM))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("wish", ["stop", "skip", "rollback"])
def test_numbers_that_are_not_finite_change_nothing(name, value, wish):
    verdict = guard(nonfinite=wish, spike="ignore").decide({**CALM, name: value})
    assert (verdict.action, verdict.reason, verdict.updates) == (wish, "nonfinite", False)
    assert f"the {name} is {value}" in verdict.description


@pytest.mark.parametrize("name", ["loss", "gradient norm"])
@pytest.mark.parametrize(("wish", "updates"), [("log", True), ("skip", False), ("rollback", False), ("stop", False)])
def test_a_spike_is_found_once_the_window_is_full(name, wish, updates):
    judge = guard(spike=wish, spike_factor=10.0)
    for _ in range(4):
        assert judge.decide(CALM).action == "update"
    assert judge.decide({**CALM, name: 100.0}).action == "update", "four steps are not a window of five"
    verdict = judge.decide({**CALM, name: 100.0})
    assert (verdict.action, verdict.reason, verdict.updates) == (wish, "spike", updates)
    assert f"the {name} is 100" in verdict.description


def test_a_spike_lies_so_many_deviations_above_the_median():
    # By hand: median 3, distances 2 1 0 1 2, their median 1; 3 + 4 * 1.4826 = 8.9304.
    for value, action in ((8.93, "update"), (8.931, "log")):
        judge = guard(spike_factor=4.0)
        for loss in (1.0, 5.0, 2.0, 4.0, 3.0):
            judge.decide({**CALM, "loss": loss})
        assert judge.decide({**CALM, "loss": value}).action == action


def test_equal_losses_have_a_spread_of_a_hundredth_of_the_median():
    for value, action in ((2.2, "update"), (2.21, "log")):
        judge = guard(spike_factor=10.0)
        for _ in range(5):
            judge.decide(CALM)
        assert judge.decide({**CALM, "loss": value}).action == action


def test_a_fall_and_ordinary_noise_are_not_spikes():
    judge, draw = guard(spike_window=50), random.Random(0)
    falling = [5.0 * math.exp(-step / 100) + draw.gauss(0, 0.02) + 1.0 for step in range(500)]
    assert {
        judge.decide({**CALM, "loss": loss, "gradient norm": draw.lognormvariate(0, 0.3)}).action for loss in falling
    } == {"update"}


def test_a_skipped_spike_is_not_part_of_the_window_and_a_logged_one_is():
    def window(wish: str) -> list[float]:
        judge = guard(spike=wish)
        for loss in (2.0, 2.0, 2.0, 2.0, 2.0, 50.0):
            judge.decide({**CALM, "loss": loss})
        return judge.state_dict()["last"]["loss"]

    assert window("skip") == [2.0] * 5
    assert window("log") == [2.0] * 4 + [50.0]


def test_nothing_that_is_not_finite_enters_the_window():
    judge = guard(nonfinite="skip")
    judge.decide({**CALM, "loss": math.nan})
    judge.decide({**CALM, "z loss": math.inf})
    assert judge.state_dict()["last"] == {"loss": [], "gradient norm": []}


def test_skips_in_a_row_are_bounded_and_a_good_step_ends_the_row():
    judge, bad = guard(nonfinite="skip", max_skips=2), {**CALM, "loss": math.nan}
    actions = [judge.decide(numbers).action for numbers in (bad, bad, CALM, bad, bad, bad)]
    assert actions == ["skip", "skip", "update", "skip", "skip", "stop"]
    assert judge.num_skipped == 4


def test_rollbacks_are_bounded_over_the_whole_run():
    judge, bad = guard(nonfinite="rollback", max_rollbacks=2), {**CALM, "loss": math.nan}
    before = judge.state_dict()
    actions = []
    for numbers in (bad, CALM, bad, CALM, bad):
        verdict = judge.decide(numbers)
        actions.append(verdict.action)
        if verdict.action == "rollback":
            judge.load_state_dict(before)  # the checkpoint knows nothing of them
    assert actions == ["rollback", "update", "rollback", "update", "stop"]
    assert "faults.max_rollbacks" in verdict.description


def test_a_restored_guard_decides_the_same():
    draw = random.Random(1)
    first = guard(spike="skip", spike_factor=3.0)
    for _ in range(20):
        first.decide({**CALM, "loss": draw.gauss(2, 0.1)})
    second = guard(spike="skip", spike_factor=3.0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rest = [draw.gauss(2, 0.4) for _ in range(50)]
    verdicts = [[judge.decide({**CALM, "loss": loss}) for loss in rest] for judge in (first, second)]
    assert verdicts[0] == verdicts[1]
    assert {verdict.action for verdict in verdicts[0]} == {"update", "skip"}
    assert first.state_dict() == second.state_dict()


def test_a_checkpoint_without_a_history_remembers_nothing():
    judge = guard()
    judge.decide(CALM)
    judge.load_state_dict({})
    assert judge.state_dict() == guard().state_dict()
    for broken in ({"last": {}}, {**guard().state_dict(), "num_skipped": None}):
        with pytest.raises((KeyError, TypeError)):
            judge.load_state_dict(broken)


@pytest.mark.parametrize(("mean", "action"), [(0.0, "update"), (0.02, "update"), (0.0201, "stop"), (math.nan, "stop")])
def test_a_mismatch_beyond_its_limit_stops_before_the_update(mean, action):
    verdict = guard(nonfinite="skip", spike="log").decide(CALM, Mismatch(mean, 0.02))
    assert (verdict.action, verdict.updates) == (action, action == "update")
    assert ("rl.mismatch_limit allows 0.02" in verdict.description) == (action == "stop")
