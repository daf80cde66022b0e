"""Shapes of `moefold bench`: model, benchmarked part, tokens."""

from dataclasses import dataclass
from typing import Any, Literal

from moefold.config.chosen import with_key
from moefold.config.edit import edit
from moefold.config.load import config_from_dict
from moefold.config.model import ModelConfig
from moefold.config.presets import load_preset
from moefold.config.schema import Config
from moefold.config.sections.train import TrainConfig
from moefold.cost.flops import TRAIN_TO_FORWARD, count_parameters, train_flops_per_token
from moefold.errors import ConfigError

BenchPart = Literal["model", "layer", "stack"]
BenchRouting = Literal["natural", "balanced"]

STACK_LAYERS = 2
SMALL_SEQ_LEN = 256
SEQ_LEN = 4096
"""Sequence length of the large shapes. More tokens mean more samples."""
VOCAB_SIZE = 256
"""Vocabulary size of the large shapes, whose embedding and head are not measured."""
LARGE_PRESETS = ("mixtral-8x7b", "mixtral-8x22b", "qwen2-57b-a14b", "qwen3-30b-a3b", "deepseek-v3")


@dataclass(frozen=True)
class BenchShape:
    """Shape of a benchmark.

    Attributes:
        name: name on the command line.
        preset: model preset.
        part: a training step of a whole model. Or forward and backward of one MoE layer, or of a stack of layers with
            attention, without embedding, head and optimizer.
        tokens: default number of tokens of a step.
        seq_len: tokens of a sample.
    """

    name: str
    preset: str
    part: BenchPart
    tokens: int
    seq_len: int


def bench_shapes() -> dict[str, BenchShape]:
    """Return all shapes by name."""
    shapes = [BenchShape("small", "bench-small", "model", 8 * SMALL_SEQ_LEN, SMALL_SEQ_LEN)]
    parts: tuple[BenchPart, ...] = ("layer", "stack")
    shapes += [
        BenchShape(f"{preset}-{part}", preset, part, SEQ_LEN, SEQ_LEN) for preset in LARGE_PRESETS for part in parts
    ]
    return {shape.name: shape for shape in shapes}


def bench_config(shape: BenchShape, *, dtype: str, tokens: int = 0, experts: int = 0, device: str = "cpu") -> Config:
    """Build the recipe of a shape.

    Args:
        dtype: compute dtype. It is also the dtype of the weights, unless the shape is a whole model.
        tokens: tokens of a step. 0: the shape's default.
        experts: experts of each layer. 0: the number of the model.

    Raises:
        ConfigError: the tokens are not a whole number of samples, or there are too few experts for the router.
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
        model |= {"layers": layers, "mtp_layers": 0, "vocab_size": VOCAB_SIZE}
    tree: dict[str, Any] = {
        "run": {"dtype": dtype, "device": device, "seed": 0},
        "model": model,
        "train": {
            "seq_len": seq_len,
            "micro_batch_size": tokens // seq_len,
            "global_batch_size": tokens // seq_len,
        },
        "data": {"kind": "synthetic"},
    }
    cfg = config_from_dict(tree)
    if not experts:
        return cfg
    router, top_k = cfg.model.ffn.moe.router, cfg.model.ffn.moe.top_k
    fewest = top_k * max(1, router.num_groups // router.top_groups)
    if experts < fewest or experts % router.num_groups:
        raise ConfigError(f"--experts {experts} must be at least {fewest}, and a multiple of the router's groups")
    return edit(cfg, {"model.ffn.moe.num_experts": experts})


def step_flops(model: ModelConfig, train: TrainConfig, part: BenchPart) -> int:
    """Return the FLOPs of the forward and backward pass of the parts that run, with causal attention."""
    count = train_flops_per_token(model, train.seq_len, causal=True)
    forward = count.router + count.experts + count.shared_experts
    if part != "layer":
        forward += count.attention_projections + count.attention_core + count.dense_mlp
    if part == "model":
        forward += count.head
    return TRAIN_TO_FORWARD * forward * train.tokens_per_step


def count_weights(model: ModelConfig, part: BenchPart) -> int:
    """Return the number of parameters of the benchmarked part of a model."""
    count = count_parameters(model)
    if part == "model":
        return count.total
    layer = count.router + count.experts + count.shared_experts
    return layer if part == "layer" else layer + count.attention + count.dense_mlp + count.norms


def max_fitting_experts(shape: BenchShape, element_bytes: int, memory_bytes: float, num_copies: int = 1) -> int:
    """Return the number of experts that fit into memory: the model's, halved until weights and gradients fit.

    There are `num_copies` copies of the weights, each with gradients, and with moments for a whole model. A third of
    the memory is left for activations. Raises ConfigError if not even the smallest legal number of experts fits.
    """
    model = bench_config(shape, dtype="float32").model
    per_weight = num_copies * (4 * 4 if shape.part == "model" else 2 * element_bytes)
    while count_weights(model, shape.part) * per_weight > memory_bytes * 2 / 3:
        moe = model.experts
        fewer = moe.num_experts // 2
        if fewer < moe.top_k * max(1, moe.router.num_groups // moe.router.top_groups) or fewer % moe.router.num_groups:
            raise ConfigError(
                f"--shape {shape.name} needs {count_weights(model, shape.part) * per_weight / 1e9:.0f} GB for weights "
                f"and gradients even with {moe.num_experts} experts, and {memory_bytes / 1e9:.0f} GB are free"
            )
        model = with_key(model, "ffn.moe.num_experts", fewer)
    return model.experts.num_experts
