"""Muon (Keller Jordan, 2024; arXiv:2502.16982) for matrices, AdamW for all other parameters."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar

from moefold.config.base.field import BELOW_ONE, MaxMagnitude, at_least
from moefold.config.base.param_spec import ParamSpec
from moefold.config.groups.optimizer import MatrixWork, StateSpec
from moefold.message_text import Problem
from moefold.parts.optimizer.adamw.part import AdamW

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from moefold.config.model import ModelConfig
    from moefold.optim.build import OptimizerRun

MUON_GROUPS = ("attention", "dense_mlp", "experts", "shared_experts", "router", "mtp")
"""Groups of the layers' weight matrices. mtp: the input projection of multi-token prediction."""
MOMENTUM = "momentum"
BYTES_PER_PARAM = 58
"""Memory traffic for the local shard of a matrix: norm 4, decayed weight 8, momentum 20, Nesterov 12, update 12, copy
2."""
BF16_MOMENTUM_BYTES_PER_PARAM = 68
"""Memory traffic with a bfloat16 momentum, which is upcast and rounded."""
OWNER_BYTES_PER_PARAM = 52
"""Memory traffic on the owner of a full matrix: packed, unpacked, normalised, scaled, and packed again."""
KERNELS_PER_MATRIX = 8
"""Kernel launches for a matrix other than GEMMs: copies, norm, scaling."""


@dataclass(frozen=True, kw_only=True)
class Muon(AdamW):
    """Move each matrix of `groups` by its orthogonalised momentum (arXiv:2502.16982), and the rest as AdamW does."""

    state_fields: ClassVar[tuple[str, ...]] = ("moment_dtype", "groups")

    groups: tuple[str, ...] = MUON_GROUPS
    """Groups of matrices of the model that Muon updates. AdamW updates all other groups, and always embeddings, head,
    norms, biases and gates. mtp: the input projection of multi-token prediction."""
    momentum: Annotated[float, BELOW_ONE] = 0.95
    """Decay of Muon's Nesterov momentum."""
    ns_steps: Annotated[int, at_least(1), MaxMagnitude(100)] = 5
    """Newton-Schulz iterations that Muon uses to orthogonalise a matrix."""

    def gathers(self, weight: ParamSpec) -> bool:
        """Return whether Muon updates a weight, instead of AdamW."""
        return weight.updates_as_matrix and weight.part in self.groups

    def states(self, weight: ParamSpec) -> tuple[StateSpec, ...]:
        """Return the momentum of a matrix, or the states of AdamW."""
        return (StateSpec(MOMENTUM, self.state_dtype),) if self.gathers(weight) else super().states(weight)

    def traffic(self, weight: ParamSpec) -> float:
        """Return the bytes that an update moves for each number of a weight on the rank that holds it."""
        if not self.gathers(weight):
            return super().traffic(weight)
        return BF16_MOMENTUM_BYTES_PER_PARAM if self.has_bf16_moments else BYTES_PER_PARAM

    def matrix_work(self, rows: int, columns: int) -> MatrixWork:
        """Return the work of Newton-Schulz: X X^T, its square, and their sum times X."""
        small = min(rows, columns)
        large = max(rows, columns)
        gemms = (small, small, large), (small, small, small), (small, large, small)
        return MatrixWork(self.ns_steps, gemms, KERNELS_PER_MATRIX, OWNER_BYTES_PER_PARAM)

    def check(self, model: "ModelConfig") -> Iterator[Problem]:
        """Yield errors for groups that are unknown, named twice or not in the model, and the errors of AdamW."""
        yield from super().check()
        yield from self._imprecise_decays({"momentum": self.momentum})
        key = f"{self.key}.groups"
        names = ", ".join(map(repr, MUON_GROUPS))
        if not self.groups:
            yield Problem(key, [], "leaves Muon nothing", f"name some of {names}, or choose optimizer='adamw'")
        for group in dict.fromkeys(self.groups):
            if group not in MUON_GROUPS:
                yield Problem(key, None, f"has {group!r}, which is not a group of matrices", f"choose from {names}")
            elif (count := self.groups.count(group)) > 1:
                yield Problem(key, None, f"names {group!r} {count} times", "name it once")
        # The default, all groups, means all groups that the model has.
        lacking = {} if set(self.groups) == set(MUON_GROUPS) else _lacking_groups(model)
        for group in (group for group in lacking if group in self.groups):
            yield Problem(
                key,
                None,
                f"has {group!r}, and the model has no such matrices: {lacking[group]}",
                f"leave {group!r} out, or leave groups out for all groups",
            )

    def formula(self) -> Callable[..., "Tensor"]:
        """Return the update of one weight. See the base class."""
        from moefold.parts.optimizer.muon.oracle import update

        return partial(update, self, super().formula())

    def build(self, parameters: "Mapping[str, nn.Parameter]", run: "OptimizerRun") -> "Optimizer":
        """Build the optimizer. It is collective over the stage."""
        from moefold.parts.optimizer.muon.module import build_muon

        return build_muon(self, parameters, run)


def _lacking_groups(model: "ModelConfig") -> dict[str, str]:
    """Return the groups of matrices that a model lacks, each with the reason."""
    lacking = {}
    if not model.has_dense_layers:
        lacking["dense_mlp"] = "no layer of model.layers is 'dense'"
    if not model.has_moe_layers:
        lacking |= dict.fromkeys(("experts", "shared_experts", "router"), "no layer of model.layers is 'moe'")
    elif not model.experts.shared_width and not model.experts.latent_size:
        lacking["shared_experts"] = "model.ffn.moe.shared=none"
    if not model.mtp_layers:
        lacking["mtp"] = "model.mtp_layers=0"
    return lacking
