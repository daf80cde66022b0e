"""What upcycling gives on a small scale: a dense model, then dense and upcycled runs over the same further tokens.

    python benchmarks/upcycling.py [--steps 300] [--dir DIR]

Trains a small dense model on python-docs (bytes), and goes on from its weights in four ways with the same data, batches
and learning rates: as it is; with experts that are copies; with slices (granularity 2), in virtual groups or with a
random router row each. Prints the held-out loss of each, by step.
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
    "model.num_layers=4",
    "model.hidden_size=128",
    "model.num_attention_heads=4",
    "model.num_query_groups=2",
    "train.seq_len=128",
    "train.micro_batch_size=8",
    "train.global_batch_size=16",
    "train.eval_samples=128",
    "train.warmup_steps=20",
    "train.min_lr=1e-4",
    "checkpoint.resume=never",
)
DENSE = ("model.layer_pattern=D", "model.ffn_hidden_size=512")
COPIES = ("model.num_experts=8", "model.top_k=2", "model.moe_ffn_hidden_size=512")
SLICES = ("model.num_experts=16", "model.top_k=4", "model.moe_ffn_hidden_size=256")
WAYS = {
    "dense": DENSE,
    "8 copies, top 2": COPIES,
    "16 slices, top 4": SLICES,
    "16 slices, own router rows": (*SLICES, "model.upcycle_router=expert"),
}


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="steps of each run (default 300)")
    parser.add_argument("--dir", type=Path, help="folder of the runs; a temporary one if left out")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.dir or Path(temporary)
        every = max(1, args.steps // 6)
        words = [f"run.steps={args.steps}", f"train.eval_every={every}"]
        _train(folder / "start", [*words, *DENSE, "train.lr=2e-3", f"checkpoint.every={args.steps}"])
        start = folder / "start" / "checkpoints" / f"step-{args.steps:06d}"
        print(f"dense start: {_losses(folder / 'start')[-1][1]:.4f}", flush=True)
        for name, way in WAYS.items():
            key = "checkpoint.init_from" if name == "dense" else "model.upcycle_from"
            run = folder / name.replace(" ", "-").replace(",", "")
            # Another seed: other samples than those that the start has seen last, the same for all ways.
            began = time.perf_counter()
            _train(run, [*words, *way, f"{key}={start}", "run.seed=1", "train.lr=1e-3"])
            losses = "  ".join(f"{step}: {loss:.4f}" for step, loss in _losses(run))
            print(f"{name:36}{losses}  ({time.perf_counter() - began:.0f} s)", flush=True)
    return 0


def _train(run: Path, words: list[str]) -> None:
    recipe = run.parent / "empty.toml"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.touch()
    command = [sys.executable, "-m", "moefold", "train", str(recipe), *COMMON, *words, f"run.dir={run}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _losses(run: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["eval_loss"]) for line in lines if line.get("eval_loss") is not None]


if __name__ == "__main__":
    sys.exit(main())
