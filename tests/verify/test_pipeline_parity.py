"""Every pipeline schedule and layout equals the one-process float64 oracle: losses, norm, gradients, weights."""

from pathlib import Path

import pytest

from moefold.config.schema import Config
from moefold.verify.compare import NamedError, compare_records, run_oracle
from moefold.verify.distributed_run import DistributedRecord, run_distributed
from tests.verify.recipes import tiny, without_mapping
from tests.verify.test_parity import TOLERANCE, assert_equals_oracle

SPLIT_SCHEDULES = {"zero-bubble": 1, "zbv": 2, "dualpipev": 2}
"""Virtual stages of each schedule that splits the backward pass."""
TIED = {"tie_embeddings": True}
FURTHER = {"mtp_layers": 1, "layer_pattern": "DM"}
BIASED = {"moe_bias": True, "qkv_bias": True, "shared_expert_ffn_hidden_size": 16, "shared_expert_gate": True}
LATENT = {"attention": "mla", "kv_lora_rank": 6, "q_lora_rank": 5, "v_head_dim": 6} | {
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "mtp_layers": 2,
    "tie_embeddings": True,
}


def _recipe(schedule: str, model: dict[str, object] | None = None, batch: int = 8, **parallel: object) -> Config:
    chunks = {"virtual_stages": SPLIT_SCHEDULES.get(schedule, 1)}
    return tiny(model=model, train={"global_batch_size": batch}, schedule=schedule, **chunks | parallel)


