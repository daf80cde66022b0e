"""NaN/Inf localisation: ranks and parameters of a non-finite step. Runs only after such a step."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moefold.message_text import format_list

_LAYER_PATTERN = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class RankNonFinite:
    """Non-finite values found by one rank."""

    rank: int
    host: str
    has_bad_loss: bool
    """This rank's part of the loss is not finite: the fault is in the forward pass of its samples."""
    bad_parameters: tuple[str, ...]
    """Parameters whose reduced gradient is not finite in this rank's shard, in model order."""
    has_bad_gradient: bool
    """In the rerun, this rank's gradient was not finite before the reduction over ranks."""
    is_bad_on_rerun: bool
    """In the rerun, the loss or a gradient was not finite."""
    samples: tuple[int, ...] | None = None
    """Samples with tokens on this rank, as indices in the global batch, if `parallel.context` moves tokens. None means
    the samples of its data-parallel rank."""


@dataclass(frozen=True)
class NonFiniteReport:
    """Findings of all ranks, the same on every rank."""

    findings: tuple[RankNonFinite, ...]

    @property
    def loss_ranks(self) -> tuple[int, ...]:
        """Ranks whose part of the loss is not finite."""
        return tuple(finding.rank for finding in self.findings if finding.has_bad_loss)

    @property
    def parameters(self) -> tuple[str, ...]:
        """All parameters whose gradient is not finite, in model order."""
        return tuple(sorted({name for f in self.findings for name in f.bad_parameters}, key=_forward_order))

    @property
    def gradient_ranks(self) -> tuple[int, ...]:
        """Ranks whose gradient is not finite before reduction, if the loss is finite on all ranks."""
        return () if self.loss_ranks else tuple(f.rank for f in self.findings if f.has_bad_gradient)

    @property
    def is_reproducible(self) -> bool:
        """True if the rerun was also not finite. Otherwise the fault is probably in the hardware, not in the batch."""
        return any(finding.is_bad_on_rerun for finding in self.findings)

    def describe(self) -> str:
        """Describe ranks and parameters for a message."""
        places = []
        if self.loss_ranks:
            places.append(f"the loss on {self._format_ranks(self.loss_ranks)}")
        if self.gradient_ranks:
            places.append(f"the gradients that {self._format_ranks(self.gradient_ranks)} computed")
        if names := self.parameters:
            # The backward pass runs from the last parameter to the first and spreads non-finite values on its way.
            first = names[-1]
            holders = tuple(f.rank for f in self.findings if first in f.bad_parameters)
            others = f", and of {len(names) - 1} more up to {names[0]}" if len(names) > 1 else ""
            places.append(f"the reduced gradient of {first} on {self._format_ranks(holders)}{others}")
        rerun = (
            "not finite in a rerun of the step either"
            if self.is_reproducible
            else "but finite in a rerun of the step, as after a hardware fault"
        )
        return f"not finite: {'; '.join([*places, rerun])}"

    def _format_ranks(self, ranks: tuple[int, ...]) -> str:
        return format_list([f"rank {f.rank} ({f.host})" for f in self.findings if f.rank in ranks])


def nonfinite_parameters(parameters: Mapping[str, nn.Parameter]) -> tuple[str, ...]:
    """Return the parameters whose gradient shard on this rank is not finite, in model order."""
    bad = (
        name for name, parameter in parameters.items() if parameter.grad is not None and not is_finite(parameter.grad)
    )
    return tuple(sorted(bad, key=_forward_order))


def is_finite(tensor: Tensor) -> bool:
    """Synchronise with the device, and return whether this rank's shard of a tensor is finite."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return bool(torch.isfinite(local).all())


def _forward_order(name: str) -> tuple[int, int, str]:
    """Return a sort key for parameters in forward order: embedding, layers by number, the rest."""
    layer = _LAYER_PATTERN.search(name)
    if layer is not None:
        return 1, int(layer[1]), name
    return (0, 0, name) if name.startswith("embedding") else (2, 0, name)
