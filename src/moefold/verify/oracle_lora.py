"""Oracle of low-rank adapters: a mapping of weights that returns W + (alpha / r) B A for a matrix with an adapter."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from moefold.config.sections.lora import LoraConfig


class AdaptedWeights(Mapping[str, Tensor]):
    """Weights by name: each access adds the product of the weight's adapter, if any, and is recorded.

    Args:
        weights: every parameter by name, adapters' parameters included.
        lora: rank and scale of the adapters.
    """

    def __init__(self, weights: dict[str, Tensor], lora: LoraConfig) -> None:
        self._weights = weights
        self._lora = lora
        self.reads: set[str] = set()
        """Names of the parameters that were read."""

    def __getitem__(self, name: str) -> Tensor:
        """Return a weight with its adapter."""
        weight = self._weights[name]
        self.reads.add(name)
        module, _, leaf = name.rpartition(".")
        names = [f"{module}.lora.{leaf}_{letter}" for letter in "ab"]
        a, b = map(self._weights.get, names)
        if a is None or b is None:
            return weight
        self.reads.update(names)
        # Experts multiply rows from the right: x W + x A B.
        product = a @ b if weight.dim() == 3 else b @ a
        return weight + self._lora.alpha / self._lora.rank * product

    def __contains__(self, name: object) -> bool:
        """Return whether there is a weight of this name. No weight is read."""
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._weights)

    def __len__(self) -> int:
        """Return the number of weights."""
        return len(self._weights)


class ModuleWeights(Mapping[str, Tensor]):
    """Weights of one module by their names in it. Each access reads the weight of the model."""

    def __init__(self, weights: Mapping[str, Tensor], module: str) -> None:
        self._weights = weights
        self._prefix = f"{module}."

    def __getitem__(self, name: str) -> Tensor:
        """Return a weight of the module."""
        return self._weights[self._prefix + name]

    def __contains__(self, name: object) -> bool:
        """Return whether the module has a weight of this name. No weight is read."""
        return f"{self._prefix}{name}" in self._weights

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names in the module."""
        return (name.removeprefix(self._prefix) for name in self._weights if name.startswith(self._prefix))

    def __len__(self) -> int:
        """Return the number of weights of the module."""
        return sum(1 for _ in self)
