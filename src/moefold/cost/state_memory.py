"""Bytes of weights, gradients and optimizer state that each rank holds, to the byte. Torch-free.

What counts is what the runtime allocates: FSDP's padding of uneven shards, the copy of the weights in the compute type
that it gathers, and its sums of gradients before they are reduced. Code and buffers of the libraries do not count, nor
does what an allocator rounds up.

What `train.offload_optimizer` takes out of a rank's memory, and what an update brings back. Torch-free.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property

from moefold.config.schema import Config
from moefold.cost.optimizers import OptimizerSpec, optimizer_of
from moefold.cost.param_shapes import WeightShape, embedding_weight, head_weights, layer_weights, mtp_layer_weights
from moefold.cost.stages import plan_stages
from moefold.topology.stages import Stage

ITEM_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True)
class StateBytes:
    """What a rank holds between and during steps beside activations, in bytes."""

    weights: int = 0
    """Master weights: this rank's shards with their padding."""
    gathered: int = 0
    """The weights in the compute type as the maths reads them, as much as is there at once."""
    gradients: int = 0
    """Reduced gradients, sharded as the master weights are, in their type."""
    gradient_sums: int = 0
    """Gradients of this rank alone, not sharded, which are summed over micro-batches before they are reduced."""
    optimizer: int = 0
    """Moments, and a count of steps for each parameter of AdamW."""
    buffers: int = 0
    """Expert bias and counts, cosines and sines of the rotation."""

    def __add__(self, other: "StateBytes") -> "StateBytes":
        return StateBytes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(StateBytes)))

    @property
    def persistent(self) -> int:
        """Between two steps."""
        return self.weights + self.optimizer + self.buffers


def master_dtype_bytes(cfg: Config) -> int:
    """Bytes of a master weight, of its gradient and of a float32 moment."""
    return 8 if cfg.run.dtype == "float64" else 4


def compute_dtype_bytes(cfg: Config) -> int:
    """Bytes of a number of the compute type."""
    return ITEM_BYTES[cfg.run.dtype]