def write_split_rows(path: Path, ranks: tuple[int, ...], num_micro_batches: int) -> str:
    """All forward passes, then all gradients of inputs, then all of weights, last stage first."""
    rows: list[list[str]] = [[] for _ in range(max(ranks) + 1)]
    stages = list(enumerate(ranks))
    for kind, order in (("F", stages), ("I", stages[::-1]), ("W", stages[::-1])):
        for stage, rank in order:
            rows[rank] += [f"{stage}{kind}{i}" for i in range(num_micro_batches)]
    path.write_text("".join(",".join(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parity
@pytest.mark.parametrize(
    ("schedule", "model", "parallel"),
    [
        ("zero-bubble", BIASED, {"world_size": 2}),
        ("zero-bubble", TIED, {"world_size": 4, "ep": 2, "virtual_stages": 2, "zero": 3}),
        ("zbv", FURTHER, {"world_size": 2, "pipeline_layout": "E|tt||tmL"}),
        ("dualpipev", TIED, {"world_size": 4, "tp": 2, "etp": 2}),
    ],
)
def test_split_backward(pool, schedule, model, parallel):
    layers = {"num_layers": 3} if "pipeline_layout" in parallel else {}
    assert_equals_oracle(pool, _recipe(schedule, model | layers, pp=2, **parallel))


@pytest.mark.parity
def test_a_schedule_from_a_file(pool, tmp_path):
    path = write_split_rows(tmp_path / "rows.csv", (1, 0, 1, 0), 4)
    cfg = _recipe("csv", TIED, batch=4, world_size=2, pp=2, virtual_stages=2, schedule_csv=path)
    assert_equals_oracle(pool, cfg)


@pytest.mark.parity
@pytest.mark.parametrize(
    ("layout", "parallel"),
    [
        ("E|tttL", {"schedule": "gpipe"}),
        ("Et||tt|L", {"schedule": "interleaved", "virtual_stages": 2, "zero": 2}),
        ("auto", {"schedule": "1f1b", "zero": 3}),
    ],
)
def test_layouts(pool, layout, parallel):
    model = TIED | {"num_layers": 3, "layer_pattern": "DMM"}
    assert_equals_oracle(pool, _recipe(world_size=2, pp=2, model=model, pipeline_layout=layout, **parallel))


def _run_without_postponed_gradients(cfg: Config) -> DistributedRecord:
    """As if the last of the gradients that a backward pass postponed were forgotten."""
    from moefold.parallel.wgrad_store import WeightGradStore

    whole = WeightGradStore.__call__

    def broken(self: WeightGradStore):
        self._pending = self._pending[:-1]
        return whole(self)

    WeightGradStore.__call__ = broken
    return run_distributed(cfg, 1)


def _run_with_stale_copy(cfg: Config) -> DistributedRecord:
    """As if the embedding of the last stage stayed what it was at the start."""
    from moefold.parallel import pipeline

    pipeline.sync_tied_embedding = lambda stages: None
    return run_distributed(cfg, 2)


def _wrong(pool, broken, cfg: Config, steps: int) -> list[NamedError]:
    ranks = pool.run(cfg.parallel.world_size, broken, cfg)
    return [d for d in compare_records(run_oracle(without_mapping(cfg), steps), ranks) if d.error > TOLERANCE]


@pytest.mark.parity
def test_a_forgotten_weight_gradient_is_noticed(pool):
    cfg = _recipe("zero-bubble", world_size=2, pp=2)
    with pytest.raises(RuntimeError, match="has no gradient"):
        _wrong(pool, _run_without_postponed_gradients, cfg, 1)


@pytest.mark.parity
def test_a_stale_copy_of_the_embedding_is_noticed(pool):
    cfg = _recipe("zbv", TIED, world_size=2, pp=2)
    names = [d.name for d in _wrong(pool, _run_with_stale_copy, cfg, 2)]
    assert any(name.startswith("step 2 loss") for name in names)
    assert not any(name.startswith(("step 1", "gradients")) for name in names)


AXES = ({"tp": 2}, {"cp": 2}, {"ep": 2}, {"tp": 2, "etp": 2}, {"cp": 2, "ep": 2})
CHUNKS = (("zero-bubble", 1), ("zero-bubble", 2), ("zero-bubble", 3), ("zbv", 2), ("dualpipev", 2))
MODELS = ({}, TIED, FURTHER, BIASED, LATENT)


def _mixed() -> list[tuple[str, dict[str, object], dict[str, object]]]:
    """Each schedule with each axis on four ranks, then longer pipelines; kinds of models and zero levels rotate."""
    cases = []
    for i, (schedule, chunks) in enumerate(CHUNKS):
        for j, axes in enumerate(AXES):
            parallel = {"world_size": 4, "pp": 2, "virtual_stages": chunks, "zero": (i + j) % 4, **axes}
            cases.append((schedule, MODELS[(i + 2 * j) % 5], parallel))
        long = {"world_size": 4, "pp": 4, "virtual_stages": chunks, "zero": i % 4}
        cases.append((schedule, MODELS[i], long))
        cases.append((schedule, MODELS[i - 1], long | {"world_size": 8, **AXES[i]}))
    return cases


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "model", "parallel"), _mixed())
def test_split_backward_mixed(pool, schedule, model, parallel):
    assert_equals_oracle(pool, _recipe(schedule, model, 16, **parallel))


@pytest.mark.slow
@pytest.mark.parametrize("axes", AXES)
def test_a_schedule_from_a_file_mixed(pool, tmp_path, axes):
    cfg = _recipe("csv", LATENT, world_size=4, pp=2, virtual_stages=3, schedule_csv=str(tmp_path / "rows.csv"), **axes)
    write_split_rows(tmp_path / "rows.csv", (0, 1, 1, 0, 0, 1), cfg.num_micro_batches)
    assert_equals_oracle(pool, cfg)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "layout", "parallel"),
    [
        ("gpipe", "E|ttt|tt|mL", {"world_size": 4, "pp": 4}),
        ("1f1b", "E|ttt|tt|mL", {"world_size": 8, "pp": 4, "tp": 2, "ep": 2}),
        ("1f1b", "auto", {"world_size": 4, "pp": 4, "zero": 2}),
        ("interleaved", "E|t|t|t||tt||mL", {"world_size": 4, "pp": 4, "virtual_stages": 2}),
        ("interleaved", "Et|tt|||tt|mL", {"world_size": 4, "pp": 2, "virtual_stages": 3, "cp": 2}),
        ("zero-bubble", "E||ttt||tt|mL", {"world_size": 4, "pp": 2, "virtual_stages": 3, "ep": 2, "zero": 3}),
        ("zbv", "E|t|t|t|t||t|mL", {"world_size": 4, "pp": 4}),
        ("dualpipev", "E|ttt|tt|mL", {"world_size": 4, "pp": 2, "etp": 2, "zero": 2}),
    ],
)
def test_layouts_mixed(pool, schedule, layout, parallel):
    model = TIED | {"num_layers": 5, "layer_pattern": "DM", "mtp_layers": 1}
    assert_equals_oracle(pool, _recipe(schedule, model, 16, pipeline_layout=layout, **parallel))
