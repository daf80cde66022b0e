"""Test the package, its files for other tools, and its image, as far as possible without a daemon."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import moefold
from tests.release import check

ROOT = check.ROOT
MAX_README_LINES = 120
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def page_of_the_package() -> str:
    """README.md as the index of packages shows it."""
    hook = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = "".join((ROOT / fragment["path"]).read_text() for fragment in hook["fragments"])
    for substitution in hook["substitutions"]:
        text = re.sub(substitution["pattern"], substitution["replacement"], text)
    return text


def test_the_page_of_the_package_has_no_relative_links():
    page = page_of_the_package()
    targets = re.findall(r"\]\(([^)]*)\)", page)
    assert targets
    assert [target for target in targets if not target.startswith(("https:", "#"))] == []
    assert "<img" not in page
    assert page.startswith("# moefold\n")


def test_the_readme_names_the_version():
    readme = (ROOT / "README.md").read_text()
    assert f"badge/version-{moefold.__version__}-" in readme
    assert f"version = {{{moefold.__version__}}}" in readme
    assert len(readme.splitlines()) <= MAX_README_LINES


def test_the_sdist_has_every_file_that_it_names():
    sdist = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert [name for name in sdist if not (ROOT / name.removeprefix("/")).exists()] == []


def test_the_citation_names_the_version_and_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "type", "license"} <= citation.keys()
    assert citation["version"] == moefold.__version__
    assert [reference["url"] for reference in citation["references"]] == ["https://arxiv.org/abs/2504.14960"]


def test_a_release_needs_a_dated_heading_of_its_version():
    citation = "\nversion: 1.2.0\n"
    check.check_version("1.2.0", "# Changelog\n\n## 1.2.0 - 2026-01-31\n", citation)
    for changelog in ("## Unreleased\n", "## 1.2.0\n", "## 1.1.0 - 2026-01-31\n", ""):
        with pytest.raises(check.ReleaseError, match=r"must be '1.2.0 - YYYY-MM-DD'"):
            check.check_version("1.2.0", changelog, citation)
    with pytest.raises(check.ReleaseError, match=r"CITATION.cff must have the line 'version: 1.2.0'"):
        check.check_version("1.2.0", "## 1.2.0 - 2026-01-31\n", "\nversion: 1.1.0\n")


def dockerfile() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, continued lines joined, without comments."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    text = re.sub(r" *\\\n *", " ", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def copied() -> list[tuple[list[str], str]]:
    """Sources and target of each COPY from the build's context."""
    words = [shlex.split(rest) for name, rest in dockerfile() if name == "COPY" and not rest.startswith("--from")]
    return [(sources, target) for *sources, target in words]


def test_the_dockerfile_is_valid_and_its_sources_are_sent_to_the_builder():
    instructions = dockerfile()
    names = [name for name, _ in instructions]
    assert set(names) <= {"ARG", "FROM", "ENV", "WORKDIR", "RUN", "COPY", "USER", "CMD"}
    assert [re.fullmatch(r"python:\$\{PYTHON\}-slim-bookworm( AS build)?", rest) is not None
            for name, rest in instructions if name == "FROM"] == [True, True]  # fmt: skip
    # Commands of the final image run as the user.
    assert names[-1] == "CMD"
    assert isinstance(json.loads(instructions[-1][1]), list)
    assert [rest for name, rest in instructions if name == "USER"] == ["moefold"]
    sent = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    assert {source for sources, _ in copied() for source in sources} == sent
    assert all((ROOT / source).exists() for source in sent)
    torch = next(line for line in PROJECT["project"]["dependencies"] if line.startswith("torch>"))
    assert any(rest == f"pip install ${{TORCH_ARGS}} '{torch}'" for _, rest in instructions)
    for name, rest in instructions:
        if name == "RUN":
            subprocess.run(["sh", "-n"], input=rest, text=True, check=True)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_commands_of_the_image_install_moefold(tmp_path: Path):
    # The build stage, in a folder instead of a container; torch comes from where pip takes it here.
    stages = dockerfile()
    stages = stages[: next(number for number, (name, _) in enumerate(stages) if number > 1 and name == "FROM"
                           and "AS" not in stages[number][1])]  # fmt: skip
    image = tmp_path / "image"
    source = tmp_path / "source"
    source.mkdir()
    variables = {
        "DEVICE": "cpu", "TORCH_ARGS": "", "PATH": f"{image}/bin:{Path(sys.executable).parent}:/usr/bin:/bin",
        "HOME": str(tmp_path),
    }  # fmt: skip
    for name, rest in stages:
        if name == "COPY":
            *files, target = shlex.split(rest)
            for file in files:
                into = source / target / (file if target == "./" else "")
                if (ROOT / file).is_dir():
                    shutil.copytree(ROOT / file, into, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / file, into)
        elif name == "RUN":
            command = rest.replace("/opt/moefold", str(image))
            done = subprocess.run(
                ["sh", "-ec", command], cwd=source, env=variables, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run([str(image / "bin/moefold"), "doctor"], cwd=tmp_path, env=variables, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(image) in done.stdout
    wrong = {**variables, "DEVICE": "tpu"}
    (first,) = [rest for name, rest in stages if name == "RUN" and rest.startswith("case")]
    refused = subprocess.run(["sh", "-ec", first], env=wrong, capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stderr) == (2, "DEVICE=tpu must be cuda or cpu\n")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_wheel_has_every_file_and_its_page_renders(tmp_path: Path):
    renderer = pytest.importorskip("readme_renderer.markdown", reason="needs pip install 'readme-renderer[md]'")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    check.check_wheel(wheel)
    assert renderer.render(page_of_the_package()) is not None


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("extra", PROJECT["project"]["optional-dependencies"])
def test_every_extra_can_be_resolved(extra: str, tmp_path: Path):
    command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed", "--report"]
    command += [str(tmp_path / "report.json"), f"{ROOT}[{extra}]"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = {entry["metadata"]["name"] for entry in json.loads((tmp_path / "report.json").read_text())["install"]}
    assert "moefold" in names
