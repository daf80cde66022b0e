"""The precision of the products, of the planner's name and the recipe's, and whether a device has it. Torch-free."""

from dataclasses import replace
from typing import Literal

from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.plan.device import Device

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

    The runtime's reasons, in `kernels/select.py`, with the device's table in place of its compute capability.
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
