"""A hub and a package index that exist only here."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from zipfile import ZipFile

import pytest
from huggingface_hub import constants as hub_constants

from lamella.engine.pull.package import PackagedModel

COMMIT = "c" * 40


class Hub:
    """The few routes of a hub that fetching a model needs, on a loopback port.

    repos: repository -> file -> content; gated and private ones answer as the real hub does, without the right token.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.token: str | None = None
        self.requests: list[tuple[str, str]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self, with_body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, with_body=False)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, handler: BaseHTTPRequestHandler, with_body: bool) -> None:
        path = unquote(urlsplit(handler.path).path)
        self.requests.append((handler.command, path))
        status, headers, body = self._respond(path, handler.headers.get("Authorization"))
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if with_body:
            handler.wfile.write(body)

    def _respond(self, path: str, authorization: str | None) -> tuple[int, dict[str, str], bytes]:
        parts = path.strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        if api:
            parts = parts[2:]
        repo, rest = "/".join(parts[:2]), parts[2:]
        if self.token is not None and authorization not in (None, f"Bearer {self.token}"):
            return 401, {}, b"{}"
        if repo not in self.repos:
            # as the real one, which does not tell strangers apart from names that do not exist
            return 401 if authorization is None else 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if not api and repo in self.gated and authorization is None:
            return 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"}, b"{}"
        files = self.repos[repo]
        if api and rest and rest[0] == "tree":
            return self._json([self._entry(name, content) for name, content in files.items()])
        if api:
            if rest and rest[0] == "revision" and rest[1] not in ("main", COMMIT):
                return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
            return self._json({"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]})
        assert rest[0] == "resolve"
        name = "/".join(rest[2:])
        if name not in files:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b""
        etag = hashlib.sha1(files[name], usedforsecurity=False).hexdigest()
        return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}, files[name]

    @staticmethod
    def _entry(name: str, content: bytes) -> dict[str, Any]:
        oid = hashlib.sha1(content, usedforsecurity=False).hexdigest()
        return {"type": "file", "path": name, "size": len(content), "oid": oid}

    @staticmethod
    def _json(value: Any) -> tuple[int, dict[str, str], bytes]:
        return 200, {"Content-Type": "application/json", "X-Repo-Commit": COMMIT}, json.dumps(value).encode()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    hub = Hub()
    yield hub
    hub.close()


@pytest.fixture
def index(tmp_path: Path) -> Callable[..., tuple[PackagedModel, list[str]]]:
    """make(content, **changes) -> a model whose wheel lies in a folder, and pip's options to find it there."""

    def make(content: bytes = b"GGUF" + bytes(1000), **changes: Any) -> tuple[PackagedModel, list[str]]:
        folder = tmp_path / "index"
        folder.mkdir(exist_ok=True)
        wheel = folder / "tiny_model-1.0-py3-none-any.whl"
        info = "tiny_model-1.0.dist-info"
        with ZipFile(wheel, "w") as archive:
            archive.writestr("tiny_model/tiny.gguf", content)
            archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        values: dict[str, Any] = {
            "name": "tiny",
            "title": "Tiny",
            "requirement": "tiny-model==1.0",
            "wheel": wheel.name,
            "wheel_sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
            "member": "tiny_model/tiny.gguf",
            "file_sha256": hashlib.sha256(content).hexdigest(),
            "file_bytes": len(content),
            "license": "Apache-2.0",
        }
        return PackagedModel(**{**values, **changes}), ["--no-index", "--find-links", str(folder)]

    return make
