"""Hardware model of a GPU and its links, read from TOML: one file per device in `devices/`.

The numbers are physical properties of the device, the same for every model and mapping. The file of a device names the
source of every fitted number.
"""

from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict

from moefold.bounded_read import MAX_RECIPE_BYTES, read_text
from moefold.config.base.field import Bound
from moefold.config.base.typed_file import STRICT, from_table, parse_table, within
from moefold.errors import ConfigError
from moefold.message_text import Setting, closest_match
from moefold.package_table import package_text, table_names
from moefold.units import GIB

HIGH_PRECISION_DTYPES = ("float32", "float64")
HOPPER = ("h100", "h200", "h800")
GRACE_BLACKWELL = ("gb200", "gb300")
BLACKWELL = (*GRACE_BLACKWELL, "b200", "b300")
"""Names of devices by generation."""


# A smaller number would overflow as a divisor.
Positive = Annotated[float, within(Bound("must be a number above 0", lambda value: value >= 1e-12))]
REACHED = Bound(
    "must be above 0 and at most 1, the part that is reached; 0.8 is 80 %", lambda value: 1e-12 <= value <= 1
)
Share = Annotated[float, within(REACHED)]
Part = Annotated[float, within(Bound("must be a part, from 0 to 1", lambda value: 0 <= value <= 1))]
Count = Annotated[int, within(Bound("must be a whole number of at least 1", lambda value: value >= 1))]
DECIDING_CONSTANTS = {
    "host_launch_s": "host time of a counted kernel",
    "sync_s": "wait of a dropless layer",
    "exposed_zero3_fraction": "exposed collectives of ZeRO-3",
    "exposed_offload_fraction": "exposed copies of offload",
}
"""Keys of a device that decide which family of mappings wins, with a description of each."""
SOURCES = Bound(
    f"must be a table of texts, of {', '.join(DECIDING_CONSTANTS)}",
    lambda table: table.keys() <= DECIDING_CONSTANTS.keys() and all(text.strip() for text in table.values()),
)
HAS_BF16 = Bound("must be a table of numbers by precision with at least bf16", lambda table: "bf16" in table)
WIDE = Bound(
    f"must be a table of numbers by type, of {' and '.join(HIGH_PRECISION_DTYPES)}",
    lambda table: table.keys() <= set(HIGH_PRECISION_DTYPES),
)


def _check_levels(links: tuple["NetworkLink", ...]) -> tuple["NetworkLink", ...]:
    if not links or any((link.gpus == 0) != (link is links[-1]) for link in links):
        raise ValueError("must be [[links]] tables, of which the last one connects all ranks (gpus = 0), and no other")
    return links


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkLink:
    """One level of the network, which connects `gpus` consecutive ranks."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    level: str
    """Name of the level: nvlink, rail, spine, or any other."""
    gpus: Annotated[int, within(Bound("must be a whole number of at least 0 (0: all ranks)", lambda value: value >= 0))]
    """Ranks that this level connects. 0: all."""
    bytes_per_s: Positive
    """Bandwidth per GPU, one way."""
    latency_s: Positive
    """Latency of one message."""
    fraction: Share
    """Fraction of `bytes_per_s` that large messages reach."""

    @property
    def reached_bytes_per_s(self) -> float:
        """Bandwidth that large messages reach."""
        return self.bytes_per_s * self.fraction


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteLink:
    """Connection of a site to the other sites of a run."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    bytes_per_s: Positive
    """Bandwidth of all ranks of the site together, one way."""
    latency_s: Annotated[float, within(Bound("must be a number of at least 0", lambda value: value >= 0))]
    """Latency of one message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One GPU: peaks as the vendor prints them, and the fraction of each that kernels reach."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    name: str
    memory_gib: Positive
    """Memory that a process can allocate, without the driver's share."""
    hbm_bytes_per_s: Positive
    hbm_fraction: Share
    """Fraction of the memory bandwidth that memory-bound kernels reach (norms, activations, permutation, optimizer)."""
    multiprocessors: Count
    """Streaming multiprocessors: a GEMM runs in waves of this many tiles."""
    tile_rows: Count
    tile_columns: Count
    """Output tile of one multiprocessor."""
    half_depth: Positive
    """Inner dim K at which a GEMM tile runs at half its speed (prologue and epilogue over main loop)."""
    peak_flops: Annotated[dict[str, Positive], within(HAS_BF16)]
    """Peak dense FLOP/s by precision. A missing precision has no hardware units."""
    wide_flops: Annotated[dict[str, Positive], within(WIDE)] = field(default_factory=dict)
    """Peak FLOP/s of float32 GEMMs without TF32, and of float64. A missing type cannot be estimated."""
    gemm_fraction: Annotated[dict[str, Share], within(HAS_BF16)]
    """Fraction of the peak that large GEMMs reach in training under the power limit. Higher precisions have bf16's."""
    grouped_fraction: Positive
    """Speed of a grouped GEMM over the speed of a single GEMM of the same size."""
    quantize_passes: dict[str, Positive]
    """Bytes that quantisation moves per element of an operand below 16 bits: reads, both layouts, scales."""
    attention_forward_flops: Positive
    attention_backward_flops: Positive
    """FLOP/s of fused attention over long sequences, counting the causal half."""
    attention_forward_half: Positive
    attention_backward_half: Positive
    """Sequence length at which fused attention reaches half of its speed."""
    kernel_gap_s: Positive
    """Gap between the end of one kernel and the start of the next, if the host is ahead."""
    host_launch_s: Positive
    """Host time per kernel launch outside a CUDA graph: the bottleneck of a layer of many small kernels."""
    sync_s: Positive
    """Idle time of the device when the host reads a number from it, until the next kernels are launched."""
    host_bytes_per_s: Positive
    """Bandwidth to and from host memory, for offloading."""
    links: Annotated[tuple[NetworkLink, ...], AfterValidator(_check_levels)]
    """Network levels, from the fastest and smallest to the slowest and largest."""
    exposed_zero3_fraction: Part | None = None
    """Part of the collectives of ZeRO-3 that compute does not hide. None: `EXPOSED_ZERO3_FRACTION`."""
    exposed_offload_fraction: Part | None = None
    """Part of the copies of an offloaded layer that compute does not hide. None: `EXPOSED_OFFLOAD_FRACTION`."""
    sources: Annotated[dict[str, str], within(SOURCES)] = field(default_factory=dict)
    """Source of each measured key of `DECIDING_CONSTANTS` on this device. The other keys are unmeasured."""
    site_link: SiteLink | None = None
    """Connection to other sites. None: not given. No device file has one."""

    @property
    def memory_bytes(self) -> float:
        """Allocatable memory, `memory_gib`, in bytes."""
        return self.memory_gib * GIB

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """Return the keys of `DECIDING_CONSTANTS` without a measurement on this device."""
        return tuple(key for key in DECIDING_CONSTANTS if key not in self.sources)

    def peak(self, precision: str) -> float:
        """Return the peak FLOP/s of a precision, or of bf16 if the device has no faster unit for it."""
        return self.peak_flops.get(precision, self.peak_flops["bf16"])

    def dtype_slowdown(self, dtype: str) -> float:
        """Return the duration of a GEMM in a compute type over its duration in bfloat16.

        Raises:
            ConfigError: the device's file has no rate for the type.
        """
        if dtype == "bfloat16":
            return 1.0
        if dtype not in self.wide_flops:
            raise ConfigError(
                f"{self.name} has no rate of GEMMs in {dtype}; give it in the device's file as [wide_flops] {dtype}"
            )
        return self.peak_flops["bf16"] / self.wide_flops[dtype]


