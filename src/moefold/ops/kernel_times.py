"""Record of measured kernel times in the cache: one entry for each device and each version of the libraries."""

import logging
import math
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.nn import attention

from moefold.bounded_read import MAX_DESCRIPTION_BYTES, read_json
from moefold.cache_dir import cache_folders, entry_key, write_json_entry
from moefold.ops.autotune import Times

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
"""Version of an entry. It changes with the format, and if a candidate of the same name becomes another kernel."""
Environment = dict[str, str]


def kernel_environment(device: torch.device) -> Environment:
    """Return the GPU and the libraries, which determine the time of a kernel besides its shape."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return {
        "format": str(FORMAT_VERSION),
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": triton,
        "cudnn": str(torch.backends.cudnn.version()),
        "flash attention": attention.current_flash_attention_impl() or "torch",
    }


def read_times(environment: Environment, cache_dir: Path | None = None) -> Times:
    """Return the times recorded for an environment. A file that cannot be read is named in a warning.

    Args:
        environment: see `kernel_environment`.
        cache_dir: cache folder. None means the default folder.
    """
    for folder in cache_folders(cache_dir):
        path = folder / _name(environment)
        try:
            return _parse(read_json(path, MAX_DESCRIPTION_BYTES), environment)
        except FileNotFoundError:
            continue
        except OSError as error:
            reason = error.strerror or str(error)
        except ValueError as error:
            reason = str(error)
        logger.warning("The kernel times in %s are not used: %s; they are measured again", path, reason)
    return {}


def add_times(environment: Environment, times: Times, cache_dir: Path | None = None) -> Path | None:
    """Add times to the record of an environment. Times of the same operation and octave are replaced.

    If two processes write at once, the times of one are lost and are measured again.

    Args:
        times: octaves with a candidate that raised are left out, so that it is tried, and named, again.
        cache_dir: cache folder. None means the default folder.

    Returns:
        The file, or None if no folder can be written, after a warning.
    """
    stored = read_times(environment, cache_dir)
    for operation, by_octave in times.items():
        complete = {o: times for o, times in by_octave.items() if all(map(math.isfinite, times.values()))}
        if complete:
            stored[operation] = stored.get(operation, {}) | complete
    entry = {"environment": environment, "ms": stored}
    return write_json_entry(cache_folders(cache_dir), _name(environment), entry)


def _name(environment: Environment) -> str:
    return f"{entry_key(environment)}.kernels.json"


def _parse(content: Any, environment: Environment) -> Times:
    """Return the times of an entry.

    Raises:
        ValueError: the entry belongs to another environment, or has unknown content.
    """
    if not isinstance(content, dict) or content.keys() != {"environment", "ms"} or not isinstance(content["ms"], dict):
        raise ValueError("it is not an object of 'environment' and 'ms'")
    if content["environment"] != environment:
        raise ValueError(f"it is for {content['environment']!r}, and this is {environment!r}")
    times: Times = {}
    for operation, by_octave in content["ms"].items():
        if not isinstance(by_octave, dict):
            raise ValueError(f"{operation!r} has no times by octave")
        for octave, milliseconds in by_octave.items():
            if not octave.isdecimal() or not isinstance(milliseconds, dict) or len(milliseconds) < 2:
                raise ValueError(f"{octave!r} of {operation!r} is not an octave with the times of several candidates")
            for candidate, ms in milliseconds.items():
                if not isinstance(ms, int | float) or isinstance(ms, bool) or not 0 <= ms < math.inf:
                    raise ValueError(f"{candidate!r} of {operation!r} takes {ms!r} ms")
            times.setdefault(operation, {})[int(octave)] = {name: float(ms) for name, ms in milliseconds.items()}
    return times
