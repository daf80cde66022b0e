"""Traces, counts, replay and `moefold inspect` through the command line."""

import json
import shutil

import numpy as np
import pytest

from moefold.data.routing_trace import RoutingTrace
from moefold.metrics.expert_counts import read_expert_counts
from tests.e2e.command import SMALL, losses, moefold, train

pytestmark = pytest.mark.e2e

TRACED = ("run.dtype=float64", "moe.trace_every=1")
FOUR = ("parallel.world_size=4", "parallel.tp=2", "parallel.pp=2", "parallel.ep=2")


def _routing(run_dir) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run_dir / "routing").iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Four steps of one process, never stopped."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    train(run_dir, *TRACED, "run.steps=4")
    return run_dir


def test_a_run_resumed_under_another_mapping_leaves_the_same_trace_and_counts(tmp_path, whole):
    run_dir = tmp_path / "run"
    words = (*TRACED, "run.steps=4", "checkpoint.every=2")
    train(run_dir, *words, *FOUR)
    # As if it had been killed in step 4, with an incomplete record and a draft after it.
    shutil.rmtree(run_dir / "checkpoints" / "step-000004")
    (run_dir / "routing" / "step-000004.npy").rename(run_dir / "routing" / ".step-000004.npy.tmp")
    with (run_dir / "expert_counts.bin").open("ab") as file:
        file.write(b"torn")
    resumed = train(run_dir, *words, "parallel.world_size=2", "parallel.cp=2", "parallel.etp=2")
    assert "at step 2" in resumed.stdout
    assert _routing(run_dir) == _routing(whole)
    assert (run_dir / "expert_counts.bin").read_bytes() == (whole / "expert_counts.bin").read_bytes()


def test_the_counts_equal_the_trace(whole):
    counts, trace = read_expert_counts(whole), RoutingTrace(whole, "")
    assert counts is not None
    assert counts.steps.tolist() == trace.steps == [1, 2, 3, 4]
    for i, step in enumerate(trace.steps):
        for j, choices in enumerate(trace.step(step)):
            np.testing.assert_array_equal(counts.counts[i, j], np.bincount(choices.ravel(), minlength=8))


def test_a_new_start_has_nothing_of_an_old_one_which_stays(tmp_path):
    run_dir = tmp_path / "run"
    train(run_dir, *TRACED, "run.steps=3")
    before = _routing(run_dir)
    # Choices of zero-computation experts are in no count.
    train(
        run_dir,
        "run.steps=2",
        "metrics.expert_counts_every=2",
        "model.ffn.moe.zero_experts=3",
        "model.ffn.moe.router.softmax=pre",
    )
    assert not (tmp_path / "run-2" / "routing").exists()
    for path, steps in ((run_dir, [1, 2, 3]), (tmp_path / "run-2", [2])):
        counts = read_expert_counts(path)
        assert counts is not None
        assert counts.steps.tolist() == steps
        assert counts.counts.shape[2] == 8
    assert _routing(run_dir) == before


@pytest.mark.slow
def test_replay_of_other_weights_under_another_mapping(tmp_path, whole):
    words = (*TRACED, "run.steps=3", "train.lr=3e-2", f"moe.replay={whole}")
    train(tmp_path / "one", *words)
    train(tmp_path / "four", *words, *FOUR)
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "one"), rel=1e-9)
    assert losses(tmp_path / "one")[1:] != pytest.approx(losses(whole)[1:3], rel=1e-6)
    for step in ("000001", "000002", "000003"):
        name = f"step-{step}.npy"
        assert _routing(tmp_path / "four")[name] == _routing(whole)[name]


def test_a_trace_that_cannot_be_replayed_is_one_message(tmp_path, whole):
    (tmp_path / "empty.toml").touch()
    words = ("run.steps=9", f"moe.replay={whole}", f"run.dir={tmp_path / 'run'}")
    done = moefold("train", str(tmp_path / "empty.toml"), *SMALL, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert "must hold every step from 1 to run.steps=9, and step 5 is missing" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_auto_reports_the_chosen_dispatcher(tmp_path):
    words = ("run.steps=1", "parallel.world_size=2", "parallel.ep=2", "parallel.dispatcher=auto")
    done = train(tmp_path / "run", *words)
    assert "parallel.dispatcher='auto' took alltoall: deep_ep supports only bfloat16" in done.stdout


def test_inspect(tmp_path, whole):
    done = moefold("inspect", str(whole), "--json", "--picture", str(tmp_path / "balance.png"))
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["last_step"], record["num_experts"], len(record["layers"])) == (4, 8, 2)
    assert all(layer["router_entropy"] > 0 for layer in record["layers"])
    assert (tmp_path / "balance.png").stat().st_size > 5000
