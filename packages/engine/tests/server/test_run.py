"""The life of a server: signals, a dying core, addresses. Servers with signals are processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import psutil
import pytest

from lamella.engine.errors import StartError
from lamella.engine.server.options import bind, listen
from lamella.engine.testing.scripted_core import ScriptedCore
from lamella.engine.testing.server_thread import ServerThread, serve

PROGRAM = """
import json, sys
from lamella.engine.client import EngineClient
from lamella.engine.links.process import ProcessLink
from lamella.engine.server.options import ServerOptions
from lamella.engine.server.run import run_server
from lamella.engine.testing.byte_tokenizer import byte_tokenizer
from lamella.engine.testing.scripted_core import FACTORY

config, options = json.loads(sys.argv[1]), json.loads(sys.argv[2])
step_timeout_s = options.pop("step_timeout_s", 0.0)
link = ProcessLink(FACTORY, config)
print(link.pid, flush=True)
sys.exit(run_server(
    lambda: EngineClient(link, progress=lambda text: print(text, flush=True), step_timeout_s=step_timeout_s),
    byte_tokenizer(),
    ServerOptions(served_names=("m",), port=0, **options),
    started=lambda handle: print(handle.url, flush=True),
))
"""


class Server(NamedTuple):
    process: subprocess.Popen[str]
    core_pid: int
    http: httpx.Client

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def code(self) -> int:
        return self.process.wait(15)


@contextlib.contextmanager
def loading_process(config: dict[str, Any], **options: Any) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server whose core has begun to load, and that core's pid."""
    arguments = [sys.executable, "-c", PROGRAM, json.dumps(config), json.dumps(options)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        core_pid = int(process.stdout.readline())
        assert process.stdout.readline() == "reading the script\n"
        yield process, core_pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


@contextlib.contextmanager
def server_process(config: dict[str, Any], **options: Any) -> Iterator[Server]:
    with loading_process(config, **options) as (process, core_pid):
        assert process.stdout is not None
        with httpx.Client(base_url=process.stdout.readline().strip(), timeout=20) as http:
            yield Server(process, core_pid, http)


class Stream(threading.Thread):
    """Reads a streamed answer to its end."""

    def __init__(self, server: Server, max_tokens: int) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.begun = threading.Event()
        self._url = f"{server.http.base_url}/v1/completions"
        self._body = {"prompt": "x", "max_tokens": max_tokens, "stream": True}
        self.start()
        assert self.begun.wait(10)

    def run(self) -> None:
        with httpx.Client(timeout=20) as http, http.stream("POST", self._url, json=self._body) as answer:
            for line in answer.iter_lines():
                if line:
                    self.lines.append(line)
                self.begun.set()

    def events(self) -> list[dict[str, Any]]:
        self.join(15)
        assert not self.is_alive()
        assert self.lines[-1] == "data: [DONE]"
        return [json.loads(line[6:]) for line in self.lines[:-1]]


def test_a_signal_drains() -> None:
    with server_process({"step_s": 0.02}) as server:
        stream = Stream(server, max_tokens=50)
        server.signal(signal.SIGTERM)
        deadline = time.monotonic() + 5
        while (answer := server.http.post("/v1/completions", json={"prompt": "late"})).status_code != 503:
            assert time.monotonic() < deadline
        assert answer.json()["error"]["message"] == "the server shuts down"
        assert answer.headers["retry-after"] == "5"
        health = server.http.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "draining"})
        events = stream.events()
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert "".join(event["choices"][0]["text"] for event in events) == "x" * 50
        assert server.code() == 0
        assert not psutil.pid_exists(server.core_pid)


def test_an_idle_server_ends_at_once() -> None:
    with server_process({}) as server:
        assert server.http.get("/health").status_code == 200
        begun_s = time.monotonic()
        server.signal(signal.SIGINT)
        assert server.code() == 0
        assert time.monotonic() - begun_s < 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("both", [False, True], ids=["server alone", "both processes"])
def test_a_signal_while_loading_ends_server_and_core(number: signal.Signals, both: bool) -> None:
    with loading_process({"load_s": 60.0}) as (process, core_pid):
        begun_s = time.monotonic()
        if both:
            os.kill(core_pid, number)
        process.send_signal(number)
        assert process.wait(15) == 0
        assert time.monotonic() - begun_s < 5
        assert not psutil.pid_exists(core_pid)
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_a_core_killed_while_loading_ends_the_server_with_the_reason() -> None:
    with loading_process({"load_s": 60.0}) as (process, core_pid):
        os.kill(core_pid, signal.SIGKILL)
        assert process.wait(15) == 1
        assert process.stderr is not None
        assert (
            "StartError: the engine core ended before it was ready: the process ended by signal 9"
            in process.stderr.read()
        )


