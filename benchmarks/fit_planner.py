"""Fit the planner's constants on published measurements: robust least squares of log errors, with physical priors.

    python -m benchmarks.fit_planner tests/planner/published/calibration.csv \
      tests/planner/published/calibration_2026.csv tests/planner/published/dense_calibration.csv

Every constant belongs to a device or a kernel, not to a model or a row. Each starts from a physical value, which is
also the mean of its prior, so constants that the rows do not determine stay there. A fold is one configuration of one
source (model, GPU, number, precision, micro-batch and mapping), or a whole source. It is refitted on the derivatives of
the errors at the fit of all rows, which costs nothing, so every fit is cross-validated; `--refit ROUNDS` also fits the
constants to the rows outside each of five groups of configurations. `--unseen FILE` writes the cross-validated error of
each row for `moefold plan-accuracy`.
"""

import argparse
import json
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from benchmarks.published.models import load_published_model
from benchmarks.published.predictions import row_key, validate_predictions
from benchmarks.published.rows import PAPER, PublishedCase, parse_case
from moefold.cost.hardware import BLACKWELL, GRACE_BLACKWELL, HOPPER, Device, load_device
from moefold.planner import model_spec
from moefold.planner.accuracy import Prediction
from moefold.planner.cost_model import data_parallel, layer, step, workload
from moefold.planner.cost_model.step import CostModel

X86 = ("b200", "b300")
ALL = HOPPER + BLACKWELL

SPREAD = 0.06
"""Standard deviation of the log error of a row."""
HUBER = 0.8
"""Limit, in units of `SPREAD`, above which an error counts linearly: a tenth of the rows are outliers by 20 % and more,
such as two measurements of one mapping that differ by 80 %."""
TRUST = 0.5
"""Factor on the standard deviations of the priors, with the least error on rows of sources that are left out."""
WEIGHTS = (1.0, 6.0, 0.25)
"""Weight of a row of each table. Rows of 2026 are few, and the kind that users have: third parties, routers in
training, untuned recipes. Dense models inform only the GEMMs, attention and pipelines."""
PAPER_WEIGHT = 6.0
"""Factor on rows of arXiv:2504.14960, the only rows that compare mappings and methods of one case."""
NUM_GROUPS = 5
MAX_STEP = 0.25
"""Largest change of the logarithm of a constant in one iteration."""
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Constant:
    """One fitted constant: its location, its prior mean and the standard deviation of its logarithm."""

    path: str
    devices: tuple[str, ...]
    start: float
    sigma: float
    maximum: float = 1e9

    @property
    def name(self) -> str:
        """Path and devices."""
        return f"{self.path}@{','.join(self.devices)}" if self.devices else self.path


CONSTANTS = (
    # Narrow: a product of 8192^3 was measured alone on an H200 (published/README.md).
    Constant("gemm_fraction.bf16", HOPPER, 0.79, 0.035),
    Constant("gemm_fraction.fp8", HOPPER, 0.62, 0.15),
    Constant("gemm_fraction.fp8-blockwise", HOPPER, 0.55, 0.15),
    Constant("gemm_fraction.bf16", BLACKWELL, 0.75, 0.1),
    Constant("gemm_fraction.fp8", BLACKWELL, 0.68, 0.08),
    Constant("gemm_fraction.mxfp8", BLACKWELL, 0.62, 0.15),
    Constant("gemm_fraction.nvfp4", BLACKWELL, 0.5, 0.1),
    Constant("power", ("gb200",), 0.87, 0.08),
    Constant("power", ("b200",), 0.92, 0.08),
    Constant("power", ("b300",), 0.97, 0.08),
    Constant("hbm_fraction", HOPPER, 0.85, 0.08, 0.95),
    Constant("hbm_fraction", BLACKWELL, 0.7, 0.15, 0.95),
    Constant("grouped_fraction", HOPPER, 0.92, 0.08, 1.0),
    Constant("grouped_fraction", BLACKWELL, 0.92, 0.05, 1.0),
    Constant("half_depth", HOPPER, 200.0, 0.4),
    Constant("half_depth", BLACKWELL, 300.0, 0.4),
    Constant("kernel_gap_s", HOPPER + X86, 3e-6, 0.4),
    Constant("kernel_gap_s", GRACE_BLACKWELL, 3e-6, 0.4),
    Constant("host_launch_s", HOPPER + X86, 3e-5, 0.5),
    Constant("host_launch_s", GRACE_BLACKWELL, 2e-5, 0.5),
    Constant("sync_s", HOPPER + X86, 3e-4, 0.7),
    Constant("sync_s", GRACE_BLACKWELL, 2e-4, 0.7),
    Constant("quantize_passes.fp8", (), 5.0, 0.25),
    Constant("quantize_passes.mxfp8", (), 5.0, 0.4),
    Constant("quantize_passes.nvfp4", (), 8.0, 0.5),
    Constant("nvlink", HOPPER, 0.72, 0.1, 0.95),
    Constant("nvlink", BLACKWELL, 0.62, 0.12, 0.95),
    Constant("layer.RECURRENCE_BYTES", (), 190.0, 0.5),
    Constant("layer.RING_KERNELS", (), 16.0, 0.5),
    Constant("layer.ROUTER_BYTES", (), 60.0, 0.4),
    Constant("layer.UNFUSED_PERMUTE_PASSES", (), 1.5, 0.4),
    Constant("layer.UNFUSED_CLAMP_FACTOR", (), 2.0, 0.5),
    Constant("layer.CLAMPED_SWIGLU_PASSES", (), 8.0, 0.4),
    Constant("step.HIDDEN_ALL_TO_ALL_FRACTION", (), 0.7, 0.25, 0.95),
    Constant("layer.EXPERT_LAUNCH_SHARE", (), 0.2, 0.15),
    Constant("step.GRAPH_GAP_SHARE", (), 0.5, 0.3),
    Constant("step.TUNED_HOST_FRACTION", (), 0.8, 0.5),
    Constant("step.CHUNK_CALL_S", (), 1e-4, 0.5),
    Constant("data_parallel.EXPOSED_ZERO3_FRACTION", (), 0.15, 0.6),
)
START = np.log([constant.start for constant in CONSTANTS])
SIGMA = TRUST * np.array([constant.sigma for constant in CONSTANTS])
MODULES = {
    "data_parallel": data_parallel,
    "layer": layer,
    "step": step,
    "workload": workload,
}


