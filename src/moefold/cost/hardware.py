"""Hardware model of a GPU and its links, read from TOML: one file per device in `devices/`.

The numbers are physical properties of the device, the same for every model and mapping. The file of a device names the
source of every fitted number.
"""

import tomllib
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from moefold.bounded_read import MAX_RECIPE_BYTES, parse_toml, read_text
from moefold.config.suggestions import closest_match
from moefold.errors import ConfigError

GIB = 2**30
SPINE = "spine"
SPINE_KEYS = ("pod_gpus", "oversubscription", "latency_s")
"""Keys of [spine]: GPUs of a pod, within which the last link runs at its full bandwidth; bandwidth of their network
cards over the bandwidth of the pod's uplinks; latency of a message between pods. No device file has a spine, as
networks differ."""
SITE_LINK = "site_link"


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkLink:
    """One level of the network, which connects `gpus` consecutive ranks."""

    level: str
    """Name of the level: nvlink, rail, spine, or any other."""
    gpus: int
    """Ranks that this level connects; 0: all."""
    bytes_per_s: float
    """Bandwidth per GPU, one way."""
    latency_s: float
    """Latency of one message."""
    fraction: float
    """Fraction of `bytes_per_s` that large messages reach."""
    oversubscription: float = 0.0
    """Oversubscription of a spine's uplinks, whose traffic also passes the cards of the previous level; 0: cards of its
    own."""

    @property
    def is_uplink(self) -> bool:
        """Return whether this level joins pods, within which the previous level connects all ranks."""
        return self.oversubscription > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteLink:
    """Connection of a site to the other sites of a run."""

    bytes_per_s: float
    """Bandwidth of all ranks of the site together, one way."""
    latency_s: float
    """Latency of one message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One GPU: peaks as the vendor prints them, and the fraction of each that kernels reach."""

    name: str
    memory_gib: float
    """Memory that a process can allocate, without the driver's share."""
    hbm_bytes_per_s: float
    hbm_fraction: float
    """Fraction of the memory bandwidth that memory-bound kernels reach (norms, activations, permutation, optimizer)."""
    multiprocessors: int
    """Streaming multiprocessors: a GEMM runs in waves of this many tiles."""
    tile_rows: int
    tile_columns: int
    """Output tile of one multiprocessor."""
    half_depth: float
    """Inner dim K of a GEMM at which a tile runs at half its speed (prologue and epilogue over main loop)."""
    peak_flops: dict[str, float]
    """Peak dense FLOP/s by precision; a missing precision has no hardware units."""
    wide_flops: dict[str, float] = field(default_factory=dict)
    """Peak FLOP/s of float32 GEMMs without TF32, and of float64; a missing type cannot be estimated."""
    gemm_fraction: dict[str, float]
    """Fraction of the peak that large GEMMs reach in training, under the power limit; higher precisions as bf16."""
    grouped_fraction: float
    """Speed of a grouped GEMM over the speed of a single GEMM of the same size."""
    quantize_passes: dict[str, float]
    """Bytes that quantisation moves per element of an operand below 16 bits: reads, both layouts, scales."""
    attention_forward_flops: float
    attention_backward_flops: float
    """FLOP/s of fused attention over long sequences, counting the causal half."""
    attention_forward_half: float
    attention_backward_half: float
    """Sequence length at which fused attention reaches half of that."""
    kernel_gap_s: float
    """Gap between the end of one kernel and the start of the next, if the host is ahead."""
    host_launch_s: float
    """Host time per kernel launch outside a CUDA graph: the bottleneck of a layer of many small kernels."""
    sync_s: float
    """Idle time of the device when the host reads a number from it, until the next kernels are launched."""
    host_bytes_per_s: float
    """Bandwidth to and from host memory, for offloading."""
    links: tuple[NetworkLink, ...]
    """Network levels, from the fastest and smallest to the slowest and largest."""
    site_link: SiteLink | None = None
    """Connection to other sites; None: not given. No device file has one."""

    @property
    def memory_bytes(self) -> float:
        """Allocatable memory, `memory_gib`, in bytes."""
        return self.memory_gib * GIB

    @property
    def nvlink_domain_size(self) -> int:
        """Ranks of the innermost link, an NVLink domain."""
        return self.links[0].gpus

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
    """World size of the launcher; without a launcher the number of ranks for which this machine has devices."""
    is_launched: bool
    """Whether a launcher started the ranks."""
    memory_gib: float
    """Memory of all ranks together; 0: use the memory of the device description."""
    host: str = ""


