"""The loop around an engine core: messages in, steps, messages out. It runs on one thread, in a process or beside
others; who moves the messages does not matter to it.

    inbox ──► handle ──► core.run_once() ──► emit
      ▲ blocks while the core has no work

A core that raises is over: the loop emits Dead with the reason and raises CoreCrash. While rounds have nothing to tell
(chunks of a long prompt), an empty batch says now and then that they are made.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any, Protocol

from lamella.engine.errors import EngineError
from lamella.engine.request import Delta, Request
from lamella.engine.wire import Abort, Add, Batch, Call, CallResult, CoreInfo, Dead, Ready, ToClient, ToCore

PULSE_S = 0.25
"""A core that works is silent for no longer, but for the time that a round takes."""


class Core(Protocol):
    """What the loop needs of an engine core."""

    @property
    def info(self) -> CoreInfo:
        """Values that are fixed from now on."""

    @property
    def has_work(self) -> bool:
        """A request has not ended, or something still has to be reported."""

    def add(self, request: Request) -> None:
        """A new request. What is wrong with it is reported in a delta, never raised."""

    def abort(self, request_ids: list[str]) -> None:
        """End these requests or sequences (see wire.Abort)."""

    def call(self, method: str, args: dict[str, Any]) -> Any:
        """An operation between steps. Raises EngineError for an unknown method or bad arguments."""

    def run_once(self) -> Batch | None:
        """One round: plan, execute, commit. None when nothing is to be told."""

    def close(self) -> None:
        """Free the devices."""


class CoreCrash(Exception):
    """The core raised something that is not an answer; its reason has been emitted."""


class Inbox:
    """Messages to the core, and the wish to end. Every method may be called from any thread or signal handler."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[ToCore | None] = queue.SimpleQueue()
        self.draining = False
        self.closed = False

    def put(self, message: ToCore) -> None:
        """Append a message."""
        self._queue.put(message)

    def drain(self) -> None:
        """From now on requests are refused; the loop ends when the running ones have."""
        self.draining = True
        self._queue.put(None)

    def close(self) -> None:
        """The loop ends before the next step."""
        self.closed = True
        self._queue.put(None)

    def take(self, *, wait: bool, timeout_s: float | None = None) -> list[ToCore] | None:
        """All messages. With `wait`, blocks until something happens; None if that takes longer than timeout_s."""
        messages: list[ToCore] = []
        try:
            first = self._queue.get(wait, timeout_s)
        except queue.Empty:
            return None if wait else messages
        try:
            while True:
                if first is not None:
                    messages.append(first)
                first = self._queue.get_nowait()
        except queue.Empty:
            return messages


class CoreLoop:
    """Runs a core until its inbox is closed, or is drained and nothing is left to do."""

    def __init__(
        self,
        core: Core,
        inbox: Inbox,
        emit: Callable[[ToClient], None],
        *,
        linger_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """linger_s: what a drained loop without work waits for its client to end it, refusing requests meanwhile."""
        self._core = core
        self._inbox = inbox
        self._emit = emit
        self._linger_s = linger_s
        self._clock = clock

    def run(self) -> None:
        """Emit Ready, then work. Closes the core at the end, whatever the end is."""
        core, inbox, emit, clock = self._core, self._inbox, self._emit, self._clock
        try:
            emit(Ready(core.info))
            told_s = clock()
            while not inbox.closed:
                timeout_s = self._linger_s if inbox.draining else None
                messages = inbox.take(wait=not core.has_work, timeout_s=timeout_s)
                if messages is None:
                    break
                for message in messages:
                    self._handle(message)
                if core.has_work and not inbox.closed:
                    batch = core.run_once()
                    now_s = clock()
                    if batch is not None or now_s - told_s >= PULSE_S:
                        emit(batch or Batch([]))
                        told_s = now_s
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            emit(Dead(reason))
            raise CoreCrash(reason) from error
        finally:
            core.close()

    def _handle(self, message: ToCore) -> None:
        if isinstance(message, Add):
            if self._inbox.draining:
                request = message.request
                refused = [
                    Delta(request.request_id, index, [], "abort", error="the engine shuts down", error_status=503)
                    for index in range(request.params.n)
                ]
                self._emit(Batch(refused))
            else:
                self._core.add(message.request)
        elif isinstance(message, Abort):
            self._core.abort(message.request_ids)
        else:
            self._call(message)

    def _call(self, call: Call) -> None:
        value = None
        try:
            if call.method == "shutdown":
                self._inbox.close()
            elif call.method == "drain":
                self._inbox.drain()
            elif call.method != "ping":
                value = self._core.call(call.method, call.args)
        except EngineError as error:
            self._emit(CallResult(call.call_id, error=str(error)))
        else:
            self._emit(CallResult(call.call_id, value))
