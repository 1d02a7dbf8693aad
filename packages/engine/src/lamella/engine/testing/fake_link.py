"""A road to a core without process or thread: the core steps when the test (or the loop, when idle) says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lamella.engine.core_loop import Core
from lamella.engine.wire import Abort, Add, CallResult, Dead, Ready, ToClient, ToCore


class FakeLink:
    """Satisfies client.CoreLink.

    With `automatic`, a step runs in each turn of the loop while the core has work; else `step()` runs one.
    """

    def __init__(self, core: Core, *, automatic: bool = True) -> None:
        self.core = core
        self.sent: list[ToCore] = []
        self.closed = False
        self.num_dumps = 0
        self._automatic = automatic
        self._scheduled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._receive: Callable[[ToClient], None] | None = None
        self._lost: Callable[[str], None] | None = None

    def open(
        self, loop: asyncio.AbstractEventLoop, receive: Callable[[ToClient], None], lost: Callable[[str], None]
    ) -> None:
        """Ready comes with the next turn of the loop."""
        self._loop, self._receive, self._lost = loop, receive, lost
        loop.call_soon(receive, Ready(self.core.info))

    def send(self, message: ToCore) -> None:
        """Hand the message to the core at once; answers come with a later turn of the loop."""
        assert self._loop is not None
        assert self._receive is not None
        self.sent.append(message)
        if isinstance(message, Add):
            self.core.add(message.request)
        elif isinstance(message, Abort):
            self.core.abort(message.request_ids)
        else:
            self._loop.call_soon(
                self._receive, CallResult(message.call_id, self.core.call(message.method, message.args))
            )
        self._schedule()

    def step(self) -> None:
        """Run one step and deliver its batch."""
        assert self._receive is not None
        batch = self.core.run_once()
        if batch is not None:
            self._receive(batch)

    def die(self, reason: str = "it was told to die", *, silently: bool = False) -> None:
        """The core ends, with a last word or without."""
        assert self._receive is not None
        assert self._lost is not None
        self._automatic = False
        if silently:
            self._lost(reason)
        else:
            self._receive(Dead(reason))

    def dump_stacks(self) -> None:
        """Count it."""
        self.num_dumps += 1

    def detach(self) -> None:
        """Deliver nothing more."""
        self._automatic = False

    def close(self, timeout_s: float) -> None:
        """Close the core."""
        del timeout_s
        if not self.closed:
            self.closed = True
            self.core.close()

    def _schedule(self) -> None:
        if self._automatic and not self._scheduled and self.core.has_work:
            assert self._loop is not None
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        if self._automatic and self.core.has_work:
            self.step()
            self._schedule()
