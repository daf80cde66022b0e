"""`moefold train` from the command line: the same losses under every mapping, resume, signals, and the files it leaves."""

import json
import signal

import pytest

from tests.e2e.command import FOLDED, losses, metrics, moefold, start_and_signal, train

pytestmark = pytest.mark.e2e


def test_one_rank_and_eight_folded_ranks_write_the_same_losses(tmp_path):
    train(tmp_path / "one", "run.steps=20")
    train(tmp_path / "eight", "run.steps=20", *FOLDED)
    one, eight = losses(tmp_path / "one"), losses(tmp_path / "eight")
    assert len(one) == len(eight) == 20
    assert eight == pytest.approx(one, rel=1e-4)
    assert one[-1] < one[0] - 0.3


def test_run_folder_holds_what_the_design_promises(tmp_path):
    run_dir = tmp_path / "run"
    train(run_dir, "run.steps=3", "train.eval_every=2", "checkpoint.every=2", "metrics.tensorboard=true")
    records = metrics(run_dir)
    keys = "step loss aux_loss z_loss grad_norm lr tokens step_time_s tokens_per_s tflops_per_rank mfu memory_gib"
    for i, record in enumerate(records):
        assert set(keys.split()) | {"expert_load", "dropped_fraction", "eval_loss"} <= set(record)
        assert record["step"] == i + 1
        assert record["tokens"] == (i + 1) * 8 * 64
    assert [record["eval_loss"] is None for record in records] == [True, False, False]
    assert json.loads((run_dir / "config.json").read_text())["run"]["steps"] == 3
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["step-000002", "step-000003"]
    assert (run_dir / "loss.png").stat().st_size > 1000
    assert list((run_dir / "tensorboard").glob("events*"))


def test_two_deterministic_runs_are_bit_equal(tmp_path):
    for name in ("first", "second"):
        train(tmp_path / name, "run.steps=5", "run.deterministic=true", *FOLDED)
    timeless = [
        [
            {k: v for k, v in r.items() if k in ("loss", "aux_loss", "grad_norm", "expert_load")}
            for r in metrics(tmp_path / n)
        ]
        for n in ("first", "second")
    ]
    assert timeless[0] == timeless[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_saves_and_the_same_command_resumes(tmp_path, number):
    words = ("run.steps=60", "checkpoint.every=1000", "parallel.world_size=2", "parallel.ep=2", "parallel.tp=2")
    status, output = start_and_signal(tmp_path / "run", 5, number, *words)
    assert status == 128 + number, output
    assert "Traceback" not in output
    reached = len(losses(tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoints" / f"step-{reached:06d}").is_dir()
    resumed = train(tmp_path / "run", *words)
    assert f"at step {reached}" in resumed.stdout
    train(tmp_path / "whole", *words)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)


def test_kill_and_resume_under_another_mapping_equals_the_uninterrupted_run(tmp_path):
    words = ("run.steps=24", "checkpoint.every=5", "checkpoint.keep=2")
    status, _ = start_and_signal(tmp_path / "run", 12, signal.SIGKILL, *words, *FOLDED)
    assert status == -signal.SIGKILL
    other = ("parallel.world_size=4", "parallel.cp=2", "parallel.ep=2", "parallel.etp=2", "parallel.zero=3")
    train(tmp_path / "run", *words, *other)
    train(tmp_path / "whole", "run.steps=24")
    records = metrics(tmp_path / "run")
    assert [record["step"] for record in records] == list(range(1, 25))
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 2


def test_finished_run_says_so(tmp_path):
    words = ("run.steps=2", "checkpoint.every=1")
    train(tmp_path / "run", *words)
    assert "nothing to do" in train(tmp_path / "run", *words).stdout


def test_torchrun_joins_its_ranks(tmp_path):
    import subprocess
    import sys

    from tests.e2e.command import ROOT, SMALL

    (tmp_path / "empty.toml").touch()
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "-m", "moefold"]
    words += ["train", str(tmp_path / "empty.toml"), *SMALL, f"run.dir={tmp_path / 'run'}", "run.steps=2"]
    done = subprocess.run(
        [*words, "parallel.world_size=2"], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path / "run")) == 2
    wrong = subprocess.run(
        [*words, "parallel.world_size=4"], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
    )
    assert "parallel.world_size=4 must equal the 2 processes that the launcher started" in wrong.stderr


def test_checkpoint_of_another_model_is_refused(tmp_path):
    train(tmp_path / "run", "run.steps=1", "checkpoint.every=1")
    words = ("run.steps=2", "checkpoint.every=1", "model.num_layers=3", f"run.dir={tmp_path / 'run'}")
    from tests.e2e.command import SMALL

    refused = moefold("train", str(tmp_path / "empty.toml"), *SMALL, *words)
    assert refused.returncode == 2
    assert "is of another model: num_layers" in refused.stderr
