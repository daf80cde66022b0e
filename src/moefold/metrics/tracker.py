"""Experiment trackers: TensorBoard and Weights & Biases, both optional, in addition to metrics.jsonl."""

import importlib.util
import os
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from moefold.config.sections.metrics import MetricsConfig
from moefold.config.tables.toml_text import toml_value
from moefold.errors import ConfigError, install_command
from moefold.metrics.definitions import LAYER_CURVES, SHOWN, STEP, TRACKED, number_of
from moefold.units import GIB

EVAL_CURVE = SHOWN["eval_loss"].curve
_MINIMUM_IS_LOGGED = ("router_entropy", "expert_bias_min")
"""Curves whose minimum over the layers is also logged."""
_TENSORBOARD_FIRST = {"train/loss": "1_loss/train", EVAL_CURVE: "1_loss/eval", "speed/": "2_speed/"}
"""Renamed tags and groups that TensorBoard shows first: it sorts groups by name, digits before letters."""
_WANDB_VARIABLES = (
    ("project", "WANDB_PROJECT"),
    ("entity", "WANDB_ENTITY"),
    ("name", "WANDB_NAME"),
    ("group", "WANDB_RUN_GROUP"),
    ("tags", "WANDB_TAGS"),
)
"""Arguments of wandb.init that metrics.wandb_* sets, and the corresponding environment variables of wandb."""


def check_trackers(metrics: MetricsConfig) -> None:
    """Refuse trackers without their package or wandb's API key. Imports wandb only if the recipe enables it."""
    if metrics.tensorboard and not _is_installed("tensorboard"):
        raise ConfigError(_missing("tensorboard", install_command("tensorboard")))
    if metrics.wandb:
        if not _is_installed("wandb"):
            raise ConfigError(_missing("wandb", install_command("track")))
        _check_wandb_login()


def tracker_starters(
    run_dir: Path, metrics: MetricsConfig, *, resume_step: int, config: Mapping[str, Any]
) -> "dict[str, Callable[[], Tracker]]":
    """Return functions that start the trackers that the recipe enables, by name. `config` is logged with the curves."""
    starters: dict[str, Callable[[], Tracker]] = {}
    if metrics.tensorboard:
        starters["TensorBoard"] = partial(TensorBoardTracker, run_dir, metrics, resume_step=resume_step, config=config)
    if metrics.wandb:
        starters["wandb"] = partial(WandbTracker, run_dir, metrics, resume_step=resume_step, config=config)
    return starters


