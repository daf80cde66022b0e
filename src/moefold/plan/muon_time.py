"""What Muon takes beside AdamW: whole matrices on their way to one rank and back, and the products there. Torch-free.

The twin of `train/muon.py` and `parallel/matrix_exchange.py`: each matrix comes together on one rank of its pipeline
stage, the ranks have about the same to do, and what a rank holds whole stays there.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from moefold.metrics.weight_shapes import WeightShape, further_layer_weights, layer_weights
from moefold.plan.collective import Group, exchange_s
from moefold.plan.device import Device
from moefold.plan.gemm import Products
from moefold.plan.held_states import letter_of
from moefold.plan.mapping import Mapping
from moefold.plan.shape import ModelShape
from moefold.plan.workload import Workload

MASTER_TYPES = {"bfloat16": "float32", "float32": "float32", "float64": "float64"}
"""Of weights, gradients and the products of Muon, by the compute type."""

STEP_KERNELS = 3
"""Products of one Newton-Schulz step."""
MATRIX_KERNELS = 8
"""Launches of a matrix beside them: copies, norm, scaling."""


@dataclass(frozen=True, slots=True)
class MuonShare:
    """Of one rank in one update."""

    held: float = 0.0
    """Numbers of Muon's matrices that it holds."""
    worked: float = 0.0
    """Numbers of those that it works on."""
    seconds: float = 0.0
    """Of the products and the exchanges."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a parameter lies on the ranks of its stage."""

    held: float
    """Numbers of it on each rank."""
    numbers: float
    """All of them."""
    sent: float
    """Numbers that go to the ranks that work on them, from all ranks."""
    returned: float
    """Numbers that come back."""


class MuonTime:
    """Prices Muon's update of one model.

    Args:
        shape: a model that the runtime knows.
        device: of whose products in the type of the master weights the rate is known.
        workload: whose update is Muon's.

    Raises:
        ConfigError: nobody has said how fast these products are.
    """

    def __init__(self, shape: ModelShape, device: Device, workload: Workload) -> None:
        assert shape.config is not None
        self._shape, self._model, self._device, self._update = shape, shape.config, device, workload.update
        master = replace(workload, precision="bf16", dtype=MASTER_TYPES[workload.dtype])
        self._products, self._value_bytes = Products(device, master), master.value_bytes
        self._matrix_s: dict[tuple[int, int], float] = {}

    def share(self, m: Mapping, counts: tuple[int, ...], has_loss: bool) -> MuonShare:
        """The share of a rank of a stage with so many layers of each kind."""
        ranks = m.world_size // m.pp
        weights = [
            (count, weight)
            for kind, count in enumerate(counts)
            for weight in self._weights(letter_of(self._shape, kind), m.tp)
        ]
        if has_loss:
            weights += [(self._model.mtp_layers, weight) for weight in self._projections]
        held = numbers = sent = returned = seconds = longest = 0.0
        for count, weight in weights:
            if not count:
                continue
            cut, matrix_s = _cut(weight, m, ranks), self._orthogonal_s(weight.shape[-2], weight.shape[-1])
            held, numbers = held + count * cut.held, numbers + count * cut.numbers
            sent, returned = sent + count * cut.sent, returned + count * cut.returned
            seconds += count * matrix_s * (weight.shape[0] if weight.is_expert else 1)
            longest = max(longest, matrix_s)
        # A matrix is worked on by one rank, so that a rank has one at least where there are any.
        seconds = max(seconds / ranks, longest)
        for moved in (sent, returned):
            seconds += exchange_s(self._device, Group(ranks, 1), moved * self._value_bytes / ranks) if moved else 0.0
        return MuonShare(held, numbers / ranks, seconds)

    def _orthogonal_s(self, rows: int, columns: int) -> float:
        """Newton-Schulz: X X^T, its square, and their sum times X."""
        small, large = min(rows, columns), max(rows, columns)
        if (small, large) not in self._matrix_s:
            product = self._products.product_s
            step = product(small, small, large) + product(small, small, small) + product(small, large, small)
            kernels = STEP_KERNELS * self._update.ns_steps + MATRIX_KERNELS
            self._matrix_s[small, large] = self._update.ns_steps * step + kernels * self._device.kernel_gap_s
        return self._matrix_s[small, large]

    def _weights(self, letter: str, tp: int) -> list[WeightShape]:
        return [w for w in layer_weights(self._model, letter, tp) if w.is_muons and w.part in self._update.muon_groups]

    @cached_property
    def _projections(self) -> list[WeightShape]:
        """The one matrix of a layer of multi-token prediction that other layers have not."""
        further = further_layer_weights(self._model, 1)
        return [w for w in further if w.is_muons and w.part == "mtp" and "mtp" in self._update.muon_groups]


def muon_time(shape: ModelShape, device: Device, workload: Workload) -> MuonTime | None:
    """What prices Muon, if it is the optimizer."""
    return MuonTime(shape, device, workload) if workload.update.muon_groups else None


def _cut(weight: WeightShape, m: Mapping, ranks: int) -> _Cut:
    local = weight.cut(m.tp, m.ep, m.etp)
    degree = 1 if m.zero == 0 or m.world_size == 1 else (m.edp if weight.is_expert else m.dp * m.cp)
    is_whole = local.shape[-2:] == weight.shape[-2:] and (
        degree == 1 or (weight.is_expert and local.shards(degree).total_rows == local.shape[0])
    )
    held = local.numel / degree
    copies = ranks * held / weight.numel
    # What a rank has whole it works on; its copies come from there, as those of others do.
    sent, returned = (0.0, copies - 1) if is_whole else (1.0, copies)
    return _Cut(held, weight.numel, sent * weight.numel, returned * weight.numel)
