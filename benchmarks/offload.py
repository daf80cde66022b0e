"""Peak memory and time of a step with activations in memory, made again, and on a disk.

`python benchmarks/offload.py FOLDER [layers]` on one rank and the CPU; FOLDER lies on the disk to be measured. Each way
runs in a process of its own. Memory is the peak of the resident set in the step over what it was before it, less
weights' gradients, which are there before; of the resident set the kernel's cache of the file is no part. Waited is the
time in which training stood still for the disk, io the time in which bytes were carried.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

from moefold.config.model import ModelConfig
from moefold.config.schema import Config, RunConfig, TrainConfig
from moefold.model.transformer import build_model
from moefold.parallel.offload import apply_offload, open_offload
from moefold.parallel.recompute import apply_recompute

TOKENS, VOCABULARY = 4096, 256
STEPS = 3
WAYS: dict[str, dict[str, object]] = {
    "all in memory": {},
    "moe, core_attention": {"offload": ("moe", "core_attention")},
    "layer": {"offload": ("layer",)},
    "layer, waits": {"offload": ("layer",), "offload_waits": True},
    "recompute layer": {"recompute": ("layer",)},
    "recompute and offload layer": {"recompute": ("layer",), "offload": ("layer",)},
}
COLUMNS = ("peak_mib", "step_s", "stored_mib", "kept_mib", "io_s", "waited_s")


def main() -> None:
    """Measure every way, or, in a process of its own, one."""
    folder, layers = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 16
    if len(sys.argv) > 3:
        print(json.dumps(measure(WAYS[sys.argv[3]], folder, layers)))
        return
    print(f"{'':28}" + "".join(f"{name:>12}" for name in COLUMNS))
    for name in WAYS:
        # Without it freed memory of some sizes stays with the process, and the peak would count it.
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        command = [sys.executable, __file__, folder, str(layers), name]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout)
        print(f"{name:28}" + "".join(f"{found[column]:12.3f}" for column in COLUMNS), flush=True)


def measure(way: dict[str, object], folder: str, layers: int) -> dict[str, float]:
    """Train some steps; the peak of the largest, and medians of all but the first."""
    torch.set_num_threads(1)
    model = ModelConfig(
        num_layers=layers,
        hidden_size=256,
        num_attention_heads=8,
        num_query_groups=4,
        num_experts=8,
        moe_ffn_hidden_size=512,
        vocab_size=VOCABULARY,
    )
    place = {"offload_to": "ssd", "offload_dir": folder, "offload_min_kib": 64} if "offload" in way else {}
    train = TrainConfig(seq_len=512, micro_batch_size=TOKENS // 512, **way, **place)  # type: ignore[arg-type]
    module = build_model(Config(run=RunConfig(dtype="float32"), model=model, train=train))
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
    module.set_positions(torch.arange(train.seq_len))
    apply_recompute(module, train.recompute)
    offload = open_offload(train, torch.device("cpu"), 0)
    if offload is not None:
        apply_offload(module, train.offload, offload)
    tokens = torch.randint(VOCABULARY, (train.micro_batch_size, train.seq_len))
    shares = torch.full(tokens.shape, 1 / tokens.numel())
    rows = []
    for _ in range(STEPS):
        Path("/proc/self/clear_refs").write_text("5")
        before = _memory_kib("VmRSS")
        started = time.perf_counter()
        if offload is not None:
            offload.begin_step()
        module(tokens, tokens, shares).sum().backward()
        row = {"step_s": time.perf_counter() - started, "peak_mib": (_memory_kib("VmHWM") - before) / 1024}
        if offload is not None:
            totals = offload.end_step()
            row |= {"stored_mib": totals.stored_bytes / 2**20, "kept_mib": totals.resident_bytes / 2**20}
            row |= {"io_s": totals.io_s, "waited_s": totals.waited_s}
        rows.append(row)
    # The first step makes the gradients, and knows nothing of the disk yet.
    found = {name: statistics.median(row.get(name, 0.0) for row in rows[1:]) for name in COLUMNS}
    return found | {"peak_mib": max(row["peak_mib"] for row in rows[1:])}


def _memory_kib(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key + ":"))


if __name__ == "__main__":
    main()
