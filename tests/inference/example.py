"""A checkpoint of random weights, the same weights in transformers, and rows of ids."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from moefold.checkpoint.checkpoint_meta import TrainState, counted
from moefold.checkpoint.entries import checkpoint_state
from moefold.checkpoint.write_checkpoint import write_checkpoint as write
from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config, write_config_json
from moefold.inference.load import LoadedModel, load_model
from moefold.inference.settings import InferenceRequest, Purpose, inference_config
from moefold.inference.source import find_source
from moefold.model.transformer import build_model
from moefold.model.weight_init import init_weights
from moefold.parallel.parallelize import parallelize
from moefold.train.train_step import TrainingStep
from moefold.validate.config import check_config
from tests.model.transformers_families import FAMILIES, SHARED, SIZES, their_tensor
from tests.models import config_of

CPU = torch.device("cpu")


def recipe(family: str, run_dir: Path, dtype: str = "float32", moe: dict[str, Any] | None = None) -> Config:
    """A small model of a family of transformers, with settings of a run that evaluation must not take over."""
    return config_of(
        {
            "run": {"dtype": dtype, "seed": 5, "dir": str(run_dir)},
            "model": SIZES | FAMILIES[family][0],
            "moe": {"capacity_factor": 0.5} | (moe or {}),
            "train": {"seq_len": 24, "global_batch_size": 2, "micro_batch_size": 2},
            "data": {"kind": "synthetic"},
        }
    )


KINDS: dict[str, dict[str, Any]] = {
    "deepseek-v3": {
        "attention": "mla",
        "attention.q_lora_rank": 12,
        "attention.kv_lora_rank": 10,
        "attention.qk_nope_head_dim": 6,
        "attention.qk_rope_head_dim": 4,
        "attention.v_head_dim": 14,
        "attention.num_kv_heads": 4,
        "attention.head_dim": 0,
        "layers.ffn": "dense, 2 moe",
        "ffn.moe.router": "sigmoid",
        "ffn.moe.router.expert_bias": True,
        "mtp_layers": 1,
        "attention.gate": {},
        "attention.gate.per": "head",
    },
    "gpt-oss": {
        "attention.qkv_bias": True,
        "attention.output_bias": True,
        "attention.sinks": True,
        "layers.attention": "window, full",
        "sliding_window": 4,
        "ffn.moe.bias": True,
        "ffn.moe.activation": "clamped_swiglu",
        "ffn.moe.activation.limit": 0.3,
        "ffn.moe.router.bias": True,
    },
    "windows": {
        "layers.attention": "window, full",
        "sliding_window": 3,
        "attention.qk_norm": {},
        "attention.qk_norm.over": "all_heads",
        # Two tp ranks do not divide it.
        "vocab_size": 65,
        "head_bias": True,
    },
    "linear": {
        "layers.attention": "linear, full",
        "linear_attention.num_key_heads": 2,
        "linear_attention.num_value_heads": 4,
        "linear_attention.key_head_dim": 6,
        "linear_attention.value_head_dim": 10,
    },
}
SPARSE = {"attention.indexer.top_k": 5, "attention.indexer.num_heads": 3, "attention.indexer.head_dim": 16}
KINDS["sparse_latent"] = KINDS["deepseek-v3"] | SPARSE | {"layers": 4, "layers.selection": "own, shared"}
"""Kinds of attention that decoding must bear: latent, with sinks or windows, with states, and sparse."""
SLOW_KINDS = {
    name: KINDS["linear"] | {"linear_attention": name, "attention.gate": {}, "attention.gate.per": "head"}
    for name in ("gla", "short_convolution")
}
SLOW_KINDS["kda"] = KINDS["linear"] | {"linear_attention": "kda", "layers.attention": "linear"}
SLOW_KINDS["sparse"] = SPARSE | {"attention.sinks": True}
"""Further kinds: linear attention without a convolution, without a recurrence, and in all layers; sparse with heads."""


def recipe_of_kind(kind: str, run_dir: Path) -> Config:
    """A small model in float64."""
    return config_of(
        {
            "run": {"dtype": "float64", "seed": 6, "dir": str(run_dir)},
            "model": SIZES | (KINDS | SLOW_KINDS)[kind],
            "train": {"seq_len": 24, "global_batch_size": 2, "micro_batch_size": 2},
            "data": {"kind": "synthetic"},
        }
    )


def write_checkpoint(cfg: Config) -> None:
    """Save the initial weights as step 7 of a run; on one rank of a process group."""
    training = TrainingStep(parallelize(cfg, ParallelGroups.create(check_config(cfg), CPU)), cfg)
    state = checkpoint_state(training.parameters, training.buffers, training.optimizer)
    write(cfg, state, TrainState(states=counted(step=7, samples=0, tokens=0)))
    write_config_json(cfg, Path(cfg.run.dir) / "config.json")


def theirs(cfg: Config, family: str) -> Any:
    """The model of transformers with the initial weights of the recipe, float32."""
    import transformers

    ours = build_model(cfg)
    init_weights(ours, cfg.model, cfg.run.seed)
    weights = dict(ours.named_parameters())
    _, class_name, sizes = FAMILIES[family]
    config = getattr(transformers, f"{class_name}Config")(**SHARED | sizes)
    model = getattr(transformers, f"{class_name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(their_tensor(name, weights))
    return model


def opened(path: Path, purpose: Purpose, mapping: dict[str, Any], seq_len: int, batch_size: int) -> LoadedModel:
    """Open a model under a mapping, with "dtype" among its keys if it matters; collective over the process group."""
    return load_model(find_source(str(path)), opened_config(path, purpose, mapping, seq_len, batch_size), CPU)


def opened_config(path: Path, purpose: Purpose, mapping: dict[str, Any], seq_len: int, batch_size: int) -> Config:
    """Return the recipe with which `opened` opens a model."""
    mapping = dict(mapping)
    dtype = str(mapping.pop("dtype", "auto"))
    overrides = tuple(f"{'' if '.' in key else 'parallel.'}{key}={value}" for key, value in mapping.items())
    wish = InferenceRequest(overrides=overrides, dtype=dtype, device="cpu", seq_len=seq_len, batch_size=batch_size)
    return inference_config(find_source(str(path)), wish, purpose)


def row_of_ids(num_tokens: int, vocab_size: int = 64) -> np.ndarray:
    """Random ids, uint16 [num_tokens]."""
    return np.random.default_rng(3).integers(0, vocab_size, num_tokens).astype(np.uint16)
