"""Bytes on the wire: what is no HTTP, what does not end, what comes too early. Then a good request still works."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from lamella.engine.server import run
from lamella.engine.server.protocol import MAX_HEAD_BYTES, HttpProtocol
from lamella.engine.testing.scripted_core import ScriptedCore
from lamella.engine.testing.server_thread import ServerThread, serve

TIMEOUT_S = 0.3
BODY = json.dumps({"prompt": "say:hello", "max_tokens": 20}).encode()
LONG = json.dumps({"prompt": "x", "max_tokens": 400}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture(scope="module")
def core() -> ScriptedCore:
    return ScriptedCore(step_s=0.005)


@pytest.fixture(scope="module")
def server(core: ScriptedCore) -> Iterator[ServerThread]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HttpProtocol, "receive_timeout_s", TIMEOUT_S)
        with serve(core) as running:
            yield running


@pytest.fixture(autouse=True)
def works_afterwards(server: ServerThread, core: ScriptedCore) -> Iterator[None]:
    yield
    answer = httpx.post(f"{server.url}/v1/completions", content=BODY)
    assert answer.json()["choices"][0]["text"] == "hello"
    deadline = time.monotonic() + 5
    while core.num_held and time.monotonic() < deadline:
        time.sleep(0.005)
    assert core.num_held == 0


@contextlib.contextmanager
def connected(server: ServerThread) -> Iterator[socket.socket]:
    with socket.create_connection((server.handle.host, server.handle.port), timeout=10) as connection:
        yield connection


def request(body: bytes = BODY, extra: bytes = b"") -> bytes:
    return HEAD + extra + b"content-length: %d\r\n\r\n" % len(body) + body


def rest(connection: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(65536):
            received += data
    return received


def exchange(server: ServerThread, data: bytes) -> bytes:
    """What comes back before the server closes the connection, which it must do by itself."""
    with connected(server) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(data)
        return rest(connection)


def error_of(answer: bytes, status: int, kind: str = "invalid_request_error") -> dict[str, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert b"content-type: application/json" in head
    assert b"connection: close" in head
    error: dict[str, str] = json.loads(body)["error"]
    assert error["type"] == kind
    return error


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\xff garbage\r\n\r\n",
        bytes.fromhex("1603010200010001fc0303") + b"x" * 100,  # a TLS client
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /health HTTP/3.0\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
        b"NONSENSE /health HTTP/1.1\r\nhost: x\r\n\r\n",
        b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n",
        HEAD + b"x: a\0b\r\n\r\n",
        HEAD + b"content-length: abc\r\n\r\n",
        HEAD + b"content-length: -5\r\n\r\n",
        HEAD + b"content-length: 99999999999999999999999\r\n\r\n",
        HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\nabcdef",
        HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\nabc\r\n",
    ],
)
def test_what_is_no_http(server: ServerThread, data: bytes) -> None:
    assert "no HTTP/1.1 request" in error_of(exchange(server, data), 400)["message"]


@pytest.mark.parametrize("part", [b"x: " + b"y" * 1000 + b"\r\n", b"y" * 1000])
def test_a_head_without_an_end(server: ServerThread, part: bytes) -> None:
    """As many small headers, or as one that never ends: memory is not taken for it."""
    sent = 0
    with connected(server) as connection:
        connection.sendall(HEAD + (b"" if part.endswith(b"\n") else b"x: "))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while sent < 50 * MAX_HEAD_BYTES:
                connection.sendall(part)
                sent += len(part)
            pytest.fail("the server took all of it")
        answer = rest(connection)
    if answer:  # else the reset was faster
        error = error_of(answer, 431)
        assert str(MAX_HEAD_BYTES) in error["message"]


def test_a_head_that_comes_drop_by_drop(server: ServerThread) -> None:
    with connected(server) as connection:
        began_s = time.monotonic()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for number in range(100):
                connection.sendall(HEAD if number == 0 else b"x%d: y\r\n" % number)
                time.sleep(0.05)
        assert time.monotonic() - began_s < 3
        answer = rest(connection)
    if answer:  # else the reset was faster
        assert error_of(answer, 408)["code"] == "timeout"


@pytest.mark.parametrize("data", [HEAD, request()[:-3], HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\nab"])
def test_a_request_that_stops_in_the_middle(server: ServerThread, data: bytes) -> None:
    began_s = time.monotonic()
    error = error_of(exchange(server, data), 408)
    assert time.monotonic() - began_s < 3
    assert "did not arrive within" in error["message"]


def test_a_connection_that_says_nothing_is_closed(server: ServerThread) -> None:
    assert exchange(server, b"") == b""


def test_a_body_may_be_slow_as_long_as_it_comes(server: ServerThread) -> None:
    data = request()
    with connected(server) as connection:
        connection.sendall(data[:-20])
        for byte in data[-20:]:
            time.sleep(TIMEOUT_S / 10)
            connection.sendall(bytes([byte]))
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_an_answer_may_take_longer_than_a_request(server: ServerThread) -> None:
    """And what waits behind it is not overdue, even if only half of it is there."""
    second = request()
    with connected(server) as connection:
        connection.sendall(request(json.dumps({"prompt": "x", "max_tokens": 120}).encode()) + second[:-5])
        began_s = time.monotonic()
        received = connection.recv(65536)
        assert received.startswith(b"HTTP/1.1 200")
        assert time.monotonic() - began_s > TIMEOUT_S
        connection.sendall(second[-5:])
        while b"hello" not in received:
            data = connection.recv(65536)
            assert data
            received += data


def test_pipelined_requests_are_answered_in_order(server: ServerThread) -> None:
    answer = exchange(server, request() + HEALTH + request(extra=b"connection: close\r\n"))
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200"] * 3
    assert answer.index(b"hello") < answer.index(b'"ok"') < answer.rindex(b"hello")


def test_a_client_that_pipelines_and_leaves_frees_all(server: ServerThread, core: ScriptedCore) -> None:
    aborted = len(core.aborted)
    with connected(server) as connection:
        connection.sendall(request(LONG) + request(LONG) + HEALTH)
        deadline = time.monotonic() + 5
        while core.num_held == 0 and time.monotonic() < deadline:
            time.sleep(0.005)
        steps = core.steps
    while core.num_held and time.monotonic() < deadline:
        time.sleep(0.002)
    assert core.steps - steps <= 4
    assert len(core.aborted) == aborted + 1  # the second one had not begun


def test_garbage_behind_a_request_does_not_break_into_its_stream(server: ServerThread) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 50, "stream": True}).encode()
    with connected(server) as connection:
        connection.sendall(request(body))
        received = connection.recv(65536)
        assert received.startswith(b"HTTP/1.1 200")
        connection.sendall(b"\x00garbage\r\n\r\n")
        assert b"HTTP/1.1 400" not in received + rest(connection)


@pytest.mark.parametrize("upgrade", [b"websocket", b"h2c"])
def test_upgrades_are_not_taken(server: ServerThread, upgrade: bytes) -> None:
    """Some clients offer HTTP/2 with their first request, whatever its method, and go on with HTTP/1.1."""
    extra = b"connection: upgrade, http2-settings\r\nupgrade: %s\r\nhttp2-settings: AAMAAABk\r\n" % upgrade
    with connected(server) as connection:
        for last in (b"", b"", b"connection: close\r\n"):
            connection.sendall(request(extra=last or extra))
            received = b""
            while b"hello" not in received:
                data = connection.recv(65536)
                assert data
                received += data
            assert received.startswith(b"HTTP/1.1 200")


def test_a_server_that_ends_does_not_wait_for_half_a_request(core: ScriptedCore) -> None:
    with serve(ScriptedCore()) as ending, connected(ending) as connection:
        connection.sendall(request()[:-3])
        time.sleep(0.05)
        began_s = time.monotonic()
        assert ending.stop() == 0
        assert time.monotonic() - began_s < 2
        assert error_of(rest(connection), 503, "server_error")["message"] == "the server shuts down"


def test_a_server_that_ends_hangs_up_on_who_does_not_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run, "SEND_GRACE_S", 0.2)
    slow = ScriptedCore()
    with serve(slow) as ending, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect((ending.handle.host, ending.handle.port))
        body = {"prompt": "x", "max_tokens": 400, "n": 40, "logprobs": 20, "stream": True}
        connection.sendall(request(json.dumps(body).encode()))
        deadline = time.monotonic() + 20
        while ending.client is None or slow.steps < 400 or ending.client.num_open:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert ending.stop() == 0
    assert "hanging up on 1 clients" in caplog.text
    assert "Traceback" not in caplog.text