def current_values() -> FloatArray:
    """Return the logarithms of the values in the sources and the device files."""
    values = []
    base = load_device("gb300")
    for constant in CONSTANTS:
        table, _, key = constant.path.partition(".")
        device = base if constant.devices in ((), BLACKWELL) else load_device(constant.devices[0])
        if table in MODULES:
            values.append(float(getattr(MODULES[table], key)))
        elif table == "power":
            values.append(device.gemm_fraction["bf16"] / base.gemm_fraction["bf16"])
        elif table == "nvlink":
            values.append(device.links[0].fraction)
        else:
            value = getattr(device, table)
            values.append(float(value[key] if key else value))
    return np.log(values)


def apply_constants(values: FloatArray) -> dict[str, Device]:
    """Set the constants of kernels in their modules; return the devices with their constants replaced."""
    devices = {name: load_device(name) for name in ALL}
    power = dict.fromkeys(ALL, 1.0)
    for constant, target in zip(CONSTANTS, values, strict=True):
        value = min(float(target), constant.maximum)
        table, _, key = constant.path.partition(".")
        if table in MODULES:
            setattr(MODULES[table], key, value)
        elif table == "power":
            power[constant.devices[0]] = value
        else:
            for name in constant.devices or ALL:
                device = devices[name]
                if table == "nvlink":
                    links = (replace(device.links[0], fraction=value), *device.links[1:])
                    devices[name] = replace(device, links=links)
                else:
                    old = getattr(device, table)
                    changed: dict[str, Any] = {table: old | {key: value} if key else value}
                    devices[name] = replace(device, **changed)
    base = load_device("gb300")
    for name in BLACKWELL:
        fractions = {key: value * power[name] for key, value in devices[name].gemm_fraction.items()}
        devices[name] = replace(
            devices[name],
            gemm_fraction=fractions,
            attention_forward_flops=base.attention_forward_flops * power[name],
            attention_backward_flops=base.attention_backward_flops * power[name],
        )
    return devices


@dataclass
class Sample:
    """One configuration: its case, its prediction, the measured throughput, and its rows with their weight."""

    table: int
    case: PublishedCase
    prediction: Prediction
    log_tokens: float
    weight: float
    keys: list[str]

    @property
    def configuration(self) -> str:
        """Source, model, GPU, number, precision, micro-batch and mapping, without the parts to recompute."""
        p = self.prediction
        m = p.mapping
        axes = (m.mbs, m.tp, m.cp, m.pp, m.vpp, m.ep, m.etp, m.zero)
        return f"{self.source} {self.case.model} {self.case.gpu} {m.world_size} {p.precision} {axes}"

    @property
    def source(self) -> str:
        """Document or repository, without its page."""
        return self.case.row["source"][:34]


