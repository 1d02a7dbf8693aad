"""Blobs in memory behind HTTP, on the loopback address: GET and PUT /NAME, and POST /lookup.

    PUT /NAME      body: bytes            204; 507 when the blob is larger than the store
    GET /NAME                             200 and the bytes; 404
    POST /lookup   body: names by line    200 and how many of them, from the first on, are there

The blobs that were not used for longest make room for new ones.
"""

from __future__ import annotations

import argparse
import threading
from collections import OrderedDict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Blobs:
    """A bounded store that forgets what was not used for longest."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._blobs: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, name: str, data: bytes) -> bool:
        with self._lock:
            self.num_bytes += len(data) - len(self._blobs.pop(name, b""))
            self._blobs[name] = data
            while self.num_bytes > self.max_bytes:
                _, oldest = self._blobs.popitem(last=False)
                self.num_bytes -= len(oldest)
            return name in self._blobs

    def get(self, name: str) -> bytes | None:
        with self._lock:
            if name in self._blobs:
                self._blobs.move_to_end(name)
            return self._blobs.get(name)

    def count_prefix(self, names: list[str]) -> int:
        with self._lock:
            return next((n for n, name in enumerate(names) if name not in self._blobs), len(names))


class BlobServer(ThreadingHTTPServer):
    """Listens on 127.0.0.1; port 0 picks a free one."""

    daemon_threads = True

    def __init__(self, port: int = 0, max_bytes: int = 1 << 30) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.blobs = Blobs(max_bytes)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open
    disable_nagle_algorithm = True
    server: BlobServer

    def do_PUT(self) -> None:
        kept = self.server.blobs.put(self.path[1:], self._body())
        self._answer(204 if kept else 507)

    def do_GET(self) -> None:
        data = self.server.blobs.get(self.path[1:])
        self._answer(404 if data is None else 200, data or b"")

    def do_POST(self) -> None:
        names = self._body().decode().split("\n")
        self._answer(200, str(self.server.blobs.count_prefix(names)).encode())

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Keep blobs in memory behind HTTP.")
    parser.add_argument("--port", type=int, default=8900)
    parser.add_argument("--max-bytes", type=int, default=1 << 30)
    options = parser.parse_args()
    blob_server = BlobServer(options.port, options.max_bytes)
    print(f"serving {blob_server.url}", flush=True)
    blob_server.serve_forever()
