"""Measure peak memory and step time with activations in memory, recomputed, and offloaded to an SSD.

`python benchmarks/ssd_offload.py FOLDER [layers]`, one rank on the CPU; FOLDER is on the disk to be measured. Each
strategy runs in its own process. Memory is the peak resident set of a step minus the set before it; weight gradients
are allocated before, and the resident set does not include the page cache. waited_s is the time that training waited
for the disk; io_s is the time of copying bytes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

from moefold.config.edit import edit_model
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.model.transformer import build_model
from moefold.parallel.offload import apply_offload, open_offload
from moefold.parallel.recompute import apply_recompute

TOKENS = 4096
VOCAB_SIZE = 256
STEPS = 3
STRATEGIES: dict[str, dict[str, object]] = {
    "all in memory": {},
    "moe, core_attention": {"offload": ("moe", "core_attention")},
    "layer": {"offload": ("layer",)},
    "layer, synchronous": {"offload": ("layer",), "offload_waits": True},
    "recompute layer": {"recompute": ("layer",)},
    "recompute and offload layer": {"recompute": ("layer",), "offload": ("layer",)},
}
COLUMNS = ("peak_mib", "step_s", "stored_mib", "kept_mib", "io_s", "waited_s")


def main() -> None:
    """Measure every strategy, each in a subprocess, or only the given strategy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="folder on the disk to be measured")
    parser.add_argument("layers", nargs="?", type=int, default=16, help="layers of the model (default 16)")
    parser.add_argument("--strategy", choices=STRATEGIES, help="measure this one in this process and print JSON")
    args = parser.parse_args()
    if args.strategy is not None:
        print(json.dumps(measure(STRATEGIES[args.strategy], args.folder, args.layers)))
        return
    print(f"{'':28}" + "".join(f"{name:>12}" for name in COLUMNS))
    for name in STRATEGIES:
        # Otherwise the process keeps freed memory of some sizes, which the peak would include.
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        command = [sys.executable, __file__, args.folder, str(args.layers), "--strategy", name]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        measured = json.loads(done.stdout)
        print(f"{name:28}" + "".join(f"{measured[column]:12.3f}" for column in COLUMNS), flush=True)


def measure(strategy: dict[str, object], folder: str, layers: int) -> dict[str, float]:
    """Train some steps and return the largest peak, and medians of the other columns, without the first step."""
    torch.set_num_threads(1)
    model = edit_model(
        ModelConfig(),
        {
            "layers": layers,
            "hidden_size": 256,
            "attention.num_heads": 8,
            "attention.num_kv_heads": 4,
            "ffn.moe.num_experts": 8,
            "ffn.moe.intermediate_size": 512,
            "vocab_size": VOCAB_SIZE,
        },
    )
    target = {"offload_to": "ssd", "offload_dir": folder, "offload_min_kib": 64} if "offload" in strategy else {}
    train = TrainConfig(seq_len=512, micro_batch_size=TOKENS // 512, **strategy, **target)  # type: ignore[arg-type]
    module = build_model(Config(run=RunConfig(dtype="float32"), model=model, train=train))
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
    module.set_positions(torch.arange(train.seq_len))
    apply_recompute(module, train.recompute)
    offload = open_offload(train, torch.device("cpu"), 0)
    if offload is not None:
        apply_offload(module, train.offload, offload)
    tokens = torch.randint(VOCAB_SIZE, (train.micro_batch_size, train.seq_len))
    weights = torch.full(tokens.shape, 1 / tokens.numel())
    rows = []
    for _ in range(STEPS):
        Path("/proc/self/clear_refs").write_text("5")
        before_kib = _memory_kib("VmRSS")
        started_s = time.perf_counter()
        if offload is not None:
            offload.begin_step()
        module(tokens, labels=tokens, weights=weights).sum().backward()
        row = {"step_s": time.perf_counter() - started_s, "peak_mib": (_memory_kib("VmHWM") - before_kib) / 1024}
        if offload is not None:
            totals = offload.end_step()
            row |= {"stored_mib": totals.stored_bytes / 2**20, "kept_mib": totals.resident_bytes / 2**20}
            row |= {"io_s": totals.io_s, "waited_s": totals.waited_s}
        rows.append(row)
    # The first step allocates the gradients and has no estimate of the disk bandwidth yet.
    medians = {name: statistics.median(row.get(name, 0.0) for row in rows[1:]) for name in COLUMNS}
    return medians | {"peak_mib": max(row["peak_mib"] for row in rows[1:])}


def _memory_kib(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key + ":"))


if __name__ == "__main__":
    main()
