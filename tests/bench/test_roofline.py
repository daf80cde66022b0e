"""The statements of a table about the machine that it was measured on."""

import platform

import pytest
import torch

from moefold.bench import timing
from moefold.bench.timing import describe_device
from moefold.launch.threads_and_malloc import MALLOC_VARIABLES, PRELOAD_VARIABLE, TUNABLES_VARIABLE

CPUINFO = "processor\t: {}\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n"


@pytest.fixture
def cpuinfo(tmp_path, monkeypatch):
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(timing, "Path", lambda _: file)
    return file


def test_processors_of_one_name_are_distinguished(cpuinfo, monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    threads = torch.get_num_threads()
    assert describe_device(torch.device("cpu")) == f"CPU, {threads} threads"
    cpuinfo.write_text(CPUINFO.format(0) + CPUINFO.format(1))
    assert describe_device(torch.device("cpu")) == f"AMD EPYC (family 26, model 2), {threads} threads"
    cpuinfo.write_text("processor\t: 0\nCPU part\t: 0xd40\n")
    assert describe_device(torch.device("cpu")) == f"CPU, {threads} threads"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_device_description_notes_kept_memory(monkeypatch):
    for name in (*MALLOC_VARIABLES, TUNABLES_VARIABLE, PRELOAD_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    assert describe_device(torch.device("cpu")).endswith(" threads, freed memory is kept")
