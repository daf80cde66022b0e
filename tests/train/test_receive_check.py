"""Training with the symmetric-memory dispatcher over a stand-in equals the all-to-all, or stops for lack of room."""

import pytest
import torch

from moefold.comm.groups import ParallelGroups
from moefold.config.chosen import chosen
from moefold.config.groups.dispatcher import DispatcherPart
from moefold.config.schema import Config
from moefold.data.dataset import DataRequest
from moefold.errors import RunError
from moefold.parallel.expert_parallel import check_receive_loads
from moefold.parallel.parallelize import parallelize
from moefold.topology.layout import fold
from moefold.train.batch_sharding import BatchSharder
from moefold.train.rl.log_probs import LogProbCapture, label_log_probs
from moefold.train.train_step import TrainingStep
from tests.model.moe.dispatch.symm_mem_stand_in import symmetric_memory
from tests.models import config_of
from tests.slow import slow
from tests.verify.shared_ranks import run_each

STEPS = 3


def _recipe(dispatcher: str | dict[str, object], **sections: dict[str, object]) -> Config:
    parallel = {"world_size": 2, "ep": 2, "dispatcher": dispatcher}
    model = {"layers": 2, "hidden_size": 64, "ffn.moe.num_experts": 4, "ffn.moe.top_k": 2, "vocab_size": 64}
    train = {"seq_len": 16, "micro_batch_size": 2, "global_batch_size": 8, "warmup_steps": 0}
    run = {"dtype": "float64", "device": "auto"}
    return config_of(
        {"data": {"kind": "synthetic"}, "run": run, "model": model, "parallel": parallel, "train": train, **sections}
    )


def _train(cfg: Config) -> tuple[list[float], list[float], str, bool]:
    """Return losses, gradient norms and validation of some steps; the error, and whether the weights are unchanged."""
    with symmetric_memory():
        groups = ParallelGroups.create(fold(world_size=2, ep=2), torch.device("cpu"))
        training = TrainingStep(parallelize(cfg, groups), cfg)
    data = DataRequest(cfg.data, seq_len=cfg.train.seq_len, vocab_size=cfg.model.vocab_size, seed=0).open().train
    sharder = BatchSharder(data, cfg.batch_shape, groups, training.model.positions)
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        before = [parameter.detach().clone() for parameter in training.parameters.values()]
        try:
            result = training.run(sharder.batch(step - 1), step)
        except RunError as error:
            after = training.parameters.values()
            return (
                losses,
                norms,
                str(error),
                all(torch.equal(a, b.detach()) for a, b in zip(before, after, strict=True)),
            )
        losses.append(result.loss)
        norms.append(result.grad_norm)
    return [*losses, training.evaluate([sharder.batch(0)])], norms, "", True


@pytest.mark.parity
@pytest.mark.parametrize(
    "sections",
    [{"train": {"recompute": ["moe"]}}, *slow([({},), ({"moe": {"weight_in_expert": True}},)])],
)
def test_steps_equal_the_steps_of_the_all_to_all(pool, sections):
    train = {"seq_len": 16, "micro_batch_size": 2, "global_batch_size": 8, "warmup_steps": 0}
    sections = sections | {"train": train | sections.get("train", {})}
    found, expected = run_each(pool, 2, _train, *((_recipe(name, **sections),) for name in ("symm_mem", "alltoall")))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine[0] == pytest.approx(theirs[0], rel=1e-12)
        assert mine[1] == pytest.approx(theirs[1], rel=1e-10)


NO_ROOM = {"kind": "symm_mem", "receive_factor": 1.0}
SKEWED = {"moe": {"choice": {"kind": "skewed", "share": 0.9}}}


@pytest.mark.parity
def test_a_step_without_room_stops_the_run_before_the_weights_change(pool):
    cfg = _recipe(NO_ROOM, **SKEWED)
    for losses, _, error, is_unchanged in pool.run(2, _train, cfg):
        assert losses == []
        assert error.startswith("step 1 is void: rank ")
        assert "parallel.dispatcher.receive_factor=1 has room for 1 times" in error
        assert is_unchanged


def _evaluate(cfg: Config) -> list[str]:
    """Return the errors of an evaluation and of log-probabilities, which leave the model in training."""
    with symmetric_memory():
        groups = ParallelGroups.create(fold(world_size=2, ep=2), torch.device("cpu"))
        training = TrainingStep(parallelize(cfg, groups), cfg)
    model = training.model
    data = DataRequest(cfg.data, seq_len=cfg.train.seq_len, vocab_size=cfg.model.vocab_size, seed=0).open().train
    batch = BatchSharder(data, cfg.batch_shape, groups, model.positions).batch(0)
    loss = model.stages[-1].loss
    errors = []
    capture = LogProbCapture(1.0, tuple(loss.terms))
    for evaluate in (
        lambda: training.evaluate([batch]),
        lambda: label_log_probs(model, capture, batch, "the weights that sampled"),
    ):
        with pytest.raises(RunError) as caught:
            evaluate()
        errors.append(str(caught.value))
        assert model.stages[-1].training
        assert model.stages[-1].loss is loss
    return errors


@pytest.mark.parity
def test_passes_without_gradients_are_void_without_room(pool):
    for validation, log_probs in pool.run(2, _evaluate, _recipe(NO_ROOM, **SKEWED)):
        assert validation.startswith("the validation is void: rank ")
        assert log_probs.startswith("the pass for the log-probabilities of the weights that sampled is void: rank ")


def test_the_message_names_a_factor_that_suffices():
    cfg = _recipe({"kind": "symm_mem", "receive_factor": 1.5})
    part = chosen(cfg, DispatcherPart)
    check_receive_loads(torch.tensor([0.2, 1.0]), part, "step 4")
    with pytest.raises(
        RunError, match=r"step 4 is void: rank 1 was to receive 1.83 times .*receive_factor=1.9 or more"
    ):
        check_receive_loads(torch.tensor([0.2, 1.22]), part, "step 4")
