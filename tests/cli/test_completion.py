"""Test the completion scripts: bash completes words with its own, and each installed shell reads its script."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("shtab")

from moefold.cli.completion import SHELLS
from moefold.cli.main import COMMANDS, main
from tests.cli.example_command import ROOT

TRY = """
complete_words() {
  COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _moefold_complete 2>/dev/null
  printf '%s ' "${COMPREPLY[@]}"; echo
}
"""


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("moefold.cli.completion.print_escaped", printed.append)
        assert [main(["completion", shell]) for shell in SHELLS] == [0] * len(SHELLS)
    return dict(zip(SHELLS, printed, strict=True))


def test_bash_completes_commands_keys_values_and_names(scripts, tmp_path: Path):
    cases = {
        "moefold tr": ["train"],
        "moefold template sl": ["slurm"],
        "moefold checkpoint sh": ["show"],
        "moefold plan x --gp": ["--gpu"],
        "moefold plan deepseek-v3.": ["deepseek-v3.2"],
        "moefold init quick": ["quickstart"],
        "moefold train recipes/quickst": ["recipes/quickstart.toml"],
        "moefold train a.toml run.st": ["run.steps="],
        "moefold train a.toml run.steps=3 model.pres": ["model.preset="],
        # bash passes = as a word of its own.
        "moefold train a.toml run.device = ": ["auto", "cpu", "cuda"],
        "moefold train a.toml run.deterministic = t": ["true"],
        "moefold train a.toml model.preset = mixtral-8x7": ["mixtral-8x7b"],
    }
    words = [" ".join(f'"{word}"' for word in case.split(" ")) for case in cases]
    program = "\n".join([scripts["bash"], TRY, *(f"complete_words {case}" for case in words)])
    # /bin/bash reads programs of this size from a file only.
    (tmp_path / "script").write_text(program)
    done = subprocess.run(["bash", str(tmp_path / "script")], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [line.split() for line in done.stdout.splitlines()] == list(cases.values())


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_valid_and_has_every_command(scripts, tmp_path: Path, shell: str):
    assert [name for name in COMMANDS if name not in scripts[shell]] == []
    assert "run.steps=" in scripts[shell]
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here")
    (tmp_path / "script").write_text(scripts[shell])
    subprocess.run([shell, "-n", str(tmp_path / "script")], check=True, env={**os.environ, "HOME": str(tmp_path)})
