"""Compare upcycled MoE models with continued dense training, from one dense model and on the same tokens.

    python benchmarks/upcycling.py [--steps 300] [--dir DIR]

Trains a small dense model on python-docs (bytes), and continues from its weights in four variants with the same data,
batches and learning rates: dense; with experts that are copies; with experts that are slices (granularity 2), in
virtual groups or with a random router row each. Prints the held-out loss of each variant by step.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMON = (
    "data.kind=python-docs",
    "run.dtype=float32",
    "run.device=cpu",
    "model.layers=4",
    "model.hidden_size=128",
    "model.attention.num_heads=4",
    "model.attention.num_kv_heads=2",
    "train.seq_len=128",
    "train.micro_batch_size=8",
    "train.global_batch_size=16",
    "train.eval_samples=128",
    "train.warmup_steps=20",
    "train.lr_schedule.min_lr=1e-4",
    "checkpoint.resume=never",
)
DENSE = ("model.layers=4 dense", "model.ffn.dense.intermediate_size=512")
COPIES = ("model.ffn.moe.num_experts=8", "model.ffn.moe.top_k=2", "model.ffn.moe.intermediate_size=512")
SLICES = ("model.ffn.moe.num_experts=16", "model.ffn.moe.top_k=4", "model.ffn.moe.intermediate_size=256")
VARIANTS = {
    "dense": DENSE,
    "8 copies, top 2": COPIES,
    "16 slices, top 4": SLICES,
    "16 slices, own router rows": (*SLICES, "checkpoint.upcycle.router_init=expert"),
}


def main() -> int:
    """Train all variants and print their losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="steps of each run, 20 or more (default 300)")
    parser.add_argument("--dir", type=Path, help="folder of the runs; default: a temporary one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.dir or Path(temporary)
        every = max(1, args.steps // 6)
        common = [f"run.steps={args.steps}", f"train.eval_every={every}"]
        _train(folder / "start", [*common, *DENSE, "train.lr=2e-3", f"checkpoint.every={args.steps}"])
        start = folder / "start" / "checkpoints" / f"step-{args.steps:06d}"
        print(f"initial dense model: {_losses(folder / 'start')[-1][1]:.4f}", flush=True)
        for name, overrides in VARIANTS.items():
            key = "checkpoint.init_from" if name == "dense" else "checkpoint.upcycle.dense"
            run = folder / name.replace(" ", "-").replace(",", "")
            # Another seed than in the dense run, so the samples have another order, which is the same for all variants.
            started_s = time.perf_counter()
            _train(run, [*common, *overrides, f"{key}={start}", "run.seed=1", "train.lr=1e-3"])
            losses = "  ".join(f"{step}: {loss:.4f}" for step, loss in _losses(run))
            print(f"{name:36}{losses}  ({time.perf_counter() - started_s:.0f} s)", flush=True)
    return 0


def _train(run: Path, overrides: list[str]) -> None:
    recipe = run.parent / "empty.toml"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.touch()
    command = [sys.executable, "-m", "moefold", "train", str(recipe), *COMMON, *overrides, f"run.dir={run}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _losses(run: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["eval_loss"]) for line in lines if line.get("eval_loss") is not None]


if __name__ == "__main__":
    sys.exit(main())
