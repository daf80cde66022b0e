"""Quantised weights that the micro-batches and recomputations of a step share.

A copy is valid as long as the weight does not change. A tensor does not record its changes: FSDP refills the storage of
a gathered weight and preserves its version counter. So the caller opens a scope around the forward and backward passes
of one step, and copies are freed at its end. No optimizer, checkpoint or initialisation writes a weight in a scope, and
a weight that FSDP frees and gathers again has the same values. Outside of a scope nothing is cached.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")
_IDENTITY = "_moefold_weight_identity"
"""Attribute of a storage. torch preserves it as long as the storage exists, for all tensors that access it."""


def mark_weight(weight: Tensor, parameter: Tensor) -> None:
    """Give a parameter and its cast `weight`, which may be the parameter itself, the same identity."""
    if weight_identity(parameter) is None:
        setattr(parameter.untyped_storage(), _IDENTITY, object())
    setattr(weight.untyped_storage(), _IDENTITY, weight_identity(parameter))


def weight_identity(tensor: Tensor) -> object | None:
    """Return the identity of a parameter, given a view or a cast of it, or None for other tensors."""
    return getattr(tensor.untyped_storage(), _IDENTITY, None)


class WeightCache:
    """Results of one function of weights, kept for a step. The function runs each time if the cache is not enabled."""

    def __init__(self, *, is_enabled: bool = True) -> None:
        self._is_enabled = is_enabled
        self._results: dict[Hashable, Any] | None = None
        self._scope: object | None = None

    @property
    def scope(self) -> object | None:
        """Identity of the current step, during which no weight changes, or None outside of a step."""
        return self._scope

    @contextmanager
    def step(self) -> Iterator[None]:
        """Cache inside this context, where no weight may change. Free everything at its end."""
        assert self._scope is None, "the scopes of two steps overlap"
        self._scope = object()
        self._results = {} if self._is_enabled else None
        try:
            yield
        finally:
            self._scope = None
            self._results = None

    def get(self, weight: Tensor, function: Callable[[Tensor], T]) -> T:
        """Return function(weight), from the cache if this view of the same weight was given before in this step.

        Tensors that are not weights, such as tensors received from another rank, are never cached.
        """
        identity = weight_identity(weight)
        if self._results is None or identity is None:
            return function(weight)
        key = identity, weight.dtype, weight.storage_offset(), weight.shape, weight.stride()
        if key not in self._results:
            self._results[key] = function(weight)
        return self._results[key]
