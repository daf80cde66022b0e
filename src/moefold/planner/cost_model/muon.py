"""Cost model of Muon: redistribution of matrices to their owners, and Newton-Schulz. Torch-free.

It models `optim/muon.py` and `optim/matrix_redistribute.py`: each matrix is gathered on one rank of its pipeline stage,
the work is balanced over the ranks, and a rank that holds the full matrix is its owner.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from moefold.cost.hardware import Device
from moefold.cost.param_shapes import WeightShape, layer_weights, mtp_layer_weights
from moefold.planner.cost_model.collective import RankGroup, all_to_all_s
from moefold.planner.cost_model.gemm import GemmCost
from moefold.planner.cost_model.workload import TrainingWorkload
from moefold.planner.mapping import ParallelMapping
from moefold.planner.memory.states import layer_letter
from moefold.planner.model_spec import ModelSpec

MASTER_DTYPES = {"bfloat16": "float32", "float32": "float32", "float64": "float64"}
"""Dtype of weights, gradients and Newton-Schulz GEMMs, by the compute type."""

NEWTON_SCHULZ_GEMMS = 3
"""GEMMs of one Newton-Schulz step."""
EXTRA_KERNELS_PER_MATRIX = 8
"""Other kernel launches for a matrix: copies, norm, scaling."""


@dataclass(frozen=True, slots=True)
class MuonRankCost:
    """Cost of one rank in one update."""

    num_local: float = 0.0
    """Elements of Muon's matrices in the rank's shards."""
    num_owned: float = 0.0
    """Elements of the matrices that the rank owns."""
    seconds: float = 0.0
    """Seconds of the GEMMs and the all-to-alls."""


@dataclass(frozen=True, slots=True)
class _ShardedMatrix:
    """Sharding of a matrix over the ranks of its stage, in elements."""

    num_local: float
    """Elements on each rank."""
    num_total: float
    """Elements of the full matrix."""
    num_sent: float
    """Elements sent to the owners, from all ranks."""
    num_returned: float
    """Elements sent back."""


class MuonCost:
    """Cost model of Muon's update of one model.

    Args:
        model_spec: a model that the runtime supports.
        device: a device with a known rate for GEMMs in the dtype of the master weights.
        workload: a workload with Muon as its optimizer.

    Raises:
        ConfigError: the rate of these GEMMs is unknown.
    """

    def __init__(self, model_spec: ModelSpec, device: Device, workload: TrainingWorkload) -> None:
        assert model_spec.config is not None
        self._model_spec = model_spec
        self._model_config = model_spec.config
        self._device = device
        self._update = workload.update
        master = replace(workload, precision="bf16", dtype=MASTER_DTYPES[workload.dtype])
        self._gemm = GemmCost(device, master)
        self._value_bytes = master.value_bytes
        self._newton_schulz_cache: dict[tuple[int, int], float] = {}

    def rank_cost(self, mapping: ParallelMapping, counts: tuple[int, ...], has_loss: bool) -> MuonRankCost:
        """Return the cost of a rank whose stages have `counts` layers of each kind."""
        ranks = mapping.world_size // mapping.pp
        weights = [
            (count, weight)
            for kind, count in enumerate(counts)
            for weight in self._weights(layer_letter(self._model_spec, kind), mapping.tp)
        ]
        if has_loss:
            weights += [(self._model_config.mtp_layers, weight) for weight in self._mtp_projections]
        num_local = num_total = sent = returned = seconds = longest = 0.0
        for count, weight in weights:
            if not count:
                continue
            sharded = _shard_matrix(weight, mapping, ranks)
            matrix_s = self._newton_schulz_s(weight.shape[-2], weight.shape[-1])
            num_local = num_local + count * sharded.num_local
            num_total = num_total + count * sharded.num_total
            sent = sent + count * sharded.num_sent
            returned = returned + count * sharded.num_returned
            seconds += count * matrix_s * (weight.shape[0] if weight.is_expert else 1)
            longest = max(longest, matrix_s)
        # A matrix has a single owner, so the longest matrix is a lower bound.
        seconds = max(seconds / ranks, longest)
        for moved in (sent, returned):
            seconds += (
                all_to_all_s(self._device, RankGroup(ranks, 1), moved * self._value_bytes / ranks) if moved else 0.0
            )
        return MuonRankCost(num_local, num_total / ranks, seconds)

    def _newton_schulz_s(self, rows: int, columns: int) -> float:
        """Return the seconds of Newton-Schulz: X X^T, its square, and their sum times X."""
        small = min(rows, columns)
        large = max(rows, columns)
        if (small, large) not in self._newton_schulz_cache:
            product = self._gemm.matmul_s
            step = product(small, small, large) + product(small, small, small) + product(small, large, small)
            kernels = NEWTON_SCHULZ_GEMMS * self._update.ns_steps + EXTRA_KERNELS_PER_MATRIX
            self._newton_schulz_cache[small, large] = self._update.ns_steps * step + kernels * self._device.kernel_gap_s
        return self._newton_schulz_cache[small, large]

    def _weights(self, letter: str, tp: int) -> list[WeightShape]:
        return [
            w
            for w in layer_weights(self._model_config, letter, tp)
            if w.uses_muon and w.part in self._update.muon_groups
        ]

    @cached_property
    def _mtp_projections(self) -> list[WeightShape]:
        """The projection of an MTP layer, which other layers do not have."""
        mtp_weights = mtp_layer_weights(self._model_config, 1)
        return [w for w in mtp_weights if w.uses_muon and w.part == "mtp" and "mtp" in self._update.muon_groups]


def build_muon_cost(model_spec: ModelSpec, device: Device, workload: TrainingWorkload) -> MuonCost | None:
    """Return the cost model of Muon; None if the optimizer is another one."""
    return MuonCost(model_spec, device, workload) if workload.update.muon_groups else None


def _shard_matrix(weight: WeightShape, mapping: ParallelMapping, num_ranks: int) -> _ShardedMatrix:
    local = weight.shard(mapping.tp, mapping.ep, mapping.etp)
    degree = (
        1
        if mapping.zero == 0 or mapping.world_size == 1
        else (mapping.edp if weight.is_expert else mapping.dp * mapping.cp)
    )
    is_whole = local.shape[-2:] == weight.shape[-2:] and (
        degree == 1 or (weight.is_expert and local.dp_shards(degree).total_rows == local.shape[0])
    )
    num_local = local.numel / degree
    replicas = num_ranks * num_local / weight.numel
    # A rank that holds the full matrix is its owner: nothing is sent, and the other replicas receive the update.
    sent, returned = (0.0, replicas - 1) if is_whole else (1.0, replicas)
    return _ShardedMatrix(num_local, weight.numel, sent * weight.numel, returned * weight.numel)
