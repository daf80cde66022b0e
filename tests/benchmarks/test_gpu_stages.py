"""The measured stages of the half hour on a GPU, as a rehearsal on a CPU."""

import json
import math
import os
from dataclasses import dataclass, replace

import pytest
import torch

from benchmarks import gpu_stage, gpu_stages
from benchmarks.gpu_constants import exposed_part
from benchmarks.gpu_contact import Contact, contact
from benchmarks.gpu_report import CONSTANT_STAGES
from benchmarks.gpu_stage import Stage, profile
from benchmarks.gpu_stages import MAX_DIFFERENCE, ComparingAutotuner
from moefold.bench.device_fit import device_toml
from moefold.cost.hardware import DECIDING_CONSTANTS, load_device
from moefold.launch.threads_and_malloc import ALLOCATOR_VARIABLES
from moefold.ops.autotune import TuningKey

CPU = torch.device("cpu")


def _stage(folder):
    return Stage(CPU, True, folder / "rows.jsonl")


def _rows(stage):
    return {row["name"]: row for row in map(json.loads, stage.rows.read_text().splitlines())}


@pytest.mark.parametrize("name", ["env", "rates", "layer", "attention", "fp8"])
def test_a_stage_runs_without_a_gpu(tmp_path, monkeypatch, name):
    monkeypatch.setattr(gpu_stages, "LAYERS", gpu_stages.LAYERS[:1])
    monkeypatch.setattr(gpu_stages, "ATTENTION_CASES", gpu_stages.ATTENTION_CASES[:1])
    path = tmp_path / "rows.jsonl"
    assert gpu_stages.main([name, "--rows", str(path), "--device", "cpu", "--tiny"]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) > 1
    assert len({row["name"] for row in rows}) == len(rows)
    assert all(math.isfinite(row["value"]) for row in rows if row["unit"])


def test_the_stages_of_constants_measure_every_deciding_constant(tmp_path):
    found = []
    for name in ("constants", "shared"):
        path = tmp_path / f"{name}.jsonl"
        assert gpu_stages.main([name, "--rows", str(path), "--device", "cpu", "--tiny"]) == 0
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert all(math.isfinite(row["value"]) for row in rows)
        found += [(row.get("key"), row["name"], name) for row in rows]
    # No price reads it.
    found.remove((None, "copy to the host during an all-gather", "shared"))
    stages = {key: stage for key, (stage, _) in CONSTANT_STAGES.items()}
    assert sorted(found) == sorted((key, name, stages[key]) for key, name in DECIDING_CONSTANTS.items())


@dataclass
class SimulatedStage(Stage):
    """Time passes only where the simulated work says so."""

    now_ms: float = 0.0

    def one_ms(self, run):
        started_ms = self.now_ms
        run()
        return self.now_ms - started_ms


@pytest.mark.parametrize("slowdown", [0.0, 0.25, 1.0])
def test_the_exposed_part_of_a_transfer_is_the_added_time(tmp_path, slowdown):
    """A layer is shorter than the transfer, which slows the kernels that run at the same time."""
    stage = SimulatedStage(CPU, True, tmp_path / "rows.jsonl")
    transfer_ms = 20.0

    def layer():
        stage.now_ms += 8.0

    def start():
        end_ms = stage.now_ms + transfer_ms
        stage.now_ms += slowdown * transfer_ms

        def finish():
            stage.now_ms = max(stage.now_ms, end_ms)

        return finish

    found = exposed_part(stage, layer, start)
    assert found["value"] == pytest.approx(slowdown)
    assert (found["transfer_ms"], found["compute_ms"]) == (transfer_ms, 40.0)


def test_a_range_of_a_profile_is_not_a_kernel(tmp_path):
    """On a GPU an optimizer's range covers all of its kernels, whose time would count twice."""

    def run():
        with torch.profiler.record_function("Optimizer.step"):
            torch.ones(8).add_(1)

    launches, _, top = profile(_stage(tmp_path), run)
    assert launches > 0
    assert "aten::add_" in {name for name, *_ in top}
    assert "Optimizer.step" not in {name for name, *_ in top}


def test_the_first_contact_compares_every_kernel(tmp_path):
    pytest.importorskip("triton")
    stage = _stage(tmp_path)
    contact(stage)
    assert stage.faults == []
    rows = _rows(stage)
    assert all(0 <= row["value"] <= row["limit"] for row in rows.values())
    checks = {name.partition(",")[0] for name in rows}
    assert checks >= {"fc1 16x16", "router", "cross entropy", "exact top-k", "layer mixtral-8x22b 4096"}
    assert len(checks) == 16


