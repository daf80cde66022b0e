"""Fit the planner's constants on published measurements: damped least squares of log errors, with priors.

    python benchmarks/fit_planner.py calibration.csv [dense_calibration.csv] [--leave-out WORD] [--folds N]

Every constant is one of a device or of kernels; none is of a model or a row. Each starts from a physical value and is
held to it by a prior, so that what the rows do not tell stays there. `--leave-out` fits without the rows whose source,
model or GPU holds the word and reports the error on them; `--folds` does so for N folds of whole configurations.
"""

import argparse
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moefold.cost.hardware import Device, load_device
from moefold.planner import model_spec
from moefold.planner.cost_model import gemm, layer, workload
from moefold.planner.cost_model import step as step_time
from moefold.planner.cost_model.step import CostModel
from moefold.planner.model_spec import load_model_spec
from moefold.planner.validation import Prediction, PublishedCase, parse_case, validate_predictions

HOPPER = ("h100", "h200", "h800")
GRACE = ("gb200", "gb300")
X86 = ("b200", "b300")
BLACKWELL = GRACE + X86
HUBER = 1.5
SPREAD = 0.08
"""Log error of a row that counts as one deviation."""


@dataclass(frozen=True)
class Knob:
    """One constant: where it is, what it starts from, and how far it may go (log)."""

    where: str
    devices: tuple[str, ...]
    start: float
    sigma: float

    @property
    def name(self) -> str:
        """Where it is, and of which devices."""
        return f"{self.where}@{','.join(self.devices)}" if self.devices else self.where


KNOBS = (
    Knob("gemm_fraction.bf16", HOPPER, 0.75, 0.08),
    Knob("gemm_fraction.fp8", HOPPER, 0.62, 0.15),
    Knob("gemm_fraction.fp8-blockwise", HOPPER, 0.55, 0.15),
    Knob("gemm_fraction.bf16", BLACKWELL, 0.75, 0.1),
    Knob("gemm_fraction.fp8", BLACKWELL, 0.68, 0.08),
    Knob("gemm_fraction.mxfp8", BLACKWELL, 0.62, 0.15),
    Knob("gemm_fraction.nvfp4", BLACKWELL, 0.5, 0.1),
    Knob("power", ("gb200",), 0.87, 0.08),
    Knob("power", ("b200",), 0.92, 0.08),
    Knob("power", ("b300",), 0.97, 0.08),
    Knob("hbm_fraction", HOPPER, 0.85, 0.08),
    Knob("hbm_fraction", BLACKWELL, 0.7, 0.15),
    Knob("grouped_fraction", HOPPER, 0.92, 0.08),
    Knob("grouped_fraction", BLACKWELL, 0.92, 0.05),
    Knob("half_depth", HOPPER, 200.0, 0.4),
    Knob("half_depth", BLACKWELL, 300.0, 0.4),
    Knob("kernel_gap_s", HOPPER + X86, 5e-6, 0.4),
    Knob("kernel_gap_s", GRACE, 4e-6, 0.4),
    Knob("sync_s", HOPPER + X86, 4e-4, 0.7),
    Knob("sync_s", GRACE, 3e-4, 0.7),
    Knob("quantize_passes.fp8", (), 5.0, 0.25),
    Knob("quantize_passes.mxfp8", (), 5.0, 0.4),
    Knob("quantize_passes.nvfp4", (), 8.0, 0.5),
    Knob("gemm.UNFILLED_WAVE_FRACTION", (), 0.5, 0.5),
    Knob("layer_time.RECURRENCE_BYTES", (), 190.0, 0.5),
    Knob("layer_time.RING_KERNELS", (), 16.0, 0.5),
    Knob("workload.NATURAL_IMBALANCE", (), 1.35, 0.2),
    Knob("layer_time.ROUTER_BYTES", (), 60.0, 0.4),
    Knob("shape.CLAMPED_SWIGLU_PASSES", (), 8.0, 0.4),
    Knob("step_time.HIDDEN_ALL_TO_ALL_FRACTION", (), 0.7, 0.25),
)
MODULES = {"gemm": gemm, "layer_time": layer, "shape": model_spec, "step_time": step_time, "workload": workload}
ALL = HOPPER + BLACKWELL


