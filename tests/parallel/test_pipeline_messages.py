"""Memory of messages in real pipelines: the live messages of each slot equal the plan, whatever the batch."""

import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moefold.comm.comm_timer import CommTimer
from moefold.config.schema import Config
from moefold.cost.peak_memory import compute_rank_memory
from moefold.cost.saved_tensors import CPU_KERNELS
from moefold.parallel.memory_tracking import PIPELINE
from moefold.parallel.pipeline_schedule import PipelineMessages, PipelineSchedule
from moefold.parallel.pipeline_stage import PipelineStage
from moefold.parallel.wgrad_store import WeightGradStore
from moefold.parts.schedule import CsvSchedule
from moefold.topology.message_plan import RankPlan, forward_rows, live_messages, plan_messages
from moefold.topology.schedules import schedule_named, schedule_rows
from tests.cost.measured_memory import measure_ranks, memory_config
from tests.slow import slow
from tests.verify.shared_ranks import run_each

SHAPES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zero-bubble", 2), ("zbv", 2)]
SHAPES += [("dualpipev", 2)]
COUNTS = (8, 32, 128)
SIZE = 64


class CountedMessages(PipelineMessages):
    """Messages that know which of their storages are still referenced by anything."""

    def __init__(self) -> None:
        super().__init__(None, (SIZE,), torch.float32, torch.device("cpu"))
        self._alive: list[weakref.ref] = []

    def allocate(self) -> Tensor:
        buffer = super().allocate()
        self._watch(buffer)
        return buffer

    def put(self, message, tensor: Tensor) -> None:
        super().put(message, tensor)
        self._watch(tensor)

    def _watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        assert storage.nbytes() == 4 * SIZE
        self._alive.append(weakref.ref(storage))

    def count(self) -> int:
        """Return the number of messages that are not freed."""
        self._alive = [ref for ref in self._alive if ref() is not None]
        return len({ref().data_ptr() for ref in self._alive})


class _Pass(torch.autograd.Function):
    """x + weight, with a delayed gradient of the weight. Counts the messages in both passes."""

    @staticmethod
    def forward(ctx, x: Tensor, stage: "CountingStage") -> Tensor:
        ctx.stage = stage
        stage.observe()
        return x + stage.weight

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        stage = ctx.stage
        stage.observe()
        if stage.wgrad_store is not None:
            total = gradient.sum()[None]
            stage.wgrad_store.put((stage.weight,), lambda: (total,))
        return gradient * 1.0, None


