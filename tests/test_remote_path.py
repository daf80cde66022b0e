"""Paths of remote files, on the file systems of fsspec that need no server: each case with memory:// and file://."""

import os
import pickle
import shutil
import uuid
from pathlib import Path

import pytest

from moefold.bounded_read import open_regular, read_bytes, read_json
from moefold.errors import ConfigError
from moefold.remote_copy import local_copy, upload_folder
from moefold.remote_path import (
    RemoteEntry,
    RemoteError,
    RemotePath,
    check_protocol,
    check_remote_writable,
    is_remote,
    to_path,
)


@pytest.fixture(params=["memory", "file"])
def root(request, tmp_path) -> RemotePath:
    """Return an empty remote folder."""
    name = uuid.uuid4().hex
    return RemotePath(f"memory://{name}" if request.param == "memory" else f"file://{tmp_path}/{name}")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Use an empty cache folder, and forget the copies of earlier tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    local_copy.cache_clear()
    return tmp_path / "cache" / "moefold" / "remote"


def test_names_are_urls_and_parts_of_them(root):
    path = root / "run" / "step-000100"
    assert str(path) == f"{root}/run/step-000100"
    assert (path.name, str(path.parent), path.parts[-1]) == ("step-000100", f"{root}/run", "step-000100")
    assert pickle.loads(pickle.dumps(path)) == path == to_path(str(path))
    assert isinstance(path.with_name("x"), RemotePath)
    assert path.resolve() == path.absolute() == path.expanduser() == path
    assert is_remote("s3://bucket/key")
    assert not is_remote("runs/x:y")
    assert to_path("runs/x") == Path("runs/x")
    assert not is_remote(to_path("runs/x"))


def test_files_and_folders_are_written_listed_and_deleted(root):
    folder = root / "a"
    assert not folder.exists()
    assert list(folder.glob("*")) == []
    (folder / "one.txt").write_text("hello")
    (folder / "sub" / "two.bin").write_bytes(b"x" * 100)
    with (folder / "three").open("wb") as file:
        file.write(b"12345" * 1000)
    assert folder.is_dir()
    assert not folder.is_file()
    assert (folder / "one.txt").is_file()
    assert (folder / "three").stat().st_size == 5000
    assert [(entry.name, entry.is_dir, entry.size_bytes) for entry in folder.entries()] == [
        ("one.txt", False, 5),
        ("sub", True, 0),
        ("three", False, 5000),
    ]
    assert list(folder.files()) == ["one.txt", "sub/two.bin", "three"]
    assert [path.name for path in folder.glob("t*")] == ["three"]
    (folder / "one.txt").rename(folder / "four.txt")
    assert (folder / "four.txt").read_text() == "hello"
    (folder / "four.txt").unlink()
    (folder / "four.txt").unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError):
        (folder / "four.txt").unlink()
    folder.delete_tree()
    folder.delete_tree()
    assert not folder.exists()
    check_remote_writable(root)
    assert not root.is_dir() or root.entries() == []


def test_bounded_readers_read_remote_files(root):
    path = root / "values.json"
    path.write_text('{"a": [1, 2]}')
    assert read_json(path, 100) == {"a": [1, 2]}
    with pytest.raises(OSError, match="more than the 5 bytes"):
        read_bytes(path, 5)
    with open_regular(path) as file:
        assert file.peek(1).startswith(b"{")
        assert (file.seek(-2, os.SEEK_END), file.read(), file.tell()) == (11, b"]}", 13)
    with pytest.raises(FileNotFoundError):
        open_regular(root / "none")
    (root / "folder" / "x").write_text("")
    with pytest.raises(IsADirectoryError):
        open_regular(root / "folder")


@pytest.mark.parametrize(
    "use",
    [open, os.stat, os.fspath, shutil.rmtree, lambda path: shutil.copyfile(path, "copy")],
    ids=["open", "stat", "fspath", "rmtree", "copyfile"],
)
def test_local_functions_refuse_a_remote_path(use):
    """Else they would make or read a local folder named `memory:`."""
    with pytest.raises(TypeError, match="is not a file of this machine"):
        use(RemotePath("memory://bucket/file"))


@pytest.mark.parametrize(
    "url",
    [
        *("reference://::file://refs.json", "reference://::memory://x", "simplecache://::http://127.0.0.1:1/x"),
        *("zip://a.txt::file:///tmp/x.zip", "tar://x::file:///tmp/a.tar", "jar://x", "libarchive://x"),
        *("blockcache://::file:///etc/passwd", "filecache://::file:///etc/passwd", "dir://::file:///tmp"),
        *("ssh://127.0.0.1/x", "github://a:b@/x", "git:///tmp/x:main@f", "generic://x", "data://x", "jlab://x"),
        *("dask://x", "python://x", "smb://x/y", "ftp://x/y", "S3://bucket/x", "wandb://x"),
    ],
)
def test_a_protocol_that_is_not_in_the_list_is_one_line(url):
    for use in (lambda: to_path(url).exists(), lambda: check_protocol(url, "data.path"), lambda: local_copy(url)):
        with pytest.raises(ConfigError, match="has the protocol '.*', which is none of") as refused:
            use()
        assert "\n" not in str(refused.value)


def test_two_colons_are_part_of_a_name_and_chain_nothing(tmp_path, cache):
    """fsspec would open `file:///etc/passwd` for the second name, and fill the templates of a reference file."""
    root = RemotePath(f"file://{tmp_path}/store")
    for name in ("a::b.txt", "simplecache::file:", "reference::x"):
        (root / name).write_text(name)
        assert (root / name).read_text() == name
        assert name in [entry.name for entry in root.entries()]
        assert Path(local_copy(str(root / name))).read_text() == name
    assert not RemotePath("memory://none::file:///etc/passwd").exists()
    with pytest.raises(ConfigError, match="has '::' in the name of its server or bucket; write one address"):
        RemotePath("s3://bucket::file:///etc/passwd").exists()


