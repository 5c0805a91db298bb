"""A hub for tests: what `huggingface_hub` asks of one when a folder is uploaded, on a port of this machine.

In: HTTP requests. Out: the repositories that were made, with the bytes of their files. Small files come within the
commit, large ones to an address of their own first, as Git LFS has it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from http_here import Server, running

TOKEN = "hf_right"


class FakeHub(Server):
    """`repositories` has, by name, the visibility that it was made with, and its files. `large` is the suffix of files
    that are uploaded on their own; `fault` a status with which commits are refused."""

    daemon_threads = True

    def __init__(self, large: str = ".safetensors", fault: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.large, self.fault = large, fault
        self.made: dict[str, Any] = {}
        self.files: dict[str, bytes] = {}
        self.blobs: dict[str, bytes] = {}

    def commit(self, lines: list[dict[str, Any]]) -> None:
        """Take the files of a commit."""
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[value["path"]] = self.blobs[value["oid"]]


class _Answer(BaseHTTPRequestHandler):
    """One request of the client."""

    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, content: Any, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_PUT(self) -> None:
        """A large file, to the address that it was told."""
        data = self._body()
        assert self.path == f"/blobs/{hashlib.sha256(data).hexdigest()}"
        self.server.blobs[self.path.removeprefix("/blobs/")] = data
        self._answer({})

    def do_POST(self) -> None:
        """All else."""
        data = self._body()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/repos/create":
            self._create(json.loads(data))
        elif self.path == "/api/validate-yaml":
            self._answer({})
        elif self.path.startswith("/api/models/me/model/preupload/"):
            files = [self._mode(file["path"]) for file in json.loads(data)["files"]]
            self._answer({"files": files})
        elif self.path == "/me/model.git/info/lfs/objects/batch":
            self._answer({"transfer": "basic", "objects": [self._place(one) for one in json.loads(data)["objects"]]})
        elif self.path.startswith("/api/models/me/model/commit/"):
            self._commit(data)
        else:
            self._answer({"error": f"unexpected: {self.path}"}, 404)

    def _create(self, asked: dict[str, Any]) -> None:
        self.server.made = asked
        self._answer({"url": f"{self.server.address}/{asked['organization']}/{asked['name']}"})

    def _mode(self, path: str) -> dict[str, Any]:
        mode = "lfs" if path.endswith(self.server.large) else "regular"
        return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": None}

    def _place(self, wanted: dict[str, Any]) -> dict[str, Any]:
        return {**wanted, "actions": {"upload": {"href": f"{self.server.address}/blobs/{wanted['oid']}"}}}

    def _commit(self, data: bytes) -> None:
        if self.server.fault:
            self._answer({"error": "the quota of private storage is used up"}, self.server.fault)
            return
        self.server.commit([json.loads(line) for line in data.splitlines()])
        self._answer({"commitUrl": f"{self.server.address}/me/model/commit/1", "commitOid": "1", "success": True})


@contextmanager
def fake_hub(**options: Any) -> Iterator[FakeHub]:
    """Serve a hub until the block ends."""
    hub = FakeHub(**options)
    with running(hub):
        yield hub
