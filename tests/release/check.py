"""The checks before a release: python -m tests.release.check, or make release-check.

Builds the sdist and the wheel of the committed files, installs the wheel into an empty environment, and trains the
quickstart from it in an empty folder. Arguments are passed to pip where it installs torch.
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import moefold

ROOT = Path(__file__).parents[2]
STEPS = 3


class ReleaseError(Exception):
    """A check that failed. The message says what to do."""


def main(torch_arguments: Sequence[str]) -> int:
    """Run every check and return the exit status."""
    try:
        check_tree()
        check_version(moefold.__version__, (ROOT / "CHANGELOG.md").read_text(), (ROOT / "CITATION.cff").read_text())
        with tempfile.TemporaryDirectory(prefix="moefold-release-") as folder:
            wheel = build(Path(folder))
            report("wheel", wheel.name)
            check_wheel(wheel)
            check_installed(wheel, Path(folder), torch_arguments)
    except ReleaseError as error:
        print(f"release-check: {error}", file=sys.stderr)
        return 1
    print(f"release-check: {moefold.__version__} can be released")
    return 0


def report(topic: str, text: str) -> None:
    print(f"release-check: {topic}: {text}", flush=True)


def check_tree() -> None:
    """Refuse changes that are not committed: a release has the files of its commit."""
    changed = run(["git", "status", "--porcelain"], ROOT).strip()
    if changed:
        raise ReleaseError(f"the tree has changes, commit them first:\n{changed}")
    report("tree", "clean")


def check_version(version: str, changelog: str, citation: str) -> None:
    """Compare the version of the package with the newest heading of the changelog, and with the citation."""
    headings = re.findall(r"^## (.+)$", changelog, re.MULTILINE)
    newest = headings[0] if headings else "no heading"
    if not re.fullmatch(rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d", newest):
        raise ReleaseError(
            f"the newest heading of CHANGELOG.md is {newest!r} and must be '{version} - YYYY-MM-DD': rename "
            "'Unreleased', or change __version__ in src/moefold/__init__.py"
        )
    if f"\nversion: {version}\n" not in citation:
        raise ReleaseError(f"CITATION.cff must have the line 'version: {version}'")
    report("version", newest)


def build(folder: Path) -> Path:
    """Build the sdist, and the wheel from the sdist, of the committed files. Return the wheel."""
    source = folder / "source"
    source.mkdir()
    run(["sh", "-c", f"git archive HEAD | tar -x -C '{source}'"], ROOT)
    tools = new_environment(folder / "tools")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    run([str(tools / "pip"), "install", "-q", *extras["release"]], folder)
    # Without arguments, build makes the wheel from the sdist: a file that the sdist lacks is missed here.
    run([str(tools / "python"), "-m", "build", "--outdir", str(folder / "dist"), str(source)], folder)
    files = sorted(map(str, (folder / "dist").iterdir()))
    report("page", run([str(tools / "python"), "-m", "twine", "check", "--strict", *files], folder).splitlines()[-1])
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def check_wheel(wheel: Path) -> None:
    """Compare the files of a wheel with the files of the checkout that an installed moefold needs."""
    held = set(zipfile.ZipFile(wheel).namelist())
    missing = [name for name in expected_files() if name not in held]
    if missing:
        raise ReleaseError(f"{wheel.name} lacks {', '.join(missing)}; see [tool.hatch.build] in pyproject.toml")
    report("contents", f"{len(held)} files")


def expected_files() -> list[str]:
    """Return the files that a wheel must hold: the committed files of the package, and the recipes."""
    files = run(["git", "ls-files", "src/moefold", "recipes"], ROOT).splitlines()
    return [re.sub("^recipes/", "moefold/recipes/", name).removeprefix("src/") for name in files]


def check_installed(wheel: Path, folder: Path, torch_arguments: Sequence[str]) -> None:
    """Install a wheel into an empty environment, and train the quickstart from it in an empty folder."""
    programs = new_environment(folder / "installed")
    required = next(
        line
        for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        if line.startswith("torch>")
    )
    if torch_arguments:
        run([str(programs / "pip"), "install", "-q", *torch_arguments, required], folder)
    run([str(programs / "pip"), "install", "-q", str(wheel)], folder)
    home = folder / "empty"
    home.mkdir()
    moefold_command = str(programs / "moefold")
    report("--version", run([moefold_command, "--version"], home).strip())
    report("doctor", "\n" + run([moefold_command, "doctor"], home).rstrip())
    run([moefold_command, "init"], home)
    train = ["train", "quickstart.toml", f"run.steps={STEPS}", "train.warmup_steps=1", "train.eval_every=0"]
    report("train", run([moefold_command, *train], home).strip().splitlines()[-1])
    run([moefold_command, "inspect", "runs/quickstart"], home)


def new_environment(folder: Path) -> Path:
    """Create a virtual environment with pip and return the folder of its programs."""
    venv.create(folder, with_pip=True)
    return folder / "bin"


def run(command: Sequence[str], folder: Path) -> str:
    """Run a command in a folder, without the checkout on Python's path, and return its output."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"`{' '.join(command)}` failed:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
