"""Test that every case equals the one-process float64 oracle: loss terms, norm, every gradient, weights."""

import math
from dataclasses import replace

import pytest
import torch

from moefold.config.base.small_sizes import SmallSizes
from moefold.config.schema import Config
from moefold.data.dataset import DataRequest
from moefold.parallel.parallelize import parallelize
from moefold.train.batch_sharding import BatchSharder
from moefold.verify.compare import compare_records, run_oracle
from moefold.verify.distributed_run import create_groups, run_distributed
from moefold.verify.shrink import shrink
from tests.models import config_of
from tests.slow import slow
from tests.verify.cases import Case
from tests.verify.covering import few_else_slow
from tests.verify.mapping_cases import DISPATCHERS, DROPPING, FEW_DROPPING
from tests.verify.oracle import STEPS, TOLERANCE, assert_equals_oracle, oracle_of
from tests.verify.oracle_cases import ORACLE_CASES
from tests.verify.recipes import tiny, without_mapping
from tests.verify.shared_ranks import Call, SharedRanks, run_each, selected_cases


@pytest.fixture(scope="module")
def ranks_of_cases(request, pool, tmp_path_factory) -> SharedRanks:
    """The ranks of the selected cases."""

    def call(case: Case) -> Call:
        cfg = case.config(tmp_path_factory.mktemp("case"))
        return Call(cfg.parallel.world_size, run_distributed, (cfg, case.steps))

    selected = selected_cases(request, "test_equals_the_oracle")
    return SharedRanks(pool, {name: call(case) for name, case in selected.items()})


@pytest.mark.parity
@pytest.mark.parametrize("case", [case.param() for case in ORACLE_CASES])
def test_equals_the_oracle(request, ranks_of_cases, case: Case):
    call = ranks_of_cases.calls[request.node.name]
    worst = compare_records(oracle_of(*call.args), ranks_of_cases.results(request.node.name))[0]
    assert worst.error <= TOLERANCE, worst


@pytest.mark.parametrize("settings", few_else_slow(DROPPING, FEW_DROPPING))
def test_the_cases_of_dropping_drop(settings):
    assert oracle_of(tiny(**settings)).steps[0].dropped > 0


def _rows_per_expert(cfg: Config) -> set[int]:
    """Return the numbers of rows that the experts of this rank received in one step."""
    seen: set[int] = set()
    model = parallelize(cfg, create_groups(cfg))
    for layer in model.moe_layers().values():
        layer.experts.register_forward_pre_hook(lambda _, args: seen.update(args[0].tokens_per_expert))
    data = DataRequest.of(cfg).open()
    model.forward_backward(BatchSharder(data.train, cfg.batch_shape, model.groups, model.positions).batch(0))
    return seen


@pytest.mark.parity
@pytest.mark.parametrize(
    ("scope", "mapping", "dispatcher"),
    [
        ("sub_sequence", {"cp": 2, "tp": 2, "ep": 4}, "alltoall"),
        *slow(
            [
                ("full_sequence", {"ep": 4}, "allgather"),
                ("sub_sequence", {"cp": 2, "tp": 2, "ep": 4}, "allgather"),
                ("full_sequence", {"ep": 4}, "alltoall"),
                *(("full_sequence", {"etp": 4}, dispatcher) for dispatcher in DISPATCHERS),
            ]
        ),
    ],
)
def test_a_padded_expert_gets_its_capacity_from_each_rank_and_no_more(pool, dispatcher, scope, mapping):
    moe = {"capacity_factor": 0.75, "drop_scope": scope, "pad_to_capacity": True}
    cfg = tiny(moe=moe, train={"micro_batch_size": 2, "global_batch_size": 8}, world_size=4, **mapping)
    cfg = replace(cfg, parallel=replace(cfg.parallel, dispatcher=dispatcher))
    tokens = 2 * 16 // (cfg.parallel.cp * cfg.parallel.tp)
    # Two of eight experts for each token; four ranks send to every expert.
    assert pool.run(4, _rows_per_expert, cfg) == [{4 * math.ceil(tokens * 2 / 8 * 0.75)}] * 4


@pytest.mark.parity
def test_full_sequence_drops_are_the_same_under_every_mapping(pool):
    moe = {"capacity_factor": 0.5}
    mapped = [tiny(moe=moe, world_size=2, **axes) for axes in ({"tp": 2, "ep": 2}, {"cp": 2, "etp": 2})]
    found = [pool.run(1, run_distributed, tiny(moe=moe), STEPS)]
    found += run_each(pool, 2, run_distributed, *((cfg, STEPS) for cfg in mapped))
    (only,) = {tuple(step.dropped_fraction for step in ranks[0].steps) for ranks in found}
    assert all(0 < fraction < 1 for fraction in only)


