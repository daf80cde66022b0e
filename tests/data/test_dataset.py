"""Datasets of a recipe: text, tokens and tokenizers open to the samples that were prepared."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moefold.cache_dir import default_cache_dir
from moefold.config.sections.data import DataConfig
from moefold.data.dataset import DataRequest, Dataset
from moefold.errors import ConfigError

S = 32


def open_text(folder: Path, *, seed: int = 0, **changes: object) -> Dataset:
    data = DataConfig(kind="text", path=str(folder), **changes)  # type: ignore[arg-type]
    return DataRequest(data, seq_len=S, vocab_size=256, seed=seed).open()


def epoch(dataset: Dataset, part: str = "train") -> list[bytes]:
    split = getattr(dataset, part)
    return [split.sample(i).tobytes() for i in range(len(split))]


def test_text_samples_are_the_text(text_folder: Path, tmp_path: Path):
    dataset = open_text(text_folder, shuffle=False, validation_fraction=0.0)
    inputs = np.concatenate([dataset.train.sample(i)[:-1] for i in range(len(dataset.train))])
    files = [text_folder / name for name in ("a.txt", "b.txt", "inner/c.txt")]
    text = b"".join(file.read_bytes() + b"\0" for file in files)
    assert inputs.astype(np.uint8).tobytes() == text[: len(inputs)]
    assert len(text) - len(inputs) <= S
    assert dataset.tokenizer.decode(dataset.train.sample(0)) == text[: S + 1].decode()


def test_same_arguments_same_samples_and_the_seed_draws_the_order(text_folder: Path, tmp_path: Path):
    one, same, other = (open_text(text_folder, seed=seed) for seed in (1, 1, 2))
    assert epoch(one) == epoch(same) != epoch(other)
    assert sorted(epoch(one)) == sorted(epoch(other))
    assert epoch(one, "validation") == epoch(other, "validation")
    assert len(one.validation) > 5


def test_shuffle_false_is_the_order_of_the_text(text_folder: Path, tmp_path: Path):
    in_order = open_text(text_folder, shuffle=False)
    assert epoch(in_order) != epoch(open_text(text_folder))
    assert sorted(epoch(in_order)) == sorted(epoch(open_text(text_folder)))


def test_parts_share_no_place_in_the_data(tmp_path: Path):
    np.save(tmp_path / "x.npy", np.arange(40_000, dtype=np.uint16))
    data = DataConfig(kind="tokens", path=str(tmp_path / "x.npy"), validation_fraction=0.2)
    dataset = DataRequest(data, seq_len=S, vocab_size=40_000, seed=3).open()
    train, held_out = (
        {int(t) for i in range(len(split)) for t in split.sample(i)} for split in (dataset.train, dataset.validation)
    )
    assert len(held_out) > 7000
    assert not train & held_out


def test_prepare_makes_the_file_that_open_maps(text_folder: Path, tmp_path: Path):
    data = DataConfig(kind="text", path=str(text_folder))
    path = DataRequest(data, seq_len=S, vocab_size=256, seed=0).prepare()
    assert path is not None
    stamp = path.stat().st_mtime_ns
    open_text(text_folder)
    assert path.stat().st_mtime_ns == stamp
    assert list(default_cache_dir().glob("*.npy")) == [path]


def test_python_docs_with_defaults(tmp_path: Path):
    dataset = DataRequest(DataConfig(), seq_len=256, vocab_size=256, seed=0).open()
    assert len(dataset.train) > 10_000
    share = len(dataset.validation) / (len(dataset.train) + len(dataset.validation))
    assert 0.045 < share < 0.055
    batch = dataset.train.batch(0, 8)
    inputs, labels = batch.inputs, batch.labels
    assert inputs.shape == labels.shape == (8, 256)
    assert 1 <= inputs.max() < 256


def test_tokenizer_json(text_folder: Path, tmp_path: Path, make_tokenizer_file: Callable[..., Path]):
    data = DataConfig(kind="text", path=str(text_folder), tokenizer=str(make_tokenizer_file("</s>")))
    dataset = DataRequest(data, seq_len=S, vocab_size=350, seed=0).open()
    assert dataset.tokenizer.separator_id == 0
    assert dataset.train.sample(0).max() >= 256


def test_synthetic_needs_nothing():
    data = DataConfig(kind="synthetic")
    assert DataRequest(data, seq_len=S, vocab_size=50, seed=0).prepare() is None
    dataset = DataRequest(data, seq_len=S, vocab_size=50, seed=0).open()
    other = DataRequest(data, seq_len=S, vocab_size=50, seed=1).open()
    assert not np.array_equal(dataset.train.sample(0), other.train.sample(0))
    train = {dataset.train.sample(i).tobytes() for i in range(200)}
    held_out = {dataset.validation.sample(i).tobytes() for i in range(200)}
    assert len(train) == len(held_out) == 200
    assert not train & held_out


def test_too_few_tokens_are_refused(tmp_path: Path):
    (tmp_path / "x.txt").write_text("short")
    with pytest.raises(
        ConfigError, match="train.seq_len=32 needs samples of 33 tokens, but the data has 6; .* at most 5"
    ):
        open_text(tmp_path / "x.txt")


def test_too_few_samples_to_hold_one_out_are_refused(tmp_path: Path):
    (tmp_path / "x.txt").write_text("x" * (2 * S))
    with pytest.raises(ConfigError, match="data.validation_fraction=0.05 leaves no training sample of the 2"):
        open_text(tmp_path / "x.txt")
    assert len(open_text(tmp_path / "x.txt", validation_fraction=0.0).train) == 2


def test_prepare_finds_a_strange_id(tmp_path: Path):
    np.save(tmp_path / "x.npy", np.arange(1000))
    data = DataConfig(kind="tokens", path=str(tmp_path / "x.npy"))
    with pytest.raises(ConfigError, match="holds id 500 at token 500"):
        DataRequest(data, seq_len=S, vocab_size=500, seed=0).prepare()


@pytest.mark.parametrize("kind", ["python-docs", "synthetic"])
def test_a_path_that_would_be_ignored_is_refused(kind: str):
    data = DataConfig(kind=kind, path="x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f'data.path=.x. is not used by data.kind="{kind}"; leave it out'):
        DataRequest(data, seq_len=S, vocab_size=256, seed=0).open()


def test_import_is_light():
    heavy = "{'torch', 'tokenizers', 'rich'}"
    command = f"import sys, moefold.data; print({heavy} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout == "set()\n"
