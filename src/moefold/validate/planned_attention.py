"""Rules on planned attention: where tokens are placed, and which ranks share their attention work."""

from collections.abc import Iterator

from moefold.config.schema import Config, ParallelConfig
from moefold.topology.layout import divisors


def validate_attention_pool(cfg: Config) -> Iterator[str]:
    """Check that a pool holds several ranks and whole samples, and that pools divide the ranks of a round."""
    p = cfg.parallel
    pool = p.attention_pool
    if not pool or p.attention_hosts != "balanced":
        return
    ranks = p.dp * p.cp
    if pool == 1 < ranks and p.cp == 1:
        legal = ", ".join(map(str, divisors(ranks)[1:]))
        yield (
            "parallel.attention_pool=1 leaves all work on its rank, as parallel.attention_hosts='home' does; choose "
            f"one of {legal}, 0 for all ranks, or attention_hosts='home'"
        )
    elif pool % p.cp or ranks % pool:
        legal = ", ".join(str(p.cp * count) for count in divisors(p.dp) if p.cp * count > 1)
        yield (
            f"parallel.attention_pool={pool} must be a multiple of parallel.cp={p.cp} that divides dp*cp={ranks}; "
            f"choose one of {legal}, or 0 for all ranks"
        )


def validate_attention_block(cfg: Config) -> Iterator[str]:
    """Refuse a block that no document of a sample can exceed; the default goes with shorter samples too."""
    p = cfg.parallel
    is_read = p.context == "planned" and (p.attention_hosts == "balanced" or p.placement == "documents")
    if is_read and p.attention_block > max(cfg.train.seq_len, ParallelConfig().attention_block):
        yield (
            f"parallel.attention_block={p.attention_block} must be at most train.seq_len={cfg.train.seq_len}, as no "
            f"document of a sample is longer; choose {cfg.train.seq_len} or less"
        )


def validate_placement(cfg: Config) -> Iterator[str]:
    """Check that the source of samples can take the hosts; `validate/placement.py` checks the placement."""
    p = cfg.parallel
    if p.context != "planned":
        return
    if any(layer.chunk for layer in cfg.model.layers):
        yield (
            f"parallel.context='planned' plans attention within documents, and model.attention_pattern="
            f"{cfg.model.attention_pattern!r} has layers of kind C, which divide them into chunks; choose "
            "parallel.context='ring'"
        )
    if p.attention_hosts == "balanced" and cfg.is_rl:
        yield (
            "parallel.attention_hosts='balanced' needs the documents of all ranks, and rollouts are packed on each "
            "rank alone; choose parallel.attention_hosts='home'"
        )


PLANNED_ATTENTION_CHECKS = (validate_attention_pool, validate_attention_block, validate_placement)
