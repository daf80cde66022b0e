"""Peak memory of `moefold import`, `export` and `upcycle` on models that are larger than they may use.

    python benchmarks/conversion_memory.py [--gb 2] [--keep DIR]

Makes Mixtral-like folders of random weights, a dense one to upcycle and a checkpoint as a run on one rank writes it
(tensors whole and in float32) in a temporary folder, converts them in fresh processes, and prints the largest resident
memory of each beside the limit: 1.3 times the largest layer of the Hugging Face folder plus 500 MB. Exit 1 if one is
exceeded.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from moefold.checkpoint.folder import FORMAT, CheckpointMeta, model_sizes, write_meta
from moefold.checkpoint.stream import Chunk, write_chunks
from moefold.config.schema import ModelConfig
from moefold.convert.families import FAMILIES, Family
from moefold.convert.piece import Plan
from moefold.convert.safetensors_file import DTYPES, FileWriter, begin_file, bytes_of, plan_file
from moefold.convert.weights import parameter_shapes, plan_for

LAYER_FACTOR = 1.3
FIXED_BYTES = 500e6
"""The interpreter and torch alone take about 300 MB."""


def main() -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=2.0, help="size of the model in GB (default 2)")
    parser.add_argument("--keep", type=Path, help="use this folder, and leave what was made there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        print(f"{'conversion':44}{'GB':>6}{'s':>8}{'layer MB':>10}{'peak MB':>9}{'limit MB':>10}")
        fits = [_race(folder / dtype, dtype, args.gb * 1e9) for dtype in ("BF16", "F32")]
    return 0 if all(fits) else 1


def _race(folder: Path, dtype: str, size: float) -> bool:
    folder.mkdir()
    sizes = {"hidden_size": 2048, "num_attention_heads": 16, "num_query_groups": 4, "vocab_size": 32000}
    # 8 experts of 3 matrices: 553 MB a layer in bfloat16.
    experts = ModelConfig(**sizes, num_layers=1, layer_pattern="M", num_experts=8, top_k=2, moe_ffn_hidden_size=5632)
    layer = _layer_bytes(_plan(FAMILIES["mixtral"], experts), dtype)
    whole = replace(experts, num_layers=max(2, round(size / layer + 0.5)))
    _make(folder / "hf", FAMILIES["mixtral"], whole, dtype)
    runs = [
        ("import", [str(folder / "hf"), str(folder / "ckpt"), "--no-tokenizer"], layer),
        ("export", [str(folder / "ckpt"), str(folder / "again")], layer),
        ("export --check", [str(folder / "ckpt"), str(folder / "checked"), "--check"], layer),
    ]
    if dtype == "BF16":
        dense = ModelConfig(**sizes, num_layers=whole.num_layers, layer_pattern="D", ffn_hidden_size=5632)
        _make(folder / "dense", FAMILIES["llama"], dense, dtype)
        words = [str(folder / "dense"), str(folder / "moe"), "model.num_experts=8"]
        runs.append(("upcycle", words, layer))
        _make_checkpoint(folder / "run", whole)
        runs.append(("export of a run", [str(folder / "run"), str(folder / "trained")], layer))
    found = [_measure(name, words, layer_bytes, folder) for name, words, layer_bytes in runs]
    return all(found)


def _make_checkpoint(folder: Path, model: ModelConfig) -> None:
    """Write a checkpoint in float32, each tensor in one chunk."""
    folder.mkdir()
    shapes = parameter_shapes(model)
    chunks = [Chunk(name, 0, shape[0]) for name, shape in shapes.items()]
    write_chunks(
        folder, shapes, dict.fromkeys(shapes, torch.float32), chunks, lambda chunk: torch.randn(shapes[chunk.name])
    )
    meta = CheckpointMeta(
        format=FORMAT, step=1, samples=0, tokens=0, order={}, model=model_sizes(model), parallel={}, dtype="bfloat16"
    )
    write_meta(folder, meta)


def _measure(name: str, words: list[str], layer_bytes: float, folder: Path) -> bool:
    started = time.perf_counter()
    command = [sys.executable, "-m", "moefold", name.split()[0], *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    size = sum(path.stat().st_size for path in (folder / "hf").glob("*.safetensors"))
    peak, limit = usage.ru_maxrss * 1024, LAYER_FACTOR * layer_bytes + FIXED_BYTES
    seconds = time.perf_counter() - started
    label = f"{name}, {'F32 to ' if name == 'export of a run' else ''}{folder.name}"
    numbers = f"{size / 1e9:6.2f}{seconds:8.1f}{layer_bytes / 1e6:10.0f}{peak / 1e6:9.0f}{limit / 1e6:10.0f}"
    print(f"{label:44}{numbers}", flush=True)
    return peak < limit


def _plan(family: Family, model: ModelConfig) -> Plan:
    return plan_for(model, family.layouts[0], family)


def _layer_bytes(plan: Plan, dtype: str) -> float:
    values = sum(torch.Size(shape).numel() for name, shape in plan.their_shapes.items() if ".layers.0." in name)
    return values * DTYPES[dtype].itemsize


def _make(folder: Path, family: Family, model: ModelConfig, dtype: str) -> None:
    """Write a folder tensor by tensor."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(family.write(model)))
    shapes = {name: (dtype, shape) for name, shape in _plan(family, model).their_shapes.items()}
    layout = plan_file(folder / "model.safetensors", shapes)
    begin_file(folder / "model.safetensors", layout)
    torch.manual_seed(0)
    with FileWriter() as writer:
        for stored in layout.tensors.values():
            writer.write(stored, bytes_of(torch.randn(stored.shape).to(DTYPES[dtype])))


if __name__ == "__main__":
    sys.exit(main())
