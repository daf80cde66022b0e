"""Products, by hand and against measurements."""

from dataclasses import replace

import pytest

from moefold.cost.hardware import load_device
from moefold.errors import ConfigError
from moefold.planner.cost_model.gemm import GemmCost
from moefold.planner.cost_model.workload import TrainingWorkload

WORK = TrainingWorkload(seq_len=4096, global_batch_size=8)


def products(gpu="h100", precision="bf16", **options):
    return GemmCost(
        load_device(gpu), TrainingWorkload(seq_len=4096, global_batch_size=8, precision=precision, **options)
    )


def test_a_large_product_runs_as_fast_as_it_was_measured():
    """published/README.md: 790 TFLOP/s on an H200 for 8192^3, cold. Training holds a little less."""
    seconds = products("h200").matmul_s(8192, 8192, 8192)
    assert 2 * 8192**3 / seconds / 1e12 == pytest.approx(790, rel=0.1)


@pytest.mark.parametrize(("dtype", "size", "flops"), [("float32", 4, 6.7e13), ("float64", 8, 3e13)])
def test_wide_products_have_their_own_rate_and_bytes(dtype, size, flops):
    device = load_device("h100")
    device = replace(device, wide_flops=device.wide_flops | {"float64": 3e13})
    wide, narrow = (GemmCost(device, replace(WORK, dtype=name)) for name in (dtype, "bfloat16"))
    large = (16384, 16384, 16384)
    assert wide.matmul_s(*large) == pytest.approx(narrow.matmul_s(*large) * 989.5e12 / flops)
    # Where memory is slow they wait for their bytes.
    device = replace(device, hbm_bytes_per_s=1e6)
    wide, narrow = (GemmCost(device, replace(WORK, dtype=name)) for name in (dtype, "bfloat16"))
    assert wide.matmul_s(1e6, 1, 1) == pytest.approx(size / 2 * narrow.matmul_s(1e6, 1, 1))
    moved = size * 1e6 + max(8, 2 * size)
    assert wide.linear_s(5e5, 1, 1)[2] == pytest.approx(moved / narrow.bytes_per_s, rel=1e-5)
    # Below 16 bits the precision decides which units compute, whatever the type of the activations is.
    assert products(precision="fp8", dtype=dtype).flops_per_s == products(precision="fp8").flops_per_s


def test_a_type_without_a_rate_is_refused():
    with pytest.raises(
        ConfigError, match=r"h100 has no rate of GEMMs in float64; give it .* as \[wide_flops\] float64"
    ):
        products(dtype="float64")


def test_a_product_is_never_faster_than_its_operations_or_its_bytes():
    one = products()
    for rows, columns, depth in ((16, 4096, 4096), (4096, 128, 128), (4096, 4096, 64), (1, 1, 1)):
        seconds = one.matmul_s(rows, columns, depth)
        assert seconds >= 2 * rows * columns * depth / 989.5e12
        assert seconds >= 2 * (rows * depth + depth * columns + rows * columns) / 3.35e12


def test_no_rows_take_no_time():
    assert products().matmul_s(0, 4096, 4096) == 0.0
    assert products().linear_s(0, 4096, 4096)[2] == 0.0


def test_many_small_experts_are_slower_than_one_product():
    one = products()
    whole = one.matmul_s(16384, 1536, 2048)
    apart = one.matmul_s(16384, 1536, 2048, groups=32)
    fused = one.matmul_s(16384, 1536, 2048, groups=32, fused=True)
    assert whole < fused < apart


def test_weight_gradients_write_float32():
    one = products()
    thin = one.linear_s(128, 6144, 16384, groups=8)[2]
    assert thin >= 8 * 8 * 16384 * 6144 / 3.35e12


def test_casting_costs_passes_only_below_sixteen_bits():
    assert products().quantize_s(1e9) == 0.0
    assert products(precision="fp8").quantize_s(1e9) > 0.0
    with pytest.raises(ConfigError, match="h100 has matrix units for bf16, fp8, fp8-blockwise, not for mxfp8"):
        products(precision="mxfp8")
    assert products("gb200", "mxfp8").matmul_s(8192, 8192, 8192) < products("gb200").matmul_s(8192, 8192, 8192)
