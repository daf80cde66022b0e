"""Fit the planner's constants on published measurements: damped least squares of log errors, with priors.

    python benchmarks/fit_planner.py calibration.csv [dense_calibration.csv] [--leave-out TEXT] [--folds N]

Every constant belongs to a device or a kernel, none to a model or a row. Each starts from a physical value, which is
also the mean of its prior, so constants that the rows do not determine stay there. `--leave-out` fits without the rows
whose source, model or GPU contains the text, and reports the error on them; `--folds` cross-validates over N folds of
whole configurations.
"""

import argparse
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moefold.cost.hardware import Device, load_device
from moefold.planner import model_spec
from moefold.planner.cost_model import gemm, layer, step, workload
from moefold.planner.cost_model.step import CostModel
from moefold.planner.model_spec import load_model_spec
from moefold.planner.validation import Prediction, PublishedCase, parse_case, validate_predictions

HOPPER = ("h100", "h200", "h800")
GRACE = ("gb200", "gb300")
X86 = ("b200", "b300")
BLACKWELL = GRACE + X86
HUBER = 1.5
SPREAD = 0.08
"""Standard deviation of the log error of a row."""


@dataclass(frozen=True)
class Constant:
    """One fitted constant: its location, its prior mean and the standard deviation of its logarithm."""

    path: str
    devices: tuple[str, ...]
    start: float
    sigma: float

    @property
    def name(self) -> str:
        """Path and devices."""
        return f"{self.path}@{','.join(self.devices)}" if self.devices else self.path


CONSTANTS = (
    Constant("gemm_fraction.bf16", HOPPER, 0.75, 0.08),
    Constant("gemm_fraction.fp8", HOPPER, 0.62, 0.15),
    Constant("gemm_fraction.fp8-blockwise", HOPPER, 0.55, 0.15),
    Constant("gemm_fraction.bf16", BLACKWELL, 0.75, 0.1),
    Constant("gemm_fraction.fp8", BLACKWELL, 0.68, 0.08),
    Constant("gemm_fraction.mxfp8", BLACKWELL, 0.62, 0.15),
    Constant("gemm_fraction.nvfp4", BLACKWELL, 0.5, 0.1),
    Constant("power", ("gb200",), 0.87, 0.08),
    Constant("power", ("b200",), 0.92, 0.08),
    Constant("power", ("b300",), 0.97, 0.08),
    Constant("hbm_fraction", HOPPER, 0.85, 0.08),
    Constant("hbm_fraction", BLACKWELL, 0.7, 0.15),
    Constant("grouped_fraction", HOPPER, 0.92, 0.08),
    Constant("grouped_fraction", BLACKWELL, 0.92, 0.05),
    Constant("half_depth", HOPPER, 200.0, 0.4),
    Constant("half_depth", BLACKWELL, 300.0, 0.4),
    Constant("kernel_gap_s", HOPPER + X86, 5e-6, 0.4),
    Constant("kernel_gap_s", GRACE, 4e-6, 0.4),
    Constant("sync_s", HOPPER + X86, 4e-4, 0.7),
    Constant("sync_s", GRACE, 3e-4, 0.7),
    Constant("quantize_passes.fp8", (), 5.0, 0.25),
    Constant("quantize_passes.mxfp8", (), 5.0, 0.4),
    Constant("quantize_passes.nvfp4", (), 8.0, 0.5),
    Constant("gemm.UNFILLED_WAVE_FRACTION", (), 0.5, 0.5),
    Constant("layer.RECURRENCE_BYTES", (), 190.0, 0.5),
    Constant("layer.RING_KERNELS", (), 16.0, 0.5),
    Constant("workload.NATURAL_IMBALANCE", (), 1.35, 0.2),
    Constant("layer.ROUTER_BYTES", (), 60.0, 0.4),
    Constant("model_spec.CLAMPED_SWIGLU_PASSES", (), 8.0, 0.4),
    Constant("step.HIDDEN_ALL_TO_ALL_FRACTION", (), 0.7, 0.25),
)
MODULES = {"gemm": gemm, "layer": layer, "model_spec": model_spec, "step": step, "workload": workload}
ALL = HOPPER + BLACKWELL


