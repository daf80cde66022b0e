"""Attention blocks by cuDNN: the calls equal the definition, and a device that does not agree is not used."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moefold.model.attention import CausalAttention
from moefold.model.transformer import build_model
from moefold.ops import cudnn_attention
from moefold.ops.autotune import Autotuner
from moefold.ops.block_attention import MathBlockAttention
from moefold.ops.cudnn_attention import CudnnAttention, probe_cudnn_attention
from moefold.parallel.kernels import low_precision, select, selected
from tests.model.attention_reference import random_attention, random_sinks, with_gradients
from tests.ops.reference_cudnn import ReferenceCudnn, reference_cudnn
from tests.verify.recipes import tiny

CPU = torch.device("cpu")


def _through(kernel, grad_out, q, k, v, mask):
    out, lse = kernel.forward(q, k, v, mask)
    return [out, lse, *kernel.backward(grad_out, q, k, v, out, lse, mask)]


@pytest.mark.parametrize(("mask", "num_keys"), [("causal", 9), ("all", 9), ("all", 5)])
def test_blocks_through_the_operators(mask, num_keys):
    grad_out, q, k, v = random_attention(1, 9, 2, (4, 2, 8))
    given = grad_out, q, k[:num_keys], v[:num_keys]
    with reference_cudnn() as cudnn:
        found = _through(CudnnAttention(), *given, mask)
    for x, y in zip(found, _through(MathBlockAttention(), *given, mask), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    assert cudnn.calls == ["forward", "backward"]


@pytest.mark.parametrize("mask", ["causal", "all"])
def test_shapes_on_the_device(mask):
    with FakeTensorMode():
        q, grad_out = (torch.empty(6, 2, 4, 16, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        k, v = (torch.empty(6, 2, 2, 16, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        out, lse, *gradients = _through(CudnnAttention(), grad_out, q, k, v, mask)
        assert CudnnAttention().supports(q, k, v)
        assert not CudnnAttention().supports(q.float(), k, v)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (6, 2, 4), torch.float32)
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]


def test_attention_with_sinks_uses_cudnn():
    given = [*random_attention(2, 12, 2, (4, 2, 8)), random_sinks(3, 4)]
    plain, core = CausalAttention(), CausalAttention()
    core.block_kernel = CudnnAttention()
    expected = with_gradients(lambda q, k, v, sinks: plain(q, k, v, None, sinks), *given)
    with reference_cudnn() as cudnn:
        found = with_gradients(lambda q, k, v, sinks: core(q, k, v, None, sinks), *given)
        core(*given[1:4])
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)
    # Without sinks, SDPA chooses.
    assert cudnn.calls == ["forward", "backward"]


def test_the_probe_compares_with_the_definition(monkeypatch):
    with reference_cudnn() as cudnn:
        assert probe_cudnn_attention(CPU) == ""
        assert cudnn.calls == ["forward", "backward"] * 2

        def forward_with_other_logarithm(self, *args, **kwargs):
            out, lse, *others = forward(self, *args, **kwargs)
            return out, lse / 0.6931471805599453, *others

        forward = ReferenceCudnn.forward
        monkeypatch.setattr(ReferenceCudnn, "forward", forward_with_other_logarithm)
    with reference_cudnn():
        assert "differs from the definition" in probe_cudnn_attention(CPU)


def test_the_probe_reports_an_operator_that_raises():
    """A build of torch without CUDA has no kernel for these tensors."""
    assert probe_cudnn_attention(CPU).startswith("cuDNN attention raises")


@pytest.mark.parametrize(
    ("settings", "device", "is_deterministic", "is_used"),
    [
        ({"cp": 2, "context": "ring"}, "cuda", False, True),
        ({"cp": 2, "context": "allgather"}, "cuda", False, True),
        ({"cp": 2, "context": "ulysses"}, "cuda", False, False),
        ({"cp": 2, "context": "ring"}, "cpu", False, False),
        ({"cp": 2, "context": "ring"}, "cuda", True, False),
        ({"model": {"attention.sinks": True}}, "cuda", False, True),
        ({}, "cuda", False, False),
    ],
)
def test_cudnn_is_chosen_by_recipe_device_and_probe(monkeypatch, settings, device, is_deterministic, is_used):
    cfg = tiny(world_size=settings.get("cp", 1), **settings)
    cfg = replace(cfg, run=replace(cfg.run, deterministic=is_deterministic))
    for reason in ("", "it differs"):
        monkeypatch.setattr(cudnn_attention, "probe_cudnn_attention", lambda device, reason=reason: reason)
        kernel, message = selected.block_attention_kernel(
            cfg.run, cfg.model, cfg.parallel, torch.device(device), Autotuner(is_enabled=True)
        )
        assert (kernel is not None) == (is_used and not reason)
        assert ("as it differs" in message) == (is_used and bool(reason))


@pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed")
@pytest.mark.parametrize("precision", ["dtype", "fp8-blockwise"])
def test_kernels_of_every_precision_have_it(monkeypatch, precision):
    cfg = tiny(world_size=2, cp=2, context="ring")
    cfg = replace(
        cfg,
        run=replace(cfg.run, dtype="bfloat16", kernels="auto", deterministic=False),
        train=replace(cfg.train, precision=precision),
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(low_precision, "scaled_mm_unsupported_reason", lambda *args: "it differs")
    for reason in ("", "it differs"):
        monkeypatch.setattr(cudnn_attention, "probe_cudnn_attention", lambda device, reason=reason: reason)
        kernels = select.select_kernels(cfg, torch.device("cuda"))
        assert (kernels.block_attention is None) == bool(reason)
        assert ("flash attention for blocks, as it differs" in kernels.message) == bool(reason)


def test_layers_get_the_kernel():
    kernel = CudnnAttention()
    stage = build_model(tiny(model={"attention.sinks": True}))
    select.apply_kernels(stage, select.SelectedKernels(block_attention=kernel))
    assert all(block.attention.core_attention.block_kernel is kernel for block in stage.layers.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_probe_of_cudnn_passes_on_the_device():
    assert probe_cudnn_attention(torch.device("cuda")) == ""
