"""Data of a run at another path: it is the same if its content is, whatever its names."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moefold.checkpoint.checkpoint_meta import CheckpointMeta, counted, model_sizes
from moefold.checkpoint.sample_order import (
    SampleOrder,
    data_order_change,
    moved_data_message,
    sample_order,
    with_recipe_file_names,
)
from moefold.config.base.limits import FORMAT
from moefold.config.schema import Config
from moefold.config.sections.data import DataConfig
from moefold.data.fingerprint import fingerprint
from moefold.remote_copy import local_copy

TOKENIZER = "t" * 100_000


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with two data sets of three files, and a tokenizer with a template."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    local_copy.cache_clear()
    for name, suffix in (("tokens", ".npy"), ("text", ".txt"), ("sft", ".jsonl"), ("table", ".csv")):
        for number, file in enumerate(("0", "1", "in/2")):
            path = tmp_path / name / f"{file}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            if suffix == ".npy":
                np.save(path, np.arange(1000, dtype=np.uint16) + number)
            else:
                path.write_text(f"text\n{file}\n")
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "tokenizer.json").write_text(TOKENIZER)
    (tmp_path / "tok" / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat.jinja").write_text("template")
    return tmp_path


def meta_of(data: DataConfig) -> CheckpointMeta:
    cfg = Config(data=data)
    files = fingerprint(data)
    tokens = {name: 1000 for name in files if name.endswith(".npy")}
    meta = CheckpointMeta(
        format=FORMAT,
        states=counted(step=2, samples=16) | {"data": {"data_files": files, "data_tokens": tokens}},
        order=sample_order(cfg),
        model=model_sizes(cfg.model),
        parallel={},
    )
    return replace(meta, order=json.loads(json.dumps(meta.order)))


def _with(meta: CheckpointMeta, **data: dict[str, str]) -> CheckpointMeta:
    return replace(meta, states=meta.states | {"data": meta.states["data"] | data})


def order_of(data: DataConfig) -> SampleOrder:
    return sample_order(Config(data=data))


def change(meta: CheckpointMeta, data: DataConfig) -> str:
    return data_order_change(meta, order_of(data), fingerprint(data), drops_files=data.drops_files)


KINDS = {"tokens": "tokens", "text": "text", "sft": "sft", "huggingface": "table"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_files_at_another_path_are_the_same_data(place: Path, kind: str):
    folder = KINDS[kind]
    (place / "mnt").mkdir()
    (place / "mnt" / "link").symlink_to(place / folder)
    data = DataConfig(kind=kind, path=folder)
    meta = meta_of(data)
    assert not change(meta, data)
    assert not moved_data_message(meta, order_of(data))
    for path in (f"./{folder}", f"{folder}/", str(place / folder), "mnt/link", f"file://{place}/{folder}"):
        moved = replace(data, path=path)
        assert not change(meta, moved), path
        said = moved_data_message(meta, order_of(moved))
        assert said == f"data at {path!r} has the same content as {folder!r}: continuing at sample 16"
        names = list(fingerprint(moved))
        here = with_recipe_file_names(meta, order_of(moved), fingerprint(moved))
        assert list(here.data_files) == names
        assert list(here.data_tokens) == [name for name in names if name.endswith(".npy")]
        # From there it may move on.
        assert not change(replace(here, order=order_of(moved)), data)
    changed = next((place / folder).glob("1.*"))
    changed.write_bytes(changed.read_bytes() + b"x")
    for path in (folder, str(place / folder)):
        assert f"data file {path}/{changed.name} has other content than then" in change(meta, replace(data, path=path))


def test_files_are_matched_in_their_order(place: Path):
    files = ("tokens/0.npy", "tokens/1.npy", "tokens/in/2.npy")
    meta = meta_of(DataConfig(kind="tokens", path=files))
    assert not change(meta, DataConfig(kind="tokens", path="tokens"))
    assert not change(meta, DataConfig(kind="tokens", path=("tokens/0.npy", "./tokens/1.npy", "tokens/in")))
    assert "path" in change(meta, DataConfig(kind="tokens", path=(files[1], files[0], files[2])))
    assert "path" in change(meta, DataConfig(kind="tokens", path=files[:2]))
    weighted = DataConfig(kind="tokens", path=files[:2], weights=(1.0, 2.0))
    meta = meta_of(weighted)
    for path in files[:2]:
        os.rename(path, f"{path}.moved.npy")
    assert not change(meta, replace(weighted, path=tuple(f"{path}.moved.npy" for path in files[:2])))
    assert "path" in change(meta, replace(weighted, path=tuple(f"{path}.moved.npy" for path in files[1::-1])))
    assert "weights" in change(meta, DataConfig(kind="tokens", path="tokens"))


def test_names_in_a_folder_of_tables_have_a_meaning(place: Path):
    meta = meta_of(DataConfig(kind="huggingface", path="table"))
    os.rename("table/1.csv", "table/1-test.csv")
    assert "data file table/1.csv is gone" in change(meta, DataConfig(kind="huggingface", path="table"))
    one = meta_of(DataConfig(kind="huggingface", path="table/0.csv"))
    os.rename("table/0.csv", "other.csv")
    assert not change(one, DataConfig(kind="huggingface", path="other.csv"))
    os.rename("other.csv", "other.tsv")
    assert "path" in change(one, DataConfig(kind="huggingface", path="other.tsv"))
    text = meta_of(DataConfig(kind="text", path="text"))
    os.rename("text/0.txt", "text/00.md")
    assert not change(text, DataConfig(kind="text", path="text"))


@pytest.mark.parametrize("kind", ["text", "tokens", "sft", "python-docs"])
def test_tokenizer_and_template_count_by_all_of_their_bytes(place: Path, kind: str):
    template = "chat.jinja" if kind == "sft" else ""
    path = KINDS.get(kind, "")
    data = DataConfig(kind=kind, path=path, tokenizer="tok", chat_template=template)
    meta = meta_of(data)
    os.rename("tok", "elsewhere")
    os.rename("chat.jinja", "other.jinja")
    moved = replace(data, tokenizer="elsewhere/tokenizer.json", chat_template="other.jinja" if template else "")
    assert not change(meta, moved)
    said = moved_data_message(meta, order_of(moved))
    assert said.startswith("data.tokenizer at 'elsewhere/tokenizer.json' has the same content as 'tok'")
    # A byte in the middle, which the blocks of the fingerprints of data leave out.
    for file in ("elsewhere/tokenizer.json", "elsewhere/tokenizer_config.json", *(["other.jinja"] if template else [])):
        before = Path(file).read_bytes()
        for index in (len(before) // 3, len(before) // 2):
            Path(file).write_bytes(before[:index] + b"x" + before[index + 1 :])
            assert "has other content than then" in change(meta, moved), (file, index)
        Path(file).write_bytes(before)
    assert "tokenizer" in change(meta, replace(moved, tokenizer="bytes"))
    if template:
        assert "chat_template" in change(meta, replace(moved, chat_template=""))


def test_checkpoints_of_old_versions_go_on(place: Path):
    data = DataConfig(kind="text", path="text", tokenizer="tok")
    meta = meta_of(data)
    old = _with(meta, data_files={name: " ".join(seen.split()[:2]) for name, seen in meta.data_files.items()})
    assert not change(old, replace(data, path="./text"))
    # They had no fingerprint of a tokenizer that only shows token files: it counts by its name.
    data = DataConfig(kind="tokens", path="tokens", tokenizer="tok")
    meta = meta_of(data)
    old = _with(meta, data_files={name: seen for name, seen in meta.data_files.items() if name.endswith(".npy")})
    assert not change(old, replace(data, path="./tokens"))
    assert "tokenizer 'tok' there, './tok' here" in change(old, replace(data, tokenizer="./tok"))
    assert "path" in change(_with(meta, data_files={}), replace(data, path="./tokens"))


def test_names_on_the_hub_count_as_names(place: Path):
    data = DataConfig(kind="huggingface", path=("owner/name", "table"), tokenizer="tok")
    meta = meta_of(data)
    assert not change(meta, replace(data, path=("owner/name", "./table")))
    assert "path" in change(meta, replace(data, path=("owner/other", "table")))
    assert "path" in change(meta, replace(data, path=("table", "owner/name")))


def test_files_that_were_lost_stay_lost_at_another_path(place: Path):
    data = DataConfig(kind="tokens", path="tokens", corrupt="skip")
    meta = _with(meta_of(data), data_lost={"tokens/1.npy": "it was short"})
    moved = replace(data, path="./tokens")
    assert not change(meta, moved)
    assert list(with_recipe_file_names(meta, order_of(moved), fingerprint(moved)).data_lost) == ["tokens/1.npy"]
    os.rename("tokens", "other")
    os.remove("other/1.npy")
    moved = replace(data, path="other")
    assert not change(meta, moved)
    assert list(with_recipe_file_names(meta, order_of(moved), fingerprint(moved)).data_lost) == ["other/1.npy"]
    np.save("other/0.npy", np.arange(999))
    assert "data file other/0.npy has other content than then" in change(meta, moved)