def test_a_signal_to_both_processes_loses_nothing() -> None:
    with server_process({"step_s": 0.02}) as server:
        stream = Stream(server, max_tokens=30)
        os.kill(server.core_pid, signal.SIGTERM)
        time.sleep(0.1)
        server.signal(signal.SIGTERM)
        assert stream.events()[-1]["choices"][0]["finish_reason"] == "length"
        assert server.code() == 0


def test_the_drain_has_a_time_limit() -> None:
    with server_process({"step_s": 0.02}, drain_timeout_s=0.3) as server:
        stream = Stream(server, max_tokens=500)
        server.signal(signal.SIGTERM)
        assert stream.events()[-1]["error"]["message"] == "the server shuts down"
        assert server.code() == 0


def test_a_second_signal_gives_up() -> None:
    with server_process({"step_s": 0.02}) as server:
        stream = Stream(server, max_tokens=500)
        server.signal(signal.SIGTERM)
        time.sleep(0.3)
        assert server.process.poll() is None
        server.signal(signal.SIGINT)
        assert stream.events()[-1]["error"]["message"] == "the server was stopped"
        assert server.code() == 1


def test_a_killed_core_is_told_and_ends_the_server() -> None:
    with server_process({"step_s": 0.02}) as server:
        stream = Stream(server, max_tokens=500)
        os.kill(server.core_pid, signal.SIGKILL)
        error = stream.events()[-1]["error"]
        assert (error["type"], error["code"]) == ("server_error", "engine_dead")
        assert error["message"].startswith("the engine core ended: the process ended by signal 9 (killed")
        health = server.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "dead")
        answer = server.http.post("/v1/completions", json={"prompt": "a"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
        assert server.code() == 1


def test_a_core_that_hangs_is_told_and_ends_the_server() -> None:
    with loading_process({"hang_after": 2}, step_timeout_s=0.5) as (process, core_pid):
        assert process.stdout is not None
        assert process.stderr is not None
        with httpx.Client(base_url=process.stdout.readline().strip(), timeout=20) as http:
            answer = http.post("/v1/completions", json={"prompt": "a"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
            assert answer.json()["error"]["message"].startswith("the engine core ended: it hangs: no step in 0.5 s")
            health = http.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "dead")
        assert process.wait(15) == 1
        assert not os.path.exists(f"/proc/{core_pid}")
        assert "in run_once" in process.stderr.read(), "where it stands"


def test_a_core_that_crashes_fails_what_waits_for_it() -> None:
    with serve(ScriptedCore(crash_after=1)) as server, httpx.Client(base_url=server.url) as http:
        answer = http.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 503
        assert "the script says crash" in answer.json()["error"]["message"]
        assert server.wait() == 1


def test_a_core_that_cannot_start_is_a_start_error() -> None:
    def broken() -> Any:
        raise StartError("the model is broken")

    with pytest.raises(StartError, match="the model is broken"):
        ServerThread(broken)


def test_an_address_in_use_is_told_before_anything_is_loaded() -> None:
    with bind("127.0.0.1", 0) as taken:
        listen(taken)
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*; choose another --port"):
            bind("127.0.0.1", port)


def test_the_faster_of_two_servers_gets_the_port() -> None:
    with bind("127.0.0.1", 0) as first, bind("127.0.0.1", first.getsockname()[1]) as second:
        listen(first)
        with pytest.raises(StartError, match="cannot listen on"):
            listen(second)


@pytest.mark.parametrize(
    ("host", "port", "message"),
    [
        ("no.such.host.invalid", 80, "cannot listen on .*give an address of this machine with --host"),
        ("192.0.2.1", 0, "cannot listen on .*give an address of this machine with --host"),
        ("", 0, "cannot listen on .*give an address of this machine with --host"),
        ("127.0.0.1", 70_000, "port must be in"),
    ],
)
def test_addresses_that_are_not_ours(host: str, port: int, message: str) -> None:
    with pytest.raises(StartError, match=message):
        bind(host, port)


def test_clients_are_refused_until_the_engine_is_ready() -> None:
    sock = bind("127.0.0.1", 0)
    with sock, pytest.raises(ConnectionRefusedError):
        socket.create_connection(sock.getsockname())
