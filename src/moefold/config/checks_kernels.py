"""Rules on kernels and on the precision of matrix products."""

import importlib.util
from collections.abc import Iterator

from moefold.config.schema import Config, RunConfig
from moefold.errors import ConfigError


def validate_kernels(cfg: Config) -> Iterator[str]:
    """The kernels know the type."""
    name = cfg.run.kernels
    if name not in ("triton", "c"):
        return
    if cfg.run.dtype == "float64":
        does = "sums" if name == "triton" else "computes"
        yield (
            f"run.kernels={name!r} {does} in float32, which run.dtype='float64' is beyond; set run.kernels to 'auto' "
            "or 'plain', or run.dtype to 'bfloat16' or 'float32'"
        )
    if cfg.train.precision != "dtype":
        has = "matrix products" if name == "triton" else "gates between its products"
        yield (
            f"train.precision={cfg.train.precision!r} has {has} of its own, which run.kernels={name!r} would "
            "replace; leave run.kernels out"
        )


def triton_unsupported_reason(run: RunConfig, device_type: str) -> str:
    """Why Triton cannot compute there; empty if it can."""
    if run.dtype == "float64":
        return "run.dtype='float64' is beyond its float32 sums"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (pip install -e '.[gpu]')"
    if device_type == "cuda":
        return ""
    import triton

    # On a CPU kernels run in Triton's interpreter alone: to be tested, hundreds of times slower than plain operations.
    return "" if triton.knobs.runtime.interpret else f"Triton has no compiler for device {device_type!r}"


def check_kernel_device(cfg: Config, device_type: str) -> None:
    """What the recipe names can compute on the ranks' devices.

    Raises:
        ConfigError: it cannot.
    """
    if cfg.run.kernels == "triton" and (fault := triton_unsupported_reason(cfg.run, device_type)):
        raise ConfigError(f"run.kernels='triton' cannot run: {fault}; set run.kernels to 'auto' or 'plain'")
    if cfg.run.kernels == "c" and device_type != "cpu":
        raise ConfigError(
            f"run.kernels='c' cannot run: it is for CPUs, and the device is {device_type!r}; set run.kernels to 'auto' "
            "or run.device to 'cpu'"
        )


KERNEL_RULES = (validate_kernels,)
