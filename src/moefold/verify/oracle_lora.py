"""Oracle of low-rank adapters: a dictionary of weights in which a matrix with an adapter reads W + (alpha / r) B A."""

from torch import Tensor

from moefold.config.lora import LoraConfig


class AdaptedWeights(dict[str, Tensor]):
    """Weights by name: reading one adds the product of its adapter, if it has one; `items` are the weights alone.

    Args:
        weights: every parameter by name, those of adapters included.
        lora: rank and scale of the adapters.
    """

    def __init__(self, weights: dict[str, Tensor], lora: LoraConfig) -> None:
        super().__init__(weights)
        self._lora = lora

    def __getitem__(self, name: str) -> Tensor:
        """Return a weight with its adapter."""
        weight = super().__getitem__(name)
        module, _, leaf = name.rpartition(".")
        a = self.get(f"{module}.lora.{leaf}_a")
        b = self.get(f"{module}.lora.{leaf}_b")
        if a is None or b is None:
            return weight
        # Experts multiply rows from the right: x W + x A B.
        product = a @ b if weight.dim() == 3 else b @ a
        return weight + self._lora.alpha / self._lora.rank * product
