"""Bytes that a site sends in a round: formats of the codes, and the vectors of its ranks by fragment.

Rank r of a site sends its shards of a fragment to rank r of each other site. A coded parameter takes whole blocks of
the code. So the bytes of a site depend on its mapping only by the padding, and by the weights that tensor-parallel
ranks replicate. `comm/wire_codes.py` and `optim/outer.py` send these bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moefold.config.base.param_spec import DataParallelShards, ParamSpec
from moefold.config.chosen import chosen_in
from moefold.config.groups.optimizer import OptimizerPart
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.lora import LoraConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.sites import SitesConfig
from moefold.config.sections.train import TrainConfig
from moefold.cost.adapter_spec import training_weights
from moefold.cost.shard_boxes import WeightSharding
from moefold.cost.state_bytes import master_dtype_bytes, trained_names
from moefold.topology.fragments import fragment_of, recipe_fragments

BLOCK = 256
"""Elements with a common scale."""
SCALE_BYTES = 4
PART_ELEMENTS = 2**22
"""Elements that are exchanged at a time. A round holds the vector, and this part of each member's vector."""


@dataclass(frozen=True, slots=True)
class CodedSize:
    """Sizes of a code: bits of an element, and bytes for each block."""

    bits: int
    block: int = 1
    """Elements that are coded together. A parameter takes whole blocks."""
    scale_bytes: int = 0
    """Bytes that are sent for each block besides the elements."""

    def num_bytes(self, numel: int) -> int:
        """Return the bytes of a coded vector."""
        return -(-numel * self.bits // 8) + self.scale_bytes * -(-numel // self.block)

    def padded(self, numel: int) -> int:
        """Return the elements that a parameter takes in a coded vector."""
        return -(-numel // self.block) * self.block


PLAIN = CodedSize(32)
"""Format without blocks."""


def wire_format(precision: str, itemsize: int) -> CodedSize:
    """Return the format of a `sites.precision` for a vector of elements of `itemsize` bytes."""
    bits = {"bfloat16": 16, "int8": 8, "fp4": 4}.get(precision, 8 * itemsize)
    return CodedSize(bits, BLOCK, SCALE_BYTES) if precision in ("int8", "fp4") else CodedSize(bits)


def recipe_format(run: RunConfig, sites: SitesConfig, precision: str | None = None) -> CodedSize:
    """Return the format of the differences of a recipe, or, given `precision`, of another `sites.precision` for all."""
    itemsize = master_dtype_bytes(run)
    if precision is not None:
        return wire_format(precision, itemsize)
    of_method: CodedSize | None = sites.part.wire_format(itemsize)
    return of_method or wire_format(sites.precision, itemsize)


@dataclass(frozen=True, slots=True)
class FragmentTraffic:
    """Content of a round of one fragment: the elements and bytes that all ranks of a site send to one other site."""

    num_coded: int
    """Elements that are sent as a code, whole blocks of each parameter on each rank."""
    plain_bytes: int
    """Bytes that are sent uncoded: buffers, averaged moments, and, if sites meet in pairs, the outer weights."""
    rank_coded: int
    """Elements that the rank with the most elements sends as a code."""
    rank_owned: int
    """Coded elements of that rank in experts that sites own, which are separate messages."""
    rank_plain: int
    """Elements that this rank sends uncoded."""

    @property
    def messages(self) -> int:
        """Messages of the rank with the most elements, one after the other."""
        numels = (self.rank_coded - self.rank_owned, self.rank_owned, self.rank_plain)
        return sum(-(-numel // PART_ELEMENTS) for numel in numels)

    def num_bytes(self, code: CodedSize) -> int:
        """Return the bytes in a format. It must have the blocks of the counted format."""
        return code.num_bytes(self.num_coded) + self.plain_bytes


def site_traffic(cfg: Config, precision: str | None = None) -> tuple[FragmentTraffic, ...]:
    """Return the content that a site sends to one other site, by fragment.

    Args:
        cfg: a recipe with sites under a mapping that `check_config` passed.
        precision: another `sites.precision`, in which all differences are sent. None: the recipe's settings.
    """
    code = recipe_format(cfg.run, cfg.sites, precision)
    count = recipe_fragments(cfg.model, cfg.sites)
    coded = [0] * count
    plain = [0] * count
    # Coded, owned and plain elements by fragment, of the first rank of each pipeline rank, which has the most.
    of_rank = np.zeros((count, cfg.parallel.pp, 3), np.int64)
    item = master_dtype_bytes(cfg.run)
    optimizer = chosen_in(cfg.train, OptimizerPart)
    sharding = WeightSharding.from_config(cfg, for_training=True)
    stage_ranks = cfg.parallel.world_size // cfg.parallel.pp
    for weight in _trained_weights(cfg.model, cfg.train, cfg.lora):
        fragment = fragment_of(weight.name, count)
        shards = _shards(cfg.parallel, weight)
        holders = list(sharding.pp_ranks_of(weight.name))
        copies = len(holders) * stage_ranks // shards.degree
        # A site sends only its own experts, if sites own them.
        owners = cfg.sites.num_expert_owners if weight.is_expert else 1
        averages = cfg.sites.moments == "average"
        num_moments = sum(not state.is_count for state in optimizer.states(weight)) if averages else 0
        coded[fragment] += copies * _padded_numel(shards, code, owners)
        plain[fragment] += copies * num_moments * _padded_numel(shards, PLAIN) * item
        numel = code.padded(shards.numel(0) // owners)
        of_rank[fragment, holders] += (numel, numel if owners > 1 else 0, num_moments * shards.numel(0))
    for name in sharding.bias_names:
        fragment = fragment_of(name, count)
        holders = list(sharding.pp_ranks_of(name))
        plain[fragment] += len(holders) * stage_ranks * cfg.model.experts.num_choices * item
        of_rank[fragment, holders, 2] += cfg.model.experts.num_choices
    if cfg.sites.part.in_pairs:
        plain = [num_bytes + item * numel for num_bytes, numel in zip(plain, coded, strict=True)]
        of_rank[..., 2] += of_rank[..., 0]
    most = [max(ranks, key=lambda numels: numels[0] + numels[2]) for ranks in of_rank.tolist()]
    return tuple(FragmentTraffic(coded[p], plain[p], *most[p]) for p in range(count))


def num_trained(model: ModelConfig, train: TrainConfig, lora: LoraConfig) -> int:
    """Return the number of trained parameters of a recipe's model."""
    return sum(weight.numel for weight in _trained_weights(model, train, lora))


def _trained_weights(model: ModelConfig, train: TrainConfig, lora: LoraConfig) -> Iterator[ParamSpec]:
    part = trained_names(model, train, lora)
    return (weight for name, weight in training_weights(model, lora).items() if part in name)


def _shards(parallel: ParallelConfig, weight: ParamSpec) -> DataParallelShards:
    degree = 1
    if parallel.zero:
        degree = parallel.edp if weight.is_expert else parallel.dp * parallel.cp
    return weight.shard(parallel.tp, parallel.ep, parallel.etp).dp_shards(degree)


def _padded_numel(shards: DataParallelShards, code: CodedSize, owners: int = 1) -> int:
    """Return the elements of all shards of a parameter, or of one owner's part of it, each padded to whole blocks."""
    num_full, rest = divmod(shards.total_rows, shards.rows)
    full = code.padded(shards.rows * shards.row_numel // owners)
    return num_full * full + code.padded(rest * shards.row_numel // owners)
