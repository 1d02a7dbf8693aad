"""An ExternalManager over the HTTP store of server.py, one connection that stays open."""

from __future__ import annotations

import http.client
from collections.abc import Sequence
from urllib.parse import urlsplit


class HttpManager:
    """Keeps blocks as blobs behind a URL. Raises OSError or HTTPException when the server does not answer."""

    def __init__(self, url: str, timeout_s: float = 3.0) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"url {url!r}: give one such as http://127.0.0.1:8900")
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)

    def lookup(self, names: Sequence[bytes]) -> int:
        if not names:
            return 0
        response = self._request("POST", "/lookup", "\n".join(name.hex() for name in names).encode())
        return int(response.read())

    def load(self, items: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
        return [self._load(name, into) for name, into in items]

    def store(self, items: Sequence[tuple[bytes, bytes | None, memoryview]]) -> list[bool]:
        kept: list[bool] = []
        for name, _, data in items:
            response = self._request("PUT", f"/{name.hex()}", data)
            response.read()
            kept.append(response.status == 204)
        return kept

    def close(self) -> None:
        self._connection.close()

    def _load(self, name: bytes, into: memoryview) -> bool:
        response = self._request("GET", f"/{name.hex()}", b"")
        if response.status != 200 or response.length != len(into):
            response.read()
            return False
        filled = 0
        while filled < len(into):
            count = response.readinto(into[filled:])
            if not count:
                return False
            filled += count
        response.read()  # the connection is free again once the end was seen
        return True

    def _request(self, method: str, path: str, body: bytes | memoryview) -> http.client.HTTPResponse:
        try:
            self._connection.request(method, path, body)
            return self._connection.getresponse()
        except (ConnectionError, http.client.HTTPException):
            self._connection.close()  # the server may have closed an idle connection: once more, with a new one
            self._connection.request(method, path, body)
            return self._connection.getresponse()
