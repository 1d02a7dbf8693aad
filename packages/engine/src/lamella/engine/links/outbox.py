"""What a core process says, on its way to the client: a queue that ends, and the thread that encodes and sends.

    CoreLoop ─ put ─► [up to MAX_MESSAGES] ─ output thread ─► PUSH [up to MAX_MESSAGES] ─► PULL [as many] ─► client

A client that does not read is waited for: once all of these are full, `put` blocks, and with it the core, which makes
no step until the client reads again. So what is not read has a bound in memory, and nothing is lost.
"""

from __future__ import annotations

import threading
from collections import deque

import zmq

from lamella.engine.wire import ToClient, encoder

MAX_MESSAGES = 64
"""Enough that a client which is busy for many steps holds up none."""

LINGER_S = 5.0
"""How long the last messages may take to be read."""


class Outbox:
    """Every method may be called from any thread."""

    def __init__(self, address: str) -> None:
        """address: where the client's PULL socket is bound."""
        self._changed = threading.Condition()
        self._messages: deque[ToClient] = deque()
        self._closing = False
        self._abandoned = False
        self._address = address
        self._thread = threading.Thread(target=self._run, name="core-output", daemon=True)
        self._thread.start()

    def put(self, message: ToClient) -> None:
        """Queue a message; waits while the queue is full. What comes after `abandon` is dropped."""
        with self._changed:
            while len(self._messages) >= MAX_MESSAGES and not self._abandoned:
                self._changed.wait()
            if not self._abandoned:
                self._messages.append(message)
                self._changed.notify_all()

    def abandon(self) -> None:
        """Nobody reads any more: whoever waits in `put` goes on."""
        with self._changed:
            self._abandoned = True
            self._messages.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """Return when everything queued has been sent, or LINGER_S have passed."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(LINGER_S)

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        socket = context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, MAX_MESSAGES)
        socket.setsockopt(zmq.LINGER, int(LINGER_S * 1000))
        socket.connect(self._address)
        while (message := self._next()) is not None:
            socket.send(encoder.encode(message))
        socket.close()
        context.term()  # waits until the last message is out

    def _next(self) -> ToClient | None:
        with self._changed:
            while not self._messages and not self._closing:
                self._changed.wait()
            if not self._messages:
                return None
            message = self._messages.popleft()
            self._changed.notify_all()
            return message
