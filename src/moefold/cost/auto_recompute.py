"""Which parts of the layers to make again so that a step fits into a budget of memory at the least work. Torch-free."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

from moefold.config.schema import RECOMPUTE_PARTS, Config, ModelConfig
from moefold.cost.flops import train_flops_per_token
from moefold.cost.peak_memory import RankMemory, compute_rank_memory
from moefold.cost.recompute_parts import IMPLIED_BY, missing_reason
from moefold.cost.saved_tensors import CUDA_KERNELS, KernelProfile
from moefold.cost.stages import plan_stages, with_explicit_layout
from moefold.cost.state_memory import StateMemory
from moefold.errors import ConfigError

GIB = 2**30
DEFAULT_MEMORY_FRACTION = 0.9
"""Of a GPU's memory, where no budget is given; the rest is for kernels' workspaces, NCCL and what the allocator cannot
use."""
FC1_FLOP_FRACTION = 2 / 3
"""Of a gated layer the two inner projections: the outer one is not made again, as nobody needs its result."""
NORM_FLOPS_PER_ELEMENT = 8
"""For each number: little, but not nothing."""


@dataclass(frozen=True, slots=True)
class RecomputeChoice:
    """What is to be made again, and what it costs and saves."""

    parts: tuple[str, ...]
    memory: tuple[RankMemory, ...]
    """Of each pipeline rank, with these parts."""
    without_recompute_bytes: int
    """The fullest rank without any."""
    extra_flops_fraction: float
    """Operations that are done again, over those of the step, on the busiest pipeline rank."""

    @property
    def max_rank_bytes(self) -> int:
        """The fullest rank."""
        return max(rank.total for rank in self.memory)

    def describe(self, budget_bytes: int) -> str:
        """One line: what was chosen and why."""
        chosen = ", ".join(self.parts) or "nothing"
        return (
            f"train.recompute=['auto'] makes {chosen} again: {self.max_rank_bytes / GIB:.3g} GiB of "
            f"{budget_bytes / GIB:.3g} by formula ({self.without_recompute_bytes / GIB:.3g} with nothing), "
            f"for {self.extra_flops_fraction:.1%} more operations"
        )


def choose_recompute(
    cfg: Config, budget_bytes: int, kernels: KernelProfile = CUDA_KERNELS, imbalance: float = 1.0
) -> RecomputeChoice:
    """Of all sets of parts whose fullest rank stays within the budget, the one with the least operations to do again.

    Args:
        cfg: a recipe; what its train.recompute says does not matter.
        budget_bytes: for weights, gradients, optimizer and activations of one rank: train.memory_budget_gib, or where
            that is 0 nine tenths of the smallest GPU.
        kernels: of the device.
        imbalance: rows of the fullest rank's experts over the mean of all ranks.

    Raises:
        ConfigError: no set fits; the message says how much is missing and what would help.
    """
    least: RecomputeChoice | None = None
    before, states = 0, StateMemory(cfg).max_by_pp_rank
    for extra, parts in sorted((recompute_overhead(cfg, parts), parts) for parts in legal_part_sets(cfg.model)):
        memory = compute_rank_memory(cfg, recompute=parts, kernels=kernels, imbalance=imbalance, states=states)
        worst = max(rank.total for rank in memory)
        before = before or worst
        found = RecomputeChoice(parts, memory, before, extra)
        if worst <= budget_bytes:
            return found
        if least is None or worst < least.max_rank_bytes:
            least = found
    assert least is not None, "the empty set is legal"
    raise ConfigError(_no_fit_message(cfg, least, budget_bytes))


def with_recompute(cfg: Config, parts: tuple[str, ...]) -> Config:
    """A recipe with the chosen parts instead of "auto".

    They were chosen for the stages as they stand; an automatic layout is spelled out, as it would follow the choice.
    """
    return replace(with_explicit_layout(cfg), train=replace(cfg.train, recompute=parts, memory_budget_gib=0.0))


def legal_part_sets(model: ModelConfig) -> Iterator[tuple[str, ...]]:
    """Every set of parts that a recipe may name for a model, the empty one first."""
    parts = [part for part in RECOMPUTE_PARTS if not missing_reason(part, model)]
    for count in range(len(parts) + 1):
        for chosen in combinations(parts, count):
            if not any(inner in chosen for part in chosen for inner in IMPLIED_BY.get(part, ())):
                yield chosen


def recompute_overhead(cfg: Config, parts: tuple[str, ...]) -> float:
    """Operations done again over those of a step, on the pipeline rank that has most to do again."""
    plan, model = plan_stages(cfg), cfg.model
    again, all_of_it = [0.0] * cfg.parallel.pp, [1.0] * cfg.parallel.pp
    whole = train_flops_per_token(model, cfg.train.seq_len)
    for stage in plan.stages:
        kinds = [(model.layer_kinds[i], model.layer_windows[i] > 0) for i in stage.parts.layers]
        kinds += [(model.layer_kinds[-1], model.layer_windows[-1] > 0)] * stage.parts.num_mtp_layers
        for kind, has_window in kinds:
            costs = _recompute_flops(model, kind, has_window, cfg.train.seq_len)
            again[stage.pp_rank] += sum(costs[part] for part in parts)
            all_of_it[stage.pp_rank] += 3 * costs["layer"]
        all_of_it[stage.pp_rank] += 3 * whole.head * (1 + stage.parts.num_mtp_layers) if stage.is_last else 0
    return max(a / b for a, b in zip(again, all_of_it, strict=True))


@lru_cache(maxsize=256)
def _recompute_flops(model: ModelConfig, kind: str, has_window: bool, seq_len: int) -> dict[str, float]:
    """Operations for a token to make each part of a layer again."""
    pattern = "W" if has_window else "F"
    one = replace(model, num_layers=1, mtp_layers=0, layer_pattern=kind, attention_pattern=pattern)
    flops = train_flops_per_token(one, seq_len)
    heads, source = model.num_attention_heads, model.q_lora_rank or model.hidden_size
    up = heads * (source * model.head_size + model.kv_lora_rank * (model.qk_nope_head_dim + model.v_head_dim))
    return {
        "norms": 2 * NORM_FLOPS_PER_ELEMENT * model.hidden_size,
        "core_attention": flops.attention_core,
        "mla_up": 2 * up if model.attention == "mla" else 0,
        "dense_mlp": FC1_FLOP_FRACTION * flops.dense_mlp,
        "expert_activation": FC1_FLOP_FRACTION * flops.experts,
        "shared_experts": FC1_FLOP_FRACTION * flops.shared_experts,
        "moe": flops.router + flops.experts + flops.shared_experts,
        "layer": flops.forward - flops.head,
    }


def _no_fit_message(cfg: Config, smallest: RecomputeChoice, budget_bytes: int) -> str:
    fullest = max(smallest.memory, key=lambda rank: rank.total)
    activations = fullest.activations.total + fullest.pipeline
    states = fullest.total - activations
    p, train = cfg.parallel, cfg.train
    if states > budget_bytes:
        axes = {"pp": p.pp, "tp": p.tp, "ep": p.ep} | ({"zero": p.zero} if p.zero < 3 else {})
        ways = ["raise " + ", ".join(f"parallel.{axis} (now {size})" for axis, size in axes.items())]
        ways += ["choose train.moment_dtype='bfloat16'"] if train.moment_dtype == "float32" else []
        help_ = "weights, gradients and optimizer alone do not fit: " + ", or ".join(ways)
    else:
        ways = [f"lower train.micro_batch_size (now {train.micro_batch_size})"] if train.micro_batch_size > 1 else []
        ways += [f"raise parallel.cp (now {p.cp}) or parallel.tp (now {p.tp})"]
        ways += ["set train.loss_chunk=-1"] if train.loss_chunk == 0 else []
        help_ = ", or ".join(ways)
    budget = f"train.memory_budget_gib={budget_bytes / GIB:.4g} holds"
    if not train.memory_budget_gib:
        budget = f"nine tenths of the smallest GPU, {budget_bytes / GIB:.4g} GiB, hold"
    return (
        f"train.recompute=['auto']: {budget} no step, whatever is made again: pipeline rank {fullest.pp_rank} needs "
        f"{smallest.max_rank_bytes / GIB:.4g} GiB with {', '.join(smallest.parts) or 'nothing'}, of which {states / GIB:.4g} "
        f"are not activations; {help_}"
    )
