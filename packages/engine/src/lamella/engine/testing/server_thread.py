"""A real server on a free loopback port, on a thread of this process."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from lamella.engine.client import CoreLink, EngineClient
from lamella.engine.core_loop import Core
from lamella.engine.errors import EngineError
from lamella.engine.links.thread import ThreadLink
from lamella.engine.server.options import ServerOptions
from lamella.engine.server.run import ServerHandle, run_server
from lamella.engine.testing.byte_tokenizer import byte_tokenizer
from lamella.engine.text.tokenizer import Tokenizer

MODEL = "scripted"


class ServerThread:
    """Runs until it is drained, or its core dies; `code` is then the exit code."""

    def __init__(
        self,
        link: Callable[[], CoreLink],
        *,
        tokenizer: Tokenizer | None = None,
        max_queued: int | None = None,
        **options: Any,
    ) -> None:
        """link: makes the road to the core; options: fields of ServerOptions."""
        self.code: int | None = None
        self.client: EngineClient | None = None
        """For looking at; its methods belong to the server's thread."""
        self._tokenizer = tokenizer or byte_tokenizer()
        self._link = link
        self._max_queued = max_queued
        self._options = ServerOptions(**{"served_names": (MODEL,), "port": 0, "log_stats": False, **options})
        self._started: queue.SimpleQueue[ServerHandle | EngineError] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._thread.start()
        handle = self._started.get(timeout=60)
        if isinstance(handle, EngineError):
            raise handle
        self.handle = handle

    @property
    def url(self) -> str:
        """Where it answers."""
        return self.handle.url

    def stop(self) -> int:
        """Drain; returns the exit code."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it ended meanwhile
                self.handle.drain()
        return self.wait()

    def wait(self, timeout_s: float = 30.0) -> int:
        """Wait until it has ended by itself; returns the exit code."""
        self._thread.join(timeout_s)
        assert self.code is not None, "the server did not end"
        return self.code

    def _make_client(self) -> EngineClient:
        self.client = EngineClient(self._link(), max_queued=self._max_queued)
        return self.client

    def _run(self) -> None:
        try:
            self.code = run_server(self._make_client, self._tokenizer, self._options, started=self._started.put)
        except EngineError as error:  # it could not start, which the constructor raises
            self._started.put(error)


@contextlib.contextmanager
def serve(core: Core, **options: Any) -> Iterator[ServerThread]:
    """A server over a core that runs on a thread of its own."""
    server = ServerThread(lambda: ThreadLink(lambda _progress: core), **options)
    try:
        yield server
    finally:
        server.stop()
