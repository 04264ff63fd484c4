"""A hub that is not there: enough of its HTTP interface for ``huggingface_hub`` and ``datasets`` to fetch from it.

GET  /api/models/{name}[/revision/{r}]      sha and files
GET  /api/models/{name}/tree/{r}            files with sizes
POST /api/models/{name}/paths-info/{r}      those that are named, as in the tree
HEAD /{name}/resolve/{r}/{file}             size, hash, commit
GET  the same                               the bytes; ``flow`` may stop them

Data sets have ``/api/datasets/…`` and ``/datasets/{name}/…``; their repositories are called ``datasets/{name}`` here.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """Files of each commit, and where branches and tags point. ``token`` set: only for those who send it."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    token: str = "hf_friend"

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Add a commit and move ``branch`` to it; returns its hash."""
        digest = hashlib.sha1(repr(sorted((name, hash_of(data)) for name, data in files.items())).encode()).hexdigest()
        self.commits[digest] = files
        self.refs[branch] = digest
        return digest


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def _entries(files: dict[str, bytes]) -> list[dict[str, Any]]:
    """Files and folders as the hub lists them."""
    folders = {str(parent) for path in files for parent in Path(path).parents if str(parent) != "."}
    return [
        *({"type": "directory", "path": path, "size": 0, "oid": hash_of(path.encode())} for path in sorted(folders)),
        *({"type": "file", "path": path, "size": len(data), "oid": hash_of(data)} for path, data in files.items()),
    ]


class HubServer:
    """Serves ``repositories`` at ``endpoint`` until ``close``. ``fetched``: the files whose bytes were asked for."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.fetched: list[str] = []
        self.flow = threading.Event()
        self.flow.set()
        """Cleared: a file stops in its middle."""
        self.broken_status: int | None = None
        """Set: every request is answered so."""
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self.flow.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    hub: ClassVar[HubServer]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_POST(self) -> None:
        self.asked = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        if self.hub.broken_status is not None:
            self._send(self.hub.broken_status, b"out of order", body=body)
        elif info := re.fullmatch(r"/api/(models/|datasets/)([^/]+/[^/]+)(?:/(revision|tree|paths-info)/(.+))?", path):
            kind = info[1].removeprefix("models/")
            self._about(kind + info[2], info[3] or "revision", info[4] or "main", body=body)
        elif file := re.fullmatch(r"/((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(file[1], file[2], file[3], body=body)
        else:
            self._send(404, b"", body=body)

    def _commit(self, name: str, revision: str, *, files: bool, body: bool) -> str | None:
        """The commit that is meant, if whoever asks may see it; else the refusal has been sent."""
        repository = self.hub.repositories.get(name)
        known = self.headers.get("Authorization") == f"Bearer {repository.token}" if repository else False
        if self.headers.get("Authorization") == "Bearer hf_expired":
            self._send(401, b"", {"X-Error-Message": "Invalid credentials in Authorization header"}, body=body)
        elif repository is None or (repository.private and not known):
            self._send(401, b'{"error": "Invalid username or password."}', body=body)
        elif files and repository.gated and not known:
            self._send(403, b"", {"X-Error-Code": "GatedRepo"}, body=body)
        elif (commit := repository.refs.get(revision, revision)) not in repository.commits:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"}, body=body)
        else:
            return commit
        return None

    def _about(self, name: str, what: str, revision: str, *, body: bool) -> None:
        revision, _, folder = revision.partition("/")
        commit = self._commit(name, revision, files=False, body=body)
        if commit is None:
            return
        files = self.hub.repositories[name].commits[commit]
        reply: Any
        if what == "paths-info":
            wanted = json.loads(self.asked)["paths"]
            reply = [entry for entry in _entries(files) if entry["path"] in wanted]
        elif what == "tree":
            deep = "recursive=true" in urlsplit(self.path).query.lower() or not name.startswith("datasets/")
            inside = [entry for entry in _entries(files) if entry["path"].startswith(f"{folder}/" if folder else "")]
            depth = folder.count("/") + 1 if folder else 0
            reply = [entry for entry in inside if deep or entry["path"].count("/") == depth]
            if deep and not name.startswith("datasets/"):
                reply = [entry for entry in reply if entry["type"] == "file"]
        else:
            siblings = [{"rfilename": path, "size": len(data)} for path, data in files.items()]
            reply = {"_id": name, "id": name, "sha": commit, "siblings": siblings, "private": False, "tags": []}
        self._send(200, json.dumps(reply).encode(), {"Content-Type": "application/json"}, body=body)

    def _file(self, name: str, revision: str, path: str, *, body: bool) -> None:
        commit = self._commit(name, revision, files=True, body=body)
        if commit is None:
            return
        data = self.hub.repositories[name].commits[commit].get(path)
        if data is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, body=body)
            return
        if body:
            self.hub.fetched.append(path)
        headers = {"ETag": f'"{hash_of(data)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        span = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if span and int(span[1]):
            headers["Content-Range"] = f"bytes {span[1]}-{len(data) - 1}/{len(data)}"
            self._send(206, data[int(span[1]) :], headers, body=body)
        else:
            self._send(200, data, headers, body=body)

    def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None, *, body: bool) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            half = len(data) // 2
            self.wfile.write(data[:half])
            if "X-Repo-Commit" in (headers or {}):
                self.wfile.flush()
                self.hub.flow.wait(60)
            self.wfile.write(data[half:])

    def log_message(self, *args: Any) -> None:
        """Quiet."""
