"""A site with the outer optimizer, and checks of its coded differences."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from moefold.config.sections.sites import SitesConfig
from moefold.optim.outer import OuterOptimizer
from moefold.optim.states import StateStore

SHAPES = {"a": (3, 4), "b": (5,), "empty": (0, 2), "c": ()}
BUFFERS = {"bias": torch.tensor([0.5, -1.0]), "counts": torch.tensor([3, 4])}


class Site:
    """The parameters of a site, a linear regression on its own samples, and the outer optimizer."""

    def __init__(self, settings: SitesConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.parameters = {
            name: nn.Parameter(torch.randn(shape, dtype=dtype, generator=draw)) for name, shape in SHAPES.items()
        }
        self.buffers = {name: buffer.clone() for name, buffer in BUFFERS.items()}
        self.outer = (settings.part.outer() or OuterOptimizer)(self.parameters, self.buffers, settings, StateStore())
        self.outer.start()

    def move(self, gradients: dict[str, Tensor], lr: float = 0.1) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.sub_(lr * gradients[name])

    def flat(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.parameters.values()])


def gradients(site: int, step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1000 * site + step)
    return {name: torch.randn(shape, dtype=torch.float64, generator=draw) for name, shape in SHAPES.items()}


def in_blocks(tensors: Iterable[Tensor], block: int) -> Tensor:
    """Tensors as they are in the vector of a round: each with zeros up to a whole block of the code."""
    return torch.cat([functional.pad(t.flatten(), (0, -t.numel() % block)) for t in tensors])


def assert_same_shard(code_keys: dict[str, Any]) -> None:
    """Ranks hold other shards of one parameter, and the same of the next: the code of the first must not matter."""
    decoded = []
    for rank in range(2):
        parameters = {"sharded": torch.full((5,), 10.0**rank), "replicated": torch.arange(1.0, 8.0)}
        outer = OuterOptimizer(
            {name: nn.Parameter(tensor) for name, tensor in parameters.items()},
            {},
            SitesConfig(count=2, residual=0.5, **code_keys),
            StateStore(),
        )
        own = outer.difference()
        code = outer.code
        outer.keep_residual((0,), own, code.decode(code.encode(own), own))
        decoded.append(outer.residual["replicated"])
    assert decoded[0].any()
    assert torch.equal(*decoded)


def assert_residual(settings: SitesConfig) -> None:
    """All that was sent, plus the residual at the end, is all that was to be sent, each part decayed since."""
    site = Site(settings)
    beta = settings.residual
    code = site.outer.code
    num_coded = site.outer.num_coded((0,))
    sent_total = torch.zeros(num_coded, dtype=torch.float64)
    due_total = torch.zeros(num_coded, dtype=torch.float64)
    for round_ in range(6):
        site.move(gradients(0, round_))
        due = in_blocks([w - site.parameters[n].detach() for n, w in site.outer.weights.items()], code.block)
        value = site.outer.difference()
        residual = in_blocks(site.outer.residual.values(), code.block)
        torch.testing.assert_close(value[:num_coded], due + beta * residual, rtol=1e-14, atol=1e-14)
        assert torch.equal(value, site.outer.difference())
        decoded = value.clone()
        decoded[:num_coded] = code.decode(code.encode(value[:num_coded]), value[:num_coded])
        if round_ == 3:
            # A round that is not applied leaves the residual, and the next one sends the longer difference.
            continue
        site.outer.keep_residual((0,), value, decoded)
        site.outer.step(value, decoded)
        sent_total = beta * sent_total + decoded[:num_coded]
        due_total = beta * due_total + due
    residual = in_blocks(site.outer.residual.values(), code.block)
    lost = float(residual.abs().max())
    assert lost > 0
    torch.testing.assert_close(sent_total + residual, due_total, rtol=1e-12, atol=1e-12)
