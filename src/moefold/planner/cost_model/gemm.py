"""Time of matrix products from their shape: tiles, waves, depth and bytes. Torch-free.

The precision of the products, of the planner's name and the recipe's, and whether a device has it. Torch-free.
"""

from dataclasses import replace
from math import ceil
from typing import Literal

from moefold.config.schema import Config
from moefold.cost.hardware import Device
from moefold.errors import ConfigError
from moefold.planner.cost_model.workload import TrainingWorkload

WGRAD_ACCUMULATION_BYTES = 8
"""A weight gradient is added to float32: read and written, 4 bytes each."""


UNFILLED_WAVE_FRACTION = 0.351
"""Part of the last waves of separate kernels that the next kernel, on another stream, does not fill."""


class GemmCost:
    """Prices products on one device in one precision.

    Raises:
        ConfigError: the device has no units for it, or nobody has said how fast it is.
    """

    def __init__(self, device: Device, workload: TrainingWorkload) -> None:
        precision = workload.precision
        if precision not in device.peak_flops:
            raise ConfigError(f"{device.name} has matrix units for {', '.join(device.peak_flops)}, not for {precision}")
        self.device = device
        self.peak_fraction = device.gemm_fraction.get(precision, device.gemm_fraction["bf16"])
        slowdown = 1.0 if workload.is_low_precision else device.dtype_slowdown(workload.dtype)
        self.flops_per_s = device.peak(precision) * self.peak_fraction / slowdown
        self.bytes_per_s = device.hbm_bytes_per_s * device.hbm_fraction
        self.value_bytes = workload.value_bytes
        self.element_bytes = {"bf16": float(self.value_bytes), "nvfp4": 0.5625}.get(precision, 1.0)
        self.wgrad_bytes = max(WGRAD_ACCUMULATION_BYTES, 2 * self.value_bytes)
        self.quantize_bytes = 0.0 if precision == "bf16" else device.quantize_passes.get(precision, 4.0)
        self.fuses_grouped_gemm = workload.fused_experts and precision == "mxfp8"

    def matmul_s(self, rows: float, columns: int, depth: float, *, groups: int = 1, fused: bool = False) -> float:
        """One product of [rows, depth] and [depth, columns], or `groups` of them in one kernel, each of rows/groups.

        Tiles of a wave that is not full are counted as half a wave, what a product meets on average.
        """
        moved = self.element_bytes * (rows * depth + groups * depth * columns) + self.value_bytes * rows * columns
        return self._tiled_s((rows / groups, columns, depth), groups, moved, fused=fused)

    def wgrad_s(self, rows: float, columns: int, depth: int, *, groups: int = 1, fused: bool = False) -> float:
        """The gradient of a weight of [depth, columns] from `rows` tokens, added to its float32 sum."""
        moved = self.element_bytes * rows * (depth + columns) + self.wgrad_bytes * groups * depth * columns
        return self._tiled_s((depth, columns, rows / groups), groups, moved, fused=fused)

    def _tiled_s(self, sizes: tuple[float, float, float], groups: int, moved_bytes: float, *, fused: bool) -> float:
        """Products of [rows, inner] and [inner, columns]: whole tiles in waves, or the bytes if they take longer."""
        device = self.device
        (rows, columns, inner) = sizes
        if min(sizes) <= 0:
            return 0.0
        tiles = groups * ceil(rows / device.tile_rows) * ceil(columns / device.tile_columns)
        work = 2.0 * device.tile_rows * device.tile_columns * (inner + device.half_depth) * tiles
        rate = self.flops_per_s * device.grouped_fraction if groups > 1 else self.flops_per_s
        return max(work * self._wave_factor(tiles, 1 if fused else groups) / rate, moved_bytes / self.bytes_per_s)

    def _wave_factor(self, tiles: int, groups: int) -> float:
        """How much longer than full waves a product takes: the last wave is half empty on average.

        Experts' products that are kernels of their own each end with such a wave, of which streams fill a part.
        """
        kernels = 1.0 if groups == 1 else max(1.0, groups * UNFILLED_WAVE_FRACTION)
        return 1.0 + 0.5 * self.device.multiprocessors * kernels / tiles

    def quantize_s(self, elements: float, *, fused: bool = False) -> float:
        """Casting operands below 16 bits; nothing where the products do it themselves."""
        return 0.0 if fused else elements * self.quantize_bytes / self.bytes_per_s

    def memory_bound_s(self, moved_bytes: float) -> float:
        """A kernel that only moves bytes."""
        return moved_bytes / self.bytes_per_s


