"""TensorBoard and Weights & Biases: refused early where they cannot start, the right curves where they can."""

import importlib.util
import math
import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moefold.config.load import config_from_dict
from moefold.config.schema import Config, config_to_dict
from moefold.config.sections.metrics import MetricsConfig
from moefold.errors import ConfigError, install_command
from moefold.metrics.tracker import check_trackers
from moefold.metrics.writer import MetricsWriter
from tests.metrics.example import LAYER, MEMORY, STEP

ASKED = {"project": "P", "entity": "E", "name": "N", "group": "G", "tags": ("x", "y")}
REDUCED = ("mean", "max", "min")


def hide(monkeypatch: pytest.MonkeyPatch, package: str, spec: ModuleSpec | None) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: spec if name == package else real(name, *rest))


def test_no_tracker_needs_nothing() -> None:
    code = (
        "import sys; from moefold.config.sections.metrics import MetricsConfig; import moefold.metrics.writer;"
        "from moefold.metrics.tracker import check_trackers; check_trackers(MetricsConfig());"
        "sys.exit(any(name in sys.modules for name in ('torch', 'tensorboard', 'wandb', 'rich', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("package", "extra"), [("tensorboard", "tensorboard"), ("wandb", "track")])
@pytest.mark.parametrize("spec", [None, ModuleSpec("folder", None)], ids=["absent", "folder of the same name"])
def test_a_missing_package_is_a_config_error(
    monkeypatch: pytest.MonkeyPatch, package: str, extra: str, spec: ModuleSpec | None
) -> None:
    hide(monkeypatch, package, spec)
    asked: dict[str, Any] = {package: True}
    with pytest.raises(ConfigError) as error:
        check_trackers(MetricsConfig(**asked))
    message = str(error.value)
    assert f"metrics.{package}=true" in message
    assert install_command(extra) in message
    assert f"metrics.{package}=false" in message


def test_wandb_without_a_key_is_refused_unless_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    code = (
        "from moefold.config.sections.metrics import MetricsConfig; from moefold.metrics.tracker import check_trackers;"
        "check_trackers(MetricsConfig(wandb=True))"
    )
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}

    def check(**extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code],
            env=environment | extra,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    refused = check()
    assert refused.returncode == 1
    assert "ConfigError: metrics.wandb=true needs an API key" in refused.stderr
    assert check(WANDB_MODE="offline").returncode == 0
    assert check(WANDB_MODE="disabled").returncode == 0
    assert check(WANDB_API_KEY="0" * 40).returncode == 0


def test_tensorboard_holds_every_curve_and_hides_repeated_steps(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = MetricsConfig(tensorboard=True, per_layer=True)
    for resume_step, shift in ((0, 0.0), (2, 10.0)):
        with MetricsWriter(tmp_path, metrics, resume_step=resume_step) as writer:
            for step in range(resume_step + 1, resume_step + 4):
                eval_loss = 2.75 if step == 3 else None
                metrics_of_step = STEP | {"step": step, "loss": step + shift, "eval_loss": eval_loss, "mfu": 0.5}
                writer.write(
                    metrics_of_step | {"moe_layers": (LAYER,), "memory_by_part": MEMORY if step == 2 else None}
                )
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("1_loss/train")] == [(1, 1), (2, 2), (3, 13), (4, 14), (5, 15)]
    assert [(e.step, e.value) for e in events.Scalars("1_loss/eval")] == [(3, 2.75)]
    # The only MoE layer that the step tells of is number 1 of the model.
    assert events.Scalars("expert_load/layer_001")[0].value == 1.25
    assert events.Scalars("moe/worst_expert_load")[0].value == 1.5
    curves = {"expert_load_cv": 0.5, "dead_experts": 2, "dropped_fraction": 0.125, "router_entropy": 1.75}
    curves |= {"expert_bias_min": -0.25, "router_z_loss": 0.0}
    assert {name: events.Scalars(f"{name}/layer_001")[0].value for name in curves} == curves
    # A number that a layer does not have has no curve.
    assert "expert_bias_max/layer_001" not in events.Tags()["scalars"]
    assert not any("layer_000" in name for name in events.Tags()["scalars"])
    # The rank with the highest value counts.
    assert [(e.step, e.value) for e in events.Scalars("memory_by_part/weights")] == [(2, 2.0)]
    assert events.Scalars("2_speed/mfu")[-1].value == 0.5


