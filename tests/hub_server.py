"""A local stand-in of the Hugging Face hub: its file API over HTTP, with repositories in memory."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlparse

LFS_BYTES = 1000
"""Files of at least this size are sent through LFS."""


@dataclass
class Repo:
    """One repository with one branch."""

    files: dict[str, bytes] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    @property
    def sha(self) -> str:
        """Return the commit: a hash of names and contents."""
        digest = hashlib.sha1()
        for name, content in sorted(self.files.items()):
            digest.update(name.encode() + b"\0" + content)
        return digest.hexdigest()


@dataclass
class Hub:
    """State of the server."""

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    """By name. Data sets as datasets/ORG/NAME."""
    blobs: dict[str, bytes] = field(default_factory=dict)
    """Files that were sent through LFS, by SHA-256."""
    requests: list[str] = field(default_factory=list)
    """Method and path of each request."""
    cut_after: int = 0
    """Close the connection of the next download after this many bytes; 0: never."""
    refused_uploads: int = 0
    """Number of next LFS uploads that fail."""
    token: str = "hf_secret"

    def downloads(self) -> list[str]:
        """Return the names of the files that were asked for by GET."""
        return [line.rpartition("/")[2] for line in self.requests if line.startswith("GET") and "/resolve/" in line]


@contextmanager
def hub_server() -> Iterator[Hub]:
    """Run the server on loopback in a thread."""
    hub = Hub()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: Hub

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Write nothing."""

    def do_HEAD(self) -> None:
        self._read("HEAD")

    def do_GET(self) -> None:
        self._read("GET")

    def do_PUT(self) -> None:
        content = self._body()
        self._note("PUT")
        if self.state.refused_uploads:
            self.state.refused_uploads -= 1
            self._answer(403, {"error": "upload refused"})
            return
        self.state.blobs[hashlib.sha256(content).hexdigest()] = content
        self._answer(200, {})

    def do_POST(self) -> None:
        body = self._body()
        self._note("POST")
        path = unquote(urlparse(self.path).path)
        if path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
            return
        if self.headers.get("Authorization") != f"Bearer {self.state.token}":
            self._answer(401, {"error": "Invalid username or password."})
            return
        if path == "/api/repos/create":
            self._create(json.loads(body))
        elif path.endswith("/info/lfs/objects/batch"):
            self._lfs_batch(json.loads(body))
        elif "/preupload/" in path:
            files = json.loads(body)["files"]
            modes = [
                {"path": f["path"], "uploadMode": "lfs" if f["size"] >= LFS_BYTES else "regular", "shouldIgnore": False}
                for f in files
            ]
            self._answer(200, {"files": modes})
        elif "/commit/" in path:
            self._commit(path, body)
        elif "/branch/" in path:
            self._answer(200, {})
        else:
            self._answer(404, {"error": f"unknown path {path}"})

    def _create(self, body: dict[str, Any]) -> None:
        name = f"{body['organization']}/{body['name']}" if body.get("organization") else body["name"]
        if name in self.state.repos:
            self._answer(409, {"error": "You already created this repo", "url": f"{self.state.url}/{name}"})
            return
        is_private = bool(body.get("private", body.get("visibility") == "private"))
        self.state.repos[name] = Repo(private=is_private)
        self._answer(200, {"url": f"{self.state.url}/{name}", "name": name, "id": name})

    def _lfs_batch(self, body: dict[str, Any]) -> None:
        objects = []
        for item in body["objects"]:
            known = item["oid"] in self.state.blobs
            upload = {"upload": {"href": f"{self.state.url}/lfs/{item['oid']}"}}
            objects.append({"oid": item["oid"], "size": item["size"], **({} if known else {"actions": upload})})
        self._answer(200, {"transfer": "basic", "objects": objects}, kind="application/vnd.git-lfs+json")

    def _commit(self, path: str, body: bytes) -> None:
        name = path.removeprefix("/api/models/").partition("/commit/")[0]
        repo = self.state.repos[name]
        for line in body.decode().splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                repo.files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                repo.files[value["path"]] = self.state.blobs[value["oid"]]
            elif item["key"] == "deletedFile":
                repo.files.pop(value["path"], None)
        url = f"{self.state.url}/{name}/commit/{repo.sha}"
        self._answer(200, {"success": True, "commitOid": repo.sha, "commitUrl": url})

    def _read(self, method: str) -> None:
        self._note(method)
        path = unquote(urlparse(self.path).path).strip("/")
        if path.startswith("api/"):
            _, kind, rest = (*path.split("/", 2), "", "")[:3]
            name, _, revision = rest.partition("/revision/")
            if "/tree/" in name:
                name, _, revision = name.partition("/tree/")
            self._info("datasets/" + name if kind == "datasets" else name, revision, is_tree="/tree/" in rest)
            return
        name, _, rest = path.partition("/resolve/")
        revision, _, file = rest.partition("/")
        repo = self._allowed(name, revision)
        if repo is None:
            return
        if file not in repo.files:
            self._answer(404, {"error": "Entry not found"}, code="EntryNotFound")
            return
        self._send_file(method, repo, repo.files[file])

    def _info(self, name: str, revision: str, *, is_tree: bool) -> None:
        repo = self._allowed(name, revision or "main")
        if repo is None:
            return
        if is_tree:
            entries = [{"type": "file", "path": n, "size": len(c), "oid": _git_sha(c)} for n, c in repo.files.items()]
            self._answer(200, entries)
            return
        siblings = [{"rfilename": file} for file in sorted(repo.files)]
        found = {"id": name.removeprefix("datasets/"), "sha": repo.sha, "siblings": siblings, "private": repo.private}
        self._answer(200, found | {"gated": "manual" if repo.gated else False, "tags": [], "downloads": 0, "likes": 0})

    def _allowed(self, name: str, revision: str) -> Repo | None:
        """Return a repository, or answer why the caller cannot have it."""
        repo = self.state.repos.get(name)
        knows = self.headers.get("Authorization") == f"Bearer {self.state.token}"
        if repo is None or (repo.private and not knows):
            self._answer(404 if knows else 401, {"error": "Repository not found"}, code="RepoNotFound")
            return None
        if revision not in ("main", repo.sha):
            self._answer(404, {"error": "Revision Not Found"}, code="RevisionNotFound")
            return None
        if repo.gated and not knows and "/resolve/" in self.path:
            self._answer(401, {"error": "Access to this model is restricted"}, code="GatedRepo")
            return None
        return repo

    def _send_file(self, method: str, repo: Repo, content: bytes) -> None:
        start = 0
        if wanted := self.headers.get("Range"):
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
        part = content[start:]
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", repo.sha)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(part)))
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if method == "HEAD":
            return
        if self.state.cut_after and len(part) > self.state.cut_after:
            self.wfile.write(part[: self.state.cut_after])
            self.wfile.flush()
            self.state.cut_after = 0
            self.close_connection = True
            self.connection.shutdown(2)
            return
        self.wfile.write(part)

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            content = b""
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return content
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _note(self, method: str) -> None:
        ranged = f" {self.headers['Range']}" if self.headers.get("Range") else ""
        self.state.requests.append(f"{method} {urlparse(self.path).path}{ranged}")

    def _answer(self, status: int, body: Any, *, code: str = "", kind: str = "application/json") -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if code:
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", str(body.get("error", "")))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _git_sha(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
