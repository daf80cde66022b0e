"""Rollouts of a vLLM server, against a stand-in with its interface: no vLLM runs here."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from moefold.comm.groups import World
from moefold.config.schema import Config
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.convert.export_folder import ExportOptions, export_folder
from moefold.errors import ConfigError
from moefold.inference.engine.requests import Completion, Request
from moefold.inference.sampling import SamplingParams
from moefold.inference.vllm_engine import cut_off
from moefold.inference.vllm_server import VllmClient, VllmError, generate_body, serve_command
from moefold.train.machine_checks import check_vllm
from moefold.validate.config import check_config
from tests.slow import slow
from tests.train.policy_runs import recipe, records, train_policy, under
from tests.train.vllm_stand_in import StandIn, stand_in

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module")
def served(pool, tmp_path_factory):
    """The recipe of a tiny policy, and a Hugging Face folder of other weights of its model."""
    folder = tmp_path_factory.mktemp("served")
    cfg = recipe(folder, 1)
    cfg = replace(cfg, run=replace(cfg.run, seed=8), checkpoint=CheckpointConfig(every=1))
    pool.run(1, train_policy, cfg)
    export_folder(Path(cfg.run.dir), folder / "hf", World(), ExportOptions(), on_bytes=lambda _: None)
    return folder / "hf"


def in_float32(tmp_path: Path) -> Config:
    """A recipe that vLLM can sample. Runs against the stand-in are in float64, which shows equality."""
    cfg = recipe(tmp_path)
    return replace(cfg, run=replace(cfg.run, dtype="float32"))


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
)
def test_the_server_samples_with_the_weights_of_each_step(pool, tmp_path, served, mapping):
    """In float64 its log-probabilities equal the trainer's, also for rollouts after an optimizer step."""
    with stand_in(recipe(tmp_path, 2), served) as server:
        cfg = under(by_vllm(recipe(tmp_path, 2), server), tmp_path / "run", **mapping)
        pool.run(mapping["world_size"], train_policy, cfg)
        assert server.calls.count("/collective_rpc") == 2
        assert server.calls.count("/inference/v1/generate") == 2 * cfg.train.global_batch_size
    found = records(cfg)
    assert len(found) == 2
    for record in found:
        assert record["rl"]["mismatch_max"] < 1e-12
        assert record["grad_norm"] > 0


@pytest.mark.parametrize(
    ("damage", "rl", "step"),
    [
        ({"max_loads": 1}, {}, 2),
        *slow([({"max_loads": 0}, {"replay": "off", "correction": "clamp"}, 1), ({"shift": 1e-5}, {}, 1)]),
        # Training replays the experts of the server.
        ({"flips_experts": True}, {}, 1),
    ],
)
def test_another_law_than_in_training_ends_the_run_before_the_update(pool, tmp_path, served, damage, rl, step):
    with stand_in(recipe(tmp_path, 2), served) as server:
        for name, value in damage.items():
            setattr(server, name, value)
        cfg = under(by_vllm(recipe(tmp_path, 2, **rl), server), tmp_path / "run", world_size=2, ep=2)
        with pytest.raises(
            Exception, match=f"step {step}: the log-probabilities of sampler and training differ"
        ) as error:
            pool.run(2, train_policy, cfg)
        assert server.calls.count("/collective_rpc") == step
    text = str(error.value)
    for part in ("rl.mismatch_limit allows 1e-06", "stale weights", "another dtype", "RoPE, length, vocabulary"):
        assert part in text
    assert "nothing of the step was applied" in text
    assert len(records(cfg)) == step - 1
    (fault,) = records(cfg, "faults.jsonl")
    assert (fault["kind"], fault["action"], fault["step"]) == ("mismatch", "stop", step)
    saved = records(cfg, "mismatch.jsonl")
    assert len(saved) == cfg.train.global_batch_size
    assert all(len(one["completion_ids"]) == len(one["log_probs"]) == one["tokens"] for one in saved)
    assert bytes(saved[0]["prompt_ids"]).decode() == saved[0]["prompt"]


def test_a_higher_limit_trains_on(pool, tmp_path, served):
    with stand_in(recipe(tmp_path, 1), served) as server:
        server.shift = 1.0
        cfg = under(by_vllm(recipe(tmp_path, 1, mismatch_limit=2.0), server), tmp_path / "run")
        pool.run(1, train_policy, cfg)
    assert records(cfg)[0]["rl"]["mismatch_mean"] == pytest.approx(1)


def test_a_server_that_fails_ends_the_run_on_all_ranks(pool, tmp_path, served):
    with stand_in(recipe(tmp_path, 1), served) as server:
        server.answers["/inference/v1/generate"] = 503
        cfg = under(by_vllm(recipe(tmp_path, 1), server), tmp_path / "run", world_size=2)
        with pytest.raises(Exception, match="HTTP 503.*see the server's log"):
            pool.run(2, train_policy, cfg)


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        ("/v1/models", 404, "has no /v1/models; start vLLM 0.32.0 or newer by: VLLM_SERVER_DEV_MODE=1 .*vllm serve"),
        ("/v1/models", {"data": [{"root": "other", "max_model_len": 64}]}, "serves 'other', and rollout.folder is"),
        ("/v1/models", {"data": []}, "answers otherwise than vLLM"),
        ("/v1/models", b"<html>", "answers otherwise than vLLM"),
        ("/server_info?config_format=json", 404, "has no /server_info; start vLLM"),
        ("/inference/v1/generate", 403, "has no /inference/v1/generate; start vLLM .* --tokens-only"),
        ("/inference/v1/generate", {"choices": [{"token_ids": [1]}]}, "answers otherwise than vLLM"),
        (
            "/server_info?config_format=json",
            {"vllm_config": {"model_config": {"logprobs_mode": "raw_logprobs", "dtype": "torch.float32"}}},
            "has logprobs_mode='raw_logprobs'.*--logprobs-mode processed_logprobs",
        ),
        (
            "/server_info?config_format=json",
            {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs", "dtype": "torch.float32"}}},
            "returns no experts.*--enable-return-routed-experts .which needs Triton.; or set rl.replay='off'",
        ),
        (
            "/server_info?config_format=json",
            {
                "vllm_config": {
                    "model_config": {"logprobs_mode": "processed_logprobs", "dtype": "torch.float32"},
                    "device_config": {"device": "cpu"},
                }
            },
            "runs on a CPU, where vLLM .* returns no experts, .*; set rl.replay='off'",
        ),
    ],
)
def test_another_server_is_refused_before_ranks_start(tmp_path, served, path, answer, message):
    cfg = in_float32(tmp_path)
    with stand_in(cfg, served) as server:
        server.answers[path] = answer
        with pytest.raises(ConfigError, match=message):
            check_vllm(by_vllm(cfg, server), None, max_tokens=33)


