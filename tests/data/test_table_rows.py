"""Test the texts of table files: text stays text, each format is read, and broken files are named."""

import bz2
import gzip
import json
import lzma
from pathlib import Path

import pytest

from moefold.config.sections.data import DataConfig
from moefold.data.skip_corrupt import skipped_files
from moefold.data.sources.huggingface import text_tables
from moefold.data.sources.table_rows import text_rows
from moefold.errors import ConfigError

pa = pytest.importorskip("pyarrow")

ODD = [
    "hello world",
    "",
    "NA",
    "null",
    "nan",
    "007",
    "0123",
    "1e5",
    "1,000",
    "2024-01-01 00:00:00",
    "true",
    "-",
    "None",
]
"""Texts that readers of tables take for something else."""


def texts(file: Path, column: str = "text", start: int = 0) -> list[str]:
    return [text for _, text in text_rows(file, column, start)]


def documents(path: Path, split: str = "train", **keys: str) -> list[str]:
    tables = text_tables(DataConfig(kind="huggingface", path=str(path), **keys), split)
    return [text for text, _ in tables.documents(None)]


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_csv(path: Path, rows: list[str], separator: str = ",") -> Path:
    cells = ('"' + text.replace('"', '""') + '"' if set(text) & set(separator + '"\n') else text for text in rows)
    return write(path, f"id{separator}text\n" + "".join(f"{i}{separator}{cell}\n" for i, cell in enumerate(cells)))


def write_parquet(path: Path, **columns: object) -> Path:
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pa.table(columns), path, row_group_size=7)
    return path


