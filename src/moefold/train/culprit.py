"""Where a step that is not finite went wrong: rank, parameter, samples. Asked after the fact; costs nothing before."""

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moefold.errors import some
from moefold.launch.crew import joined_crew

_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class RankFinding:
    """What one rank sees of it."""

    rank: int
    host: str
    has_bad_loss: bool
    """Its own part of the loss is not finite: the fault lies in the forward pass of samples that it computes."""
    bad_parameters: tuple[str, ...]
    """Parameters whose reduced gradient has a value that is not finite in this rank's part of it, in model order."""


@dataclass(frozen=True)
class Culprit:
    """What all ranks together see; the same on every rank."""

    findings: tuple[RankFinding, ...]

    @property
    def loss_ranks(self) -> tuple[int, ...]:
        """Ranks whose own part of the loss is not finite."""
        return tuple(finding.rank for finding in self.findings if finding.has_bad_loss)

    @property
    def parameters(self) -> tuple[str, ...]:
        """All parameters whose gradient is not finite, in model order."""
        return tuple(sorted({name for f in self.findings for name in f.bad_parameters}, key=_depth))

    def words(self) -> str:
        """Ranks and parameters, for a message; empty if all that is not finite is a sum."""
        found = []
        if ranks := [f"rank {f.rank} ({f.host})" for f in self.findings if f.has_bad_loss]:
            found.append(f"the loss on {some(ranks)}")
        if names := self.parameters:
            # The backward pass comes from the last parameter of the model and carries the fault on to the first.
            first = names[-1]
            holders = [f"rank {f.rank} ({f.host})" for f in self.findings if first in f.bad_parameters]
            rest = f", and of {len(names) - 1} more up to {names[0]}" if len(names) > 1 else ""
            found.append(f"the gradient of {first} on {some(holders)}{rest}")
        return f"not finite: {'; '.join(found)}" if found else ""


def find_culprit(loss: Tensor, parameters: Mapping[str, nn.Parameter]) -> Culprit:
    """Look at this rank's part of loss and gradients, and hear the others; collective over all ranks.

    Args:
        loss: this rank's part of the terms of the loss.
        parameters: of this rank, by name, with their reduced gradients.
    """
    crew = joined_crew()
    bad = tuple(sorted((name for name, p in parameters.items() if not _is_finite(p.grad)), key=_depth))
    mine = RankFinding(crew.rank, socket.gethostname(), not _is_finite(loss), bad)
    return Culprit(tuple(crew.gather(mine)))


def _is_finite(tensor: Tensor | None) -> bool:
    if tensor is None:
        return True
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return bool(torch.isfinite(local).all())


def _depth(name: str) -> tuple[int, int, str]:
    """Place of a parameter in the way of the data: embedding, layers by number, the rest."""
    layer = _LAYER.search(name)
    if layer is not None:
        return 1, int(layer[1]), name
    return (0, 0, name) if name.startswith("embedding") else (2, 0, name)
