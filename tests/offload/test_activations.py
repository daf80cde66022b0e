"""Tensors that leave memory, once; that come back in time and unchanged; that stay for lack of time or room."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from benchmarks.saved_memory import measure_saved_bytes
from moefold.comm.resumable import ResumableTask, run_to_end
from moefold.config.schema import Config
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.model.local_param import local_param
from moefold.model.transformer import build_model
from moefold.offload.activations import ActivationOffload
from moefold.offload.backend import CopyEngine, HostMemory
from moefold.offload.ssd import SsdFile
from moefold.parallel.offload import apply_offload, open_offload
from tests.moved_clock import MovedClock
from tests.parallel.counted_models import FE, FS, GQA, LATENT, A, D, F, G, H, K, T

CPU = torch.device("cpu")
SIZE = 1024
WORD = 8
BLOCK = SIZE * WORD
STORE_S = 0.05


class NotingLink(CopyEngine):
    """Counts the tensors that are asked back."""

    num_asked = 0

    def allocate_device(self, num_bytes):
        self.num_asked += 1
        return super().allocate_device(num_bytes)


class SlowMemory(HostMemory):
    """Slow memory that notes its requests. A store takes `STORE_S` by its clock, and waits until it may begin."""

    def __init__(self) -> None:
        super().__init__(NotingLink(CPU))
        self.clock = MovedClock()
        self.loaded: list[float] = []
        self.may_store = threading.Event()
        self.may_store.set()

    def store(self, data, ready):
        self.may_store.wait(30)
        self.clock.move(STORE_S)
        return super().store(data, ready)

    def load(self, stored, out, ready):
        self.loaded.append(float(stored.host.view(torch.float64)[0]))
        return super().load(stored, out, ready)


def _offload(tier=None, *, waits: bool = True, min_bytes: int = 0) -> ActivationOffload:
    return ActivationOffload(tier or HostMemory(CopyEngine(CPU)), min_bytes=min_bytes, is_synchronous=waits)


def _slow_offload(tier: SlowMemory) -> tuple[ActivationOffload, Callable[[], int]]:
    """Return an offload with one storing thread, by the clock of its memory, and a wait for all submitted stores."""
    offload = ActivationOffload(tier, min_bytes=0, is_synchronous=False, clock=tier.clock)
    offload.store_threads = ThreadPoolExecutor(1)
    return offload, lambda: offload.store_threads.submit(int).result()


def _stage(offload: ActivationOffload, forward, lasting=tuple):
    """A stage that never pauses."""

    def steps(*args):
        yield from ()
        return forward(*args)

    around = offload.wrap_stage(steps, lasting)
    return lambda *args: run_to_end(around(*args))


def _vector(value: float = 1.0) -> Tensor:
    return torch.full((SIZE,), value, dtype=torch.float64)


def _passes(offload: ActivationOffload, forward, *args: Tensor):
    offload.begin_step()
    y = _stage(offload, forward)(*args)
    y.sum().backward()
    return offload.end_step()


def test_a_storage_saved_several_times_is_stored_once():
    offload, weight = _offload(), torch.rand(32, 32, dtype=torch.float64, requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        @offload.wrap
        def part(z: Tensor) -> Tensor:
            # A square, its transpose, a slice, a column, every other row, and one row read many times.
            views = z.t(), z[3:20], z[:, 5], z[::2], z[7].expand(32, 32), z.view(2, 16, 32)[1]
            y = (z * z).sum() + (z @ weight).sum()
            return y + sum((view * view).sum() * i for i, view in enumerate(views))

        return part(x.exp().view(32, 32))

    found = []
    for stage in (forward, _stage(offload, forward)):
        x = torch.linspace(-1, 1, 32 * 32, dtype=torch.float64, requires_grad=True)
        weight.grad = None
        stage(x).backward()
        found.append((x.grad, weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    # exp saves its result too, outside of the part: the same storage. The weight is a plain tensor here.
    assert offload.end_step().stored_bytes == 2 * 32 * 32 * WORD


def test_memory_is_free_while_it_is_away_and_nothing_is_left_behind():
    offload = _offload()
    stage = _stage(offload, offload.wrap(lambda x: ((x * 2).exp().sin() * x).sum()))
    x = _vector().requires_grad_()
    y, kept = measure_saved_bytes(lambda: stage(x))
    assert kept < BLOCK
    # The results of exp and of sin; x is of whoever called.
    assert offload.end_step().stored_bytes == 2 * BLOCK
    y.backward()
    assert len(offload._storages) == 0


def test_weights_small_tensors_and_lasting_tensors_stay():
    offload = _offload(min_bytes=BLOCK)
    weight = nn.Parameter(_vector(3.0).float())
    lasting, short = _vector(5.0), torch.ones(SIZE - 1, dtype=torch.float64, requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        y = (x * local_param(weight, torch.float64)).exp() * lasting
        return y.sum() + (short * 2).exp().sum()

    x = _vector().requires_grad_()
    stage = _stage(offload, offload.wrap(forward), lambda: (lasting,))
    stage(x).backward()
    # Only the result of exp; x itself belongs to whoever called.
    assert offload.end_step().stored_bytes == BLOCK


def test_work_at_the_pauses_of_a_pass_is_not_part_of_it():
    """Two micro-batches, one after the other: each gives away its own tensors, and shared tensors stay."""
    offload = _offload()

    def part(x: Tensor):
        x = (x * 1).exp()
        yield
        return x.exp()

    stage = offload.wrap_stage(offload.wrap(part), tuple)
    first, second, third = (_vector(value / 10).requires_grad_() for value in (1, 2, 3))
    offload.begin_step()
    a = ResumableTask(stage(first))
    a.resume()
    kept = third.sin().exp()
    b = ResumableTask(stage(second))
    b.resume()
    y, kept = a.run_to_end(), kept.exp()
    z = b.run_to_end()
    for result in (y, kept, z):
        result.sum().backward()
    # Both results of exp in each pass.
    assert offload.end_step().stored_bytes == 4 * BLOCK
    for x in (first, second):
        with torch.no_grad():
            expected = x.exp() * x.exp().exp()
        torch.testing.assert_close(x.grad, expected, rtol=1e-12, atol=0)


def test_a_later_part_takes_the_room_of_tensors_kept_before_it():
    offload = _offload()
    part = offload.wrap(lambda x: x.square())

    def forward(x: Tensor) -> Tensor:
        z = x.exp()
        return part(z).sum()

    x = _vector().requires_grad_()
    y, kept = measure_saved_bytes(lambda: _stage(offload, forward)(x))
    assert kept < BLOCK
    y.backward()


def test_a_tensor_on_its_way_out_is_taken_from_memory():
    tier = SlowMemory()
    tier.may_store.clear()
    offload = _offload(tier, waits=False)
    x = _vector(2.0).requires_grad_()
    totals = _passes(offload, lambda x: offload.wrap(lambda z: (z * 1).exp())(x).sum(), x)
    tier.may_store.set()
    assert torch.equal(x.grad, x.detach().exp())
    assert (totals.stored_bytes, totals.resident_bytes) == (0, BLOCK)
    assert tier.loaded == []


def test_parts_come_back_last_first_and_one_ahead_of_their_use():
    tier = SlowMemory()
    offload = _offload(tier)
    # One thread brings them in the order of the requests; two would race.
    offload.load_threads = ThreadPoolExecutor(1)
    part = offload.wrap(lambda x: x.square())
    asked = []

    def forward(x: Tensor) -> Tensor:
        for i in range(4):
            x = x * 1
            x.register_hook(lambda grad, i=i: asked.append((i, tier.copy_engine.num_asked)))
            x = part(x)
        return x.sum()

    _passes(offload, forward, _vector(2.0).requires_grad_())
    # Each entry was made when the gradient of a part had passed: by then the values of the part before were asked for.
    assert asked == [(3, 2), (2, 3), (1, 4), (0, 4)]
    assert tier.loaded == [2.0**8, 2.0**4, 2.0**2, 2.0]


def test_a_tensor_that_came_back_late_is_not_sent_again():
    tier = SlowMemory()
    offload, wait_for_stores = _slow_offload(tier)
    part = offload.wrap(lambda x: x.square())

    def forward(x: Tensor) -> Tensor:
        for i in range(3):
            x = part(x * 1)
            if i == 0:
                # Only the first has the time.
                wait_for_stores()
                tier.clock.move(8 * STORE_S)
                tier.may_store.clear()
        return x.sum()

    for _ in range(2):
        tier.may_store.set()
        totals = _passes(offload, forward, _vector().requires_grad_())
        assert (totals.stored_bytes, totals.resident_bytes) == (BLOCK, 2 * BLOCK)
    # The second pass asked for one copy only, and got it.
    assert offload.store_threads._work_queue.empty()


def test_a_slow_place_is_told_once(caplog):
    tier = SlowMemory()
    offload, wait_for_stores = _slow_offload(tier)
    forward = offload.wrap(lambda x: (x * 1).exp().sin().sum())
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            tier.may_store.clear()
            _passes(offload, forward, _vector().requires_grad_())
            tier.may_store.set()
            wait_for_stores()
    assert [record.message.partition(":")[0] for record in caplog.records] == ["rank 0"]
    assert "host memory is too slow" in caplog.text


def test_a_full_place_is_told_once_and_the_rest_stays(caplog):
    offload = _offload(HostMemory(CopyEngine(CPU), 1.5 * BLOCK))
    forward = offload.wrap(lambda x: x.exp().exp().sum())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            x = _vector().requires_grad_()
            totals = _passes(offload, forward, x)
            assert (totals.stored_bytes, totals.resident_bytes) == (BLOCK, BLOCK)
            assert torch.equal(x.grad, x.detach().exp().exp() * x.detach().exp())
    (record,) = caplog.records
    assert "host memory has no more space (train.offload_limit_gib): some activations stay in memory" in record.message


@pytest.mark.parametrize("waits", [True, False])
def test_a_change_in_place_is_noticed(waits):
    """Autograd does not look at tensors that hooks take."""
    tier = SlowMemory()
    offload = _offload(tier, waits=waits)
    tier.may_store.clear()

    def forward(x: Tensor) -> Tensor:
        z = x * 1
        y = offload.wrap(torch.square)(z)
        z.detach().add_(1)
        tier.may_store.set()
        return y.sum()

    with pytest.raises(RuntimeError, match="was modified in place after it was saved"):
        _passes(offload, forward, _vector().requires_grad_())


def test_a_failure_that_nobody_expected_is_not_lost():
    class Broken(HostMemory):
        def store(self, data, ready):
            raise ZeroDivisionError

    offload = _offload(Broken(CopyEngine(CPU)))
    with pytest.raises(ZeroDivisionError):
        _passes(offload, offload.wrap(lambda x: x.exp().sum()), _vector().requires_grad_())


def test_without_gradients_nothing_leaves():
    offload = _offload()
    with torch.no_grad():
        _stage(offload, offload.wrap(torch.exp))(_vector())
    assert offload.end_step().stored_bytes == 0


def test_a_freed_and_refilled_weight_is_still_not_offloaded():
    """As long as its memory lives, whichever tensor asks: FSDP frees and refills it between the passes."""
    weight = nn.Parameter(torch.ones(4, 4))
    copy = local_param(weight, torch.float64)
    del weight
    offload = _offload()
    seen = []

    def look() -> Tensor:
        seen.append([offload.should_offload(x) for x in (copy, copy.t()[1:], copy.data)])
        return copy.detach()

    _stage(offload, look)()
    assert seen == [[False] * 3]


# Written numbers of each part for a token, in float64, over the layers D and M.
HEADS = (2 * A + 2 * G) * D + A
PARTS = [
    # Two norms in each of two layers: input, result, and the root mean square; the first input is the embedding.
    ("norms", 2 * 2 * (2 * H + 1)),
    ("core_attention", 2 * HEADS),
    ("dense_mlp", H + 4 * F),
    ("expert_activation", K * (H + 2 * FE)),
    ("shared_experts", H + 4 * FS),
    ("moe", 2 * H + K * (2 * H + 2 * FE) + 4 * FS),
]


def _model(model, parts: tuple[str, ...], **train: object):
    train = {"seq_len": T // 2, "micro_batch_size": 2, "offload": parts, "offload_min_kib": 0} | train
    cfg = Config(run=RunConfig(dtype="float64"), model=model, train=TrainConfig(offload_waits=True, **train))
    module = build_model(cfg).double()
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    module.set_positions(torch.arange(T // 2))
    offload = open_offload(cfg.train, CPU, 0)
    if offload is not None:
        apply_offload(module, parts, offload)
    tokens = torch.randint(8, (2, T // 2), generator=torch.Generator().manual_seed(1))
    columns = {"labels": tokens, "weights": torch.ones(tokens.shape)}
    if model.mtp_layers:
        columns["mtp_labels"] = tokens[:, None].expand(-1, model.mtp_layers, -1)
    return module, offload, lambda: module(tokens, **columns).sum()


@pytest.mark.parametrize(("part", "formula"), PARTS)
def test_each_part_gives_away_the_bytes_of_its_formula(part, formula):
    _, offload, loss = _model(GQA, (part,))
    loss().backward()
    assert offload.end_step().stored_bytes / WORD / T == pytest.approx(formula, rel=0.1)


@pytest.mark.parametrize("model", [GQA, LATENT, replace(GQA, mtp_layers=2)])
def test_all_but_the_ends_of_the_model_is_away(model, tmp_path):
    plain, _, loss = _model(model, ())
    (expected, everything) = measure_saved_bytes(loss)
    expected.backward()
    module, offload, loss = _model(model, ("layer",), offload_to="ssd", offload_dir=str(tmp_path))
    for _ in range(2):
        module.zero_grad()
        (found, kept) = measure_saved_bytes(loss)
        away = offload.end_step().stored_bytes
        assert isinstance(offload.backend, SsdFile)
        # Only counts are left of the layers; the tensors of embedding, head and losses are the same.
        assert kept < everything - 0.98 * away
        assert kept < everything * (0.35 if model.mtp_layers else 0.15)
        found.backward()
        assert torch.equal(found, expected)
        for (name, mine), theirs in zip(module.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad), name
    assert offload.backend._allocator.end == 0
