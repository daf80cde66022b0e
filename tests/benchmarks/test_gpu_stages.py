"""The measured stages of the half hour on a GPU, as a rehearsal on a CPU."""

import json
import math

import pytest
import torch

from benchmarks import gpu_stages
from benchmarks.gpu_stages import MAX_DIFFERENCE, ComparingAutotuner, Stage
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
    sizes = {"hidden_size": 32, "moe_ffn_hidden_size": 32, "num_experts": 2, "top_k": 1}
    monkeypatch.setattr(gpu_stages, "TINY_LAYER", gpu_stages.TINY_LAYER | sizes)
    monkeypatch.setattr(gpu_stages, "TINY_TOKENS", 4)
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
    assert tuner.choose(key, candidates, CPU) == "torch"
    assert tuner.choose(key, {"torch": lambda: 1 / 0}, CPU) == "torch"
    assert list(_rows(stage)) == [f"a layer, product 1, {name}" for name in candidates]
    (fault,) = stage.faults
    assert fault.startswith("a layer, product 1, triton differs from torch by")
