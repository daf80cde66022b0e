"""The cache of tokenized text: equal tokens however text is cut, one writer, and no half-written entry."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moefold.cache_dir import cache_folders, default_cache_dir
from moefold.data.hf_tokenizer.tokenizer_folder import JsonTokenizer
from moefold.data.sources.text_source import text_corpus
from moefold.data.token_cache import cache_key, cached_tokens, is_complete
from moefold.data.tokenizer import ByteTokenizer, Tokenizer
from moefold.errors import ConfigError

from .conftest import make_text


class CountingTokenizer(ByteTokenizer):
    """Counts its work, and takes its time so that others come meanwhile."""

    def __init__(self) -> None:
        self.num_calls = 0

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        self.num_calls += 1
        time.sleep(0.2)
        return super().encode_batch(texts)


def make(folder: Path, cache: Path, tokenizer: Tokenizer | None = None) -> Path:
    return cached_tokens(text_corpus(str(folder)), tokenizer or ByteTokenizer(), cache_dir=cache, shows_progress=False)


def names(cache: Path) -> list[str]:
    return sorted(path.suffix for path in cache.iterdir())


def test_documents_end_with_the_separator(text_folder: Path, tmp_path: Path):
    tokens = np.load(make(text_folder, tmp_path / "cache"))
    files = [text_folder / name for name in ("a.txt", "b.txt", "inner/c.txt")]
    assert tokens.dtype == np.uint8
    assert tokens.tobytes() == b"".join(file.read_bytes() + b"\0" for file in files)


@pytest.mark.parametrize("special", [["<|endoftext|>"], []])
def test_tokenizer_json_with_and_without_separator(
    text_folder: Path, tmp_path: Path, make_tokenizer_file: Callable[..., Path], special: list[str]
):
    tokenizer = JsonTokenizer(make_tokenizer_file(*special))
    tokens = np.load(make(text_folder, tmp_path / "cache", tokenizer))
    files = [text_folder / name for name in ("a.txt", "b.txt", "inner/c.txt")]
    assert tokens.dtype == np.uint16
    separator = special[0] if special else ""
    assert tokenizer.decode(tokens) == "".join(file.read_text(encoding="utf-8") + separator for file in files)


def test_pieces_of_a_long_document_give_the_tokens_of_the_whole(
    tmp_path: Path, make_tokenizer_file: Callable[..., Path]
):
    text = make_text(180_000)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "long.txt").write_text(text)
    assert len(text) > 2**20
    tokenizer = JsonTokenizer(make_tokenizer_file())
    assert np.array_equal(np.load(make(tmp_path / "texts", tmp_path / "cache", tokenizer)), tokenizer.encode(text))


def test_second_time_is_found_and_untouched(text_folder: Path, tmp_path: Path):
    tokenizer = CountingTokenizer()
    first = make(text_folder, tmp_path / "cache", tokenizer)
    stamp = first.stat().st_mtime_ns
    assert make(text_folder, tmp_path / "cache", tokenizer) == first
    assert first.stat().st_mtime_ns == stamp
    assert tokenizer.num_calls == 1


def test_changed_text_or_tokenizer_is_another_entry(
    text_folder: Path, tmp_path: Path, make_tokenizer_file: Callable[..., Path]
):
    first = make(text_folder, tmp_path / "cache")
    other = make(text_folder, tmp_path / "cache", JsonTokenizer(make_tokenizer_file("<eos>")))
    (text_folder / "a.txt").write_text("changed")
    third = make(text_folder, tmp_path / "cache")
    assert len({first, other, third}) == 3


def test_many_at_once_do_the_work_once(text_folder: Path, tmp_path: Path):
    tokenizer = CountingTokenizer()
    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(make(text_folder, tmp_path / "cache", tokenizer)))
        for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(paths) == 5
    assert len(set(paths)) == 1
    assert tokenizer.num_calls == 1
    assert names(tmp_path / "cache") == [".lock", ".npy"]


PROCESS = """
import sys, time, zlib
from pathlib import Path
import numpy as np
from moefold.data.token_cache import cached_tokens
from moefold.data.sources.text_source import text_corpus
from moefold.data.tokenizer import ByteTokenizer

class Slow(ByteTokenizer):
    def encode_batch(self, texts):
        print("started", flush=True)
        time.sleep(float(sys.argv[3]))
        return super().encode_batch(texts)