def device_names() -> tuple[str, ...]:
    """Return the names of all shipped devices."""
    return tuple(sorted(item.name.removesuffix(".toml") for item in _folder().iterdir() if item.name.endswith(".toml")))


@lru_cache(maxsize=32)
def load_device(name_or_path: str) -> Device:
    """Return a device by name, or from a TOML file with the keys of those in `devices/`.

    A file may start from a known device with `base = "h100"` and set only what differs.

    Raises:
        ConfigError: there is no such device or file, or a key of the file is unknown, missing or of the wrong type.
    """
    if name_or_path.endswith(".toml"):
        path = Path(name_or_path)
        try:
            text = read_text(path, MAX_RECIPE_BYTES)
        except OSError as error:
            raise ConfigError(f"--gpu {name_or_path}: cannot be read ({error.strerror or error})") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"--gpu {name_or_path}: not UTF-8 ({error}); save it as UTF-8 text") from None
        return _parse_device(text, name_or_path)
    name = name_or_path.lower()
    if name not in device_names():
        guess = closest_match(name, device_names(), cutoff=0.5)
        hint = f"did you mean {guess!r}? The" if guess else "the"
        raise ConfigError(
            f"--gpu {name_or_path!r} is unknown; {hint} devices are {', '.join(device_names())}, or name a FILE.toml"
        )
    return _parse_device((_folder() / f"{name}.toml").read_text(encoding="utf-8"), name)


def _folder() -> Any:
    return files("moefold.cost") / "devices"


def _parse_device(text: str, where: str) -> Device:
    tree = _read_device_table(text, where)
    spine = tree.pop(SPINE, None)
    site_link = tree.pop(SITE_LINK, None)
    known = [f.name for f in fields(Device) if f.name != SITE_LINK]
    for key in tree:
        if key not in known:
            guess = closest_match(key, {*known, SPINE, SITE_LINK}, cutoff=0.5)
            raise ConfigError(
                f"{where}: unknown key {key!r}; "
                + (f"did you mean {guess!r}?" if guess else _list_keys({*known, SPINE, SITE_LINK}))
            )
    tree.setdefault("wide_flops", {})
    lacking = [name for name in known if name not in tree]
    if lacking:
        raise ConfigError(
            f"{where}: {', '.join(lacking)} missing; give them, or start from a device with base = 'h100'"
        )
    for name in known:
        tree[name] = _check_field(where, name, tree[name])
    if spine is not None:
        tree["links"] = _with_spine(where, tree["links"], spine)
    return Device(**tree, site_link=None if site_link is None else _check_site_link(where, site_link))


