"""The named shapes of `moefold bench`: which model, how much of it, and how many tokens. Torch-free.

Routing that is balanced by construction, for every implementation alike: states that point at their experts.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from moefold.config.load import config_from_dict
from moefold.config.presets import load_preset
from moefold.config.schema import Config, ModelConfig
from moefold.cost.flops import TRAIN_TO_FORWARD, count_parameters, train_flops_per_token
from moefold.errors import ConfigError

BenchPart = Literal["model", "layer", "stack"]
BenchRouting = Literal["natural", "balanced"]

STACK_LAYERS = 2
SMALL_SEQ_LEN = 256
SEQ_LEN = 4096
"""Tokens of a sample of the large shapes; more tokens are more samples."""
VOCAB_SIZE = 256
"""Of the large shapes, whose embedding and head are not measured."""
LARGE_PRESETS = ("mixtral-8x7b", "mixtral-8x22b", "qwen2-57b-a14b", "qwen3-30b-a3b", "deepseek-v3")


@dataclass(frozen=True)
class BenchShape:
    """What a row of the table computes.

    Attributes:
        name: on the command line.
        preset: of the model.
        part: a training step of a whole model; or forward and backward of one MoE layer, or of a stack of layers with
            their attention, without embedding, head and optimizer.
        tokens: of a step, unless it is said.
        seq_len: of a sample.
    """

    name: str
    preset: str
    part: BenchPart
    tokens: int
    seq_len: int


def bench_shapes() -> dict[str, BenchShape]:
    """All shapes by name."""
    found = [BenchShape("small", "bench-small", "model", 8 * SMALL_SEQ_LEN, SMALL_SEQ_LEN)]
    parts: tuple[BenchPart, ...] = ("layer", "stack")
    found += [
        BenchShape(f"{preset}-{part}", preset, part, SEQ_LEN, SEQ_LEN) for preset in LARGE_PRESETS for part in parts
    ]
    return {shape.name: shape for shape in found}


def bench_config(
    shape: BenchShape, *, dtype: str, tokens: int = 0, experts: int = 0, device: str = "cpu", seed: int = 0
) -> Config:
    """The recipe of a shape.

    Args:
        shape: one of `bench_shapes()`.
        dtype: of the maths; of the weights as well, unless the shape is a whole model.
        tokens: of a step; 0: those of the shape.
        experts: how many each layer has; 0: as many as the model.
        device: "cpu" or "cuda".
        seed: of weights and data.

    Raises:
        ConfigError: the tokens are no whole number of samples, or the experts are too few to choose from.
    """
    tokens = tokens or shape.tokens
    if tokens < 1:
        raise ConfigError(f"--tokens {tokens} must be at least 1; leave it out for {shape.tokens}")
    seq_len = min(shape.seq_len, tokens)
    if tokens % seq_len:
        raise ConfigError(f"--tokens {tokens} must be a multiple of {seq_len}, the tokens of a sample of {shape.name}")
    model = dict(load_preset(shape.preset))
    if shape.part != "model":
        layers = STACK_LAYERS if shape.part == "stack" else 1
        model |= {"num_layers": layers, "layer_pattern": "M", "mtp_layers": 0, "vocab_size": VOCAB_SIZE}
    if experts:
        least = model["top_k"] * max(1, model.get("num_groups", 1) // max(1, model.get("top_groups", 1)))
        if experts < least or experts % model.get("num_groups", 1):
            raise ConfigError(f"--experts {experts} must be at least {least}, and a multiple of the router's groups")
        model["num_experts"] = experts
    tree: dict[str, Any] = {
        "run": {"dtype": dtype, "device": device, "seed": seed},
        "model": model,
        "train": {
            "seq_len": seq_len,
            "micro_batch_size": tokens // seq_len,
            "global_batch_size": tokens // seq_len,
        },
        "data": {"kind": "synthetic"},
    }
    return config_from_dict(tree)


def step_flops(cfg: Config, part: BenchPart) -> int:
    """Operations of a step, forward and backward: of the parts that run, with half of the attention core."""
    count = train_flops_per_token(cfg.model, cfg.train.seq_len, causal=True)
    forward = count.router + count.experts + count.shared_experts
    if part != "layer":
        forward += count.attention_projections + count.attention_core + count.dense_mlp
    if part == "model":
        forward += count.head
    return TRAIN_TO_FORWARD * forward * cfg.tokens_per_step


def count_weights(model: ModelConfig, part: BenchPart) -> int:
    """Parameters that the parts of a shape hold."""
    count = count_parameters(model)
    if part == "model":
        return count.total
    layer = count.router + count.experts + count.shared_experts
    return layer if part == "layer" else layer + count.attention + count.dense_mlp + count.norms


def max_fitting_experts(shape: BenchShape, element_bytes: int, memory_bytes: float, num_copies: int = 2) -> int:
    """The most experts a layer of the shape may have, halving those of the model until weights and gradients fit.

    The weights are there in `num_copies`, ours and those of the peers, each with gradients; a whole model has moments as
    well. A third is left for activations.
    """
    model = bench_config(shape, dtype="float32").model
    per_weight = num_copies * (4 * 4 if shape.part == "model" else 2 * element_bytes)
    while count_weights(model, shape.part) * per_weight > memory_bytes * 2 / 3:
        fewer = model.num_experts // 2
        if fewer < model.top_k * max(1, model.num_groups // model.top_groups) or fewer % model.num_groups:
            raise ConfigError(
                f"--shape {shape.name} needs {count_weights(model, shape.part) * per_weight / 1e9:.0f} GB for weights "
                f"and gradients even with {model.num_experts} experts, and {memory_bytes / 1e9:.0f} GB are free"
            )
        model = replace(model, num_experts=fewer)
    return model.num_experts
