"""Measure a step with and without the compiled parts of `run.compile`, for plain and for C kernels.

`python benchmarks/compiled_parts.py [float32|bfloat16]`, one rank on the CPU, one thread. In each round all kinds run
one after another; the table has the medians of the CPU time of a step and of its ratio to eager in the same round. The
first step compiles, or reads Inductor's cache on the disk; with an empty TORCHINDUCTOR_CACHE_DIR and
TORCHINDUCTOR_COMPILE_THREADS of 1 it includes the compilers.
"""

import argparse
import resource
import statistics
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from moefold.config.edit import edit_model
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.model.transformer import TORCH_DTYPES, build_model
from moefold.parallel.kernels.select import apply_kernels, select_kernels

ROUNDS = 7
MODEL = edit_model(
    ModelConfig(),
    {
        "layers": "dense, moe",
        "hidden_size": 512,
        "attention.num_heads": 8,
        "attention.num_kv_heads": 4,
        "attention.qk_norm": {},
        "ffn.dense.intermediate_size": 2048,
        "ffn.moe.intermediate_size": 512,
        "ffn.moe.shared.intermediate_size": 512,
        "ffn.moe.num_experts": 8,
        "vocab_size": 512,
    },
)
KINDS = {
    "plain": ("plain", "none"),
    "plain, compiled": ("plain", "blocks"),
    "auto": ("auto", "none"),
    "auto, compiled": ("auto", "blocks"),
}
"""`run.kernels` and `run.compile` of each kind. Its eager twin comes before a compiled one."""


def main() -> None:
    """Print a table of the kinds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dtype", nargs="?", default="bfloat16", choices=["float32", "bfloat16"])
    dtype = parser.parse_args().dtype
    torch.set_num_threads(1)
    train = TrainConfig(seq_len=512, micro_batch_size=2, global_batch_size=2)
    cfg = Config(run=RunConfig(device="cpu", dtype=dtype), model=MODEL, train=train)
    steps = {name: _step(replace(cfg, run=replace(cfg.run, kernels=k, compile=c))) for name, (k, c) in KINDS.items()}
    first = {name: _cpu_time(step) for name, step in steps.items()}
    rounds = [{name: _cpu_time(step) for name, step in steps.items()} for _ in range(ROUNDS)]
    for name in KINDS:
        eager = name.removesuffix(", compiled")
        ratio = statistics.median(times[name] / times[eager] for times in rounds)
        median = statistics.median(times[name] for times in rounds)
        print(f"{name:16} {median:.3f} s, {ratio:.3f} of eager; first step {first[name]:.1f} s")


def _step(cfg: Config) -> Callable[[], None]:
    """Return a function that runs forward and backward of one micro-batch."""
    torch.manual_seed(0)
    model = build_model(cfg).to(TORCH_DTYPES["float32"])
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    apply_kernels(model, select_kernels(cfg, torch.device("cpu")))
    model.set_positions(torch.arange(cfg.train.seq_len))
    tokens = torch.randint(cfg.model.vocab_size, (cfg.train.micro_batch_size, cfg.train.seq_len))
    weights = torch.ones(tokens.shape)

    def run() -> None:
        model(tokens, labels=tokens, weights=weights).sum().backward()
        model.zero_grad()

    return run


def _cpu_time(step: Callable[[], None]) -> float:
    """Return the CPU time of all threads and of finished child processes."""
    start = _used_cpu_time()
    step()
    return _used_cpu_time() - start


def _used_cpu_time() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    main()
