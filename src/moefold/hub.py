"""Names on the Hugging Face hub: `hf://ORG/NAME[@REVISION][/PATH]` is a snapshot on this machine.

Snapshots are in the hub's own cache (HF_HOME), shared with transformers. An interrupted download can be resumed.
HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE work as in every program that uses the hub.
"""

import importlib.util
import re
import sys
from dataclasses import dataclass
from functools import cache
from glob import escape
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

from moefold import __version__
from moefold.errors import ConfigError, install_command
from moefold.folder_files import list_files
from moefold.remote_path import HUB_SCHEME

HubKind = Literal["model", "dataset"]
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_NAME = re.compile(rf"(?:(datasets)/)?({_PART}/{_PART}|{_PART})(?:@([^/]+))?(?:/+([^/].*))?")
_REPO = re.compile(rf"{_PART}/{_PART}")
CARD_FILE = "README.md"
"""File name of the model card."""
UNUSED_FILES = (
    *("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.gguf", "*.ot", "*.tflite", "*.mlmodel"),
    *("original/*", "metal/*", "consolidated*.safetensors", "*.png", "*.jpg", "*.gif", "*.pdf", "*.mp4"),
)
"""Files of a model repository that are not downloaded: other formats of the same weights, and pictures."""
CONFIG_PATTERNS = ("config.json", "*.safetensors.index.json")
"""Files that are downloaded if only the sizes of a model are read."""
_FILE_ENDINGS = frozenset(
    {".arrow", ".bin", ".csv", ".gz", ".jinja", ".json", ".jsonl", ".md", ".ndjson", ".npy", ".parquet", ".py"}
    | {".safetensors", ".toml", ".tsv", ".txt", ".zst"}
)
_LOCAL_FOLDER_NAMES = frozenset({"checkpoints", "data", "recipes", "runs", "src", "tests", "tokens"})
"""Common first folders of local paths. A misspelled path below one of these is not a hub name."""


@dataclass(frozen=True)
class HubName:
    """Parsed name on the hub."""

    repo: str
    """ORG/NAME, or only NAME for some old repositories."""
    kind: HubKind
    revision: str | None
    """Branch, tag or commit. None means the default branch."""
    path: str
    """File or folder inside the repository. Empty means the whole repository."""


def is_hub_name(name: str, *, allows_bare_name: bool = False) -> bool:
    """Return whether a non-local name has the form of a hub name: "owner/name", or "gpt2" with `allows_bare_name`."""
    parts = name.split("/")
    if len(parts) not in ((1, 2) if allows_bare_name else (2,)) or not all(re.fullmatch(_PART, part) for part in parts):
        return False
    if Path(name).suffix.lower() in _FILE_ENDINGS or (len(parts) == 2 and parts[0] in _LOCAL_FOLDER_NAMES):
        return False
    # If the first folder exists, the name is a misspelled local path.
    return len(parts) == 1 or not Path(parts[0]).exists()


def download_advice(name: str, kind: HubKind = "model", *, allows_bare_name: bool = False) -> str:
    """Return the advice to name a repository on the Hugging Face hub, or "" if the name cannot be a hub name.

    Args:
        name: the user's text, which is not a local path.
        kind: what the repository holds.
        allows_bare_name: whether a name without an owner is allowed: some old tokenizers have such names.
    """
    if not is_hub_name(name, allows_bare_name=allows_bare_name):
        return ""
    prefix = f"{HUB_SCHEME}datasets/" if kind == "dataset" else HUB_SCHEME
    return f"it reads like a name on the Hugging Face hub: '{prefix}{name}' downloads it"


def is_hub_url(name: object) -> bool:
    """Return whether a name begins with hf://."""
    return isinstance(name, str) and name.startswith(HUB_SCHEME)


def parse_hub_url(url: str, kind: HubKind) -> HubName:
    """Parse hf://[datasets/]ORG/NAME[@REVISION][/PATH]. A slash in a revision is written %2F.

    Args:
        kind: kind of a name without "datasets/".

    Raises:
        ConfigError: the name has another form.
    """
    match = _NAME.fullmatch(url.removeprefix(HUB_SCHEME).rstrip("/"))
    if match is None or ".." in (match[4] or "").split("/"):
        raise ConfigError(f"{url!r} must have the form hf://ORG/NAME or hf://ORG/NAME@REVISION, with a path after it")
    return HubName(match[2], "dataset" if match[1] else kind, unquote(match[3]) if match[3] else None, match[4] or "")


def repo_of_snapshot(path: str) -> str:
    """Return ORG/NAME of the model of a snapshot in the hub's cache, or empty for another path."""
    match = re.search(r"(?:^|/)models--([^/]+)/snapshots/[^/]+", path)
    return match[1].replace("--", "/", 1) if match else ""


def check_repo_name(name: str) -> str:
    """Return ORG/NAME of a repository for an upload. A prefix hf:// is accepted.

    Raises:
        ConfigError: the name has another form.
    """
    repo = name.removeprefix(HUB_SCHEME)
    if not _REPO.fullmatch(repo):
        raise ConfigError(
            f"{name!r} must have the form ORG/NAME: your name or organisation on the hub, and the model's"
        )
    return repo


