"""The rule on the ranks that share attention work, which the search of mappings asks too."""

from collections.abc import Iterator

from moefold.config.chosen import chosen_in
from moefold.config.groups.context import ContextPart
from moefold.config.parallel import ParallelConfig
from moefold.topology.layout import divisors


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
