"""Test that running out of memory is one message in any library: the request, the free memory, the way out."""

import errno
import sys
import types

import numpy as np
import pytest
import torch

from moefold.cli.main import main
from moefold.launch.exit import oom_message, oom_reason

PIB = 2**50


def ends(make):
    """The error that a call ends with."""
    with pytest.raises((RuntimeError, MemoryError, ValueError)) as caught:
        make()
    return caught.value


def wrapped() -> None:
    try:
        np.empty(4 * PIB, dtype=np.uint8)
    except MemoryError as error:
        raise RuntimeError("a stage failed") from error


FAULTS = {
    "torch": (lambda: torch.empty(4 * PIB, dtype=torch.uint8), "4.19e+06 GiB were requested at once"),
    "torch, no size at all": (lambda: torch.empty(2**62, 2**62), "out of memory ("),
    "numpy": (lambda: np.empty(4 * PIB, dtype=np.uint8), "4.00 PiB were requested at once"),
    "numpy, no size at all": (lambda: np.empty((2**40, 2**40)), "out of memory ("),
    "python": (lambda: bytearray(2**60), "out of memory (MemoryError)"),
    "the cause of another": (wrapped, "4.00 PiB were requested at once"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_errors_of_memory_are_known_whoever_raises_them(name):
    make, words = FAULTS[name]
    text = oom_message(ends(make))
    assert words in text
    assert " are free on this machine" in text or " are left by " in text
    assert "choose a smaller model, batch or sequence" in text
    assert "\n" not in text


def test_memory_errors_of_a_gpu_say_nothing_of_the_host():
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 5 is free."
    )
    assert oom_message(error).startswith("out of memory: 20.00 GiB were requested at once; choose a smaller")


def test_only_errors_of_memory_have_an_oom_reason():
    for error in (RuntimeError("shape"), ValueError("x"), OSError(errno.ENOSPC, "full"), KeyError("memory")):
        assert oom_reason(error) == ""
    assert oom_reason(OSError(errno.ENOMEM, "Cannot allocate memory"))


@pytest.mark.parametrize(("name", "status"), [("torch", 1), ("numpy", 1), ("python", 1)])
def test_a_command_that_runs_out_of_memory_ends_with_one_message(monkeypatch, capsys, name, status):
    command = types.ModuleType("moefold.cli.layout")
    monkeypatch.setattr(command, "run", lambda words: FAULTS[name][0](), raising=False)
    monkeypatch.setitem(sys.modules, "moefold.cli.layout", command)
    assert main(["layout", "world_size=1"]) == status
    err = capsys.readouterr().err
    assert err.startswith("moefold: error: out of memory")
    assert err.count("\n") == 1


def test_another_error_stays_a_traceback(monkeypatch):
    command = types.ModuleType("moefold.cli.layout")
    monkeypatch.setattr(command, "run", lambda words: int("x"), raising=False)
    monkeypatch.setitem(sys.modules, "moefold.cli.layout", command)
    with pytest.raises(ValueError, match="invalid literal"):
        main(["layout", "world_size=1"])
