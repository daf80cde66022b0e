"""Rollouts of a vLLM server, against a stand-in with its interface: no vLLM runs here."""

import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from moefold.cli.plan_rollouts import rollout_lengths
from moefold.cli.simulate_rounds import check_round_options
from moefold.comm.groups import World
from moefold.config.schema import CheckpointConfig, Config
from moefold.convert.export_folder import ExportOptions, export_folder
from moefold.errors import ConfigError
from moefold.inference.engine.requests import Completion, Request
from moefold.inference.sampling import SamplingParams
from moefold.inference.vllm_engine import _cut_off
from moefold.inference.vllm_server import VllmError, VllmServer, generate_body
from moefold.train.start import check_vllm
from moefold.validate.config import check_config
from tests.train.test_rollout_loader import _train, recipe, records, under
from tests.train.vllm_stand_in import StandIn, stand_in

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module")
def served(pool, tmp_path_factory):
    """The recipe of a tiny policy, and a Hugging Face folder of other weights of its model."""
    folder = tmp_path_factory.mktemp("served")
    cfg = recipe(folder, 1)
    cfg = replace(cfg, run=replace(cfg.run, seed=8), checkpoint=CheckpointConfig(every=1))
    pool.run(1, _train, cfg)
    export_folder(Path(cfg.run.dir), folder / "hf", World(), ExportOptions(), on_bytes=lambda _: None)
    return folder / "hf"


def by_vllm(cfg: Config, server: StandIn, **rollout) -> Config:
    settings = {"engine": "vllm", "url": server.url, "folder": str(server.folder), "timeout_s": 60.0, **rollout}
    return replace(
        cfg,
        rollout=replace(cfg.rollout, **settings),
        checkpoint=CheckpointConfig(every=0, at_end=False),
    )


@pytest.mark.parametrize(
    "mapping",
    [
        {"world_size": 2, "pp": 2},
        pytest.param({"world_size": 4, "tp": 2, "ep": 2, "etp": 2, "zero": 3}, marks=pytest.mark.slow),
        pytest.param({"world_size": 4, "pp": 2, "ep": 2}, marks=pytest.mark.slow),
        pytest.param({"world_size": 4, "cp": 2, "ep": 4}, marks=pytest.mark.slow),
    ],
    ids=lambda mapping: "-".join(f"{key}{value}" for key, value in mapping.items()),
)
def test_the_server_samples_with_the_weights_of_each_step(pool, tmp_path, served, mapping):
    """In float64 its log-probabilities are those of training, also those of rollouts after an optimizer step."""
    with stand_in(recipe(tmp_path, 2), served) as server:
        cfg = under(by_vllm(recipe(tmp_path, 2), server), tmp_path / "run", **mapping)
        check_vllm(cfg, None)
        pool.run(mapping["world_size"], _train, cfg)
        assert server.calls.count("/collective_rpc") == 2
        assert server.calls.count("/inference/v1/generate") == 2 * cfg.train.global_batch_size + 1
    found = records(cfg)
    assert len(found) == 2
    for record in found:
        assert record["rl"]["mismatch_max"] < 1e-12
        assert record["grad_norm"] > 0


def test_without_new_weights_the_mismatch_is_seen(pool, tmp_path, served):
    with stand_in(recipe(tmp_path, 1), served) as server:
        server.loads_weights = False
        cfg = under(by_vllm(recipe(tmp_path, 1, replay="off", correction="clamp"), server), tmp_path / "run")
        pool.run(1, _train, cfg)
    assert records(cfg)[0]["rl"]["mismatch_mean"] > 1e-3


def test_training_replays_the_experts_of_the_server(pool, tmp_path, served):
    """Other experts than those that sampled give other log-probabilities."""
    with stand_in(recipe(tmp_path, 1), served) as server:
        server.flips_experts = True
        cfg = under(by_vllm(recipe(tmp_path, 1, correction="clamp"), server), tmp_path / "run", world_size=2, ep=2)
        pool.run(2, _train, cfg)
    assert records(cfg)[0]["rl"]["mismatch_mean"] > 1e-3


