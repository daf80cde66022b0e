"""Fit of a device description to measured times, so that the cost model's formulas reproduce them.

`device_probe.py` measures. A number without a measurement keeps the value of the base device.
"""

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, log2
from typing import Any, Literal

import numpy as np

from moefold.cost.hardware import HIGH_PRECISION_DTYPES, Device, NetworkLink
from moefold.planner.cost_model.collective import RankGroup, all_gather_s, all_to_all_s
from moefold.planner.cost_model.gemm import BF16, GemmCost
from moefold.planner.cost_model.mixer import attention_core_s
from moefold.planner.cost_model.network import swiglu_mlp_s
from moefold.planner.cost_model.workload import TrainingWorkload

SMALLEST_HALF = 1.0
"""Half depth or half length if the measured rate does not rise with the size."""
SMALLEST_LATENCY_S = 1e-7
COMPUTE_BOUND_FRACTION = 0.8
"""A GEMM whose memory traffic takes more than this part of its time does not determine the FLOP rate."""
NUM_EXPERT_MATRICES = 3
FLOATS_OF_TOML = "{:.6g}"


@dataclass(frozen=True)
class GemmTime:
    """Measured GEMM of [rows, depth] and [depth, columns]."""

    dtype: str
    rows: int
    columns: int
    depth: int
    seconds: float


@dataclass(frozen=True)
class AttentionTime:
    """Measured causal attention of `samples` sequences."""

    samples: int
    seq_len: int
    heads: int
    head_size: int
    forward_s: float
    backward_s: float

    @property
    def flops(self) -> float:
        """FLOPs of the forward pass, counting the causal half."""
        return 2.0 * self.samples * self.heads * self.seq_len**2 * self.head_size


@dataclass(frozen=True)
class ExpertsTime:
    """Measured experts, with `rows` tokens in total, forward and backward together."""

    rows: int
    hidden_size: int
    ffn_hidden_size: int
    num_experts: int
    seconds: float


@dataclass(frozen=True)
class CollectiveTime:
    """Measured collective of all groups of `size` ranks at a distance of `stride`, at the same time."""

    kind: Literal["all-gather", "all-to-all"]
    size: int
    stride: int
    num_bytes: int
    """Bytes of the result of an all-gather, or bytes that a rank sends in an all-to-all, including its own part."""
    seconds: float

    @property
    def link_bytes(self) -> float:
        """Bytes that pass through the link of a rank."""
        return self.num_bytes * (self.size - 1) / self.size

    @property
    def latencies(self) -> float:
        """Number of messages in a row, as the cost model counts them."""
        return 1 + log2(self.size)


@dataclass(frozen=True)
class DeviceMeasurements:
    """Measured times of one rank while all ranks of the machine do the same."""

    dtype: str
    """Compute type of attention, experts, and the GEMMs that determine the tile model."""
    memory_gib: float
    copy_bytes_per_s: float
    """Rate of a copy, counting the bytes read and the bytes written."""
    host_bytes_per_s: float | None
    """Rate of copies between host and GPU, or None on a CPU."""
    multiprocessors: int | None
    """Number of multiprocessors, or None on a CPU."""
    kernel_gap_s: float
    host_launch_s: float
    gemms: tuple[GemmTime, ...]
    attention: tuple[AttentionTime, ...]
    experts: ExpertsTime
    local_ranks: int
    """Ranks of one machine."""
    collectives: tuple[CollectiveTime, ...] = ()


@dataclass(frozen=True)
class FittedTime:
    """One measured time and the prediction of the cost model for the fitted device."""

    name: str
    measured_s: float
    predicted_s: float

    @property
    def ratio(self) -> float:
        """Predicted over measured time."""
        return self.predicted_s / self.measured_s


def fit_device(base: Device, measured: DeviceMeasurements, name: str) -> Device:
    """Return the base device with every number that the measurements determine.

    The others are kept: peaks of the vendor, tiles, low precisions, links without ranks.
    """
    device = replace(
        base,
        name=name,
        memory_gib=measured.memory_gib,
        multiprocessors=measured.multiprocessors or base.multiprocessors,
        kernel_gap_s=measured.kernel_gap_s,
        host_launch_s=measured.host_launch_s,
        # The launch of a bare kernel takes less time than this constant.
        sources={key: source for key, source in base.sources.items() if key != "host_launch_s"},
        host_bytes_per_s=measured.host_bytes_per_s or measured.copy_bytes_per_s,
        **_rate_and_fraction("hbm_bytes_per_s", "hbm_fraction", base.hbm_bytes_per_s, measured.copy_bytes_per_s),
    )
    device = _with_gemm_rates(device, measured)
    device = _with_grouped_fraction(device, measured)
    device = _with_attention_rates(device, measured)
    return replace(device, links=tuple(_fitted_links(base.links, measured)))


