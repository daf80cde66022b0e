"""Names on the hub, against a local stand-in of its file API."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moefold.cli.main import main
from moefold.convert.preflight import weights_path
from moefold.errors import ConfigError
from moefold.hub import (
    check_repo_name,
    download_advice,
    files_to_push,
    is_hub_name,
    parse_hub_url,
    push_folder,
    repo_of_snapshot,
    snapshot,
)
from moefold.remote_copy import upload_folder
from moefold.remote_path import RemotePath
from tests.hub_server import Hub, Repo, hub_server

FILES = {
    "config.json": b'{"model_type": "mixtral"}',
    "model.safetensors": bytes(range(256)) * 1000,
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"old",
    "README.md": b"by hand\n",
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Run the server, with one model, one gated model and one data set. This process uses it with an empty cache."""
    from huggingface_hub import constants

    with hub_server() as server:
        server.repos["me/model"] = Repo(dict(FILES))
        server.repos["me/gated"] = Repo(dict(FILES), gated=True)
        server.repos["datasets/me/chats"] = Repo({"data/train.jsonl": b"{}\n", "README.md": b""})
        # The package reads the environment once, when it is imported.
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        snapshot.cache_clear()
        yield server
    snapshot.cache_clear()


def test_a_name_is_a_snapshot_without_other_formats(hub: Hub):
    folder = weights_path("hf://me/model")
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert repo_of_snapshot(str(folder)) == "me/model"
    asked = len(hub.requests)
    assert weights_path("hf://me/model") == folder
    assert len(hub.requests) == asked, "a process asks once for each name"
    sha = hub.repos["me/model"].sha
    assert snapshot(f"hf://me/model@{sha}", "model") == folder


def test_a_part_is_downloaded_by_itself(hub: Hub):
    assert [path.name for path in snapshot("hf://me/model", "model", patterns=("tokenizer*",)).iterdir()] == [
        "tokenizer.json"
    ]
    file = snapshot("hf://datasets/me/chats/data/train.jsonl", "model")
    assert file.read_bytes() == b"{}\n"
    assert snapshot("hf://me/chats/data", "dataset") == file.parent
    assert hub.downloads() == ["tokenizer.json", "train.jsonl"]
    with pytest.raises(ConfigError, match="has no 'nothing.json'"):
        snapshot("hf://me/model/nothing.json", "model")


def test_a_download_that_broke_off_is_continued(hub: Hub, monkeypatch):
    from huggingface_hub import constants

    # The package keeps whole chunks, which have 10 MB otherwise.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    hub.cut_after = 100_000
    folder = weights_path("hf://me/model")
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    ranges = [line.partition(" bytes=")[2] for line in hub.requests if "model.safetensors" in line and "bytes=" in line]
    assert len(ranges) == 1
    assert 0 < int(ranges[0].partition("-")[0]) <= 100_000


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf://me/gated", "'hf://me/gated' is gated: accept its terms on its page of the hub"),
        ("hf://me/nothing", "'hf://me/nothing' does not exist on the hub, or is private"),
        ("hf://me/model@v9", "'hf://me/model@v9': the repository has no such revision"),
        ("hf://a/b/../c", "must have the form hf://ORG/NAME"),
        ("hf:///model", "must have the form hf://ORG/NAME"),
    ],
)
def test_an_unreadable_path_is_named_with_the_way_out(hub: Hub, name, message):
    with pytest.raises(ConfigError, match=message):
        weights_path(name)


def test_without_network_the_cache_is_used(hub: Hub, monkeypatch):
    folder = weights_path("hf://me/model")
    snapshot.cache_clear()
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.requests)
    assert weights_path("hf://me/model") == folder
    assert len(hub.requests) == asked
    with pytest.raises(ConfigError, match="is not in the cache, and the hub cannot be reached"):
        weights_path("hf://me/other")


