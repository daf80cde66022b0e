"""Time and memory of the loss by chunks, of weights inside the experts, of recomputation, and the time of Muon.

`python benchmarks/memory_savers.py [loss|experts|recompute|muon]` on one rank and the CPU. Times are the best of some
runs in turn; memory is what autograd keeps between the passes, parameters left out.
"""

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from moefold.comm.groups import Group
from moefold.config.model import ModelConfig
from moefold.config.schema import Config, MoEConfig, RunConfig, TrainConfig
from moefold.model.linear import linear
from moefold.model.loss import chunked_cross_entropy, cross_entropy
from moefold.model.moe.layer import MoELayer
from moefold.model.transformer import build_model
from moefold.optim.adamw import build_optimizer
from moefold.optim.muon import build_muon
from moefold.parallel.recompute import apply_recompute
from moefold.testing.saved_memory import measure_saved_bytes

RUNS = 12
MODEL = ModelConfig(
    num_layers=4, hidden_size=256, num_attention_heads=8, num_query_groups=4, num_experts=8, moe_ffn_hidden_size=512
)
TOKENS = 1024
ALONE = Group((0,), 0, None)  # type: ignore[arg-type]


def main() -> None:
    """Run what is asked for, or all."""
    kinds = {"loss": loss, "experts": experts, "recompute": recompute, "muon": muon}
    torch.set_num_threads(1)
    for kind in sys.argv[1:] or kinds:
        print(kind)
        kinds[kind]()


def loss() -> None:
    """2,048 tokens of 256, 32,768 rows of the vocabulary."""
    x, weight = torch.randn(2048, 256, requires_grad=True), (0.02 * torch.randn(32768, 256)).requires_grad_()
    labels = torch.randint(32768, (2048,))

    def plain() -> Tensor:
        return cross_entropy(linear(x, weight), labels).sum()

    def chunked(chunk: int) -> Callable[[], Tensor]:
        return lambda: chunked_cross_entropy(x, weight, labels, chunk).sum()

    _compare({"whole": plain, "chunks of 512": chunked(512), "chunks of 256": chunked(256)})


def experts() -> None:
    """2,048 tokens of 256, the better 2 of 8 experts of 512."""
    x = torch.randn(2048, 1, 256, requires_grad=True)
    layers = {}
    for name, is_inside in (("on results", False), ("in the expert", True)):
        layers[name] = _filled(MoELayer(MODEL, MoEConfig(weight_in_expert=is_inside), loss_scale=1.0))
    runs = {name: (lambda layer=layer: layer(x).sum()) for name, layer in layers.items()}
    _compare(runs)


def recompute() -> None:
    """Four layers of 256, 1,024 tokens, float32."""
    tokens, runs = torch.randint(256, (1, TOKENS)), {}
    for parts in ((), ("norms",), ("core_attention",), ("expert_activation",), ("moe",), ("layer",)):
        train = TrainConfig(seq_len=TOKENS, recompute=parts)
        model = _filled(build_model(Config(run=RunConfig(dtype="float32"), model=MODEL, train=train)))
        model.place(torch.arange(TOKENS))
        apply_recompute(model, parts)
        shares = torch.full((1, TOKENS), 1 / TOKENS)
        runs[", ".join(parts) or "nothing"] = lambda model=model, shares=shares: model(
            tokens, labels=tokens, weights=shares
        ).sum()
    _compare(runs)


def muon() -> None:
    """One step of 15 million weights."""
    for kind in ("adamw", "muon"):
        cfg = Config(model=MODEL, train=TrainConfig(optimizer=kind))
        parameters = dict(_filled(build_model(cfg)).named_parameters())
        optimizer = build_muon(parameters, cfg, ALONE) if kind == "muon" else build_optimizer(parameters, cfg.train)
        for parameter in parameters.values():
            parameter.grad = torch.randn_like(parameter)
        print(f"  {kind:24}{min(_time_s(optimizer.step) for _ in range(RUNS)) * 1e3:9.1f} ms")


def _filled(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
    return module


def _compare(runs: dict[str, Callable[[], Tensor]]) -> None:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(RUNS):
        for name, run in runs.items():
            times[name].append(_time_s(lambda run=run: run().backward()))
    for name, run in runs.items():
        print(f"  {name:24}{min(times[name]) * 1e3:9.1f} ms{measure_saved_bytes(run)[1] / 2**20:9.1f} MiB kept")


def _time_s(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