def test_a_server_that_fails_ends_the_run_on_all_ranks(pool, tmp_path, served):
    with stand_in(recipe(tmp_path, 1), served) as server:
        server.answers["/inference/v1/generate"] = 503
        cfg = under(by_vllm(recipe(tmp_path, 1), server), tmp_path / "run", world_size=2)
        with pytest.raises(Exception, match="HTTP 503.*see the server's log"):
            pool.run(2, _train, cfg)


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        ("/v1/models", 404, "has no /v1/models; start vLLM 0.33.0 or newer by: VLLM_SERVER_DEV_MODE=1 vllm serve"),
        ("/v1/models", {"data": [{"root": "other", "max_model_len": 64}]}, "serves 'other', and rollout.folder is"),
        ("/v1/models", {"data": []}, "answers otherwise than vLLM"),
        ("/v1/models", b"<html>", "answers otherwise than vLLM"),
        ("/server_info?config_format=json", 404, "has no /server_info; start vLLM"),
        ("/inference/v1/generate", 403, "has no /inference/v1/generate; start vLLM .* --tokens-only"),
        ("/inference/v1/generate", {"choices": [{"token_ids": [1]}]}, "answers otherwise than vLLM"),
        (
            "/server_info?config_format=json",
            {"vllm_config": {"model_config": {"logprobs_mode": "raw_logprobs"}}},
            "has logprobs_mode='raw_logprobs'.*--logprobs-mode processed_logprobs",
        ),
        (
            "/server_info?config_format=json",
            {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}},
            "returns no experts.*--enable-return-routed-experts; or set rl.replay='off'",
        ),
    ],
)
def test_another_server_is_refused_before_ranks_start(tmp_path, served, path, answer, message):
    with stand_in(recipe(tmp_path), served) as server:
        server.answers[path] = answer
        with pytest.raises(ConfigError, match=message):
            check_vllm(by_vllm(recipe(tmp_path), server), None)


def test_a_short_server_a_missing_server_and_another_folder_are_refused(tmp_path, served):
    cfg = recipe(tmp_path)
    with stand_in(cfg, served) as server:
        long = replace(by_vllm(cfg, server), train=replace(cfg.train, seq_len=64))
        with pytest.raises(ConfigError, match="max_model_len=64, and rollouts have up to train.seq_len \\+ 1 = 65"):
            check_vllm(long, None)
        other = replace(by_vllm(cfg, server), model=replace(cfg.model, hidden_size=32))
        with pytest.raises(ConfigError, match="rollout.folder=.*cannot be used: it is of another model"):
            check_vllm(other, None)
        with pytest.raises(ConfigError, match="rollout.folder=.*cannot be used: it does not exist"):
            check_vllm(by_vllm(cfg, server, folder=str(tmp_path / "none")), None)
        gone = by_vllm(cfg, server)
    with pytest.raises(ConfigError, match="cannot be reached .*refused.*; start the server by: VLLM_SERVER"):
        check_vllm(gone, None)


def test_a_folder_that_cannot_be_written_ends_the_run(pool, tmp_path, served):
    folder = tmp_path / "hf"
    folder.mkdir()
    for file in served.iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "rollout_weights").write_text("")
    with stand_in(recipe(tmp_path, 1), folder) as server:
        cfg = under(by_vllm(recipe(tmp_path, 1), server), tmp_path / "run", world_size=2)
        with pytest.raises(Exception, match="rollout_weights' cannot be written: File exists"):
            pool.run(2, _train, cfg)


