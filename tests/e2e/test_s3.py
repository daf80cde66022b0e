"""Test a run whose data, checkpoints and exports are in S3: a local server of the package moto, over HTTP."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

INSTALL = "pip install s3fs 'moto[server]'"
RUN = ["run.device=cpu", "run.dtype=float32", "train.seq_len=16", "train.global_batch_size=8", "train.eval_every=0"]
RUN += [
    "model.layers=2",
    "model.hidden_size=32",
    "model.ffn.moe.num_experts=4",
    "model.ffn.moe.intermediate_size=16",
]
RUN += [
    "model.attention.num_heads=4",
    "model.attention.num_kv_heads=4",
    "model.ffn.moe.top_k=2",
    "model.vocab_size=256",
]
RUN += ["data.kind=text", "train.lr_schedule=constant"]


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Start a server with an empty bucket `bucket` and return a folder to work in."""
    pytest.importorskip("s3fs", reason=INSTALL)
    server = pytest.importorskip("moto.server", reason=INSTALL)
    import boto3

    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    environment = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    client.put_object(Bucket="bucket", Key="text/a.txt", Body=b"Rivers carry stones to the sea.\n" * 200)
    client.put_object(Bucket="bucket", Key="text/more/b.txt", Body=b"The sea keeps them.\n" * 200)
    (tmp_path / "recipe.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    running.stop()


def moefold(*words: str, status: int = 0) -> str:
    """Run a command in a process of its own and return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "moefold", *words], capture_output=True, text=True, check=False, env=dict(os.environ)
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.timeout(600)
def test_a_run_lives_in_a_bucket(s3: Path) -> None:
    """Two ranks save, one rank goes on in a new run folder, and the model goes out and comes back."""
    store = "s3://bucket/run"
    two = [*RUN, "parallel.world_size=2", "parallel.ep=2", "data.path=s3://bucket/text"]
    said = moefold("train", "recipe.toml", *two, "run.dir=first", f"checkpoint.dir={store}", "run.steps=2")
    assert f"model in {store}/step-000002" in said
    one = [*RUN, "data.path=s3://bucket/text", f"checkpoint.dir={store}", "checkpoint.async_save=true"]
    said = moefold("train", "recipe.toml", *one, "run.dir=second", "run.steps=4", "checkpoint.every=1")
    assert f"resumed from {store}/step-000002 at step 2" in said
    moefold("train", "recipe.toml", *two, "run.dir=local", "run.steps=4")
    assert losses(s3 / "first") + losses(s3 / "second") == pytest.approx(losses(s3 / "local"), abs=1e-5)
    assert "sound" in moefold("checkpoint", "verify", store)
    moefold("export", store, "s3://bucket/hf")
    moefold("export", f"{store}/step-000004", "hf")
    moefold("import", "s3://bucket/hf", "s3://bucket/start", "--no-tokenizer", "--check")
    said = moefold(
        "train",
        "recipe.toml",
        *RUN,
        "data.path=s3://bucket/text",
        "run.dir=third",
        "run.steps=1",
        "checkpoint.init_from=s3://bucket/start",
    )
    assert "weights from s3://bucket/start" in said
    moefold("generate", store, "Rivers", "--max-tokens", "2")


@pytest.mark.timeout(600)
def test_a_bucket_that_is_not_there_is_named(s3: Path) -> None:
    said = moefold(
        "train",
        "recipe.toml",
        *RUN,
        "data.path=s3://bucket/text",
        "run.dir=run",
        "checkpoint.dir=s3://missing/run",
        "run.steps=1",
        status=2,
    )
    assert "checkpoint.dir: 's3://missing/run' cannot be used: there is no such bucket or folder" in said
    assert "AWS_ENDPOINT_URL" in said
    assert not (s3 / "run").exists()
    said = moefold("train", "recipe.toml", *RUN, "data.path=s3://missing/text", "run.dir=run", "run.steps=1", status=2)
    assert "data.path: 's3://missing/text' does not exist" in said
