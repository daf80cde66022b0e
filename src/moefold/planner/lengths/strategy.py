"""Attention strategy: the context-parallel attention by which the ranks of a round share documents. Torch-free."""

from moefold.config.groups.context import ContextPart, PlannedPart


def describe_strategy(context: ContextPart) -> str:
    """Describe a strategy, such as "planned attention (documents, balanced hosts)"."""
    how = f" ({context.placement}, {context.hosts} hosts)" if isinstance(context, PlannedPart) else ""
    return f"{context.kind} attention{how}"


def strategy_as_dict(context: ContextPart) -> dict[str, str]:
    """Return kind, placement and hosts of a strategy, ready for JSON."""
    planned = context if isinstance(context, PlannedPart) else PlannedPart()
    return {"context": context.kind, "placement": planned.placement, "attention_hosts": planned.hosts}
