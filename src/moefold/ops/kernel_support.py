"""Support of a device and of this machine for the kernels that `run.kernels` asks for, without torch."""

import importlib.util

from moefold.config.sections.run import RunConfig
from moefold.errors import ConfigError, install_command
from moefold.message_text import Problem, Setting


def triton_unsupported_reason(run: RunConfig, device_type: str) -> str:
    """Return the reason why Triton cannot run on the device, or "" if it can."""
    if run.dtype == "float64":
        return f"{Setting('run.dtype', 'float64')} is beyond its float32 sums"
    if importlib.util.find_spec("triton") is None:
        return f"the package triton is not installed ({install_command('gpu')})"
    if device_type == "cuda":
        return ""
    import triton

    # On a CPU, kernels run only in Triton's interpreter: for tests, hundreds of times slower than plain operations.
    return "" if triton.knobs.runtime.interpret else f"Triton has no compiler for device {device_type!r}"


def check_kernel_device(run: RunConfig, device_type: str) -> None:
    """Check that the recipe's kernels run on the ranks' devices. Raise ConfigError if they do not."""
    if run.kernels == "triton" and (reason := triton_unsupported_reason(run, device_type)):
        rule = f"cannot run: {reason}"
        raise ConfigError(Problem("run.kernels", "triton", rule, f"set {Setting('run.kernels')} to 'auto' or 'plain'"))
    if run.kernels == "c" and device_type != "cpu":
        rule = f"cannot run: it is for CPUs, and the device is {device_type!r}"
        way_out = f"set {Setting('run.kernels')} to 'auto' or {Setting('run.device')} to 'cpu'"
        raise ConfigError(Problem("run.kernels", "c", rule, way_out))