def current_value(constant: Constant) -> float:
    """Return the value in the source or the device file."""
    table, _, key = constant.path.partition(".")
    if table in MODULES:
        return float(getattr(MODULES[table], key))
    if constant.path == "power":
        first = load_device(constant.devices[0])
        return first.gemm_fraction["bf16"] / load_device("gb300").gemm_fraction["bf16"]
    device = load_device((constant.devices or ("gb300",))[0])
    value = getattr(device, table)
    if constant.devices == BLACKWELL:
        value = getattr(load_device("gb300"), table)
    return float(value[key] if key else value)


def apply_constants(values: np.ndarray) -> dict[str, Device]:
    """Set the constants of kernels in their modules; return the devices with their constants replaced."""
    devices = {name: load_device(name) for name in ALL}
    power = dict.fromkeys(ALL, 1.0)
    for constant, value in zip(CONSTANTS, values, strict=True):
        table, _, key = constant.path.partition(".")
        if table in MODULES:
            setattr(MODULES[table], key, value)
        elif constant.path == "power":
            power[constant.devices[0]] = value
        else:
            for name in constant.devices or ALL:
                old = getattr(devices[name], table)
                devices[name] = replace(devices[name], **{table: old | {key: value} if key else value})
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
    """One configuration: its case, its prediction, the measured throughput and the weight of its rows."""

    case: PublishedCase
    prediction: Prediction
    log_tokens: float
    weight: float


def read_samples(path: Path, weight: float) -> list[Sample]:
    """Read the configurations of a table; rows of the same configuration are merged."""
    samples: dict[tuple[object, ...], Sample] = {}
    for p in validate_predictions(path).predictions:
        if p.error_pct is None:
            continue
        case = parse_case(p.row)
        cost_model = CostModel(load_model_spec(case.model), load_device(case.gpu), case.workload)
        tokens = cost_model.step_time(p.mapping).tokens_per_s_per_gpu / (1 + p.error_pct / 100)
        key = (p.row["source"], case.model, case.gpu, p.mapping, case.workload, round(float(np.log(tokens)), 1))
        if key in samples:
            samples[key].weight += weight
        else:
            extra = 2.0 if case.gpu == "h100" and p.precision == "bf16" else 1.0
            samples[key] = Sample(case, p, float(np.log(tokens)), weight * extra)
    return list(samples.values())


def log_errors(samples: list[Sample], values: np.ndarray) -> np.ndarray:
    """Return log(predicted / measured) of each sample."""
    devices = apply_constants(values)
    model_spec.model_spec_from_config.cache_clear()
    load_model_spec.cache_clear()
    errors = []
    for s in samples:
        load = s.case.workload.imbalance
        case_workload = replace(s.case.workload, imbalance=workload.NATURAL_IMBALANCE if load > 1 else 1.0)
        cost_model = CostModel(load_model_spec(s.case.model), devices[s.case.gpu], case_workload)
        errors.append(np.log(cost_model.step_time(s.prediction.mapping).tokens_per_s_per_gpu) - s.log_tokens)
    return np.array(errors)


def fit(samples: list[Sample], rounds: int, *, from_priors: bool = False) -> np.ndarray:
    """Fit the constants by Levenberg-Marquardt steps on their logarithms, with Huber weights."""
    start = np.log([constant.start for constant in CONSTANTS])
    sigma = np.array([constant.sigma for constant in CONSTANTS])
    x = start.copy() if from_priors else np.log([current_value(constant) for constant in CONSTANTS])
    weight = np.array([s.weight for s in samples])
    damping = 1.0

    def cost(errors: np.ndarray, at: np.ndarray) -> float:
        z = np.abs(errors) / SPREAD
        robust = np.where(z < HUBER, 0.5 * z * z, HUBER * z - 0.5 * HUBER * HUBER)
        return float((weight * robust).sum() + 0.5 * (((at - start) / sigma) ** 2).sum())

    errors = log_errors(samples, np.exp(x))
    best = cost(errors, x)
    for _ in range(rounds):
        jacobian = np.empty((len(samples), len(x)))
        for i in range(len(x)):
            moved = x.copy()
            moved[i] += 0.02
            jacobian[:, i] = (log_errors(samples, np.exp(moved)) - errors) / 0.02
        w = weight / SPREAD**2 * np.minimum(1.0, HUBER * SPREAD / np.maximum(np.abs(errors), 1e-9))
        normal = jacobian.T @ (w[:, None] * jacobian) + np.diag(1 / sigma**2)
        gradient = jacobian.T @ (w * errors) + (x - start) / sigma**2
        for _ in range(5):
            update = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
            tried = x - np.clip(update, -0.3, 0.3)
            tried_errors = log_errors(samples, np.exp(tried))
            if cost(tried_errors, tried) < best:
                x = tried
                errors = tried_errors
                best = cost(errors, x)
                damping = max(damping / 5, 1e-3)
                break
            damping *= 4
        print(f"cost {best:.1f}, mean |error| {mean_error(samples, errors):.2f} %", flush=True)
    return np.exp(x)


