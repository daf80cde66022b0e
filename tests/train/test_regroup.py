"""Ranks killed in each phase of a step: the others regroup in their processes and finish the run."""

import json
import signal
from typing import Any

import pytest

from moefold.checkpoint.stored_tensors import differing_tensors
from tests.e2e.command import losses
from tests.metrics.faults import read_faults
from tests.slow import slow
from tests.train.regroup_jobs import Done, Kill, recipe, train

pytestmark = pytest.mark.parity

TOLERANCE = 1e-9
EXPERTS = {"world_size": 4, "ep": 2, "zero": 3}
EIGHT = {"world_size": 8, "ep": 2}
MEMORY = {"every": 0, "peer_every": 1}
BOTH = {"every": 1, "peer_every": 1}


def largest_difference(first: Done, second: Done) -> float:
    found = differing_tensors(first.checkpoint, second.checkpoint)
    assert all(difference.max_abs is not None for difference in found), found
    return max((difference.max_abs for difference in found), default=0.0)


def assert_finished(done: Done, steps: int = 6) -> None:
    assert done.status == 0, done.output + done.errors
    # If a step was trained twice, the later one counts.
    last = {number: samples for number, samples, _ in done.steps()}
    assert last == {number: 8 * number for number in range(1, steps + 1)}
    assert [json.loads(line)["step"] for line in (done.folder / "metrics.jsonl").read_text().splitlines()] == list(
        range(1, steps + 1)
    )
    assert {left.split(" of ")[0] for left in done.models_left()} == {"0"}


def test_survivors_of_rank_0_finish_the_run(tmp_path):
    cfg = recipe(tmp_path / "run", checkpoint=MEMORY, **EXPERTS)
    done = train(cfg, [Kill(0, 4, "backward")])
    assert_finished(done)
    [fault] = read_faults(done.folder)
    assert (fault["lost"], fault["ranks"], fault["spares"], fault["generation"]) == ([0], [1, 3], [2], 1)
    assert (fault["step"], fault["from"]) == (3, "memory")
    assert "in step 4, backward of micro-batch 0; last collective " in fault["what"][0]
    assert fault["what"][0].endswith(", was killed by SIGKILL (as happens when memory runs out)")
    assert "lost rank 0 on" in done.output
    assert "training goes on after step 3, restored from the memory of the ranks" in done.output
    assert done.errors == ""
    reference = train(recipe(tmp_path / "one"))
    assert largest_difference(done, reference) < TOLERANCE
    assert losses(done.folder) == pytest.approx(losses(reference.folder), abs=TOLERANCE)


PHASES = ["forward", "all_to_all", "backward", "optimizer", "saving a checkpoint", "evaluation", "writing metrics"]
MAPPINGS: dict[str, dict[str, Any]] = {
    "zero 2": {"zero": 2, "ep": 2},
    "zero 3": {"zero": 3, "ep": 4},
    "tp": {"tp": 2, "ep": 2},
    "pp": {"pp": 2, "ep": 2},
    "seven": {"zero": 2},
    "cp, etp": {"cp": 2, "ep": 2, "etp": 2, "zero": 3},
}
CASES = [
    *(("zero 2", Kill(rank, 4, phase), BOTH) for rank, phase in enumerate(PHASES)),
    *(("zero 3", Kill(7, 4, phase), {}) for phase in PHASES[:3]),
    *((mapping, Kill(3, 5, "backward"), BOTH) for mapping in ("tp", "pp", "cp, etp")),
    ("seven", Kill(5, 5, "copying the state to a peer"), BOTH),
]


@pytest.mark.parametrize(("mapping", "kill", "checkpoint"), slow(CASES))
def test_phase_of_the_loss_does_not_matter(mapping, kill, checkpoint, tmp_path):
    parallel = {"world_size": 8} | MAPPINGS[mapping]
    settings = {"eval_every": 2, "eval_samples": 8}
    done = train(recipe(tmp_path / "run", train=settings, checkpoint=checkpoint, **parallel), [kill])
    assert_finished(done)
    [fault] = read_faults(done.folder)
    assert fault["lost"] == [kill.rank]
    assert fault["from"] == ("memory" if checkpoint else "checkpoint")
    if mapping == "seven":
        assert len(fault["ranks"]) == 7
    undisturbed = train(recipe(tmp_path / "all", train=settings, **parallel))
    assert largest_difference(done, undisturbed) < TOLERANCE
    # A restart from the same step, with as many ranks.
    saved = done.folder / "checkpoints" / f"step-{fault['step']:06d}"
    fewer = parallel | {"world_size": len(fault["ranks"]), "elastic": True}
    restart = recipe(
        tmp_path / "restart", train=settings, faults={"on_loss": "stop"}, checkpoint={"resume": str(saved)}, **fewer
    )
    assert differing_tensors(done.checkpoint, train(restart).checkpoint) == []


