"""Layers for benchmarks, with weights that are drawn on their device."""

from collections.abc import Iterable

import torch

from moefold.config.model import ModelConfig
from moefold.config.run import RunConfig
from moefold.config.schema import Config
from moefold.model.init import BIASES
from moefold.model.transformer import TORCH_DTYPES, Transformer
from moefold.parallel.select_ops import apply_kernels, select_kernels


def build_layers(cfg: Config, layers: Iterable[int], device: torch.device, *, is_whole: bool = False) -> Transformer:
    """Build layers of a shape with the kernels of the trainer.

    Args:
        cfg: the recipe.
        layers: indices of the layers.
        device: of the weights.
        is_whole: True: with embedding and head, and float32 weights. False: a middle pipeline stage, from hidden states
            to hidden states, with weights in the dtype of the run but for float32 routers.
    """
    with torch.device("meta"):
        model = Transformer(cfg, layers, is_first=is_whole, is_last=is_whole)
    if not is_whole:
        model.to(TORCH_DTYPES[cfg.run.dtype])
        for layer in model.moe_layers().values():
            layer.router.to(torch.float32)
    model.to_empty(device=device)
    draw_weights(model, cfg.run, cfg.model)
    apply_kernels(model, select_kernels(cfg, device))
    model.set_positions(torch.arange(cfg.train.seq_len, device=device))
    return model.train()


@torch.no_grad()
def draw_weights(model: Transformer, run: RunConfig, sizes: ModelConfig) -> None:
    """Draw weights on their device: matrices normal, norms one, biases and buffers zero.

    `moefold.model.init.init_weights` draws on the CPU, which takes a minute for a layer of DeepSeek-V3; the speed of a
    step does not depend on the values.
    """
    generator: torch.Generator | None = None
    for name, parameter in model.named_parameters():
        generator = generator or torch.Generator(parameter.device).manual_seed(run.seed)
        leaf = name.rsplit(".", 1)[-1]
        if "norm" in name:
            parameter.fill_(1.0)
        elif leaf in BIASES:
            parameter.zero_()
        else:
            parameter.normal_(0.0, sizes.init_std, generator=generator)
    for name, buffer in model.named_buffers():
        assert "inv_freq" not in name
        buffer.zero_()
