"""States and outputs of linear attention in Triton equal the reference in float64, forwards and backwards."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from moefold.model.kernels import TORCH_KERNELS
from moefold.model.module_wrapper import set_on_modules
from moefold.model.transformer import build_model
from moefold.model.weight_init import init_weights
from moefold.ops.linear_attention import ChunkedLinearAttention
from moefold.ops.triton import linear_attention
from moefold.ops.triton.linear_attention import TritonLinearAttention
from moefold.parallel.kernels.select import select_kernels
from tests.slow import slow
from tests.verify.recipes import tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {"gated_deltanet": (2, 1), "kda": (1, None), "gla": (1, None)}
"""Key heads of two value heads, and width of a decay; None: each channel."""
TOLERANCE = 2e-5


def _inputs(kind: str, length: int = 18, key_size: int = 18, value_size: int = 37) -> list[Tensor]:
    """Queries, keys, values, logarithms of decays and write strengths of two samples, on the device."""
    generator = torch.Generator().manual_seed(len(kind))
    groups, width = SHAPES[kind]
    q, k, v, decay = (
        torch.randn(length, 2, *shape, generator=generator)
        for shape in ((groups, key_size), (groups, key_size), (2, value_size), (2, width or key_size))
    )
    inputs = [q / 4, k / key_size**0.5, v, -decay.square()]
    if kind != "gla":
        inputs.append(torch.rand(length, 2, 2, generator=generator))
    return [x.to(DEVICE) for x in inputs]


def _compute(inputs: Sequence[Tensor], kernel: TritonLinearAttention | None, **options: Tensor) -> list[Tensor]:
    """Outputs, last states, and the gradients of all inputs and of the first states."""
    dtype = inputs[0].dtype
    leaves = [x.clone().requires_grad_() for x in inputs]
    q, k, v, log_decay, *betas = leaves
    state = options.pop("state", None)
    if state is not None:
        state = state.to(dtype).requires_grad_()
        leaves.append(state)
    initial = None if state is not None else (lambda transition, update: transition @ update)
    attention = ChunkedLinearAttention(8, initial, kernel)
    out, last = attention(q, k, v, log_decay, betas[0] if betas else None, state, **options)
    weights = [
        torch.linspace(-3, low, x.numel(), device=DEVICE).sin().view(x.shape).to(dtype)
        for low, x in ((40, out), (7, last))
    ]
    return [out, last, *torch.autograd.grad((out, last), leaves, weights)]


CASES = ("given states", "states of a summary", "documents")
FAST = list(zip(SHAPES, CASES, strict=True))


@pytest.mark.parametrize(("kind", "case"), [*FAST, *slow(pair for pair in product(SHAPES, CASES) if pair not in FAST)])
def test_outputs_states_and_gradients_equal_the_reference(kind: str, case: str) -> None:
    """Lengths, widths and chunks are not multiples of the kernel's blocks."""
    inputs = _inputs(kind)
    options = {}
    if case == "given states":
        options["state"] = torch.linspace(-2, 9, 2 * 2 * 18 * 37, device=DEVICE).sin().view(2, 2, 18, 37)
    if case == "documents":
        tokens = torch.arange(18, device=DEVICE).unsqueeze(1)
        options["is_start_SB"] = (tokens == 0) | (tokens == torch.tensor([5, 16], device=DEVICE))
    found = _compute(inputs, TritonLinearAttention(), **options)
    expected = _compute([x.double() for x in inputs], None, **options)
    for a, e in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), e, rtol=TOLERANCE, atol=TOLERANCE * float(e.abs().max()))


def test_a_state_that_is_lost_between_chunks_is_noticed() -> None:
    attention = ChunkedLinearAttention(8, lambda transition, update: transition @ update, TritonLinearAttention())
    q, k, v, log_decay, beta = _inputs("gated_deltanet", 16)
    whole, _ = attention(q, k, v, log_decay, beta, None)
    second, _ = attention(q[8:], k[8:], v[8:], log_decay[8:], beta[8:], None)
    assert (whole[8:] - second).abs().max() > 1e-2


ON_CPU = pytest.mark.skipif(DEVICE == "cuda", reason="CPU ranks need Triton's interpreter")


@ON_CPU
def test_it_is_selected_for_models_with_a_recurrence() -> None:
    cpu = torch.device("cpu")
    for kind, kernel in (("gla", TritonLinearAttention), ("short_convolution", type(None))):
        cfg = tiny(model={"layers.attention": "linear, full", "linear_attention": kind})
        cfg = replace(cfg, run=replace(cfg.run, dtype="float32", kernels="triton"))
        assert isinstance(select_kernels(cfg, cpu).linear_attention, kernel)
    assert select_kernels(replace(cfg, run=replace(cfg.run, kernels="plain")), cpu).linear_attention is None


@pytest.mark.parametrize("kind", ["gated_deltanet", *slow([("gla",)])])
def test_gradients_of_a_model_equal_those_with_torch(kind: str) -> None:
    cfg = tiny(model={"layers.attention": "linear", "linear_attention": kind, "layers.ffn": "dense"})
    cfg = replace(cfg, run=replace(cfg.run, dtype="float32"))
    gradients = []
    for kernel in (None, TritonLinearAttention()):
        model = build_model(cfg).to(DEVICE)
        init_weights(model, cfg.model, 1)
        set_on_modules(model, "kernels", replace(TORCH_KERNELS, linear_attention=kernel))
        model.set_positions(torch.arange(16, device=DEVICE))
        tokens = torch.arange(34, device=DEVICE).view(2, 17) % cfg.model.vocab_size
        model(tokens[:, :-1], labels=tokens[:, 1:]).sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    expected, found = gradients
    for name, gradient in expected.items():
        atol = 1e-4 * float(gradient.abs().max())
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=atol, msg=name)


def test_unsupported_cases_are_left_to_torch() -> None:
    kernel = TritonLinearAttention()
    assert kernel.supports(_inputs("kda"))
    assert not kernel.supports([x.double() for x in _inputs("kda")])
    assert not kernel.supports(_inputs("kda", key_size=linear_attention.MAX_KEY_SIZE + 1))
    assert not kernel.supports(_inputs("kda", length=0))


def test_inference_saves_nothing() -> None:
    chunks = TritonLinearAttention().prepare(_inputs("gla"), None, 8).chunks
    tensors = (chunks.read_keys, chunks.scores, chunks.write_keys, chunks.values, chunks.erase_keys, chunks.decay)
    *_, states, written = linear_attention.scan_forward(
        *(None if x is None else x.contiguous() for x in tensors), chunks.first_state(), saves=False
    )
    assert states is None
    assert written is None
