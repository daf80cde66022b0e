"""Automatic choice of recomputed parts: fit a step into a memory budget with the fewest extra FLOPs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

from moefold.config.chosen import chosen_in
from moefold.config.groups.layer_sizes import KernelProfile
from moefold.config.groups.optimizer import OptimizerPart
from moefold.config.layers import Layer
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.train import TrainConfig
from moefold.cost.flops import layer_flops, train_flops_per_token
from moefold.cost.peak_memory import RankMemory, compute_rank_memory
from moefold.cost.rank_state_memory import RankStateMemory
from moefold.cost.recompute_parts import is_implied, missing_reason, recompute_parts
from moefold.cost.saved_tensors import CUDA_KERNELS
from moefold.cost.stage_balance import plan_stages, with_explicit_layout
from moefold.errors import ConfigError
from moefold.units import GIB

DEFAULT_MEMORY_FRACTION = 0.9
"""Fraction of a GPU's memory used as default budget. The rest is for kernel workspaces, NCCL and allocator
fragmentation."""
FC1_FLOP_FRACTION = 2 / 3
"""FLOP fraction of the two inner projections of a gated MLP. The output of the third is not needed in backward."""
NORM_FLOPS_PER_ELEMENT = 8
"""Nominal cost of a norm: small, but not zero."""


@dataclass(frozen=True, slots=True)
class RecomputeChoice:
    """Chosen parts to recompute, with their cost and memory."""

    parts: tuple[str, ...]
    memory: tuple[RankMemory, ...]
    """Memory of each pipeline rank with these parts recomputed."""
    without_recompute_bytes: int
    """Memory of the fullest rank without recomputation."""
    extra_flops_fraction: float
    """Recomputed FLOPs over the FLOPs of the step, on the busiest pipeline rank."""

    @property
    def max_rank_bytes(self) -> int:
        """Memory of the fullest rank."""
        return max(rank.total for rank in self.memory)

    def describe(self, budget_bytes: int) -> str:
        """Describe the choice and its reason in one line."""
        chosen = ", ".join(self.parts) or "nothing"
        return (
            f"train.recompute=['auto'] recomputes {chosen}: {self.max_rank_bytes / GIB:.3g} GiB of "
            f"{budget_bytes / GIB:.3g} by formula ({self.without_recompute_bytes / GIB:.3g} with nothing), "
            f"for {self.extra_flops_fraction:.1%} more FLOPs"
        )


def choose_recompute(
    cfg: Config, budget_bytes: int, kernels: KernelProfile = CUDA_KERNELS, imbalance: float = 1.0
) -> RecomputeChoice:
    """Return the set of parts with the fewest recomputed FLOPs whose fullest rank fits into the budget.

    Args:
        cfg: a recipe. Its train.recompute is ignored.
        budget_bytes: for weights, gradients, optimizer and activations of one rank: train.memory_budget_gib, or nine
            tenths of the smallest GPU if that is 0.
        imbalance: routed tokens of the busiest rank over the mean of all ranks.

    Raises:
        ConfigError: no set fits. The message names the missing memory and the ways out.
    """
    smallest: RecomputeChoice | None = None
    without_recompute = 0
    states = RankStateMemory(cfg, kernels)
    for extra, parts in sorted((recompute_overhead(cfg, parts), parts) for parts in legal_part_sets(cfg.model)):
        memory = compute_rank_memory(cfg, recompute=parts, kernels=kernels, imbalance=imbalance, states=states)
        max_rank_bytes = max(rank.total for rank in memory)
        without_recompute = without_recompute or max_rank_bytes
        choice = RecomputeChoice(parts, memory, without_recompute, extra)
        if max_rank_bytes <= budget_bytes:
            return choice
        if smallest is None or max_rank_bytes < smallest.max_rank_bytes:
            smallest = choice
    assert smallest is not None, "the empty set is legal"
    raise ConfigError(_no_fit_message(cfg.parallel, cfg.train, smallest, budget_bytes))


def with_recompute(cfg: Config, parts: tuple[str, ...]) -> Config:
    """Return the recipe with the chosen parts instead of "auto", and with its automatic pipeline layout resolved.

    The parts were chosen for the current stages, and an automatic layout depends on the recomputed parts.
    """
    return replace(with_explicit_layout(cfg), train=replace(cfg.train, recompute=parts, memory_budget_gib=0.0))


def legal_part_sets(model: ModelConfig) -> Iterator[tuple[str, ...]]:
    """Yield every legal set of recomputed parts of a model, the empty one first."""
    parts = [part for part in recompute_parts() if not missing_reason(part, model)]
    for count in range(len(parts) + 1):
        for chosen in combinations(parts, count):
            if not any(is_implied(inner, part) for part in chosen for inner in chosen):
                yield chosen


def recompute_overhead(cfg: Config, parts: tuple[str, ...]) -> float:
    """Return recomputed FLOPs over the FLOPs of a step, on the pipeline rank that recomputes most."""
    plan = plan_stages(cfg)
    model = cfg.model
    recomputed = [0.0] * cfg.parallel.pp
    total = [1.0] * cfg.parallel.pp
    model_flops = train_flops_per_token(model, cfg.train.seq_len)
    for stage in plan.stages:
        layers = [model.decoder_layers[i] for i in stage.parts.layers]
        layers += [model.mtp_layer] * stage.parts.num_mtp_layers
        for layer in layers:
            costs = _recompute_flops(model, layer, cfg.train.seq_len)
            recomputed[stage.pp_rank] += sum(costs.get(part, 0) for part in parts)
            total[stage.pp_rank] += 3 * costs["layer"]
        total[stage.pp_rank] += 3 * model_flops.head * (1 + stage.parts.num_mtp_layers) if stage.is_last else 0
    return max(a / b for a, b in zip(recomputed, total, strict=True))


@lru_cache(maxsize=256)
def _recompute_flops(model: ModelConfig, layer: Layer, seq_len: int) -> dict[str, float]:
    """Return the FLOPs per token to recompute each part of a layer."""
    flops = layer_flops(model, layer, seq_len)
    return {
        "norms": 2 * NORM_FLOPS_PER_ELEMENT * model.hidden_size,
        # Linear attention recomputes its core always.
        "core_attention": flops.attention_core if "core_attention" in layer.attention.recompute_parts else 0,
        **dict.fromkeys(layer.attention.own_recompute_parts, 2 * layer.attention.up_weights(model.hidden_size)),
        "dense_mlp": FC1_FLOP_FRACTION * flops.dense_mlp,
        "expert_activation": FC1_FLOP_FRACTION * flops.experts,
        "shared_experts": FC1_FLOP_FRACTION * flops.shared_experts,
        "moe": flops.router + flops.experts + flops.shared_experts,
        "layer": flops.forward,
    }


def _no_fit_message(p: ParallelConfig, train: TrainConfig, smallest: RecomputeChoice, budget_bytes: int) -> str:
    largest = max(smallest.memory, key=lambda rank: rank.total)
    activations = largest.activations.total
    states = largest.total - activations
    if states > budget_bytes:
        axes = {"pp": p.pp, "tp": p.tp, "ep": p.ep} | ({"zero": p.zero} if p.zero < 3 else {})
        options = ["raise " + ", ".join(f"parallel.{axis} (now {size})" for axis, size in axes.items())]
        optimizer = chosen_in(train, OptimizerPart)
        is_narrow = optimizer == optimizer.with_moment_dtype("bfloat16")
        options += [] if is_narrow else ["choose train.optimizer.moment_dtype='bfloat16'"]
        help_ = "weights, gradients and optimizer alone do not fit: " + ", or ".join(options)
    else:
        options = [f"lower train.micro_batch_size (now {train.micro_batch_size})"] if train.micro_batch_size > 1 else []
        options += [f"raise parallel.cp (now {p.cp}) or parallel.tp (now {p.tp})"]
        options += ["set train.loss_chunk=-1"] if train.loss_chunk == 0 else []
        help_ = ", or ".join(options)
    budget = f"train.memory_budget_gib={budget_bytes / GIB:.4g} is too small"
    if not train.memory_budget_gib:
        budget = f"nine tenths of the smallest GPU, {budget_bytes / GIB:.4g} GiB, are too small"
    return (
        f"train.recompute=['auto']: {budget}, whatever is recomputed: pipeline rank {largest.pp_rank} needs "
        f"{smallest.max_rank_bytes / GIB:.4g} GiB with {', '.join(smallest.parts) or 'nothing'}, of which "
        f"{states / GIB:.4g} are not activations; {help_}"
    )
