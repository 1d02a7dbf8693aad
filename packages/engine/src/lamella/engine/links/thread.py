"""A road to an engine core on a thread of this process."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import threading
from collections.abc import Callable

from lamella.engine.core_loop import Core, CoreCrash, CoreLoop, Inbox
from lamella.engine.errors import EngineError
from lamella.engine.wire import Dead, Progress, ToClient, ToCore

MAX_MESSAGES = 64
"""Told and not delivered: beyond it the core waits for the loop."""

log = logging.getLogger("lamella.core")


class ThreadLink:
    """Builds the core on its own thread when it is opened, and runs it there."""

    def __init__(self, build: Callable[[Callable[[str], None]], Core]) -> None:
        """build: called with a function that reports progress."""
        self._build = build
        self._inbox = Inbox()
        self._thread = threading.Thread(target=self._run, name="engine-core", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._receive: Callable[[ToClient], None] | None = None
        self._detached = False
        self._room = threading.Semaphore(MAX_MESSAGES)

    def open(
        self, loop: asyncio.AbstractEventLoop, receive: Callable[[ToClient], None], lost: Callable[[str], None]
    ) -> None:
        """Start the thread. A thread cannot end without a word, so `lost` is not needed."""
        self._loop, self._receive = loop, receive
        self._thread.start()

    def send(self, message: ToCore) -> None:
        """Queue a message."""
        self._inbox.put(message)

    def dump_stacks(self) -> None:
        """The stacks of this whole process."""
        faulthandler.dump_traceback(file=2)

    def detach(self) -> None:
        """Deliver nothing more."""
        self._detached = True
        self._room.release()  # the core may be waiting for a loop that runs no more

    def close(self, timeout_s: float) -> None:
        """End the loop and wait for the thread; a thread that does not end in time stays behind as a daemon."""
        self._inbox.close()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            core = self._build(lambda text: self._emit(Progress(text)))
        except Exception as error:
            expected = isinstance(error, (EngineError, OSError)) or type(error).__module__.startswith("lamella.")
            if not expected:
                log.exception("the engine core could not start")
            self._emit(Dead(str(error) if expected else f"{type(error).__name__}: {error}"))
            return
        try:
            CoreLoop(core, self._inbox, self._emit).run()
        except CoreCrash:
            log.exception("the engine core crashed")
        else:
            self._emit(Dead("it was closed"))

    def _emit(self, message: ToClient) -> None:
        assert self._loop is not None
        self._room.acquire()
        if self._detached:
            self._room.release()
            return
        try:
            self._loop.call_soon_threadsafe(self._deliver, message)
        except RuntimeError:  # the loop may be closed by now
            self._room.release()

    def _deliver(self, message: ToClient) -> None:
        self._room.release()
        if not self._detached:
            assert self._receive is not None
            self._receive(message)
