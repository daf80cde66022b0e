"""Rules on the plan of a round: ranks that share attention work, and that hold tokens of any samples."""

from collections.abc import Iterator

from moefold.config.chosen import chosen_in
from moefold.config.data import DataConfig
from moefold.config.groups.context import BALANCED, ContextPart
from moefold.config.groups.drop import DropScopePart
from moefold.config.groups.router import ChoicePart
from moefold.config.model import ModelConfig, has_moe_layers
from moefold.config.moe import MoEConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.rl import RLConfig
from moefold.topology.layout import divisors

WAY_OUT = "choose placement='samples'"


def validate_attention_pool(parallel: ParallelConfig) -> Iterator[str]:
    """Check that a pool holds several ranks and whole samples, and that pools divide the ranks of a round."""
    p = parallel
    plan = chosen_in(p, ContextPart).plan
    if not plan.pool or not plan.balances_hosts:
        return
    pool = plan.pool
    ranks = p.dp * p.cp
    if pool == 1 < ranks and p.cp == 1:
        legal = ", ".join(map(str, divisors(ranks)[1:]))
        yield (
            "parallel.context.pool=1 leaves all work on its rank, as hosts='home' does; choose "
            f"one of {legal}, 0 for all ranks, or hosts='home'"
        )
    elif pool % p.cp or ranks % pool:
        legal = ", ".join(str(p.cp * count) for count in divisors(p.dp) if p.cp * count > 1)
        yield (
            f"parallel.context.pool={pool} must be a multiple of parallel.cp={p.cp} that divides dp*cp={ranks}; "
            f"choose one of {legal}, or 0 for all ranks"
        )


def validate_placed_samples(parallel: ParallelConfig, data: DataConfig, rl: RLConfig) -> Iterator[str]:
    """Check that what reads whole samples is off."""
    plan = chosen_in(parallel, ContextPart).plan
    if not plan.moves_tokens:
        return
    name, way_out = f"{ContextPart.key}.placement={plan.placement!r}", WAY_OUT
    if rl.is_on:
        yield f"{name} splits samples between ranks, and rollouts have columns of whole samples; {way_out}"
    elif data.kind in ("preference", "program"):
        yield (
            f"{name} splits samples between ranks, and data.kind={data.kind!r} has losses and columns of whole "
            f"samples; {way_out}"
        )


def validate_placed_tokens(model: ModelConfig, parallel: ParallelConfig, moe: MoEConfig) -> Iterator[str]:
    """Check that what needs contiguous tokens, or the tokens of one micro-batch on one group of ranks, is off."""
    plan = chosen_in(parallel, ContextPart).plan
    if not plan.moves_tokens:
        return
    name, way_out = f"{ContextPart.key}.placement={plan.placement!r}", WAY_OUT
    if model.has_linear_attention:
        yield (
            f"{name} splits samples into parts of documents, and linear attention (model.layers) needs "
            f"contiguous segments of samples; {way_out}"
        )
    if has_moe_layers(model):
        yield from _validate_routing(moe, name, way_out, is_balanced=plan.placement == BALANCED)


def _validate_routing(moe: MoEConfig, name: str, way_out: str, *, is_balanced: bool) -> Iterator[str]:
    for key in ("capacity_factor", "eval_capacity_factor"):
        factor = getattr(moe, key)
        if factor > 0 and (is_balanced or not chosen_in(moe, DropScopePart).is_shared):
            counted = "a micro-batch, whose tokens are on all ranks" if is_balanced else "one rank's part of a sample"
            yield (
                f"{name} with moe.{key}={factor} would drop other tokens than placement='samples': a capacity counts "
                f"{counted}; set {key}=0.0 (dropless), or {way_out}"
            )
    if is_balanced and chosen_in(moe, ChoicePart).reads_micro_batch:
        yield (
            f"{name} with moe.choice='{moe.choice}' would balance other tokens than placement='samples': it reads the "
            f"tokens of a micro-batch, which are on all ranks; choose moe.choice='topk', or {way_out}"
        )


PLACEMENT_RULES = (validate_attention_pool, validate_placed_samples, validate_placed_tokens)
