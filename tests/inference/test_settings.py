"""Settings of inference: the mapping fits the ranks of the launcher, and the length fits the model."""

import pytest

from moefold.errors import ConfigError
from moefold.host.rank_env import RankEnv
from moefold.inference.settings import InferenceRequest, inference_config, launched_config
from moefold.inference.source import find_source
from tests.inference.checkpoint_folder import described_run


@pytest.fixture
def source(tmp_path):
    described_run(tmp_path, moe={"capacity_factor": 1.0, "pad_to_capacity": True}, parallel={"dispatcher": "alltoall"})
    return find_source(str(tmp_path))


def wish(*overrides: str, **more: object) -> InferenceRequest:
    return InferenceRequest(**{"overrides": overrides, "seq_len": 13, "batch_size": 3} | more)


def test_tokens_are_not_dropped_unless_asked(source):
    plain = inference_config(source, wish(), "evaluate")
    assert (plain.moe.eval_capacity_factor, plain.moe.pad_to_capacity) == (0.0, False)
    asked = inference_config(source, wish("moe.eval_capacity_factor=1.5", "moe.drop_policy=position"), "evaluate")
    assert (asked.moe.eval_capacity_factor, asked.moe.drop_policy.kind) == (1.5, "position")


@pytest.mark.parametrize(
    ("overrides", "world_size", "seq_len"),
    [
        ([], 1, 14),
        (["parallel.tp=4", "parallel.ep=2", "parallel.etp=2"], 4, 16),
        (["parallel.cp=2", "parallel.ep=8"], 8, 16),
        (["parallel.pp=2", "parallel.ep=4"], 8, 14),
        (["parallel.tp=2", "parallel.world_size=4"], 4, 14),
    ],
)
def test_as_many_ranks_as_the_degrees_need_and_a_length_that_they_cut(source, overrides, world_size, seq_len):
    cfg = inference_config(source, wish(*overrides), "evaluate")
    assert (cfg.parallel.world_size, cfg.train.seq_len, cfg.train.micro_batch_size) == (world_size, seq_len, 3)


def test_launcher_sets_the_number_of_ranks(source):
    assert inference_config(source, wish("parallel.tp=2", world_size=4), "evaluate").parallel.dp == 2


def test_the_mapping_has_the_ranks_of_the_launcher(source):
    env = RankEnv(rank=1, local_rank=1, world_size=4, master_address="localhost", master_port=1)
    assert launched_config(source, wish("parallel.tp=2"), "generate", env).parallel.dp == 2
    assert launched_config(source, wish("parallel.tp=2"), "generate", None).parallel.dp == 1
    with pytest.raises(ConfigError, match="parallel.world_size=2 must equal the 4 processes"):
        launched_config(source, wish("parallel.world_size=2"), "generate", env)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [],
            "--experts fetch has no effect with ep=1: each rank holds all experts; set parallel.ep above 1, or leave",
        ),
        (
            ["parallel.tp=2", "parallel.ep=2"],
            "--experts fetch reads whole experts .* set parallel.tp=1, or choose 'exchange'",
        ),
    ],
)
def test_a_mapping_whose_ranks_cannot_fetch_experts(source, overrides, message):
    with pytest.raises(ConfigError, match=message):
        inference_config(source, wish(*overrides, experts="fetch"), "generate")
    assert inference_config(source, wish("parallel.ep=2", experts="fetch"), "generate").rollout.experts == "fetch"


REFUSED = {
    "parallel.zero=2": "parallel.zero has no effect here",
    "parallel.schedule=1f1b": "parallel.schedule has no effect here",
    "parallel.virtual_stages=2": "parallel.virtual_stages has no effect here",
    "parallel.tpp=2": "unknown key parallel.tpp; did you mean parallel.tp",
    "parallel.tp=0": "parallel.tp=0 must be at least 1",
    "parallel.tp=two": "parallel.tp='two' must be an integer",
    "parallel.tp=3": "parallel.tp=3 must divide model.attention.num_heads=8; choose parallel.tp=1, 2, 4 or 8\n",
    "parallel.pp=99": "must be at most the 2 layers of the model, one for each stage; choose parallel.pp=1 or 2",
    "parallel.dispatcher=leastloaded": "choose one of allgather, alltoall, local",
    "model.ffn.moe.top_k=4": "model.ffn.moe.top_k cannot be set here",
    "moe.drop_policy=position": "moe.drop_policy has no effect: no token is dropped",
    "moe.eval_capacity_factor=-1": "must be at least 0 here",
    "tp=2": "did you mean parallel.tp=2",
}


@pytest.mark.parametrize("override", REFUSED)
def test_refusals_of_evaluation(source, override):
    with pytest.raises(ConfigError) as error:
        inference_config(source, wish(override), "evaluate")
    assert REFUSED[override] in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.cp=2"], "parallel.cp=2 cannot generate"),
        (["parallel.ep=2", "parallel.dispatcher=allgather"], "needs equally many tokens"),
        (["parallel.tp=2", "parallel.ep=2", "parallel.dispatcher=allgather"], "needs equally many tokens"),
        (["moe.eval_capacity_factor=1.0"], "moe.eval_capacity_factor cannot be set here"),
    ],
)
def test_refusals_of_generation(source, overrides, message):
    with pytest.raises(ConfigError, match=message):
        inference_config(source, wish(*overrides), "generate")


def test_forced_routing_is_evaluated_and_does_not_generate(tmp_path):
    described_run(tmp_path, moe={"choice": "round_robin"})
    forced = find_source(str(tmp_path))
    assert inference_config(forced, wish(), "evaluate").moe.choice.kind == "round_robin"
    with pytest.raises(ConfigError, match="forced its routing"):
        inference_config(forced, wish(), "generate")


def test_types_and_devices(source):
    assert inference_config(source, wish(), "evaluate").run.dtype == "float32"
    assert inference_config(source, wish(dtype="bfloat16"), "evaluate").run.dtype == "bfloat16"
    with pytest.raises(ConfigError, match="--dtype half must be auto or one of"):
        inference_config(source, wish(dtype="half"), "evaluate")
    with pytest.raises(ConfigError, match="--device gpu must be one of"):
        inference_config(source, wish(device="gpu"), "evaluate")


@pytest.mark.parametrize(
    ("mapping", "layers"),
    [
        (["parallel.tp=3"], "moe"),
        (["parallel.tp=6", "parallel.world_size=12"], "moe"),
        (["parallel.pp=99"], "moe"),
        (["parallel.pp=99"], "dense, moe"),
        (["parallel.ep=3"], "moe"),
        (["parallel.ep=2"], "dense"),
        (["parallel.etp=7"], "moe"),
    ],
)
def test_no_mapping_error_suggests_changing_the_trained_model(tmp_path, mapping, layers):
    described_run(tmp_path, model={"preset": "tiny", "layers.ffn": layers})
    with pytest.raises(ConfigError) as raised:
        inference_config(find_source(str(tmp_path)), wish(*mapping), "evaluate")
    text = str(raised.value)
    assert "choose model." not in text
    assert "'moe' in model.layers" not in text
    assert "; choose parallel." in text or "leave that degree out" in text
