"""Run folders as training writes them, by the writers of training."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moefold.config.schema import Config, write_config_json
from moefold.metrics.expert_counts import ExpertCountsWriter
from moefold.metrics.rank_times import rank_time_metrics
from moefold.metrics.writer import MetricsWriter, log_fault
from tests.metrics.example import LAYER, MEMORY, STEP

HOSTILE = "</pre><script>window.broken = 1</script><img src=x onerror='window.broken = 2'> \u202e \ud800"
"""Text of a stranger: markup, a change of the direction of writing, a lone surrogate."""


def step_metrics(step: int, **values: Any) -> dict[str, Any]:
    """Metrics of a step of a run with two MoE layers and two ranks."""
    slowest = rank_time_metrics(np.array([[0.1, 0.0, 0.1], [0.3, 0.01234, 0.0]][:: 1 if step % 2 else -1]))
    made = {
        "loss": 5.0 / step,
        "tokens": 2048 * step,
        "moe_layers": (replace(LAYER, layer=0, load=1.5), replace(LAYER, layer=1, load=1 + step / 100)),
        "memory_by_part": MEMORY if step % 10 == 0 else None,
        "rank_times": slowest,
        "eval_loss": 5.5 / step if step % 10 == 0 else None,
    }
    return STEP | {"step": step} | made | values


def write_run(run_dir: Path, steps: int = 30, *, cfg: Config | None = None, resume_step: int = 0) -> Path:
    """Write config.json, metrics.jsonl and expert_counts.bin; from a later step as a resumed run does."""
    cfg = cfg or Config()
    run_dir.mkdir(parents=True, exist_ok=True)
    write_config_json(replace(cfg, run=replace(cfg.run, dir=str(run_dir), steps=steps)), run_dir / "config.json")
    with (
        MetricsWriter(run_dir, cfg.metrics, resume_step=resume_step) as writer,
        ExpertCountsWriter(run_dir, (0, 1), 4, resume_step=resume_step) as counts,
    ):
        for step in range(resume_step + 1, steps + 1):
            counts.write(step, np.array([[4, 4, 4, 4], [step, step, 2 * step, 0]]))
            writer.write(step_metrics(step))
    return run_dir


def write_rollouts(run_dir: Path, count: int = 6) -> None:
    """Write rollouts of steps 1, 2, ..., two a step, with a conversation and a hostile text among them."""
    with (run_dir / "rollouts.jsonl").open("a") as file:
        for i in range(count):
            is_chat = i % 2 == 1
            text = f"answer {i}" if i else HOSTILE
            record = {
                "step": 1 + i // 2,
                "prompt": [{"role": "user", "content": f"question {i}"}] if is_chat else f"prompt {i}",
                "completion": [{"role": "assistant", "content": text}] if is_chat else text,
                "reward": None if i == 3 else i / count,
                "prompt_number": i // 2,
                "sample_number": i % 2,
                "finish_reason": "eos",
                "tokens": 7,
                "log_prob": -1.5,
            }
            file.write(json.dumps(record) + "\n")


def write_faults(run_dir: Path) -> None:
    """Write a spike and a straggler."""
    log_fault(run_dir, {"step": 4, "kind": "spike", "action": "skip", "what": HOSTILE, "loss": float("nan")})
    straggler = {"rank": 1, "host": "node-7", "own_s": 0.3, "data_s": 0.0, "median_s": 0.2, "ranks": 2}
    log_fault(run_dir, {"step": 9, "kind": "straggler", "action": "log", **straggler, "slow_steps": 13, "steps": 16})
