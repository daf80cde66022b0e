"""Where a step that is not finite went wrong: ranks and parameters. Asked after the fact; costs nothing before."""

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moefold.comm.groups import current_world
from moefold.errors import format_list

_LAYER_PATTERN = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class RankNonFinite:
    """What one rank sees of it."""

    rank: int
    host: str
    has_bad_loss: bool
    """Its own part of the loss is not finite: the fault lies in the forward pass of samples that it computes."""
    bad_parameters: tuple[str, ...]
    """Parameters whose reduced gradient has a value that is not finite in this rank's part of it, in model order."""
    has_bad_gradient: bool
    """Computed once more, its own gradient was not finite before it was added to those of other ranks."""
    is_bad_on_rerun: bool
    """Computed once more, something of it was not finite."""


@dataclass(frozen=True)
class NonFiniteReport:
    """What all ranks together see; the same on every rank."""

    findings: tuple[RankNonFinite, ...]

    @property
    def loss_ranks(self) -> tuple[int, ...]:
        """Ranks whose own part of the loss is not finite."""
        return tuple(finding.rank for finding in self.findings if finding.has_bad_loss)

    @property
    def parameters(self) -> tuple[str, ...]:
        """All parameters whose gradient is not finite, in model order."""
        return tuple(sorted({name for f in self.findings for name in f.bad_parameters}, key=_forward_order))

    @property
    def gradient_ranks(self) -> tuple[int, ...]:
        """Ranks whose own gradient is not finite, where the loss of all is."""
        return () if self.loss_ranks else tuple(f.rank for f in self.findings if f.has_bad_gradient)

    @property
    def is_reproducible(self) -> bool:
        """Whether it was not finite again when it was computed once more; else the batch is not at fault."""
        return any(finding.is_bad_on_rerun for finding in self.findings)

    def describe(self) -> str:
        """Ranks and parameters, for a message."""
        found = []
        if self.loss_ranks:
            found.append(f"the loss on {self._format_ranks(self.loss_ranks)}")
        if self.gradient_ranks:
            found.append(f"the gradients that {self._format_ranks(self.gradient_ranks)} computed")
        if names := self.parameters:
            # The backward pass comes from the last parameter of the model and carries the fault on to the first.
            first = names[-1]
            holders = tuple(f.rank for f in self.findings if first in f.bad_parameters)
            rest = f", and of {len(names) - 1} more up to {names[0]}" if len(names) > 1 else ""
            found.append(f"the reduced gradient of {first} on {self._format_ranks(holders)}{rest}")
        again = (
            "so again when computed anew"
            if self.is_reproducible
            else "but finite when computed anew, as of a bad machine"
        )
        return f"not finite: {'; '.join([*found, again])}"

    def _format_ranks(self, ranks: tuple[int, ...]) -> str:
        return format_list([f"rank {f.rank} ({f.host})" for f in self.findings if f.rank in ranks])


def gather_findings(
    bad_loss: bool, bad_parameters: tuple[str, ...], has_bad_gradient: bool, is_bad_on_rerun: bool
) -> NonFiniteReport:
    """Put together what all ranks have found; collective over all of them. The arguments are those of `RankNonFinite`."""
    crew = current_world()
    mine = RankNonFinite(crew.rank, socket.gethostname(), bad_loss, bad_parameters, has_bad_gradient, is_bad_on_rerun)
    return NonFiniteReport(tuple(crew.all_gather_object(mine)))


def nonfinite_parameters(parameters: Mapping[str, nn.Parameter]) -> tuple[str, ...]:
    """Those whose gradient, or this rank's part of it, is not finite, in model order."""
    bad = (
        name for name, parameter in parameters.items() if parameter.grad is not None and not is_finite(parameter.grad)
    )
    return tuple(sorted(bad, key=_forward_order))


def is_finite(tensor: Tensor) -> bool:
    """Whether this rank's part of a tensor is; waits for the device."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return bool(torch.isfinite(local).all())


def _forward_order(name: str) -> tuple[int, int, str]:
    """Place of a parameter in the way of the data: embedding, layers by number, the rest."""
    layer = _LAYER_PATTERN.search(name)
    if layer is not None:
        return 1, int(layer[1]), name
    return (0, 0, name) if name.startswith("embedding") else (2, 0, name)
