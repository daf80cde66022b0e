"""FlashAttention 3 is active only where it is registered, installed and agrees. Stand-ins register themselves."""

import logging
from importlib.util import find_spec

import pytest
import torch
from torch.nn import attention

from moefold.ops import flash_attention_3
from moefold.ops.flash_attention_3 import activate_if_it_agrees, flash_disagreement, use_flash_attention_3
from tests.ops.reference_flash import reference_flash

CPU = torch.device("cpu")
NAME = "STAND-IN"


class _Handle:
    def __init__(self) -> None:
        self.removals = 0

    def remove(self) -> None:
        """Count the removals."""
        self.removals += 1


@pytest.fixture
def handle():
    handle = _Handle()
    attention.register_flash_attention_impl(NAME, register_fn=lambda: handle)
    yield handle
    if attention.current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()


def test_an_implementation_that_agrees_stays_active(handle):
    assert activate_if_it_agrees(NAME, lambda: "") == ""
    assert attention.current_flash_attention_impl() == NAME
    assert handle.removals == 0
    # A second model of the process.
    assert activate_if_it_agrees(NAME, lambda: pytest.fail("it was compared before")) == ""
    assert activate_if_it_agrees("FA4", lambda: "") == f"{NAME} is active"


def test_an_implementation_that_differs_is_removed(handle):
    assert activate_if_it_agrees(NAME, lambda: "it differs by 1") == "it differs by 1"
    assert attention.current_flash_attention_impl() is None
    assert handle.removals == 1


def test_an_implementation_that_cannot_be_activated_is_named(caplog):
    def fail() -> None:
        raise ImportError("no module\nof that name")

    attention.register_flash_attention_impl(NAME, register_fn=fail)
    with caplog.at_level(logging.WARNING):
        assert activate_if_it_agrees(NAME, lambda: "") == "it cannot be activated: no module"
        assert "cannot be activated: Unknown flash attention impl" in activate_if_it_agrees("FA-none", lambda: "")
    assert attention.current_flash_attention_impl() is None


def test_the_probe_accepts_the_definition_and_notices_wrong_masks():
    with reference_flash() as flash:
        assert flash_disagreement(CPU, torch.float64) == ""
        assert flash.calls == ["forward", "backward"] * 4
        forward = flash.forward

        def without_window(*args, **kwargs):
            return forward(*args, **kwargs | {"window_size_left": -1})

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("moefold.ops.block_attention.cuda_flash_attention", lambda: without_window)
            assert "differs from the definition" in flash_disagreement(CPU, torch.float64)
            assert "(sliding window)" in flash_disagreement(CPU, torch.float64)

        def refuse(*args, **kwargs):
            raise RuntimeError("FA3 flash_attention forward unsupported: a reason")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("moefold.ops.block_attention.cuda_flash_attention", lambda: refuse)
            assert "unsupported: a reason" in flash_disagreement(CPU, torch.float64)


def test_devices_without_it_log_nothing(monkeypatch):
    assert use_flash_attention_3(CPU) == ""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert use_flash_attention_3(torch.device("cuda")) == ""


@pytest.mark.parametrize(
    ("disagreement", "message"),
    [("", "flash attention of STAND-IN"), ("it differs", "not FlashAttention 3, as it differs")],
)
def test_hopper_with_the_package_uses_it(monkeypatch, handle, disagreement, message):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flash_attention_3, "IMPLEMENTATION", NAME)
    assert find_spec(flash_attention_3.PACKAGE) is None
    assert use_flash_attention_3(torch.device("cuda")) == ""
    monkeypatch.setattr(flash_attention_3, "PACKAGE", "torch")
    monkeypatch.setattr(flash_attention_3, "flash_disagreement", lambda device, dtype: disagreement)
    assert use_flash_attention_3(torch.device("cuda")) == message