@dataclass(frozen=True)
class DetectedMachine:
    """Number of ranks and their device, as detected on one rank."""

    device_type: Literal["cpu", "cuda"]
    """"cpu" or "cuda"."""
    device: str
    """Device name in the planner."""
    num_ranks: int
    """World size of the launcher, or without a launcher the number of this machine's devices."""
    is_launched: bool
    """True if a launcher started the ranks."""
    memory_gib: float
    """Memory of all ranks together. 0: use the memory of the device description."""
    host: str = ""


def device_names() -> tuple[str, ...]:
    """Return the names of all shipped devices."""
    return table_names("cost/devices")


@lru_cache(maxsize=32)
def load_device(name_or_path: str) -> Device:
    """Return a device by name, or from a TOML file with the same keys as the files in `devices/`.

    A file may start from a known device with `base = "h100"` and set only what differs.

    Raises:
        ConfigError: there is no such device or file, or a key of the file is unknown, missing or of the wrong type.
    """
    if name_or_path.endswith(".toml"):
        path = Path(name_or_path)
        try:
            text = read_text(path, MAX_RECIPE_BYTES)
        except OSError as error:
            raise ConfigError(
                f"{Setting('--gpu', name_or_path):s}: cannot be read ({error.strerror or error})"
            ) from None
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{Setting('--gpu', name_or_path):s}: not UTF-8 ({error}); save it as UTF-8 text"
            ) from None
        return _parse_device(text, name_or_path)
    name = name_or_path.lower()
    if name not in device_names():
        guess = closest_match(name, device_names(), cutoff=0.5)
        hint = f"did you mean {guess!r}? The" if guess else "the"
        raise ConfigError(
            f"{Setting('--gpu', name_or_path)} is unknown; {hint} devices are {', '.join(device_names())}, or name a "
            "FILE.toml"
        )
    return _parse_device(package_text(f"cost/devices/{name}.toml"), name)


def _parse_device(text: str, where: str) -> Device:
    tree = _read_device_table(text, where)
    device = from_table(Device, tree, where, ", or start from a device with base = 'h100'")
    _check_sources(where, device)
    return device


def _check_sources(where: str, device: Device) -> None:
    """Refuse a source without its number, and a number that only a measurement gives without its source."""
    for one in fields(Device):
        key = one.name
        value = getattr(device, key)
        if key in device.sources and value is None:
            raise ConfigError(f"{where}: sources.{key} has no number; give {key}, or leave the source out")
        if key in device.unmeasured and value is not None and one.default is None:
            raise ConfigError(f"{where}: {key}={value} has no source; say what measured it as [sources] {key} = 'TEXT'")


def _read_device_table(text: str, where: str) -> dict[str, Any]:
    tree = parse_table(text, where)
    base = tree.pop("base", "")
    if not base:
        return tree
    if base not in device_names():
        raise ConfigError(f"{where}: base={base!r} is unknown; the devices are {', '.join(device_names())}")
    base_tree = _read_device_table(package_text(f"cost/devices/{base}.toml"), base)
    return {
        key: value | tree[key] if isinstance(value, dict) and isinstance(tree.get(key), dict) else tree.get(key, value)
        for key, value in (base_tree | {key: tree[key] for key in tree if key not in base_tree}).items()
    }
