"""Lightning indexer: the layer selects its keys by scores of a few heads (arXiv:2512.02556)."""

from collections.abc import Iterator
from dataclasses import dataclass

from moefold.config.groups.indexer import IndexerPart
from moefold.config.param_spec import ParamSpec


@dataclass(frozen=True, kw_only=True)
class LightningIndexerPart(IndexerPart):
    """Select keys by an indexer of the layer's own."""

    def params(self, source: int, hidden: int) -> Iterator[ParamSpec]:
        """Yield the parameters of `LightningIndexer`; see base class."""
        yield ParamSpec("wq", (self.num_heads * self.head_dim, source), "attention")
        yield ParamSpec("wk", (self.head_dim, hidden), "attention")
        yield ParamSpec("weights_proj", (self.num_heads, hidden), "attention", never_as_matrix=True)
        yield ParamSpec("key_norm.weight", (self.head_dim,), "norms", drawn="ones")
        yield ParamSpec("key_norm.bias", (self.head_dim,), "norms", drawn="zeros")
