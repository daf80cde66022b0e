"""The SLURM job file runs on two nodes of a stand-in for SLURM, survives a killed rank, and resumes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moefold.cli.main import main
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
    # The template refuses folders in /tmp, where those of tests are.
    run_dir = tmp_path / "run"
    recipe.write_text(RECIPE.replace("/shared/run", str(run_dir)))
    variables = environment() | {
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "SLURM_JOB_ID": str(os.getpid()),
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