def current(knob: Knob) -> float:
    """The value that ships."""
    table, _, key = knob.where.partition(".")
    if table in MODULES:
        return float(getattr(MODULES[table], key))
    if knob.where == "power":
        first = load_device(knob.devices[0])
        return first.gemm_fraction["bf16"] / load_device("gb300").gemm_fraction["bf16"]
    device = load_device((knob.devices or ("gb300",))[0])
    value = getattr(device, table)
    if knob.devices == BLACKWELL:
        value = getattr(load_device("gb300"), table)
    return float(value[key] if key else value)


def devices_of(values: np.ndarray) -> dict[str, Device]:
    """Every device with the knobs turned, and the kernels' constants set."""
    devices = {name: load_device(name) for name in ALL}
    power = dict.fromkeys(ALL, 1.0)
    for knob, value in zip(KNOBS, values, strict=True):
        table, _, key = knob.where.partition(".")
        if table in MODULES:
            setattr(MODULES[table], key, value)
        elif knob.where == "power":
            power[knob.devices[0]] = value
        else:
            for name in knob.devices or ALL:
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
    """One configuration: its case, its mapping, the measured tokens and how many rows say so."""

    case: PublishedCase
    prediction: Prediction
    log_tokens: float
    weight: float


def samples_of(path: Path, weight: float) -> list[Sample]:
    """Configurations of a table; rows of the same one are put together."""
    found: dict[tuple[object, ...], Sample] = {}
    for p in validate_predictions(path).predictions:
        if p.error_pct is None:
            continue
        case = parse_case(p.row)
        pricer = CostModel(load_model_spec(case.model), load_device(case.gpu), case.workload)
        tokens = pricer.step_time(p.mapping).tokens_per_s_per_gpu / (1 + p.error_pct / 100)
        key = (p.row["source"], case.model, case.gpu, p.mapping, case.workload, round(float(np.log(tokens)), 1))
        if key in found:
            found[key].weight += weight
        else:
            extra = 2.0 if case.gpu == "h100" and p.precision == "bf16" else 1.0
            found[key] = Sample(case, p, float(np.log(tokens)), weight * extra)
    return list(found.values())


def errors_of(samples: list[Sample], values: np.ndarray) -> np.ndarray:
    """Log of predicted over measured."""
    devices = devices_of(values)
    model_spec.model_spec_from_config.cache_clear()
    load_model_spec.cache_clear()
    out = []
    for s in samples:
        load = s.case.workload.imbalance
        asked = replace(s.case.workload, imbalance=workload.NATURAL_IMBALANCE if load > 1 else 1.0)
        pricer = CostModel(load_model_spec(s.case.model), devices[s.case.gpu], asked)
        out.append(np.log(pricer.step_time(s.prediction.mapping).tokens_per_s_per_gpu) - s.log_tokens)
    return np.array(out)


