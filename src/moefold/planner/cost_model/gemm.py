"""GEMM cost model from the shape: tiles, waves, depth and bytes, and the precisions that a device supports.

The planner's names of the precisions differ from the names in a recipe (`RECIPE_NAMES`).
"""

from dataclasses import replace
from typing import Any, Literal

import numpy as np

from moefold.config.schema import Config
from moefold.config.sections.run import RunConfig
from moefold.cost.hardware import Device
from moefold.errors import ConfigError
from moefold.message_text import Setting
from moefold.planner.cost_model.collective import larger
from moefold.planner.cost_model.workload import TrainingWorkload

WGRAD_ACCUMULATION_BYTES = 8
"""Memory traffic of a weight gradient that is added to a float32 sum: read and written, 4 bytes each."""


LinearTimes = tuple[Any, Any, Any]
"""Seconds of a linear layer: forward, gradient of its input, and gradient of its weight, numbers or arrays."""


def sum_times(*times: LinearTimes) -> LinearTimes:
    """Return the sums of the seconds of several layers."""
    forward_s, backward_s, weights_s = map(sum, zip(*times, strict=True))
    return forward_s, backward_s, weights_s


class GemmCost:
    """Cost model of GEMMs on one device in one precision. Sizes are numbers, or arrays of many mappings.

    Raises:
        ConfigError: the device has no matrix units for the precision, or no known rate for the compute type.
    """

    def __init__(self, device: Device, workload: TrainingWorkload) -> None:
        precision = workload.precision
        if precision not in device.peak_flops:
            raise ConfigError(f"{device.name} has matrix units for {', '.join(device.peak_flops)}, not for {precision}")
        self.device = device
        self.workload = workload
        self.peak_fraction = device.gemm_fraction.get(precision, device.gemm_fraction["bf16"])
        slowdown = 1.0 if workload.is_low_precision else device.dtype_slowdown(workload.dtype)
        self.flops_per_s = device.peak(precision) * self.peak_fraction / slowdown
        self.bytes_per_s = device.hbm_bytes_per_s * device.hbm_fraction
        self.value_bytes = workload.value_bytes
        self.element_bytes = {"bf16": float(self.value_bytes), "nvfp4": 0.5625}.get(precision, 1.0)
        self.wgrad_bytes = max(WGRAD_ACCUMULATION_BYTES, 2 * self.value_bytes)
        self.quantize_bytes = 0.0 if precision == "bf16" else device.quantize_passes.get(precision, 4.0)
        self.fuses_grouped_gemm = workload.fused_experts and precision == "mxfp8"

    def matmul_s(self, rows: Any, columns: Any, depth: float, *, groups: int = 1, fused: bool = False) -> Any:
        """Return the seconds of a GEMM of [rows, depth] and [depth, columns], or of a grouped GEMM.

        With `groups` each group has rows/groups rows. A partly filled wave counts as half a wave, the average.
        """
        moved = self.element_bytes * (rows * depth + groups * depth * columns) + self.value_bytes * rows * columns
        return self._tiled_s((rows / groups, columns, depth), groups, moved, fused=fused)

    def linear_s(self, rows: Any, inputs: Any, outputs: Any, *, groups: int = 1, fused: bool = False) -> LinearTimes:
        """Return the seconds of the three GEMMs of a linear layer, or of `groups` with a part of the rows each.

        The weight gradient is added to a float32 sum.
        """
        moved = self.element_bytes * rows * (inputs + outputs) + self.wgrad_bytes * groups * inputs * outputs
        return (
            self.matmul_s(rows, outputs, inputs, groups=groups, fused=fused),
            self.matmul_s(rows, inputs, outputs, groups=groups, fused=fused),
            self._tiled_s((inputs, outputs, rows / groups), groups, moved, fused=fused),
        )

    def _tiled_s(self, sizes: tuple[Any, Any, Any], groups: int, moved_bytes: Any, *, fused: bool) -> Any:
        """Return the seconds of GEMMs [rows, inner] x [inner, columns]: tiles in waves, or memory traffic if slower."""
        device = self.device
        (rows, columns, inner) = sizes
        # Arrays have no empty GEMMs.
        if any(not isinstance(size, np.ndarray) and size <= 0 for size in sizes):
            return 0.0
        tiles = groups * _round_up(rows / device.tile_rows) * _round_up(columns / device.tile_columns)
        work = 2.0 * device.tile_rows * device.tile_columns * (inner + device.half_depth) * tiles
        rate = self.flops_per_s * device.grouped_fraction if groups > 1 else self.flops_per_s
        # The last wave is half empty on average. Expert GEMMs in separate kernels each end with such a wave.
        waves = 1.0 + 0.5 * device.multiprocessors * (1 if fused else groups) / tiles
        return larger(work * waves / rate, moved_bytes / self.bytes_per_s)

    def quantize_s(self, elements: Any) -> Any:
        """Return the seconds of casting operands below 16 bits."""
        return elements * self.quantize_bytes / self.bytes_per_s

    def memory_bound_s(self, moved_bytes: Any) -> Any:
        """Return the seconds of a kernel that only moves bytes."""
        return moved_bytes / self.bytes_per_s