BF16 = "bf16"
RecipePrecision = Literal["dtype", "fp8-blockwise", "mxfp8", "nvfp4"]
RECIPE_NAMES: dict[str, RecipePrecision] = {
    BF16: "dtype",
    "fp8-blockwise": "fp8-blockwise",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}
"""`train.precision` by the planner's name. The runtime has no fp8 with one scale for a tensor."""
PLANNER_NAMES: dict[str, str] = {name: priced for priced, name in RECIPE_NAMES.items()}


def resolve_precision(cfg: Config, given: str | None, device: Device) -> tuple[Config, str]:
    """The recipe with the precision that is priced, and the planner's name of it.

    Args:
        cfg: a recipe.
        given: --precision, which wins; None: that of the recipe.
        device: where it runs.

    Raises:
        ConfigError: the runtime would simulate it there, which has no price, or nobody has said how fast the compute
            type is there.
    """
    precision = PLANNER_NAMES[cfg.train.precision] if given is None else given
    if given == BF16 and cfg.run.dtype != "bfloat16":
        raise ConfigError(
            f"--precision {BF16} and run.dtype={cfg.run.dtype!r} differ: a recipe's products are of its compute type; "
            "leave --precision out, or choose run.dtype='bfloat16'"
        )
    if lack := dtype_unsupported_reason(cfg, device):
        raise ConfigError(
            f"run.dtype={cfg.run.dtype!r} has no price here, as {lack}; choose run.dtype='bfloat16', or a FILE.toml "
            f"with base = '{device.name}' and a rate for {cfg.run.dtype} in [wide_flops]"
        )
    fault = matrix_unit_unsupported_reason(cfg, precision, device)
    if fault:
        said = f"train.precision={cfg.train.precision!r}" if given is None else f"--precision {given}"
        raise ConfigError(
            f"{said} has no price here, as {fault}: moefold would simulate it, at the speed of float32 at best; "
            f"choose {format_precision_options(cfg, device)}"
        )
    # Rules that read the precision see the one that is priced; a recipe of fp8 is refused where it would be written.
    narrow = RECIPE_NAMES.get(precision, RECIPE_NAMES[BF16])
    return replace(cfg, train=replace(cfg.train, precision=narrow)), precision


def matrix_unit_unsupported_reason(cfg: Config, precision: str, device: Device) -> str:
    """Why products of a precision do not run on the matrix units of a device; empty if they do.

    The runtime's reasons, in `parallel/select_ops.py`, with the device's table in place of its compute capability.
    """
    if precision == BF16:
        return ""
    if precision not in device.peak_flops:
        return f"{device.name} has matrix units for {', '.join(device.peak_flops)} alone"
    if cfg.run.kernels == "plain":
        return "run.kernels='plain' leaves the matrix units alone"
    if cfg.run.dtype == "float64":
        return "run.dtype='float64' is beyond the sums of the matrix units"
    return ""


def dtype_unsupported_reason(cfg: Config, device: Device) -> str:
    """Why the compute type has no price on a device; empty if it has one."""
    if cfg.run.dtype == "bfloat16" or cfg.run.dtype in device.wide_flops:
        return ""
    return f"nothing is known of {device.name} in {cfg.run.dtype}"


def format_precision_options(cfg: Config, device: Device) -> str:
    """The precisions that a recipe can have on a device, as options."""
    names = [name for name in device.peak_flops if not matrix_unit_unsupported_reason(cfg, name, device)]
    return " or ".join(f"--precision {name}" for name in names)


def check_recipe_precision(precision: str, device: Device) -> None:
    """A recipe can say the precision that is priced.

    Raises:
        ConfigError: it cannot.
    """
    if precision not in RECIPE_NAMES:
        others = ", ".join(name for name in device.peak_flops if name in RECIPE_NAMES)
        raise ConfigError(
            f"--precision {precision} with --recipe: train.precision has no {precision} with one scale for a tensor; "
            f"choose one of {others}, or leave --recipe out"
        )