@pytest.mark.parametrize(
    ("dtype", "served_dtype", "way_out"),
    [
        ("float32", "bfloat16", "start it by: .*vllm serve .* --dtype float32 .*; or set run.dtype='bfloat16'"),
        ("bfloat16", "float16", "start it by: .*vllm serve .* --dtype bfloat16 .* --enable-return-routed-experts$"),
    ],
)
def test_a_server_of_another_dtype_is_refused(tmp_path, served, dtype, served_dtype, way_out):
    cfg = recipe(tmp_path)
    cfg = replace(cfg, run=replace(cfg.run, dtype=dtype))
    with stand_in(cfg, served) as server:
        info = {"model_config": {"dtype": f"torch.{served_dtype}", "logprobs_mode": "processed_logprobs"}}
        server.answers["/server_info?config_format=json"] = {"vllm_config": info}
        with pytest.raises(ConfigError, match=f"computes in {served_dtype}, and training in .*{dtype}.*{way_out}"):
            check_vllm(by_vllm(cfg, server), None, max_tokens=33)
        message = "run.dtype='float64' is not a dtype of vLLM .*; set run.dtype to 'bfloat16' or 'float32'"
        with pytest.raises(ConfigError, match=message):
            check_vllm(by_vllm(recipe(tmp_path), server), None, max_tokens=33)


@pytest.mark.parametrize(
    ("positions", "seq_len", "expected"),
    [(64, 63, ""), (64, 64, "--max-model-len 65"), (64, 128, "--max-model-len 65"), (None, 64, "")],
)
def test_the_command_makes_room_for_the_longest_rollout(tmp_path, positions, seq_len, expected):
    """The last token of a rollout has no position in the server; more positions than trained are not offered."""
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))
    command = serve_command(str(tmp_path), dtype="float32", max_tokens=seq_len + 1, returns_experts=False)
    assert ("VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 " in command) == bool(expected)
    assert (expected or "--max-model-len") in command if expected else "--max-model-len" not in command
    assert command.startswith("VLLM_SERVER_DEV_MODE=1 ")
    assert f"vllm serve {tmp_path} --dtype float32 --tokens-only" in command


def test_a_short_server_a_missing_server_and_another_folder_are_refused(tmp_path, served):
    cfg = in_float32(tmp_path)
    with stand_in(cfg, served) as server:
        check_vllm(by_vllm(cfg, server), None, max_tokens=33)
        long = replace(by_vllm(cfg, server), train=replace(cfg.train, seq_len=64))
        # The longest prompt with its completion counts, not train.seq_len.
        check_vllm(long, None, max_tokens=64)
        text = "max_model_len=64, and the longest prompt .* has 65 tokens; rollout.folder=.* max_position_embeddings=32"
        with pytest.raises(ConfigError, match=text):
            check_vllm(long, None, max_tokens=65)
        other = replace(by_vllm(cfg, server), model=replace(cfg.model, hidden_size=32))
        with pytest.raises(ConfigError, match="rollout.folder=.*cannot be used: it is of another model"):
            check_vllm(other, None, max_tokens=33)
        with pytest.raises(ConfigError, match="rollout.folder=.*cannot be used: it does not exist"):
            check_vllm(by_vllm(cfg, server, folder=str(tmp_path / "none")), None, max_tokens=33)
        gone = by_vllm(cfg, server)
    with pytest.raises(ConfigError, match="cannot be reached .*refused.*; start the server by: VLLM_SERVER"):
        check_vllm(gone, None, max_tokens=33)


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
            pool.run(2, train_policy, cfg)


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
        client = VllmClient(server.url, str(served), "float64", 33, 10.0)
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
    cut = cut_off(0, whole, lambda number, tokens: tokens[-1] >= 2)
    assert (cut.tokens, cut.log_probs, cut.finish_reason) == ((1, 2), (-1.0, -2.0), "stop")
    assert cut_off(0, whole, lambda number, tokens: tokens[-1] == 0) is whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"folder": ""}, "rollout.folder='' must name the Hugging Face folder"),
        ({"timeout_s": 600.0}, "rollout.timeout_s=600.0 must be less than faults.timeout_s=600.0"),
        ({"experts": "fetch"}, "samples under the mapping of the server"),
        ({"url": "localhost:8000"}, "rollout.url='localhost:8000' must begin with http:// or https://"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, change, message):
    cfg = recipe(tmp_path)
    cfg = replace(cfg, rollout=replace(cfg.rollout, **{"engine": "vllm", "folder": "hf"} | change))
    with pytest.raises(ConfigError, match=message):
        check_config(cfg)
