"""A trace does not know the mapping, and any mapping replays it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moefold.comm.collectives import gather_to_first
from moefold.config.schema import Config
from moefold.config.sections.moe import TRACE_FOLDER
from moefold.data.dataset import DataRequest
from moefold.data.routing_trace import RoutingTrace, RoutingTraceWriter, trace_shape
from moefold.errors import ConfigError
from moefold.parallel.parallelize import parallelize
from moefold.train.batch_sharding import BatchSharder
from moefold.train.train_step import TrainingStep
from moefold.verify.compare import OracleRecord, compare_records, run_oracle
from moefold.verify.distributed_run import create_groups, run_distributed
from tests.slow import slow
from tests.verify.covering import few_else_slow
from tests.verify.recipes import tiny, without_mapping

STEPS = 2
MAPPINGS = [
    {"world_size": 2, "ep": 2},
    {"world_size": 2, "pp": 2},
    {"world_size": 4, "tp": 2, "cp": 2, "ep": 4},
    {"world_size": 2, "cp": 2, "ep": 2},
    {"world_size": 4, "cp": 2, "pp": 2, "ep": 2, "context": "allgather"},
    {"world_size": 4, "tp": 2, "order": "pp-tp-cp-dp", "etp": 2},
    {"world_size": 4, "pp": 2, "schedule": "interleaved", "virtual_stages": 2, "ep": 2},
    {"world_size": 2, "pp": 2, "schedule": "zbv", "virtual_stages": 2},
    {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4},
    {"world_size": 8, "cp": 2, "tp": 2, "context": "ulysses", "order": "cp-dp-pp-tp", "ep": 8},
]
MODELS = {
    "plain": {"layers": 4},
    "further tokens": {"layers": 3, "mtp_layers": 2},
    "dense-and-moe": {"layers": 4, "layers.ffn": "dense, moe"},
    "many experts": {"layers": 2, "mtp_layers": 1, "ffn.moe.num_experts": 264, "ffn.moe.intermediate_size": 8},
    "documents": {"vocab_size": 8},
}


def _recipe(run_dir: Path, model: str = "plain", replay: str = "", **mapping: object) -> Config:
    cfg = tiny(
        model=MODELS[model],
        moe={"trace_every": 1, "replay": replay},
        train={"micro_batch_size": 1, "global_batch_size": 4},
        data={"document_end": 2} if model == "documents" else {},
        **mapping,
    )
    return replace(cfg, run=replace(cfg.run, dir=str(run_dir)))


def _train(cfg: Config, num_steps: int) -> list[float]:
    """Train and trace some steps under a mapping; returns the gradient norms."""
    groups = create_groups(cfg)
    training = TrainingStep(parallelize(cfg, groups), cfg)
    data = DataRequest.of(cfg).open()
    loader = BatchSharder(data.train, cfg.batch_shape, groups, training.model.positions)
    writer = RoutingTraceWriter(Path(cfg.run.dir), trace_shape(cfg.model, cfg.train)) if groups.rank == 0 else None
    assert training.router_replay is not None
    norms = []
    for step in range(1, num_steps + 1):
        norms.append(training.run(loader.batch((step - 1) * cfg.train.global_batch_size), step).grad_norm)
        # An evaluation in between leaves no trace.
        training.evaluate([loader.batch(0)])
        if training.router_replay.is_due(step):
            training.router_replay.save(step, writer)
    return norms


def _files(run_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run_dir / TRACE_FOLDER).iterdir()}


@pytest.fixture(scope="module")
def single(pool, tmp_path_factory):
    """The trace of one process, for each kind of model."""
    made: dict[str, Path] = {}

    def trace(model: str) -> Path:
        if model not in made:
            made[model] = tmp_path_factory.mktemp("single")
            pool.run(1, _train, _recipe(made[model], model), STEPS)
        return made[model]

    return trace


@pytest.mark.parity
@pytest.mark.slow
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_every_mapping_writes_the_same_bytes(pool, single, tmp_path, mapping):
    pool.run(mapping["world_size"], _train, _recipe(tmp_path, **mapping), STEPS)
    assert sorted(_files(tmp_path)) == ["step-000001.npy", "step-000002.npy", "trace.json"]
    assert _files(tmp_path) == _files(single("plain"))


@pytest.mark.parity
@pytest.mark.parametrize("model", ["many experts", *slow([("further tokens",), ("dense-and-moe",)])])
def test_every_model_writes_the_same_bytes(pool, single, tmp_path, model):
    pool.run(2, _train, _recipe(tmp_path, model, world_size=2, tp=2, ep=2), STEPS)
    assert _files(tmp_path) == _files(single(model))
    assert next(iter(RoutingTrace(tmp_path, "").step(1))).dtype == (np.int16 if model == "many experts" else np.uint8)


@pytest.mark.parity
def test_the_trace_holds_two_experts_of_each_token(single):
    choices = np.stack([*RoutingTrace(single("plain"), "").step(1)])
    assert choices.shape == (4, 4, 16, 2)
    assert choices.dtype == np.uint8
    assert len({tuple(step) for step in choices.reshape(-1, 2).tolist()}) > 20
    assert (choices[..., 0] != choices[..., 1]).all()
    assert not np.array_equal(choices, [*RoutingTrace(single("plain"), "").step(2)])


def _scrambled(source: Path, target: Path) -> Path:
    """A trace that no router would write: each expert's number shifted by a number that depends on the token."""
    trace = RoutingTrace(source, "")
    writer = RoutingTraceWriter(target, trace.shape)
    for step in trace.steps:
        whole = np.stack([*trace.step(step)]).astype(np.int64)
        shift = np.arange(whole[..., 0].size).reshape(whole.shape[:3])[..., None]
        writer.write(step, iter(((whole + 3 * shift + step) % trace.shape.num_experts).astype(trace.shape.dtype)))
    return target


