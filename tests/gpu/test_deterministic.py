"""`run.deterministic` on one GPU: whole runs by the command, bit for bit the same twice. Needs CUDA."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
ONE_RANK = tuple(f"parallel.{name}=1" for name in ("world_size", "tp", "cp", "pp", "ep", "etp"))
SIZES = (
    "model.hidden_size=256",
    "model.attention.head_dim=64",
    "model.ffn.moe.intermediate_size=256",
    "train.seq_len=128",
)


def _losses(run_dir: Path, *words: str) -> list[tuple[float, float]]:
    # A process of its own: cuBLAS reads its workspace setting before its first GEMM.
    command = [sys.executable, "-m", "moefold", "train", str(RECIPE), f"run.dir={run_dir}", "run.device=cuda"]
    settings = ("run.deterministic=true", "run.steps=4", "metrics.tensorboard=false", *ONE_RANK, *SIZES)
    done = subprocess.run([*command, *settings, *words], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(record["loss"], record["grad_norm"]) for record in records]


@pytest.mark.parametrize(
    "words",
    [
        ("run.dtype=bfloat16",),
        ("run.dtype=bfloat16", "run.kernels=plain", "train.recompute=['layer']"),
        ("run.dtype=bfloat16", "moe.capacity_factor=1.0", "train.optimizer=muon"),
        ("run.dtype=float32",),
    ],
    ids=lambda words: " ".join(words),
)
def test_two_runs_are_bit_equal(tmp_path, words):
    first, second = (_losses(tmp_path / name, *words) for name in ("first", "second"))
    assert len(first) == 4
    assert first == second