@pytest.mark.slow
def test_losses_one_after_the_other_and_a_spare_takes_over(tmp_path):
    kills = [Kill(0, 3, "forward"), Kill(7, 5, "backward"), Kill(2, 4, "optimizer")]
    done = train(recipe(tmp_path / "run", zero=3, checkpoint=MEMORY, **EIGHT), kills)
    assert_finished(done)
    # Only rank 7 has its shards, as its peer was rank 0; the spare takes part after the loss of rank 2.
    faults = read_faults(done.folder)
    assert [fault["lost"] for fault in faults] == [[0], [2], [7]]
    assert [fault["spares"] for fault in faults] == [[6], [], [5]]
    assert {fault["from"] for fault in faults} == {"memory"}
    assert [fault["generation"] for fault in read_faults(done.folder)] == [1, 2, 3]
    assert largest_difference(done, train(recipe(tmp_path / "one"))) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "source"), [((1, 2), "checkpoint"), ((0, 7), "checkpoint"), ((2, 5), "memory")])
def test_two_ranks_lost_at_once(ranks, source, tmp_path):
    cfg = recipe(tmp_path / "run", checkpoint={"every": 2, "peer_every": 1}, world_size=8, zero=3)
    done = train(cfg, [Kill(rank, 4, "forward") for rank in ranks])
    assert_finished(done)
    faults = read_faults(done.folder)
    assert sorted(rank for fault in faults for rank in fault["lost"]) == list(ranks)
    if len(faults) == 1:
        assert faults[0]["from"] == source
        # The peer of a rank is the next one, along dp.
        assert ("lacks shards of the lost ranks" in done.output) == (source == "checkpoint")
    assert largest_difference(done, train(recipe(tmp_path / "one"))) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    "event",
    [
        "restoring the state from the memory",
        "comparing the restored state",
        "copying the state to a peer",
        "connecting to the other ranks",
        "creating the process groups",
        "building the model",
        "opening the data",
        "locking the folders",
        "loading the checkpoint",
    ],
)
def test_rank_lost_while_the_others_regroup(event, tmp_path):
    rank = 1 if event == "locking the folders" else 2
    memory = any(word in event for word in ("state", "building"))
    cfg = recipe(tmp_path / "run", checkpoint={"every": 2, "peer_every": int(memory)}, **EIGHT)
    # The flight recorder still has the step of the loss.
    done = train(cfg, [Kill(0, 4, "backward"), Kill(rank, 4, event)])
    assert_finished(done)
    assert read_faults(done.folder)[-1]["generation"] == 2
    assert largest_difference(done, train(recipe(tmp_path / "one"))) < TOLERANCE


@pytest.mark.slow
def test_a_checkpoint_that_is_newer_than_the_snapshots_is_loaded(tmp_path):
    # With dp=1 no snapshot is taken; the spare still has the snapshot of step 1.
    cfg = recipe(tmp_path / "run", checkpoint={"every": 1, "peer_every": 1}, world_size=4, tp=2, zero=0)
    done = train(cfg, [Kill(1, 2, "forward"), Kill(0, 5, "forward")])
    assert_finished(done)
    assert [(fault["step"], fault["from"]) for fault in read_faults(done.folder)] == [(1, "memory"), (4, "checkpoint")]
    assert "lacks shards" not in done.output
    assert largest_difference(done, train(recipe(tmp_path / "one"))) < TOLERANCE


@pytest.mark.slow
def test_saves_in_the_background_go_on(tmp_path):
    cfg = recipe(tmp_path / "run", checkpoint={"async_save": True, "every": 1}, **EIGHT)
    done = train(cfg, [Kill(3, 4, "forward"), Kill(0, 5, "saving a checkpoint")])
    assert_finished(done)
    assert largest_difference(done, train(recipe(tmp_path / "one"))) < TOLERANCE


@pytest.mark.slow
def test_stopped_rank_is_killed_after_the_timeout(tmp_path):
    cfg = recipe(tmp_path / "run", faults={"timeout_s": 6.0}, **EIGHT)
    done = train(cfg, [Kill(6, 4, "forward", signal.SIGSTOP)])
    assert_finished(done)
    assert [fault["lost"] for fault in read_faults(done.folder)] == [[6]]


@pytest.mark.slow
def test_sigterm_after_a_regroup_saves_and_stops(tmp_path):
    kills = [Kill(0, 3, "forward"), Kill(1, 4, "optimizer", signal.SIGTERM)]
    done = train(recipe(tmp_path / "run", **EIGHT), kills)
    assert done.status == 128 + signal.SIGTERM, done.output + done.errors
    # The ranks learn of it in the next step.
    assert done.checkpoint.name == "step-000005"


@pytest.mark.slow
def test_too_few_survivors_end_the_job_with_a_message(tmp_path):
    kills = [Kill(rank, 4, "forward") for rank in range(1, 6)]
    done = train(recipe(tmp_path / "run", faults={"min_ranks": 4}, **EIGHT), kills)
    assert done.status == 1
    assert "moefold: error: lost rank " in done.errors
    assert "ranks are left, and the recipe fits no number of ranks from faults.min_ranks=4 to" in done.errors
    assert done.errors.count("moefold: ") == 1
