"""The part of every parameter that each rank of a mapping holds, as boxes of indices.

A mapping is a folding, a placement of layers on pipeline ranks, and whether data-parallel ranks shard the weights. So
every rank knows without communication what any rank holds under any mapping. A test compares the boxes with the local
shards of DTensor and FSDP2.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from moefold.config.base.param_spec import ParamSpec, expert_dp_dim, shard_rows
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.cost.layer_spec import model_weights
from moefold.cost.stage_balance import plan_stages
from moefold.topology.layout import Layout, fold_mapping
from moefold.topology.pipeline_layout import StagePlan


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A non-empty box of indices of a tensor: the first index and the size along each dim."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.size)

    def intersect(self, other: "Box") -> "Box | None":
        """Return the common part of two boxes of one tensor, or None if there is none."""
        start = tuple(map(max, self.start, other.start))
        stop = (min(a + n, b + m) for a, n, b, m in zip(self.start, self.size, other.start, other.size, strict=True))
        size = tuple(end - begin for begin, end in zip(start, stop, strict=True))
        return Box(start, size) if min(size) > 0 else None

    def index_in(self, outer: "Box") -> tuple[slice, ...]:
        """Return the slices that select this box in a tensor that holds `outer`."""
        return tuple(slice(a - b, a - b + n) for a, n, b in zip(self.start, self.size, outer.start, strict=True))


def whole_box(shape: tuple[int, ...]) -> Box:
    """Return the box of a whole tensor."""
    return Box((0,) * len(shape), shape)


@dataclass(frozen=True)
class WeightSharding:
    """The part of a mapping that decides how weights are sharded.

    Args:
        stage_plan: placement of the layers on pipeline ranks.
        shards_data_parallel: whether data-parallel ranks shard the weights (training with ZeRO 1 to 3), as opposed to
            replicas (ZeRO 0, inference).
    """

    model: ModelConfig
    layout: Layout
    stage_plan: StagePlan
    shards_data_parallel: bool

    @classmethod
    def from_config(cls, cfg: Config, *, for_training: bool) -> "WeightSharding":
        """Return the sharding of a recipe that passed `check_config`."""
        return cls(cfg.model, fold_mapping(cfg.parallel), plan_stages(cfg), for_training and cfg.parallel.zero > 0)

    def boxes(self, rank: int) -> dict[str, Box]:
        """Return the box of each parameter and expert bias that a rank holds, by name. Empty shards have none."""
        return self._boxes_by_coordinates[self._coordinates(rank)]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter and expert bias, by name."""
        shapes = {name: weight.shape for name, weight in model_weights(self.model).items()}
        return shapes | dict.fromkeys(self.bias_names, (self._num_choices,))

    def pp_ranks_of(self, name: str) -> frozenset[int]:
        """Return the pipeline ranks that hold a parameter or expert bias."""
        block, _, rest = name.partition(".")
        first, last = self.stage_plan.embedding_ranks
        match block:
            case "layers":
                return frozenset({self._rank_of_layers[int(rest.partition(".")[0])]})
            case "embedding":
                return frozenset({first, last} if self.model.last_stage_needs_embedding else {first})
        return frozenset({last})

    @cached_property
    def bias_names(self) -> tuple[str, ...]:
        """Names of the expert biases, which are buffers that every rank of a stage has whole."""
        routed = self.model.routed
        numbers = self.model.moe_layer_numbers if routed and routed.router.expert_bias else ()
        return tuple(f"layers.{number}.ffn.router.expert_bias" for number in numbers)

    @property
    def _num_choices(self) -> int:
        """Numbers of an expert bias."""
        return self.model.routed.num_choices if self.model.routed else 0

    @cached_property
    def _rank_of_layers(self) -> dict[int, int]:
        return self.stage_plan.rank_of_layers(self.model.num_layers)

    @cached_property
    def _pp_ranks(self) -> dict[str, frozenset[int]]:
        """Pipeline ranks that hold each parameter or bias."""
        return {name: self.pp_ranks_of(name) for name in self.shapes}

    @cached_property
    def _boxes_by_coordinates(self) -> dict[tuple[int, ...], dict[str, Box]]:
        coordinates = {self._coordinates(rank) for rank in range(self.layout.world_size)}
        return {key: self._held_boxes(key) for key in sorted(coordinates)}

    def _coordinates(self, rank: int) -> tuple[int, ...]:
        """Return pp, tp, ep, etp, and the indices among the ranks that shard dense parameters and experts."""
        attention = self.layout.attention
        moe = self.layout.moe
        dense_rank = expert_rank = 0
        if self.shards_data_parallel:
            # FSDP orders its ranks by their number in the world.
            dense_rank = sorted(attention.group(rank, "dp", "cp")).index(rank)
            expert_rank = sorted(moe.group(rank, "edp")).index(rank)
        return (
            attention.coordinate(rank, "pp"),
            attention.coordinate(rank, "tp"),
            moe.coordinate(rank, "ep"),
            moe.coordinate(rank, "etp"),
            dense_rank,
            expert_rank,
        )

    def _held_boxes(self, coordinates: tuple[int, ...]) -> dict[str, Box]:
        pp_rank = coordinates[0]
        boxes = {}
        for name, weight in model_weights(self.model).items():
            if pp_rank in self._pp_ranks[name] and (box := self._shard(weight, coordinates)) is not None:
                boxes[name] = box
        whole = whole_box((self._num_choices,))
        return boxes | {name: whole for name in self.bias_names if pp_rank in self._pp_ranks[name]}

    def _shard(self, weight: ParamSpec, coordinates: tuple[int, ...]) -> Box | None:
        _, tp_rank, ep_rank, etp_rank, dense_rank, expert_rank = coordinates
        layout = self.layout
        start = [0] * len(weight.shape)
        size = list(weight.shape)
        if weight.is_expert:
            _narrow(start, size, 0, layout.ep, ep_rank)
            if weight.etp_dim is not None:
                _narrow(start, size, weight.etp_dim, layout.etp, etp_rank)
        elif (tp_dim := weight.tp_shard_dim(layout.tp)) is not None:
            _narrow(start, size, tp_dim, layout.tp, tp_rank)
        if self.shards_data_parallel:
            degree, index = (layout.edp, expert_rank) if weight.is_expert else (layout.dp * layout.cp, dense_rank)
            _narrow(start, size, expert_dp_dim(size, degree) if weight.is_expert else 0, degree, index)
        return Box(tuple(start), tuple(size)) if min(size) > 0 else None


def _narrow(start: list[int], size: list[int], dim: int, degree: int, index: int) -> None:
    """Replace a box by one of its `degree` parts along a dim, see `shard_rows`."""
    first, size[dim] = shard_rows(size[dim], degree, index)
    start[dim] += first


def held_bytes(boxes: Mapping[str, Box], itemsize: Mapping[str, int]) -> int:
    """Return the bytes of some boxes, given the bytes of an element of each tensor."""
    return sum(box.numel * itemsize[name] for name, box in boxes.items())
