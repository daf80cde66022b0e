"""Compiled parts of a block equal norms, RoPE and SwiGLU one after another, and compile once for all layers."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moefold.ops.compiled import CompiledQKNormRope, CompiledSwiGLU, inductor_unsupported_reason
from moefold.ops.norm import cpu_rms_norm
from moefold.ops.rope import Rope

EPS = 1e-3


def _uncompiled(function):
    return function


def _leaf(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_()


def _rope(rotated: int, per_sample: bool, is_interleaved: bool, dtype: torch.dtype) -> Rope:
    angles = torch.randn(5, 2 if per_sample else 1, 1, rotated // 2, dtype=dtype)
    angles = torch.cat((angles, angles), -1)
    return Rope(angles.cos(), angles.sin(), is_interleaved)


def _heads(dtype: torch.dtype) -> tuple[Tensor, ...]:
    return (*(_leaf(5, 2, heads, 8, dtype=dtype) for heads in (4, 2)), _leaf(8, dtype=dtype), _leaf(8, dtype=dtype))


def _results_and_gradients(results: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    loss = sum((x * torch.linspace(1, 2, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in results)
    return *results, *torch.autograd.grad(loss, inputs)


def _assert_rotates_like_the_modules(kernel: CompiledQKNormRope, rope: Rope, dtype: torch.dtype) -> None:
    query, key, *weights = inputs = _heads(dtype)
    found = kernel(query, key, tuple(weights), EPS, (rope.cos, rope.sin), is_interleaved=rope.is_interleaved)
    expected = tuple(rope(cpu_rms_norm(x, w, EPS)) for x, w in zip((query, key), weights, strict=True))
    torch.testing.assert_close(_results_and_gradients(found, inputs), _results_and_gradients(expected, inputs))


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(("rotated", "per_sample"), [(8, False), (4, True)])
def test_heads_are_normalised_and_rotated(rotated, per_sample, is_interleaved):
    rope = _rope(rotated, per_sample, is_interleaved, torch.float64)
    _assert_rotates_like_the_modules(CompiledQKNormRope(_uncompiled), rope, torch.float64)


def test_swiglu_has_its_gradient():
    inputs = tuple(_leaf(3, 6, dtype=torch.float64) for _ in range(2))
    grad = torch.randn(3, 6, dtype=torch.float64)
    kernel = CompiledSwiGLU(_uncompiled)
    y = F.silu(inputs[0]) * inputs[1]
    torch.testing.assert_close(kernel.swiglu(*inputs), y)
    torch.testing.assert_close(kernel.swiglu_backward(grad, *inputs), torch.autograd.grad(y, inputs, grad))


def test_layers_share_one_compilation():
    graphs = []

    def backend(graph: nn.Module, _):
        graphs.append(graph)
        return graph.forward

    kernel = CompiledQKNormRope(
        lambda function: torch.compile(function, fullgraph=True, dynamic=False, backend=backend)
    )
    for _layer in range(3):
        _assert_rotates_like_the_modules(kernel, _rope(8, False, False, torch.float64), torch.float64)
    assert len(graphs) == 1
    with torch.no_grad():
        _ = kernel(*_heads(torch.float64)[:2], _heads(torch.float64)[2:], EPS, _angles(), is_interleaved=False)
    assert len(graphs) == 2


def test_models_of_one_process_do_not_share_the_limit_of_shapes():
    # Two more than torch.compile takes of one function.
    for rows in range(1, 11):
        g, u = torch.randn(2, rows, 4)
        kernel = CompiledSwiGLU(
            lambda function: torch.compile(function, fullgraph=True, dynamic=False, backend="eager")
        )
        torch.testing.assert_close(kernel.swiglu(g, u), F.silu(g) * u)
        assert kernel.swiglu_backward(u, g, u)[0].shape == (rows, 4)


def _angles() -> tuple[Tensor, Tensor]:
    rope = _rope(8, False, False, torch.float64)
    return rope.cos, rope.sin


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert inductor_unsupported_reason("cpu") == "there is no C++ compiler 'no-such-compiler' (set CXX)"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_inductor_normalises_and_rotates(dtype):
    """Its graph is the graph of `test_layers_share_one_compilation`."""
    _assert_rotates_like_the_modules(CompiledQKNormRope(), _rope(4, True, False, dtype), dtype)


@pytest.fixture
def _short_compilation() -> Iterator[None]:
    """Inductor compiles in this process, no header ahead of its kernels, and takes the vector instructions as found."""
    import torch._inductor.config as settings

    # With an empty cache 12 s of CPU time in place of 23.
    with settings.patch({"compile_threads": 1, "cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": True}):
        yield


@pytest.mark.usefixtures("_short_compilation")
def test_inductor_computes_the_same():
    """One function shows that it runs. It compiles the others in the same way."""
    g, u = torch.randn(2, 3, 6, dtype=torch.float64)
    torch.testing.assert_close(CompiledSwiGLU().swiglu(g, u), F.silu(g) * u)


@pytest.mark.slow
@pytest.mark.usefixtures("_short_compilation")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_inductor_computes_the_same_gradients(dtype):
    inputs = tuple(_leaf(3, 6, dtype=dtype) for _ in range(2))
    grad = torch.randn(3, 6, dtype=dtype)
    y = F.silu(inputs[0]) * inputs[1]
    torch.testing.assert_close(CompiledSwiGLU().swiglu_backward(grad, *inputs), torch.autograd.grad(y, inputs, grad))