@cache
def snapshot(url: str, kind: HubKind, *, patterns: tuple[str, ...] = ()) -> Path:
    """Download the file or folder of a name on the hub, unless it is cached, and return the local path.

    A process queries the hub once for each name. Without network, or with HF_HUB_OFFLINE=1, the cache is used.

    Args:
        url: the name, see `parse_hub_url`.
        kind: kind of a name without "datasets/".
        patterns: files to download. Empty means all except `UNUSED_FILES` for a model, all for a data set.

    Raises:
        ConfigError: the package is missing, or the repository, revision or path does not exist, needs permission, or
            cannot be reached and is not in the cache.
    """
    name = parse_hub_url(url, kind)
    check_hub_package(url)
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    if name.path:
        patterns = (escape(name.path), f"{escape(name.path)}/*")
    try:
        folder = snapshot_download(
            name.repo,
            repo_type=name.kind,
            revision=name.revision,
            allow_patterns=list(patterns) or None,
            ignore_patterns=list(UNUSED_FILES) if name.kind == "model" and not patterns else None,
            library_name="moefold",
            library_version=__version__,
        )
    except Exception as error:
        # The package, its network library and the file system raise many types.
        raise hub_error(url, error) from error
    path = Path(folder, name.path)
    if not path.exists():
        raise ConfigError(f"{url!r} has no {name.path!r}; name a file or folder of the repository {name.repo}")
    return path


def files_to_push(folder: Path) -> dict[str, int]:
    """Return the size of each file of a folder in bytes, by relative name, without hidden files.

    Raises:
        ConfigError: there is no file, or a file is a link out of the folder.
    """
    files = {name: path.stat().st_size for name, path in list_files(folder, hidden=False).items()}
    if not files:
        raise ConfigError(f"{str(folder)!r} has no file to push")
    return files


@dataclass(frozen=True)
class PushResult:
    """Result of an upload."""

    url: str
    """URL of the commit."""
    keeps_card: bool
    """True if the README.md of the repository was kept instead of the folder's."""


def push_folder(
    folder: Path, repo: str, *, public: bool, revision: str, message: str, overwrites_card: bool
) -> PushResult:
    """Upload the files of a folder to a model repository by one commit.

    The repository is created if it does not exist. Large files from an interrupted upload are not sent again.

    Args:
        repo: ORG/NAME.
        public: whether everyone may read the repository.
        revision: branch to commit to, created if it does not exist. Empty means the default branch.
        overwrites_card: replace a different README.md of the repository, which a user may have edited.

    Raises:
        ConfigError: the folder has no file or a link out of it, the hub denies access, the repository is public and
            `public` is not set, or a transfer fails.
    """
    check_hub_package(repo)
    names = [escape(name) for name in files_to_push(folder)]
    from huggingface_hub import HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    api = HfApi(library_name="moefold", library_version=__version__)
    try:
        created = api.create_repo(repo, repo_type="model", private=not public, exist_ok=True)
        info = api.repo_info(created.repo_id, repo_type="model")
        if not info.private and not public:
            raise ConfigError(f"{repo!r} is public: everyone could read the model; add --public if you mean it")
        if revision:
            api.create_branch(created.repo_id, branch=revision, exist_ok=True)
        existing = {sibling.rfilename for sibling in getattr(info, "siblings", None) or ()}
        keeps_card = CARD_FILE in existing and not overwrites_card
        commit = api.upload_folder(
            repo_id=created.repo_id,
            folder_path=folder,
            commit_message=message,
            revision=revision or None,
            allow_patterns=names,
            ignore_patterns=[CARD_FILE] if keeps_card else None,
        )
    except ConfigError:
        raise
    except Exception as error:
        # The package, its network library and the file system raise many types.
        raise hub_error(repo, error) from error
    return PushResult(str(commit.commit_url), keeps_card)


def check_hub_package(name: str) -> None:
    """Raise ConfigError if the package huggingface_hub is missing."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ConfigError(
            f"{name!r} needs the package huggingface_hub, which is not installed; install the extra hf: "
            + install_command("hf")
        )


def hub_error(name: str, error: Exception) -> ConfigError:
    """Turn an error of huggingface_hub into a message with the way out."""
    from huggingface_hub import errors

    line = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, errors.GatedRepoError):
        return ConfigError(f"{name!r} is gated: accept its terms on its page of the hub, then log in: hf auth login")
    if isinstance(error, errors.RevisionNotFoundError):
        return ConfigError(f"{name!r}: the repository has no such revision; name a branch, a tag or a commit after @")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ConfigError(
            f"{name!r} does not exist on the hub, or is private; check the name, or log in: hf auth login"
        )
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return ConfigError(
            f"{name!r} is not in the cache, and the hub cannot be reached (HF_HUB_OFFLINE, no network, or a wrong "
            "HF_ENDPOINT); run the command once with network"
        )
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return ConfigError(
            f"{name!r}: the hub denies access (HTTP {status}); log in with a token that has it: hf auth login"
        )
    return ConfigError(f"{name!r} cannot be read or written on the hub: {line[:300]}; try again, a transfer continues")
