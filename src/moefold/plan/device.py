"""A GPU and the links around it, as numbers: read from TOML, one file for each device in `devices/` beside this file.

The numbers are physical and belong to the device: the same for every model, mapping and row of a table. Where one was
fitted, the file of the device says on what.
"""

import tomllib
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from moefold.config.keys import nearest
from moefold.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One level of the network: what `gpus` neighbouring ranks have between them."""

    level: str
    """nvlink, rail, spine or any other name."""
    gpus: int
    """Ranks that this level connects; 0: all that there are."""
    bytes_per_s: float
    """One way for each GPU."""
    latency_s: float
    """Of one message."""
    fraction: float
    """Part of `bytes_per_s` that large messages reach."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One GPU: peaks as the vendor prints them, and the part of each that kernels reach."""

    name: str
    memory_gib: float
    """What a process can allocate, the driver's share taken off."""
    hbm_bytes_per_s: float
    hbm_fraction: float
    """Part of it that passes over memory reach (norms, activations, permutation, optimizer)."""
    multiprocessors: int
    """A product runs in waves of so many tiles."""
    tile_rows: int
    tile_columns: int
    """Output tile of one multiprocessor."""
    half_depth: float
    """Inner size of a product at which a tile runs at half its speed: prologue and epilogue over main loop."""
    peak_flops: dict[str, float]
    """Peak operations a second by precision, dense; what is missing runs as bf16."""
    gemm_fraction: dict[str, float]
    """Part of the peak that large products reach in training, under the power limit."""
    grouped_fraction: float
    """Speed of a grouped product over that of a single one of the same size."""
    quantize_passes: dict[str, float]
    """Bytes that casting moves for each element of an operand below 16 bits: reads, both layouts, scales."""
    attention_forward_flops: float
    attention_backward_flops: float
    """Fused attention over long sequences, operations of the causal half."""
    attention_forward_half: float
    attention_backward_half: float
    """Sequence length at which it reaches half of that."""
    kernel_gap_s: float
    """From the end of one kernel to the start of the next, where the host is ahead."""
    host_launch_s: float
    """Host time for one kernel outside a CUDA graph: what a layer of many small kernels waits for."""
    sync_s: float
    """Idle time of the device where the host waits for a number of its: until the next kernels are launched."""
    host_bytes_per_s: float
    """To and from host memory, for offloading."""
    links: tuple[Link, ...]
    """From the fastest and smallest level to the slowest and largest."""

    @property
    def memory_bytes(self) -> float:
        """`memory_gib` in bytes."""
        return self.memory_gib * GIB

    @property
    def domain(self) -> int:
        """Ranks of the innermost link, an NVLink domain."""
        return self.links[0].gpus

    def peak(self, precision: str) -> float:
        """Peak operations a second; those of bf16 where the device has no faster unit for a precision."""
        return self.peak_flops.get(precision, self.peak_flops["bf16"])


def device_names() -> tuple[str, ...]:
    """All devices that come along, by name."""
    return tuple(sorted(item.name.removesuffix(".toml") for item in _folder().iterdir() if item.name.endswith(".toml")))


@lru_cache(maxsize=32)
def load_device(name_or_path: str) -> Device:
    """A device by name, or from a TOML file with the keys of those in `devices/`.

    A file may start from a known device with `base = "h100"` and name only what differs.

    Raises:
        ConfigError: there is no such device or file, or a key of the file is unknown, missing or of the wrong type.
    """
    if name_or_path.endswith(".toml"):
        path = Path(name_or_path)
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--gpu {name_or_path}: cannot be read ({error.strerror or error})") from None
        return _device_of(text, name_or_path)
    name = name_or_path.lower()
    if name not in device_names():
        guess = nearest(name, device_names(), cutoff=0.5)
        hint = f"did you mean {guess!r}? The" if guess else "the"
        raise ConfigError(
            f"--gpu {name_or_path!r} is unknown; {hint} devices are {', '.join(device_names())}, or name a FILE.toml"
        )
    return _device_of((_folder() / f"{name}.toml").read_text(encoding="utf-8"), name)


def _folder() -> Any:
    return files("moefold.plan") / "devices"


def _device_of(text: str, where: str) -> Device:
    tree = _tree_of(text, where)
    known = {f.name for f in fields(Device)}
    for key in tree:
        if key not in known:
            guess = nearest(key, known, cutoff=0.5)
            raise ConfigError(
                f"{where}: unknown key {key!r}; " + (f"did you mean {guess!r}?" if guess else _all(known))
            )
    lacking = [f.name for f in fields(Device) if f.name not in tree and f.default is MISSING]
    if lacking:
        raise ConfigError(
            f"{where}: {', '.join(lacking)} missing; give them, or start from a device with base = 'h100'"
        )
    for f in fields(Device):
        tree[f.name] = _checked(where, f.name, tree[f.name])
    return Device(**tree)


def _tree_of(text: str, where: str) -> dict[str, Any]:
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: not TOML: {error}") from None
    base = tree.pop("base", "")
    if not base:
        return tree
    if base not in device_names():
        raise ConfigError(f"{where}: base={base!r} is unknown; the devices are {', '.join(device_names())}")
    below = _tree_of((_folder() / f"{base}.toml").read_text(encoding="utf-8"), base)
    return {
        key: value | tree[key] if isinstance(value, dict) and isinstance(tree.get(key), dict) else tree.get(key, value)
        for key, value in (below | {key: tree[key] for key in tree if key not in below}).items()
    }


_TABLES = ("peak_flops", "gemm_fraction", "quantize_passes")


def _checked(where: str, key: str, value: Any) -> Any:
    if key == "name":
        if not isinstance(value, str):
            raise ConfigError(f"{where}: name={value!r} must be text")
        return value
    if key == "links":
        return _links(where, value)
    if key in _TABLES:
        if not isinstance(value, dict) or "bf16" not in value and key != "quantize_passes":
            raise ConfigError(f"{where}: [{key}] must be a table of numbers by precision with at least bf16")
        return {precision: _number(where, f"{key}.{precision}", number) for precision, number in value.items()}
    number = _number(where, key, value)
    return int(number) if key in ("multiprocessors", "tile_rows", "tile_columns") else number


def _links(where: str, value: Any) -> tuple[Link, ...]:
    known = {f.name for f in fields(Link)}
    if not isinstance(value, list) or not value or any(not isinstance(row, dict) or set(row) != known for row in value):
        raise ConfigError(f"{where}: links must be a list of [[links]] tables with {', '.join(sorted(known))}")
    links = tuple(
        Link(
            level=str(row["level"]),
            gpus=int(_number(where, "links.gpus", row["gpus"], least=0)),
            **{key: _number(where, f"links.{key}", row[key]) for key in ("bytes_per_s", "latency_s", "fraction")},
        )
        for row in value
    )
    if any(link.gpus == 0 for link in links[:-1]) or links[-1].gpus != 0:
        raise ConfigError(f"{where}: the last of links connects all ranks (gpus = 0), and no other one does")
    return links


def _number(where: str, key: str, value: Any, least: float = 1e-12) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < float("inf"):
        raise ConfigError(f"{where}: {key}={value!r} must be a number above 0")
    return float(value)


def _all(known: set[str]) -> str:
    return f"the keys are {', '.join(sorted(known))}"