def _read_device_table(text: str, where: str) -> dict[str, Any]:
    try:
        tree = parse_toml(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: not TOML: {error}") from None
    base = tree.pop("base", "")
    if not base:
        return tree
    if base not in device_names():
        raise ConfigError(f"{where}: base={base!r} is unknown; the devices are {', '.join(device_names())}")
    base_tree = _read_device_table((_folder() / f"{base}.toml").read_text(encoding="utf-8"), base)
    return {
        key: value | tree[key] if isinstance(value, dict) and isinstance(tree.get(key), dict) else tree.get(key, value)
        for key, value in (base_tree | {key: tree[key] for key in tree if key not in base_tree}).items()
    }


HIGH_PRECISION_DTYPES = ("float32", "float64")
_PRECISION_TABLES = ("peak_flops", "gemm_fraction", "quantize_passes")


def _check_field(where: str, key: str, value: Any) -> Any:
    if key == "name":
        if not isinstance(value, str):
            raise ConfigError(f"{where}: name={value!r} must be text")
        return value
    if key == "links":
        return _check_links(where, value)
    if key == "wide_flops":
        if not isinstance(value, dict) or not set(value) <= set(HIGH_PRECISION_DTYPES):
            raise ConfigError(
                f"{where}: [{key}] must be a table of numbers by type, of {' and '.join(HIGH_PRECISION_DTYPES)}"
            )
        return {dtype: _check_number(where, f"{key}.{dtype}", number) for dtype, number in value.items()}
    if key in _PRECISION_TABLES:
        if not isinstance(value, dict) or "bf16" not in value and key != "quantize_passes":
            raise ConfigError(f"{where}: [{key}] must be a table of numbers by precision with at least bf16")
        check = _check_fraction if key == "gemm_fraction" else _check_number
        return {precision: check(where, f"{key}.{precision}", number) for precision, number in value.items()}
    if key in ("multiprocessors", "tile_rows", "tile_columns"):
        return _check_integer(where, key, value, minimum=1)
    return _check_fraction(where, key, value) if key == "hbm_fraction" else _check_number(where, key, value)


def _check_links(where: str, value: Any) -> tuple[NetworkLink, ...]:
    known = {f.name for f in fields(NetworkLink)} - {"oversubscription"}
    if not isinstance(value, list) or not value or any(not isinstance(row, dict) or set(row) != known for row in value):
        raise ConfigError(f"{where}: links must be a list of [[links]] tables with {', '.join(sorted(known))}")
    links = tuple(
        NetworkLink(
            level=str(row["level"]),
            gpus=_check_integer(where, "links.gpus", row["gpus"], minimum=0),
            fraction=_check_fraction(where, "links.fraction", row["fraction"]),
            **{key: _check_number(where, f"links.{key}", row[key]) for key in ("bytes_per_s", "latency_s")},
        )
        for row in value
    )
    if any(link.gpus == 0 for link in links[:-1]) or links[-1].gpus != 0:
        raise ConfigError(f"{where}: the last of links connects all ranks (gpus = 0), and no other one does")
    return links


def _with_spine(where: str, links: tuple[NetworkLink, ...], value: Any) -> tuple[NetworkLink, ...]:
    """Split the last link level into pods and add the spine that joins them."""
    if not isinstance(value, dict) or set(value) != set(SPINE_KEYS):
        raise ConfigError(f"{where}: [{SPINE}] must be a table of {', '.join(SPINE_KEYS)}")
    cards = links[-1]
    inner = links[-2].gpus if len(links) > 1 else 1
    pod = _check_integer(where, f"{SPINE}.pod_gpus", value["pod_gpus"], minimum=1)
    if pod <= inner or pod % inner:
        raise ConfigError(f"{where}: {SPINE}.pod_gpus={pod} must be a multiple of {inner}, at least twice that")
    oversubscription = _check_number(where, f"{SPINE}.oversubscription", value["oversubscription"])
    if oversubscription < 1:
        raise ConfigError(
            f"{where}: {SPINE}.oversubscription={oversubscription:g} must be at least 1: "
            "the cards of a pod over its uplinks"
        )
    uplinks = NetworkLink(
        level=SPINE,
        gpus=0,
        bytes_per_s=cards.bytes_per_s / oversubscription,
        latency_s=_check_number(where, f"{SPINE}.latency_s", value["latency_s"]),
        fraction=cards.fraction,
        oversubscription=oversubscription,
    )
    return (*links[:-1], replace(cards, gpus=pod), uplinks)


def _check_site_link(where: str, value: Any) -> SiteLink:
    keys = [f.name for f in fields(SiteLink)]
    if not isinstance(value, dict) or set(value) != set(keys):
        raise ConfigError(f"{where}: [{SITE_LINK}] must be a table of {' and '.join(keys)}")
    bytes_per_s, latency_s = (value[key] for key in keys)
    if isinstance(latency_s, bool) or latency_s != 0:
        latency_s = _check_number(where, f"{SITE_LINK}.latency_s", latency_s)
    return SiteLink(
        bytes_per_s=_check_number(where, f"{SITE_LINK}.bytes_per_s", bytes_per_s), latency_s=float(latency_s)
    )


def _check_number(where: str, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-12 <= value < float("inf"):
        raise ConfigError(f"{where}: {key}={value!r} must be a number above 0")
    return float(value)


def _check_fraction(where: str, key: str, value: Any) -> float:
    """Check a fraction of a vendor's peak: above 0 and at most 1."""
    number = _check_number(where, key, value)
    if number > 1:
        raise ConfigError(
            f"{where}: {key}={value!r} must be above 0 and at most 1, the part that is reached; 0.8 is 80 %"
        )
    return number


def _check_integer(where: str, key: str, value: Any, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{where}: {key}={value!r} must be a whole number of at least {minimum}")
    return value


def _list_keys(known: set[str]) -> str:
    return f"the keys are {', '.join(sorted(known))}"