class CountingStage(nn.Module):
    """Stage without saved activations."""

    def __init__(self, messages: CountedMessages, observed: list[int], *, is_last: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.wgrad_store: WeightGradStore | None = None
        self._messages = messages
        self._observed = observed
        self._is_last = is_last

    def observe(self) -> None:
        self._observed.append(self._messages.count())

    def forward(self, x: Tensor) -> Tensor:
        y = _Pass.apply(x if x.requires_grad else x.clone().requires_grad_(torch.is_grad_enabled()), self)
        return y.sum()[None] if self._is_last else y


def run_counted(rows, stage_ranks: tuple[int, ...], count: int, splits: bool) -> tuple[list[int], list[int], float]:
    """Run a step on this rank and return the counts of messages alive in each pass, the plan's counts, and the loss."""
    rank = dist.get_rank()
    observed: list[int] = []
    messages = CountedMessages()
    stages = []
    num_stages = len(stage_ranks)
    for number, owner in enumerate(stage_ranks):
        if owner == rank:
            module = CountingStage(messages, observed, is_last=number == num_stages - 1)
            module.wgrad_store = WeightGradStore(module, reduces_each_micro_batch=False) if splits else None
            stages.append(PipelineStage(module, number, num_stages, wgrad_store=module.wgrad_store))
    plan = plan_messages(rows, stage_ranks)[rank]
    schedule = PipelineSchedule(stages, num_stages, plan, messages, comm_timer=CommTimer())
    micro_batches = [(torch.full((SIZE,), float(i)), {}) for i in range(count)]
    schedule.run(micro_batches)
    expected = expected_counts(plan, num_stages)
    assert messages.count() == 0
    losses = stages[-1].loss_terms
    evaluation = plan_messages(forward_rows(rows), stage_ranks)[rank]
    observed_training = list(observed)
    with torch.no_grad():
        PipelineSchedule(stages, num_stages, evaluation, messages, comm_timer=CommTimer()).run(micro_batches)
    evaluated = observed[len(observed_training) :]
    assert max(evaluated) <= max(live_messages(evaluation, num_stages, overlaps=False)) + 1
    assert messages.count() == 0
    return observed_training, expected, float(sum(losses, torch.zeros(1)))


def expected_counts(plan: RankPlan, num_stages: int) -> list[int]:
    """Messages of the plan in each forward and backward pass, with the inputs that wait for their backward pass.

    A forward pass has its own input, a backward pass that and the gradient of its output.
    """
    counts = []
    inputs = 0
    actions = [action for operation in plan if isinstance(operation, tuple) for action in operation]
    for action, live in zip(actions, live_messages(plan, num_stages, overlaps=False), strict=True):
        has_input = action.stage > 0
        if action.kind == "F":
            inputs += has_input
            counts.append(live + inputs)
        elif action.kind != "W":
            counts.append(live + inputs + (action.stage < num_stages - 1))
            inputs -= has_input
    return counts


@pytest.mark.parity
@pytest.mark.parametrize("counts", [COUNTS[:2], *slow([(COUNTS,)])])
@pytest.mark.parametrize(("schedule", "chunks"), SHAPES)
def test_live_messages_equal_the_plan(pool, schedule, chunks, counts):
    spec = schedule_named(schedule)
    ranks = spec.stage_ranks(2, chunks)
    asked = [(schedule_rows(schedule, 2, chunks, count), ranks, count, spec.splits_backward) for count in counts]
    most = []
    for count, found in zip(counts, run_each(pool, 2, run_counted, *asked), strict=True):
        for observed, expected, _ in found:
            assert observed == expected, count
        loss = sum(SIZE * (i + len(ranks)) for i in range(count))
        assert sum(total for *_, total in found) == loss
        most.append([max(observed) for observed, *_ in found])
    # The counts include the inputs in flight; only under gpipe the inputs of all micro-batches are in flight.
    assert all(each == most[0] for each in most) == (schedule != "gpipe")


@pytest.mark.parity
def test_a_file_frees_its_messages(pool, tmp_path):
    path = tmp_path / "order.csv"
    path.write_text("0F0,0F1,0I0,0I1,0W0,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n")
    schedule = CsvSchedule(path=str(path))
    rows, ranks = schedule.rows(2, 1, 2), schedule.stage_ranks(2, 1)
    for observed, expected, _ in pool.run(2, run_counted, rows, ranks, 2, True):
        assert observed == expected


MEASURING_S = 900
"""Time of one measured step of four ranks: half a minute at 128 micro-batches, and minutes where other jobs run."""
PAIRED = [("1f1b", 1), ("interleaved", 2), ("dualpipev", 2)]


def _recipe(schedule: str, chunks: int, count: int, *, overlap: bool = False) -> Config:
    train = {"global_batch_size": 2 * count * (2 if overlap else 1)}
    parallel = {"world_size": 4, "ep": 2} if overlap else {"world_size": 2}
    model = {"layers": 4}
    return memory_config(
        model=model, train=train, pp=2, schedule=schedule, virtual_stages=chunks, overlap_experts=overlap, **parallel
    )


@pytest.mark.parametrize(
    ("schedule", "chunks", "overlap"),
    [*((*shape, False) for shape in SHAPES[1:]), *((*shape, True) for shape in PAIRED)],
)
def test_the_peak_by_formula_does_not_depend_on_the_micro_batches(schedule, chunks, overlap):
    peaks = []
    for count in COUNTS:
        ranks = compute_rank_memory(_recipe(schedule, chunks, count, overlap=overlap), kernels=CPU_KERNELS)
        peaks.append([(rank.total, rank.activations.by_part[PIPELINE]) for rank in ranks])
    assert peaks[0] == peaks[1] == peaks[2]


def test_gpipe_saves_the_activations_of_all_micro_batches_and_no_more_messages():
    ranks = [compute_rank_memory(_recipe("gpipe", 1, count), kernels=CPU_KERNELS)[0] for count in COUNTS]
    assert ranks[0].activations.by_part[PIPELINE] == ranks[1].activations.by_part[PIPELINE]
    assert ranks[1].activations.total > 3 * ranks[0].activations.total


@pytest.mark.parity
@pytest.mark.slow
@pytest.mark.timeout(len(COUNTS) * MEASURING_S)
@pytest.mark.parametrize(
    ("schedule", "chunks", "overlap"),
    [*((*shape, False) for shape in SHAPES[1:]), *((*shape, True) for shape in PAIRED)],
)
def test_the_measured_peak_does_not_depend_on_the_micro_batches(pool, schedule, chunks, overlap):
    """Of a further micro-batch, its tokens stay, and on the rank of the last stage its loss, one float32."""
    last = schedule_named(schedule).stage_ranks(2, chunks)[-1]
    peaks = []
    for count in COUNTS:
        ranks = measure_ranks(pool, _recipe(schedule, chunks, count, overlap=overlap), timeout_s=MEASURING_S)
        losses = [count * torch.float32.itemsize if rank.pp_rank == last else 0 for rank in ranks]
        peaks.append([rank.total - rank.peak["batch"] - loss for rank, loss in zip(ranks, losses, strict=True)])
    assert peaks[0] == peaks[1] == peaks[2]
