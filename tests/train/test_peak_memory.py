"""Peak memory of the process."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moefold.host import memory
from moefold.host.memory import peak_resident_gib
from moefold.train.step_meter import peak_memory_gib


def test_grows_with_touched_memory_and_keeps_the_peak() -> None:
    code = (
        "from moefold.host.memory import peak_resident_gib as peak; a = peak();"
        "b = bytearray(b'x') * 2**28; c = peak(); del b; d = peak(); print(a, c, d)"
    )
    before, during, after = map(float, subprocess.check_output([sys.executable, "-c", code]).split())
    assert before > 0.001
    # The process may touch more while it runs, and never less than the 256 MiB.
    assert during - before > 0.24
    # The kernel counts pages in batches, so that its peak may fall by a few.
    assert after - before > 0.24


@pytest.mark.parametrize(("platform", "peak_units"), [("linux", 3 * 2**20), ("darwin", 3 * 2**30)])
def test_systems_without_proc_ask_getrusage(monkeypatch: pytest.MonkeyPatch, platform: str, peak_units: int) -> None:
    monkeypatch.setattr(memory, "_PROCESS_STATUS", Path("/absent"))
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(memory.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=peak_units))
    assert peak_resident_gib() == 3.0


def test_cuda_asks_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5 * 2**29)
    assert peak_memory_gib("cuda") == 2.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_counts_a_tensor() -> None:
    torch.cuda.reset_peak_memory_stats()
    before = peak_memory_gib("cuda")
    block = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    assert peak_memory_gib("cuda") - before == pytest.approx(block.numel() / 2**30)
