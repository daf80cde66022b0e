"""Adapters of stacked experts in PEFT's files: those of all experts of a layer in two matrices for each parameter.

Where a model stacks its experts in one parameter [E, out, in], PEFT has A as [E * r, in], by expert, and B as
[out, r * E], by the index of the rank (`ParamWrapper.get_delta_weight`). If a module has two such parameters, the
adapter of the first is named `base_layer`. Gate and up projections in one parameter share A: each gets a copy. Adapters
that PEFT has stacked itself are block-diagonal instead, with a part of the rank for each of the two.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from moefold.config.model import ModelConfig
from moefold.convert.family import Family
from moefold.convert.peft_names import PREFIX, SUFFIXES
from moefold.convert.tensor_mapping import SliceMapping
from moefold.convert.weights import family_mapping
from moefold.cost.adapter_spec import adapter_names
from moefold.cost.param_spec import ParamSpec
from moefold.errors import ConfigError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StackedParameter:
    """A parameter of a family's model that stacks the experts of one or more of our matrices."""

    module: str
    """Module of the parameter, such as "model.layers.1.mlp.experts"."""
    inputs: int
    outputs: int
    pieces: tuple[SliceMapping, ...]
    """Our matrices, in the order of the outputs."""

    def fits(self, a: Shape, b: Shape) -> bool:
        """Return whether A and B of these shapes adapt the parameter."""
        return len(a) == len(b) == 2 and (a[1], b[0], a[0]) == (self.inputs, self.outputs, b[1])

    def unstack(self, a: Tensor, b: Tensor, rank: int) -> dict[str, Tensor]:
        """Return the adapters of our matrices, A [E, in, r] and B [E, r, out], by name.

        Raises:
            ConfigError: they have another rank.
        """
        experts = self.pieces[0].size[0]
        a_ERI = a.reshape(experts, -1, self.inputs)
        b_ORE = b.reshape(self.outputs, -1, experts)
        width = a_ERI.shape[1]
        is_diagonal = width == rank * len(self.pieces) > rank
        found = {}
        for number, piece in enumerate(self.pieces):
            out_dim = piece.dims[2]
            assert out_dim is not None
            rows_ORE = b_ORE[piece.hf_region()[out_dim]]
            own = slice(number * rank, (number + 1) * rank) if is_diagonal else slice(None)
            others = rows_ORE.clone()
            others[:, own] = 0
            if (width != rank and not is_diagonal) or others.any():
                raise ConfigError(
                    f"the adapter of {self.module} has rank {width}, and r={rank} in adapter_config.json; moefold "
                    "reads one rank for all modules"
                )
            name_a, name_b = adapter_names(piece.name)
            found[name_a] = a_ERI[:, own].transpose(1, 2).contiguous()
            found[name_b] = rows_ORE[:, own].permute(2, 1, 0).contiguous()
        return found


def stacked_parameters(
    model: ModelConfig, family: Family, weights: Mapping[str, ParamSpec]
) -> dict[str, list[StackedParameter]]:
    """Return the parameters that stack experts, by their module; empty if the family has no such layout.

    Args:
        model: the model.
        family: its family.
        weights: the matrices that may have adapters, by name.
    """
    for rules in family.layouts:
        mapping = family_mapping(model, rules, family)
        by_tensor: dict[str, list[SliceMapping]] = {}
        for name, weight in weights.items():
            for piece in mapping.by_name[name] if weight.is_expert else ():
                by_tensor.setdefault(piece.hf_name, []).append(piece)
        found: dict[str, list[StackedParameter]] = {}
        for hf_name, pieces in by_tensor.items():
            shape = mapping.hf_shapes[hf_name]
            _, in_dim, out_dim = pieces[0].dims
            if len(shape) != 3 or in_dim is None or out_dim is None:
                break
            pieces.sort(key=lambda piece: piece.hf_start[out_dim])
            module = hf_name.rpartition(".")[0]
            parameter = StackedParameter(module, shape[in_dim], shape[out_dim], tuple(pieces))
            found.setdefault(module, []).append(parameter)
        else:
            return found
    return {}


def read_stacked(
    tensors: Mapping[str, Tensor], parameters: Mapping[str, list[StackedParameter]], rank: int
) -> dict[str, Tensor]:
    """Return the adapters of stacked experts by our names.

    Args:
        tensors: those of `stacked_names`.
        parameters: as returned by `stacked_parameters`.
        rank: r of adapter_config.json.

    Raises:
        ConfigError: an adapter has another rank, or the shapes of no parameter.
    """
    found: dict[str, Tensor] = {}
    for module, candidates in parameters.items():
        for name_a, name_b in _pair_names(module):
            if name_a not in tensors or name_b not in tensors:
                continue
            a = tensors[name_a]
            b = tensors[name_b]
            fitting = [parameter for parameter in candidates if parameter.fits(tuple(a.shape), tuple(b.shape))]
            if len(fitting) != 1:
                raise ConfigError(
                    f"{name_a} is {list(a.shape)} and its B {list(b.shape)}, sizes of no parameter of {module}"
                )
            found |= fitting[0].unstack(a, b, rank)
    return found


def stacked_names(parameters: Mapping[str, list[StackedParameter]]) -> set[str]:
    """Return the names that adapters of stacked experts may have in a file."""
    return {name for module in parameters for pair in _pair_names(module) for name in pair}


def _pair_names(module: str) -> list[tuple[str, str]]:
    return [(f"{PREFIX}{module}{inner}{SUFFIXES[0]}", f"{PREFIX}{module}{inner}{SUFFIXES[1]}") for inner in INNER]


INNER = ("", ".base_layer")
"""Suffixes of a module whose parameters are adapted one inside the other."""