@pytest.fixture(scope="module")
def scrambled(single, tmp_path_factory) -> Path:
    return _scrambled(single("plain"), tmp_path_factory.mktemp("scrambled"))


@pytest.fixture(scope="module")
def oracles(scrambled) -> tuple[OracleRecord, OracleRecord]:
    """Return the results of the scrambled trace, and the routers' own choices."""
    cfg = without_mapping(_recipe(Path("unused"), replay=str(scrambled)))
    return run_oracle(cfg, STEPS), run_oracle(replace(cfg, moe=replace(cfg.moe, replay="")), STEPS)


@pytest.mark.parity
@pytest.mark.parametrize("mapping", few_else_slow([{"world_size": 1}, *MAPPINGS], [MAPPINGS[2]]))
def test_replay_under_every_mapping_equals_the_oracle(pool, scrambled, oracles, tmp_path, mapping):
    cfg = _recipe(tmp_path, replay=str(scrambled), **mapping)
    ranks = pool.run(cfg.parallel.world_size, run_distributed, cfg, STEPS)
    replayed, chosen = (compare_records(oracle, ranks)[0] for oracle in oracles)
    assert replayed.error <= 1e-9, replayed
    assert chosen.error > 1e-3, "the scrambled trace changes nothing"


PLACED = {"context": "planned", "placement": "balanced"}


@pytest.mark.parity
@pytest.mark.parametrize(
    "mapping",
    [
        PLACED | {"world_size": 2, "ep": 2},
        *slow((PLACED | {"world_size": 4, **axes},) for axes in ({"tp": 2, "ep": 2}, {"cp": 2, "ep": 4}, {"pp": 2})),
    ],
)
def test_placed_tokens_are_traced_and_replayed_by_sample_and_position(pool, single, tmp_path, mapping):
    pool.run(mapping["world_size"], _train, _recipe(tmp_path / "traced", "documents", **mapping), STEPS)
    assert _files(tmp_path / "traced") == _files(single("documents"))
    scrambled = _scrambled(single("documents"), tmp_path / "scrambled")
    cfg = _recipe(tmp_path / "replayed", "documents", replay=str(scrambled), **mapping)
    pool.run(mapping["world_size"], _train, cfg, STEPS)
    assert _files(tmp_path / "replayed") == _files(scrambled)


@pytest.mark.parity
def test_replayed_choices_equal_the_trace(pool, scrambled, tmp_path):
    cfg = _recipe(tmp_path, replay=str(scrambled / TRACE_FOLDER), world_size=2, pp=2)
    pool.run(2, _train, replace(cfg, run=replace(cfg.run, seed=77)), STEPS)
    assert _files(tmp_path) == _files(scrambled)


@pytest.mark.parity
def test_replaying_a_run_by_itself_changes_nothing(pool, single, tmp_path):
    plain = pool.run(1, _train, _recipe(tmp_path / "a"), STEPS)
    again = pool.run(2, _train, _recipe(tmp_path / "b", replay=str(single("plain")), world_size=2, ep=2), STEPS)
    assert again[0] == pytest.approx(plain[0], rel=1e-12)


@pytest.mark.parity
def test_a_trace_that_ends_early_is_refused_by_its_step(pool, single, tmp_path):
    cfg = _recipe(tmp_path, replay=str(single("plain")))
    groups_error = pool.run(1, _error_of_training, cfg, STEPS + 1)
    assert groups_error == [f"moe.replay={str(single('plain'))!r} has no step 3; it holds 2 steps, 1 to 2"]


def _error_of_training(cfg: Config, num_steps: int) -> str:
    try:
        _train(cfg, num_steps)
    except ConfigError as error:
        return str(error)
    return ""


def _gathered(sizes: dict[str, int]) -> list[float] | None:
    groups = create_groups(tiny(**sizes))
    whole = gather_to_first(torch.tensor([[groups.rank * 1000.0]]), groups.world)
    return None if whole is None else whole.flatten().tolist()


@pytest.mark.parity
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gathering_to_the_first_member(pool, world_size):
    found = pool.run(world_size, _gathered, {"world_size": world_size})
    assert found == [[rank * 1000.0 for rank in range(world_size)], *[None] * (world_size - 1)]
