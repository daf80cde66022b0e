"""The check of data before training finds bad data in little time and imports nothing heavy."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moefold.config.sections.data import DataConfig
from moefold.data.dataset import DataRequest
from moefold.data.tokenize_input import input_files
from moefold.data.validate_source import check_data
from moefold.errors import ConfigError
from tests.clock import processor_s


def check(seq_len: int = 16, vocab_size: int = 256, **settings: object) -> None:
    check_data(DataRequest(DataConfig(**settings), seq_len=seq_len, vocab_size=vocab_size, seed=0))  # type: ignore[arg-type]


def test_good_data_passes(text_folder: Path, tmp_path: Path, make_tokenizer_file: Callable[..., Path]):
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "x.bin")
    check()
    check(kind="synthetic", vocab_size=3)
    check(kind="text", path=str(text_folder))
    check(kind="text", path=str(text_folder), tokenizer=str(make_tokenizer_file()), vocab_size=350)
    check(kind="tokens", path=str(tmp_path / "x.bin"), vocab_size=99)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "text"}, "data.path is empty"),
        ({"kind": "text", "path": "{folder}/inner/d.txt"}, "does not exist; did you mean"),
        ({"kind": "text", "path": "{folder}/bare"}, "holds no text file"),
        ({"kind": "text", "path": "{folder}/pictures"}, "holds no text file"),
        ({"kind": "text", "path": "{folder}/pictures/x.png"}, "is not text: it holds zero bytes"),
        ({"kind": "text", "path": "{folder}/lines/x.jsonl"}, r'x\.jsonl holds JSON lines, .* set data.kind="sft" for'),
        ({"kind": "text", "path": "{folder}/lines/y.txt"}, r"y\.txt holds JSON lines, .*`moefold tokenize .*y\.txt"),
        ({"kind": "text", "path": "{folder}/rows"}, "rows holds JSON lines"),
        (
            {"kind": "text", "path": "{folder}/saved"},
            'saved is a data set that save_to_disk .*kind="huggingface" reads',
        ),
        (
            {"kind": "text", "path": "{folder}/splits"},
            'splits is a data set that save_to_disk .*"huggingface" reads it',
        ),
        ({"kind": "text", "path": "{folder}/mds"}, "mds/train holds shards of mosaicml-streaming, which are not read"),
        ({"kind": "text", "path": "{folder}/mds/train"}, "mds/train holds shards of mosaicml-streaming"),
        ({"kind": "huggingface", "path": "{folder}/mds"}, "mds/train holds shards of mosaicml-streaming"),
        ({"kind": "text", "path": "{folder}/empty"}, "is empty; name files with text"),
        (
            {"kind": "text", "path": "{folder}/a.txt", "seq_len": 100_000},
            "train.seq_len=100000 needs samples of 100001",
        ),
        ({"kind": "text", "path": "{folder}", "vocab_size": 128}, "must be at least the tokenizer's 256"),
        ({"kind": "tokens", "path": "{folder}/inner"}, "holds no .bin or .npy file"),
        ({"kind": "tokens", "path": "{folder}/a.txt"}, "must end in .bin or .npy"),
        ({"kind": "tokens", "path": "{folder}/tokens/x.npy", "seq_len": 40}, "the data has 40"),
        ({"kind": "tokens", "path": "{folder}/tokens/x.npy", "seq_len": 20}, "leaves no training sample"),
        ({"kind": "text", "path": "{folder}", "validation_fraction": 1.0}, "must be at least 0 and below 1"),
        ({"kind": "synthetic", "validation_fraction": -1.0}, "must be at least 0 and below 1"),
        ({"kind": "synthetic", "path": "x"}, "is not used by"),
        ({"path": "x"}, "is not used by"),
        ({"tokenizer": "{folder}/none.json"}, "does not exist"),
        ({"vocab_size": 200}, "set model.vocab_size=256 or more"),
    ],
)
def test_bad_data_is_refused(text_folder: Path, settings: dict[str, object], message: str):
    for name in ("bare", "pictures", "empty", "tokens", "lines", "rows"):
        (text_folder / name).mkdir()
    (text_folder / "pictures" / "x.png").write_bytes(b"\0\0")
    (text_folder / "empty" / "x.txt").touch()
    for name in ("lines/x.jsonl", "lines/y.txt", "rows/x.jsonl", "rows/y.ndjson"):
        (text_folder / name).write_text('{"text": "one"}\n{"text": "two"}\n' * 20, encoding="utf-8")
    np.save(text_folder / "tokens" / "x.npy", np.zeros(40, dtype=np.int32))
    _write_data_sets(text_folder)
    filled = {
        key: value.format(folder=text_folder) if isinstance(value, str) else value for key, value in settings.items()
    }
    with pytest.raises(ConfigError, match=message):
        check(**filled)  # type: ignore[arg-type]


def _write_data_sets(folder: Path) -> None:
    """Write the descriptions that `datasets` and mosaicml-streaming put next to their binary files."""
    for name, text in {
        "saved/data-00000-of-00001.arrow": "\0",
        "saved/dataset_info.json": '{\n  "features": {}\n}',
        "saved/state.json": '{\n  "_split": null\n}',
        "splits/dataset_dict.json": '{"splits": ["train"]}',
        "mds/train/index.json": '{"shards": [{"format": "mds"}], "version": 2}\n',
        "mds/train/shard.00000.mds": "\0",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "message"), [("saved", "save_to_disk"), ("splits", "save_to_disk"), ("mds", "mosaicml-streaming")]
)
def test_tokenize_refuses_data_sets_whose_descriptions_are_json(tmp_path: Path, name: str, message: str):
    _write_data_sets(tmp_path)
    with pytest.raises(ConfigError, match=rf"INPUT: .*{name}.* {message}"):
        input_files([str(tmp_path / name)], "auto", tmp_path / "out")


@pytest.mark.parametrize(
    "text",
    ['{"shards": 3, "version": 2}', '{"shards": []}', "[1]", "{", "\0", '{"pages": []}'],
    ids=["number", "version", "list", "broken", "binary", "other"],
)
def test_another_index_of_a_folder_of_text_stays_text(text_folder: Path, text: str):
    for name in ("index.json", "state.json"):
        (text_folder / name).write_text(text, encoding="utf-8")
    check(kind="text", path=str(text_folder))


def test_a_gigabyte_is_checked_at_once(tmp_path: Path):
    for name in ("big.bin", "big.txt"):
        with (tmp_path / name).open("wb") as file:
            file.write(b"text" * 4096)
            file.truncate(2**30)
    start_s = processor_s()
    check(kind="tokens", path=str(tmp_path / "big.bin"))
    check(kind="text", path=str(tmp_path / "big.txt"))
    assert processor_s() - start_s < 1.0


def test_check_imports_nothing_heavy():
    command = (
        "import sys; from moefold.config.schema import Config; from moefold.data.dataset import DataRequest; "
        "from moefold.data.validate_source import check_data; check_data(DataRequest.of(Config())); "
        "print({'torch', 'tokenizers', 'rich'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout == "set()\n"


@pytest.mark.parametrize(
    "text", ["{ braces }\nand more text\n", "[1, 2]\nand more text\n", '{\n  "a": 1\n}\n  and more']
)
def test_text_that_begins_with_a_brace_is_text(tmp_path: Path, text: str):
    (tmp_path / "x.txt").write_text(text, encoding="utf-8")
    (tmp_path / "x.jsonl").write_text('{"text": "beside text"}\n', encoding="utf-8")
    check(kind="text", path=str(tmp_path / "x.txt"))
    check(kind="text", path=str(tmp_path))
