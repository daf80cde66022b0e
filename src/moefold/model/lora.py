"""Low-rank adapters (LoRA, arXiv:2106.09685): y = W x + (alpha / r) B A x with a frozen W.

Sequence parallelism communicates the product A x, which has the small width r. Where the outputs of W are sharded over
tp, each rank computes A x of its own tokens, and the products are all-gathered. Where the inputs are sharded, each rank
has a part of the sum A x, which is reduce-scattered, and B multiplies the rank's own tokens.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from moefold.config.base.param_spec import ParamSpec
from moefold.config.model import ModelConfig
from moefold.config.sections.lora import LoraConfig
from moefold.cost.adapter_spec import MODULE_NAME, adapted_weights, adapter_names, adapter_pair
from moefold.model.linear import linear
from moefold.model.local_param import local_param
from moefold.model.tp_interface import SequenceParallel

ALL_ROWS = slice(None)
ReadRegion = Callable[[str, tuple[slice, ...]], Tensor]
"""Returns a region of an adapter by its name."""


class LowRankAdapters(nn.Module):
    """Adapters A, B of the matrices of one module, as parameters `NAME_a` and `NAME_b`, sharded as their matrices."""

    def __init__(self, weights: Mapping[str, ParamSpec], rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self._names = frozenset(weights)
        for name, weight in weights.items():
            a, b = adapter_pair(weight, rank)
            self.register_parameter(f"{name}_a", nn.Parameter(torch.empty(a.shape)))
            self.register_parameter(f"{name}_b", nn.Parameter(torch.empty(b.shape)))

    def __contains__(self, name: str) -> bool:
        """Return whether a matrix of the module has an adapter."""
        return name in self._names

    def pair(self, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the local shards of the adapter A, B of a matrix."""
        return local_param(getattr(self, f"{name}_a"), dtype), local_param(getattr(self, f"{name}_b"), dtype)

    def product(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return the local shard of (alpha / r) B A, shaped as the matrix."""
        a, b = self.pair(name, dtype)
        return b @ a * self.scale

    def add(self, y: Tensor, x: Tensor, name: str) -> Tensor:
        """Add the adapter's term to the output of a matrix for the same tokens. It does not communicate.

        Args:
            y: output of the matrix, [..., N].
            x: its input, [..., K].
            name: the matrix. Without an adapter, y is returned.
        """
        return y if name not in self else self._add(y, linear(x, self.pair(name, x.dtype)[0]), name)

    def add_pair(self, y: Tensor, x: Tensor, a_RK: Tensor, b_NR: Tensor) -> Tensor:
        """Compute `add` with a given adapter, for example the arguments of a recomputed function."""
        return y + linear(linear(x, a_RK), b_NR) * self.scale

    def add_columns(
        self,
        outputs: Sequence[Tensor],
        x: Tensor,
        names: Sequence[str],
        sequence_parallel: SequenceParallel,
        rows: Mapping[str, slice] | None = None,
    ) -> list[Tensor]:
        """Add the adapters' terms to the outputs of matrices whose outputs are sharded, by one all-gather over tp.

        Args:
            outputs: output of each matrix, [S/cp, B, N/tp].
            rows: rows of the local B that a matrix uses. Without it, all.
        """
        adapted = [name for name in names if name in self]
        if not adapted:
            return list(outputs)
        a_RK = torch.cat([self.pair(name, x.dtype)[0] for name in adapted])
        chunks = sequence_parallel.gather(linear(x, a_RK)).chunk(len(adapted), -1)
        low_rank = dict(zip(adapted, chunks, strict=True))
        rows = rows or {}
        return [
            self._add(y, low_rank[name], name, rows.get(name, ALL_ROWS)) if name in low_rank else y
            for name, y in zip(names, outputs, strict=True)
        ]

    def add_row(self, y: Tensor, x: Tensor, name: str, sequence_parallel: SequenceParallel) -> Tensor:
        """Add the adapter's term to the output of a matrix whose inputs are sharded, by one reduce-scatter over tp.

        Args:
            y: output of the matrix, [S/(cp*tp), B, N].
            x: its input, [S/cp, B, K/tp].
        """
        if name not in self:
            return y
        a_RK = self.pair(name, x.dtype)[0]
        return self._add(y, sequence_parallel.scatter(linear(x, a_RK)), name)

    def _add(self, y: Tensor, low_rank: Tensor, name: str, rows: slice = ALL_ROWS) -> Tensor:
        b_NR = self.pair(name, low_rank.dtype)[1]
        return y + linear(low_rank, b_NR if rows == ALL_ROWS else b_NR[rows]) * self.scale


def attach_adapters(model: nn.Module, sizes: ModelConfig, lora: LoraConfig) -> None:
    """Add the adapters of a recipe to the modules of a stage whose matrices have them, before any axis is applied."""
    weights = adapted_weights(sizes, lora)
    for prefix, module in list(model.named_modules()):
        matrices = {
            leaf: weights[name]
            for leaf, _ in module.named_parameters(recurse=False)
            if (name := f"{prefix}.{leaf}") in weights
        }
        if matrices:
            setattr(module, MODULE_NAME, LowRankAdapters(matrices, lora.rank, lora.scale))


def freeze_all_but_adapters(stage: nn.Module) -> None:
    """Freeze all parameters except the adapters."""
    stage.requires_grad_(False)
    for module in stage.modules():
        if isinstance(module, LowRankAdapters):
            module.requires_grad_(True)


def product_region(name: str, region: tuple[slice, ...], read: ReadRegion) -> Tensor:
    """Return a region of B A of a matrix, or of A B of experts.

    Args:
        region: region of the matrix, [out, in], or of experts, [E, in, out].
        read: reads a region of A or B. A slice without ends means all.
    """
    name_a, name_b = adapter_names(name)
    if len(region) == 3:
        experts, inputs, outputs = region
        return read(name_a, (experts, inputs, ALL_ROWS)) @ read(name_b, (experts, ALL_ROWS, outputs))
    outputs, inputs = region
    return read(name_b, (outputs, ALL_ROWS)) @ read(name_a, (ALL_ROWS, inputs))
