"""Measure peak memory of `moefold import`, `export` and `upcycle` on models larger than the memory limit.

    python benchmarks/conversion_memory.py [--gb 1.5] [--only mixtral-bf16] [--keep DIR]

Writes random weights to a temporary folder: Mixtral, a dense model to upcycle, a Llama with a large vocabulary and a
tied embedding stored twice, a gpt-oss with stacked experts, and float32 checkpoints of runs on one rank. Converts each
in a new process and prints its peak resident memory and the limit: 1.3 times the largest layer or tensor of the
Hugging Face folder plus 500 MB. Exit status 1 if a limit is exceeded.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from moefold.checkpoint.checkpoint_meta import CheckpointMeta, counted, model_sizes, write_meta
from moefold.checkpoint.streaming_io import TensorChunk, write_chunks
from moefold.config.base.limits import FORMAT
from moefold.config.edit import edit_model
from moefold.config.load import config_from_dict
from moefold.config.model import ModelConfig
from moefold.convert.families.families import FAMILIES, Family
from moefold.convert.families.tensor_mapping import StateDictMapping
from moefold.convert.safetensors_file import DTYPES, FileWriter, bytes_of, create_file, plan_file_layout
from moefold.convert.weight_sources import family_mapping, parameter_shapes

LARGEST_FACTOR = 1.3
FIXED_BYTES = 500e6
"""The interpreter and torch take about 300 MB of it."""
MEASURED_COMMAND = """
import re, sys
from pathlib import Path
from moefold.cli.main import main
status = main(sys.argv[1:])
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
sys.exit(status)
"""
"""Runs a conversion and prints its peak in KiB (Linux); ru_maxrss would be at least the peak of the parent."""


def main() -> int:
    """Run the benchmark and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=1.5, help="size of the Mixtral in GB (default 1.5)")
    parser.add_argument("--only", choices=("llama-f32", "gpt-oss-f32", "mixtral-bf16"), help="convert this model only")
    parser.add_argument("--keep", type=Path, help="write to this folder and keep it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        print(f"{'conversion':44}{'GB':>6}{'s':>8}{'largest MB':>12}{'peak MB':>9}{'limit MB':>10}")
        models = {
            "llama-f32": _llama,
            "gpt-oss-f32": _gpt_oss,
            "mixtral-bf16": lambda path: _mixtral(path, args.gb * 1e9),
        }
        fits = []
        for name in models if args.only is None else [args.only]:
            (folder / name).mkdir()
            fits.append(models[name](folder / name))
            if not args.keep:
                shutil.rmtree(folder / name)
    return 0 if all(fits) else 1


def _mixtral(folder: Path, size: float) -> bool:
    sizes = {"hidden_size": 2048, "attention.num_heads": 16, "attention.num_kv_heads": 4, "vocab_size": 32000}
    # 8 experts of 3 matrices: 553 MB a layer in bfloat16.
    experts = edit_model(
        ModelConfig(),
        {
            **sizes,
            "layers": 1,
            "ffn.moe.num_experts": 8,
            "ffn.moe.top_k": 2,
            "ffn.moe.intermediate_size": 5632,
        },
    )
    layer = _largest_bytes(_mapping(FAMILIES["mixtral"], experts), "BF16")
    model = replace(experts, layers=max(2, round(size / layer + 0.5)))
    _write_hf_folder(folder / "hf", FAMILIES["mixtral"], model, "BF16")
    runs = [_import_command(folder), *_export_commands(folder)]
    dense = edit_model(
        ModelConfig(),
        {**sizes, "layers": f"{model.num_layers} dense", "ffn.dense.intermediate_size": 5632},
    )
    _write_hf_folder(folder / "dense", FAMILIES["llama"], dense, "BF16")
    runs.append(("upcycle", [str(folder / "dense"), str(folder / "moe"), "model.ffn.moe.num_experts=8"]))
    _write_checkpoint(folder / "run", model)
    runs.append(("export of a run", [str(folder / "run"), str(folder / "trained")]))
    return _measure_all(runs, layer, folder)


def _llama(folder: Path) -> bool:
    """Convert a Llama whose embedding, 410 MB, is far larger than a layer."""
    sizes = {
        "hidden_size": 512,
        "attention.num_heads": 8,
        "attention.num_kv_heads": 2,
        "ffn.dense.intermediate_size": 1024,
    }
    sizes |= {"layers": "2 dense", "vocab_size": 200_000, "tie_embeddings": True}
    model = edit_model(ModelConfig(), sizes)
    _write_hf_folder(folder / "hf", FAMILIES["llama"], model, "F32", stores_tied_head=True)
    _write_checkpoint(folder / "run", model)
    runs = [_import_command(folder), _import_command(folder, "--check"), *_export_commands(folder)]
    runs.append(("export of a run", [str(folder / "run"), str(folder / "trained")]))
    return _measure_all(runs, _largest_bytes(_mapping(FAMILIES["llama"], model), "F32"), folder)


def _gpt_oss(folder: Path) -> bool:
    """Convert stacked experts, w_gate and w_up interleaved: one tensor of 537 MB in a layer of 811 MB."""
    sizes = {"layers": 2, "hidden_size": 1024, "ffn.moe.intermediate_size": 2048, "vocab_size": 64}
    heads = {"attention.num_heads": 8, "attention.num_kv_heads": 2}
    model = config_from_dict({"model": {"preset": "gpt-oss-20b", **sizes, **heads}}).model
    _write_hf_folder(folder / "hf", FAMILIES["gpt_oss"], model, "F32")
    runs = [_import_command(folder), _import_command(folder, "--check"), *_export_commands(folder)]
    return _measure_all(runs, _largest_bytes(_mapping(FAMILIES["gpt_oss"], model), "F32"), folder)


def _import_command(folder: Path, *options: str) -> tuple[str, list[str]]:
    name = " ".join(("import", *options))
    return name, [str(folder / "hf"), str(folder / f"ckpt{''.join(options)}"), "--no-tokenizer", *options]


def _export_commands(folder: Path) -> list[tuple[str, list[str]]]:
    check_args = [str(folder / "ckpt"), str(folder / "checked"), "--check"]
    return [("export", [str(folder / "ckpt"), str(folder / "exported")]), ("export --check", check_args)]


def _measure_all(runs: list[tuple[str, list[str]]], largest: float, folder: Path) -> bool:
    fits = [_measure(name, args, largest, folder) for name, args in runs]
    return all(fits)


def _write_checkpoint(folder: Path, model: ModelConfig) -> None:
    """Write a checkpoint in float32, each tensor in one chunk."""
    folder.mkdir()
    shapes = parameter_shapes(model)
    chunks = [TensorChunk(name, 0, shape[0]) for name, shape in shapes.items()]
    write_chunks(
        folder, shapes, dict.fromkeys(shapes, torch.float32), chunks, lambda chunk: torch.randn(shapes[chunk.name])
    )
    meta = CheckpointMeta(
        format=FORMAT, states=counted(step=1), order={}, model=model_sizes(model), parallel={}, dtype="bfloat16"
    )
    write_meta(folder, meta)


def _measure(name: str, args: list[str], largest: float, folder: Path) -> bool:
    started_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", MEASURED_COMMAND, name.split()[0], *args], stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(f"moefold {' '.join((name.split()[0], *args))} failed")
    peak = int(done.stdout.splitlines()[-1]) * 1024
    size = sum(path.stat().st_size for path in (folder / "hf").glob("*.safetensors"))
    limit = LARGEST_FACTOR * largest + FIXED_BYTES
    seconds = time.perf_counter() - started_s
    label = f"{name}, {folder.name}"
    numbers = f"{size / 1e9:6.2f}{seconds:8.1f}{largest / 1e6:12.0f}{peak / 1e6:9.0f}{limit / 1e6:10.0f}"
    print(f"{label:44}{numbers}", flush=True)
    return peak < limit


def _mapping(family: Family, model: ModelConfig) -> StateDictMapping:
    return family_mapping(model, family.layouts[0], family)


def _largest_bytes(mapping: StateDictMapping, dtype: str) -> float:
    """Return the bytes of the first layer, or of the largest tensor if that is larger."""
    counts = {name: torch.Size(shape).numel() for name, shape in mapping.hf_shapes.items()}
    layer = sum(count for name, count in counts.items() if ".layers.0." in name)
    return max(layer, *counts.values()) * DTYPES[dtype].itemsize


def _write_hf_folder(
    folder: Path, family: Family, model: ModelConfig, dtype: str, *, stores_tied_head: bool = False
) -> None:
    """Write a Hugging Face folder tensor by tensor, with a copy of the embedding as the head if `stores_tied_head`."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(family.write(model)))
    shapes = {name: (dtype, shape) for name, shape in _mapping(family, model).hf_shapes.items()}
    if stores_tied_head:
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    layout = plan_file_layout(folder / "model.safetensors", shapes)
    create_file(folder / "model.safetensors", layout)
    with FileWriter() as writer:
        for name, stored in layout.tensors.items():
            seed = 0 if name in ("lm_head.weight", "model.embed_tokens.weight") else 1
            values = torch.randn(stored.shape, generator=torch.Generator().manual_seed(seed))
            writer.write(stored, bytes_of(values.to(DTYPES[dtype])))


if __name__ == "__main__":
    sys.exit(main())
