"""Attention strategy: the context-parallel attention by which the ranks of a round share documents. Torch-free."""

from moefold.config.groups.context import ContextPart


def describe_strategy(context: ContextPart) -> str:
    """Describe a strategy, such as "planned attention (documents, balanced hosts)"."""
    how = f" ({context.plan.placement}, {context.plan.hosts} hosts)" if context.is_planned else ""
    return f"{context.kind} attention{how}"


def strategy_as_dict(context: ContextPart) -> dict[str, str]:
    """Return kind, placement and hosts of a strategy, ready for JSON."""
    return {"context": context.kind, "placement": context.plan.placement, "attention_hosts": context.plan.hosts}
