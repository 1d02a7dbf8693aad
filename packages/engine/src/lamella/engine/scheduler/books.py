"""Where every sequence is: the state that planning and committing share.

                         loading                              a lower tier brings part of the prompt
                           ▲ │
                           │ ▼
    request ─▶ parked ─▶ waiting ─▶ prefilling ─▶ decoding ─▶ gone
                            ▲            │            │
                            └── draining ◀────────────┘       preempted or aborted with steps in flight

parked: siblings of a sequence that computes their common prompt. A sequence that left prefilling or decoding is still
in the list until the next sweep().
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import msgspec

from lamella.engine.request import Delta, FinishReason, Request, SamplingParams, draft_limit
from lamella.engine.scheduler.config import SchedulerConfig
from lamella.engine.scheduler.loading import Loading
from lamella.engine.scheduler.policy import POLICIES
from lamella.engine.scheduler.queues import WaitingQueue
from lamella.engine.scheduler.rows import Rows
from lamella.engine.sequence import NO_STEP, Sequence, Siblings, State, make_chain
from lamella.engine.wire import Stats
from lamella.kvtier import TierManager
from lamella.specdec import AcceptanceStats, AdaptiveLength, LengthStats


class InFlight(NamedTuple):
    """A planned step whose result has not come, in batch order."""

    step_id: int
    sequences: list[Sequence]
    query_lens: tuple[int, ...]
    verify_lens: tuple[int, ...]


class Books:
    """Sequences by place, device rows, steps in flight, counters."""

    def __init__(
        self,
        config: SchedulerConfig,
        manager: TierManager,
        clock: Callable[[], float],
        draw_seed: Callable[[], int],
    ) -> None:
        self.config = config
        self.manager = manager
        self.clock = clock
        self.policy = POLICIES[config.policy]
        self.rows = Rows(config.max_num_seqs)
        self.waiting = WaitingQueue()
        self.loading = Loading(manager, clock, config.patience)
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.draining: list[Sequence] = []
        self.requests: dict[str, Siblings] = {}
        """Those with a sequence that has not ended for the client."""
        self.in_flight: deque[InFlight] = deque()
        self.committed_step = NO_STEP
        self.stats = Stats()
        """All but the gauges and what acceptance holds."""
        self.acceptance = AcceptanceStats()
        self.lengths = LengthStats()
        methods = config.draft_methods or ("",)
        self.method_drafts = dict.fromkeys(methods, 0)
        """Method -> draft tokens of it that were verified, and how many of them stood."""
        self.method_accepted = dict.fromkeys(methods, 0)
        self.adaptive: AdaptiveLength | None = None
        """Which drafts are verified; None: all."""
        if config.max_num_drafts and config.draft_costs:
            self.adaptive = AdaptiveLength(config.draft_costs, len(methods))
        self._draw_seed = draw_seed
        self._num_parked = 0
        self._num_requests = 0
        self._num_sequences = 0
        self._unswept = False

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a row, parked and loading ones included."""
        return len(self.waiting) + len(self.loading) + self._num_parked

    @property
    def num_running(self) -> int:
        """Sequences that hold a row and go on; only exact after sweep()."""
        return len(self.prefilling) + len(self.decoding)

    # ---- entering --------------------------------------------------------------------------------------------------

    def add(self, request: Request, packed: array[int] | None = None) -> None:
        """Queue the n sequences of a request that has been checked. packed: its prompt's ids; None: they are packed
        here."""
        siblings = Siblings(request, self.clock(), packed)
        arrival = self._num_requests
        self._num_requests += 1
        caching = self.config.prefix_caching and request.use_prefix_cache
        for index in range(request.params.n):
            key = self.policy.key(request.priority, arrival, index)
            sequence = Sequence(siblings, index, self._num_sequences, key, self._draw_seed(), self.config.max_model_len)
            self._num_sequences += 1
            if caching:
                sequence.chain = make_chain(request, self.manager.block_size, self.config.key_lookahead)
            if self.config.max_num_drafts:
                self._limit_drafts(sequence, request.params)
            siblings.sequences.append(sequence)
        self.requests[request.request_id] = siblings
        # without a block to share, waiting for a sibling gains nothing
        shares = caching and len(request.prompt_ids) > self.manager.block_size
        if shares or siblings.prompt_entries is not None:
            siblings.parked = siblings.sequences[1:]
            self._num_parked += len(siblings.parked)
            self._queue(siblings.sequences[0])
        else:
            for sequence in siblings.sequences:
                self._queue(sequence)

    def unpark(self, siblings: Siblings) -> None:
        """The prompt is computed: the other sequences can take its blocks from the cache."""
        siblings.prompt_done = True
        for sequence in siblings.parked:
            self.waiting.push(sequence)
        self._num_parked -= len(siblings.parked)
        siblings.parked.clear()

    def take_loaded(self) -> None:
        """Who has been brought what a tier could bring, or has waited too long for it, waits for a row."""
        for sequence in self.loading.take_ended():
            self.waiting.push(sequence)

    # ---- leaving ---------------------------------------------------------------------------------------------------

    def finish(self, sequence: Sequence, *, discard: bool = False) -> None:
        """The sequence has ended: blocks and row are free at once, what steps in flight still compute is discarded.

        discard: its KV is suspect, nobody may hit it.
        """
        sequence.ghost = True
        if sequence.state is State.LOADING:
            self.loading.abandon(sequence)
        elif sequence.state is State.WAITING:
            self._finish_waiting(sequence)
        else:
            self._vacate(sequence, State.FINISHED, discard)
        self._end_for_client(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Preempted: blocks and row are free, ids stay, its turn comes again by its key. No step in flight has it."""
        assert sequence.last_step <= self.committed_step
        self._vacate(sequence, State.WAITING, sequence.suspect)
        self.waiting.push(sequence)

    def drain(self, sequence: Sequence) -> None:
        """Preempted or aborted while steps are in flight: it keeps blocks and row until they have committed."""
        sequence.move_to(State.DRAINING)
        self.draining.append(sequence)
        self._unswept = True

    def distrust(self, sequence_ids: Seq[int]) -> None:
        """A copy from the host failed, and these sequences read its target: back to the queue with the ids they had,
        and nobody hits what they have computed."""
        doubted = set(sequence_ids)
        for sequence in [*self.prefilling, *self.decoding, *self.draining]:
            if sequence.id not in doubted or sequence.suspect:
                continue
            sequence.suspect = True
            if sequence.state is State.RUNNING:
                if sequence.last_step > self.committed_step:
                    self.drain(sequence)
                else:
                    self.requeue(sequence)

    def abort(self, sequence: Sequence) -> None:
        """The client no longer wants it: no further delta, and its blocks are free once no step in flight has it."""
        if sequence.state is State.RUNNING and sequence.last_step > self.committed_step:
            sequence.ghost = True
            self.drain(sequence)
            self._end_for_client(sequence)
        elif sequence.state is State.DRAINING:
            sequence.ghost = True
            self._end_for_client(sequence)
        else:
            self.finish(sequence)

    def finish_draining(self) -> None:
        """Let go of those whose last step has committed."""
        still: list[Sequence] = []
        for sequence in self.draining:
            if sequence.state is not State.DRAINING:
                continue  # a stop rule ended it meanwhile
            if sequence.last_step > self.committed_step:
                still.append(sequence)
            elif sequence.ghost:
                self._vacate(sequence, State.FINISHED, sequence.suspect)
            else:
                self.requeue(sequence)
        self.draining = still

    def sweep(self) -> None:
        """Drop from the lists who has left them."""
        if self._unswept:
            self._unswept = False
            self.prefilling = [s for s in self.prefilling if s.state is State.RUNNING]
            self.decoding = [s for s in self.decoding if s.state is State.RUNNING]

    def snapshot(self) -> Stats:
        """Counters and gauges as they are now."""
        self.sweep()
        stats = self.stats
        stats.num_running = self.num_running
        stats.num_waiting = self.num_waiting
        stats.kv_usage = self.manager.in_use
        acceptance = self.acceptance
        unkept = self.config.max_num_drafts - len(acceptance.accepted_per_pos)
        return msgspec.structs.replace(
            stats,
            late_loads=self.loading.num_late,
            spec_drafts=acceptance.num_drafts,
            spec_draft_tokens=acceptance.num_draft_tokens,
            spec_accepted_tokens=acceptance.num_accepted_tokens,
            spec_accepted_per_pos=acceptance.accepted_per_pos + [0] * unkept,
            spec_lens=list(self.lengths.lens),
            spec_off=dict(self.lengths.off),
            spec_unverified_tokens=self.lengths.num_unverified,
            spec_method_draft_tokens={name: n for name, n in self.method_drafts.items() if name},
            spec_method_accepted_tokens={name: n for name, n in self.method_accepted.items() if name},
        )

    # ---- private ---------------------------------------------------------------------------------------------------

    def _limit_drafts(self, sequence: Sequence, params: SamplingParams) -> None:
        """What the request says about its drafts."""
        config = self.config
        sequence.max_drafts, sequence.never_drafts = draft_limit(
            params, config.max_num_drafts, exact=config.draft_rule_exact
        )
        if params.spec_method is not None:
            sequence.draft_method = config.draft_methods.index(params.spec_method)

    def _queue(self, sequence: Sequence) -> None:
        """Let it wait for a row; first for a tier below the host, if one holds part of its prompt and has room."""
        if not self.loading.begin(sequence):
            self.waiting.push(sequence)

    def _finish_waiting(self, sequence: Sequence) -> None:
        sequence.move_to(State.FINISHED)
        self.manager.end_load(sequence.id)
        parked = sequence.siblings.parked
        if sequence in parked:
            parked.remove(sequence)
            self._num_parked -= 1
        else:
            self.waiting.forget(sequence)

    def _vacate(self, sequence: Sequence, state: State, discard: bool) -> None:
        self.manager.release(sequence.id, sequence.last_step, discard=discard)
        self.rows.give_back(sequence.row, sequence.generation)
        sequence.leave(state)
        self._unswept = True

    def _end_for_client(self, sequence: Sequence) -> None:
        """Count it out; if it would have computed the prompt for its siblings, the next one does."""
        siblings = sequence.siblings
        siblings.num_live -= 1
        if siblings.num_live == 0:
            del self.requests[sequence.request_id]
        parked = siblings.parked
        if parked and not any(not s.ghost and s not in parked for s in siblings.sequences):
            self._num_parked -= 1
            self.waiting.push(parked.pop(0))


def ending(sequence: Sequence, reason: FinishReason, error: str | None = None) -> Delta:
    """The last delta of a sequence that gets no more tokens."""
    return Delta(sequence.request_id, sequence.index, [], reason, error=error)
