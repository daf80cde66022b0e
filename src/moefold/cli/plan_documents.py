"""Lines of `moefold plan --lengths` and `moefold simulate --lengths` on the documents and their attention."""

from moefold.config.groups.context import ContextPart
from moefold.planner.cost_model.attention_load import AttentionLoad
from moefold.planner.cost_model.step import CostModel
from moefold.planner.lengths.balance import DocumentLoads
from moefold.planner.lengths.document_source import describe_cuts
from moefold.planner.mapping import ParallelMapping


def describe_documents(loads: DocumentLoads) -> str:
    """Describe the lengths: their origin, their effective length, and documents that are cut."""
    cuts = describe_cuts(loads.samples, loads.seq_len)
    text = (
        f"{loads.samples.name} ({loads.samples.source}); effective length {loads.effective_length:,.0f} of "
        f"{loads.seq_len:,} tokens"
    )
    return f"{text}; {cuts}" if cuts else text


def attention_of(cost_model: CostModel, mapping: ParallelMapping) -> AttentionLoad | None:
    """Return the attention work of full attention layers under a mapping; None where a sample is one document."""
    peers = cost_model.attention_peers(mapping)
    loads = cost_model.workload.attention
    return None if peers is None or loads is None else loads.load(peers, 0)


def describe_strategy(context: ContextPart) -> str:
    """Describe a strategy, such as "planned attention (documents, balanced hosts)"."""
    how = f" ({context.plan.placement}, {context.plan.hosts} hosts)" if context.is_planned else ""
    return f"{context.kind} attention{how}"


def describe_attention(strategy: ContextPart, max_over_mean: float) -> str:
    """Describe how the ranks share attention, and how evenly."""
    return f"{describe_strategy(strategy)}; the busiest rank has {max_over_mean:.2f} times the mean work of a round"