def predictions(device: Device, measured: DeviceMeasurements) -> Iterator[FittedTime]:
    """Yield the prediction of the cost model for each measurement."""
    for gemm in measured.gemms:
        cost = _gemm_cost(device, gemm.dtype)
        shape = f"{gemm.rows} x {gemm.depth} x {gemm.columns}"
        yield FittedTime(f"GEMM {gemm.dtype} {shape}", gemm.seconds, cost.matmul_s(gemm.rows, gemm.columns, gemm.depth))
    yield FittedTime(f"experts {measured.dtype}", measured.experts.seconds, _experts_s(device, measured))
    for core in measured.attention:
        forward_s, backward_s = attention_core_s(device, measured.dtype, core.flops, core.seq_len, core.head_size)
        yield FittedTime(f"attention {core.seq_len} forward", core.forward_s, forward_s)
        yield FittedTime(f"attention {core.seq_len} backward", core.backward_s, backward_s)
    for row in measured.collectives:
        seconds_of = all_gather_s if row.kind == "all-gather" else all_to_all_s
        predicted_s = seconds_of(device, RankGroup(row.size, row.stride), row.num_bytes)
        ranks = f"{row.size} ranks" if row.stride == 1 else f"{row.size} ranks {row.stride} apart"
        yield FittedTime(f"{row.kind} {row.num_bytes / 2**20:g} MiB, {ranks}", row.seconds, predicted_s)


def device_toml(device: Device, comments: Sequence[str]) -> str:
    """Format a device as the file that `load_device` reads."""
    lines = [f"# {comment}" for comment in comments]
    tables: list[str] = []
    for key, value in asdict(device).items():
        if isinstance(value, dict):
            tables += _toml_table(f"[{key}]", value)
        elif isinstance(value, tuple):
            for link in value:
                tables += _toml_table(f"[[{key}]]", link)
        elif value is not None:
            lines.append(f"{key} = {_toml_value(value)}")
    return "\n".join([*lines, *tables]) + "\n"


def _toml_table(head: str, entries: Mapping[str, Any]) -> list[str]:
    return ["", head, *(f"{key} = {_toml_value(value)}" for key, value in entries.items())]


