"""Attention by the backend that was measured to be the fastest: the same values, and an untouched graph."""

import logging

import pytest
import torch
from torch.nn.attention import SDPBackend

from moefold.model.attention import CausalAttention
from moefold.ops import measured_attention
from moefold.ops.autotune import Autotuner
from moefold.ops.block_attention import CudaFlash, MathBlockAttention, causal_sdpa
from moefold.ops.measured_attention import MeasuredBlockAttention, sdpa_backends
from tests.model.attention_reference import random_attention, with_gradients


def _tuner(fastest, calls):
    """A tuner whose candidates run once each. The one of this position is the fastest."""

    def timer(candidate):
        candidate()
        calls.append(len(calls))
        return 1.0 if len(calls) - 1 == fastest else 2.0

    return Autotuner(is_enabled=True, timer=timer)


@pytest.fixture
def both_backends(monkeypatch):
    """Two backends that a CPU has for float64, and a record of the calls."""
    names = {"SDPA's preference": None, "math": SDPBackend.MATH}
    monkeypatch.setattr(measured_attention, "sdpa_backends", lambda q, v: names)
    ran = []
    by_backend = measured_attention._by_backend
    monkeypatch.setattr(measured_attention, "_by_backend", lambda one, *rest: ran.append(one) or by_backend(one, *rest))
    return ran


@pytest.mark.parametrize("fastest", [0, 1])
def test_the_fastest_backend_computes_the_layer(both_backends, fastest):
    grad_out, q, k, v = random_attention(1, 9, 2, (4, 2, 8))
    core, plain, calls = CausalAttention(), CausalAttention(), []
    core.tuner = _tuner(fastest, calls)
    expected = with_gradients(plain, grad_out, q, k, v)
    for _ in range(2):
        found = with_gradients(core, grad_out, q, k, v)
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    chosen = [None, SDPBackend.MATH][fastest]
    assert both_backends == [None, SDPBackend.MATH, chosen, chosen]


def test_measuring_does_not_change_gradients_and_saved_tensors(both_backends):
    """Offload and recomputation count the tensors that a layer saves: a measurement saves nothing for them."""
    _, q, k, v = (x.requires_grad_() for x in random_attention(1, 9, 2, (4, 2, 8)))
    saved = []
    core = CausalAttention()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        causal_sdpa(q, k, v, None)
        num_saved = len(saved)
        core.tuner = _tuner(0, [])
        core(q, k, v)
    assert num_saved
    assert len(saved) == 2 * num_saved
    assert (q.grad, k.grad, v.grad) == (None, None, None)


def test_masks_are_not_measured(both_backends):
    """Only SDPA takes them: flash and cuDNN have windows of their own, or none."""
    grad_out, q, k, v = random_attention(1, 9, 2, (4, 2, 8))
    core = CausalAttention(window=3)
    core.tuner = _tuner(1, [])
    with_gradients(core, grad_out, q, k, v)
    assert both_backends == []


@pytest.mark.parametrize(
    ("sizes", "names"),
    [((64, 64), ["cuDNN", "flash"]), ((192, 128), ["cuDNN"]), ((192, 192), ["flash"]), ((60, 60), [])],
)
def test_backends_for_heads(monkeypatch, sizes, names):
    monkeypatch.setattr(CudaFlash, "supports", staticmethod(lambda q: q.shape[-1] % 8 == 0))
    q, v = (torch.empty(2, 1, 2, size) for size in sizes)
    assert list(sdpa_backends(q, v)) == ["SDPA's preference", *names]


def test_without_low_precision_there_is_nothing_to_measure():
    q = torch.empty(2, 1, 2, 64)
    assert list(sdpa_backends(q, q)) == ["SDPA's preference"]


class _Recorded(MathBlockAttention):
    def __init__(self, name, ran):
        self.name = name
        self.ran = ran

    def supports(self, q, k, v):
        return True

    def forward(self, q, k, v, block_mask):
        self.ran.append((self.name, "forward"))
        return super().forward(q, k, v, block_mask)

    def backward(self, *args):
        self.ran.append((self.name, "backward"))
        return super().backward(*args)


def test_each_pass_of_a_block_has_its_fastest_kernel(monkeypatch):
    ran, calls = [], []
    monkeypatch.setattr(measured_attention, "CudaFlash", lambda: _Recorded("flash", ran))

    def timer(candidate):
        calls.append(candidate)
        candidate()
        return [2.0, 1.0, 1.0, 2.0][len(calls) - 1]

    kernel = MeasuredBlockAttention(Autotuner(is_enabled=True, timer=timer), "cuDNN", _Recorded("cuDNN", ran))
    grad_out, q, k, v = random_attention(1, 9, 2, (4, 2, 8))
    out, lse = kernel.forward(q, k, v, "causal")
    gradients = kernel.backward(grad_out, q, k, v, out, lse, "causal")
    both = [("cuDNN", "forward"), ("flash", "forward"), ("cuDNN", "backward"), ("flash", "backward")]
    assert ran == [*both[:2], ("flash", "forward"), *both[2:], ("cuDNN", "backward")]
    expected = MathBlockAttention().backward(grad_out, q, k, v, out, lse, "causal")
    assert all(map(torch.equal, gradients, expected))


def test_a_backend_that_this_device_lacks_is_named(monkeypatch, caplog):
    """A CPU has no cuDNN."""
    names = {"SDPA's preference": None, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    monkeypatch.setattr(measured_attention, "sdpa_backends", lambda q, v: names)
    core = CausalAttention()
    core.tuner = Autotuner(is_enabled=True, timer=lambda candidate: candidate() or 1.0)
    grad_out, *given = random_attention(1, 9, 2, (4, 2, 8))
    with caplog.at_level(logging.WARNING):
        found = core(*given)
    assert torch.equal(found, CausalAttention()(*given))
    assert "causal attention: 'cuDNN' is not used, as it raises RuntimeError" in caplog.text