def rank_state_bytes(cfg: Config, pp_rank: int, dense_dp_rank: int = 0, expert_dp_rank: int = 0) -> StateBytes:
    """What one rank holds.

    Members 0 of data parallelism, such as the first rank of each stage, hold the most: those behind them get what is
    left of the rows.

    Args:
        cfg: a recipe that `check_config` passed.
        pp_rank: pipeline rank.
        dense_dp_rank: place among the dp x cp ranks over which dense weights are cut.
        expert_dp_rank: place among the edp ranks over which experts are cut.
    """
    return StateMemory(cfg).rank_bytes(pp_rank, dense_dp_rank, expert_dp_rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSpec:
    """How a rank holds weights: over how many ranks data parallelism cuts them, and in which types."""

    degrees: tuple[int, int]
    """Ranks over which dense weights are cut, and experts; 1 and 1 with zero=0."""
    accumulates_gradients: bool
    """Whether gradients are summed over micro-batches before they are reduced."""
    master_bytes: int
    """Bytes of a master weight; 0 where the weights in the compute type are the only ones."""
    compute_bytes: int
    """Bytes of a number of the compute type."""
    moment_bytes: int
    """Bytes of one moment of the optimizer."""
    gradient_bytes: int
    """Bytes of a gradient."""
    optimizer: OptimizerSpec
    """Number of moments, and of bytes of a count of steps."""
    matrix_groups: tuple[str, ...] = ()
    """Parts whose matrices the optimizer gathers, and which have other moments."""

    def state_bytes(self, weights: Iterable[WeightShape], dp_ranks: tuple[int, int] = (0, 0)) -> StateBytes:
        """What some weights of one rank take, which tensor and expert parallelism have cut already."""
        kept = gradients = sums = moments = 0
        for weight in weights:
            shards = weight.dp_shards(self.degrees[weight.is_expert])
            kept += shards.padded_numel * self.master_bytes
            gradients += shards.padded_numel * self.gradient_bytes
            sums += shards.padded_numel * shards.degree * self.gradient_bytes if self.accumulates_gradients else 0
            moments += shards.numel(dp_ranks[weight.is_expert]) * self.moment_bytes * self.num_moments(weight)
            moments += 0 if self._is_gathered(weight) else self.optimizer.step_bytes
        return StateBytes(weights=kept, gradients=gradients, gradient_sums=sums, optimizer=moments)

    def num_moments(self, weight: WeightShape) -> int:
        """Return the number of moments of a weight."""
        return self.optimizer.num_matrix_moments if self._is_gathered(weight) else self.optimizer.num_moments

    def _is_gathered(self, weight: WeightShape) -> bool:
        return weight.uses_muon and weight.part in self.matrix_groups

    def gathered_bytes(self, weights: Iterable[WeightShape]) -> int:
        """Their copies that the maths reads."""
        total = 0
        for weight in weights:
            shards = weight.dp_shards(self.degrees[weight.is_expert])
            item = max(self.master_bytes, self.compute_bytes) if weight.part == "router" else self.compute_bytes
            total += shards.padded_numel * shards.degree * item
        return total


def make_shard_spec(cfg: Config, degrees: tuple[int, int], *, accumulates_gradients: bool) -> ShardSpec:
    """How the ranks of a recipe hold weights that are cut over so many ranks."""
    train, master = cfg.train, master_dtype_bytes(cfg)
    return ShardSpec(
        degrees=degrees,
        accumulates_gradients=accumulates_gradients,
        master_bytes=master,
        compute_bytes=compute_dtype_bytes(cfg),
        moment_bytes=2 if train.moment_dtype == "bfloat16" else master,
        gradient_bytes=master,
        optimizer=optimizer_of(cfg),
        matrix_groups=optimizer_of(cfg).matrix_groups(train),
    )


def expert_buffer_bytes(cfg: Config) -> int:
    """Buffers of a layer with experts: the bias that balances them, and their counts."""
    counts = 8 * (cfg.moe.aux_coefficient > 0 and cfg.moe.aux_kind == "last_global_batch")
    return cfg.model.num_experts * (4 * cfg.model.expert_bias + counts)


def rope_buffer_bytes(cfg: Config) -> int:
    """Cosines and sines of the rotation, which every stage has."""
    return 2 * (cfg.train.seq_len // cfg.parallel.cp) * cfg.model.rotary_dim * compute_dtype_bytes(cfg)


class StateMemory:
    """The states of the ranks of one config; the work grows with the stages, not with the tensors."""

    def __init__(self, cfg: Config) -> None:
        p = cfg.parallel
        self._cfg = cfg
        self._stage_plan = plan_stages(cfg)
        self._is_fsdp = p.world_size > 1
        self._is_sharded = self._is_fsdp and p.zero > 0
        degrees = (p.dp * p.cp if self._is_sharded else 1, p.edp if self._is_sharded else 1)
        self._shard_spec = make_shard_spec(
            cfg, degrees, accumulates_gradients=self._is_fsdp and p.zero < 2 and cfg.num_micro_batches > 1
        )
        self._unit_cache: dict[tuple[str, int, int], StateBytes] = {}

    def rank_bytes(self, pp_rank: int, dense_dp_rank: int = 0, expert_dp_rank: int = 0) -> StateBytes:
        """See `rank_state_bytes`."""
        members = (dense_dp_rank, expert_dp_rank) if self._is_sharded else (0, 0)
        stages = self._stage_plan.of_rank(pp_rank)
        total = sum(
            (self._unit_states(name, *members) for stage in stages for name in unit_names(self._cfg, stage)),
            ZERO_STATES,
        )
        if self._cfg.model.last_stage_needs_embedding and len(stages) > 1 and stages[0].is_first and stages[-1].is_last:
            # The second copy follows the first: no moments, and no gradient of its own once both are added up.
            total += replace(ZERO_STATES, optimizer=-self._unit_states("embedding", *members).optimizer)
        gathered = sum(self._gathered_bytes(stage) for stage in stages)
        return replace(total, gathered=gathered, buffers=total.buffers + len(stages) * rope_buffer_bytes(self._cfg))

    @cached_property
    def max_by_pp_rank(self) -> tuple[StateBytes, ...]:
        """The first rank of every pipeline stage, which holds as much as any of its stage."""
        return tuple(self.rank_bytes(pp_rank) for pp_rank in range(self._cfg.parallel.pp))

    def unit_bytes(self, name: str, *, with_optimizer: bool) -> int:
        """What the first rank of a stage holds in a step of one of `unit_names`."""
        states, weights = self._unit_states(name, 0, 0), self._sharded_weights(name)
        gathered = self._shard_spec.gathered_bytes(weights) if self._is_fsdp else cast_copy_bytes(self._cfg, [name])
        gathered = 0 if self._cfg.parallel.zero == 3 else gathered
        resting = states.weights + states.buffers + gathered + (states.optimizer if with_optimizer else 0)
        return resting + max(states.gradients, states.gradient_sums)

    def _unit_states(self, name: str, dense_dp_rank: int, expert_dp_rank: int) -> StateBytes:
        """A layer, the embedding or the head."""
        key = (name, dense_dp_rank, expert_dp_rank)
        if key not in self._unit_cache:
            states = self._shard_spec.state_bytes(self._sharded_weights(name), (dense_dp_rank, expert_dp_rank))
            has_experts = name == "M" or (name == "further" and self._cfg.model.layer_kinds[-1] == "M")
            self._unit_cache[key] = replace(states, buffers=expert_buffer_bytes(self._cfg) if has_experts else 0)
        return self._unit_cache[key]

    def _sharded_weights(self, name: str) -> list[WeightShape]:
        p = self._cfg.parallel
        return [weight.shard(p.tp, p.ep, p.etp) for weight in unit_weights(self._cfg, name)]

    def _gathered_bytes(self, stage: Stage) -> int:
        """The weights that the maths of a stage reads, which are copies of the master weights."""
        names = unit_names(self._cfg, stage)
        if not self._is_fsdp:
            return cast_copy_bytes(self._cfg, names)
        sizes = [self._shard_spec.gathered_bytes(self._sharded_weights(name)) for name in names]
        if self._cfg.parallel.zero < 3:
            return sum(sizes)
        layers = [size for name, size in zip(names, sizes, strict=True) if name not in ("embedding", "head")]
        # The root's own weights stay while any of its layers runs; of the layers, one.
        return sum(sizes) - sum(layers) + max(layers, default=0)


def cast_copy_bytes(cfg: Config, names: Iterable[str]) -> int:
    """The copies of a rank by itself: it reads its master weights, in a narrower type if there is one."""
    if compute_dtype_bytes(cfg) == master_dtype_bytes(cfg):
        return 0
    read = [name for name in names if name != "embedding" or cfg.model.tie_embeddings]
    weights = [weight for name in read for weight in unit_weights(cfg, name) if weight.part != "router"]
    return sum(weight.numel for weight in weights) * compute_dtype_bytes(cfg)


def unit_names(cfg: Config, stage: Stage) -> list[str]:
    """What stands on a stage: "embedding", layers as "D" and "M", "head" and layers of prediction as "further"."""
    model, parts = cfg.model, stage.parts
    names = ["embedding"] if stage.is_first or (stage.is_last and model.last_stage_needs_embedding) else []
    names += [model.layer_kinds[i] for i in parts.layers]
    return names + ["head"] + ["further"] * parts.num_mtp_layers if stage.is_last else names


def unit_weights(cfg: Config, name: str) -> tuple[WeightShape, ...]:
    """The whole weights of one of `unit_names`."""
    match name:
        case "embedding":
            return (embedding_weight(cfg.model),)
        case "head":
            return head_weights(cfg.model)
        case "further":
            return mtp_layer_weights(cfg.model, cfg.parallel.tp)
    return layer_weights(cfg.model, name, cfg.parallel.tp)


ZERO_STATES = StateBytes()


PARAMS_IN_TRANSIT = 3
"""Parameters whose moments an update has in memory: of one they come, of one they are used, of one they go."""


@dataclass(frozen=True, slots=True)
class OptimizerOffloadMemory:
    """Bytes of the moments of the first rank of a pipeline stage."""

    offloaded: int = 0
    """Outside of memory between two updates."""
    in_transit: int = 0
    """Most that an update has in memory of them: those of `PARAMS_IN_TRANSIT` parameters."""


def optimizer_offload_memory(cfg: Config, pp_rank: int) -> OptimizerOffloadMemory:
    """Count the moments that are large enough to leave, as `optim/state_offload.py` sends them away.

    Args:
        cfg: a recipe that `check_config` passed.
        pp_rank: pipeline rank.
    """
    p, train = cfg.parallel, cfg.train
    if train.offload_optimizer == "none":
        return OptimizerOffloadMemory()
    names = [name for stage in plan_stages(cfg).of_rank(pp_rank) for name in unit_names(cfg, stage)]
    if names.count("embedding") > 1:
        # The second copy follows the first and has no moments.
        names.remove("embedding")
    degrees = (p.dp * p.cp, p.edp) if p.world_size > 1 and p.zero > 0 else (1, 1)
    weights = (weight.shard(p.tp, p.ep, p.etp) for name in names for weight in unit_weights(cfg, name))
    sizes = list(
        offloaded_moment_sizes(
            make_shard_spec(cfg, degrees, accumulates_gradients=False), weights, train.offload_min_kib
        )
    )
    return OptimizerOffloadMemory(sum(sizes), sum(sorted(sizes)[-PARAMS_IN_TRANSIT:]))


def offloaded_moment_sizes(shard_spec: ShardSpec, weights: Iterable[WeightShape], min_kib: int) -> Iterator[int]:
    """Bytes of the moments of each weight that leave memory.

    Args:
        shard_spec: of the rank.
        weights: what tensor and expert parallelism have left of them.
        min_kib: KiB of one moment that is worth moving.
    """
    for weight in weights:
        one = weight.dp_shards(shard_spec.degrees[weight.is_expert]).numel(0) * shard_spec.moment_bytes
        if one >= max(min_kib * 2**10, 1):
            yield one * shard_spec.num_moments(weight)
