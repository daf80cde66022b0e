"""The training steps that the bench compares: ours through the trainer, ours in a bare loop, and transformers'."""

from collections.abc import Callable
from typing import Any

import torch

from moefold.config.schema import Config
from moefold.model.init import initialise
from moefold.model.transformer import TORCH_DTYPES, build_model
from moefold.parallel.accumulate import Batch
from moefold.parallel.groups import ParallelGroups
from moefold.parallel.layout import fold
from moefold.parallel.parallelize import parallelize
from moefold.train.step import TrainingStep

Step = Callable[[], None]
"""Forward, backward and AdamW on one fixed batch."""

EXPERTS_IMPLEMENTATIONS = ("grouped_mm", "eager")
"""What transformers offers for training; the fastest one counts.

Its batched_mm copies the experts' weights for each token: 23 GiB here, and slower than both.
"""


def trainer_step(cfg: Config) -> Step:
    """Our step with all around it: norm, clipping, schedule, metrics, every degree 1. Needs a process group of one."""
    model = parallelize(cfg, ParallelGroups.create(fold(world_size=1), torch.device("cpu")))
    training = TrainingStep(model, cfg)
    tokens, labels = _batch(cfg)
    weights = torch.full(tokens.shape, 1.0 / tokens.numel())
    batch = Batch(tokens, labels, weights, torch.arange(len(tokens)))
    return lambda: _discard(training.run(batch, 1))


def bare_step(cfg: Config) -> Step:
    """Our model in the plainest loop: no parallel code, no clipping, no metrics."""
    model = build_model(cfg)
    initialise(model, cfg.model, cfg.run.seed)
    model.place(torch.arange(cfg.train.seq_len))
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.train.lr, fused=True)
    tokens, labels = _batch(cfg)
    weights = torch.full(tokens.shape, 1.0 / tokens.numel())

    def step() -> None:
        model(tokens, labels, weights).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def transformers_step(cfg: Config, experts: str) -> Step:
    """Mixtral as transformers computes it, of the same sizes, with its router loss, in the same bare loop.

    Args:
        cfg: sizes and batch.
        experts: its experts implementation.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = cfg.model
    config = MixtralConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.moe_ffn_hidden_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_query_groups,
        num_local_experts=sizes.num_experts,
        num_experts_per_tok=sizes.top_k,
        max_position_embeddings=cfg.train.seq_len,
        output_router_logits=True,
        router_aux_loss_coef=cfg.moe.aux_loss,
        use_cache=False,
        experts_implementation=experts,
    )
    model: Any = MixtralForCausalLM(config).to(TORCH_DTYPES[cfg.run.dtype]).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.train.lr, fused=True)
    tokens, _ = _batch(cfg)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _batch(cfg: Config) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(cfg.run.seed)
    shape = (cfg.train.global_batch_size, cfg.train.seq_len + 1)
    samples = torch.randint(cfg.model.vocab_size, shape, generator=generator)
    return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()


def _discard(_: object) -> None:
    return None
