"""A road to an engine core in a process of its own, over two zmq sockets.

    client                                        core (compose/core.py)
    PUSH to_core   ─────── msgpack of wire ─────► PULL   input thread
    PULL to_client ◄────── msgpack of wire ─────  PUSH   output thread
    standard input of the core ─ start message, then open: its end tells the core that the client is gone

Receivers bind and senders connect, because a connected sender queues what its peer has not taken yet. What the core
says is bounded (outbox.py); what it is told is not, as its input thread always reads. A thread waits for the process:
its end is known at once, whatever way it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from lamella.engine.links.endpoint import Endpoint
from lamella.engine.links.outbox import MAX_MESSAGES
from lamella.engine.wire import ToClient, ToCore, encoder, to_client

CORE_MODULE = "lamella.engine.compose.core"

LAST_WORDS_S = 0.05
"""How long messages of a process that has ended are waited for."""


class CoreStart(msgspec.Struct):
    """The first bytes that a core reads from its standard input: 4 bytes of length (little-endian), then this."""

    factory: str
    """'module:function'; called as function(config, progress) -> core_loop.Core."""
    config: Any
    """What the factory gets: any msgpack value."""
    to_core: str
    to_client: str
    log_level: str = "INFO"


class ProcessLink:
    """Starts a core process in the constructor, so that it loads while the caller goes on importing."""

    def __init__(self, factory: str, config: Any, *, log_level: str = "INFO") -> None:
        self._endpoint = Endpoint()
        self._context = zmq.Context(io_threads=1)
        try:
            self._push = self._socket(zmq.PUSH)
            self._pull = self._socket(zmq.PULL)
            self._pull.setsockopt(zmq.RCVHWM, MAX_MESSAGES)
            self._pull.bind(self._endpoint.to_client)
            start = CoreStart(factory, config, self._endpoint.to_core, self._endpoint.to_client, log_level)
            self._process = subprocess.Popen([sys.executable, "-m", CORE_MODULE], stdin=subprocess.PIPE, stdout=2)
            assert self._process.stdin is not None
            body = msgspec.msgpack.encode(start)
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(len(body).to_bytes(4, "little") + body)
                self._process.stdin.flush()
        except BaseException:
            self._context.destroy(linger=0)
            self._endpoint.remove()
            raise
        self._descriptor = int(self._pull.getsockopt(zmq.FD))
        self._connected = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._receive: Callable[[ToClient], None] | None = None
        self._lost: Callable[[str], None] | None = None
        self._detached = False
        self._closed = False

    @property
    def pid(self) -> int:
        """Process id of the core."""
        return self._process.pid

    def open(
        self, loop: asyncio.AbstractEventLoop, receive: Callable[[ToClient], None], lost: Callable[[str], None]
    ) -> None:
        """Deliver what comes on this loop."""
        self._loop, self._receive, self._lost = loop, receive, lost
        loop.add_reader(self._descriptor, self._drain)
        # the descriptor only signals what comes from now on
        loop.call_soon(self._drain)
        threading.Thread(target=self._watch, name="core-watch", daemon=True).start()

    def send(self, message: ToCore) -> None:
        """Queue a message; what a core that is gone does not take is dropped with the socket."""
        if self._closed:
            return
        if not self._connected:  # the core has bound its side by the time it is ready
            self._push.connect(self._endpoint.to_core)
            self._connected = True
        self._push.send(encoder.encode(message), zmq.NOBLOCK)

    def dump_stacks(self) -> None:
        """By a signal, which the core heeds though its threads hang; one that is stopped or gone does not."""
        self._process.send_signal(signal.SIGUSR1)

    def detach(self) -> None:
        """Deliver nothing more."""
        if self._loop is not None and not self._detached:
            with contextlib.suppress(RuntimeError):  # the loop may be closed by now
                self._loop.remove_reader(self._descriptor)
        self._detached = True

    def close(self, timeout_s: float) -> None:
        """Close the core's standard input, on which it ends; kill it after timeout_s."""
        if self._closed:
            return
        self._closed = True
        self._close_input()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._free()

    def abandon(self) -> None:
        """What is left to do once nobody holds the client any more: the core is told, and ends by itself. Does not
        block; on any thread; safe to repeat."""
        if self._closed:
            return
        self._closed = True
        self._close_input()
        if self._loop is None:
            self._free()
            return
        try:
            self._loop.call_soon_threadsafe(self._free)  # where the sockets are in use
        except RuntimeError:  # the loop is closed by now
            self._free()

    def _close_input(self) -> None:
        """On its end the core ends."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def _free(self) -> None:
        """Sockets must be closed before their context is collected, or the collection waits for them for ever."""
        self.detach()
        self._context.destroy(linger=0)
        self._endpoint.remove()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        return socket

    def _drain(self) -> None:
        """Read until nothing is left: the descriptor signals changes, not states."""
        if self._detached:
            return
        assert self._receive is not None
        while True:
            try:
                frame = self._pull.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(to_client.decode(frame))

    def _watch(self) -> None:
        code = self._process.wait()
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            self._loop.call_soon_threadsafe(self._exited, code)

    def _exited(self, code: int) -> None:
        if self._detached:
            return
        # what it sent last may still be on its way through the sockets: a Dead tells more than an exit code
        self._drain()
        assert self._loop is not None
        self._loop.call_later(LAST_WORDS_S, self._gone, code)

    def _gone(self, code: int) -> None:
        assert self._lost is not None
        if self._detached:
            return
        self._drain()
        self._lost(exit_reason(code))


def exit_reason(code: int) -> str:
    """What became of a process, from its exit code."""
    if code >= 0:
        return f"the process ended with code {code}"
    hint = " (killed, as the system does when memory runs out)" if -code == signal.SIGKILL else ""
    return f"the process ended by signal {-code}{hint}"