def mean_error(samples: list[Sample], errors: np.ndarray) -> float:
    """Return the weighted mean absolute error of the throughput, in per cent."""
    return float(np.average(np.abs(np.expm1(errors)), weights=[s.weight for s in samples]) * 100)


def print_residuals(samples: list[Sample], errors: np.ndarray) -> None:
    """Print each configuration and its error."""
    for s, error in sorted(zip(samples, errors, strict=True), key=lambda pair: pair[0].case.gpu + pair[0].case.model):
        m = s.prediction.mapping
        row = s.case.row
        mapping = f"tp{m.tp} cp{m.cp} ep{m.ep} etp{m.etp} pp{m.pp} vpp{m.vpp} mbs{m.mbs}"
        print(
            f"{s.case.gpu:6}{s.case.workload.precision:9}{s.case.model:20}{row['n_gpus']:5}{row['source'][-26:-10]:17}"
            f"{row['method'][:22]:23}{mapping:38}S{row['seq_len']:7}{np.expm1(error) * 100:+7.1f} %  w{s.weight}"
        )


def main() -> None:
    """Fit the constants and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path, help="CSV files; rows of the first one weigh 4 times as much")
    parser.add_argument("--rounds", type=int, default=6, help="iterations of the fit (default 6)")
    parser.add_argument("--leave-out", default="", metavar="TEXT", help="hold out the rows that contain TEXT")
    parser.add_argument("--residuals", action="store_true", help="print the error of each configuration")
    parser.add_argument("--folds", type=int, default=0, help="number of folds of a cross-validation")
    arguments = parser.parse_args()
    samples = [s for i, path in enumerate(arguments.tables) for s in read_samples(path, 1.0 if i == 0 else 0.25)]
    labels = [" ".join((s.case.row["source"], s.case.row["model"], s.case.row["gpu"])) for s in samples]
    if arguments.folds:
        keys = [f"{s.case.model} {s.case.gpu} {s.prediction.mapping}" for s in samples]
        fold = np.array([int(hashlib.sha256(key.encode()).hexdigest(), 16) % arguments.folds for key in keys])
        errors = []
        for k in range(arguments.folds):
            values = fit([s for s, f in zip(samples, fold, strict=True) if f != k], arguments.rounds, from_priors=True)
            held_out = [s for s, f in zip(samples, fold, strict=True) if f == k]
            errors.append((mean_error(held_out, log_errors(held_out, values)), len(held_out)))
            print(f"fold {k}: {errors[-1][0]:.1f} % on {errors[-1][1]} configurations")
        print(f"held out: {np.average([e for e, _ in errors], weights=[n for _, n in errors]):.1f} %")
        return
    left_out = [s for s, w in zip(samples, labels, strict=True) if arguments.leave_out and arguments.leave_out in w]
    values = fit([s for s in samples if s not in left_out], arguments.rounds, from_priors=bool(left_out))
    if arguments.residuals:
        print_residuals(samples, log_errors(samples, values))
    for constant, value in zip(CONSTANTS, values, strict=True):
        print(f"{constant.name:45} {value:.4g}   (prior {constant.start:.4g})")
    if left_out:
        error = mean_error(left_out, log_errors(left_out, values))
        print(f"left out {arguments.leave_out!r}: {error:.1f} % on {len(left_out)} configurations")


if __name__ == "__main__":
    main()