def fit(samples: list[Sample], rounds: int, *, anew: bool = False) -> np.ndarray:
    """The constants, by Levenberg-Marquardt steps on log values with robust weights."""
    start = np.log([knob.start for knob in KNOBS])
    sigma = np.array([knob.sigma for knob in KNOBS])
    x = start.copy() if anew else np.log([current(knob) for knob in KNOBS])
    weight = np.array([s.weight for s in samples])
    damping = 1.0

    def cost(errors: np.ndarray, at: np.ndarray) -> float:
        z = np.abs(errors) / SPREAD
        robust = np.where(z < HUBER, 0.5 * z * z, HUBER * z - 0.5 * HUBER * HUBER)
        return float((weight * robust).sum() + 0.5 * (((at - start) / sigma) ** 2).sum())

    errors = errors_of(samples, np.exp(x))
    best = cost(errors, x)
    for _ in range(rounds):
        jacobian = np.empty((len(samples), len(x)))
        for i in range(len(x)):
            moved = x.copy()
            moved[i] += 0.02
            jacobian[:, i] = (errors_of(samples, np.exp(moved)) - errors) / 0.02
        w = weight / SPREAD**2 * np.minimum(1.0, HUBER * SPREAD / np.maximum(np.abs(errors), 1e-9))
        normal = jacobian.T @ (w[:, None] * jacobian) + np.diag(1 / sigma**2)
        gradient = jacobian.T @ (w * errors) + (x - start) / sigma**2
        for _ in range(5):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
            tried = x - np.clip(step, -0.3, 0.3)
            tried_errors = errors_of(samples, np.exp(tried))
            if cost(tried_errors, tried) < best:
                x, errors, best = tried, tried_errors, cost(tried_errors, tried)
                damping = max(damping / 5, 1e-3)
                break
            damping *= 4
        print(f"cost {best:.1f}, mean |error| {mean_error(samples, errors):.2f} %", flush=True)
    return np.exp(x)


def mean_error(samples: list[Sample], errors: np.ndarray) -> float:
    """Mean absolute error of the throughput, in per cent."""
    return float(np.average(np.abs(np.expm1(errors)), weights=[s.weight for s in samples]) * 100)


def print_residuals(samples: list[Sample], errors: np.ndarray) -> None:
    """Each configuration and its error."""
    for s, error in sorted(zip(samples, errors, strict=True), key=lambda pair: pair[0].case.gpu + pair[0].case.model):
        m, row = s.prediction.mapping, s.case.row
        where = f"tp{m.tp} cp{m.cp} ep{m.ep} etp{m.etp} pp{m.pp} vpp{m.vpp} mbs{m.mbs}"
        print(
            f"{s.case.gpu:6}{s.case.workload.precision:9}{s.case.model:20}{row['n_gpus']:5}{row['source'][-26:-10]:17}"
            f"{row['method'][:22]:23}{where:38}S{row['seq_len']:7}{np.expm1(error) * 100:+7.1f} %  w{s.weight}"
        )


def main() -> None:
    """Fit, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--leave-out", default="")
    parser.add_argument("--residuals", action="store_true")
    parser.add_argument("--folds", type=int, default=0)
    arguments = parser.parse_args()
    samples = [s for i, path in enumerate(arguments.tables) for s in samples_of(path, 1.0 if i == 0 else 0.25)]
    words = [" ".join((s.case.row["source"], s.case.row["model"], s.case.row["gpu"])) for s in samples]
    if arguments.folds:
        keys = [f"{s.case.model} {s.case.gpu} {s.prediction.mapping}" for s in samples]
        fold = np.array([int(hashlib.sha256(key.encode()).hexdigest(), 16) % arguments.folds for key in keys])
        out = []
        for k in range(arguments.folds):
            values = fit([s for s, f in zip(samples, fold, strict=True) if f != k], arguments.rounds, anew=True)
            held = [s for s, f in zip(samples, fold, strict=True) if f == k]
            out.append((mean_error(held, errors_of(held, values)), len(held)))
            print(f"fold {k}: {out[-1][0]:.1f} % on {out[-1][1]} configurations")
        print(f"held out: {np.average([e for e, _ in out], weights=[n for _, n in out]):.1f} %")
        return
    left = [s for s, w in zip(samples, words, strict=True) if arguments.leave_out and arguments.leave_out in w]
    values = fit([s for s in samples if s not in left], arguments.rounds, anew=bool(left))
    if arguments.residuals:
        print_residuals(samples, errors_of(samples, values))
    for knob, value in zip(KNOBS, values, strict=True):
        print(f"{knob.name:45} {value:.4g}   (prior {knob.start:.4g})")
    if left:
        print(f"left out {arguments.leave_out!r}: {mean_error(left, errors_of(left, values)):.1f} % on {len(left)}")


if __name__ == "__main__":
    main()