def _toml_value(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return str(value) if isinstance(value, int) else FLOATS_OF_TOML.format(value)


def _rate_and_fraction(rate_key: str, fraction_key: str, rate: float, reached: float) -> dict[str, Any]:
    """Return the vendor's rate and the reached fraction of it, or the measured rate and 1 if that rate is higher."""
    return {rate_key: max(rate, reached), fraction_key: min(1.0, reached / rate)}


def _gemm_cost(device: Device, dtype: str) -> GemmCost:
    return GemmCost(device, TrainingWorkload(seq_len=1, global_batch_size=1, dtype=dtype))


def _with_gemm_rates(device: Device, measured: DeviceMeasurements) -> Device:
    """Fit rate and half depth on GEMMs of the main dtype, and only the rate on other GEMMs."""
    main = _compute_bound(device, measured, measured.dtype)
    inverse_rate, half_over_rate = _fit_two(
        [(_tiled_flops(device, gemm) * gemm.depth, _tiled_flops(device, gemm)) for gemm in main],
        [gemm.seconds for gemm in main],
    )
    half_depth = max(half_over_rate / inverse_rate, SMALLEST_HALF)
    device = replace(device, half_depth=half_depth)
    rates = {
        dtype: statistics.median(
            _tiled_flops(device, gemm) * (gemm.depth + half_depth) / gemm.seconds
            for gemm in _compute_bound(device, measured, dtype)
        )
        for dtype in dict.fromkeys(gemm.dtype for gemm in measured.gemms)
    }
    if "bfloat16" in rates:
        rate = _rate_and_fraction("peak", "fraction", device.peak_flops[BF16], rates["bfloat16"])
        device = replace(
            device,
            peak_flops=device.peak_flops | {BF16: rate["peak"]},
            gemm_fraction=device.gemm_fraction | {BF16: rate["fraction"]},
        )
    # The cost model multiplies every rate by the fraction of bfloat16.
    wide = {dtype: rates[dtype] / device.gemm_fraction[BF16] for dtype in HIGH_PRECISION_DTYPES if dtype in rates}
    return replace(device, wide_flops=device.wide_flops | wide)


def _compute_bound(device: Device, measured: DeviceMeasurements, dtype: str) -> list[GemmTime]:
    """Return the GEMMs of a dtype that memory traffic does not limit, or all GEMMs if it limits each."""
    cost = _gemm_cost(device, dtype if dtype == "bfloat16" or dtype in device.wide_flops else "bfloat16")
    gemms = [gemm for gemm in measured.gemms if gemm.dtype == dtype]

    def traffic_s(gemm: GemmTime) -> float:
        values = gemm.depth * (gemm.rows + gemm.columns) + gemm.rows * gemm.columns
        return cost.memory_bound_s(cost.value_bytes * values)

    return [gemm for gemm in gemms if traffic_s(gemm) < COMPUTE_BOUND_FRACTION * gemm.seconds] or gemms


def _tiled_flops(device: Device, gemm: GemmTime) -> float:
    """Return the FLOPs of one step in depth over all tiles and the last, partly filled wave."""
    tiles = ceil(gemm.rows / device.tile_rows) * ceil(gemm.columns / device.tile_columns)
    return 2.0 * device.tile_rows * device.tile_columns * (tiles + 0.5 * device.multiprocessors)


def _with_grouped_fraction(device: Device, measured: DeviceMeasurements) -> Device:
    """Set the speed of grouped GEMMs so that the measured time of the experts is predicted."""
    whole_s = _experts_s(replace(device, grouped_fraction=1.0), measured)
    half_s = _experts_s(replace(device, grouped_fraction=0.5), measured)
    # The prediction is a + b / fraction wherever GEMMs are limited by FLOPs.
    gemm_s = half_s - whole_s
    other_s = whole_s - gemm_s
    rest_s = measured.experts.seconds - other_s
    return replace(device, grouped_fraction=gemm_s / rest_s) if gemm_s > 0 and rest_s > 0 else device


def _experts_s(device: Device, measured: DeviceMeasurements) -> float:
    experts = measured.experts
    gemm = _gemm_cost(device, measured.dtype)
    sizes = (experts.rows, experts.hidden_size, experts.ffn_hidden_size, NUM_EXPERT_MATRICES)
    return sum(swiglu_mlp_s(gemm, *sizes, groups=experts.num_experts))


def _with_attention_rates(device: Device, measured: DeviceMeasurements) -> Device:
    rates: dict[str, Any] = {}
    for index, direction in enumerate(("forward", "backward")):
        unit_rate: dict[str, Any] = {
            f"attention_{direction}_flops": 1.0,
            f"attention_{direction}_half": SMALLEST_HALF,
        }
        unit = replace(device, **unit_rate)
        rows = []
        for core in measured.attention:
            # Seconds at 1 FLOP/s and an unlimited length, times (1 + half / length) / rate.
            seconds = attention_core_s(unit, measured.dtype, core.flops, core.seq_len, core.head_size)[index]
            full = seconds * core.seq_len / (core.seq_len + SMALLEST_HALF)
            rows.append((full, full / core.seq_len))
        times = [core.forward_s if direction == "forward" else core.backward_s for core in measured.attention]
        inverse_rate, half_over_rate = _fit_two(rows, times)
        rates[f"attention_{direction}_flops"] = 1.0 / inverse_rate
        rates[f"attention_{direction}_half"] = max(half_over_rate / inverse_rate, SMALLEST_HALF)
    return replace(device, **rates)


def _fitted_links(links: Sequence[NetworkLink], measured: DeviceMeasurements) -> Iterator[NetworkLink]:
    """Yield the links with bandwidth and latency of the levels whose collectives were measured."""
    for index, link in enumerate(links):
        link_rows = [row for row in measured.collectives if (row.stride >= measured.local_ranks) == (index > 0)]
        if not link_rows or index > 1:
            yield link
            continue
        inverse_bandwidth, latency = _fit_two(
            [(row.link_bytes, row.latencies) for row in link_rows], [row.seconds for row in link_rows]
        )
        rate = _rate_and_fraction("bytes_per_s", "fraction", link.bytes_per_s, 1.0 / inverse_bandwidth)
        is_between_machines = index == 0 and any(row.stride >= measured.local_ranks for row in measured.collectives)
        gpus = measured.local_ranks if is_between_machines else link.gpus
        yield replace(link, gpus=gpus, latency_s=max(latency, SMALLEST_LATENCY_S), **rate)


def _fit_two(rows: Iterable[tuple[float, float]], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit seconds = a * x + b * y with a > 0 and b >= 0 by least relative squares, and return (a, b)."""
    scaled = np.array(list(rows)) / np.array(seconds)[:, None]
    ones = np.ones(len(scaled))
    if len(scaled) > 1:
        (a, b), *_ = np.linalg.lstsq(scaled, ones, rcond=None)
        if a > 0 and b >= 0:
            return float(a), float(b)
    # The times do not determine both values: fit only the first term.
    first = scaled[:, 0]
    return float(first @ ones / (first @ first)), 0.0
