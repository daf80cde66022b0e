"""Names of adapters in PEFT's files: which module of a family's model a matrix is, and how its rows are ordered.

PEFT adapts modules: `base_model.model.MODULE.lora_A.weight` is [r, in] and `...lora_B.weight` is [out, r], for the
module whose weight is the tensor `MODULE.weight` of the folder. Each expert is a module of its own, as in released
folders; where transformers stacks the experts, PEFT stacks the adapters when it reads the file.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.config.model import ModelConfig
from moefold.config.param_spec import ParamSpec
from moefold.convert.family import Family
from moefold.convert.tensor_mapping import SliceMapping, StateDictMapping
from moefold.convert.weights import family_mapping
from moefold.errors import ConfigError, format_list

PREFIX = "base_model.model."
SUFFIXES = (".lora_A.weight", ".lora_B.weight")


@dataclass(frozen=True)
class PeftModule:
    """One module of a family's model whose weight is a matrix of ours, or one expert of it."""

    module: str
    """Its name in the model, such as "model.layers.0.self_attn.q_proj"."""
    name: str
    """The matrix."""
    expert: int | None
    """Number of the expert, if the matrix has one for each."""
    pieces: tuple[SliceMapping, ...]
    """Rows of the module's weight, in pieces."""

    @property
    def tensor_names(self) -> tuple[str, str]:
        """Names of A and B in a file of PEFT."""
        return f"{PREFIX}{self.module}{SUFFIXES[0]}", f"{PREFIX}{self.module}{SUFFIXES[1]}"

    def to_peft(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Convert the adapter of a matrix, A [r, in], B [out, r]; of experts A [E, in, r], B [E, r, out]."""
        if self.expert is None:
            return a.contiguous(), self._rows(b, from_ours=True)
        return a[self.expert].t().contiguous(), self._rows(b[self.expert].t(), from_ours=True)

    def from_peft(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Convert the adapter of a module: A [r, in], B [out, r]; of an expert A [in, r], B [r, out]."""
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
    """Return the modules of a family's model that the matrices of adapters are.

    Args:
        weights: the matrices with adapters, by name.

    Raises:
        ConfigError: the family has no module of its own for a matrix, in any layout of its tensors.
    """
    found = find_modules(model, family, weights)
    if fused := sorted(weights.keys() - {module.name for module in found}):
        raise ConfigError(
            f"PEFT adapts modules, and models of the family {family.name} have none of their own for "
            f"{format_list(fused)}; moefold export --merge writes the merged weights instead"
        )
    return found


def find_modules(model: ModelConfig, family: Family, weights: Mapping[str, ParamSpec]) -> list[PeftModule]:
    """Return the modules as `peft_modules`, of as many matrices as have one in a layout of the family's tensors."""
    found: list[PeftModule] = []
    for rules in family.layouts:
        mapping = family_mapping(model, rules, family)
        modules = [module for name, weight in weights.items() for module in _modules_of(mapping, name, weight)]
        if len({module.name for module in modules}) > len({module.name for module in found}):
            found = modules
    return found


def other_modules(model: ModelConfig, family: Family, adapted: Collection[PeftModule]) -> set[str]:
    """Return the names of the modules of a model that have a matrix and no adapter, experts apart."""
    mapping = family_mapping(model, family.layouts[0], family)
    matrices = {name.removesuffix(".weight") for name, shape in mapping.hf_shapes.items() if len(shape) == 2}
    return {name for name in matrices if ".experts." not in name} - {module.module for module in adapted}


def _modules_of(mapping: StateDictMapping, name: str, weight: ParamSpec) -> list[PeftModule]:
    """Return the modules of one matrix; [] if a tensor of the family also holds other values, or has another order."""
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