def test_texts_stay_texts_in_every_format(tmp_path: Path):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in ODD)
    table = pa.table({"text": ODD})
    with pa.OSFile(str(tmp_path / "f.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    for file in (
        write_csv(tmp_path / "a.csv", ODD),
        write_csv(tmp_path / "a.tsv", ODD, "\t"),
        write(tmp_path / "a.jsonl", lines),
        write(tmp_path / "lines.json", lines),
        write(tmp_path / "a.json", json.dumps([{"text": text, "n": 1} for text in ODD])),
        write(tmp_path / "indented.json", json.dumps([{"text": text} for text in ODD], indent=1)),
        write(tmp_path / "columns.json", json.dumps({"text": ODD, "id": list(range(len(ODD)))}, indent=1)),
        write(tmp_path / "one_line.json", json.dumps({"id": list(range(len(ODD))), "text": ODD})),
        write(tmp_path / "compressed.csv.gz", gzip.compress((tmp_path / "a.csv").read_bytes())),
        write(tmp_path / "compressed.jsonl.bz2", bz2.compress(lines.encode())),
        write(tmp_path / "compressed.json.xz", lzma.compress((tmp_path / "a.json").read_bytes())),
        write(tmp_path / "compressed.csv.zst", pa.compress((tmp_path / "a.csv").read_bytes(), "zstd", asbytes=True)),
        write_parquet(tmp_path / "a.parquet", text=pa.array(ODD)),
        write_parquet(tmp_path / "large.parquet", text=pa.array(ODD, pa.large_string())),
        write_parquet(tmp_path / "dictionary.parquet", text=pa.array(ODD).dictionary_encode()),
        write(tmp_path / "compressed.parquet.gz", gzip.compress((tmp_path / "a.parquet").read_bytes())),
        tmp_path / "f.arrow",
    ):
        assert texts(file) == ODD, file.name
        assert texts(file, start=9) == ODD[9:], file.name
        assert documents(file) == [text for text in ODD if text], file.name


def test_csv_is_read_as_spreadsheets_write_it(tmp_path: Path):
    rows = ["two\nlines", 'a "quoted" word', "a, b", "x" * 300_000, "\u2028 stays", "end\r\nof line"]
    file = write_csv(tmp_path / "a.csv", rows)
    assert texts(file) == rows
    with_mark = write(tmp_path / "mark.csv", b"\xef\xbb\xbf" + file.read_bytes().rstrip(b"\n"))
    assert texts(with_mark, "id") == [str(i) for i in range(len(rows))]
    assert texts(write(tmp_path / "crlf.csv", 'text\r\n"a\r\nb"\r\n\r\nc\r\n')) == ["a\r\nb", "c"]
    assert texts(write(tmp_path / "mac.csv", "id,text\r1,a\r2,b")) == ["a", "b"]
    assert texts(write(tmp_path / "short.csv", "text,more\na\nb,c\n")) == ["a", "b"]


BROKEN = {
    "quote.csv": ('id,text\n1,a\n2,"b\n3,c\n', r'row 2 of .*quote.csv opens a quote \("\) that nothing closes'),
    "comma.csv": ("id,text\n1,a\n2,b, c\n", r"row 2 of .*comma.csv has 3 cells, and the first line names 2 columns"),
    "cell.csv": ("id,text\n1,a\n2\n", r"row 2 of .*cell.csv has no cell of the column 'text'"),
    "empty.csv": ("", r"empty.csv is empty"),
    "latin.csv": (b"id,text\n1,a\n2,caf\xe9\n", r"latin.csv:3 is not UTF-8"),
    "wide.csv": ("text\n".encode("utf-16"), r"wide.csv:1 is not UTF-8"),
    "cut.csv.gz": (gzip.compress(b"text\n" + b"abc\n" * 999)[:-9], r"cut.csv.gz is not a complete gzip file"),
    "cut.csv.xz": (lzma.compress(b"text\n" + b"abc\n" * 999)[:-9], r"cut.csv.xz is not a complete xz file"),
    "cut.csv.bz2": (bz2.compress(b"text\n" + b"abc\n" * 999)[:-9], r"cut.csv.bz2 is not a complete bzip2 file"),
    "cut.csv.zst": (pa.compress(b"text\n" * 999, "zstd", asbytes=True)[:-9], r"cut.csv.zst cannot be read"),
    "a.jsonl": ('{"text": "a"}\n{"text": \n', r"a.jsonl:2 is not JSON"),
    "twice.jsonl": ('{"text": "a", "text": "b"}\n', r"twice.jsonl:1 has the key 'text' twice"),
    "cut.json": ('[{"text": "a"},\n {"text": "b', r"cut.json:2 is not JSON"),
    "open.json": ('[{"text": "a"},\n {"text": "b"}', r"open.json:2 has no ',' where the JSON list needs one"),
    "two.json": ('[{"text": "a"}]\n[{"text": "b"}]', r"two.json:2 has text after its list"),
    "deep.json": ("[" * 100_000, r"deep.json:1 is not JSON \(it is nested "),
    "item.json": (
        '[{"text": "a"}, 3]',
        r"item.json:1 \(element 2\) holds a number, but every element must be an object",
    ),
    "scalar.json": ("3", r"scalar.json:1 holds a number, but every line must be an object"),
    "lists.json": ('{"text": ["a"]}\n{"text": ["b"]}\n', r"lists.json is neither JSON lines nor a list of objects"),
    "cut.arrow": (b"ARROW1\0\0abc", r"cut.arrow is damaged after row 0"),
    "cut.parquet": (b"PAR1 and no more", r"cut.parquet is not a complete parquet file"),
}
NO_TEXT = {
    "lists.jsonl": ('{"text": ["a"]}\n', r"lists.jsonl:1: column 'text' holds a list, not text"),
    "null.jsonl": ('{"text": "a"}\n{"text": null}\n', r"null.jsonl:2: column 'text' holds null, not text"),
    "number.jsonl": ('{"text": "a"}\n{"text": 7}\n', r"number.jsonl:2: column 'text' holds a number, not text"),
    "absent.jsonl": ('{"text": "a"}\n{"txt": "b"}\n', r"absent.jsonl:2 has no column 'text'; did you mean 'txt'"),
    "null.json": ('[{"text": "a"}, {"text": null}]', r"null.json:1 \(element 2\): column 'text' holds null, not text"),
    "absent.csv": ("id,txt\n1,a\n", r"data.column='text': .*absent.csv has no column 'text'; did you mean 'txt'"),
    "twice.csv": ("text,text\na,b\n", r"twice.csv has the column twice"),
}


@pytest.mark.parametrize("name", [*BROKEN, *NO_TEXT])
def test_a_broken_file_is_named_with_its_row(tmp_path: Path, name: str):
    content, words = (BROKEN | NO_TEXT)[name]
    with pytest.raises(ConfigError, match=words):
        texts(write(tmp_path / name, content))
    # In a folder it is the file that is named, too.
    write(tmp_path / "in" / name, content)
    with pytest.raises(ConfigError, match=words):
        documents(tmp_path / "in")
    # A mistake in the recipe is not damage, which may be left out.
    good = write_csv(tmp_path / "good.csv", ["fine"])
    data = DataConfig(kind="huggingface", path=(str(good), str(tmp_path / name)), corrupt="skip")
    if name in BROKEN:
        assert skipped_files(data) == {tmp_path / name}
    else:
        with pytest.raises(ConfigError, match=words):
            skipped_files(data)


def test_parquet_parts_may_differ_in_all_but_the_column(tmp_path: Path):
    write_parquet(tmp_path / "d" / "train-0.parquet", text=["a"] * 20, id=list(range(20)))
    write_parquet(tmp_path / "d" / "train-1.parquet", id=["x"], text=pa.array(["b"], pa.large_string()))
    write_parquet(tmp_path / "d" / "train-2.parquet", id=[[1]], text=["c"], more=[None])
    assert documents(tmp_path / "d") == ["a"] * 20 + ["b", "c"]
    write_parquet(tmp_path / "d" / "train-3.parquet", text=["d", None])
    with pytest.raises(ConfigError, match=r"train-3.parquet holds nothing, not text, in row 2"):
        documents(tmp_path / "d")
    write_parquet(tmp_path / "d" / "train-3.parquet", text=[1, 2])
    with pytest.raises(ConfigError, match=r"train-3.parquet holds int, not text, in row 1; name a column of text"):
        documents(tmp_path / "d")


def test_a_state_leads_to_its_row_in_any_file_of_a_folder(tmp_path: Path):
    for part in range(3):
        write_parquet(tmp_path / "d" / f"train-{part}.parquet", text=[f"{part} {row}" for row in range(20)])
    tables = text_tables(DataConfig(kind="huggingface", path=str(tmp_path / "d")), "train")
    found = list(tables.documents(None))
    for number in (0, 6, 7, 19, 20, 21, 59):
        state = json.loads(json.dumps(found[number][1]))
        assert list(tables.documents(state)) == found[number:]
        # A state of the package, which versions before wrote, gives the number of the row.
        assert list(tables.documents((0, number, {"examples_iterable": {}}))) == found[number:]


CARD = """---
license: mit
configs:
- config_name: en
  data_files:
  - split: train
    path: en/a*
  - split: held
    path: en/b.jsonl
- config_name: de
  data_dir: de
- config_name: both
  default: true
  data_files: ["*/a.jsonl"]
---
# Card
"""
FOLDERS = {
    # the files, which have their names as text; the files of each split, in order
    "one split": (["b.jsonl", "a.jsonl", "in/c.jsonl"], {"train": ["a.jsonl", "b.jsonl", "in/c.jsonl"]}),
    "names": (
        ["train-a.jsonl", "b_test.jsonl", "dev.jsonl"],
        {"train": ["train-a.jsonl"], "test": ["b_test.jsonl"], "validation": ["dev.jsonl"]},
    ),
    "folders": (["training/a.jsonl", "val/b.jsonl"], {"train": ["training/a.jsonl"], "validation": ["val/b.jsonl"]}),
    "shards": (
        ["data/train-00001-of-00002.jsonl", "data/train-00000-of-00002.jsonl", "data/mine-00000-of-00001.jsonl"],
        {
            "train": ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"],
            "mine": ["data/mine-00000-of-00001.jsonl"],
        },
    ),
    "hidden": (["a.jsonl", ".b.jsonl", "__MACOSX/c.jsonl", ".git/d.jsonl"], {"train": ["a.jsonl"]}),
    "others": (["a.jsonl", "b.jsonl", "LICENSE", "notes.csv"], {"train": ["a.jsonl", "b.jsonl"]}),
}


def write_folder(folder: Path, files: list[str]) -> Path:
    for name in files:
        write(folder / name, json.dumps({"text": name}) + "\n")
    return folder


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_has_the_splits_that_the_package_finds(tmp_path: Path, name: str):
    files, splits = FOLDERS[name]
    folder = write_folder(tmp_path / "d[1]" / "a*", files)
    assert {split: documents(folder, split) for split in splits} == splits
    with pytest.raises(ConfigError, match=r"data.split='nosuch' is not in .*; the splits are "):
        documents(folder, "nosuch")


def test_the_rules_for_folders_equal_the_package(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    for name, (files, splits) in FOLDERS.items():
        folder = write_folder(tmp_path / name.replace(" ", "-"), files)
        found = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"), streaming=True)
        assert {split: [row["text"] for row in rows] for split, rows in found.items()} == splits


def test_a_card_names_the_files_of_its_configurations(tmp_path: Path):
    folder = write_folder(tmp_path / "d", ["en/a.jsonl", "en/b.jsonl", "de/c.jsonl", "fr/a.jsonl"])
    write(folder / "README.md", CARD)
    assert documents(folder, subset="en") == ["en/a.jsonl"]
    assert documents(folder, "held", subset="en") == ["en/b.jsonl"]
    assert documents(folder, subset="de") == ["de/c.jsonl"]
    assert documents(folder) == ["en/a.jsonl", "fr/a.jsonl"]
    with pytest.raises(ConfigError, match=r"data.subset='it' is none of the configurations of .*: en, de, both"):
        documents(folder, subset="it")
    write(folder / "README.md", CARD.replace("default: true", "sep: x"))
    with pytest.raises(ConfigError, match=r"data.subset is empty, and must be one of .*: en, de, both"):
        documents(folder)
    with pytest.raises(ConfigError, match=r"README.md of .* sets 'sep' for its reader"):
        documents(folder, subset="both")
    write(folder / "README.md", "---\n{\n---\n")
    with pytest.raises(ConfigError, match=r"README.md has no YAML between its lines '---'"):
        documents(folder)
    (folder / "README.md").unlink()
    with pytest.raises(ConfigError, match=r"data.subset='en': the README.md of .* names no configurations"):
        documents(folder, subset="en")


def test_a_folder_without_one_format_is_refused_by_name(tmp_path: Path):
    folder = write_folder(tmp_path / "d", ["a.xml", "b.webp"])
    with pytest.raises(ConfigError, match=r"has no file in \.parquet.* for this split \(found: .webp, .xml\)"):
        documents(folder)
    write(folder / "a.csv", "text\nb\n")
    write(folder / "a.tsv", "text\nb\n")
    with pytest.raises(ConfigError, match=r"has as many files in .csv as in .tsv for this split; name the files"):
        documents(folder)
    write(folder / "stats.json", "{}")
    (folder / "a.tsv").unlink()
    assert documents(folder) == ["b"]
    assert documents(folder.parent / "d") == ["b"]


def test_lines_of_text_files_in_a_folder_are_rows(tmp_path: Path):
    write(tmp_path / "d" / "a.txt", "one\r\n\ntwo\u2028still two\nthree")
    assert documents(tmp_path / "d") == ["one", "two\u2028still two", "three"]
