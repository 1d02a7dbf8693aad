"""The requests of one HTTP request while they run: one for each prompt, n choices for each request.

choice index = prompt index · n + sequence index
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Receive

from lamella.engine.errors import EngineError, OverloadedError, RequestError
from lamella.engine.generation import Generation, Usage
from lamella.engine.request import Request
from lamella.engine.server.body import ClientGone
from lamella.engine.server.state import ServerState
from lamella.engine.text.output import Piece

FAILURES: dict[int, type[EngineError]] = {400: RequestError, 503: OverloadedError}
"""By Delta.error_status."""


class Job:
    """Submitted by the constructor, which raises OverloadedError if the queue is full. Must be closed."""

    def __init__(self, state: ServerState, requests: list[Request], arrival_s: float) -> None:
        self._state = state
        self.generations = [Generation(request, state.tokenizer, arrival_s) for request in requests]
        self.num_choices = sum(request.params.n for request in requests)
        self._places: dict[str, tuple[int, Generation]] = {}
        first = 0
        for generation in self.generations:
            self._places[generation.request.request_id] = (first, generation)
            first += generation.request.params.n
        self._stream = state.client.submit(*requests)
        self._gone = False

    @property
    def usage(self) -> Usage:
        """Tokens of all requests so far."""
        usage = Usage()
        for generation in self.generations:
            usage = usage.plus(generation.usage)
        return usage

    async def take(self, timeout_s: float | None = None) -> list[tuple[int, Piece]]:
        """(choice index, piece) of what has come; waits for something. Empty at the end.

        Raises ClientGone after a disconnect, EngineError if a sequence failed, TimeoutError if nothing comes in time.
        """
        while True:
            deltas = await self._stream.take(timeout_s)
            if self._gone:
                raise ClientGone
            if not deltas:
                return []
            now_s = self._state.clock()
            counters = self._state.counters
            events: list[tuple[int, Piece]] = []
            for delta in deltas:
                first, generation = self._places[delta.request_id]
                before_s = generation.times[delta.index].last_s
                piece = generation.push(delta, now_s)
                if piece is None:
                    continue
                if piece.still_runs:
                    self._stream.stop(delta.request_id, delta.index)
                if before_s is not None and delta.token_ids:
                    counters.gap_s.observe(now_s - before_s)
                if piece.finish_reason is not None:
                    counters.on_end(generation, delta.index)
                if delta.error is not None:
                    raise FAILURES.get(delta.error_status, EngineError)(delta.error)
                events.append((first + delta.index, piece))
            if events:
                return events

    async def finish(self, receive: Receive) -> None:
        """Run to the end; the generations then hold everything, and the job is closed. Raises as `take` does."""
        watch = watch_disconnect(receive, self.disconnect)
        try:
            while await self.take():
                pass
        finally:
            self.close()
            watch.cancel()

    def disconnect(self) -> None:
        """The client is gone: what runs is aborted, and `take` raises."""
        if not self._gone:
            self._gone = True
            self._stream.close()

    def close(self) -> None:
        """End what still runs, and count it as aborted."""
        self._stream.close()
        for generation in self.generations:
            for output in generation.outputs:
                if output.finish_reason is None:
                    self._state.counters.finished["abort"] += 1


def watch_disconnect(receive: Receive, gone: Callable[[], None]) -> asyncio.Task[None]:
    """Call `gone` when the client closes the connection. The body must have been read. Cancel the task at the end."""

    async def wait() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone()

    return asyncio.create_task(wait())