def read_samples(paths: list[Path]) -> list[Sample]:
    """Read the configurations of the tables; rows of the same configuration and almost the same speed are merged."""
    samples: dict[tuple[object, ...], Sample] = {}
    for number, path in enumerate(paths):
        for p in validate_predictions(path).predictions:
            if p.error_pct is None:
                continue
            case = parse_case(p.row)
            cost_model = CostModel(load_published_model(case.model), load_device(case.gpu), case.workload)
            tokens = cost_model.step_time(p.mapping).tokens_per_s_per_gpu / (1 + p.error_pct / 100)
            key = (p.row["source"], case.model, case.gpu, p.mapping, case.workload, round(float(np.log(tokens)), 1))
            if key not in samples:
                samples[key] = Sample(number, case, p, float(np.log(tokens)), 0.0, [])
            samples[key].keys.append(row_key(p.row))
            factor = PAPER_WEIGHT if p.row["source"].startswith(PAPER) else 1.0
            samples[key].weight += factor * WEIGHTS[number]
    return list(samples.values())


def log_errors(samples: list[Sample], values: FloatArray) -> FloatArray:
    """Return log(predicted / measured) of each sample, under the exponents of `values`."""
    devices = apply_constants(np.exp(values))
    for cached in (model_spec.model_spec_from_config, model_spec.load_model_spec, load_published_model):
        cached.cache_clear()
    cost_models: dict[tuple[object, ...], CostModel] = {}
    errors = []
    for s in samples:
        w = s.case.workload
        w = replace(w, expert_spread=workload.EXPERT_SPREAD) if w.expert_spread else w
        key = (s.case.model, s.case.gpu, w)
        if key not in cost_models:
            cost_models[key] = CostModel(load_published_model(s.case.model), devices[s.case.gpu], w)
        priced = cost_models[key].step_time(s.prediction.mapping)
        errors.append(np.log(priced.tokens_per_s_per_gpu) - s.log_tokens)
    return np.array(errors)


def derivatives(samples: list[Sample], x: FloatArray, errors: FloatArray) -> FloatArray:
    """Return the derivatives of the errors, [samples, constants]."""
    jacobian = np.zeros((len(samples), len(x)))
    for i, constant in enumerate(CONSTANTS):
        rows = [k for k, s in enumerate(samples) if not constant.devices or s.case.gpu in constant.devices]
        moved = x.copy()
        moved[i] += 0.03
        jacobian[rows, i] = (log_errors([samples[k] for k in rows], moved) - errors[rows]) / 0.03
    return jacobian