def test_a_file_system_that_cannot_connect_is_one_line(monkeypatch):
    import fsspec.implementations.memory

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no route\nto host")

    monkeypatch.setattr(fsspec.implementations.memory.MemoryFileSystem, "__init__", refuse)
    monkeypatch.setattr(fsspec.implementations.memory.MemoryFileSystem, "cachable", False)
    with pytest.raises(ConfigError, match="^data.path: 'memory://x' cannot be used: RuntimeError: no route to host"):
        check_protocol("memory://x", "data.path")


def test_a_missing_package_or_protocol_is_named(monkeypatch):
    with pytest.raises(ConfigError, match="has the protocol 'nope', which is none of abfs, .*; use one of them, or a"):
        RemotePath("nope://x/y").exists()
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(ConfigError, match=r"needs a package that is not installed: pip install s3fs"):
        RemotePath("s3://bucket/y").exists()
    with pytest.raises(ConfigError, match=r"checkpoint.dir: 's3://bucket/y' needs a package"):
        check_protocol("s3://bucket/y", "checkpoint.dir")
    check_protocol("auto", "checkpoint.resume")
    with pytest.raises(ConfigError, match="on the Hugging Face hub; name a folder"):
        to_path("hf://org/name")


def test_an_error_of_the_library_becomes_one_line_with_the_way_out(monkeypatch):
    from fsspec.implementations.memory import MemoryFileSystem

    def fail(self, path, **_):
        raise RuntimeError("the credentials\nare wrong")

    monkeypatch.setattr(MemoryFileSystem, "info", fail)
    with pytest.raises(RemoteError) as caught:
        RemotePath("memory://bucket/y").exists()
    assert isinstance(caught.value, OSError)
    assert isinstance(caught.value, ConfigError)
    assert str(caught.value) == (
        "'memory://bucket/y' cannot be used: RuntimeError: the credentials are wrong; check the name and the network"
    )
    assert "AWS_PROFILE" in str(RemoteError(5, "denied", "s3://bucket"))


def test_a_copy_follows_its_original(root, cache):
    (root / "data" / "a.txt").write_text("one")
    (root / "data" / "sub" / "b.txt").write_text("two")
    copy = local_copy(f"{root}/data")
    assert copy.is_relative_to(cache)
    assert (copy / "a.txt").read_text() + (copy / "sub" / "b.txt").read_text() == "onetwo"
    first = (copy / "a.txt").stat().st_ino
    (root / "data" / "sub" / "b.txt").write_text("three")
    (root / "data" / "a2.txt").write_text("four")
    assert local_copy(f"{root}/data") == copy
    assert (copy / "sub" / "b.txt").read_text() == "two", "a process looks at the remote side once"
    local_copy.cache_clear()
    local_copy(f"{root}/data")
    assert (copy / "sub" / "b.txt").read_text() == "three"
    assert (copy / "a.txt").stat().st_ino == first, "an unchanged file is not fetched again"
    (root / "data" / "a2.txt").unlink()
    local_copy.cache_clear()
    assert sorted(path.name for path in local_copy(f"{root}/data").rglob("*.txt")) == ["a.txt", "b.txt"]
    assert local_copy(f"{root}/data/a.txt") == copy / "a.txt"


@pytest.mark.parametrize("name", ["/b", "../b", "a/../../b"])
def test_a_key_that_leads_out_of_the_copy_is_refused(root, cache, monkeypatch, name):
    (root / "data" / "a.txt").write_text("one")
    entry = RemoteEntry(name, False, 3, 0.0)
    monkeypatch.setattr(RemotePath, "files", lambda self: {name: entry})
    with pytest.raises(ConfigError, match="whose name leads out of the folder"):
        local_copy(f"{root}/data")
    assert not [path for path in cache.rglob("*") if path.name == "b"]


def test_only_matching_files_are_copied_and_others_stay(root, cache):
    upload_folder_of(root / "m", {"tokenizer.json": "t", "weights": "w" * 1000, "config.json": "c"})
    copy = local_copy(f"{root}/m", ("tokenizer*",))
    assert [path.name for path in copy.iterdir()] == ["tokenizer.json"]
    local_copy(f"{root}/m")
    local_copy.cache_clear()
    local_copy(f"{root}/m", ("tokenizer*",))
    assert (copy / "weights").is_file()


def test_a_copy_of_nothing_is_refused(root, cache):
    with pytest.raises(ConfigError, match="does not exist, or is an empty folder"):
        local_copy(f"{root}/none")
    (root / "a" / "b").write_text("x")
    with pytest.raises(ConfigError, match=r"has '..' in its path"):
        local_copy(f"{root}/a/../../b")


def test_the_named_files_are_sent_last(root, tmp_path, monkeypatch):
    sent = []
    upload = RemotePath.upload
    monkeypatch.setattr(RemotePath, "upload", lambda self, source: (sent.append(source.name), upload(self, source)))
    upload_folder_of(root / "m", {"config.json": "c", "weights": "w", "z": "z"})
    assert sent == ["weights", "z", "config.json"]
    assert (root / "m" / "config.json").read_text() == "c"


def upload_folder_of(target: RemotePath, files: dict[str, str]) -> None:
    """Send files with these contents."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            Path(folder, name).write_text(text)
        upload_folder(Path(folder), target, last=("config.json",))
