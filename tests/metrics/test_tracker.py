"""TensorBoard and Weights & Biases: refused early where they cannot start, the right curves where they can."""

import importlib.util
import subprocess
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from moefold.config.schema import MetricsConfig
from moefold.errors import ConfigError
from moefold.metrics.tracker import check_trackers
from moefold.metrics.writer import MetricsWriter
from tests.metrics.example import LAYER, MEMORY, STEP


def hide(monkeypatch: pytest.MonkeyPatch, package: str, spec: ModuleSpec | None) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: spec if name == package else real(name, *rest))


def test_no_tracker_needs_nothing() -> None:
    code = (
        "import sys; from moefold.config.schema import MetricsConfig; import moefold.metrics.writer;"
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
    with pytest.raises(ConfigError) as error:
        check_trackers(MetricsConfig(**{package: True}))
    message = str(error.value)
    assert f"metrics.{package}=true" in message
    assert f"pip install 'moefold[{extra}]'" in message
    assert f"metrics.{package}=false" in message


def test_wandb_without_a_key_is_refused_unless_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    code = (
        "from moefold.config.schema import MetricsConfig; from moefold.metrics.tracker import check_trackers;"
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

    metrics = MetricsConfig(tensorboard=True)
    for resume_step, shift in ((0, 0.0), (2, 10.0)):
        with MetricsWriter(tmp_path, metrics, resume_step=resume_step) as writer:
            for step in range(resume_step + 1, resume_step + 4):
                eval_loss = 2.75 if step == 3 else None
                metrics_of_step = replace(STEP, step=step, loss=step + shift, eval_loss=eval_loss, mfu=0.5)
                writer.write(
                    replace(metrics_of_step, moe_layers=(LAYER,), memory_by_part=MEMORY if step == 2 else None)
                )
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 1), (2, 2), (3, 13), (4, 14), (5, 15)]
    assert [(e.step, e.value) for e in events.Scalars("eval/loss")] == [(3, 2.75)]
    # The only MoE layer that the step tells of is number 1 of the model.
    assert events.Scalars("expert_load/layer_001")[0].value == 1.25
    assert events.Scalars("moe/worst_expert_load")[0].value == 1.5
    curves = {"expert_load_cv": 0.5, "dead_experts": 2, "dropped_fraction": 0.125, "router_entropy": 1.75}
    curves |= {"expert_bias_min": -0.25, "router_z_loss": 0.0}
    assert {name: events.Scalars(f"{name}/layer_001")[0].value for name in curves} == curves
    # What a layer does not have has no curve.
    assert "expert_bias_max/layer_001" not in events.Tags()["scalars"]
    assert not any("layer_000" in name for name in events.Tags()["scalars"])
    # Of the rank that has most.
    assert [(e.step, e.value) for e in events.Scalars("memory_by_part/weights")] == [(2, 2.0)]
    assert events.Scalars("speed/mfu")[-1].value == 0.5


def test_wandb_offline_continues_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = []
    for resume_step in (0, 1, 0):
        with MetricsWriter(tmp_path, MetricsConfig(wandb=True), resume_step=resume_step, config={"seed": 0}) as writer:
            writer.write(replace(STEP, step=resume_step + 1))
        ids.append((tmp_path / "wandb_id.txt").read_text().strip())
    first, resumed, anew = ids
    assert first == resumed != anew
    files = [path.name for path in tmp_path.glob("wandb/offline-run-*/run-*.wandb")]
    assert files.count(f"run-{first}.wandb") == 2
    assert files.count(f"run-{anew}.wandb") == 1
