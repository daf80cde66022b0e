"""Names of adapters in PEFT's files: the modules of our matrices in a family's model, and the order of their rows.

PEFT adapts modules: `base_model.model.MODULE.lora_A.weight` is [r, in] and `...lora_B.weight` is [out, r], for the
module whose weight is the tensor `MODULE.weight` of the folder. Each expert is a separate module, as in released
folders. If transformers stacks the experts, PEFT stacks the adapters when it reads the file.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.config.base.param_spec import ParamSpec
from moefold.config.model import ModelConfig
from moefold.convert.families.family import Family
from moefold.convert.families.tensor_mapping import Shape, SliceMapping, StateDictMapping
from moefold.convert.weight_sources import family_mapping
from moefold.cost.adapter_spec import adapter_names
from moefold.errors import ConfigError
from moefold.message_text import format_list

PREFIX = "base_model.model."
SUFFIXES = (".lora_A.weight", ".lora_B.weight")


@dataclass(frozen=True)
class PeftModule:
    """Module of a family's model whose weight is one of our matrices, or one of its experts."""

    module: str
    """Name of the module in the model, such as "model.layers.0.self_attn.q_proj"."""
    name: str
    """Name of our matrix."""
    expert: int | None
    """Number of the expert, for a matrix of experts."""
    pieces: tuple[SliceMapping, ...]
    """Rows of the module's weight, in pieces."""

    @property
    def tensor_names(self) -> tuple[str, str]:
        """Names of A and B in a file of PEFT."""
        return f"{PREFIX}{self.module}{SUFFIXES[0]}", f"{PREFIX}{self.module}{SUFFIXES[1]}"

    def to_peft(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Convert the adapter of a matrix, A [r, in], B [out, r]. Experts have A [E, in, r], B [E, r, out]."""
        if self.expert is None:
            return a.contiguous(), self._rows(b, from_ours=True)
        return a[self.expert].t().contiguous(), self._rows(b[self.expert].t(), from_ours=True)

    def from_peft(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Convert the adapter of a module: A [r, in], B [out, r]. An expert has A [in, r], B [r, out]."""
        ours = self._rows(b, from_ours=False)
        return (a, ours) if self.expert is None else (a.t(), ours.t())

    def _rows(self, b: Tensor, *, from_ours: bool) -> Tensor:
        """Reorder the rows of B between our matrix and the module."""
        out = torch.empty_like(b, memory_format=torch.contiguous_format)
        dim = 0 if self.expert is None else 2
        for piece in self.pieces:
            ours = slice(piece.start[dim], piece.start[dim] + piece.size[dim])
            theirs = piece.hf_region()[0]
            if from_ours:
                out[theirs] = b[ours]
            else:
                out[ours] = b[theirs]
        return out


def peft_modules(model: ModelConfig, family: Family, weights: Mapping[str, ParamSpec]) -> list[PeftModule]:
    """Return the modules of a family's model for the matrices with adapters. Refuse a matrix without its own module."""
    modules = find_modules(model, family, weights)
    if fused := sorted(weights.keys() - {module.name for module in modules}):
        raise ConfigError(
            f"PEFT adapts modules, and models of the family {family.name} have none of their own for "
            f"{format_list(fused)}; moefold export --merge writes the merged weights instead"
        )
    return modules


def find_modules(model: ModelConfig, family: Family, weights: Mapping[str, ParamSpec]) -> list[PeftModule]:
    """Return the modules like `peft_modules`, for all matrices with a module in some layout of the family's tensors."""
    matches: list[PeftModule] = []
    for rules in family.layouts:
        mapping = family_mapping(model, rules, family)
        modules = [module for name, weight in weights.items() for module in _modules_of(mapping, name, weight)]
        if len({module.name for module in modules}) > len({module.name for module in matches}):
            matches = modules
    return matches


def other_modules(model: ModelConfig, family: Family, adapted: Collection[PeftModule]) -> set[str]:
    """Return the names of the modules of a model with a matrix but no adapter, except experts."""
    mapping = family_mapping(model, family.layouts[0], family)
    matrices = {name.removesuffix(".weight") for name, shape in mapping.hf_shapes.items() if len(shape) == 2}
    return {name for name in matrices if ".experts." not in name} - {module.module for module in adapted}


def _modules_of(mapping: StateDictMapping, name: str, weight: ParamSpec) -> list[PeftModule]:
    """Return the modules of one matrix, or [] if a tensor of the family also has other values, or another order."""
    by_tensor: dict[str, list[SliceMapping]] = {}
    for piece in mapping.by_name[name]:
        by_tensor.setdefault(piece.hf_name, []).append(piece)
    out_dim, in_dim = (2, 1) if weight.is_expert else (0, 1)
    modules = []
    for hf_name, pieces in by_tensor.items():
        shape = mapping.hf_shapes[hf_name]
        rows = sum(piece.size[out_dim] for piece in pieces)
        is_module = (
            hf_name.endswith(".weight")
            and shape == (weight.shape[out_dim], weight.shape[in_dim])
            and rows == shape[0]
            and all(
                piece.dims[out_dim] == 0
                and piece.dims[in_dim] == 1
                and piece.size[in_dim] == shape[1]
                and piece.hf_step[1] == 1
                and (not weight.is_expert or piece.size[0] == 1)
                for piece in pieces
            )
        )
        if not is_module:
            return []
        expert = pieces[0].start[0] if weight.is_expert else None
        modules.append(PeftModule(hf_name.removesuffix(".weight"), name, expert, tuple(pieces)))
    return modules


Pair = tuple[Tensor, Tensor]
_WITH_INPUTS_FIRST = ("gpt_oss",)
"""Families whose parameters are [E, in, out] for PEFT (`is_transposed`). For others, inputs are its last dim."""


@dataclass(frozen=True)
class StackedParameter:
    """Parameter of a family's model that stacks the experts of one or several of our matrices."""

    hf_name: str
    """Name of the parameter, such as "model.layers.1.mlp.experts.down_proj"."""
    inputs: int
    outputs: int
    pieces: tuple[SliceMapping, ...]
    """Our matrices, in the order of the outputs."""
    is_swapped: bool
    """True if PEFT interprets the outputs as inputs, so that they are in its A."""

    @property
    def module(self) -> str:
        """Name of the module that has the parameter."""
        return self.hf_name.rpartition(".")[0]

    @property
    def target(self) -> str:
        """Entry of `target_parameters`."""
        return ".".join(self.hf_name.split(".")[-2:])

    def fits(self, a: Shape, b: Shape) -> bool:
        """Return whether A and B with these shapes fit the parameter."""
        sizes = (self.outputs, self.inputs) if self.is_swapped else (self.inputs, self.outputs)
        return len(a) == len(b) == 2 and (a[1], b[0], a[0]) == (*sizes, b[1])

    def stack(self, adapters: Mapping[str, Pair]) -> Pair:
        """Return A and B of PEFT, given A [E, in, r] and B [E, r, out] of our matrices, by name."""
        trained = [(piece, *adapters[piece.name]) for piece in self.pieces if piece.name in adapters]
        experts, _, rank = trained[0][1].shape
        a_ERI = torch.cat([a.transpose(1, 2) for _, a, _ in trained], dim=1)
        b_ERO = a_ERI.new_zeros(experts, a_ERI.shape[1], self.outputs)
        for number, (piece, _, b) in enumerate(trained):
            b_ERO[:, number * rank : (number + 1) * rank, self._outputs_of(piece)] = b
        if self.is_swapped:
            return b_ERO.reshape(-1, self.outputs), a_ERI.permute(2, 1, 0).reshape(self.inputs, -1)
        return a_ERI.reshape(-1, self.inputs), b_ERO.permute(2, 1, 0).reshape(self.outputs, -1)

    def unstack(self, a: Tensor, b: Tensor, rank: int) -> dict[str, Pair]:
        """Return the adapters of our matrices, A [E, in, r] and B [E, r, out], by name. Refuse another rank."""
        experts = self.pieces[0].size[0]
        by_expert = a.reshape(experts, -1, a.shape[1])
        by_rank = b.reshape(b.shape[0], -1, experts).permute(2, 1, 0)
        a_ERI, b_ERO = (by_rank, by_expert) if self.is_swapped else (by_expert, by_rank)
        width = a_ERI.shape[1]
        is_diagonal = width == rank * len(self.pieces) > rank
        pairs = {}
        for number, piece in enumerate(self.pieces):
            columns_ERO = b_ERO[:, :, self._outputs_of(piece)]
            columns = slice(number * rank, (number + 1) * rank) if is_diagonal else slice(None)
            others = columns_ERO.clone()
            others[:, columns] = 0
            if (width != rank and not is_diagonal) or others.any():
                raise ConfigError(
                    f"the adapter of {self.module} has rank {width}, and r={rank} in adapter_config.json; moefold "
                    "reads one rank for all modules"
                )
            pairs[piece.name] = (
                a_ERI[:, columns].transpose(1, 2).contiguous(),
                columns_ERO[:, columns].contiguous(),
            )
        return pairs

    def _outputs_of(self, piece: SliceMapping) -> slice:
        """Return the outputs of one of our matrices."""
        out_dim = piece.dims[2]
        assert out_dim is not None
        return piece.hf_region()[out_dim]


def stacked_parameters(
    model: ModelConfig, family: Family, weights: Mapping[str, ParamSpec]
) -> dict[str, list[StackedParameter]]:
    """Return the parameters with stacked experts, by their module, inner modules first, or empty if there are none.

    The family's last layout with stacked experts is the layout of transformers' model.
    """
    stacked: dict[str, list[StackedParameter]] = {}
    for rules in family.layouts:
        mapping = family_mapping(model, rules, family)
        by_tensor: dict[str, list[SliceMapping]] = {}
        for name, weight in weights.items():
            for piece in mapping.by_name[name] if weight.is_expert else ():
                by_tensor.setdefault(piece.hf_name, []).append(piece)
        parameters = [_parameter(family, name, mapping.hf_shapes[name], pieces) for name, pieces in by_tensor.items()]
        if None in parameters:
            continue
        stacked = {}
        for parameter in sorted(filter(None, parameters), key=lambda parameter: -len(parameter.pieces)):
            stacked.setdefault(parameter.module, []).append(parameter)
    return stacked


def _parameter(family: Family, hf_name: str, shape: Shape, pieces: list[SliceMapping]) -> StackedParameter | None:
    """Return the parameter of a tensor, or None if it does not stack experts."""
    _, in_dim, out_dim = pieces[0].dims
    if len(shape) != 3 or in_dim is None or out_dim is None:
        return None
    ordered = tuple(sorted(pieces, key=lambda piece: piece.hf_start[out_dim]))
    is_swapped = in_dim < out_dim and family.name not in _WITH_INPUTS_FIRST
    return StackedParameter(hf_name, shape[in_dim], shape[out_dim], ordered, is_swapped)


def write_stacked(adapters: Mapping[str, Pair], parameters: Mapping[str, list[StackedParameter]]) -> dict[str, Tensor]:
    """Return the tensors of PEFT for adapters of experts, A [E, in, r] and B [E, r, out], by name."""
    tensors: dict[str, Tensor] = {}
    for module, candidates in parameters.items():
        adapted = [parameter for parameter in candidates if any(piece.name in adapters for piece in parameter.pieces)]
        # PEFT wraps the parameters one after the other.
        names = reversed(_pair_names(module)[: len(adapted)])
        for parameter, pair_names in zip(adapted, names, strict=True):
            tensors |= dict(zip(pair_names, parameter.stack(adapters), strict=True))
    return tensors


def read_stacked(
    tensors: Mapping[str, Tensor], parameters: Mapping[str, list[StackedParameter]], rank: int
) -> dict[str, Tensor]:
    """Return the adapters of stacked experts by our names. `rank` is r of adapter_config.json."""
    pairs: dict[str, Pair] = {}
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
            pairs |= fitting[0].unstack(a, b, rank)
    untrained = _untrained_halves(pairs, parameters)
    trained = {name: pair for name, pair in pairs.items() if leaf(name) not in untrained}
    return {
        half: values for name, pair in trained.items() for half, values in zip(adapter_names(name), pair, strict=True)
    }


def _untrained_halves(pairs: Mapping[str, Pair], parameters: Mapping[str, list[StackedParameter]]) -> set[str]:
    """Return the matrices, such as w_up, with a zero adapter in all layers where the other adapter is not zero."""
    trained = {leaf(name) for name, (_, b) in pairs.items() if b.any()}
    halves = [{leaf(piece.name) for piece in group.pieces} for several in parameters.values() for group in several]
    return set().union(*(half - trained for half in halves if half & trained))


def leaf(name: str) -> str:
    """Return the last part of a dotted name."""
    return name.rpartition(".")[2]


def stacked_names(parameters: Mapping[str, list[StackedParameter]]) -> set[str]:
    """Return the names that adapters of stacked experts may have in a file."""
    return {name for module in parameters for pair in _pair_names(module) for name in pair}


def _pair_names(module: str) -> list[tuple[str, str]]:
    return [(f"{PREFIX}{module}{inner}{SUFFIXES[0]}", f"{PREFIX}{module}{inner}{SUFFIXES[1]}") for inner in INNER]


INNER = ("", ".base_layer")
"""Suffixes of a module whose parameters have nested adapters."""
