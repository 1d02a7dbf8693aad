"""The life of a server: start, serve, drain, end.

engine loads ─► listen ─► serve ──┬─ SIGTERM, SIGINT ─► drain: new requests get 503, running ones finish ─► exit 0
                                  │                     └ time is up, or a second signal: they fail ─► exit 0, 1
          │                       └─ the core died ─► everything open fails, /health says 503 ─► exit 1
          └─ SIGTERM, SIGINT ─► the core ends, too ─► exit 0
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any

import uvicorn

from lamella.engine.client import EngineClient
from lamella.engine.errors import OverloadedError, StartError
from lamella.engine.metrics import throughput_log
from lamella.engine.server.app import build_app
from lamella.engine.server.options import ServerOptions, bind, listen
from lamella.engine.server.protocol import HttpProtocol
from lamella.engine.server.state import ServerState
from lamella.engine.text.chat_template import ChatTemplate
from lamella.engine.text.tokenizer import Tokenizer

try:
    import uvloop
except ImportError:  # not made for every system
    uvloop = None

DEAD_GRACE_S = 1.0
"""How long a server whose core died still answers: with errors, so that the failure is seen as what it is."""
SEND_GRACE_S = 4.0
"""What clients get to read the rest of their answers, once all of it has been made and the server ends."""
KEEP_ALIVE_S = 75
"""Idle connections of clients that keep a pool."""

log = logging.getLogger("lamella.server")


def run_server(
    client_factory: Callable[[], EngineClient],
    tokenizer: Tokenizer,
    options: ServerOptions,
    *,
    template: ChatTemplate | None = None,
    sock: socket.socket | None = None,
    started: Callable[[ServerHandle], None] | None = None,
) -> int:
    """Serve until a signal or the core's death; returns the exit code.

    client_factory is called on the server's loop, and its client started there. sock: a socket from `bind`, so that
    the address is known to be free before the model is loaded; it is closed at the end. started: called once requests
    are taken. Raises StartError if the engine cannot start or the address cannot be listened on.
    """
    server = _HttpServer(options, sock if sock is not None else bind(options.host, options.port))
    with contextlib.closing(server.sock):
        return _run(server.serve_engine(client_factory, tokenizer, template or ChatTemplate(tokenizer), started))


class ServerHandle:
    """A running server, for the one that started it. Methods may be called from any thread."""

    def __init__(self, server: _HttpServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self.host, self.port = server.sock.getsockname()[:2]

    @property
    def url(self) -> str:
        """Where it answers."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def drain(self) -> None:
        """What SIGTERM does; a second time: end at once."""
        self._loop.call_soon_threadsafe(self._server.on_signal)


class _HttpServer(uvicorn.Server):
    """uvicorn's server, which goes on accepting while it drains, so that clients are told instead of refused."""

    def __init__(self, options: ServerOptions, sock: socket.socket) -> None:
        self.options = options
        self.sock = sock
        self._state: ServerState | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None
        self._code = 0
        self._stopped = asyncio.Event()
        """A signal came while the engine was loading."""

    async def serve_engine(
        self,
        client_factory: Callable[[], EngineClient],
        tokenizer: Tokenizer,
        template: ChatTemplate,
        started: Callable[[ServerHandle], None] | None,
    ) -> int:
        """The whole life."""
        self._loop = asyncio.get_running_loop()
        with self.capture_signals():
            client = client_factory()
            try:
                if await self._load(client):
                    await self._serve_loaded(client, tokenizer, template, started)
            finally:
                await client.close()
        return self._code

    async def _load(self, client: EngineClient) -> bool:
        """Wait until the engine is ready; False if a signal came before. Raises StartError."""
        waits = [asyncio.create_task(client.start()), asyncio.create_task(self._stopped.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if self._stopped.is_set():
                log.info("stopped while the engine was loading")
                return False
            await waits[0]
            return True
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _serve_loaded(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        started: Callable[[ServerHandle], None] | None,
    ) -> None:
        """From listening to the end of the last answer."""
        listen(self.sock)
        self._state = state = ServerState(client, tokenizer, template, self.options)
        super().__init__(_config(state))
        tasks = [asyncio.create_task(self._watch_core()), asyncio.create_task(self._report(started))]
        if self.options.log_stats:
            speculation = client.info.speculation
            rule = "standard" if speculation is None else speculation.rule
            log_stats = throughput_log.run(lambda: client.stats, self.options.stats_interval_s, rule)
            tasks.append(asyncio.create_task(log_stats))
        # what exists now lives as long as the server: collections need not look at it
        gc.collect()
        gc.freeze()
        try:
            await self.serve([self.sock])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            state.close()

    def on_signal(self) -> None:
        """Begin to drain; a second time: give up what runs. Before there is anything to drain: end."""
        if self._state is None:
            self._stopped.set()
        elif self._drain is None:
            assert self._loop is not None
            self._drain = self._loop.create_task(self._drain_requests())
        elif not self.should_exit:
            self._code = 1
            self._give_up("the server was stopped")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ours instead of uvicorn's: a signal drains, and is not raised again at the end."""
        loop = asyncio.get_running_loop()

        def handle(_signal: int, _frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(self.on_signal)

        before = {}
        with contextlib.suppress(ValueError):  # not on the main thread
            for number in (signal.SIGINT, signal.SIGTERM):
                before[number] = signal.signal(number, handle)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, but who does not read in time is hung up on, where it would cancel requests in the middle."""
        timer = asyncio.get_running_loop().call_later(SEND_GRACE_S, self._hang_up)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def _hang_up(self) -> None:
        connections = list(self.server_state.connections)
        if connections:
            log.warning("hanging up on %d clients that do not read their answers", len(connections))
        for connection in connections:
            connection.transport.abort()

    async def _report(self, started: Callable[[ServerHandle], None] | None) -> None:
        while not self.started:
            await asyncio.sleep(0.005)
        assert self._loop is not None
        handle = ServerHandle(self, self._loop)
        log.info("serving %s on %s", ", ".join(self.options.served_names), handle.url)
        if started is not None:
            started(handle)

    async def _watch_core(self) -> None:
        assert self._state is not None
        reason = await self._state.client.wait_dead()
        if self._state.draining and not self._state.client.num_lost:
            self.should_exit = True  # it was told to end as we were
            return
        log.error("the engine core ended: %s", reason)
        self._code = 1
        await asyncio.sleep(DEAD_GRACE_S)
        self.should_exit = True

    async def _drain_requests(self) -> None:
        assert self._state is not None
        self._state.draining = True
        client = self._state.client
        log.info("draining: %d requests run, they have %.0f s", client.num_requests, self.options.drain_timeout_s)
        assert self._loop is not None
        end_s = self._loop.time() + self.options.drain_timeout_s
        while client.num_requests and not self.should_exit and client.dead is None:
            if self._loop.time() >= end_s:
                self._give_up("the server shuts down")
                return
            await asyncio.sleep(0.02)
        self.should_exit = True

    def _give_up(self, reason: str) -> None:
        assert self._state is not None
        self._state.client.fail_all(OverloadedError(reason, retry_after_s=5))
        self.should_exit = True


def _config(state: ServerState) -> uvicorn.Config:
    return uvicorn.Config(
        build_app(state),
        http=HttpProtocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(SEND_GRACE_S) + 2,
    )


def _run(main: Coroutine[Any, Any, int]) -> int:
    return uvloop.run(main) if uvloop is not None else asyncio.run(main)


__all__ = ["ServerHandle", "StartError", "run_server"]