def solve(jacobian: FloatArray, errors: FloatArray, x: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the minimum of the robust cost with errors that are linear around x, by reweighted least squares."""
    solution = x.copy()
    for _ in range(30):
        residuals = errors + jacobian @ (solution - x)
        w = weights / SPREAD**2 * np.minimum(1.0, HUBER * SPREAD / np.maximum(np.abs(residuals), 1e-9))
        normal = jacobian.T @ (w[:, None] * jacobian) + np.diag(1 / SIGMA**2)
        solution = solution - np.linalg.solve(normal, jacobian.T @ (w * residuals) + (solution - START) / SIGMA**2)
    return solution


def robust_cost(errors: FloatArray, x: FloatArray, weights: FloatArray) -> float:
    """Return the Huber loss of the errors, and the cost of the priors."""
    z = np.abs(errors) / SPREAD
    loss = np.where(z < HUBER, 0.5 * z * z, HUBER * z - 0.5 * HUBER * HUBER)
    return float((weights * loss).sum() + 0.5 * (((x - START) / SIGMA) ** 2).sum())


def fit(
    samples: list[Sample], x: FloatArray, rounds: int, first: FloatArray | None = None
) -> tuple[FloatArray, FloatArray]:
    """Fit all constants, from the logarithms x; return their logarithms and the errors there.

    Args:
        samples: the configurations.
        x: logarithms to start from.
        rounds: iterations.
        first: derivatives of the errors at x; None: computed.
    """
    weights = np.array([s.weight for s in samples])
    errors = log_errors(samples, x)
    for number in range(rounds):
        jacobian = derivatives(samples, x, errors) if number or first is None else first
        step_x = np.clip(solve(jacobian, errors, x, weights) - x, -MAX_STEP, MAX_STEP)
        for share in (1.0, 0.5, 0.2, 0.05):
            tried = log_errors(samples, x + share * step_x)
            if robust_cost(tried, x + share * step_x, weights) < robust_cost(errors, x, weights):
                x = x + share * step_x
                errors = tried
                break
        print(f"cost {robust_cost(errors, x, weights):.1f}, step {share}", flush=True)
    return x, errors


def cross_validate(
    samples: list[Sample], folds: list[str], x: FloatArray, errors: FloatArray, jacobian: FloatArray
) -> FloatArray:
    """Return the errors of each fold under a fit without it, as if errors were linear around the fit of all rows."""
    weights = np.array([s.weight for s in samples])
    residuals = np.empty(len(samples))
    for fold in dict.fromkeys(folds):
        held_out = np.array([number == fold for number in folds])
        refitted = solve(jacobian, errors, x, np.where(held_out, 0.0, weights))
        residuals[held_out] = (errors + jacobian @ (refitted - x))[held_out]
    return residuals


def refit_folds(
    samples: list[Sample], folds: list[str], x: FloatArray, jacobian: FloatArray, rounds: int
) -> FloatArray:
    """Return the errors of each fold, predicted under a fit of the other rows that starts at the fit of all rows."""
    residuals = np.empty(len(samples))
    for fold in dict.fromkeys(folds):
        held_out = np.array([number == fold for number in folds])
        kept = [s for s, is_out in zip(samples, held_out, strict=True) if not is_out]
        refitted, _ = fit(kept, x, rounds, jacobian[~held_out])
        residuals[held_out] = log_errors([s for s, is_out in zip(samples, held_out, strict=True) if is_out], refitted)
    return residuals


def print_errors(samples: list[Sample], errors: FloatArray, title: str) -> None:
    """Print mean, median and bias of the rows of each table."""
    print(title)
    for number in dict.fromkeys(s.table for s in samples):
        deltas = [100 * np.expm1(e) for s, e in zip(samples, errors, strict=True) if s.table == number for _ in s.keys]
        print(
            f"  table {number + 1}: {len(deltas)} rows, mean {np.mean(np.abs(deltas)):.1f} %, median "
            f"{np.median(np.abs(deltas)):.1f} %, bias {np.mean(deltas):+.1f} %"
        )


def print_pairs(samples: list[Sample], errors: FloatArray) -> None:
    """Print the errors of the ratio of two mappings of one model, GPU, number, precision and length of samples."""
    cases: dict[tuple[object, ...], list[tuple[object, float]]] = {}
    for s, e in zip(samples, errors, strict=True):
        if s.table >= 2:
            continue
        p = s.prediction
        case = (s.table, s.source, s.case.model, s.case.gpu, p.mapping.world_size, p.precision, s.case.row["seq_len"])
        cases.setdefault(case, []).append((p.mapping, float(e)))
    percents = [
        100 * abs(np.expm1(first[1] - other[1]))
        for rows in cases.values()
        for first, other in combinations(rows, 2)
        if first[0] != other[0]
    ]
    print(
        f"two mappings of a case: {len(percents)} pairs, median {np.median(percents):.1f} %, 8 of 10 within "
        f"{np.percentile(percents, 80):.0f} %"
    )


def main() -> None:
    """Fit the constants and print them, with the errors of seen and unseen rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path, help="CSV files, in the order of WEIGHTS")
    parser.add_argument("--rounds", type=int, default=4, help="iterations of the fit (default 4; 0: of today's values)")
    parser.add_argument("--refit", type=int, metavar="ROUNDS", help="also fit each fold of configurations again")
    parser.add_argument("--unseen", type=Path, metavar="FILE", help="write the cross-validated error of each row")
    arguments = parser.parse_args()
    samples = read_samples(arguments.tables)
    x, errors = fit(samples, current_values(), arguments.rounds)
    jacobian = derivatives(samples, x, errors)
    for constant, value in zip(CONSTANTS, np.exp(x), strict=True):
        print(f"{constant.name:45} {min(value, constant.maximum):.4g}   (prior {constant.start:.4g})")
    print_errors(samples, errors, "all rows fitted")
    unseen = cross_validate(samples, [s.configuration for s in samples], x, errors, jacobian)
    print_errors(samples, unseen, "one configuration of a source left out")
    if arguments.refit:
        groups = [str(crc32(s.configuration.encode()) % NUM_GROUPS) for s in samples]
        refitted = refit_folds(samples, groups, x, jacobian, arguments.refit)
        print_errors(samples, refitted, f"{NUM_GROUPS} groups of configurations left out, each fitted again")
    by_source = cross_validate(samples, [s.source for s in samples], x, errors, jacobian)
    print_errors(samples, by_source, "one source left out")
    print_pairs(samples, by_source)
    if arguments.unseen:
        pairs = zip(samples, unseen, strict=True)
        table = {key: round(100 * float(np.expm1(e)), 1) for s, e in pairs for key in s.keys}
        arguments.unseen.write_text(json.dumps(dict(sorted(table.items())), indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
