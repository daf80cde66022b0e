"""The pip command of a message fits the way by which moefold is installed."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

from moefold.errors import install_command

ROOT = Path(__file__).parents[1]


class Installed:
    """A distribution with the record of pip about where it comes from; None: from a package index."""

    def __init__(self, origin: str | None) -> None:
        self._origin = origin

    def read_text(self, name: str) -> str | None:
        return self._origin if name == "direct_url.json" else None


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'moefold[hf]'"),
        ('{"archive_info": {}, "url": "file:///tmp/moefold.whl"}', "pip install 'moefold[hf]'"),
        ('{"dir_info": {}, "url": "file:///src/moefold"}', "pip install 'moefold[hf]'"),
        ('{"dir_info": {"editable": true}, "url": "file:///src/moefold"}', "pip install -e '.[hf]'"),
    ],
    ids=["index", "wheel", "folder", "editable"],
)
def test_the_command_fits_the_installation(monkeypatch, origin: str | None, command: str) -> None:
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed(origin))
    assert install_command("hf") == command


def test_a_checkout_that_is_not_installed_gets_the_editable_command(monkeypatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    assert install_command("hf") == "pip install -e '.[hf]'"


def test_every_message_asks_for_an_extra_that_exists_and_by_this_function() -> None:
    sources = {path: path.read_text() for path in (ROOT / "src").rglob("*.py") if path.name != "errors.py"}
    ask = re.compile(r"(?:(?<!_)install_command|check_packages)\(['\"](\w+)['\"][,)]")
    asked = {extra for text in sources.values() for extra in ask.findall(text)}
    assert {"hf", "gpu", "board"} <= asked
    assert asked <= set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    assert not [path for path, text in sources.items() if re.search(r"pip install (-e )?'(\.|moefold)\[", text)]