def test_names_are_parsed():
    assert parse_hub_url("hf://me/model@refs%2Fpr%2F1/sub/x", "model").revision == "refs/pr/1"
    assert parse_hub_url("hf://gpt2", "model").repo == "gpt2"
    assert parse_hub_url("hf://me/model//etc/x", "model").path == "etc/x", "no absolute path of this machine"
    assert parse_hub_url("hf://datasets/a/b", "model").kind == "dataset"
    assert repo_of_snapshot("/c/hub/models--a--b-c/snapshots/0123") == "a/b-c"
    assert repo_of_snapshot("/c/models/a") == ""
    assert check_repo_name("hf://me/model") == "me/model"
    for wrong in ("model", "a/b/c", "/me/model", "me/../x"):
        with pytest.raises(ConfigError, match="must have the form ORG/NAME"):
            check_repo_name(wrong)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return a folder to push, with a hidden file."""
    path = tmp_path / "out"
    path.mkdir()
    for name, content in FILES.items():
        (path / name).write_bytes(content)
    (path / ".cache").write_text("hidden")
    return path


def _push(folder: Path, repo: str, *, public: bool = False, overwrites: bool = False) -> str:
    pushed = push_folder(folder, repo, public=public, revision="", message="m", overwrites_card=overwrites)
    return pushed.url


def test_a_pushed_folder_can_be_read_back(hub: Hub, folder, monkeypatch):
    with pytest.raises(ConfigError, match=r"the hub denies access \(HTTP 401\); log in with a token"):
        _push(folder, "me/new")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert _push(folder, "me/new").endswith(hub.repos["me/new"].sha)
    assert hub.repos["me/new"].private
    assert hub.repos["me/new"].files == FILES
    back = weights_path("hf://me/new")
    assert (back / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert files_to_push(folder) == {name: len(FILES[name]) for name in sorted(FILES)}


@pytest.mark.parametrize(
    ("name", "target", "reason"),
    [
        ("notes.txt", "../id_rsa", "'notes.txt' is a link that leads out of the folder; remove it, or copy the file"),
        ("sub/notes.txt", "../../id_rsa", "'sub/notes.txt' is a link that leads out"),
        ("etcdir", "/etc", "'etcdir' is a link to no file"),
        ("inner", ".", "'inner' is a link to no file"),
        ("zero", "/dev/zero", "'zero' is a link to no file"),
        ("broken", "gone", "'broken' is a link to no file"),
    ],
)
def test_no_link_takes_another_file_along(hub: Hub, folder, monkeypatch, name, target, reason):
    monkeypatch.setenv("HF_TOKEN", hub.token)
    (folder.parent / "id_rsa").write_text("PRIVATE KEY")
    (folder / "sub").mkdir()
    (folder / name).symlink_to(target)
    with pytest.raises(ConfigError, match=reason):
        _push(folder, "me/new")
    assert not hub.blobs
    assert "me/new" not in hub.repos
    store = RemotePath(f"memory://links-{folder.parent.name}")
    with pytest.raises(ConfigError, match=reason):
        upload_folder(folder, store, last=())
    assert not store.exists()


def test_links_within_the_folder_and_a_cache_of_the_hub_are_sent_as_files(tmp_path):
    snapshot_dir = tmp_path / "models--org--name" / "snapshots" / "abcd"
    snapshot_dir.mkdir(parents=True)
    blob = snapshot_dir.parent.parent / "blobs" / "0123"
    blob.parent.mkdir()
    blob.write_text("{}")
    (snapshot_dir / "config.json").symlink_to("../../blobs/0123")
    (snapshot_dir / "again.json").symlink_to("config.json")
    assert files_to_push(snapshot_dir) == {"again.json": 2, "config.json": 2}
    # A folder named like a snapshot, in a stranger's folder, is not a cache.
    other = tmp_path / "snapshots" / "x"
    other.mkdir(parents=True)
    (other / "key.txt").symlink_to("../../models--org--name/blobs/0123")
    with pytest.raises(ConfigError, match="leads out"):
        files_to_push(other)


def test_an_edited_card_is_kept_and_sent_files_are_not_sent_again(hub: Hub, folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", hub.token)
    hub.refused_uploads = 1
    (folder / "second.safetensors").write_bytes(b"2" * 5000)
    with pytest.raises(ConfigError, match="'me/new'"):
        _push(folder, "me/new")
    hub.requests.clear()
    _push(folder, "me/new")
    sent = [line for line in hub.requests if line.startswith("PUT")]
    assert len(sent) == 1 or len(hub.blobs) == 2
    hub.repos["me/new"].files["README.md"] = b"edited"
    hub.requests.clear()
    _push(folder, "me/new")
    assert hub.repos["me/new"].files["README.md"] == b"edited"
    assert not [line for line in hub.requests if line.startswith("PUT")]
    _push(folder, "me/new", overwrites=True)
    assert hub.repos["me/new"].files["README.md"] == FILES["README.md"]


def test_a_public_repository_needs_the_option(hub: Hub, folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", hub.token)
    with pytest.raises(ConfigError, match="'me/model' is public: everyone could read the model; add --public"):
        _push(folder, "me/model")
    _push(folder, "me/model", public=True, overwrites=True)


def test_a_dry_run_lists_the_files(hub: Hub, folder, capsys):
    """A folder of adapters as well. The hub is not asked."""
    for name in ("config.json", "adapter_config.json"):
        (folder / "config.json").rename(folder / name)
        assert main(["push", str(folder), "hf://me/new", "--dry-run"]) == 0
        (folder / name).rename(folder / "config.json")
        said = capsys.readouterr().out
        assert f"MB  {name}" in said
        assert "would push 5 files, 0.000256 GB to me/new, private; nothing was sent" in said
    assert hub.requests == []
    (folder / "config.json").unlink()
    assert main(["push", str(folder), "me/new", "--dry-run"]) == 2
    assert "is not a complete checkpoint" in capsys.readouterr().err


@pytest.mark.slow
def test_the_commands_download_and_push(hub: Hub, folder, tmp_path):
    """The command line in a process of its own, which takes the address from the environment."""
    env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}

    def run(*words: str, token: str = "") -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "moefold", *words],
            env=env | ({"HF_TOKEN": token} if token else {}),
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )
        return done.returncode, done.stdout + done.stderr

    status, said = run("push", str(folder), "me/new", "--dry-run")
    assert status == 0
    assert "would push 5 files" in said
    assert "me/new" not in hub.repos
    status, said = run("push", str(folder), "me/new")
    assert status == 2
    assert "the hub denies access" in said
    status, said = run("push", str(folder), "me/new", token=hub.token)
    assert status == 0, said
    assert "pushed 5 files" in said
    status, said = run("import", "hf://me/nothing", "out2")
    assert status == 2
    assert "does not exist on the hub" in said


@pytest.mark.parametrize(
    ("name", "bare", "found"),
    [
        ("mistralai/Mixtral-8x7B-v0.1", False, True),
        ("gpt2", True, True),
        ("gpt2", False, False),
        ("runs/quickstart", False, False),
        ("./a/b", False, False),
        ("/a", True, False),
        ("a/b/c", True, False),
        ("~/model", False, False),
        ("corpus/train.parquet", False, False),
        ("tokenizer.json", True, False),
        ("a b/c", False, False),
        ("a/b;rm", False, False),
        ("", True, False),
    ],
)
def test_names_on_the_hub_are_told_from_paths(name, bare, found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_name(name, allows_bare_name=bare) is found
    assert bool(download_advice(name, allows_bare_name=bare)) is found


def test_a_misspelt_file_of_an_existing_folder_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert not is_hub_name("mine/modle")


def test_the_advice_is_the_name_to_write():
    assert download_advice("allenai/c4", "dataset").endswith("'hf://datasets/allenai/c4' downloads it")
    assert download_advice("me/model").endswith("'hf://me/model' downloads it")