def test_wrong_numbers_and_exceptions_of_a_check_stop_no_other(tmp_path):
    stage = _stage(tmp_path)
    checks = Contact(stage)
    y = torch.ones(4)
    checks.check("wrong", lambda: checks.close("y", 1.1 * y, y))
    checks.check("not a number", lambda: checks.close("y", y / 0 * 0, y))
    checks.check("broken", lambda: 1 / 0)
    checks.check("right", lambda: checks.close("y", y, y))
    assert [fault.split(":")[0] for fault in stage.faults[:2]] == ["wrong, y", "not a number, y"]
    assert stage.faults[2].startswith("broken raises ZeroDivisionError: division by zero at ")
    assert "test_gpu_stages.py:" in stage.faults[2]
    assert _rows(stage)["right, y"]["value"] == 0.0


def test_a_lost_context_ends_the_contact(tmp_path, monkeypatch):
    def lose():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    pytest.importorskip("triton")
    stage = _stage(tmp_path)
    monkeypatch.setattr("benchmarks.gpu_contact.KERNEL_CHECKS", (lambda checks, case: checks.check("x", lose),))
    contact(stage)
    assert "the CUDA context was lost in x, and no other check ran" in stage.faults


def test_a_part_of_the_contact_can_be_chosen(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    words = ["--rows", str(path), "--device", "cpu", "--tiny", "--only", "router GEMM"]
    assert gpu_stages.main(["contact", *words]) == 0
    assert {json.loads(line)["name"].split(",")[0] for line in path.read_text().splitlines()} == {
        "router GEMM in parts"
    }
    with pytest.raises(SystemExit):
        gpu_stages.main(["env", *words])
    assert "the stage env has none" in capsys.readouterr().err


def test_the_stages_have_the_allocator_of_the_trainer(tmp_path, monkeypatch):
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gpu_stages, "STAGES", {"env": lambda stage: None})
    gpu_stages.main(["env", "--rows", str(tmp_path / "rows.jsonl"), "--device", "cuda"])
    assert os.environ.pop(ALLOCATOR_VARIABLES[0]) == "expandable_segments:True"


def test_the_steps_are_planned_with_the_probed_device(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_stages, "STEPS", gpu_stages.STEPS[:1])
    stage = _stage(tmp_path)
    gpu_stages.plan(stage)
    assert "device.toml is missing; the stage probe writes it" in stage.faults[0]
    (tmp_path / "device.toml").write_text(device_toml(replace(load_device("cpu"), name="mine"), []))
    gpu_stages.plan(stage)
    assert _rows(stage)["qwen3-30b-a3b, 2 layers, planned"]["value"] > 0


def test_a_training_step_runs_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_stages, "STEPS", gpu_stages.STEPS[-1:])
    stage = _stage(tmp_path)
    gpu_stages.step(stage)
    assert _rows(stage)["mixtral-8x22b, 1 layer, 1 sample"]["value"] > 0
    assert stage.faults == []


def test_a_step_for_cuda_graphs_runs_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_stages, "GRAPHED_TOKENS", gpu_stages.GRAPHED_TOKENS[:1])
    stage = _stage(tmp_path)
    gpu_stages.graphs(stage)
    assert _rows(stage)["qwen3-30b-a3b, 2 layers, 4 x 512 tokens, cuda_graphs none"]["value"] > 0
    assert stage.faults == []


def test_every_implementation_of_every_product_is_compared(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(gpu_stages, "LAYERS", gpu_stages.LAYERS[:1])
    # Triton's interpreter takes seconds for a launch of the usual sizes.
    sizes = {"hidden_size": 32, "ffn.moe.intermediate_size": 32, "ffn.moe.num_experts": 2, "ffn.moe.top_k": 1}
    monkeypatch.setattr(gpu_stage, "TINY_LAYER", gpu_stage.TINY_LAYER | sizes)
    monkeypatch.setattr(gpu_stage, "TINY_TOKENS", 4)
    monkeypatch.setattr(Stage, "ms", lambda self, run, repeats: 1.0)
    stage = _stage(tmp_path)
    gpu_stages.products(stage)
    rows = _rows(stage)
    assert {row["key"].split("'")[1] for row in rows.values()} >= {"product", "weights"}
    assert all(row["difference"] <= MAX_DIFFERENCE for row in rows.values())
    assert stage.faults == []


@pytest.mark.parametrize("wrong", [1.1, float("nan")])
def test_a_wrong_implementation_is_found_and_the_others_are_still_timed(tmp_path, wrong):
    stage = _stage(tmp_path)
    y = torch.ones(4)
    candidates = {"torch": lambda: (y, None), "triton": lambda: (wrong * y, None), "other": lambda: (y, None)}
    key = TuningKey("product", 4, ())
    tuner = ComparingAutotuner(stage, "a layer")
    assert tuner.choose(key, candidates) == "torch"
    assert tuner.choose(key, {"torch": lambda: 1 / 0}) == "torch"
    assert list(_rows(stage)) == [f"a layer, product 1, {name}" for name in candidates]
    (fault,) = stage.faults
    assert fault.startswith("a layer, product 1, triton differs from torch by")
