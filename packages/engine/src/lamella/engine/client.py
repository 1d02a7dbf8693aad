"""The asyncio side of the engine: submits requests to a core and hands out what it answers.

    submit ──► Add ──► link ──► core
    DeltaStream ◄── one slot per sequence ◄── Batch ◄── link

A stream keeps at most one delta per sequence: when its reader lags, later deltas are merged into the waiting one, so
that a slow reader costs memory for its tokens and nothing else. All deltas of a step are put in one turn of the loop.

Invariants: every open request is in `_streams` until all its sequences have ended, were stopped or the core died;
`_num_open` is the number of their sequences that have not ended. When the core dies every stream and call fails with
EngineDeadError at once, and nothing can be submitted any more. A core that hangs is given up as if it had died.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Protocol

from lamella.engine.errors import EngineDeadError, EngineError, OverloadedError, RequestError, StartError
from lamella.engine.request import Delta, Request
from lamella.engine.wire import (
    Abort,
    Add,
    Batch,
    Call,
    CallResult,
    CoreInfo,
    Dead,
    Progress,
    Ready,
    Stats,
    ToClient,
    ToCore,
    sequence_id,
)

MAX_RETRY_AFTER_S = 60
CLOSED = "the engine was closed"
NUM_CHECKS = 10
"""So often within step_timeout_s it is looked whether the core still speaks."""
DUMP_GRACE_S = 1.0
"""What a core that seems to hang gets to write its stacks, or to speak after all."""


class CoreLink(Protocol):
    """A road to one engine core. The calls belong to the thread of the loop that it was opened on."""

    def open(
        self, loop: asyncio.AbstractEventLoop, receive: Callable[[ToClient], None], lost: Callable[[str], None]
    ) -> None:
        """Start delivering: `receive` for each message and, when the core ended without a Dead, `lost` with the
        reason; both are called on the loop."""

    def send(self, message: ToCore) -> None:
        """Pass a message on without blocking. To a core that ended: nothing happens, `lost` tells."""

    def dump_stacks(self) -> None:
        """Have the core write the stacks of its threads to standard error, if it still can; returns at once."""

    def detach(self) -> None:
        """Deliver nothing more."""

    def close(self, timeout_s: float) -> None:
        """End the core, by force after timeout_s, and free what the road holds. After detach; blocks, on any thread;
        safe to repeat."""


class EngineClient:
    """One client of one core.

    `start()` waits until the model is loaded; then `submit`, `abort` and `call` work until `dead` says why not.
    """

    def __init__(
        self,
        link: CoreLink,
        *,
        max_queued: int | None = None,
        progress: Callable[[str], None] | None = None,
        step_timeout_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """max_queued: requests that may wait while the core has its hands full; None: no limit. step_timeout_s: a core
        that has work and says nothing for so long counts as hung; 0: never."""
        self.stats = Stats()
        self.dead: str | None = None
        self.num_lost = 0
        """Requests that the core's death failed."""
        self.observers: list[Callable[[Batch], None]] = []
        """Called with each batch, after its deltas have been put into their streams."""
        self._link = link
        self._max_queued = max_queued
        self._progress = progress
        self._step_timeout_s = step_timeout_s
        self._clock = clock
        self._info: CoreInfo | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: asyncio.Future[CoreInfo] | None = None
        self._died = asyncio.Event()
        self._closed = False
        self._streams: dict[str, DeltaStream] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._next_call = 0
        self._num_open = 0
        self._mean_request_s = 1.0
        self._heard = False
        """Something came since the last check."""
        self._num_silent = 0
        """Checks in a row that found work and heard nothing."""
        self._hung = False

    async def start(self) -> CoreInfo:
        """Open the road and wait until the core is ready. Raises StartError with the core's reason if it cannot.

        Safe to repeat. The client then belongs to the loop that it was started on.
        """
        self._check_alive()
        if self._ready is None:
            self._loop = asyncio.get_running_loop()
            self._ready = self._loop.create_future()
            self._link.open(self._loop, self._receive, self._lost)
        self._check_loop()
        return await asyncio.shield(self._ready)

    @property
    def info(self) -> CoreInfo:
        """Values that the core fixed while it started."""
        if self._info is None:
            raise EngineError("the engine has not started yet")
        return self._info

    @property
    def num_open(self) -> int:
        """Sequences that were submitted and have not ended."""
        return self._num_open

    @property
    def num_requests(self) -> int:
        """Requests with a sequence that has not ended."""
        return len(self._streams)

    def admit(self, *num_sequences: int) -> None:
        """Raise OverloadedError if more requests, of so many sequences each, would overfill the queue; an idle engine
        takes any number."""
        self._check_alive()
        if self._max_queued is None or not self._num_open:
            return
        excess = self._num_waiting(num_sequences) - self._max_queued
        if excess > 0:
            num_waiting, max_num_seqs = self._num_waiting(), self.info.max_num_seqs
            wait_s = math.ceil(self._mean_request_s * excess / max_num_seqs)
            raise OverloadedError(
                f"the queue is full: {num_waiting} {'request waits' if num_waiting == 1 else 'requests wait'} behind "
                f"{len(self._streams) - num_waiting} that may run, {self._max_queued} may wait",
                retry_after_s=min(max(wait_s, 1), MAX_RETRY_AFTER_S),
            )

    def _num_waiting(self, more: Sequence[int] = ()) -> int:
        """Requests that the core has no room for, if it serves them as they came and `more` of so many sequences come.

        The first whose sequences do not all fit into max_num_seqs waits, and with it all behind it.
        """
        room = self.info.max_num_seqs
        opened = (stream.num_open_of(request_id) for request_id, stream in self._streams.items())
        for num_fitting, num_sequences in enumerate(itertools.chain(opened, more)):
            room -= num_sequences
            if room < 0:
                return len(self._streams) + len(more) - num_fitting
        return 0

    def submit(self, *requests: Request) -> DeltaStream:
        """Send requests, all or none, and return the stream of what becomes of them.

        Raises what the encoder raises of values that cannot cross to the core; nothing of the requests is left then.
        """
        self.admit(*(request.params.n for request in requests))
        self._check_loop()
        for request in requests:
            if request.request_id in self._streams:
                raise RequestError(f"request id {request.request_id!r} is in use", "request_id")
        stream = DeltaStream(self, requests, self._clock())
        for request in requests:
            self._streams[request.request_id] = stream
            self._num_open += request.params.n
        try:
            for request in requests:
                self._link.send(Add(request))
        except BaseException:
            stream.close()
            raise
        return stream

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests wherever they are; their streams end without a finish reason. Unknown ids are ignored."""
        for request_id in list(request_ids):
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.close(request_id)

    async def call(self, method: str, args: dict[str, Any] | None = None) -> Any:
        """Run an operation in the core between two steps. Raises EngineError with the core's message if it fails."""
        self._check_alive()
        self._check_loop()
        self._next_call += 1
        call_id = self._next_call
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = result
        try:
            self._link.send(Call(call_id, method, args or {}))
            return await result
        finally:
            self._calls.pop(call_id, None)

    async def wait_dead(self) -> str:
        """Return the reason once the core has died."""
        await self._died.wait()
        return self.dead or ""

    def fail_all(self, error: EngineError) -> None:
        """End every open stream with an error, and the requests in the core."""
        streams = set(self._streams.values())
        for stream in streams:
            stream.fail(error)

    async def close(self, timeout_s: float = 10.0) -> None:
        """End the core; every open stream and call, and a start that still waits, fail."""
        self._closed = True
        error = EngineError(CLOSED)
        self.fail_all(error)
        self._fail_futures(error, error)
        self._link.detach()
        # one that hangs will not end by itself
        await asyncio.get_running_loop().run_in_executor(None, self._link.close, 0.0 if self._hung else timeout_s)

    def _receive(self, message: ToClient) -> None:
        self._heard = True
        if isinstance(message, Batch):
            for delta in message.deltas:
                stream = self._streams.get(delta.request_id)
                if stream is not None:
                    stream.put(delta)
            if message.stats is not None:
                self.stats = message.stats
            for observer in self.observers:
                observer(message)
        elif isinstance(message, CallResult):
            result = self._calls.pop(message.call_id, None)
            if result is not None and not result.done():
                if message.error is None:
                    result.set_result(message.value)
                else:
                    result.set_exception(EngineError(message.error))
        elif isinstance(message, Ready):
            self._info = message.info
            assert self._ready is not None
            if not self._ready.done():
                self._ready.set_result(message.info)
            if self._step_timeout_s:
                self._check_later()
        elif isinstance(message, Progress):
            if self._progress is not None:
                self._progress(message.text)
        else:
            assert isinstance(message, Dead)
            self._die(message.reason, message.reason)

    def _check_later(self) -> None:
        """Checks are counted, not seconds: a client that stood still itself must not blame its core for it."""
        assert self._loop is not None
        grace_s = DUMP_GRACE_S if self._num_silent > NUM_CHECKS else math.inf
        self._loop.call_later(min(self._step_timeout_s / NUM_CHECKS, grace_s), self._check_core)

    def _check_core(self) -> None:
        if self.dead is not None or self._closed:
            return
        if self._heard:
            self._num_silent = 0
        elif self._streams or self._calls:
            self._num_silent += 1
        self._heard = False
        if self._num_silent == NUM_CHECKS + 1:
            self._link.dump_stacks()
        elif self._num_silent > NUM_CHECKS + 1:
            self._hung = True
            reason = f"it hangs: no step in {self._step_timeout_s:g} s, though {len(self._streams)} requests wait"
            self._die(f"{reason}; where it stands is on standard error", reason)
            return
        self._check_later()

    def _lost(self, reason: str) -> None:
        self._die(reason, f"the engine core ended before it was ready: {reason}")

    def _die(self, reason: str, of_start: str) -> None:
        if self.dead is not None:
            return
        self.dead = reason
        self.num_lost = len(self._streams)
        self._died.set()
        self.fail_all(EngineDeadError(f"the engine core ended: {reason}"))
        self._fail_futures(StartError(of_start), EngineDeadError(reason))

    def _fail_futures(self, of_start: EngineError, of_calls: EngineError) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(of_start)
            self._ready.exception()  # all who waited may have given up
        calls, self._calls = self._calls, {}
        for result in calls.values():
            if not result.done():
                result.set_exception(of_calls)

    def _check_alive(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        if self._closed:
            raise EngineError(CLOSED)

    def _check_loop(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise EngineError("this engine was started on another event loop, and only answers there")

    def _ended(self, request_id: str, num_sequences: int, *, whole: bool, started_s: float) -> None:
        """Books for sequences of a request that ended; `whole` when none of it is open any more."""
        self._num_open -= num_sequences
        if whole:
            del self._streams[request_id]
            self._mean_request_s += 0.1 * (self._clock() - started_s - self._mean_request_s)

    def _abort(self, names: list[str]) -> None:
        if self.dead is None:
            self._link.send(Abort(names))


class DeltaStream:
    """What becomes of the requests of one submit: deltas, merged per sequence while nobody takes them.

    Iterate over it, or `take()` all that waits. It ends when every sequence has ended. Leaving it early without
    `close()` leaves the requests running.
    """

    __slots__ = ("_client", "_error", "_open", "_pending", "_started_s", "_waiter")

    def __init__(self, client: EngineClient, requests: tuple[Request, ...], started_s: float) -> None:
        self._client = client
        self._open = {request.request_id: set(range(request.params.n)) for request in requests}
        self._pending: dict[tuple[str, int], Delta] = {}
        self._error: EngineError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._started_s = started_s

    @property
    def num_open(self) -> int:
        """Sequences that have not ended."""
        return sum(len(indices) for indices in self._open.values())

    def num_open_of(self, request_id: str) -> int:
        """Those of one request."""
        return len(self._open[request_id])

    async def take(self, timeout_s: float | None = None) -> list[Delta]:
        """All waiting deltas, at most one per sequence; waits for one. Empty when everything has ended.

        Raises EngineDeadError (or the error given to `fail`) once the deltas that came before it are taken, and
        TimeoutError if none comes within timeout_s.
        """
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self._open:
                return []
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = None if timeout_s is None else loop.call_later(timeout_s, self._expire)
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        deltas = list(self._pending.values())
        self._pending.clear()
        return deltas

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while deltas := await self.take():
            for delta in deltas:
                yield delta

    def stop(self, request_id: str, index: int) -> None:
        """This sequence is over for the reader (a stop string was found): end it in the core if it still runs."""
        self._pending.pop((request_id, index), None)
        if index in self._open.get(request_id, ()):
            self._end(request_id, {index})
            self._client._abort([sequence_id(request_id, index)])

    def close(self, request_id: str | None = None) -> None:
        """End one or all requests in the core, as far as they run; what waits to be taken is dropped."""
        names = [request_id] if request_id is not None else list(self._open)
        aborted = [name for name in names if name in self._open]
        for name in aborted:
            self._end(name, set(self._open[name]))
        for key in [key for key in self._pending if request_id is None or key[0] == request_id]:
            del self._pending[key]
        if aborted:
            self._client._abort(aborted)
        self._wake()

    def fail(self, error: EngineError) -> None:
        """End all requests in the core; the reader gets the error behind what already waits."""
        self._error = error
        aborted = list(self._open)
        for name in aborted:
            self._end(name, set(self._open[name]))
        if aborted:
            self._client._abort(aborted)
        self._wake()

    def put(self, delta: Delta) -> None:
        """A delta came; those of sequences that have ended for the reader are dropped."""
        indices = self._open.get(delta.request_id)
        if indices is None or delta.index not in indices:
            return
        key = (delta.request_id, delta.index)
        waiting = self._pending.get(key)
        if waiting is None:
            self._pending[key] = delta
        else:
            merge(waiting, delta)
        if delta.finish_reason is not None:
            self._end(delta.request_id, {delta.index})
        self._wake()

    def _end(self, request_id: str, ended: set[int]) -> None:
        indices = self._open[request_id]
        indices -= ended
        if not indices:
            del self._open[request_id]
        self._client._ended(request_id, len(ended), whole=not indices, started_s=self._started_s)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _expire(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(TimeoutError())


def merge(into: Delta, later: Delta) -> None:
    """Append a later delta of the same sequence to one that nobody has read yet."""
    into.token_ids.extend(later.token_ids)
    into.accepted_drafts += later.accepted_drafts
    into.rejected_drafts += later.rejected_drafts
    if later.logprobs is not None:
        into.logprobs = (into.logprobs or []) + later.logprobs
    if later.prompt_logprobs is not None:
        into.prompt_logprobs = later.prompt_logprobs
    into.finish_reason = later.finish_reason
    into.stop_reason = later.stop_reason
    into.error, into.error_status = later.error, later.error_status
