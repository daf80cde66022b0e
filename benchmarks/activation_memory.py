"""Measure time and activation memory of chunked loss, probs in experts and recomputation, and the time of Muon.

`python -m benchmarks.activation_memory [loss|experts|recompute|muon]`, one rank on the CPU. Times are the best of 12
interleaved runs; memory is the bytes of the tensors saved for the backward pass, without parameters.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.process_group import make_group
from benchmarks.saved_memory import measure_saved_bytes
from moefold.config.edit import edit_model
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.moe import MoEConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.model.linear import linear
from moefold.model.loss import ChunkOptions, chunked_token_losses, token_losses
from moefold.model.transformer import build_model, module_settings
from moefold.optim.build import build_optimizer
from moefold.parallel.recompute import apply_recompute

RUNS = 12
MODEL = edit_model(
    ModelConfig(),
    {
        "layers": 4,
        "hidden_size": 256,
        "attention.num_heads": 8,
        "attention.num_kv_heads": 4,
        "ffn.moe.num_experts": 8,
        "ffn.moe.intermediate_size": 512,
    },
)
TOKENS = 1024
ONE_RANK = make_group((0,), 0, None)


def main() -> None:
    """Run the named benchmarks, or all."""
    kinds = {"loss": loss, "experts": experts, "recompute": recompute, "muon": muon}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"{', '.join(kinds)} (default all)")
    torch.set_num_threads(1)
    for kind in parser.parse_args().kinds or kinds:
        print(kind)
        kinds[kind]()


def loss() -> None:
    """Compare full and chunked cross-entropy: 2,048 tokens, H = 256, V = 32,768."""
    x = torch.randn(2048, 256, requires_grad=True)
    weight = (0.02 * torch.randn(32768, 256)).requires_grad_()
    labels = torch.randint(32768, (2048,))

    def full() -> Tensor:
        return token_losses(linear(x, weight), labels).loss.sum()

    def chunked(chunk: int) -> Callable[[], Tensor]:
        return lambda: chunked_token_losses(x, weight, labels, ChunkOptions(chunk)).loss.sum()

    _compare({"full": full, "chunks of 512": chunked(512), "chunks of 256": chunked(256)})


def experts() -> None:
    """Compare where routing probs multiply: 2,048 tokens, H = 256, top-2 of 8 experts, F = 512."""
    x = torch.randn(2048, 1, 256, requires_grad=True)
    layers = {}
    for name, is_inside in (("expert outputs", False), ("inside experts", True)):
        settings = module_settings(Config(model=MODEL, moe=MoEConfig(weight_in_expert=is_inside)))
        layers[name] = _init_weights(MODEL.decoder_layers[0].ffn.build(settings.ffn, 0))
    runs = {name: (lambda layer=layer: layer(x).y.sum()) for name, layer in layers.items()}
    _compare(runs)


def recompute() -> None:
    """Compare recomputed parts: four layers, H = 256, 1,024 tokens, float32."""
    tokens = torch.randint(256, (1, TOKENS))
    runs = {}
    for parts in ((), ("norms",), ("core_attention",), ("expert_activation",), ("moe",), ("layer",)):
        train = TrainConfig(seq_len=TOKENS, recompute=parts)
        model = _init_weights(build_model(Config(run=RunConfig(dtype="float32"), model=MODEL, train=train)))
        model.set_positions(torch.arange(TOKENS))
        apply_recompute(model, parts)
        weights = torch.full((1, TOKENS), 1 / TOKENS)
        runs[", ".join(parts) or "nothing"] = lambda model=model, weights=weights: model(
            tokens, labels=tokens, weights=weights
        ).sum()
    _compare(runs)


def muon() -> None:
    """Compare an optimizer step of AdamW and Muon on 15 million parameters."""
    for kind in ("adamw", "muon"):
        cfg = Config(model=MODEL, train=TrainConfig(optimizer=kind))
        parameters = dict(_init_weights(build_model(cfg)).named_parameters())
        optimizer = build_optimizer(parameters, cfg.run, cfg.model, cfg.train, cfg.lora, ONE_RANK)
        for parameter in parameters.values():
            parameter.grad = torch.randn_like(parameter)
        print(f"  {kind:24}{min(_time_s(optimizer.step) for _ in range(RUNS)) * 1e3:9.1f} ms")


def _init_weights(module: nn.Module) -> nn.Module:
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
        print(f"  {name:24}{min(times[name]) * 1e3:9.1f} ms{measure_saved_bytes(run)[1] / 2**20:9.1f} MiB saved")


def _time_s(run: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s


if __name__ == "__main__":
    main()
