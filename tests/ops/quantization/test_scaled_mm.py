"""MXFP8 and NVFP4 through torch's products: tested against a stand-in, as no machine at hand has the formats."""

import logging
import re
from functools import partial

import pytest
import torch
from torch import Tensor

from moefold.config.sections.run import RunConfig
from moefold.ops.expert_ops import GatheredRows
from moefold.ops.quantization.emulated import EmulatedExpertOps, EmulatedLinear
from moefold.ops.quantization.formats import QUANT_FORMATS, round_to_e2m1
from moefold.ops.quantization.scaled_mm import ScaledMMLinear, pack_e2m1, scaled_mm_unsupported_reason, swizzle_scales
from moefold.parallel.kernels.low_precision import MIN_MX_CAPABILITY, tensor_core_unsupported_reason, verified_kernels
from tests.ops.quantization.scaled_mm_stand_in import E2M1, offset, row_major, scaled_mm

NAMES = ("mxfp8", "nvfp4")
CPU = torch.device("cpu")


def _matrix(rows: int, columns: int) -> Tensor:
    """Blocks of very different size."""
    generator = torch.Generator().manual_seed(rows)
    sizes = torch.logspace(-2, 2, rows)[:, None] * torch.logspace(1, -1, columns)
    return torch.randn(rows, columns, generator=generator) * sizes


def _assert_close(found: Tensor, expected: Tensor) -> None:
    """But for the order of sums in float32, relative to the largest value."""
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6 * float(expected.abs().max()))


def test_every_scale_lies_where_it_is_documented():
    scales = torch.arange(384 * 12, dtype=torch.int32).view(384, 12)
    laid = swizzle_scales(scales)
    assert all(laid[offset(row, column, 12)] == scales[row, column] for row in range(384) for column in range(12))
    # Two worked by hand: the 2nd group of 32 rows begins 4 behind the first, the 2nd tile of columns 512.
    assert laid[4] == scales[32, 0]
    assert laid[512] == scales[0, 4]


def test_e2m1_is_stored_in_halves_of_bytes():
    values = torch.tensor([[*E2M1, *(-value for value in E2M1)]])
    stored = pack_e2m1(values).view(torch.uint8).flatten().tolist()
    assert stored == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert torch.equal(round_to_e2m1(values), values)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", [(5, 40, 50), (130, 300, 33), (1, 16, 1)])
def test_products_equal_the_simulation(name, sizes):
    num_rows, depth, width = sizes
    x, w, grad = _matrix(num_rows, depth), _matrix(width, depth), _matrix(num_rows, width)
    simulated, scaled = EmulatedLinear(QUANT_FORMATS[name]), ScaledMMLinear(QUANT_FORMATS[name], scaled_mm)
    for call, arguments in (("forward", (x, w)), ("input_gradient", (grad, w)), ("weight_gradient", (grad, x))):
        _assert_close(getattr(scaled, call)(*arguments), getattr(simulated, call)(*arguments))


@pytest.mark.parametrize("name", NAMES)
def test_experts_without_rows_have_no_gradient(name):
    offsets = torch.tensor([0, 9], dtype=torch.int32)
    x, grad, w = _matrix(9, 20), _matrix(9, 12), torch.stack((_matrix(20, 12), _matrix(20, 12)))
    kernels, plain = (
        EmulatedExpertOps(products)
        for products in (ScaledMMLinear(QUANT_FORMATS[name], scaled_mm), EmulatedLinear(QUANT_FORMATS[name]))
    )
    _assert_close(kernels.grouped_gemm(GatheredRows(x), w, offsets), plain.grouped_gemm(GatheredRows(x), w, offsets))
    found = kernels.weight_gradient(GatheredRows(x), GatheredRows(grad), offsets)
    _assert_close(found, plain.weight_gradient(GatheredRows(x), GatheredRows(grad), offsets))
    assert torch.equal(found[0], torch.zeros(20, 12))


@pytest.mark.parametrize("name", NAMES)
def test_torch_takes_the_call(name):
    """On tensors without values: its signature, names and types, as far as torch checks them there."""
    y = ScaledMMLinear(QUANT_FORMATS[name]).forward(
        torch.empty(70, 40, device="meta"), torch.empty(9, 40, device="meta")
    )
    assert (y.shape, y.dtype) == ((70, 9), torch.float32)


def _fails(*arguments: object, **options: object) -> Tensor:
    raise NotImplementedError("no such unit\nand more")


def _no_number(*arguments: object, **options: object) -> Tensor:
    return scaled_mm(*arguments, **options).fill_(torch.nan)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("multiply", "reason"),
    [
        (partial(scaled_mm, layout=row_major), "forward is .* of its largest value away from the emulation"),
        (_no_number, "forward is nan of its largest value away"),
        (_fails, "forward: NotImplementedError: no such unit$"),
    ],
    ids=["another layout", "nan", "not there"],
)
def test_a_device_that_computes_something_else_simulates_and_says_so(name, multiply, reason, caplog):
    products = ScaledMMLinear(QUANT_FORMATS[name], multiply)
    with caplog.at_level(logging.WARNING):
        kernels = verified_kernels(products, CPU, torch.bfloat16)
    assert type(kernels.linear_backend) is EmulatedLinear
    assert kernels.message.startswith(f"train.precision={name!r}: simulated")
    (record,) = caplog.records
    assert record.getMessage().startswith(f"train.precision={name!r} is simulated on cpu: ")
    assert re.search(reason, record.getMessage())


@pytest.mark.parametrize("name", NAMES)
def test_a_device_that_computes_rightly_is_used(name):
    products = ScaledMMLinear(QUANT_FORMATS[name], scaled_mm)
    assert all(
        scaled_mm_unsupported_reason(products, products.quant_format, CPU, dtype) == ""
        for dtype in (torch.bfloat16, torch.float32)
    )
    kernels = verified_kernels(products, CPU, torch.bfloat16)
    assert kernels.linear_backend is products
    assert "on the tensor cores" in kernels.message


def test_only_devices_that_have_the_units_are_tried(monkeypatch):
    gpu, plain, wide = torch.device("cuda"), RunConfig(kernels="plain"), RunConfig(dtype="float64")
    for capability, fault in (((9, 0), "the GPU has no tensor cores for it"), ((10, 0), ""), ((12, 0), "")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert tensor_core_unsupported_reason(RunConfig(dtype="bfloat16"), gpu, MIN_MX_CAPABILITY) == fault
    assert tensor_core_unsupported_reason(plain, gpu, MIN_MX_CAPABILITY) == "run.kernels='plain'"
    assert tensor_core_unsupported_reason(wide, gpu, MIN_MX_CAPABILITY).startswith("run.dtype='float64'")
    assert tensor_core_unsupported_reason(RunConfig(), CPU, MIN_MX_CAPABILITY) == "cpu has no tensor cores for it"