path = cached_tokens(text_corpus(sys.argv[1]), Slow(), cache_dir=Path(sys.argv[2]), shows_progress=False)
print(path.name, zlib.crc32(np.load(path, mmap_mode="r").tobytes()))
"""


def start(folder: Path, cache: Path, delay_s: float) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", PROCESS, str(folder), str(cache), str(delay_s)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment)


def test_processes_at_once_agree(text_folder: Path, tmp_path: Path):
    processes = [start(text_folder, tmp_path / "cache", 0.5) for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len({output.splitlines()[-1] for output in outputs}) == 1
    assert sum(output.count("started") for output in outputs) == 1
    assert names(tmp_path / "cache") == [".lock", ".npy"]


def test_a_kill_leaves_nothing_that_is_taken_for_an_entry(text_folder: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    process = start(text_folder, cache, 60)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    assert names(cache) == [".lock", ".tmp"]
    entry = make(text_folder, cache)
    assert len(np.load(entry)) == sum(f.stat().st_size + 1 for f in text_folder.rglob("*.txt"))
    assert names(cache) == [".lock", ".npy", ".tmp"]


def test_an_old_unfinished_file_is_cleared_and_a_young_one_is_not(text_folder: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    cache.mkdir()
    for name in ("old.tmp", "young.tmp"):
        (cache / name).write_bytes(b"\x93NUMPY half")
    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(cache / "old.tmp", (two_days_ago, two_days_ago))
    make(text_folder, cache)
    assert not (cache / "old.tmp").exists()
    assert (cache / "young.tmp").exists()


@pytest.mark.parametrize("keep_bytes", [0, 50, 128, 5000])
def test_damaged_entry_is_rebuilt(text_folder: Path, tmp_path: Path, keep_bytes: int):
    entry = make(text_folder, tmp_path / "cache")
    whole = entry.read_bytes()
    entry.write_bytes(whole[:keep_bytes])
    assert not is_complete(entry)
    assert make(text_folder, tmp_path / "cache") == entry
    assert entry.read_bytes() == whole


def test_an_error_in_the_text_leaves_no_file(text_folder: Path, tmp_path: Path):
    (text_folder / "b.txt").write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(ConfigError, match="b.txt is not UTF-8"):
        make(text_folder, tmp_path / "cache")
    assert names(tmp_path / "cache") == [".lock"]


def test_a_folder_of_pictures_has_no_text(tmp_path: Path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "x.png").write_bytes(b"\0\0")
    with pytest.raises(ConfigError, match="data.path holds no text"):
        make(tmp_path / "texts", tmp_path / "cache")


@pytest.fixture
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_a_home_that_cannot_be_written_is_replaced_with_a_message(
    text_folder: Path, tmp_path: Path, temporary_folder: Path, caplog: pytest.LogCaptureFixture
):
    blocked = text_folder / "a.txt" / "cache"
    entry = make(text_folder, blocked)
    assert entry.parent == temporary_folder / f"moefold-{os.getuid()}"
    assert entry.parent.stat().st_mode & 0o777 == 0o700
    assert f"cannot be written in {blocked}" in caplog.text
    caplog.clear()
    assert make(text_folder, blocked) == entry
    assert not caplog.records


def test_no_folder_at_all_is_an_error(text_folder: Path, temporary_folder: Path, caplog: pytest.LogCaptureFixture):
    (temporary_folder / f"moefold-{os.getuid()}").write_text("in the way")
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(ConfigError, match=r"no folder .* can be written .*XDG_CACHE_HOME"),
    ):
        make(text_folder, text_folder / "a.txt" / "cache")


@pytest.mark.parametrize(
    "make_it", [lambda path: path.mkdir(mode=0o700) or path.chmod(0o770), lambda path: path.symlink_to("/")]
)
def test_a_temporary_folder_that_other_users_can_write_is_not_used(temporary_folder: Path, tmp_path: Path, make_it):
    make_it(temporary_folder / f"moefold-{os.getuid()}")
    assert cache_folders(tmp_path) == (tmp_path,)


def test_default_folder_follows_the_desktop_standard(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch/cache")
    assert default_cache_dir() == Path("/scratch/cache/moefold")
    for unset in ("", "relative/is/ignored"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert default_cache_dir() == Path("/home/someone/.cache/moefold")


def test_key_names_the_separator_too(text_folder: Path):
    class Other(ByteTokenizer):
        separator_id = 10

    corpus = text_corpus(str(text_folder))
    assert cache_key(corpus, ByteTokenizer()) != cache_key(corpus, Other())
