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


def test_a_missing_package_is_named_with_its_extra(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert main(["doctor", "--json"]) == 0
    found = answers(capsys)
    assert found["wandb"].startswith("not installed (for metrics.wandb); pip install 'wandb")
    assert found["lm-eval"].startswith("not installed (for moefold lm-eval); pip install 'lm-eval")
    assert "there is no C compiler" in found["C kernels"]
    assert found["flash attention"].startswith("torch's own; with the module flash_attn_interface")


def test_flash_attention_3_is_named_where_it_is_installed(capsys, monkeypatch):
    monkeypatch.setattr("moefold.ops.flash_attention_3.PACKAGE", "torch")
    assert main(["doctor", "--json"]) == 0
    assert answers(capsys)["flash attention"].endswith("torch is installed, and no Hopper GPU is visible")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert doctor.describe_flash_attention() == "FA3 of torch, if it passes the comparison at the start of a run"
    monkeypatch.setattr(torch.nn.attention, "list_flash_attention_impls", list)
    assert "no FA3 to activate" in doctor.describe_flash_attention()


def test_without_torch_the_status_is_1(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["doctor"]) == 1
    assert "cannot be imported" in (printed := capsys.readouterr().out)
    assert "pip install 'torch" in printed
