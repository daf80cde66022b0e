"""`moefold train` from the command line: the same losses under every mapping, and the files that a run leaves."""

import json
import shutil
import sys

import numpy as np
import pytest

from moefold.metrics.definitions import step_values
from tests.e2e.agents import run_on_ranks
from tests.e2e.command import FOLDED, TWO, checkpoints, losses, metrics, moefold, run, small, train

pytestmark = pytest.mark.e2e

TIMES = ("step_time_s", "tokens_per_s", "tflops_per_rank", "memory_gib", "rank_times")


def test_one_rank_and_eight_folded_ranks_write_the_same_losses(one_rank, eight_ranks):
    one, eight = losses(one_rank), losses(eight_ranks)
    assert (len(one), len(eight)) == (20, 4)
    assert eight == pytest.approx(one[:4], rel=1e-4)
    assert one[-1] < one[0] - 0.1


def test_metrics_have_every_key_on_every_line(eight_ranks):
    records = metrics(eight_ranks)
    assert [record["step"] for record in records] == list(range(1, 5))
    for record in records:
        assert set(record) == set(step_values({}))
        assert record["tokens"] == record["step"] * 2 * 32
        assert len(record["expert_load"]) == 2
        assert record["memory_gib"] > 0.05
    assert [record["step"] for record in records if record["eval_loss"] is not None] == [3, 4]


def test_run_folder_holds_the_promised_files(eight_ranks):
    assert json.loads((eight_ranks / "config.json").read_text())["parallel"]["ep"] == 4
    assert checkpoints(eight_ranks) == ["step-000003", "step-000004"]
    assert (eight_ranks / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((eight_ranks / "tensorboard").glob("events*"))


@pytest.mark.parametrize(("setting", "draws"), [("true", True), ("false", False)])
def test_metrics_plot_says_whether_a_run_ends_with_its_curves(tmp_path, setting, draws):
    """The line of the log: a forked run of the tests has no plot in either case (`tests/no_plots.py`)."""
    done = train(tmp_path / "run", "run.steps=1", f"metrics.plot={setting}")
    assert ("\ncurves: " in done.stdout) == draws


def test_two_deterministic_runs_are_bit_equal(tmp_path):
    runs = [tmp_path / "first", tmp_path / "second"]
    for run_dir in runs:
        train(run_dir, "run.deterministic=true", "run.steps=2", *TWO)
    first, second = (
        [{key: value for key, value in record.items() if key not in TIMES} for record in metrics(run_dir)]
        for run_dir in runs
    )
    assert first == second


def test_finished_run_is_reported(one_rank):
    done = train(one_rank, "checkpoint.every=20")
    assert "step-000020 has all 20 steps of run.steps; nothing to do\n" in done.stdout
    assert len(losses(one_rank)) == 20


def everything(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_another_run_in_the_same_folder_is_numbered_and_the_first_one_stays(one_rank, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(one_rank, run_dir)
    before = everything(run_dir)
    done = train(run_dir, "run.steps=2", *TWO, "checkpoint.every=1")
    assert done.stdout.startswith(
        f"run.dir={str(run_dir)!r} holds another run, which stays as it is (it has 20 steps, with other settings: "
    )
    assert f"this run is in {str(tmp_path / 'run-2')!r}\n" in done.stdout
    assert everything(run_dir) == before
    assert losses(tmp_path / "run-2") == pytest.approx(losses(one_rank)[:2], rel=1e-4)


def test_a_run_without_checkpoints_is_not_cut_off_by_the_next(tmp_path):
    run_dir = tmp_path / "run"
    first = train(run_dir, "run.steps=3")
    assert "done: 3 steps" in first.stdout
    assert "no model was saved, as checkpoint.every=0 and checkpoint.at_end=false say" in first.stdout
    before = everything(run_dir)
    second = train(run_dir, "run.steps=2")
    assert "it has no checkpoint to go on from" in second.stdout
    assert everything(run_dir) == before
    assert len(losses(tmp_path / "run-2")) == 2
    # A run saves at its end by default: the same command finds it.
    words = ("run.steps=2", "checkpoint.every=500")
    third = train(run_dir, *words)
    assert checkpoints(tmp_path / "run-3") == ["step-000002"]
    assert f"model in {tmp_path}/run-3/checkpoints/step-000002\n" in third.stdout
    assert "nothing to do" in train(run_dir, *words).stdout
    train(run_dir, "run.steps=3", "checkpoint.every=500")
    assert checkpoints(tmp_path / "run-3") == ["step-000002", "step-000003"]


def torchrun(*words: str) -> list[str]:
    """The command line of two ranks that torchrun starts."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "moefold",
        *words,
    ]


@pytest.mark.slow
def test_torchrun_joins_its_ranks(one_rank, tmp_path):
    done = run(torchrun(*small(tmp_path / "run", "run.steps=3", *TWO)))
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(one_rank)[:3], rel=1e-5)
    assert done.stdout.count("step 2/3") == 1


def test_ranks_of_a_launcher_take_one_plan(one_rank, tmp_path):
    done = run_on_ranks(small(tmp_path / "run", "run.steps=3", "parallel=auto"), 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("parallel = auto: ") == 1
    assert done.stdout.count("step 2/3") == 1
    chosen = json.loads((tmp_path / "run" / "config.json").read_text())["parallel"]
    assert chosen["world_size"] == 2
    assert chosen["mapping"] == "given"
    assert losses(tmp_path / "run") == pytest.approx(losses(one_rank)[:3], rel=1e-5)


def test_a_launcher_of_another_number_of_ranks_is_one_message(tmp_path):
    hurry = "from moefold.cli import command_parser; command_parser.RANK0_REPORT_WAIT_S = 0.1"
    refused = run_on_ranks(small(tmp_path / "run", *FOLDED), 2, before=hurry)
    assert refused.returncode != 0
    assert refused.stderr.count("moefold: error: ") == 1
    assert "parallel.world_size=8 must equal the 2 processes that the launcher started" in refused.stderr


def test_user_error_on_only_one_rank_is_one_message(tmp_path):
    # An id beyond the vocabulary at the last token that the second rank reads in the first step. The file (of zeros,
    # which take no place on the disk) is twice as long as the probe before a run, in runs of 2**14 tokens.
    with (tmp_path / "tokens.bin").open("wb") as file:
        file.truncate(2 * 2**25)
        file.seek(2 * 2**14)
        file.write(np.uint16(60000).tobytes())
    data = ("data.kind=tokens", f"data.path={tmp_path}/tokens.bin", "data.validation_fraction=0", "data.shuffle=false")
    refused = moefold(*small(tmp_path / "run", *data, "train.seq_len=8192", "parallel.world_size=2"))
    assert refused.stderr.startswith("moefold: error: ")
    assert f"holds id 60000 at token {2**14}" in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert refused.returncode == 2
