"""Messages of a run whose numbers go wrong."""

import json

import pytest

from tests.e2e.command import TWO, checkpoints, moefold, small, train

pytestmark = pytest.mark.e2e

DIVERGES = ("train.lr=1e15", "checkpoint.every=1", "run.steps=6")
"""The first update throws the weights so far that the second step overflows."""


@pytest.mark.parametrize("mapping", [(), TWO], ids=["one rank", "two ranks"])
def test_a_loss_that_is_not_finite_ends_the_run_with_one_message(tmp_path, mapping):
    done = moefold(*small(tmp_path / "run", *DIVERGES, *mapping))
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("moefold: error: step 2: the loss is ")
    for words in ("not finite: the loss on rank 0 (", "samples 2 to 3 of the run: row ", "step-000001', is intact"):
        assert words in lines[0]
    assert "set faults.nonfinite='skip' or 'rollback' to go on without such a batch" in lines[0]
    assert checkpoints(tmp_path / "run") == ["step-000001"]
    (fault,) = [json.loads(line) for line in (tmp_path / "run" / "faults.jsonl").read_text().splitlines()]
    assert fault["step"] == 2
    assert fault["samples"] == [2, 3]


def test_a_skipped_step_is_in_the_log(tmp_path):
    done = train(tmp_path / "run", *DIVERGES, "faults.nonfinite=skip", "run.steps=3")
    assert "step 2: the loss is " in done.stdout
    assert done.stdout.count("; skipped (faults.nonfinite); see moefold board ") == 2
