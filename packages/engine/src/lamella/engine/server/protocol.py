"""The HTTP/1.1 connection: uvicorn's, with what it lacks on a port that strangers reach.

    head, up to MAX_HEAD_BYTES, within receive_timeout_s of its first byte      else 431, 408
    body, never silent for longer than receive_timeout_s                        else 408
    no HTTP at all                                                              400
    the client gone                                                             told to every request of the connection
    an offer to speak another protocol                                          not heard, as the standard allows

All of these answers have the shape of the others, and close the connection. Requests behind one that is being answered
(pipelined) wait, and their silence is no fault.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from lamella.engine.server.errors import ErrorBody

MAX_HEAD_BYTES = 64 * 1024
RECEIVE_TIMEOUT_S = 60.0

_UPGRADE = re.compile(rb"(?<=\r\n)upgrade(?=[ \t]*:)", re.IGNORECASE)


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    receive_timeout_s = RECEIVE_TIMEOUT_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._in_head = True
        self._head_bytes = 0
        self._head_began_s = self._received_s = self.loop.time()
        self._cycles: list[Any] = []
        """Requests that have not been answered."""
        self._timer = self.loop.call_later(self.receive_timeout_s, self._check_time)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        # uvicorn tells the newest request only, which may be one that waits behind others
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received_s = self.loop.time()
        if self._in_head:
            if not self._head_bytes:
                self._head_began_s = self._received_s
            self._head_bytes += len(data)
            data = _without_upgrade(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, f"the head of the request has more than {MAX_HEAD_BYTES} bytes, which is the limit")

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()
        self._cycles.append(self.cycle)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True
        self._head_bytes = 0

    def on_response_complete(self) -> None:
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        super().on_response_complete()

    def shutdown(self) -> None:
        """The server ends: a request that has not arrived by now is not waited for."""
        if self._cycles and self._cycles[0].more_body:
            self._refuse(503, "the server shuts down")
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls for bytes that it cannot read."""
        del msg
        self._refuse(400, "this is no HTTP/1.1 request")

    def _refuse(self, status: int, message: str) -> None:
        """Answer outside of the application, unless an answer is under way already, and close."""
        if not self._cycles or not self._cycles[0].response_started:
            code = {408: "timeout", 431: "head_too_large", 503: "overloaded"}.get(status)
            kind = "invalid_request_error" if status < 500 else "server_error"
            body = msgspec.json.encode({"error": ErrorBody(message, kind, code=code)})
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def _check_time(self) -> None:
        """Once in a while: is a request overdue?"""
        now_s = self.loop.time()
        since_s = self._overdue_since()
        if since_s is not None and now_s - since_s >= self.receive_timeout_s:
            if self._in_head and not self._head_bytes:
                self.transport.close()  # a connection that never said anything
            else:
                self._refuse(408, f"the request did not arrive within {self.receive_timeout_s:.0f} s")
            return
        wait_s = self.receive_timeout_s - (now_s - since_s if since_s is not None else 0.0)
        self._timer = self.loop.call_later(max(wait_s, 0.001), self._check_time)

    def _overdue_since(self) -> float | None:
        """Since when the connection waits for bytes that the client owes; None if it owes none."""
        if any(not cycle.more_body for cycle in self._cycles):
            return None  # a request is being answered; what comes behind it may take its time
        if not self._in_head:
            return self._received_s
        if self._head_bytes:
            return self._head_began_s
        # an idle connection is uvicorn's to close once it has answered a request
        return None if self.cycle is not None else self._head_began_s


def _without_upgrade(data: bytes) -> bytes:
    """Bytes of a head with the header of that name renamed. The parser takes a request that offers an upgrade as ending
    with its head, so the body that some clients (Java's) send with their offer of HTTP/2 would be lost."""
    end = data.find(b"\r\n\r\n")
    end = len(data) if end < 0 else end
    if _UPGRADE.search(data, 0, end) is None:
        return data
    return _UPGRADE.sub(b"ignored", data[:end]) + data[end:]
