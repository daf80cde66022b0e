"""Experiment trackers beside metrics.jsonl: TensorBoard and Weights & Biases. Their packages are optional."""

import importlib.util
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from moefold.config.schema import MetricsConfig
from moefold.errors import ConfigError
from moefold.metrics.step import StepMetrics

EVALUATION = "eval/loss"
GIB = 2**30
_SCALARS = (
    ("train/loss", "loss"),
    ("train/aux_loss", "aux_loss"),
    ("train/z_loss", "z_loss"),
    ("train/mtp_loss", "mtp_loss"),
    ("train/grad_norm", "grad_norm"),
    ("train/lr", "lr"),
    ("train/tokens", "tokens"),
    (EVALUATION, "eval_loss"),
    ("speed/step_time_s", "step_time_s"),
    ("speed/tokens_per_s", "tokens_per_s"),
    ("speed/tflops_per_rank", "tflops_per_rank"),
    ("speed/mfu", "mfu"),
    ("memory/peak_gib", "memory_gib"),
    ("moe/dropped_fraction", "dropped_fraction"),
    ("moe/worst_expert_load", "worst_expert_load"),
)

_LAYER_SCALARS = (
    ("expert_load", "load"),
    ("expert_load_cv", "load_cv"),
    ("dead_experts", "dead_experts"),
    ("dropped_fraction", "dropped_fraction"),
    ("router_entropy", "router_entropy"),
    ("router_aux_loss", "aux_loss"),
    ("router_z_loss", "z_loss"),
    ("expert_bias_min", "bias_min"),
    ("expert_bias_max", "bias_max"),
)
"""Curves that each MoE layer has one of, under the number that it has in the model."""


class Tracker(Protocol):
    """Takes the metrics of one run, step by step."""

    def log(self, metrics: StepMetrics) -> None:
        """Take one step."""

    def log_evaluation(self, step: int, eval_loss: float) -> None:
        """Take the held-out loss of a step that was taken without."""

    def close(self) -> None:
        """Hand over what is still buffered; nothing may follow."""


def check_trackers(metrics: MetricsConfig) -> None:
    """Make sure that the trackers a recipe asks for can start. Cheap: imports wandb only if the recipe asks for it.

    Raises:
        ConfigError: a package is missing, or Weights & Biases is to work online and knows no API key.
    """
    if metrics.tensorboard and not _is_installed("tensorboard"):
        raise ConfigError(_missing("tensorboard", "pip install 'moefold[tensorboard]'"))
    if metrics.wandb:
        if not _is_installed("wandb"):
            raise ConfigError(_missing("wandb", "pip install 'moefold[track]'"))
        _check_wandb_login()


def open_trackers(
    run_dir: Path, metrics: MetricsConfig, *, resume_step: int, config: Mapping[str, Any]
) -> tuple[Tracker, ...]:
    """Start the trackers that the recipe asks for.

    Args:
        resume_step: last step that is kept from an earlier process of this run; 0 for a new run.
        config: the resolved recipe, to show beside the curves.
    """
    trackers: list[Tracker] = []
    if metrics.tensorboard:
        trackers.append(TensorBoardTracker(run_dir, resume_step=resume_step))
    if metrics.wandb:
        trackers.append(WandbTracker(run_dir, resume_step=resume_step, config=config))
    return tuple(trackers)


class TensorBoardTracker:
    """Writes event files into RUN_DIR/tensorboard. A resumed run hides the steps that it repeats."""

    def __init__(self, run_dir: Path, *, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(  # type: ignore[no-untyped-call, unused-ignore]
            log_dir=str(run_dir / "tensorboard"), purge_step=resume_step + 1, flush_secs=10
        )

    def log(self, metrics: StepMetrics) -> None:
        """Take one step."""
        for name, value in _scalars(metrics).items():
            self._writer.add_scalar(name, value, global_step=metrics.step)

    def log_evaluation(self, step: int, eval_loss: float) -> None:
        """Take the held-out loss of a step that was taken without."""
        self._writer.add_scalar(EVALUATION, eval_loss, global_step=step)

    def close(self) -> None:
        """Write what is still buffered."""
        self._writer.close()


class WandbTracker:
    """Logs to one Weights & Biases run for each run folder, online or offline as WANDB_MODE and its settings say.

    RUN_DIR/wandb_id.txt holds the id of the run, so that a resumed process continues the same curves. A step that an
    earlier process has logged past its last checkpoint keeps its first values there: wandb's history only grows.
    """

    def __init__(self, run_dir: Path, *, resume_step: int, config: Mapping[str, Any]) -> None:
        import wandb

        self._run: Any = wandb.init(
            project="moefold",
            name=run_dir.resolve().name,
            id=_wandb_id(run_dir, is_new=resume_step == 0),
            dir=str(run_dir),
            resume="allow",
            config=dict(config),
            settings=wandb.Settings(console="off"),
        )

    def log(self, metrics: StepMetrics) -> None:
        """Take one step."""
        self._run.log(_scalars(metrics), step=metrics.step)

    def log_evaluation(self, step: int, eval_loss: float) -> None:
        """Take the held-out loss of a step that was taken without: a summary, as the history only grows."""
        self._run.summary[f"{EVALUATION} of step {step}"] = eval_loss

    def close(self) -> None:
        """Finish the run: upload, or complete the offline files."""
        self._run.finish()


def _scalars(metrics: StepMetrics) -> dict[str, float]:
    """Everything that this step knows, under the names of the curves."""
    scalars = {name: getattr(metrics, key) for name, key in _SCALARS}
    for layer in metrics.moe_layers:
        scalars |= {f"{curve}/layer_{layer.layer:03d}": getattr(layer, key) for curve, key in _LAYER_SCALARS}
    if metrics.memory_by_part is not None:
        scalars |= {f"memory_by_part/{part}": max(of) / GIB for part, of in metrics.memory_by_part.peak_bytes.items()}
    return {name: value for name, value in scalars.items() if value is not None}


def _wandb_id(run_dir: Path, *, is_new: bool) -> str:
    path = run_dir / "wandb_id.txt"
    if not is_new and path.exists():
        return path.read_text(encoding="utf-8").strip()
    run_id = uuid.uuid4().hex[:12]
    path.write_text(run_id + "\n", encoding="utf-8")
    return run_id


def _is_installed(package: str) -> bool:
    # A folder ./wandb, as wandb itself makes one, is importable as an empty namespace package: it has no origin.
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _missing(package: str, command: str) -> str:
    return (
        f"metrics.{package}=true needs the package {package}, which is not installed; "
        f"run `{command}`, or set metrics.{package}=false"
    )


def _check_wandb_login() -> None:
    import wandb

    if wandb.setup().settings.mode in ("online", "shared") and not wandb.api.api_key:
        raise ConfigError(
            "metrics.wandb=true needs an API key while Weights & Biases works online, and none is configured; "
            "run `wandb login`, set WANDB_MODE=offline in the environment, or set metrics.wandb=false"
        )