class TensorBoardTracker:
    """Tracker that writes TensorBoard event files to RUN_DIR/tensorboard. A resumed run purges the repeated steps."""

    def __init__(self, run_dir: Path, metrics: MetricsConfig, *, resume_step: int, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(  # type: ignore[no-untyped-call, unused-ignore]
            log_dir=str(run_dir / "tensorboard"), purge_step=resume_step + 1, flush_secs=10
        )
        self._per_layer = metrics.per_layer
        if config:
            self._writer.add_text("recipe", _as_markdown(config), global_step=resume_step)

    def log(self, values: Mapping[str, Any]) -> None:
        """Log one step."""
        for name, value in _scalars(values, per_layer=self._per_layer).items():
            self._writer.add_scalar(_tensorboard_tag(name), value, global_step=values["step"])

    def log_evaluation(self, step: int, eval_loss: float) -> None:
        """Log the evaluation loss of a step that was logged without it."""
        self._writer.add_scalar(_tensorboard_tag(EVAL_CURVE), eval_loss, global_step=step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbTracker:
    """Tracker that logs to one Weights & Biases run per run folder, online or offline according to WANDB_MODE.

    RUN_DIR/wandb_id.txt contains the id of the run, so that a resumed process continues the same curves. Steps that an
    earlier process logged after its last checkpoint keep their first values, because wandb's history is append-only.
    """

    def __init__(self, run_dir: Path, metrics: MetricsConfig, *, resume_step: int, config: Mapping[str, Any]) -> None:
        import wandb

        self._per_layer = metrics.per_layer
        self._run: Any = wandb.init(
            **_wandb_names(run_dir, metrics),
            id=_wandb_id(run_dir, is_new=resume_step == 0),
            dir=str(run_dir),
            resume="allow",
            config=dict(config),
            settings=wandb.Settings(console="off"),
        )

    def log(self, values: Mapping[str, Any]) -> None:
        """Log one step."""
        self._run.log(_scalars(values, per_layer=self._per_layer), step=values["step"])

    def log_evaluation(self, step: int, eval_loss: float) -> None:
        """Log the evaluation loss of a past step as a summary, because wandb's history is append-only."""
        self._run.summary[f"{EVAL_CURVE} of step {step}"] = eval_loss

    def close(self) -> None:
        """Finish the wandb run: upload, or complete the offline files."""
        self._run.finish()


Tracker = TensorBoardTracker | WandbTracker


def _scalars(values: Mapping[str, Any], *, per_layer: bool) -> dict[str, float]:
    """Return the scalars of a step by curve name."""
    scalars = {places.curve: number_of(values, path) for path, places in SHOWN.items() if places.curve}
    program = {name: values[name] for name in values.keys() - {metric.name for metric in STEP}}
    scalars |= _tree("program", program)
    for section, start in TRACKED.items():
        scalars |= _tree(start, values.get(section) or {})
    for name, curve in LAYER_CURVES.items():
        by_layer = {layer.layer: getattr(layer, name) for layer in values["moe_layers"]}
        scalars |= _over_layers(curve, [value for value in by_layer.values() if value is not None])
        if per_layer:
            scalars |= {f"{curve}/layer_{layer:03d}": value for layer, value in by_layer.items()}
    if values["memory_by_part"] is not None:
        peaks = values["memory_by_part"].peak_bytes
        scalars |= {f"memory_by_part/{part}": max(sizes) / GIB for part, sizes in peaks.items()}
    return {name: value for name, value in scalars.items() if value is not None}


def _tree(start: str, values: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the numbers of a record and of its nested records."""
    flat: dict[str, float | None] = {}
    for name, value in values.items():
        flat |= _tree(f"{start}/{name}", value) if isinstance(value, Mapping) else {f"{start}/{name}": value}
    return flat


def _over_layers(curve: str, values: list[float]) -> dict[str, float]:
    """Return mean and maximum over the MoE layers (NaN if a value is NaN), or {} if no layer has a value."""
    if not values:
        return {}
    scalars = {f"moe_layers/{curve}_mean": float(np.mean(values)), f"moe_layers/{curve}_max": float(np.max(values))}
    if curve in _MINIMUM_IS_LOGGED:
        scalars[f"moe_layers/{curve}_min"] = float(np.min(values))
    return scalars


def _tensorboard_tag(name: str) -> str:
    for start, first in _TENSORBOARD_FIRST.items():
        if name.startswith(start):
            return first + name.removeprefix(start)
    return name


def _as_markdown(config: Mapping[str, Any]) -> str:
    """Return a resolved recipe as TOML in a Markdown code block."""
    lines: list[str] = []
    for section, keys in config.items():
        lines += [f"[{section}]", *(f"{key} = {toml_value(value)}" for key, value in keys.items()), ""]
    return "\n".join(f"    {line}" for line in lines)


def _wandb_names(run_dir: Path, metrics: MetricsConfig) -> dict[str, Any]:
    """Return the arguments of wandb.init that describe the run: keys of the recipe, else defaults.

    An argument takes precedence over the environment, so a default is omitted if its WANDB_* variable is set.
    """
    names: dict[str, Any] = {"project": "moefold", "name": run_dir.resolve().name}
    for argument, variable in _WANDB_VARIABLES:
        if value := getattr(metrics, f"wandb_{argument}"):
            names[argument] = list(value) if isinstance(value, tuple) else value
        elif os.environ.get(variable):
            names.pop(argument, None)
    return names


def _wandb_id(run_dir: Path, *, is_new: bool) -> str:
    path = run_dir / "wandb_id.txt"
    if not is_new and path.exists():
        return path.read_text(encoding="utf-8").strip()
    run_id = uuid.uuid4().hex[:12]
    path.write_text(run_id + "\n", encoding="utf-8")
    return run_id


def _is_installed(package: str) -> bool:
    # A folder ./wandb, which wandb itself creates, is importable as a namespace package, which has no origin.
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