@pytest.mark.parity
@pytest.mark.parametrize(
    "mapping",
    [
        {"world_size": 2, "cp": 2, "ep": 2},
        *slow(
            ({"world_size": 4, **axes},)
            for axes in ({"tp": 2, "cp": 2, "ep": 4}, {"tp": 2, "pp": 2, "ep": 2}, {"cp": 2, "etp": 2})
        ),
    ],
)
def test_float32_agrees_on_the_first_step(pool, mapping):
    cfg = tiny(**mapping)
    single = replace(cfg, run=replace(cfg.run, dtype="float32"))
    found = compare_records(
        run_oracle(without_mapping(cfg), 1), pool.run(cfg.parallel.world_size, run_distributed, single, 1)
    )
    worst = next(d for d in found if d.name.startswith(("step 1", "initial")))
    assert worst.error <= 1e-5, worst
    # Tensors hold elements far smaller than their largest one: AdamW's first step divides by their magnitude.
    worst = next(d for d in found if d.name.startswith("gradients"))
    assert worst.error <= 1e-4, worst


@pytest.mark.slow
def test_the_papers_accuracy_run_in_miniature(pool):
    """A shrunk Mixtral-8x7B, TP2 CP2 PP2 EP8 ETP1 on 16 ranks: the loss curve is the oracle's (arXiv:2504.14960)."""
    degrees = {"world_size": 16, "tp": 2, "cp": 2, "pp": 2, "ep": 8, "etp": 1}
    cfg = config_of(
        {
            "run": {"dtype": "float64", "steps": 30, "seed": 1},
            "model": {"preset": "mixtral-8x7b"},
            "parallel": degrees,
            "train": {"seq_len": 256, "micro_batch_size": 1, "global_batch_size": 32, "lr": 1e-2, "warmup_steps": 3},
        }
    )
    small = shrink(cfg)
    ranks = pool.run(16, run_distributed, small, 30, timeout_s=900.0)
    oracle = run_oracle(small, 30)
    curve = [step.loss for step in ranks[0].steps]
    assert curve == pytest.approx([step.loss for step in oracle.steps], rel=1e-9)
    assert curve[-1] < curve[0]


@pytest.mark.parity
@pytest.mark.parametrize(
    "mapping",
    [
        {"world_size": 2, "tp": 2, "ep": 2},
        *slow(
            (mapping,)
            for mapping in (
                {"world_size": 2, "pp": 2, "zero": 2},
                {"world_size": 1},
                {"world_size": 2, "zero": 3},
                {"world_size": 4, "tp": 2, "cp": 2, "ep": 4},
            )
        ),
    ],
)
def test_bfloat16_follows_the_oracle(pool, mapping):
    cfg = tiny(train={"seq_len": 32, "global_batch_size": 8}, **mapping)
    half = replace(cfg, run=replace(cfg.run, dtype="bfloat16"))
    ranks = pool.run(cfg.parallel.world_size, run_distributed, half, STEPS)
    record = ranks[0]
    oracle = oracle_of(cfg)
    assert [s.loss for s in record.steps] == pytest.approx([s.loss for s in oracle.steps], rel=5e-3)
    assert [s.grad_norm for s in record.steps] == pytest.approx([s.grad_norm for s in oracle.steps], rel=5e-2)
    assert {weight.dtype for rank in ranks for weight in rank.weights.values()} == {torch.float32}


@pytest.fixture
def shrunk_gpt_oss() -> Config:
    """A shrunk preset."""
    cfg = config_of(
        {
            "run": {"dtype": "float64", "seed": 1},
            "model": {"preset": "gpt-oss-120b"},
            "parallel": {"world_size": 4, "tp": 2, "cp": 2, "ep": 2, "etp": 2},
            "train": {"seq_len": 4096, "global_batch_size": 4},
        }
    )
    return shrink(cfg)


def test_a_shrunk_preset_of_gpt_oss_keeps_its_features(shrunk_gpt_oss):
    """With them, the rows of gpt-oss equal the oracle."""
    model = shrunk_gpt_oss.model
    assert [layer.window for layer in model.decoder_layers] == [SmallSizes.span, 0]
    assert model.ffn.moe.bias
    assert model.attention.sinks


@pytest.mark.parity
@pytest.mark.slow
def test_a_shrunk_preset_of_gpt_oss_equals_the_oracle(pool, shrunk_gpt_oss):
    assert_equals_oracle(pool, shrunk_gpt_oss)


def test_the_multi_token_loss_does_not_depend_on_the_micro_batch_size():
    def loss(size: int) -> float:
        train = {"global_batch_size": 4, "micro_batch_size": size}
        return run_oracle(without_mapping(tiny(model={"mtp_layers": 2}, train=train)), 1).steps[0].mtp_loss

    assert loss(1) == pytest.approx(loss(4), rel=1e-12)
