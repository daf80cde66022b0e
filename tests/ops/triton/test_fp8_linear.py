"""Dense layers through torch's scaled GEMMs of blocks of 128 equal the emulation; torch's own checks take each call."""

import inspect

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.model.local_param import local_param
from moefold.ops.autotune import Autotuner
from moefold.ops.quantization.emulated import EmulatedLinear
from moefold.ops.quantization.formats import QUANT_FORMATS
from moefold.ops.quantization.scaled_mm import scaled_mm_unsupported_reason
from moefold.ops.quantization.weight_cache import WeightCache
from moefold.ops.triton import fp8_gemm, fp8_linear
from moefold.ops.triton.fp8_gemm import Fp8ExpertOps, Fp8Linear
from moefold.ops.triton.fp8_linear import ScaledMMFp8Linear
from moefold.parallel.kernels import low_precision
from tests.slow import slow

CPU = torch.device("cpu")
FORMAT = QUANT_FORMATS["fp8-blockwise"]
EMULATED = EmulatedLinear(FORMAT)
ROWS, DEPTH, WIDTH = low_precision.WHOLE_BLOCK_SIZES


def _on_meta(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


class StandIn:
    """`torch.nn.functional.scaled_mm` in float64; torch checks shapes, strides and types of each call on meta tensors.

    Scales are read as those checks say: [M, K/128] and [N, K/128], or [K/128 padded to a multiple of 4, N/128].
    """

    def __init__(self, error: float = 0.0) -> None:
        self.recipes = []
        self.error = error

    def __call__(self, *arguments: object, **options: object) -> Tensor:
        """Multiply; `error` is added to the first element, relative to the largest."""
        bound = inspect.signature(F.scaled_mm).bind(*arguments, **options).arguments
        checked = F.scaled_mm(*map(_on_meta, arguments), **options)
        a, b, recipe = bound["mat_a"].double(), bound["mat_b"].double(), bound["scale_recipe_b"]
        assert bound["scale_recipe_a"] == F.ScalingType.BlockWise1x128
        self.recipes.append(recipe)
        a *= bound["scale_a"].double().repeat_interleave(128, 1)
        if recipe == F.ScalingType.BlockWise1x128:
            b *= bound["scale_b"].double().t().repeat_interleave(128, 0)
        else:
            assert recipe == F.ScalingType.BlockWise128x128
            scales = bound["scale_b"][: len(b) // 128].double()
            b *= scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        y = (a @ b).to(bound["output_dtype"])
        assert (y.shape, y.dtype) == (checked.shape, checked.dtype)
        y[0, 0] += self.error * y.abs().max()
        return y


def _operands(rows: int = ROWS, depth: int = DEPTH, width: int = WIDTH) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, w and the gradient of the output, whose blocks differ widely in size."""
    generator = torch.Generator().manual_seed(1)
    spread = torch.logspace(-2, 2, max(rows, depth, width))
    shapes = ((rows, depth), (width, depth), (rows, width))
    return tuple(
        (torch.randn(shape, generator=generator) * spread[: shape[1]] * spread[: shape[0], None]).bfloat16()
        for shape in shapes
    )


def _assert_close(found: Tensor, expected: Tensor) -> None:
    """Two roundings to bfloat16, after sums in another order."""
    assert found.dtype == torch.bfloat16
    atol = 2**-8 * float(expected.abs().max())
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=atol)


def test_the_three_products_equal_the_emulation():
    stand_in = StandIn()
    linear = ScaledMMFp8Linear(Fp8ExpertOps(), stand_in)
    x, w, grad = _operands()
    _assert_close(linear.forward(x, w), EMULATED.forward(x, w))
    _assert_close(linear.input_gradient(grad, w), EMULATED.input_gradient(grad, w))
    _assert_close(linear.weight_gradient(grad, x), EMULATED.weight_gradient(grad, x))
    square = F.ScalingType.BlockWise128x128
    assert stand_in.recipes == [square, square, F.ScalingType.BlockWise1x128]


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [((19, 128, 128), torch.bfloat16), ((128, 128, 128), torch.float32), *slow([((128, 130, 128), torch.bfloat16)])],
)
def test_other_sizes_and_types_use_our_kernels(sizes, dtype):
    stand_in = StandIn()
    linear, kernels = ScaledMMFp8Linear(Fp8ExpertOps(), stand_in), Fp8Linear(Fp8ExpertOps())
    x, w, grad = (operand.to(dtype) for operand in _operands(*sizes))
    # One product of each: the interpreter takes half a second for a product of whole blocks.
    name, arguments = ("forward", (x, w)) if dtype == torch.float32 else ("weight_gradient", (grad, x))
    assert torch.equal(getattr(linear, name)(*arguments), getattr(kernels, name)(*arguments))
    assert stand_in.recipes == []


def test_weights_are_quantised_once_a_step(monkeypatch):
    calls = []
    quantize = fp8_gemm.quantize_weights
    monkeypatch.setattr(fp8_gemm, "quantize_weights", lambda w, block_size: calls.append(1) or quantize(w, block_size))
    cache = WeightCache()
    linear = ScaledMMFp8Linear(Fp8ExpertOps(128, cache), StandIn())
    x, w, grad = _operands(128, 128, 128)
    parameter = torch.nn.Parameter(w)
    with cache.step():
        results = [linear.forward(x, local_param(parameter)) for _ in range(2)]
        linear.input_gradient(grad, local_param(parameter))
    assert torch.equal(*results)
    assert len(calls) == 2


@pytest.mark.parametrize("fastest", ["cuBLAS", *slow([("triton",)])])
def test_the_faster_one_of_cublas_and_our_kernels_computes_a_product(fastest):
    stand_in = StandIn()
    measured = []

    def timer(candidate):
        before = len(stand_in.recipes)
        candidate()
        measured.append("cuBLAS" if len(stand_in.recipes) > before else "triton")
        return 1.0 if measured[-1] == fastest else 2.0

    linear = ScaledMMFp8Linear(Fp8ExpertOps(autotuner=Autotuner(is_enabled=True, timer=timer)), stand_in)
    x, w, grad = _operands(128, 128, 128)
    linear.forward(x, w)
    linear.weight_gradient(grad, x)
    assert measured == ["cuBLAS", "triton"] * 2
    stand_in.recipes.clear()
    alone = {"cuBLAS": ScaledMMFp8Linear(Fp8ExpertOps(), StandIn()), "triton": Fp8Linear(Fp8ExpertOps())}[fastest]
    assert torch.equal(linear.forward(x, w), alone.forward(x, w))
    assert torch.equal(linear.weight_gradient(grad, x), alone.weight_gradient(grad, x))
    assert len(stand_in.recipes) == (2 if fastest == "cuBLAS" else 0)
    assert len(measured) == 4


@pytest.mark.parametrize(("error", "is_used"), [(0.0, True), (0.05, False), *slow([(torch.nan, False)])])
def test_hopper_uses_it_if_it_agrees_with_the_emulation(error, is_used, monkeypatch):
    """The self-test of a run, on a CPU that says that it is a GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(fp8_linear, "torch_scaled_mm", StandIn(error))
    monkeypatch.setattr(
        low_precision,
        "scaled_mm_unsupported_reason",
        lambda linear, quant_format, device, *rest: scaled_mm_unsupported_reason(linear, quant_format, CPU, *rest),
    )
    linear, message = low_precision.select_fp8_linear(Fp8ExpertOps(), torch.device("cuda"), torch.bfloat16)
    assert isinstance(linear, ScaledMMFp8Linear) == is_used
    assert message.startswith(", dense layers without cuBLAS, as forward is ") != is_used


@pytest.mark.parametrize("capability", [(8, 9), (10, 0)])
def test_other_devices_use_our_kernels(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    linear, message = low_precision.select_fp8_linear(Fp8ExpertOps(), torch.device("cuda"), torch.bfloat16)
    assert (type(linear), message) == (Fp8Linear, "")
