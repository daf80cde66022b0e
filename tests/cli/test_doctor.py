"""`moefold doctor` on this machine, and on machines that lack something."""

import json
import sys

import torch

import moefold
from moefold.cli import doctor
from moefold.cli.main import main


def answers(capsys) -> dict[str, str]:
    return {found["topic"]: found["words"] for found in json.loads(capsys.readouterr().out)}


def test_doctor_reports_versions_memory_kernels_and_extras(capsys):
    assert main(["doctor", "--json"]) == 0
    found = answers(capsys)
    assert found["moefold"].startswith(moefold.__version__)
    assert found["torch"].startswith(torch.__version__)
    assert "gloo" in found["ranks"]
    assert float(found["memory"].split()[0]) > 0
    assert found["C kernels"].startswith(("built", "not built"))
    assert {package for package, *_ in doctor.OPTIONAL_PACKAGES} <= found.keys()
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == list(found)


def test_what_is_missing_is_named_with_what_brings_it(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert main(["doctor", "--json"]) == 0
    found = answers(capsys)
    assert found["wandb"] == "not installed (extra 'track'; for metrics.wandb)"
    assert "there is no C compiler" in found["C kernels"]


def test_without_torch_the_status_is_1(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["doctor"]) == 1
    assert "cannot be imported" in capsys.readouterr().out
