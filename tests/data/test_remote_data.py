"""Data of a remote folder: the same samples as from the same files on this machine."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moefold.config.sections.data import DataConfig
from moefold.data.dataset import DataRequest
from moefold.data.fingerprint import file_sizes, fingerprint
from moefold.data.input_paths import data_file_path
from moefold.data.token_file_set import build_token_file_set
from moefold.data.validate_source import check_data
from moefold.errors import ConfigError
from moefold.remote_copy import local_copy, upload_folder
from moefold.remote_path import RemotePath
from tests.convert.tokenizer_folders import TEXT, make_tokenizer

SEQ_LEN = 72


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    local_copy.cache_clear()
    return tmp_path


def _write(kind: str, folder: Path) -> None:
    """Write two files of a kind of data, one of them in a folder of its own."""
    (folder / "more").mkdir(parents=True)
    for number, name in enumerate(("a", "more/b")):
        if kind == "tokens":
            np.save(folder / f"{name}.npy", np.arange(200 * number, 200 * (number + 1), dtype=np.uint16) % 250)
        elif kind == "text":
            (folder / f"{name}.txt").write_text(f"{number} {TEXT}")
        elif kind == "sft":
            turns = [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": "yes"}]
            (folder / f"{name}.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
        else:
            (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": TEXT}) + "\n" for _ in range(3)))


@pytest.mark.parametrize("kind", ["tokens", "text", "sft", "huggingface"])
def test_samples_equal_local_files(place, kind):
    _write(kind, place / "files")
    url = f"memory://data-{place.name}/{kind}"
    upload_folder(place / "files", RemotePath(url), last=())
    local = DataConfig(kind=kind, path="files", validation_fraction=0.0)
    remote = replace(local, path=url)
    check_data(DataRequest(remote, seq_len=SEQ_LEN, vocab_size=256, seed=0))
    ours, theirs = (DataRequest(data, seq_len=SEQ_LEN, vocab_size=256, seed=1).open().train for data in (remote, local))
    assert len(ours) == len(theirs) > 0
    for index in range(len(ours)):
        assert np.array_equal(ours.annotated_sample(index).tokens, theirs.annotated_sample(index).tokens)
    names = [name.replace("files/", f"{url}/") for name in fingerprint(local)]
    assert list(fingerprint(remote)) == list(file_sizes(remote)) == names
    assert list(fingerprint(remote).values()) == list(fingerprint(local).values())


def test_token_files_keep_their_remote_names(place):
    _write("tokens", place / "files")
    url = f"memory://data-{place.name}/tokens"
    upload_folder(place / "files", RemotePath(url), last=())
    data = DataConfig(kind="tokens", path=(f"{url}/a.npy", f"{url}/more"), corrupt="skip")
    found = build_token_file_set(data, vocab_size=256)
    assert list(found.num_tokens) == [f"{url}/a.npy", f"{url}/more/b.npy"]
    for file in found.files(data):
        assert file.path == data_file_path(file.name, data.path)
        assert file.path.is_file()
    with pytest.raises(ConfigError, match="does not exist, or is an empty folder"):
        build_token_file_set(replace(data, path=f"{url}/gone.npy"), vocab_size=256)


def test_a_remote_tokenizer_comes_with_only_its_settings(place):
    make_tokenizer(place / "files" / "tokenizer.json")
    (place / "files" / "tokenizer_config.json").write_text("{}")
    (place / "files" / "model.safetensors").write_bytes(b"x" * 1000)
    (place / "text.txt").write_text(TEXT)
    upload_folder(place / "files", RemotePath(f"memory://tok-{place.name}"), last=())
    samples = []
    for name in ("files", f"memory://tok-{place.name}", f"memory://tok-{place.name}/tokenizer.json"):
        data = DataConfig(kind="text", path="text.txt", tokenizer=name, validation_fraction=0.0)
        dataset = DataRequest(data, seq_len=SEQ_LEN, vocab_size=320, seed=1).open()
        samples.append(dataset.train.annotated_sample(0).tokens.tolist())
        assert "tokenizer.json" in fingerprint(data)
        assert "tokenizer_config.json" in fingerprint(data)
    assert samples[0] == samples[1] == samples[2]
    assert not list((place / "cache").rglob("model.safetensors"))
    shutil.rmtree(place / "files")
