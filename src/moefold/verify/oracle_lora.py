"""Oracle of low-rank adapters: a dictionary of weights in which a matrix with an adapter reads W + (alpha / r) B A."""

from torch import Tensor

from moefold.config.lora import LoraConfig


class AdaptedWeights(dict[str, Tensor]):
    """Weights by name: reading one adds the product of its adapter, if it has one, and is recorded.

    Args:
        weights: every parameter by name, adapters' parameters included.
        lora: rank and scale of the adapters.
    """

    def __init__(self, weights: dict[str, Tensor], lora: LoraConfig) -> None:
        super().__init__(weights)
        self._lora = lora
        self.reads: set[str] = set()
        """Names of the parameters that were read."""

    def __getitem__(self, name: str) -> Tensor:
        """Return a weight with its adapter."""
        weight = super().__getitem__(name)
        self.reads.add(name)
        module, _, leaf = name.rpartition(".")
        names = [f"{module}.lora.{leaf}_{letter}" for letter in "ab"]
        a, b = map(self.get, names)
        if a is None or b is None:
            return weight
        self.reads.update(names)
        # Experts multiply rows from the right: x W + x A B.
        product = a @ b if weight.dim() == 3 else b @ a
        return weight + self._lora.alpha / self._lora.rank * product
