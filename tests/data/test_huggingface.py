"""Data sets of the hub give their rows, cached and streamed, with states that lead to each row."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moefold.cache_dir import default_cache_dir
from moefold.config.sections.data import DataConfig
from moefold.data.dataset import DataRequest, Dataset
from moefold.data.sources.huggingface import text_tables
from moefold.data.validate_source import check_data
from moefold.errors import ConfigError, install_command

from .conftest import make_text

datasets = pytest.importorskip("datasets")

S = 32
TEXTS = [make_text(3 + i % 20, i) + "é☃"[: i % 3] for i in range(60)]


def as_jsonl(folder: Path) -> Path:
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(TEXTS)))
    return path


def as_parquet(folder: Path) -> Path:
    table().to_parquet(str(folder / "a.parquet"))
    return folder / "a.parquet"


def as_csv(folder: Path) -> Path:
    table().to_csv(str(folder / "a.csv"), index=False)
    return folder / "a.csv"


def as_saved(folder: Path) -> Path:
    table().save_to_disk(str(folder / "saved"))
    return folder / "saved"


def as_arrow(folder: Path) -> Path:
    return next(as_saved(folder).glob("*.arrow"))


def as_saved_splits(folder: Path) -> Path:
    other = datasets.Dataset.from_dict({"text": ["held out " * 20] * 9})
    datasets.DatasetDict({"train": table(), "test": other}).save_to_disk(str(folder / "splits"))
    return folder / "splits"


def as_folder(folder: Path) -> Path:
    inner = folder / "files"
    inner.mkdir()
    table().to_parquet(str(inner / "train-00000-of-00001.parquet"))
    datasets.Dataset.from_dict({"text": ["held out " * 20] * 9}).to_parquet(str(inner / "test-00000-of-00001.parquet"))
    return inner


FORMS = [as_jsonl, as_parquet, as_csv, as_saved, as_arrow, as_saved_splits, as_folder]


def table() -> object:
    return datasets.Dataset.from_dict({"id": list(range(len(TEXTS))), "text": TEXTS})


def recipe(*paths: Path, **changes: object) -> DataConfig:
    path = str(paths[0]) if len(paths) == 1 else tuple(map(str, paths))
    return DataConfig(kind="huggingface", path=path, **{"validation_fraction": 0.0, "shuffle": False} | changes)


def open_data(data: DataConfig) -> Dataset:
    return DataRequest(data, seq_len=S, vocab_size=512, seed=0).open()


def text_of(dataset: Dataset, count: int) -> str:
    return dataset.tokenizer.decode(np.concatenate([dataset.train.sample(i)[:-1] for i in range(count)]))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_its_rows_cached_and_streamed(tmp_path: Path, form: Callable[[Path], Path]):
    path = form(tmp_path)
    check_data(DataRequest(recipe(path), seq_len=S, vocab_size=256, seed=0))
    joined = "".join(text + "\0" for text in TEXTS)
    cached = open_data(recipe(path))
    count = len(cached.train)
    assert count == (len(joined.encode()) - 1) // S
    cut = joined.encode()[: count * S].decode(errors="replace")
    assert text_of(cached, count) == cut
    assert len(list(default_cache_dir().glob("*.npy"))) == 1
    streamed = open_data(recipe(path, streaming=True))
    assert text_of(streamed, count) == cut
    assert len(list(default_cache_dir().glob("*.npy"))) == 1


@pytest.mark.parametrize("form", [as_jsonl, as_parquet, as_saved])
def test_documents_come_with_states_that_lead_to_them(tmp_path: Path, form: Callable[[Path], Path]):
    tables = text_tables(recipe(form(tmp_path), as_csv(tmp_path)), "train")
    found = list(tables.documents(None))
    assert [text for text, _ in found] == TEXTS + TEXTS
    for number in (0, 1, 37, 59, 60, 61, 119):
        state = json.loads(json.dumps(found[number][1]))
        assert [text for text, _ in tables.documents(state)] == (TEXTS + TEXTS)[number:]


def test_a_split_to_evaluate_on(tmp_path: Path):
    path = as_saved_splits(tmp_path)
    for streaming in (False, True):
        data = recipe(path, validation_split="test", streaming=streaming)
        dataset = open_data(data)
        held_out = [dataset.tokenizer.decode(dataset.validation.sample(i)) for i in range(len(dataset.validation))]
        assert len(held_out) == (9 * 181 - 1) // S
        assert all("held out" in text for text in held_out)
        assert "held out" not in text_of(dataset, 20)


def test_changed_file_column_or_split_is_retokenised(tmp_path: Path):
    path = as_saved_splits(tmp_path)
    first = DataRequest(recipe(path), seq_len=S, vocab_size=512, seed=0).prepare()
    again = DataRequest(recipe(path), seq_len=S, vocab_size=512, seed=0).prepare()
    other = DataRequest(recipe(path, split="test"), seq_len=S, vocab_size=512, seed=0).prepare()
    assert first == again != other


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_an_unknown_column_is_named_with_the_nearest(tmp_path: Path, form: Callable[[Path], Path], streaming: bool):
    data = recipe(form(tmp_path), column="txt", streaming=streaming)
    with pytest.raises(ConfigError, match="data.column='txt': .* no column 'txt'; did you mean 'text'"):
        DataRequest(data, seq_len=S, vocab_size=256, seed=0).prepare()


def test_unreadable_rows_are_named(tmp_path: Path):
    broken = as_jsonl(tmp_path).rename(tmp_path / "b.jsonl")
    broken.write_text(broken.read_text() + '{"text": oops}\n')
    numbers = tmp_path / "n.parquet"
    datasets.Dataset.from_dict({"text": ["a", None]}).to_parquet(str(numbers))
    cut = tmp_path / "c.parquet"
    cut.write_bytes(as_parquet(tmp_path).read_bytes()[:-100])
    splits = as_saved_splits(tmp_path)
    for data, words in (
        (recipe(broken), r"b.jsonl:61 is not JSON"),
        (recipe(numbers), r"holds nothing, not text, in row 2"),
        (recipe(cut), r"c.parquet is not a complete parquet file .*; copy it again"),
        (recipe(splits, split="tset"), r"data.split='tset' is not in .*; did you mean 'test'"),
    ):
        with pytest.raises(ConfigError, match=words):
            DataRequest(data, seq_len=S, vocab_size=256, seed=0).prepare()


@pytest.mark.parametrize("streaming", [False, True])
def test_a_text_that_is_not_utf8_is_named_with_file_and_row(tmp_path: Path, streaming: bool):
    import pyarrow.parquet

    column = pyarrow.array([b"fine"] * 30 + [b"bad \xff"], type=pyarrow.binary()).view(pyarrow.string())
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "b.parquet").write_bytes(as_parquet(tmp_path).read_bytes())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "in" / "a.parquet")
    with pytest.raises(ConfigError, match=r"in/a.parquet: column 'text' holds no UTF-8 in row 31 .*; fix the text"):
        open_data(recipe(tmp_path / "in", streaming=streaming)).train.sample(0)


def test_paths_are_checked_before_anything_is_read(tmp_path: Path):
    jsonl = as_jsonl(tmp_path)
    saved = as_saved(tmp_path)
    (tmp_path / "a.xyz").write_text("x")
    for data, words in (
        (recipe(tmp_path / "a.jsnl"), r"did you mean '.*a.jsonl'"),
        (recipe(Path("missing.parquet")), r"missing.parquet' does not exist"),
        (recipe(tmp_path / "a.xyz"), r"must end in .parquet"),
        (recipe(jsonl, split="test"), r"whose only split is 'train'"),
        (recipe(jsonl, validation_split="test"), r"whose only split is 'train'"),
        (recipe(jsonl, jsonl), r"reaches .* twice"),
        (recipe(jsonl, revision="abc"), r"data.revision='abc' has no effect: nothing in data.path=.* is on the hub"),
        (recipe(tmp_path, revision="abc"), r"data.revision='abc' has no effect"),
        (recipe(jsonl, subset="en"), r"data.subset='en' has no effect: .* is a file or a saved data set"),
        (recipe(saved, subset="en"), r"data.subset='en' has no effect"),
        (DataConfig(kind="huggingface"), r"data.path is empty"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_data(DataRequest(data, seq_len=S, vocab_size=256, seed=0))
    (tmp_path / "plain").mkdir()
    for path in ("owner/name", (str(jsonl), "owner/name"), str(tmp_path / "plain")):
        check_data(
            DataRequest(DataConfig(kind="huggingface", path=path, subset="en"), seq_len=S, vocab_size=256, seed=0)
        )
    check_data(
        DataRequest(
            DataConfig(kind="huggingface", path=(str(jsonl), "owner/name"), revision="a"),
            seq_len=S,
            vocab_size=256,
            seed=0,
        )
    )


def test_a_data_set_on_the_hub_is_asked_for_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Without a network the package refuses; the message has to name the data set.
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"data.path='owner/none-such' \(split 'train'\) cannot be read"):
        open_data(DataConfig(kind="huggingface", path="owner/none-such"))


def test_the_missing_package_is_named_with_its_extra(tmp_path: Path):
    code = (
        "import sys, importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'datasets' else find(name, *rest)\n"
        "from moefold.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    (tmp_path / "r.toml").write_text(f'[data]\nkind = "huggingface"\npath = "{as_jsonl(tmp_path)}"\n')
    words = ["train", str(tmp_path / "r.toml"), f"run.dir={tmp_path / 'run'}"]
    refused = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "needs the package datasets" in refused.stderr
    assert install_command("hf") in refused.stderr


def test_mixtures_have_their_shares_in_every_part(tmp_path: Path):
    paths = []
    for name in ("a", "b"):
        datasets.Dataset.from_dict({"text": [name * 100] * 100}).to_parquet(str(tmp_path / f"{name}.parquet"))
        paths.append(tmp_path / f"{name}.parquet")
    for streaming in (False, True):
        data = recipe(*paths, weights=(1.0, 4.0), streaming=streaming)
        dataset = open_data(data)
        found = [dataset.tokenizer.decode(dataset.train.sample(i)) for i in range(100)]
        assert 78 <= sum("b" in text for text in found) <= 82
    data = recipe(*paths, weights=(1.0, 4.0), validation_fraction=0.2)
    validation = open_data(data).validation
    found = [dataset.tokenizer.decode(validation.sample(i)) for i in range(len(validation))]
    assert len(found) > 40
    assert sum("b" in text for text in found) / len(found) == pytest.approx(0.8, abs=0.05)