def _round_up(value: Any) -> Any:
    """Return the least whole number that is not below a number, or below the numbers of an array."""
    return -(-value // 1.0)


BF16 = "bf16"
RecipePrecision = Literal["dtype", "fp8-blockwise", "mxfp8", "nvfp4"]
RECIPE_NAMES: dict[str, RecipePrecision] = {
    BF16: "dtype",
    "fp8-blockwise": "fp8-blockwise",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}
"""`train.precision` by the planner's name. The runtime does not have fp8 with one scale for a tensor."""
PLANNER_NAMES: dict[str, str] = {name: priced for priced, name in RECIPE_NAMES.items()}


def resolve_precision(cfg: Config, given: str | None, device: Device) -> tuple[Config, str]:
    """Return the recipe with the precision to price, and the planner's name of the precision.

    Args:
        given: --precision, which takes precedence. None: the precision of the recipe.

    Raises:
        ConfigError: the runtime would emulate the precision there, which has no price, or the rate of the compute type
            is unknown there.
    """
    precision = PLANNER_NAMES[cfg.train.precision] if given is None else given
    if given == BF16 and cfg.run.dtype != "bfloat16":
        raise ConfigError(
            f"{Setting('--precision', BF16):s} and run.dtype={cfg.run.dtype!r} differ: a recipe's products are of its "
            f"compute type; leave {Setting('--precision')} out, or choose run.dtype='bfloat16'"
        )
    if dtype_reason := dtype_unsupported_reason(cfg.run, device):
        raise ConfigError(
            f"run.dtype={cfg.run.dtype!r} has no price here, as {dtype_reason}; choose run.dtype='bfloat16', or a "
            f"FILE.toml with base = '{device.name}' and a rate for {cfg.run.dtype} in [wide_flops]"
        )
    precision_reason = matrix_unit_unsupported_reason(cfg.run, precision, device)
    if precision_reason:
        setting = f"train.precision={cfg.train.precision!r}" if given is None else f"{Setting('--precision', given):s}"
        names = (name for name in device.peak_flops if not matrix_unit_unsupported_reason(cfg.run, name, device))
        options = " or ".join(f"{Setting('--precision', name):s}" for name in names)
        raise ConfigError(
            f"{setting} has no price here, as {precision_reason}: moefold would simulate it, at the speed of float32 "
            f"at best; choose {options}"
        )
    # Rules that read the precision see the priced one; `check_recipe_precision` rejects a recipe of fp8.
    recipe_precision = RECIPE_NAMES.get(precision, RECIPE_NAMES[BF16])
    return replace(cfg, train=replace(cfg.train, precision=recipe_precision)), precision


def matrix_unit_unsupported_reason(run: RunConfig, precision: str, device: Device) -> str:
    """Return why GEMMs of a precision do not run on the matrix units of a device, or "" if they do.

    The reasons are the same as in `parallel/kernels/select.py`, with the device's table in place of its compute
    capability.
    """
    if precision == BF16:
        return ""
    if precision not in device.peak_flops:
        return f"{device.name} has matrix units for {', '.join(device.peak_flops)} alone"
    if run.kernels == "plain":
        return "run.kernels='plain' does not use the matrix units"
    if run.dtype == "float64":
        return "run.dtype='float64' is wider than the accumulators of the matrix units"
    return ""


def dtype_unsupported_reason(run: RunConfig, device: Device) -> str:
    """Return why the compute type has no price on a device, or "" if it has one."""
    if run.dtype == "bfloat16" or run.dtype in device.wide_flops:
        return ""
    return f"nothing is known of {device.name} in {run.dtype}"


def check_recipe_precision(precision: str, device: Device) -> None:
    """Check that a recipe can express the priced precision.

    Raises:
        ConfigError: it cannot.
    """
    if precision not in RECIPE_NAMES:
        others = ", ".join(name for name in device.peak_flops if name in RECIPE_NAMES)
        raise ConfigError(
            f"{Setting('--precision', precision):s} with --recipe: train.precision has no {precision} with one scale "
            f"for a tensor; choose one of {others}, or leave --recipe out"
        )
