"""Upcycling: experts as scaled copies or slices of a dense model's feed-forward layers, with unchanged outputs.

With granularity G = dense width / expert width, expert e holds slice e mod G of the dense feed-forward layer, and the G
experts from e - e mod G on are a virtual group: together they are one copy of the layer (arXiv:2410.07524 sec. 3). A
router whose rows are equal within each group sends a token to whole groups. Each chosen copy counts with its routing
weight, so w_up and w_down are scaled until the weights of the copies of a slice sum to 1: the model computes what the
dense one does. With G = 1 this is plain upcycling (arXiv:2212.05055, arXiv:2412.09952).
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from moefold.config.schema import ModelConfig
from moefold.convert.tensor_mapping import Region, Shape
from moefold.convert.upcycle_check import granularity, upcycle_scale
from moefold.convert.weights import WeightSource, parameter_shapes
from moefold.model.init import initial_values, seed_for

EXPERTS = ".ffn.experts.w_"
ROUTER = ".ffn.router.weight"
SHARED = (".ffn.shared.w_gate", ".ffn.shared.w_up", ".ffn.shared_gate")
"""Tensors of a shared expert that are initialised at random; its w_down is 0, so that it adds nothing at first."""


class UpcycledSource:
    """Initial weights of a model with experts, computed from those of a dense model.

    Args:
        dense: the weights of the dense model.
        model: the model with experts; `upcycle_unsupported_reason` must accept the pair.
        seed: of the router, the noise and the shared expert; each tensor has its own generator.
    """

    def __init__(self, dense: WeightSource, model: ModelConfig, seed: int) -> None:
        self._dense = dense
        self._model = model
        self._seed = seed
        self.shapes: Mapping[str, Shape] = parameter_shapes(model)
        some_width = next(shape[0] for name, shape in dense.shapes.items() if name.endswith(".ffn.w_up"))
        self._granularity = granularity(some_width, model)
        # Both w_up and w_down get the square root, because their product is what must be scaled.
        self._factor = math.sqrt(upcycle_scale(model, self._granularity)) if model.upcycle_scaling else 1.0

    def dtype(self, name: str) -> torch.dtype:
        """Return the dense dtype, or float32 where scaling or noise would be rounded."""
        if name.endswith(".expert_bias"):
            return torch.float32
        if EXPERTS in name and (self._model.upcycle_noise or math.frexp(self._factor)[0] != 0.5):
            return torch.float32
        return self._dense.dtype(name if name in self._dense.shapes else "embedding.weight")

    def read(self, name: str, region: Region) -> Tensor:
        """Return the values of a region; reads whole experts of the dense model."""
        if EXPERTS in name:
            experts = [self._expert(name, e)[region[1:]] for e in range(region[0].start, region[0].stop)]
            return torch.stack(experts).to(self.dtype(name))
        if name in self._dense.shapes:
            return self._dense.read(name, region)
        return self._new_tensor(name)[region].to(self.dtype(name))

    def clear_cache(self) -> None:
        """Free the cache of the dense source."""
        self._dense.clear_cache()

    def _new_tensor(self, name: str) -> Tensor:
        """Return a whole tensor that the dense model lacks."""
        shape = self.shapes[name]
        model = self._model
        if not name.endswith((ROUTER, *SHARED)) or (name.endswith(ROUTER) and model.upcycle_router == "zero"):
            return torch.zeros(shape)
        if name.endswith(ROUTER) and model.upcycle_router == "group":
            groups = initial_values(f"{name}.groups", (shape[0] // self._granularity, shape[1]), model, self._seed)
            return groups.repeat_interleave(self._granularity, 0)
        return initial_values(name, shape, model, self._seed)

    def _expert(self, name: str, e: int) -> Tensor:
        """Return one expert, [H, F], or [F, H] for w_down, in float32."""
        model = self._model
        dense_name = name.replace(".experts.", ".")
        part = e % self._granularity
        inner = slice(part * model.moe_ffn_hidden_size, (part + 1) * model.moe_ffn_hidden_size)
        outer = slice(0, model.hidden_size)
        is_down = name.endswith("w_down")
        values = self._dense.read(dense_name, (outer, inner) if is_down else (inner, outer)).float().t()
        if not name.endswith("w_gate"):
            values = values * self._factor
        if model.upcycle_noise:
            generator = torch.Generator().manual_seed(seed_for(self._seed, f"{name}.{e}.noise"))
            noise = torch.empty(values.shape).normal_(0.0, 1.0, generator=generator)
            values = values + model.upcycle_noise * values.std() * noise
        return values
