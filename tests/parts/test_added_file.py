"""A built-in kind is one file: nothing else of the package or of its tools names it.

The kinds are files of tests/plugin in the folders of parts of a package whose other files are links to moefold's.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "moefold"
EXAMPLES = ROOT / "tests" / "plugin" / "src" / "moefold_plugin_example"
ADDED = {
    "attention": ("with_gate", "gated_attention.py"),
    "dispatcher": ("gather_all", "gathering.py"),
    "optimizer": ("heavy_ball", "momentum_sgd.py"),
}
"""Kind and file by group; installed packages have other names for the same files."""
SETTINGS = ["train.optimizer=heavy_ball", "model.attention=with_gate", "model.attention.num_heads=8"]


def _link(source: Path, target: Path, left_out: Collection[str] = ()) -> None:
    """Make a folder of links to the entries of another folder."""
    target.mkdir(parents=True)
    for entry in source.iterdir():
        if entry.name not in left_out:
            (target / entry.name).symlink_to(entry)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("added")
    _link(PACKAGE, folder / "moefold", {"parts"})
    _link(PACKAGE / "parts", folder / "moefold" / "parts", ADDED)
    for group, (kind, file) in ADDED.items():
        _link(PACKAGE / "parts" / group, folder / "moefold" / "parts" / group)
        shutil.copy(EXAMPLES / file, folder / "moefold" / "parts" / group / f"{kind}.py")
    return folder


def _run(package: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(package), str(ROOT)]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, cwd=package, check=False
    )


def test_pages_and_help_have_the_kinds_in_their_own_words(package):
    code = "from tools.recipe_page import recipe_page; from moefold.config.keys.help import keys_text; "
    page, text = _run(package, "-c", f"{code}print(recipe_page(), '=' * 80, keys_text(), sep='\\n')").stdout.split(
        "=" * 80
    )
    optimizer = "Stochastic gradient descent with momentum; weight decay on all parameters."
    assert f"* `heavy_ball`: {optimizer}\n" in page
    assert f"  heavy_ball: {optimizer}\n" in text
    assert "* `with_gate`: " in page
    assert "* `gather_all`: " in page
    assert "One of 'gqa', 'mla', 'with_gate'; default" in page


def test_a_refusal_and_a_plan_know_the_kinds(package):
    refused = _run(package, "-m", "moefold", "train", "parallel.dispatcher=gatherall")
    assert refused.returncode == 2
    assert "'deepep', 'gather_all', 'leastloaded'" in refused.stderr
    assert "did you mean 'gather_all'?" in refused.stderr
    words = ["plan", "tiny", *SETTINGS, "--gpu", "h100", "--num-gpus", "4", "--fix", "dispatcher=gather_all,tp=1,ep=4"]
    plan = _run(package, "-m", "moefold", *words)
    assert plan.returncode == 0, plan.stderr
    assert "gather_all" in plan.stdout


@pytest.mark.slow
def test_the_oracle_judges_the_kinds(package):
    words = ["model.preset=tiny", "train.seq_len=32", "parallel.world_size=2", "parallel.ep=2", *SETTINGS]
    found = _run(package, "-m", "moefold", "verify", *words, "parallel.dispatcher=gather_all")
    assert found.returncode == 0, found.stderr
    assert "equal: all" in found.stdout
