"""Test that job files run: SLURM's on a stand-in and Ray's on a local cluster, with a killed rank and a resume."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moefold.cli.main import main
from moefold.host.folder_lock import LOCK_FILE
from tests.e2e.command import ROOT, environment

SRUN = f"""#!{sys.executable}
# Start the tasks of two nodes as srun does, on this machine. Without the file `killed`, kill rank 3 after a checkpoint.
import os, pathlib, signal, subprocess, sys, time

words = sys.argv[1:]
while words[0].startswith("--"):
    words.pop(0)
tasks = [
    subprocess.Popen(words, env={{
        **os.environ, "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2),
        "SLURM_NTASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "node[1-2]",
    }})
    for rank in range(4)
]
killed = pathlib.Path(os.environ["KILLED"])
while not killed.exists() and all(task.poll() is None for task in tasks):
    if (pathlib.Path(os.environ["RUN_DIR"]) / "checkpoints/step-000010").is_dir():
        killed.touch()
        tasks[3].send_signal(signal.SIGKILL)
    time.sleep(0.02)
statuses = [task.wait() for task in tasks]
sys.exit(max(status if status >= 0 else 128 - status for status in statuses))
"""
SCONTROL = """#!/bin/bash
[[ "$*" == "show hostnames node[1-2]" ]] && printf 'localhost\\nnode2\\n'
"""
MOEFOLD = f'#!/bin/bash\nexec {sys.executable} -m moefold "$@"\n'
RECIPE = """
[run]
dir = "/shared/run"
steps = 60
dtype = "float32"
[model]
preset = "tiny"
[parallel]
world_size = 4
tp = 2
ep = 2
[train]
seq_len = 32
micro_batch_size = 1
global_batch_size = 4
lr = 3e-3
lr_schedule = "constant"
[data]
kind = "synthetic"
[checkpoint]
every = 10
keep = 3
[faults]
timeout_s = 60
"""


@pytest.mark.e2e
@pytest.mark.slow
def test_a_killed_rank_is_started_again_and_resumes(tmp_path: Path, capsys):
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("moefold", MOEFOLD)):
        (binaries / name).write_text(text)
        (binaries / name).chmod(0o755)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    assert main(["template", "slurm", str(recipe), "--nodes", "2", "--gpus-per-node", "2", "--time", "1:00:00"]) == 0
    # The template refuses folders in /tmp, where the folders of tests are.
    run_dir = tmp_path / "run"
    recipe.write_text(RECIPE.replace("/shared/run", str(run_dir)))
    variables = environment() | {
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_CPUS_ON_NODE": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "KILLED": str(tmp_path / "killed"),
        "RUN_DIR": str(run_dir),
    }
    script = capsys.readouterr().out
    done = subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True, timeout=280)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "attempt 0 of 3: status 137" in output
    assert "attempt 1 of 3" not in output
    assert "resum" in output
    assert (run_dir / "checkpoints/step-000060").is_dir()


@pytest.mark.e2e
@pytest.mark.slow
def test_ray_train_starts_the_workers_again_after_one_is_killed(tmp_path: Path, capsys):
    pytest.importorskip("ray.train", reason="needs Ray Train: pip install -e '.[ray]'")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.replace("world_size = 4", "world_size = 2"))
    assert main(["template", "ray", str(recipe), "--nodes", "1", "--gpus-per-node", "2"]) == 0
    program = capsys.readouterr().out
    # A Ray cluster of this machine, without GPUs; the template refuses folders in /tmp, where the folders of tests are.
    run_dir = tmp_path / "run"
    recipe.write_text(recipe.read_text().replace("/shared/run", str(run_dir)))
    program = program.replace("USE_GPU = True", "USE_GPU = False").replace('"/shared/ray"', f'"{tmp_path}/ray"')
    (tmp_path / "job.py").write_text(program)
    variables = environment() | {"PYTHONPATH": str(ROOT / "src"), "RAY_TRAIN_V2_ENABLED": "1"}
    with (tmp_path / "output").open("w+") as output:
        job = subprocess.Popen([sys.executable, "job.py"], cwd=tmp_path, env=variables, stdout=output, stderr=output)
        try:
            deadline = time.monotonic() + 200
            while not (run_dir / "checkpoints/step-000010").is_dir() and time.monotonic() < deadline:
                time.sleep(0.02)
            # The lock of the run folder has the process of rank 0.
            os.kill(json.loads((run_dir / LOCK_FILE).read_text())["process"], signal.SIGKILL)
            status = job.wait(timeout=250)
        finally:
            job.kill()
        output.seek(0)
        text = output.read()
    assert status == 0, text
    assert "resumed from" in text
    assert "done: {" in text
    assert "'step': 60" in text
    assert (run_dir / "checkpoints/step-000060").is_dir()
    (pointer,) = (tmp_path / "ray").rglob("checkpoint.json")
    assert json.loads(pointer.read_text())["path"].endswith("step-000060")


@pytest.mark.e2e
@pytest.mark.slow
def test_a_program_of_torchrun_trains_in_its_processes_twice(tmp_path: Path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.replace("world_size = 4", "world_size = 2").replace("/shared/run", str(tmp_path / "run")))
    program = tmp_path / "program.py"
    program.write_text(f"""
import moefold
import torch.distributed as dist

for steps in (20, 40):
    outcome = moefold.train_in_process({str(recipe)!r}, [f"run.steps={{steps}}"])
    assert not dist.is_initialized()
    print("trained", outcome.status, outcome.metrics["step"], outcome.checkpoint.name)
""")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    variables = environment() | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("trained 0 20 step-000020", "trained 0 40 step-000040"):
        assert done.stdout.count(line) == 2, done.stdout
