"""The first session of the README, word for word, in a fresh copy of the repository."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.example_command import code_blocks
from tests.e2e.command import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

COPIED = ("recipes", "src", "Makefile", "README.md", "pyproject.toml")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Make the files of a clone, with this interpreter's environment as the .venv that `make setup` would build."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, tmp_path / name)
    venv = Path(sys.prefix)
    if not (venv / ".installed").exists():
        pytest.skip("this interpreter is not of the environment that `make setup` builds")
    (tmp_path / ".venv").symlink_to(venv)
    # Older than the installed package: make has nothing to do.
    os.utime(tmp_path / "pyproject.toml", (0, 0))
    return tmp_path


@pytest.mark.timeout(1200)
def test_the_first_session_runs_as_it_is_written(copy):
    session = (copy / "README.md").read_text().partition("## A first session")[2].partition("## Then")[0]
    shell = "set -euo pipefail\n" + "\n".join(code_blocks(session, "sh"))
    (python,) = code_blocks(session, "python")
    script = f"{shell}\npython - <<'PYTHON'\n{python}PYTHON\n"
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=copy, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "model in runs/quickstart/checkpoints/step-000150\n" in done.stdout
    assert "resumed from runs/quickstart/checkpoints/step-000150 at step 150" in done.stdout
    assert "model in runs/quickstart/checkpoints/step-000180\n" in done.stdout
    # The output of transformers begins with the prompt.
    assert "The for statement" in done.stdout.partition("180")[2][-400:]
    assert sorted(path.name for path in (copy / "runs").iterdir()) == ["quickstart"]