def test_tensorboard_shows_loss_and_speed_first_and_layers_together(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    layers = (LAYER, replace(LAYER, layer=3, load=2.25, router_entropy=float("nan"), bias_min=None))
    config = config_to_dict(Config(metrics=MetricsConfig(tensorboard=True, wandb_tags=("ä", "b"))))
    with MetricsWriter(tmp_path, MetricsConfig(tensorboard=True), config=config) as writer:
        writer.write(STEP | {"moe_layers": layers, "eval_loss": 2.75})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    tags = sorted(events.Tags()["scalars"])
    assert tags[:4] == ["1_loss/eval", "1_loss/train", "2_speed/step_time_s", "2_speed/tflops_per_rank"]
    assert not any("/layer_" in tag for tag in tags)
    found = {tag.split("/")[1]: events.Scalars(tag)[0].value for tag in tags if tag.startswith("moe_layers/")}
    assert (found["expert_load_mean"], found["expert_load_max"]) == (1.75, 2.25)
    assert {name for name in found if name.startswith("expert_bias")} == {f"expert_bias_min_{of}" for of in REDUCED}
    assert found["expert_bias_min_mean"] == -0.25
    # A NaN of one layer is not lost among the others.
    assert all(math.isnan(found[f"router_entropy_{of}"]) for of in REDUCED)
    (text,) = events.Tensors("recipe/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert all(line.startswith("    ") for line in shown.splitlines())
    # The shown text is a recipe, and gives the run.
    assert config_to_dict(config_from_dict(tomllib.loads(shown))) == config


VARIABLES = {"PROJECT": "p", "ENTITY": "e", "NAME": "n", "RUN_GROUP": "g", "TAGS": "a,b"}


@pytest.mark.parametrize(
    ("keys", "environment", "expected"),
    [
        ({}, {}, {"project": "moefold", "name": "my-run"}),
        ({}, VARIABLES, {}),
        ({}, {"PROJECT": "p"}, {"name": "my-run"}),
        ({}, {"NAME": ""}, {"project": "moefold", "name": "my-run"}),
        (ASKED, {}, ASKED | {"tags": ["x", "y"]}),
        (ASKED, VARIABLES, ASKED | {"tags": ["x", "y"]}),
        ({"entity": "team"}, VARIABLES, {"entity": "team"}),
    ],
    ids=["defaults", "environment", "project", "empty", "keys", "keys-and-environment", "one-key"],
)
def test_keys_win_over_the_environment_and_that_over_the_defaults(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keys: dict[str, Any],
    environment: dict[str, str],
    expected: dict[str, Any],
) -> None:
    calls: list[dict[str, Any]] = []
    logged: list[dict[str, float]] = []
    run = SimpleNamespace(log=lambda scalars, step: logged.append(scalars), finish=lambda: None)

    def init(**words: Any) -> SimpleNamespace:
        calls.append(words)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict))
    for variable in VARIABLES:
        monkeypatch.delenv(f"WANDB_{variable}", raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(f"WANDB_{variable}", value)
    metrics = MetricsConfig(wandb=True, **{f"wandb_{key}": value for key, value in keys.items()})
    config = config_to_dict(Config(metrics=metrics))
    with MetricsWriter(tmp_path / "my-run", metrics, config=config) as writer:
        writer.write(STEP | {"moe_layers": (LAYER,)})
    (call,) = calls
    assert {name: call[name] for name in ("project", "entity", "name", "group", "tags") if name in call} == expected
    assert call["config"] == config
    (scalars,) = logged
    assert (scalars["train/loss"], scalars["moe_layers/expert_load_max"]) == (2.5, 1.25)
    assert not any("/layer_" in name for name in scalars)


def test_wandb_offline_continues_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = []
    for resume_step in (0, 1, 0):
        with MetricsWriter(tmp_path, MetricsConfig(wandb=True), resume_step=resume_step, config={"seed": 0}) as writer:
            writer.write(STEP | {"step": resume_step + 1})
        ids.append((tmp_path / "wandb_id.txt").read_text().strip())
    first, resumed, restarted = ids
    assert first == resumed != restarted
    files = [path.name for path in tmp_path.glob("wandb/offline-run-*/run-*.wandb")]
    assert files.count(f"run-{first}.wandb") == 2
    assert files.count(f"run-{restarted}.wandb") == 1
