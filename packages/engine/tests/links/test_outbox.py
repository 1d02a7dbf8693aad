"""The queue of a core's messages, against a reader that does not read."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from lamella.engine.links.outbox import MAX_MESSAGES, Outbox
from lamella.engine.wire import Progress, to_client

NUM_MESSAGES = 2000
SIZE = 20_000
"""So large that the system's own buffers hold few."""


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.setsockopt(zmq.RCVHWM, MAX_MESSAGES)
        socket.setsockopt(zmq.LINGER, 0)  # as the client: else what was not read holds up the end of the context
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        socket.bind(f"ipc://{tmp_path}/s")
        yield socket


class Writer(threading.Thread):
    """Puts numbered messages as fast as it may."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__(daemon=True)
        self.num_put = 0
        self._outbox = outbox
        self.start()

    def run(self) -> None:
        for number in range(NUM_MESSAGES):
            self._outbox.put(Progress(f"{number}".ljust(SIZE)))
            self.num_put = number + 1

    def standstill(self) -> int:
        """Messages put when it goes on no more."""
        deadline = time.monotonic() + 10
        before = -1
        while self.num_put != before:
            assert time.monotonic() < deadline
            before = self.num_put
            time.sleep(0.1)
        return before


def test_a_reader_that_does_not_read_is_waited_for_and_misses_nothing(reader: zmq.Socket[bytes]) -> None:
    outbox = Outbox(reader.getsockopt_string(zmq.LAST_ENDPOINT))
    writer = Writer(outbox)
    # outbox, sender, receiver, and what the system holds of a socket
    assert MAX_MESSAGES <= writer.standstill() <= 3 * MAX_MESSAGES + 100
    for number in range(NUM_MESSAGES):
        message = to_client.decode(reader.recv())
        assert isinstance(message, Progress)
        assert int(message.text) == number
    writer.join(10)
    assert writer.num_put == NUM_MESSAGES
    outbox.close()


def test_nobody_waits_for_a_reader_that_is_gone(reader: zmq.Socket[bytes]) -> None:
    outbox = Outbox(reader.getsockopt_string(zmq.LAST_ENDPOINT))
    writer = Writer(outbox)
    assert writer.standstill() < NUM_MESSAGES
    outbox.abandon()
    writer.join(10)
    assert writer.num_put == NUM_MESSAGES
    assert not outbox._messages
    for _ in range(MAX_MESSAGES):  # so that the output thread, which may wait for room, ends with the test
        reader.recv()
    outbox.close()
