"""moefold takes every command that the help texts show; tests/docs checks the documentation's commands."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from moefold.cli.main import COMMANDS, main
from tests.cli.example_command import ROOT, assert_command, code_blocks, commands_of

RUNS_AT_ONCE = ("layout", "init")
"""Commands whose examples are run, not only parsed."""


def help_of(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([name, "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_of_the_help_can_be_typed(name, capsys):
    for line in commands_of(help_of(name, capsys)):
        # A list of commands has a description after each.
        assert_command(re.split(" {2,}", line)[0])


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_as_wide_as_the_terminal(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for line in help_of(name, capsys).splitlines():
        # A word without a space cannot be broken.
        assert len(line) <= 80 or " " not in line.strip(), line


@pytest.mark.parametrize("name", RUNS_AT_ONCE)
def test_the_examples_of_the_help_run(name, capsys, tmp_path, monkeypatch):
    lines = commands_of(help_of(name, capsys))
    assert lines
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    for line in lines:
        words = [word.strip("'") for word in line.split()[1:]]
        assert main(words) == 0, line


def test_the_readme_is_short_and_its_files_exist():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 130
    for block in code_blocks(text, "python"):
        ast.parse(block)
    for block in code_blocks(text, "sh"):
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (ROOT / link).exists(), link
    session = text.partition("## Then")[0]
    assert commands_of("\n".join(code_blocks(session, "sh")))[0] == "moefold train recipes/quickstart.toml"


def test_the_job_script_is_a_shell_script():
    text = Path(ROOT / "recipes/slurm.sbatch").read_text()
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    for line in text.splitlines():
        if line.startswith("srun "):
            assert_command(line.removeprefix("srun "))