def test_the_planner_does_not_price_a_server(tmp_path):
    cfg = recipe(tmp_path)
    cfg = replace(cfg, rollout=replace(cfg.rollout, engine="vllm", folder="hf"))
    options = Namespace(prompt_tokens=None, new_tokens=None, reward_s=None, rounds=None)
    assert rollout_lengths(cfg, options) is None
    with pytest.raises(ConfigError, match="--new-tokens 4 has no effect: a server of rollout.engine='vllm'"):
        rollout_lengths(cfg, Namespace(prompt_tokens=None, new_tokens=4))
    with pytest.raises(ConfigError, match="rollout.engine='vllm' samples on a server, whose time is not simulated"):
        check_round_options(cfg, options)


REQUEST = Request(prompt=(1, 2), max_tokens=3, eos_ids=frozenset({0}), prompt_number=5, sample_number=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_versions": [{"version": "b", "start": 0, "end": 3}]}, "sampled with weights \\['b'\\], not with 'a'"),
        ({"weight_versions": None}, "answers otherwise"),
        ({"token_ids": [7, 8]}, "answers otherwise"),
        ({"finish_reason": "abort"}, "answers otherwise"),
        ({"finish_reason": "stop"}, "answers otherwise"),
        ({"logprobs": None}, "answers otherwise"),
        ({"logprobs": {"content": [{"token_id": token, "logprob": 1.0} for token in (7, 8, 9)]}}, "answers otherwise"),
    ],
)
def test_a_strange_completion_is_refused(tmp_path, served, change, message):
    content = [{"token_id": token, "logprob": -1.0} for token in (7, 8, 9)]
    choice = {
        "token_ids": [7, 8, 9],
        "logprobs": {"content": content},
        "finish_reason": "length",
        "weight_versions": [{"version": "a", "start": 0, "end": 3}],
    }
    with stand_in(recipe(tmp_path), served) as server:
        client = VllmServer(server.url, str(served), 10.0)
        server.answers["/inference/v1/generate"] = {"choices": [choice]}
        completion, experts = client.complete(REQUEST, SamplingParams(), "a", time.monotonic() + 10)
        assert completion == Completion(tokens=(7, 8, 9), log_probs=(-1.0,) * 3, finish_reason="length")
        assert experts is None
        with pytest.raises(VllmError, match="within rollout.timeout_s=10 s"):
            client.complete(REQUEST, SamplingParams(), "a", 0.0)
        server.answers["/inference/v1/generate"] = {"choices": [choice | change]}
        with pytest.raises(VllmError, match=message):
            client.complete(REQUEST, SamplingParams(), "a", time.monotonic() + 10)


def test_seeds_differ_between_samples_and_runs():
    def seed(request: Request, run_seed: int = 0) -> int:
        return generate_body(request, SamplingParams(seed=run_seed))["sampling_params"]["seed"]

    others = [replace(REQUEST, sample_number=2), replace(REQUEST, prompt_number=6)]
    assert len({seed(REQUEST), seed(REQUEST, 1), *map(seed, others)}) == 4
    assert seed(REQUEST) == seed(replace(REQUEST, max_tokens=1))


def test_a_completion_ends_at_the_stop_condition():
    whole = Completion(tokens=(1, 2, 3, 0), log_probs=(-1.0, -2.0, -3.0, -4.0), finish_reason="eos")
    cut = _cut_off(0, whole, lambda number, tokens: tokens[-1] >= 2)
    assert (cut.tokens, cut.log_probs, cut.finish_reason) == ((1, 2), (-1.0, -2.0), "stop")
    assert _cut_off(0, whole, lambda number, tokens: tokens[-1] == 0) is whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"folder": ""}, "rollout.folder='' must name the Hugging Face folder"),
        ({"timeout_s": 600.0}, "rollout.timeout_s=600 must be less than faults.timeout_s=600"),
        ({"experts": "fetch"}, "samples under the mapping of the server"),
        ({"url": "localhost:8000"}, "rollout.url='localhost:8000' must begin with http:// or https://"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, change, message):
    cfg = recipe(tmp_path)
    cfg = replace(cfg, rollout=replace(cfg.rollout, **{"engine": "vllm", "folder": "hf"} | change))
    with pytest.raises(ConfigError, match=message):
        check_config(cfg)
